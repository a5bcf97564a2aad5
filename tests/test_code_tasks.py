"""The code tasks through lm-eval with a stub for the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from zaya_hf.evaluation import code_scoring, data
from zaya_hf.evaluation.code_execution import CONSENT, Outcome, Program
from zaya_hf.resources import resource

ITEMS = [
    {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def add(x):\n    """ Add {number}. """\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {number}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n",
    }
    for number in range(3)
]
MBPP = [
    {
        "task_id": number,
        "text": f"Write a function to add {number}.",
        "code": f"def add(x):\r\n  return x + {number}",
        "test_list": [f"assert add({x}) == {number + x}" for x in range(3)],
        "test_setup_code": "import math as setup" if number == 11 else "",
    }
    for number in (4, 2, 3, 1, 11, 12)
]


class Stub(LM):
    """Answers by a function of the item."""

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.answer = answer
        self.prompts: list[str] = []
        self.settings: list[dict[str, Any]] = []

    def generate_until(self, requests: Any) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        self.settings += [request.args[1] for request in requests]
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONSENT, "1")


@pytest.fixture
def _data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HumanEval as if fetched, and the Hub's sets as if cached."""
    file = tmp_path / "humaneval.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    monkeypatch.setattr("zaya_hf.evaluation.data.items_path", lambda name: {"humaneval": file}[name])
    plus = [
        {
            **item,
            "prompt": item["text"],
            "test": f"{item['test_list'][0]}\nassert add(1000) == {item['task_id']} + 1000",
        }
        for item in MBPP
    ]

    def load(path: str, name: str | None, split: str) -> Dataset:
        if path == "google-research-datasets/mbpp":
            assert name == "full"
            return Dataset.from_list(MBPP[:4] if split == "prompt" else MBPP[4:])
        found: Sequence[dict[str, Any]] = {"evalplus/humanevalplus": ITEMS, "evalplus/mbppplus": plus[4:]}[path]
        return Dataset.from_list(
            [{k: v for k, v in one.items() if k not in ("text", "test_setup_code")} for one in found]
        )

    monkeypatch.setattr("datasets.load_dataset", load)


def score(task: str, model: Stub, limit: int | None = None) -> dict[str, Any]:
    loaded = TaskManager(include_path=str(resource("eval", "tasks") / "code"), include_defaults=False).load([task])
    return evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=True, confirm_run_unsafe_code=True)


def fenced(item: dict[str, Any]) -> str:
    return f"Here you are:\n```python\n{item['prompt']}{item['canonical_solution']}```\nIt adds."


@pytest.mark.usefixtures("_allowed", "_data")
@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("zaya_humaneval", lambda item: item["canonical_solution"]),
        ("zaya_humaneval", fenced),
        ("zaya_humaneval_instruct", fenced),
        ("zaya_humaneval_plus", lambda item: item["canonical_solution"]),
        ("zaya_humaneval_plus_instruct", fenced),
        ("zaya_mbpp", lambda item: item["code"] + "\n[DONE]"),
        ("zaya_mbpp_plus", lambda item: f"```python\n{item['code']}\n```"),
    ],
)
def test_reference_solutions_pass(task: str, answer: Callable[[dict[str, Any]], str]) -> None:
    found = score(task, Stub(answer))
    assert found["results"][task]["pass@1,run_tests"] == 1.0
    assert all(sample["pass@1"] == 1.0 for sample in found["samples"][task])
    assert json.dumps([sample["filtered_resps"] for sample in found["samples"][task]])


@pytest.mark.slow
@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize(
    ("task", "answer"),
    [("zaya_humaneval", lambda item: item["canonical_solution"]), ("zaya_humaneval_instruct", fenced)],
)
def test_all_reference_solutions_of_humaneval_pass(task: str, answer: Callable[[dict[str, Any]], str]) -> None:
    if not data.is_fetched("humaneval"):
        pytest.skip("needs `zaya eval data humaneval`")
    found = score(task, Stub(answer))
    assert len(found["samples"][task]) == 164
    assert [one["filtered_resps"] for one in found["samples"][task] if one["pass@1"] != 1.0] == []
    assert found["results"][task]["pass@1,run_tests"] == 1.0


@pytest.mark.usefixtures("_allowed", "_data")
def test_wrong_answers_fail_one_by_one() -> None:
    found = score("zaya_humaneval", Stub(lambda item: "    return x + 1\n"))
    assert [sample["pass@1"] for sample in found["samples"]["zaya_humaneval"]] == [0.0, 1.0, 0.0]
    assert found["samples"]["zaya_humaneval"][0]["filtered_resps"][0][0]["message"].startswith("AssertionError")
    assert found["results"]["zaya_humaneval"]["pass@1,run_tests"] == pytest.approx(1 / 3)


