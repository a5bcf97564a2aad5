"""Loads the items: of HumanEval from a file that `zaya eval data` fetched, of the others from the Hub or its cache."""

from __future__ import annotations

import json
from typing import Any

import datasets
from datasets import Dataset

from zaya_hf.evaluation import data

EXAMPLES = (2, 3, 4)  # of MBPP's own split for prompts, in its paper (Austin et al., 2021) and in lm-eval


def fetched(name: str = "", **_: Any) -> dict[str, Dataset]:
    """The split "test" of a set that `zaya eval data NAME` fetches.

    Raises:
        ValueError: it has not been fetched; the message names the command.
    """
    # Not splitlines: texts have other line separators inside.
    lines = data.items_path(name).read_text(encoding="utf-8").split("\n")
    return {"test": Dataset.from_list([json.loads(line) for line in lines if line])}


def humaneval_plus(**_: Any) -> dict[str, Dataset]:
    """The split "test" of HumanEval+.

    Raises:
        ValueError: it is not in the cache and cannot be fetched.
    """
    return {"test": _hub("evalplus/humanevalplus", None, "test")}


def mbpp(**_: Any) -> dict[str, Dataset]:
    """The split "test" of MBPP, and "examples": the three of its prompt.

    Raises:
        ValueError: it is not in the cache and cannot be fetched.
    """
    return {"test": _hub("google-research-datasets/mbpp", "full", "test"), "examples": _examples()}


def mbpp_plus(**_: Any) -> dict[str, Dataset]:
    """The split "test" of MBPP+ with MBPP's field names, and "examples" as of `mbpp`.

    Raises:
        ValueError: one of both is not in the cache and cannot be fetched.
    """
    return {"test": _hub("evalplus/mbppplus", None, "test").rename_column("prompt", "text"), "examples": _examples()}


def _examples() -> Dataset:
    by_number = {item["task_id"]: item for item in _hub("google-research-datasets/mbpp", "full", "prompt")}
    return Dataset.from_list([by_number[number] for number in EXAMPLES])


def _hub(path: str, name: str | None, split: str) -> Dataset:
    try:
        return datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError) as error:  # what datasets and the Hub's client raise when offline is one of both
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the data set {path} is not in the cache and cannot be fetched; run once with a network "
            f"(and without HF_HUB_OFFLINE, HF_DATASETS_OFFLINE): {reason[:160]}"
        ) from None
