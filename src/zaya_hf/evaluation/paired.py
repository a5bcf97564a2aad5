"""Two models on the same items: what their difference is, and whether the items can tell it from none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from scipy.stats import binom, binomtest

from .bootstrap import Array


def mcnemar(n10: int, n01: int) -> float:
    """Exact two-sided p of McNemar's test (1947): the items that only one model has right, as throws of a fair coin.

    Items that both have right or both wrong say nothing about the difference; with no other items p is 1.

    Raises:
        ValueError: a count is negative.
    """
    if n10 < 0 or n01 < 0:
        raise ValueError(f"{n10} and {n01} discordant items: counts cannot be negative")
    return float(binomtest(n10, n10 + n01).pvalue) if n10 + n01 else 1.0


def sign_flips(differences: Array, draws: int, rng: np.random.Generator) -> float:
    """Two-sided p of the permutation test of paired differences (Fisher, 1935): under no difference each item's could
    as well have had the other sign.

    The sum of the differences is compared with `draws` sums of flipped ones; the one observed counts as a draw (Phipson
    & Smyth, 2010), so p is never 0. Equal sizes are flipped together, by a binomial count.

    Args:
        differences: one per item, or per cluster the sum of its items' [items].
        draws: how many flips of all.
        rng: what is drawn from.
    """
    sizes, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    if not len(sizes):
        return 1.0
    if 2 * len(sizes) > counts.sum():  # few are equal: flipping each is faster
        sizes, counts = np.repeat(sizes, counts), np.ones(counts.sum(), dtype=np.int64)
    total = float(sizes @ counts)
    observed = abs(math.fsum(differences))
    # Rounding must not make a sum of the same terms in another order smaller than the one observed.
    least = observed - 1e-9 * total
    reached, step = 0, max(1, 2_000_000 // len(sizes))
    for start in range(0, draws, step):
        shape = (min(step, draws - start), len(sizes))
        positive = (
            rng.integers(0, 2, size=shape, dtype=np.int8)
            if counts.max() == 1
            else rng.binomial(counts, 0.5, size=shape)
        )
        reached += int((np.abs(2 * (positive @ sizes) - total) >= least).sum())
    return (reached + 1) / (draws + 1)


def stderr_of_strata(strata: Sequence[Array], total: float) -> float | None:
    """Standard error of a mean or ratio, from what each unit adds to its error.

    With one stratum of single items it is sd / sqrt(n); with units that are clusters it is the clustered standard error
    (Miller, 2024, arXiv 2411.00640, equation 4, with the correction for few clusters).

    Args:
        strata: for each part of the items that is drawn on its own, value - estimate of every unit, summed over its
            items where it is a cluster [units]. Where a stratum has one unit only, all are taken as one stratum, which
            is never too small but for chance.
        total: what the sums are divided by: the number of items, or the sum of the denominators.

    Returns: None if there is one unit in all.
    """
    if min(len(units) for units in strata) < 2:
        strata = [np.concatenate(strata)]
    if len(strata[0]) < 2:
        return None
    variance = math.fsum(len(units) * float(units.var(ddof=1)) for units in strata)
    return math.sqrt(variance) / total


def smallest_detectable(stderr: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """The true difference that a two-sided test at `alpha` finds with probability `power`, given its standard error.

    About 2.8 standard errors; for binary scores that is 2.8 * sqrt((share of discordant items - difference**2) / n).

    Raises:
        ValueError: power or alpha is not between 0 and 1.
    """
    _check_levels(power, alpha)
    normal = NormalDist()
    return (normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * stderr


def smallest_detectable_by_mcnemar(
    items: int, discordant: float, power: float = 0.8, alpha: float = 0.05
) -> float | None:
    """The true difference that McNemar's exact test at `alpha` finds among so many items with probability `power`.

    With few discordant items this is more than 2.8 standard errors: with fewer than six no difference is found. It is
    computed by going through all numbers of discordant items (Miettinen, 1968), of which `discordant` is the expected
    share, or the difference itself where that is larger.

    Args:
        items: that both models have answered.
        discordant: share of items that exactly one model has right, 0 to 1.

    Returns:
        the difference, 0 to 1; None: there are too few items for any.

    Raises:
        ValueError: power or alpha is not between 0 and 1.
    """
    _check_levels(power, alpha)
    numbers = np.arange(items + 1)
    # The fewest of n discordant items that are significant when one model has them, and n + 1 if none are.
    least = np.minimum(binom.isf(alpha / 2, numbers, 0.5) + 1, numbers + 1)

    def found(difference: float) -> float:
        share = min(1.0, max(discordant, difference))
        better = 0.5 + difference / (2 * share)
        significant = binom.sf(least - 1, numbers, better) + binom.cdf(numbers - least, numbers, better)
        return float(binom.pmf(numbers, items, share) @ significant)

    if items < 1 or found(1.0) < power:
        return None
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high


def _check_levels(power: float, alpha: float) -> None:
    for name, value in (("power", power), ("alpha", alpha)):
        if not 0 < value < 1:
            raise ValueError(f"{name} is {value}, but it must be between 0 and 1")


def correlation(first: Array, second: Array) -> float | None:
    """Pearson's correlation of the items' scores [items]; None where one model's scores are all equal."""
    a, b = first - first.mean(), second - second.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / norm)) if norm > 0 else None
