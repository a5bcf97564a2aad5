"""Loads the quickstart's evaluation items from the folder that the metadata names under "items"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def load(items: str | None = None, file: str = "", examples: str = "", **_: Any) -> dict[str, Dataset]:
    """The splits of one task, in memory: "test", and "train" for the solved examples of a prompt.

    Args:
        items: folder with the JSON-lines files that `zaya quickstart` writes.
        file, examples: names of files in it; set by the task.

    Raises:
        ValueError: no folder is named, or it lacks a file, or a file has no items or one that is none.
    """
    if not items:
        raise ValueError('no folder with items: pass --metadata \'{"items": "FOLDER"}\' (in Python: metadata={...})')
    splits = {"test": file, "train": examples}
    return {split: _read(Path(items) / name) for split, name in splits.items() if name}


def _read(file: Path) -> Dataset:
    if not file.is_file():
        raise ValueError(f"no items: {file} is missing; the folder is the one that `zaya quickstart` writes items to")
    found = []
    # Not splitlines: texts have other line separators inside.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line:
            found.append(_item(line, f"{file}, line {number}"))
    if not found:
        raise ValueError(f"no items: {file} is empty")
    return Dataset.from_list(found)


def _item(line: str, where: str) -> dict[str, Any]:
    """An item: a text, or choices of which the one with the index `answer` is right."""
    try:
        item: dict[str, Any] = json.loads(line)
        texts = item["choices"] if "choices" in item else [item["text"]]
        whole = bool(texts) and all(isinstance(text, str) and text for text in texts)
        whole = whole and ("choices" not in item or 0 <= item["answer"] < len(texts))
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{where}: no item; expected a text, or choices and the index of the answer among them")
    return item
