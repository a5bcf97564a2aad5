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
        ValueError: no folder is named, or it lacks a file.
    """
    if not items:
        raise ValueError('no folder with items: pass --metadata \'{"items": "FOLDER"}\' (in Python: metadata={...})')
    splits = {"test": file, "train": examples}
    return {split: _read(Path(items) / name) for split, name in splits.items() if name}


def _read(file: Path) -> Dataset:
    if not file.is_file():
        raise ValueError(f"no items: {file} is missing; the folder is the one that `zaya quickstart` writes items to")
    lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: texts have other line separators inside
    return Dataset.from_list([json.loads(line) for line in lines if line])