@pytest.mark.usefixtures("_allowed", "_data")
def test_plus_tests_are_run() -> None:
    """An answer that knows the tests of the prompt, and no others."""
    cheat = Stub(lambda item: f"def add(x):\n    return x + {item['task_id']} if x < 3 else 0")
    assert score("zaya_mbpp", cheat)["results"]["zaya_mbpp"]["pass@1,run_tests"] == 1.0
    assert score("zaya_mbpp_plus", cheat)["results"]["zaya_mbpp_plus"]["pass@1,run_tests"] == 0.0


@pytest.mark.usefixtures("_allowed", "_data")
def test_prompts_and_settings() -> None:
    model = Stub(lambda item: "")
    score("zaya_mbpp", model)
    shots = "".join(
        f"You are an expert Python programmer, and here is your task: Write a function to add {number}. Your "
        f"code should pass these tests:\n\nassert add(0) == {number}\nassert add(1) == {number + 1}\n"
        f"assert add(2) == {number + 2}\n[BEGIN]\ndef add(x):\r\n  return x + {number}\n[DONE]\n\n"
        for number in (2, 3, 4)
    )
    assert model.prompts[0].startswith(shots + "You are an expert")
    assert "add 11." in model.prompts[0].removeprefix(shots)
    assert model.prompts[0].endswith("assert add(2) == 13\n[BEGIN]\n")
    base, chat = Stub(lambda item: ""), Stub(lambda item: "")
    score("zaya_humaneval", base)
    score("zaya_humaneval_instruct", chat)
    assert base.prompts == [item["prompt"] for item in ITEMS]
    assert base.settings[0]["max_gen_toks"] == 1024
    assert base.settings[0]["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    assert chat.settings[0]["until"] == []  # "\ndef" would end "```python\ndef"


@pytest.mark.usefixtures("_allowed", "_data")
def test_pass_at_k_of_several_answers() -> None:
    tries = iter(range(1000))
    model = Stub(lambda item: item["canonical_solution"] if next(tries) % 4 == 0 else "    return None\n")
    found = score("zaya_humaneval_64", model, limit=1)["results"]["zaya_humaneval_64"]
    # 16 of 64 are right: 1 - C(48, k) / C(64, k).
    assert found["pass@1,run_tests"] == pytest.approx(0.25)
    assert found["pass@2,run_tests"] == pytest.approx(1 - 48 * 47 / (64 * 63))
    assert found["pass@64,run_tests"] == 1.0
    assert [settings["do_sample"] for settings in model.settings[:1]] == [True]


@pytest.mark.usefixtures("_data")
def test_refused_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONSENT, raising=False)
    with pytest.raises(ValueError, match="--allow-code-execution"):
        score("zaya_humaneval", Stub(lambda item: item["canonical_solution"]))


@pytest.mark.usefixtures("_allowed", "_data")
def test_fault_of_the_machine_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Outcome("passed", "", 0.1), Outcome("error", "no processes left", 0.0), Outcome("passed", "", 0.1)]
    monkeypatch.setattr(code_scoring, "run_tests", lambda programs, timeout: broken)
    with pytest.raises(ValueError, match="1 of 3 programs could not be run, so there is no score: no processes left"):
        score("zaya_humaneval", Stub(lambda item: ""))


@pytest.mark.parametrize("task", ["zaya_mbpp", "zaya_humaneval_plus"])
def test_missing_data_is_one_line(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach it\non the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(
        ValueError, match="is not in the cache and cannot be fetched; run once with a network"
    ) as caught:
        TaskManager(include_path=str(resource("eval", "tasks") / "code"), include_defaults=False).load([task])
    assert "\n" not in str(caught.value)


def test_ranks_share_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks runs its half; all comes together in the order of the items."""
    run: list[str] = []

    def run_tests(programs: Sequence[Program], timeout: float) -> list[Outcome]:
        run.extend(program.source for program in programs)
        return [Outcome("passed", program.source, 0.1) for program in programs]

    def gather(parts: list[Any], mine: list[Outcome]) -> None:
        parts[:] = [[Outcome("failed", f"f{number} = 1", 0.1) for number in (0, 2, 4)], mine]

    monkeypatch.setattr(code_scoring, "_rank", lambda: (1, 2))
    monkeypatch.setattr(code_scoring, "run_tests", run_tests)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    docs = [{"prompt": "", "entry_point": f"f{number}", "test": ""} for number in range(5)]
    found = code_scoring.run_functions([[f"f{number} = 1"] for number in range(5)], docs)
    assert run == ["f1 = 1", "f3 = 1"]
    assert [one[0]["message"] for one in found] == [f"f{number} = 1" for number in range(5)]
    assert [one[0]["status"] for one in found] == ["failed", "passed", "failed", "passed", "failed"]
