"""The rows of an evaluation's table: tasks, and groups with their tasks below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .finished_runs import FinishedRun

Runs = Mapping[str, Mapping[str, FinishedRun]]  # model -> task -> run


@dataclass(frozen=True)
class Row:
    """A task, or a group of `leaves`; a task of a group names it as `parent`. `kind` is that of the metric, `expected`
    the number of items that the suite says."""

    id: str
    title: str
    ability: str | None
    parent: str | None
    leaves: tuple[str, ...]
    is_group: bool
    kind: str
    expected: int | None
    about: dict[str, Any]

    def runs_of(self, model: str, runs: Runs) -> list[FinishedRun] | None:
        """A model's runs on the leaves, or None if one of them is not finished."""
        found = [runs[model][leaf] for leaf in self.leaves if leaf in runs[model]]
        return found if len(found) == len(self.leaves) else None


def table_rows(runs: Runs, suite: Mapping[str, Any]) -> list[Row]:
    """The rows in the suite's order, each group before its tasks.

    Raises:
        ValueError: a group has tasks whose metrics cannot be put together.
    """
    entries = {entry["task"]: (place, entry) for place, entry in enumerate(suite.get("entries") or [])}
    by_task: dict[str, list[FinishedRun]] = {}
    for found in runs.values():
        for task, run in found.items():
            by_task.setdefault(task, []).append(run)
    parts: dict[str, list[str]] = {}  # group, or task of none -> its leaves
    for task, same in by_task.items():
        parts.setdefault(same[0].result.get("group") or task, []).append(task)

    def place(row: str) -> int:
        first = by_task[parts[row][0]][0]
        return entries[entry][0] if (entry := first.result.get("entry")) in entries else len(entries)

    rows = []
    for row in sorted(parts, key=place):  # stable: others as they were found
        first = by_task[parts[row][0]][0]
        _, entry = entries.get(first.result.get("entry"), (0, {}))
        if first.result.get("group") is None:
            rows.append(_row(row, by_task, [row], expected=entry.get("items")))
            continue
        title = str(entry.get("title") or row)
        rows.append(_row(row, by_task, parts[row], title=title, expected=entry.get("items")))
        rows.extend(_row(leaf, by_task, [leaf], parent=row) for leaf in parts[row])
    return rows


def _row(
    name: str,
    by_task: Mapping[str, list[FinishedRun]],
    leaves: Sequence[str],
    *,
    parent: str | None = None,
    title: str | None = None,
    expected: int | None = None,
) -> Row:
    """A group if it has a title of its own."""
    of_leaves = [by_task[leaf] for leaf in leaves]
    every = [run for same in of_leaves for run in same]
    first = every[0]
    kinds = {run.kind for run in every}
    if len(kinds) > 1 and kinds != {"binary", "mean"}:
        raise ValueError(f"{name} has metrics that cannot be put together: {', '.join(sorted(kinds))}")
    kind = "mean" if len(kinds) > 1 else first.kind
    sizes = [len(same[0].items.doc_ids) for same in of_leaves]
    chances = [same[0].primary.get("chance") for same in of_leaves]
    shares = not any(bool(((run.items.scores < 0) | (run.items.scores > 1)).any()) for run in every)
    higher = bool(first.primary.get("higher_is_better", True))
    about = {
        "metric": first.primary["metric"],
        "filter": first.primary["filter"],
        "metric_kind": kind,
        "higher_is_better": higher,
        "in_suite_mean": kind in ("binary", "mean") and higher and shares,
        "items": sum(sizes),
        "shots": first.result.get("num_fewshot"),
        "chance": _weighted(chances, sizes),
    }
    return Row(
        id=name,
        title=title or str(first.result.get("title") or name),
        ability=first.result.get("ability"),
        parent=parent,
        leaves=tuple(leaves),
        is_group=title is not None,
        kind=kind,
        expected=expected,
        about=about,
    )


def _weighted(chances: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    known = [size * chance for size, chance in zip(sizes, chances, strict=True) if chance is not None]
    return math.fsum(known) / sum(sizes) if len(known) == len(sizes) else None


def described(row: Row) -> dict[str, Any]:
    """The row as the comparison lists it."""
    return {
        "id": row.id,
        "kind": "group" if row.is_group else "leaf",
        "parent": row.parent,
        "leaves": list(row.leaves) if row.is_group else [],
        "title": row.title,
        "ability": row.ability,
        **row.about,
    }
