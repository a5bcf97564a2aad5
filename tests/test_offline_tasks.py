"""The tasks of eval/tasks/offline, with small data sets in the place of the fetched ones, and generated items."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from zaya_hf.evaluation import data, generated_items, generated_logic, generated_math
from zaya_hf.resources import resource

TASKS = resource("eval", "tasks", "offline")
NAMES = sorted(yaml_file.stem for yaml_file in TASKS.glob("*.yaml"))
LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"

GSM8K = [
    {
        "id": "g0",
        "question": "Ann has 2  pears\nand 3 plums. How many\u2028fruits?",
        "answer": "2 + 3 = <<2+3=5>>5\n#### 5",
    },
    {"id": "g1", "question": "What do 1000 pens at $2.5 cost?", "answer": "1000 * 2.5 = 2500\n#### 2,500"},
]
HELLASWAG = [
    {
        "id": "h0",
        "activity_label": "Zumba",
        "ctx_a": "Two men  dance. [substeps] They turn.",
        "ctx_b": "the Woman",
        "endings": ["sits [title] down.", "sings.", "is [a] clock.", "rains."],
        "label": 1,
    },
    {
        "id": "h1",
        "activity_label": "Health",
        "ctx_a": "[header] How to rest [title] Rest. [step] Lie down.",
        "ctx_b": "",
        "endings": ["Rise.", "Close  your eyes.", "Two.", "Three."],
        "label": 1,
    },
]
TRUTHFULQA = [{"id": "t0", "question": "Do cats fly?", "choices": ["No.", "Yes.", "At night."], "answer": 0}]
MMLU = [
    {"id": "a-0", "subject": "college_physics", "question": "One?", "choices": ["p", "q", "r", "s"], "answer": 0},
    {"id": "a-1", "subject": "college_physics", "question": "Two?", "choices": list("tuvwx"), "answer": 4},
    {"id": "a-2", "subject": "college_physics", "question": "One?", "choices": ["p", "q", "r", "s"], "answer": 0},
    {"id": "b-0", "subject": "law", "question": "Three?", "choices": ["y", "z", "1", "2"], "answer": 2},
]
FETCHED = {"gsm8k_100": GSM8K, "hellaswag_100": HELLASWAG, "truthfulqa_100": TRUTHFULQA, "mmlu_282": MMLU}


@pytest.fixture
def items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZAYA_EVAL_DATA", str(tmp_path))
    for name, content in FETCHED.items():
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in content)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        pinned = dataclasses.replace(data.DATASETS[name], sha256=hashlib.sha256(text.encode()).hexdigest())
        monkeypatch.setitem(data.DATASETS, name, pinned)
    return tmp_path


def _tasks(*names: str, **metadata: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    return manager.load([f"zaya_{name}" for name in names])["tasks"]


def _task(name: str, **metadata: Any) -> Any:
    return _tasks(name, **metadata)[f"zaya_{name}"]


def _requests(task: Any) -> list[Any]:
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


class _Stub(LM):
    """Answers by a function of a prompt and a continuation (or, to generate, of a prompt)."""

    def __init__(self, likelihood: Callable[[str, str], float] | None = None, text: Callable[[str], str] | None = None):
        super().__init__()
        self._likelihood, self._text = likelihood, text

    def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        scores = [self._likelihood(*request.args) for request in requests]
        return [(score, score == 0) for score in scores]

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        return [self._text(request.args[0]) for request in requests]

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        raise NotImplementedError


def _scores(model: LM, tasks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = lm_eval.evaluate(model, tasks, bootstrap_iters=0, log_samples=False)["results"]
    return {name.removeprefix("zaya_"): values for name, values in found.items()}


# --- the tasks ------------------------------------------------------------------------------------------------------


def test_the_files_are_complete() -> None:
    for name in NAMES:
        text = (TASKS / f"{name}.yaml").read_text(encoding="utf-8")
        config = yaml.load(text.replace("!function", ""), yaml.SafeLoader)
        assert config["task"] == f"zaya_{name}"
        assert {"version", "title", "description", "note"} <= set(config["metadata"])
        fetched = config["dataset_kwargs"].get("name")
        assert (fetched in data.DATASETS) == ("generated" not in name)
        if config["output_type"] == "generate_until":
            assert config["generation_kwargs"]["max_gen_toks"] >= 256


def test_a_perfect_model_and_a_constant_one(items: Path) -> None:
    answers = {item["question"]: item["answer"] for item in GSM8K}
    answers |= {item["question"]: f"So it is {item['answer']}." for item in generated_items.math_items(24)}
    right = {(item["question"], item["choices"][item["answer"]]) for item in generated_items.logic_items(48)}
    right |= {("Do cats fly?", "No."), ("One?", "A"), ("Two?", "E"), ("Three?", "C")}
    right |= {("fruits?", "fruits?"), ("$2.5", "cost?"), ("Zumba", "sings."), ("Health", "Close your eyes.")}

    def likelihood(prompt: str, continuation: str) -> float:
        last = prompt.rpartition("\n\n")[2] + continuation
        return 0.0 if any(key in last and continuation.strip() == answer for key, answer in right) else -1.0

    def text(prompt: str) -> str:
        return f" {answers[prompt.rpartition('Question: ')[2].removesuffix(chr(10) + 'Answer:')]}\n\n"

    tasks = _tasks(*NAMES, count=48)
    found = _scores(_Stub(likelihood, text), {name: task for name, task in tasks.items() if "math" not in name})
    found |= _scores(_Stub(text=text), _tasks("math_generated", count=24))
    for name, metrics in {
        "gsm8k_100": ["exact_match,strict-match", "exact_match,flexible-extract"],
        "hellaswag_100": ["acc,none"],
        "truthfulqa_100": ["acc,none"],
        "mmlu_282": ["acc,none"],
        "last_word": ["acc,none", "perplexity,none"],
        "math_generated": ["exact_match,number"],
        "logic_generated": ["acc,none"],
    }.items():
        assert [found[name][metric] for metric in metrics] == [1.0] * len(metrics), name
    assert "acc_norm,none" in found["hellaswag_100"]

    constant = _scores(
        _Stub(lambda prompt, continuation: 0.0, lambda prompt: " 7"), _tasks("logic_generated", count=48)
    )
    assert constant["logic_generated"]["acc,none"] == 0.25


def test_missing_items_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_EVAL_DATA", str(tmp_path))
    for name in ("gsm8k_100", "hellaswag_100", "truthfulqa_100", "mmlu_282"):
        with pytest.raises(ValueError, match=f"get it with `zaya eval data {name}`"):
            _task(name)
    with pytest.raises(ValueError, match="get it with `zaya eval data gsm8k_100`"):
        _task("last_word")


def test_gsm8k_differs_from_lm_evals_only_in_its_items(items: Path) -> None:
    theirs = yaml.safe_load((LM_EVAL_TASKS / "gsm8k" / "gsm8k.yaml").read_text(encoding="utf-8"))
    ours = yaml.load((TASKS / "gsm8k_100.yaml").read_text().replace("!function", ""), yaml.SafeLoader)
    assert ours["generation_kwargs"].pop("max_gen_toks") == 512
    for key in ("doc_to_text", "doc_to_target", "metric_list", "filter_list", "generation_kwargs", "num_fewshot"):
        assert ours[key] == theirs[key], key
    prompt, settings = _requests(_task("gsm8k_100"))[1]
    assert prompt.count("Question:") == 6
    assert prompt.endswith("#### 53\n\nQuestion: What do 1000 pens at $2.5 cost?\nAnswer:")
    assert settings["until"] == ["Question:", "</s>", "<|im_end|>"]


def test_the_worked_examples_are_right_and_not_lm_evals() -> None:
    examples = [json.loads(line) for line in (TASKS / "gsm8k_examples.jsonl").read_text().split("\n") if line]
    assert len(examples) == 5
    theirs = (LM_EVAL_TASKS / "gsm8k" / "gsm8k-cot.yaml").read_text(encoding="utf-8")
    for example in examples:
        sums = re.findall(r"([\d. */+-]+) = \$?<<(.+?)=([\d.]+)>>([\d.]*\d)", example["answer"])
        assert len(sums) == example["answer"].count("<<") >= 2
        for shown, inside, result, again in sums:
            assert shown.replace(" ", "") == inside
            assert result == again
            assert eval(inside) == float(result)  # of digits and signs alone
        assert example["answer"].endswith(f"#### {sums[-1][2]}")
        assert example["question"][:40] not in theirs


def test_gsm8k_reads_numbers_as_lm_eval_does(items: Path) -> None:
    for text, scores in {
        " So:\n#### 5\n\n": (1.0, 1.0),
        " It is $5. No, 5.": (0.0, 1.0),
        " #### 5 or 6": (1.0, 0.0),
        " none": (0.0, 0.0),
    }.items():
        found = _scores(_Stub(text=lambda prompt, text=text: text), _tasks("gsm8k_100"))["gsm8k_100"]
        of_first_alone = (found["exact_match,strict-match"] * 2, found["exact_match,flexible-extract"] * 2)
        assert of_first_alone == scores, text


def test_hellaswag_is_prepared_as_in_lm_eval(items: Path) -> None:
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    task = _task("hellaswag_100")
    theirs = process_docs(datasets.Dataset.from_list(HELLASWAG))
    for ours, expected in zip(task.test_docs(), theirs, strict=True):
        assert (ours["query"], ours["choices"], ours["label"]) == (
            expected["query"],
            expected["choices"],
            expected["gold"],
        )
    prompts = [prompt for prompt, _ in _requests(task)]
    assert prompts[0] == "Zumba: Two men dance. They turn. The woman"
    assert prompts[4] == "Health: How to rest. Rest. Lie down."


def test_truthfulqa_shows_the_form(items: Path) -> None:
    task = _task("truthfulqa_100")
    requests = _requests(task)
    assert [answer for _, answer in requests] == [" No.", " Yes.", " At night."]
    assert requests[0][0].startswith("Q: How many legs does a spider have?\nA: A spider has eight legs.\n\nQ: ")
    assert requests[0][0].endswith("\n\nQ: Do cats fly?\nA:")
    assert requests[0][0].count("Q: ") == 7


def test_mmlu_shows_the_other_questions_of_the_subject(items: Path) -> None:
    task = _task("mmlu_282")
    assert [item["subject"] for item in task.test_docs()] == ["college_physics"] * 3 + ["law"]
    requests = _requests(task)
    assert len(requests) == 4 + 5 + 4 + 4
    head = "The following are multiple choice questions (with answers) about college physics."
    one, two = "One?\nA. p\nB. q\nC. r\nD. s\nAnswer:", "Two?\nA. t\nB. u\nC. v\nD. w\nE. x\nAnswer:"
    assert requests[0] == (f"{head}\n\n{two} E\n\n{one}", " A")  # without the one that asks the same
    assert requests[4] == (f"{head}\n\n{one} A\n\n{one} A\n\n{two}", " A")
    assert [answer for _, answer in requests[4:9]] == [" A", " B", " C", " D", " E"]
    assert requests[13][0].startswith("The following are multiple choice questions (with answers) about law.\n\nThree?")

    template = (LM_EVAL_TASKS / "mmlu" / "default" / "_default_template_yaml").read_text(encoding="utf-8")
    wording = yaml.safe_load(template)["doc_to_text"]
    rendered = lm_eval.utils.apply_template(wording, MMLU[3])
    assert requests[13][0].endswith(f"\n\n{rendered}")


def test_last_words(items: Path) -> None:
    assert _requests(_task("last_word")) == [
        ("Ann has 2 pears and 3 plums. How many", " fruits?"),
        ("What do 1000 pens at $2.5", " cost?"),
    ]


# --- generated items ------------------------------------------------------------------------------------------------


def test_generated_items_are_the_same_everywhere() -> None:
    made = [generated_items.math_items(), generated_items.logic_items()]
    hashes = [hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16] for items in made]
    assert hashes == ["6ca1b40d377c78a5", "e5e8a223bf24d595"]
    assert generated_items.math_items(50) == made[0][:50]
    assert generated_items.math_items(20, seed=1) != made[0][:20]


def test_kinds_levels_and_places_are_balanced() -> None:
    for items, kinds in (
        (generated_items.math_items(180), generated_math.GENERATORS),
        (generated_items.logic_items(128), generated_logic.GENERATORS),
    ):
        counts = Counter((item["kind"], item["level"]) for item in items)
        assert set(counts) == {(kind, level) for kind in kinds for level in (1, 2, 3)}
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len({item["question"] for item in items}) == len(items) == len({item["id"] for item in items})
    for kind in generated_logic.GENERATORS:
        chosen = [item for item in items if item["kind"] == kind]
        assert Counter(item["answer"] for item in chosen) == dict.fromkeys(range(4), 8)
        right = [item["choices"][item["answer"]] for item in chosen]
        if kind in ("entailment", "membership"):  # half of the right ones are denials
            assert sum(" off." in text or " not " in text for text in right) == 16
        if kind == "syllogism":
            forms = Counter(text.split()[0] + " not" * (" not " in text) for text in right)
            assert forms == dict.fromkeys(("All", "No", "Some", "Some not"), 8)


def test_examples_never_are_items_whatever_the_seeds() -> None:
    for make, count in ((generated_items.math_items, 300), (generated_items.logic_items, 40)):
        items = {item["question"] for seed in (1, 2) for item in make(count, seed=seed)}
        examples = {item["question"] for seed in (1, 2) for item in make(count // 4, seed=seed, part="examples")}
        assert len(items) > count
        assert not items & examples


def test_prompts_show_one_example_of_each_kind_and_none_of_the_items() -> None:
    for name, examples in (("math_generated", 6), ("logic_generated", 4)):
        task = _task(name, count=12)
        shown = [item["kind"] for item in task.fewshot_docs()][:examples]
        assert len(set(shown)) == examples
        prompts = [args[0] for args in _requests(task)]
        for item in task.test_docs():
            holding = {prompt for prompt in prompts if item["question"] in prompt}
            assert len(holding) == 1
            assert holding.pop().endswith(f"{item['question']}\nAnswer:")


@pytest.mark.parametrize("kind", list(generated_math.GENERATORS))
def test_a_wrong_number_is_found_by_the_check(kind: str) -> None:
    items = [item for item in generated_items.math_items(90) if item["kind"] == kind]
    for item in items:
        generated_items.verify(item)
        with pytest.raises(ValueError, match=item["id"]):
            generated_items.verify(item | {"answer": str(int(item["answer"]) + 1)})


@pytest.mark.parametrize("kind", list(generated_logic.GENERATORS))
def test_a_wrong_choice_is_found_by_the_check(kind: str) -> None:
    items = [item for item in generated_items.logic_items(48) if item["kind"] == kind]
    for item in items:
        generated_items.verify(item)
        for wrong in set(range(4)) - {item["answer"]}:
            with pytest.raises(ValueError, match=item["id"]):
                generated_items.verify(item | {"answer": wrong})
        right = item["choices"][item["answer"]]
        with pytest.raises(ValueError, match=item["id"]):
            generated_items.verify(item | {"choices": [right] * 4})


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 2 + 3 * (4 - 6)?", "-4"),
        ("What is 10 - 4 - 3?", "3"),
        ("What is the remainder when 7 * 13 + 5 is divided by 9?", "6"),
        ("What is the remainder when 3^20 is divided by 7?", "2"),
        ("It holds that 3x + 5 = -2x - 10. What is x?", "-3"),
        ("It holds that 2x + 3y = 12 and -1x + 1y = -1. What is x?", "3"),
        ("It holds that 2x + 0 = 3. What is x?", "3/2"),
        ("Which number comes next: 1, 1, 2, 3, 5, 8?", "13"),
        ("Which number comes next: 1, 4, 9, 16, 25, 36?", "49"),
        ("Which number comes next: 3, 7, 15, 31, 63, 127?", "255"),
        ("What is 15% of 240?", "36"),
        ("A price of 80 dollars falls by 25%. How many dollars is the new price?", "60"),
        ("How many minutes are 3 hours and 25 minutes?", "205"),
        ("A train moves at 60 kilometers per hour. How many kilometers does it move in 150 minutes?", "150"),
    ],
)
def test_the_check_solves_what_is_known(question: str, answer: str) -> None:
    assert str(generated_math.solve(question)) == answer


@pytest.mark.parametrize(
    "question",
    [
        "It holds that 3x + 5 = 3x + 6. What is x?",
        "It holds that 2x + 4y = 6 and 1x + 2y = 3. What is x?",
        "Which number comes next: 1, 2, 4, 7, 13, 24?",
        "What is __import__('os')?",
        "Why?",
    ],
)
def test_questions_without_one_answer(question: str) -> None:
    with pytest.raises(ValueError):
        generated_math.solve(question)


@pytest.mark.parametrize(
    ("question", "choices", "right"),
    [
        (
            "If the red lamp is on, then the blue lamp is on. The blue lamp is off. What follows?",
            ["The red lamp is on.", "The red lamp is off.", "The blue lamp is off.", "The green lamp is on."],
            [1, 2],
        ),
        (  # the converse does not follow
            "If the red lamp is on, then the blue lamp is on. The blue lamp is on. What follows?",
            ["The red lamp is on.", "The red lamp is off."],
            [],
        ),
        (
            "Every dap is a wug. No wug is a fep. Ann is a dap. What follows?",
            ["Ann is not a fep.", "Ann is a fep."],
            [0],
        ),
        (  # there are daps, so that some of them are
            "There are daps, wugs and feps. All daps are wugs. No wugs are feps. What follows?",
            ["Some daps are feps.", "Some wugs are daps.", "No feps are daps.", "All wugs are daps."],
            [1, 2],
        ),
        (
            "Ann, Ben and Carl ran a race. Ann finished before Ben. Carl did not finish third. "
            "Carl finished before Ann. Who finished second?",
            ["Ann.", "Ben.", "Carl."],
            [0],
        ),
        ("Ann, Ben and Carl ran a race. Ann finished before Ben. Who finished third?", ["Ben.", "Carl."], []),
        (
            "Ann, Ben and Carl ran a race. Ann finished right before Ben. Ben finished third. Who finished first?",
            ["Carl."],
            [0],
        ),
    ],
)
def test_what_follows_in_every_world(question: str, choices: list[str], right: list[int]) -> None:
    assert generated_logic.right_choices(question, choices) == right


def test_facts_without_a_world() -> None:
    for question in (
        "The red lamp is on. The red lamp is off. What follows?",
        "Ann and Ben ran a race. Ann finished before Ben. Ben finished first. Who finished first?",
    ):
        with pytest.raises(ValueError, match="cannot be so together"):
            generated_logic.right_choices(question, ["The red lamp is on."])


def test_wrong_requests_for_items() -> None:
    with pytest.raises(ValueError, match="part is 'train'; expected one of test, examples"):
        generated_items.math_items(3, part="train")
    with pytest.raises(ValueError, match="count is 0; expected at least 1"):
        generated_items.logic_items(0)
    with pytest.raises(ValueError, match="not 100000 different items"):
        generated_items.math_items(100_000)
