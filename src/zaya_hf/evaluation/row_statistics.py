"""Scores and paired differences of models on one task, or on a group of tasks whose parts are drawn apart."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bootstrap import Array, bca_interval, percentile_interval, resampled_sums
from .finished_runs import FinishedRun
from .paired import (
    correlation,
    mcnemar,
    sign_flips,
    smallest_detectable,
    smallest_detectable_by_mcnemar,
    stderr_of_strata,
)
from .statistics import above_chance, wilson_interval

Interval = list[float] | None


@dataclass(frozen=True)
class Settings:
    """Of all intervals and tests of a comparison."""

    confidence: float = 0.95
    draws: int = 10_000
    seed: int = 0
    alpha: float = 0.05
    power: float = 0.8


class RowStatistics:
    """Models on the same items of one row of the table, redrawn together, so that differences are paired.

    A row is one task or a group of them. What is redrawn is the items, each task's on their own; where a task's items
    come in clusters, such as questions on one passage, the clusters. The value of a group is that of all its items
    together, which is the mean of its tasks weighted by their sizes.

    Args:
        name: of the row; different ones have independent draws.
        kind: of the metric, one of `finished_runs.KINDS`.
        runs: for every model the runs on the row's tasks in the same order, of the same items.
        settings: of the statistics.
    """

    def __init__(self, name: str, kind: str, runs: dict[str, Sequence[FinishedRun]], settings: Settings) -> None:
        self.kind, self.settings, self._name = kind, settings, name
        self._column = {model: column for column, model in enumerate(runs)}
        parts = list(zip(*runs.values(), strict=True))
        tables = [_table(part) for part in parts]
        self._items: Array = np.concatenate(tables)  # [items, models + 1]: scores of every model, and sizes
        self._strata = [_clustered(table, part[0]) for table, part in zip(tables, parts, strict=True)]
        self.clustered = any(len(units) < len(table) for units, table in zip(self._strata, tables, strict=True))
        self.items = len(self._items)
        self._sums = self._items.sum(axis=0)
        self._values = self._of(self._sums[None])[0]
        self._drawn, self._drawn_macro = self._draw()

    @property
    def is_group(self) -> bool:
        return len(self._strata) > 1

    def value(self, model: str) -> float:
        return float(self._values[self._column[model]])

    def drawn(self, model: str) -> Array:
        """Bootstrap values [draws], whose draws are those of the other models in this row."""
        return self._drawn[:, self._column[model]]

    def item_values(self, model: str) -> Array:
        """The items' own values [items], in the metric's unit."""
        ratios = self._items[:, self._column[model]] / self._items[:, -1]
        return ratios / math.log(2) if self.kind == "bits_per_byte" else ratios

    def score(self, model: str, chance: float | None) -> dict[str, Any]:
        """Value of one model with its interval, and for a group the mean of its tasks and the tasks redrawn."""
        column = self._column[model]
        drawn, binary = self._drawn[:, column], self.kind == "binary"
        correct = round(self._sums[column]) if binary else None
        found: dict[str, Any] = {"value": self.value(model), "items": self.items, "correct": correct}
        interval, method = self._interval(drawn, self.value(model), self._left_out(column))
        if correct is not None and (interval is None or not (self.is_group or self.clustered)):
            interval, method = list(wilson_interval(correct, self.items, self.settings.confidence)), "Wilson"
        above = None
        if correct is not None and chance and not self.clustered:  # the test takes items to be independent
            above = above_chance(correct, self.items, chance)
        elif chance and interval is not None and self.kind == "binary":
            above = interval[0] > chance
        found |= {"interval": interval, "interval_method": method, "above_chance": above}
        found["stderr"] = self._stderr(column)
        return found | self._of_group([column], [1.0], "macro")

    def pair(self, model: str, baseline: str) -> dict[str, Any]:
        """Difference of `model` to `baseline` with intervals and tests; see `comparison.compare`."""
        columns = [self._column[model], self._column[baseline]]
        first, second = self.item_values(model), self.item_values(baseline)
        same = bool((first == second).all())
        difference = 0.0 if same else self.value(model) - self.value(baseline)
        drawn = self._drawn[:, columns[0]] - self._drawn[:, columns[1]]
        left_out = self._left_out(columns[0]) - self._left_out(columns[1])
        interval, method = (None, None) if same else self._interval(drawn, difference, left_out)
        stderr = 0.0 if same else self._stderr(*columns)
        found: dict[str, Any] = {
            "n": self.items,
            "value": self.value(model),
            "baseline_value": self.value(baseline),
            "difference": difference,
            "stderr": stderr,
            "interval": interval,
            "interval_method": method,
            "interval_percentile": None if interval is None else self._percentile(drawn),
            "smallest_detectable": None,
            "correlation": correlation(first, second),
            "no_item_differs": same,
        }
        found |= self._tests(*columns)
        levels = self.settings.power, self.settings.alpha
        if found["test"] == "McNemar":
            discordant = (found["n10"] + found["n01"]) / self.items
            found["smallest_detectable"] = smallest_detectable_by_mcnemar(self.items, discordant, *levels)
        elif stderr:
            found["smallest_detectable"] = smallest_detectable(stderr, *levels)
        return found | self._of_group(columns, [1.0, -1.0], "difference_macro")

    def _draw(self) -> tuple[Array, Array]:
        """Values [draws, models] of the redrawn items: of all together, and the mean of the tasks'."""
        rng = self._rng("items")
        sums = np.zeros((self.settings.draws, len(self._sums)))
        macro = np.zeros((self.settings.draws, len(self._column)))
        for units in self._strata:
            drawn = resampled_sums(units, self.settings.draws, rng)
            sums += drawn
            macro += self._of(drawn) / len(self._strata)
        return self._of(sums), macro

    def _of(self, sums: Array) -> Array:
        """Values [..., models] of sums of scores and sizes [..., models + 1]."""
        ratios: Array = sums[..., :-1] / sums[..., -1:]
        if self.kind == "perplexity":
            return np.exp(ratios)
        return ratios / math.log(2) if self.kind == "bits_per_byte" else ratios

    def _slope(self, column: int) -> float:
        """Derivative of the value by the ratio of sums."""
        if self.kind == "perplexity":
            return float(self._values[column])
        return 1 / math.log(2) if self.kind == "bits_per_byte" else 1.0

    def _left_out(self, column: int) -> Array:
        """Values without one unit each [units]; only asked for where there is one task."""
        units = self._strata[0]
        if len(units) < 2:
            return np.zeros(1)
        return self._of(self._sums - units)[:, column] if not self.is_group else np.zeros(1)

    def _interval(self, drawn: Array, value: float, left_out: Array) -> tuple[Interval, str | None]:
        if np.ptp(drawn) <= 1e-12 * max(1.0, abs(value)):  # one item, or all alike: its width says nothing
            return None, None
        if self.is_group:
            return self._percentile(drawn), "cluster bootstrap" if self.clustered else "stratified bootstrap"
        interval = list(bca_interval(drawn, value, left_out, self.settings.confidence))
        return interval, "cluster bootstrap" if self.clustered else "BCa bootstrap"

    def _percentile(self, drawn: Array) -> list[float]:
        return list(percentile_interval(drawn, self.settings.confidence))

    def _stderr(self, column: int, other: int | None = None) -> float | None:
        """Of one model's value, or of its difference to another's."""
        return stderr_of_strata(
            [
                self._errors(units, column) - (0 if other is None else self._errors(units, other))
                for units in self._strata
            ],
            float(self._sums[-1]),
        )

    def _errors(self, units: Array, column: int) -> Array:
        ratio = self._sums[column] / self._sums[-1]
        errors: Array = (units[:, column] - ratio * units[:, -1]) * self._slope(column)
        return errors

    def _tests(self, column: int, other: int) -> dict[str, Any]:
        found: dict[str, Any] = {"n10": None, "n01": None, "p_mcnemar": None}
        flipped = np.concatenate([units[:, column] - units[:, other] for units in self._strata])
        found["p_permutation"] = sign_flips(flipped, self.settings.draws, self._rng("signs"))
        if self.kind == "binary":
            differences = self._items[:, column] - self._items[:, other]
            found["n10"], found["n01"] = int((differences > 0).sum()), int((differences < 0).sum())
            found["p_mcnemar"] = mcnemar(found["n10"], found["n01"])
        # Items of one cluster are not independent, as McNemar's test takes them to be.
        by_mcnemar = self.kind == "binary" and not self.clustered
        found["test"] = "McNemar" if by_mcnemar else "sign flips"
        found["p"] = found["p_mcnemar"] if by_mcnemar else found["p_permutation"]
        return found

    def _of_group(self, columns: list[int], signs: list[float], name: str) -> dict[str, Any]:
        """For a group: the mean of its tasks with its interval, and the interval of whole tasks redrawn."""
        found = {name: None, "interval_macro": None, "interval_clusters": None, "clusters": None}
        if not self.is_group:
            return found
        sums = np.stack([units.sum(axis=0) for units in self._strata])  # [tasks, models + 1]
        weights = np.zeros(len(self._column))
        weights[columns] = signs
        drawn = self._of(resampled_sums(sums, self.settings.draws, self._rng("tasks"))) @ weights
        macro = self._drawn_macro @ weights
        moves, moves_macro = np.ptp(drawn) > 1e-12, np.ptp(macro) > 1e-12
        return {
            name: float((self._of(sums) @ weights).mean()),
            "interval_macro": self._percentile(macro) if moves_macro else None,
            "interval_clusters": self._percentile(drawn) if moves else None,
            "clusters": len(sums),
        }

    def _rng(self, what: str) -> np.random.Generator:
        # Rows must not share draws: their errors would add up in a mean over rows.
        return np.random.default_rng([self.settings.seed, zlib.crc32(f"{self._name}\n{what}".encode())])


def _table(runs: Sequence[FinishedRun]) -> Array:
    """Scores of every model and sizes [items, models + 1]."""
    return np.column_stack([*(run.items.scores for run in runs), runs[0].items.sizes])


def _clustered(table: Array, run: FinishedRun) -> Array:
    """Sums over the items of each cluster [units, models + 1]; an item without one, or all in one, is a unit."""
    clusters = run.items.clusters
    if len(set(clusters)) < 2:
        return table
    names = [f"cluster {name}" if name is not None else f"item {index}" for index, name in enumerate(clusters)]
    _, places = np.unique(names, return_inverse=True)
    sums = np.zeros((int(places.max()) + 1, table.shape[1]))
    np.add.at(sums, places, table)
    return sums
