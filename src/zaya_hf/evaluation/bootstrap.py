"""Bootstrap (Efron, 1979) of sums over items, in little memory, and intervals of what is made of the sums."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_AT_ONCE = 2_000_000  # counts in memory


def resampled_sums(rows: Array, draws: int, rng: np.random.Generator) -> Array:
    """Sums of `rows` over as many rows redrawn with replacement, `draws` times.

    Columns stay together, so ratios and differences of the columns of one draw are those of a bootstrap of whole rows.
    Rows that are equal are counted instead of drawn, which is the same distribution: right and wrong answers of two
    models are four kinds of rows, however many items there are.

    Args:
        rows: [rows, columns].
        draws: how many samples.
        rng: what is drawn from. Independent groups of rows need different ones or one after the other.

    Returns: [draws, columns].

    Raises:
        ValueError: there are no rows, or draws is below 1.
    """
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"there is nothing to draw from in rows of shape {rows.shape}; it must be [rows, columns]")
    if draws < 1:
        raise ValueError(f"draws is {draws}, but it must be at least 1")
    kinds, sizes = np.unique(rows, axis=0, return_counts=True)
    if len(kinds) == 1:
        return np.repeat(kinds * len(rows), draws, axis=0)
    if 2 * len(kinds) > len(rows):  # few are equal: drawing each is faster
        kinds, sizes = rows, np.ones(len(rows), dtype=np.int64)
    found = np.empty((draws, rows.shape[1]))
    step = max(1, _AT_ONCE // len(kinds))
    for start in range(0, draws, step):
        found[start : start + step] = _counts(sizes, min(step, draws - start), rng) @ kinds
    return found


def _counts(sizes: NDArray[np.int64], draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each kind is drawn [draws, kinds], if there are `sizes` of each and as many draws as there are."""
    total = int(sizes.sum())
    if len(sizes) < total:
        return rng.multinomial(total, sizes / total, size=draws)
    drawn = rng.integers(0, total, size=(draws, total)) + total * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * total).reshape(draws, total)


def percentile_interval(drawn: Array, confidence: float = 0.95) -> tuple[float, float]:
    """The middle part of bootstrap values [draws].

    Raises:
        ValueError: confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, but it must be between 0 and 1, such as 0.95")
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def bca_interval(drawn: Array, value: float, left_out: Array, confidence: float = 0.95) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval (Efron, 1987).

    Args:
        drawn: bootstrap values [draws].
        value: of the items as they are.
        left_out: the values without one item each [items] (jackknife).
        confidence: of the interval.

    Returns: the percentile interval where there is nothing to correct by: `value` is outside all of `drawn`, or every
        item weighs the same.

    Raises:
        ValueError: confidence is not between 0 and 1.
    """
    low, high = percentile_interval(drawn, confidence)
    below = (np.mean(drawn < value) + np.mean(drawn <= value)) / 2
    deviations = left_out.mean() - left_out
    spread = float((deviations**2).sum())
    if not 0 < below < 1 or spread <= 0:
        return low, high
    normal = NormalDist()
    bias = normal.inv_cdf(float(below))
    acceleration = float((deviations**3).sum()) / (6 * spread**1.5)

    def corrected(share: float) -> float:
        shifted = bias + normal.inv_cdf(share)
        return normal.cdf(bias + shifted / (1 - acceleration * shifted))

    low, high = np.quantile(drawn, [corrected((1 - confidence) / 2), corrected((1 + confidence) / 2)])
    return float(low), float(high)
