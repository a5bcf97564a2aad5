"""lm-eval's scores against a plain forward pass, the prompts it makes of our tasks, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.models import huggingface
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tiny_families import build
from zaya_hf.evaluation import harness
from zaya_hf.evaluation.statistics import bootstrap_ratio_interval, wilson_interval
from zaya_hf.quickstart import arithmetic, bpe
from zaya_hf.resources import resource

ROOT = Path(__file__).resolve().parent.parent
FOLDER = resource("eval", "tasks", "quickstart")
TASKS = [f"zaya_quickstart_{name}" for name in ("bits", "prose", "code", "arithmetic_far", "arithmetic_near")]
LENGTH = 48
SENTENCES = ["The ship sailed past a quiet old harbour.", "Few people know where this road ends.", "It rains."]


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def choice_of(texts: list[str], answer: int) -> dict[str, Any]:
    return {"choices": texts, "answer": answer}


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few items of each set. Choices have lengths that differ, so that batches are padded; a text repeats itself, so
    that windows have equal ids.
    """
    folder = tmp_path_factory.mktemp("items")
    long = "Every line of this text is read in windows.\n" * 9
    write_lines(
        folder / "bits.jsonl", [{"text": text} for text in (long, "[1]\n", "12", "É\u2028ñ\x0c{{x}}\n", long[:90])]
    )
    turned = [" ".join(reversed(text.split())) for text in SENTENCES]
    pairs = [choice_of([*SENTENCES, turned[i]] if i % 2 else [turned[i], *SENTENCES], i) for i in range(3)]
    for name in ("prose", "code"):
        write_lines(folder / f"{name}.jsonl", pairs)
    sums = arithmetic.HELD_OUT[:7]
    for name, wrong in (("far", arithmetic.far_answers), ("near", arithmetic.near_answers)):
        found = [{"question": s.question, **choice_of([*wrong(s)[:1], str(s.value), *wrong(s)[1:]], 1)} for s in sums]
        write_lines(folder / f"arithmetic_{name}.jsonl", found)
    solved = [{"question": s.question, **choice_of([str(s.value)], 0)} for s in arithmetic.TRAINING[:40]]
    write_lines(folder / "arithmetic_examples.jsonl", solved)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    code = Path(__file__).read_text(encoding="utf-8")
    return bpe.train_tokenizer([code, " ".join(SENTENCES), "x=-1\ny=-2\n" * 99], vocab_size=320)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Is filled with lm-eval's own log of each item by `harness.evaluate`."""
    found: dict[str, list[dict[str, Any]]] = {}

    def keep(*args: Any, **kwargs: Any) -> Any:
        results = real(*args, **kwargs)
        found.update(results["samples"])
        return results

    real = harness.lm_evaluate
    monkeypatch.setattr(harness, "lm_evaluate", keep)
    return found


def score(model: Any, tokenizer: Any, items: Path, tasks: list[str] = TASKS, **options: Any) -> dict[str, Any]:
    options = {"task_folder": FOLDER, "items": items, "max_length": LENGTH, "batch_size": 3} | options
    return harness.evaluate(model, tokenizer, tasks, **options)


