"""Loads the items that a training run writes from its held-out documents, from the folder that the metadata names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def load(items: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    """The split "test" of one task, in memory.

    Args:
        items: `data/items` in a run's folder.
        file: in it; set by the task.

    Raises:
        ValueError: no folder is named, or it lacks the file.
    """
    if not items:
        raise ValueError('no folder with items: pass --metadata \'{"items": "RUN/data/items"}\'')
    path = Path(items) / file
    if not path.is_file():
        raise ValueError(f"no items: {path} is missing; a run with evaluation.lm_eval writes it")
    # Not splitlines: texts have other line separators inside.
    lines = path.read_text(encoding="utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}
