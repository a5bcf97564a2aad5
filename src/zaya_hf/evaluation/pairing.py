"""Whether two finished runs are of the same items, so that their scores may be compared item by item."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .finished_runs import FinishedRun

_TEMPLATES = ("chat_template", "system")  # settings that change every prompt; hashes of prompts then differ rightly

_TOLD = ("dtype", "max_length", "gen_kwargs", "thinking", "seeds")  # that change numbers, of one model or of both


@dataclass
class Pairing:
    """`refused` is one line that says why the runs cannot be compared, or None; `notes` say what else differs."""

    refused: str | None = None
    prompts_differ: bool = False
    notes: list[str] = field(default_factory=list)


def pair(run: FinishedRun, other: FinishedRun) -> Pairing:
    """Check the runs of two models on one task: metric, shots, items and their texts, targets and prompts.

    Prompts may differ only where the chat template or the system prompt does.
    """
    names = f"{run.model} and {other.model}"
    for what, first, second in (
        ("primary metric", run.metric, other.metric),
        ("number of examples in the prompt", run.result.get("num_fewshot"), other.result.get("num_fewshot")),
    ):
        if first != second:
            return Pairing(f"{run.task}: the {what} of {names} differs, {first} and {second}")
    a, b = run.items, other.items
    for one in (run, other):
        if one.unscored:
            return Pairing(f"{one.task}: {one.unscored} items of {one.model} have no finite score")
    if a.doc_ids != b.doc_ids:
        both = len(set(a.doc_ids) & set(b.doc_ids))
        return Pairing(
            f"{run.task}: {run.model} has {len(a.doc_ids)} items and {other.model} {len(b.doc_ids)}, {both} of them in "
            "both; evaluate both with the same limit"
        )
    for what, first, second in (
        ("data", a.doc_hashes, b.doc_hashes),
        ("right answer", a.target_hashes, b.target_hashes),
    ):
        if first != second:
            return Pairing(f"{run.task}: the {what} of {_where(a.doc_ids, first, second)} is not the same for {names}")
    if not np.array_equal(a.sizes, b.sizes):
        where = _where(a.doc_ids, a.sizes.tolist(), b.sizes.tolist())
        return Pairing(f"{run.task}: the size of {where} is not the same for {names}")
    found = Pairing(prompts_differ=a.prompt_hashes != b.prompt_hashes)
    ours, theirs = run.result.get("settings") or {}, other.result.get("settings") or {}
    templates_differ = any(ours.get(key) != theirs.get(key) for key in _TEMPLATES)
    if found.prompts_differ and not templates_differ:
        where = _where(a.doc_ids, a.prompt_hashes, b.prompt_hashes)
        return Pairing(f"{run.task}: the prompt of {where} is not the same for {names}, which use the same template")
    if found.prompts_differ:
        found.notes.append(f"the prompts of {names} differ, because their chat templates or system prompts do")
    for key in _TOLD:
        if ours.get(key) != theirs.get(key):
            found.notes.append(f"{key} is {ours.get(key)} for {run.model} and {theirs.get(key)} for {other.model}")
    if run.result.get("versions") != other.result.get("versions"):
        found.notes.append("the runs were made with different versions of the software")
    return found


def _where(doc_ids: list[int], first: list[Any], second: list[Any]) -> str:
    """Which items differ, in words."""
    differing = [doc for doc, one, two in zip(doc_ids, first, second, strict=True) if one != two]
    return f"item {differing[0]}" + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
