"""Loads the items of the tasks here: those that `zaya eval data` fetches, and those that zaya_hf makes itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

from zaya_hf.evaluation import generated_items
from zaya_hf.evaluation.data import items_path

_HERE = Path(__file__).resolve().parent


def load(name: str = "", examples: str | None = None, **_: Any) -> dict[str, Dataset]:
    """The split "test" of a fetched data set, and "train" where a task shows examples.

    Args:
        name: of the data set; set by the task.
        examples: a file of JSON lines beside this one, with the fields of the items.

    Raises:
        ValueError: the data set is not there; the message names the command that fetches it.
    """
    splits = {"test": _PREPARED[name](_read(items_path(name)))}
    if examples is not None:
        splits["train"] = _read(_HERE / examples)
    return {split: Dataset.from_list(items) for split, items in splits.items()}


def last_words(name: str = "", **_: Any) -> dict[str, Dataset]:
    """The split "test": questions without their last word as `text`, and that word, with its punctuation, as `word`."""
    items = []
    for item in _read(items_path(name)):
        text, _, word = " ".join(item["question"].split()).rpartition(" ")
        items.append({"id": item["id"], "text": text, "word": word})
    return {"test": Dataset.from_list(items)}


def generated(family: str = "", count: int | None = None, seed: int | None = None, **_: Any) -> dict[str, Dataset]:
    """The splits "test" and "train" (for examples) of generated items.

    Args:
        family: "math" or "logic"; set by the task.
        count, seed: of the items; see `zaya_hf.evaluation.generated_items`. In lm-eval's metadata.
    """
    make = {"math": generated_items.math_items, "logic": generated_items.logic_items}[family]
    seed = generated_items.SEED if seed is None else int(seed)
    items = make(generated_items.COUNT if count is None else int(count), seed=seed)
    examples = make(generated_items.EXAMPLES, seed=seed, part="examples")
    return {"test": Dataset.from_list(items), "train": Dataset.from_list(examples)}


def _read(file: Path) -> list[dict[str, Any]]:
    # Not splitlines: texts have other line separators inside.
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _same(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return items


def _hellaswag(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With `query` and `choices`, cleaned as in lm-eval's own task of the whole set."""
    for item in items:
        item["query"] = _clean(f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}")
        item["choices"] = [_clean(ending) for ending in item["endings"]]
    return items


def _clean(text: str) -> str:
    """Without the marks of the web pages that half of the items come from."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _mmlu(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With `prompt`, `letters`: examples are the subject's other questions in their order, and never the item itself.

    As it is the five development questions of a subject that are asked here, an item's own examples are four of them.
    """
    for item in items:
        examples = [
            other for other in items if other["subject"] == item["subject"] and other["question"] != item["question"]
        ]
        subject = item["subject"].replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}."
        solved = [f"{_asked(other)} {_LETTERS[other['answer']]}" for other in examples]
        item["prompt"] = "\n\n".join([head, *solved, _asked(item)])
        item["letters"] = list(_LETTERS[: len(item["choices"])])
    return items


_LETTERS = "ABCDE"


def _asked(item: dict[str, Any]) -> str:
    choices = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, item["choices"], strict=False)]
    return "\n".join([item["question"], *choices, "Answer:"])


_PREPARED = {
    "gsm8k_100": _same,
    "hellaswag_100": _hellaswag,
    "truthfulqa_100": _same,
    "mmlu_282": _mmlu,
}
