"""Means over tasks of equal weight, with the items of each task redrawn on their own and never pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .bootstrap import percentile_interval
from .row_statistics import RowStatistics, Settings


def suite_mean(
    rows: Mapping[str, Mapping[str, RowStatistics]],
    refused: Mapping[str, Sequence[str]],
    models: Sequence[str],
    baseline: str,
    settings: Settings,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores and pairs of every model over `rows`.

    Args:
        rows: for every task the statistics that each model is in; two models are paired where it is the same object.
        refused: for a model the tasks on which it cannot be paired.
        models: all of them; `baseline` is one.
        settings: of the statistics.

    Returns: {model: {"value", "interval", "interval_method"}}, and for every other model than the baseline {model:
        {"difference", "interval", "stderr", "p", "verdict"}} or {"refused": reason}. The standard error is that of the
        bootstrap, and the verdict that of the interval, for one comparison.
    """
    drawn = {model: np.mean([row[model].drawn(model) for row in rows.values()], axis=0) for model in models}
    values = {model: float(np.mean([row[model].value(model) for row in rows.values()])) for model in models}
    scores: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    for model in models:
        moves = np.ptp(drawn[model]) > 0
        scores[model] = {
            "value": values[model],
            "interval": list(percentile_interval(drawn[model], settings.confidence)) if moves else None,
            "interval_method": "stratified bootstrap" if moves else None,
        }
        if model == baseline:
            continue
        unpaired = [task for task in rows if task in refused.get(model, ())]
        if unpaired:
            pairs[model] = {"refused": f"it cannot be compared with {baseline} on {', '.join(unpaired)}"}
            continue
        differences = drawn[model] - drawn[baseline]
        interval = None
        if np.ptp(differences) > 1e-12:
            interval = list(percentile_interval(differences, settings.confidence))
        pairs[model] = {
            "difference": values[model] - values[baseline],
            "interval": interval,
            "stderr": float(differences.std(ddof=1)),
            "p": None,
            "verdict": _verdict(values[model] - values[baseline], interval),
        }
    return scores, pairs


def _verdict(difference: float, interval: list[float] | None) -> str:
    if interval is None:
        return "no item differs" if abs(difference) < 1e-12 else "cannot be told apart"
    if interval[0] <= 0 <= interval[1]:
        return "cannot be told apart"
    return "better" if difference > 0 else "worse"
