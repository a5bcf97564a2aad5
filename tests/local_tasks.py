"""Folders with small lm-eval tasks, for the tests of suites: each a YAML file, items beside it and functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FUNCTIONS = """
import json
from pathlib import Path

from datasets import Dataset


def load(**_):
    content = json.loads((Path(__file__).parent / "items.json").read_text())
    return {split: Dataset.from_list(items) for split, items in content.items()}


def shout(doc):
    return doc["question"].upper()
"""


def items(count: int = 4, *, first: int = 0) -> list[dict[str, Any]]:
    """Sums with four choices; `answer` is the index of the right one."""
    numbers = range(first, first + count)
    return [
        {"question": f"{n} + {n} =", "choices": [str(2 * n + k) for k in range(4)], "answer": 0, "solution": str(2 * n)}
        for n in numbers
    ]


def write_tasks(
    folder: Path, tasks: Mapping[str, Mapping[str, Any]], *, splits: Mapping[str, Sequence[Any]] | None = None
) -> Path:
    """A folder with tasks over the same items: multiple choice if a task does not say otherwise, or a group."""
    folder.mkdir(parents=True, exist_ok=True)
    content = splits or {"test": items(), "train": items(3, first=10)}
    (folder / "items.json").write_text(json.dumps(content))
    (folder / "functions.py").write_text(FUNCTIONS)
    for name, own in tasks.items():
        choice = {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        generated = {
            "output_type": "generate_until",
            "doc_to_target": "solution",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
        kind = generated if own.get("output_type") == "generate_until" else choice
        base = {"task": name, "test_split": "test", "fewshot_split": "train", "doc_to_text": "question"}
        task = {"group": name, **own} if "task" in own else {**base, **kind, **own}
        text = yaml.safe_dump({key: value for key, value in task.items() if value != "-"}, sort_keys=False)
        if "task" not in own and "dataset_path" not in own:
            text += "custom_dataset: !function functions.load\n"
        if task.get("doc_to_text") == "shout":
            text = text.replace("doc_to_text: shout", "doc_to_text: !function functions.shout")
        (folder / f"{name}.yaml").write_text(text)
    return folder


def entry(task: str, **own: Any) -> dict[str, Any]:
    """An entry of a suite as its file has it."""
    needed = {"title": task, "ability": "math", "metric": "acc,none", "items": 4}
    return {"task": task, **needed, "prompt_tokens": 10, "answer_tokens": 2, **own}


def write_suite(file: Path, *entries: Mapping[str, Any], **own: Any) -> Path:
    """A suite over tasks in the folder `tasks` beside its file."""
    content = {"name": "own", "title": "Own", "description": "Own tasks.", "entries": list(entries)}
    folders = ["tasks"] if (file.parent / "tasks").is_dir() else []
    file.write_text(yaml.safe_dump({**content, "task_folders": folders, **own}, sort_keys=False))
    return file
