"""A suite of three small tasks and a scorer with made-up answers, for tests of what runs do with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from zaya_hf.evaluation import runs

_ITEMS = """
from datasets import Dataset, DatasetDict

def choices(**kw):
    train = [{"question": f"Example {n}?", "choices": ["yes", "no way"], "answer": n % 2} for n in range(20)]
    test = [{"question": f"SECRET {n}?", "choices": ["yes", "no way"], "answer": n % 2, "field": "ab"[n % 2]}
            for n in range(6)]
    return {"train": Dataset.from_list(train), "test": Dataset.from_list(test)}

def sums(**kw):
    return {"test": Dataset.from_list([{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(5)])}

def prose(**kw):
    return {"test": Dataset.from_list([{"text": "word " * (n + 2)} for n in range(3)])}
"""

_TASKS = {
    "fake_choice": """
task: fake_choice
custom_dataset: !function items.choices
training_split: train
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "fake_sums": """
task: fake_sums
custom_dataset: !function items.sums
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - {name: loose, filter: [{function: regex, regex_pattern: '(\\d+)'}, {function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "fake_prose": """
task: fake_prose
custom_dataset: !function items.prose
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
""",
}

ENTRIES: dict[str, dict[str, Any]] = {
    "fake_choice": {
        "title": "Choices",
        "ability": "reasoning",
        "metric": "acc_norm,none",
        "num_fewshot": 2,
        "items": 6,
        "answers": 2,
        "cluster_by": "field",
    },
    "fake_sums": {"title": "Sums", "ability": "math", "metric": "exact_match,loose", "items": 5},
    "fake_prose": {"title": "Prose", "ability": "language", "metric": "bits_per_byte,none", "items": 3},
}


def write_suite(folder: Path, entries: dict[str, dict[str, Any]] | None = None, name: str = "fakes") -> Path:
    """A suite's file, with its tasks beside it."""
    tasks = folder / "fake-tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    (tasks / "items.py").write_text(_ITEMS, encoding="utf-8")
    for task, text in _TASKS.items():
        (tasks / f"{task}.yaml").write_text(text, encoding="utf-8")
    listed = [
        {"task": task, "prompt_tokens": 10, "answer_tokens": 2, **entry} for task, entry in (entries or ENTRIES).items()
    ]
    file = folder / f"{name}.yaml"
    suite = {"name": name, "title": name.title(), "description": "Made up.", "task_folders": ["fake-tasks"]}
    file.write_text(json.dumps(suite | {"entries": listed}), encoding="utf-8")  # which is YAML, too
    return file


def write_model(folder: Path, weights: str = "1") -> Path:
    """What looks like the folder of a saved model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_text(weights, encoding="utf-8")
    return folder


@dataclass
class Facts:
    finish: str
    prompt_truncated: bool = False


class FakeScorer(LM):
    """Answers that depend on the weights' text and the request; made of them, so that no model is needed.

    Args:
        weights: what the model's file holds; "nan" has no numbers, "long" never ends its answers.
        requests, budgets: where each request is noted, and max_gen_toks of each generated answer.
        stop_after: of so many requests; then Ctrl-C is pressed.
    """

    def __init__(self, weights: str, requests: list[Any], budgets: list[int], stop_after: int | None = None):
        super().__init__()
        self.weights, self.requests, self.budgets, self.stop_after = weights, requests, budgets, stop_after
        self.start(None)

    def start(self, journal: Path | None) -> None:
        names = ("requests", "tokens_given", "tokens_computed", "tokens_generated", "truncated_prompts")
        names += ("truncated_answers", "empty_answers", "thoughts_without_end")
        self.counts: dict[str, Any] = dict.fromkeys(names, 0) | {"seconds": 0.5}
        self.answer_facts: dict[tuple[str, int], Facts] = {}
        if journal is not None:
            journal.mkdir(parents=True, exist_ok=True)

    def _number(self, *parts: Any) -> float:
        self.requests.append(parts)
        self.counts["requests"] += 1
        self.counts["tokens_computed"] += 7
        if self.stop_after is not None and len(self.requests) > self.stop_after:
            raise KeyboardInterrupt
        if self.weights == "nan":
            return float("nan")
        return int(hashlib.sha256(repr((self.weights, *parts)).encode()).hexdigest()[:6], 16) / 2**20

    def loglikelihood(self, requests: Sequence[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(-self._number(*request.args), False) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: Any) -> list[float]:
        return [-self._number(*request.args) for request in requests]

    def generate_until(self, requests: Sequence[Instance], **_: Any) -> list[str]:
        answers = []
        for request in requests:
            prompt = request.args[0]
            self.budgets.append(request.args[1]["max_gen_toks"])
            right = int(prompt.split()[0]) + 1
            answers.append(f" is {right}" if self._number(prompt) < 8 else str(right))
            long = self.weights == "long"
            self.answer_facts[prompt, 0] = Facts("length" if long else "stop")
            self.counts["truncated_answers"] += long
        return answers


@dataclass
class Loaded:
    model: Any
    tokenizer: Any
    facts: dict[str, Any]


class Bench:
    """Where `runs.evaluate` meets made-up models.

    Attributes:
        loaded: paths of the models that were loaded.
        requests: that a scorer was asked.
        budgets: max_gen_toks of each generated answer.
        max_lengths: of models by name, where it is not 512.
        stop_after: of so many requests, Ctrl-C is pressed.
        said: the lines that `evaluate` told.
    """

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.requests: list[Any] = []
        self.budgets: list[int] = []
        self.max_lengths: dict[str, int] = {}
        self.stop_after: int | None = None
        self.said: list[str] = []

    def load(self, spec: Any, device: str | None = None) -> Loaded:
        self.loaded.append(spec.name)
        facts = {"name": spec.name, "title": spec.title, "chat_template": False}
        facts["max_length"] = self.max_lengths.get(spec.name, 512)
        return Loaded(Path(spec.path, "model.safetensors").read_text(encoding="utf-8"), None, facts)

    def scorer(self, spec: Any, loaded: Loaded, *_: Any) -> FakeScorer:
        return FakeScorer(loaded.model, self.requests, self.budgets, self.stop_after)

    def evaluate(self, suite: Path, models: Sequence[Path | str], out: Path, **options: Any) -> list[str]:
        self.loaded.clear()
        self.requests.clear()
        self.said.clear()
        settings = runs.Settings(suite=str(suite), models=tuple(map(str, models)), out=str(out), **options)
        return runs.evaluate(settings, self.said.append)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Models that are made up."""
    found = Bench()
    monkeypatch.setattr(runs, "load", found.load)
    monkeypatch.setattr(runs, "_scorer", found.scorer)
    monkeypatch.setattr(runs.gc, "collect", lambda: 0)  # half a second, with all of torch to look through
    return found


def read(out: Path, model: str, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's result and samples, as the manifest names it."""
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    folder = out / "runs" / manifest["runs"][model][task]
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    loads: Callable[[str], Any] = json.loads
    return loads((folder / "result.json").read_text(encoding="utf-8")), [loads(line) for line in lines]
