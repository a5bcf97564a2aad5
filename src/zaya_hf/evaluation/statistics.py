"""What a score of a few hundred items tells about the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from .bootstrap import percentile_interval, resampled_sums


def _two_sided_z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, but it must be between 0 and 1, such as 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _check_counts(successes: int, n: int) -> None:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: there must be at least one trial, and no more successes")


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided interval for a probability of which `successes` of `n` trials are known (Wilson, 1927).

    Unlike the estimate plus and minus its standard error it stays within [0, 1] and has a width at 0 and n successes.

    Raises:
        ValueError: the counts or the confidence are impossible.
    """
    _check_counts(successes, n)
    z = _two_sided_z(confidence)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Exactly 0 and 1 at the ends, where rounding would leave a trace.
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == n else middle + half)


def above_chance(successes: int, n: int, chance: float, confidence: float = 0.99) -> bool:
    """Whether the Wilson interval lies above `chance`.

    The interval is the set of probabilities that the score test accepts; this is that test, so no rounding of the
    interval's ends is in it.

    Args:
        successes, n: how many items were right, and how many there were.
        chance: the accuracy of guessing.
        confidence: of the interval.

    Raises:
        ValueError: the counts, the chance or the confidence are impossible.
    """
    _check_counts(successes, n)
    if not 0 < chance < 1:
        raise ValueError(f"chance is {chance}, but it must be between 0 and 1, such as 0.25 for four choices")
    excess = successes - n * chance
    return excess > _two_sided_z(confidence) * math.sqrt(n * chance * (1 - chance))


def bootstrap_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), whole items redrawn (Efron, 1979).

    For bits per byte over documents: the bits and the bytes of a document stay together.

    Args:
        numerators, denominators: one of each per item; denominators are positive.
        draws: how many samples of the items are drawn with replacement.
        seed: of the draws; the same seed gives the same interval.

    Raises:
        ValueError: there are no items, the lengths differ, a denominator is not positive, or confidence or draws are
            impossible.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.ndim != 1 or top.shape != bottom.shape or not len(top):
        raise ValueError(f"{top.size} numerators and {bottom.size} denominators: there must be one of each per item")
    if not (np.isfinite(top).all() and np.isfinite(bottom).all() and (bottom > 0).all()):
        raise ValueError("numerators must be finite, and denominators finite and positive")
    sums = resampled_sums(np.column_stack([top, bottom]), draws, np.random.default_rng(seed))
    return percentile_interval(sums[:, 0] / sums[:, 1], confidence)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers is right, of `n` answers of which `correct` are.

    1 - C(n - correct, k) / C(n, k) (Chen et al., 2021, arXiv 2107.03374); 1 - (1 - correct / n)**k is too low.

    Raises:
        ValueError: the counts are impossible, or `k` is not in 1 to `n`.
    """
    _check_counts(correct, n)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} answers: k must be at least 1 and at most the number of answers")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for the size of their family, in the order given (Holm, 1979).

    Rejecting where the adjusted p is below a level keeps the chance of any wrong rejection below that level, however
    the tests depend on each other.

    Args:
        p_values: of the tests of the family.

    Raises:
        ValueError: one is not in 0 to 1.
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"p is {p}, but it must be in 0 to 1")
    adjusted, reached = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = reached
    return adjusted
