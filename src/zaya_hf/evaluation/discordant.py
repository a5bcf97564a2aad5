"""The items on which two models differ most, with their texts where these may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .bootstrap import Array
from .finished_runs import FinishedRun

MOST_CHARACTERS = 2000
Place = tuple[int, int]  # (run, item in it)


def most_discordant(
    differences: Array, runs: Sequence[FinishedRun], others: Sequence[FinishedRun], most: int
) -> list[Place]:
    """The places of at most `most` items, first those that differ most.

    Items that one model is better at and those that the other is better at alternate. Among equal differences, as those
    of right and wrong are, the ones come first in which the models preferred their choices most clearly.

    Args:
        differences: of all items of the runs [items].
        runs, others: of the two models, on the same items.
    """
    places = [(run, item) for run, found in enumerate(runs) for item in range(len(found.items.doc_ids))]
    margins = np.concatenate([a.items.margins + b.items.margins for a, b in zip(runs, others, strict=True)])
    order = np.lexsort((np.arange(len(differences)), -margins, -np.abs(differences)))
    better = [int(index) for index in order if differences[index] > 0]
    worse = [int(index) for index in order if differences[index] < 0]
    return [places[index] for index in alternated([better, worse], most)]


def alternated(lists: Sequence[Sequence[Any]], most: int) -> list[Any]:
    """The first of each list, then the second of each, and so on, at most `most` in all."""
    longest = max((len(one) for one in lists), default=0)
    return [one[rank] for rank in range(longest) for one in lists if rank < len(one)][:most]


def described(run: FinishedRun, other: FinishedRun, item: int, scores: tuple[float, float]) -> dict[str, Any]:
    """One item as the comparison lists it.

    Args:
        run, other: of the model and of the one it is compared with.
        item: its place in both.
        scores: of both on it.
    """
    ours, theirs = run.texts(item), other.texts(item)
    prompt = theirs.get("prompt")
    return {
        "task": run.task,
        "doc_id": run.items.doc_ids[item],
        "model_score": scores[0],
        "baseline_score": scores[1],
        "difference": scores[0] - scores[1],
        "hidden": prompt is None,
        "prompt": None if prompt is None else prompt[-MOST_CHARACTERS:],  # the question is at the end
        "prompt_cut": prompt is not None and len(prompt) > MOST_CHARACTERS,
        "target": _cut(theirs.get("target")),
        "choices": theirs.get("choices"),
        "model_answer": _cut(ours.get("answer")),
        "baseline_answer": _cut(theirs.get("answer")),
    }


def _cut(text: Any) -> str | None:
    return None if text is None else str(text)[:MOST_CHARACTERS]