@torch.no_grad()
def log_probability(model: PreTrainedModel, context: list[int], continuation: list[int]) -> float:
    """Of `continuation` after `context`, in nats, by one plain forward pass."""
    ids = torch.tensor([context + continuation])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(context) - 1 :]
    return -torch.nn.functional.cross_entropy(logits.double(), ids[0, len(context) :], reduction="sum").item()


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", ["zaya", "llama", "qwen3", "gemma3", "olmoe"])
def test_scores_are_those_of_a_plain_forward_pass(
    family: str, tokenizer: PreTrainedTokenizerFast, items: Path, samples: dict[str, list[dict[str, Any]]]
) -> None:
    model = build(family)
    found = score(model, tokenizer, items)["tasks"]
    outcomes: dict[str, list[int]] = {}
    for task in TASKS[1:]:
        for sample in samples[task]:
            expected = []
            for context, continuation in sample["arguments"]:
                whole = encode(tokenizer, context + continuation)
                start = encode(tokenizer, context) or [tokenizer.eos_token_id]
                rest = whole[len(start) :] if context else whole
                expected.append(log_probability(model, start, rest))
            measured = [likelihood for ((likelihood, _),) in sample["resps"]]
            assert measured == pytest.approx(expected, rel=1e-6)
            assert len(set(expected)) == 4
            outcomes.setdefault(task, []).append(int(expected.index(max(expected)) == sample["doc"]["answer"]))
    assert {task: found[task]["outcomes"] for task in TASKS[1:]} == outcomes

    texts = [json.loads(line)["text"] for line in (items / "bits.jsonl").read_text("utf-8").split("\n") if line]
    nats = []
    for text in texts:
        ids = encode(tokenizer, text)
        total, before = 0.0, [tokenizer.eos_token_id, *ids]
        for start in range(0, len(ids), LENGTH):
            counted = ids[start : start + LENGTH]
            context = max(0, start + len(counted) - LENGTH)  # of the last window, as much as fits
            total -= log_probability(model, before[context : start + 1], counted)
        nats.append(total)
    assert len(encode(tokenizer, texts[0])) > 2 * LENGTH
    sizes = [len(text.encode()) for text in texts]
    bits = found["zaya_quickstart_bits"]
    assert [pair[1] for pair in bits["outcomes"]] == sizes
    assert [pair[0] for pair in bits["outcomes"]] == pytest.approx(nats, rel=1e-6)
    assert bits["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / sum(sizes), rel=1e-6)


class TestScores:
    def test_their_form(self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Path) -> None:
        found = score(llama, tokenizer, items)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["seconds"] > 0
        assert list(found["tasks"]) == TASKS
        bits = found["tasks"][TASKS[0]]
        assert set(bits) == {"kind", "items", "bytes", "bits_per_byte", "interval_95", "outcomes"}
        nats, sizes = zip(*bits["outcomes"], strict=True)
        expected = bootstrap_ratio_interval([value / math.log(2) for value in nats], sizes)
        assert (bits["kind"], bits["items"], bits["bytes"]) == ("bits_per_byte", 5, sum(sizes))
        assert bits["interval_95"] == list(expected)
        for task in TASKS[1:]:
            choice = found["tasks"][task]
            intervals = ["interval_95", "interval_99"]
            names = ["kind", "items", "correct", "accuracy", "chance", *intervals, "above_chance", "outcomes"]
            assert list(choice) == names
            assert choice["items"] == len(choice["outcomes"]) == (7 if "arithmetic" in task else 3)
            assert choice["correct"] == sum(choice["outcomes"])
            assert choice["accuracy"] == choice["correct"] / choice["items"]
            assert choice["chance"] == 0.25
            assert choice["interval_95"] == list(wilson_interval(choice["correct"], choice["items"], 0.95))
            assert choice["interval_99"] == list(wilson_interval(choice["correct"], choice["items"], 0.99))

    def test_batches_do_not_matter(
        self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        one, many = (score(llama, tokenizer, items, batch_size=size)["tasks"] for size in (1, 64))
        assert [one[task]["outcomes"] for task in TASKS[1:]] == [many[task]["outcomes"] for task in TASKS[1:]]
        assert one[TASKS[0]]["bits_per_byte"] == pytest.approx(many[TASKS[0]]["bits_per_byte"], rel=1e-6)

    def test_low_precision_weights_have_a_float32_softmax(
        self, tokenizer: PreTrainedTokenizerFast, items: Path, samples: dict[str, list[dict[str, Any]]]
    ) -> None:
        model = build("llama").bfloat16()
        score(model, tokenizer, items, ["zaya_quickstart_prose"])
        assert model.dtype == torch.bfloat16
        found = [likelihood for sample in samples["zaya_quickstart_prose"] for ((likelihood, _),) in sample["resps"]]
        assert all(torch.tensor(value).bfloat16().item() != value for value in found)


class TestPrompts:
    @pytest.fixture
    def logged(
        self,
        llama: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        items: Path,
        samples: dict[str, list[dict[str, Any]]],
    ) -> dict[str, list[dict[str, Any]]]:
        score(llama, tokenizer, items)
        return samples

    def test_a_sum_stands_in_the_middle_of_a_document_as_in_training(
        self, logged: dict[str, list[dict[str, Any]]], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        trained = {str(item) for item in arithmetic.TRAINING}
        held_out = {str(item) for item in arithmetic.HELD_OUT}
        for sample in logged["zaya_quickstart_arithmetic_near"]:
            for index, (context, continuation) in enumerate(sample["arguments"]):
                assert context.startswith(bpe.EOS)
                *examples, question = context.removeprefix(bpe.EOS).split("\n")
                assert len(set(examples)) == 3
                assert set(examples) <= trained
                assert (question + continuation in held_out) == (index == sample["doc"]["answer"])
                whole, start = encode(tokenizer, context + continuation), encode(tokenizer, context)
                assert start[0] == tokenizer.eos_token_id
                assert whole[: len(start)] == start  # no token is cut in two

    def test_far_and_near_sums_have_the_same_prompts(self, logged: dict[str, list[dict[str, Any]]]) -> None:
        far, near = ([s["arguments"][0][0] for s in logged[f"zaya_quickstart_arithmetic_{n}"]] for n in ("far", "near"))
        assert far == near
        assert len(set(far)) == 7

    def test_pairs_have_no_context_and_no_change(self, logged: dict[str, list[dict[str, Any]]]) -> None:
        for sample in logged["zaya_quickstart_prose"]:
            assert sample["arguments"] == [("", choice) for choice in sample["doc"]["choices"]]

    def test_texts_are_scored_as_they_are(self, logged: dict[str, list[dict[str, Any]]]) -> None:
        assert [sample["arguments"][0] for sample in logged["zaya_quickstart_bits"]][1:4] == [
            ("[1]\n",),
            ("12",),
            ("É\u2028ñ\x0c{{x}}\n",),
        ]


class TestWhatIsLeftAlone:
    def test_the_model(self, tokenizer: PreTrainedTokenizerFast, items: Path) -> None:
        model = build("llama")
        model.train()
        model.model.layers[1].eval()
        weights = copy.deepcopy(model.state_dict())
        config = model.config.to_dict()
        modes = [module.training for module in model.modules()]
        score(model, tokenizer, items, TASKS[:2])
        assert [module.training for module in model.modules()] == modes
        assert model.config.to_dict() == config
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_it_is_scored_in_eval_mode_and_without_a_cache(
        self, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        calls: Counter[tuple[bool, bool | None]] = Counter()
        model = build("llama").train()
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.update([(module.training, kwargs.get("use_cache"))]), with_kwargs=True
        )
        score(model, tokenizer, items, TASKS[:2])
        hook.remove()
        assert list(calls) == [(False, False)]

    def test_random_states_and_logging(
        self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        def state() -> list[Any]:
            levels = [logging.getLogger(name).level for name in ("", "lm_eval", "datasets", "transformers")]
            numbers = [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]
            return [*levels, *numbers, len(logging.getLogger().handlers)]

        before = state()
        score(llama, tokenizer, items)
        assert state() == before

    def test_nothing_is_printed_and_lm_eval_has_its_bars_back(
        self,
        llama: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        items: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        bars = vars(huggingface)["tqdm"]
        score(llama, tokenizer, items)
        printed = capfd.readouterr()
        assert (printed.out, printed.err) == ("", "")
        assert vars(huggingface)["tqdm"] is bars

    def test_home_network_and_terminal(self, tokenizer: PreTrainedTokenizerFast, items: Path, tmp_path: Path) -> None:
        """In a fresh process, outside a repository, where nothing says that it is offline."""
        build("llama").save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        code = f"""
import socket
def refuse(*args): raise AssertionError("reaches for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, local_files_only=True)
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "model")!r}, local_files_only=True)
from zaya_hf.evaluation import harness
harness.evaluate(model, tokenizer, {TASKS!r}, task_folder=Path({str(FOLDER)!r}), items=Path({str(items)!r}),
                 max_length={LENGTH})
"""
        home = tmp_path / "home"
        home.mkdir()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "TRANSFORMERS_"))}
        clean |= {
            "HOME": str(home),
            "PYTHONPATH": str(ROOT / "src"),
            "TMPDIR": str(home),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=home, env=clean, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert list(home.iterdir()) == []


class TestErrors:
    def test_a_choice_that_does_not_fit(
        self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        lengths = [len(encode(tokenizer, text)) for text in SENTENCES]
        limit = sorted(lengths)[-1] - 1
        with pytest.raises(
            ValueError,
            match=rf"\d of 12 texts do not fit: the longest has {limit + 2} tokens, but max_length is {limit}",
        ):
            score(llama, tokenizer, items, ["zaya_quickstart_prose"], max_length=limit)
        score(llama, tokenizer, items, ["zaya_quickstart_prose"], max_length=limit + 1)

    def test_an_unknown_task(self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Path) -> None:
        with pytest.raises(ValueError, match=r"no task 'hellaswag' in .*; its tasks: zaya_quickstart_arithmetic_far, "):
            score(llama, tokenizer, items, ["hellaswag"])

    def test_items_that_are_not_there(
        self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=r"no items: .*prose\.jsonl is missing"):
            score(llama, tokenizer, tmp_path, ["zaya_quickstart_prose"])

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("", r"no items: .*prose\.jsonl is empty"),
            ('{"choices": ["a", "b"], "answer": 0}\n{"choices": ["a"', r"prose\.jsonl, line 2: no item; expected"),
            ('{"choices": [], "answer": 0}\n', "line 1: no item"),
            ('{"choices": ["a", ""], "answer": 0}\n', "line 1: no item"),
            ('{"choices": ["a", "b"], "answer": 2}\n', "line 1: no item"),
            ('{"choices": ["a", "b"], "answer": -1}\n', "line 1: no item"),
            ('{"text": ""}\n', "line 1: no item"),
            ("[1]\n", "line 1: no item"),
        ],
    )
    def test_items_that_are_none(
        self, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: str, said: str
    ) -> None:
        (tmp_path / "prose.jsonl").write_text(content)
        with pytest.raises(ValueError, match=said):
            score(llama, tokenizer, tmp_path, ["zaya_quickstart_prose"])

    def test_no_folder_named(self) -> None:
        manager = harness.TaskManager(include_path=str(FOLDER), include_defaults=False)
        with pytest.raises(ValueError, match="no folder with items: pass --metadata"):
            manager.load(["zaya_quickstart_prose"])

    @pytest.mark.parametrize(
        ("old", "new"), [("metric: acc", "metric: f1"), ("output_type: multiple_choice", "output_type: loglikelihood")]
    )
    def test_a_task_with_another_metric(
        self,
        llama: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        items: Path,
        tmp_path: Path,
        old: str,
        new: str,
    ) -> None:
        for file in FOLDER.iterdir():
            if file.is_file():
                (tmp_path / file.name).write_text(file.read_text().replace(old, new))
        with pytest.raises(ValueError, match=r"task 'zaya_quickstart_prose' is of type .* what is scored is"):
            score(llama, tokenizer, items, ["zaya_quickstart_prose"], task_folder=tmp_path)


def test_tasks_describe_themselves(items: Path) -> None:
    found = harness.describe(TASKS, task_folder=FOLDER, items=items)
    assert [entry["name"] for entry in found] == TASKS
    assert len({entry["title"] for entry in found}) == 5
    assert all(entry["version"] == 1 and entry["description"].endswith(".") for entry in found)
    assert {key: found[0][key] for key in ("kind", "items")} == {"kind": "bits_per_byte", "items": 5}
    expected = {"kind": "choice", "items": 7, "choices": 4, "chance": 0.25}
    assert {key: found[4][key] for key in expected} == expected


def test_the_group_has_every_task() -> None:
    names = re.findall(r"^  - (\w+)$", (FOLDER / "group.yaml").read_text(), re.MULTILINE)
    assert names == TASKS
    assert {f"zaya_quickstart_{path.stem}" for path in FOLDER.glob("*.yaml")} - {"zaya_quickstart_group"} == set(TASKS)


@pytest.mark.slow
def test_lm_eval_s_own_command_gives_the_same(tokenizer: PreTrainedTokenizerFast, items: Path, tmp_path: Path) -> None:
    model = build("llama").float()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    expected = score(model, tokenizer, items)["tasks"]
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "3"),
            *("--model_args", f"pretrained={tmp_path / 'model'},max_length={LENGTH},dtype=float32"),
            *("--include_path", str(FOLDER), "--tasks", "zaya_quickstart"),
            *("--metadata", json.dumps({"items": str(items)}), "--output_path", str(tmp_path / "out")),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    assert found[TASKS[0]]["bits_per_byte,none"] == pytest.approx(expected[TASKS[0]]["bits_per_byte"], rel=1e-6)
    assert [found[task]["acc,none"] for task in TASKS[1:]] == [expected[task]["accuracy"] for task in TASKS[1:]]
