"""Intervals of scores against hand values, scipy and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_hf.evaluation.statistics import above_chance, bootstrap_ratio_interval, wilson_interval


class TestWilson:
    @pytest.mark.parametrize(
        ("successes", "n", "low", "high"),
        [
            # Newcombe (1998), Statistics in Medicine 17, table I: method 3, 95 %.
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ],
    )
    def test_published_values(self, successes: int, n: int, low: float, high: float) -> None:
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)

    @given(n=st.integers(1, 500), share=st.floats(0, 1), confidence=st.sampled_from([0.5, 0.95, 0.99]))
    def test_scipy_gives_the_same(self, n: int, share: float, confidence: float) -> None:
        scipy_stats = pytest.importorskip("scipy.stats")
        successes = round(share * n)
        expected = scipy_stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
        assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)

    def test_the_ends_are_exact_and_mirrored(self) -> None:
        assert wilson_interval(0, 7)[0] == 0.0
        assert wilson_interval(7, 7)[1] == 1.0
        low, high = wilson_interval(2, 9)
        assert wilson_interval(7, 9) == pytest.approx((1 - high, 1 - low))

    @pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 3), (4, 3)])
    def test_impossible_counts(self, successes: int, n: int) -> None:
        with pytest.raises(ValueError, match=f"{successes} successes of {n}"):
            wilson_interval(successes, n)

    @pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
    def test_impossible_confidence(self, confidence: float) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            wilson_interval(1, 2, confidence)


class TestAboveChance:
    @pytest.mark.parametrize("chance", [0.1, 0.25, 0.5])
    @pytest.mark.parametrize("n", [1, 30, 200, 997])
    def test_it_is_the_interval_that_lies_above(self, n: int, chance: float) -> None:
        found = [above_chance(k, n, chance) for k in range(n + 1)]
        assert found == [wilson_interval(k, n, 0.99)[0] > chance for k in range(n + 1)]
        assert not found[0]
        assert found == sorted(found)

    def test_the_least_score_that_counts(self) -> None:
        # 200 items of four choices: 50 + 2.5758 * sqrt(37.5) = 65.77
        assert [above_chance(k, 200, 0.25) for k in (65, 66)] == [False, True]
        assert [above_chance(k, 200, 0.25, confidence=0.95) for k in (62, 63)] == [False, True]

    def test_guessing_rarely_counts(self) -> None:
        n, tail = 200, 0.0
        for k in range(n + 1):
            if above_chance(k, n, 0.25):
                tail += math.comb(n, k) * 0.25**k * 0.75 ** (n - k)
        assert 0.002 < tail < 0.01

    @pytest.mark.parametrize("chance", [0.0, 1.0, 25.0])
    def test_impossible_chance(self, chance: float) -> None:
        with pytest.raises(ValueError, match="chance is"):
            above_chance(1, 2, chance)


class TestBootstrap:
    def test_the_same_seed_gives_the_same(self) -> None:
        values = np.random.default_rng(1).normal(2, 0.3, 50)
        first = bootstrap_ratio_interval(values, np.ones(50), seed=3)
        assert first == bootstrap_ratio_interval(values, np.ones(50), seed=3)
        assert first != bootstrap_ratio_interval(values, np.ones(50), seed=4)

    def test_of_means_it_is_the_normal_interval(self) -> None:
        values = np.random.default_rng(0).normal(2, 0.3, 400)
        half = 1.96 * values.std() / 20
        found = bootstrap_ratio_interval(values, np.ones(400))
        assert found == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)

    def test_items_are_weighted_by_their_size(self) -> None:
        """Of large texts at 1 bit and small ones at 5, the ratio is near 1 although the mean of ratios is 3."""
        sizes = np.array([1000.0] * 50 + [10.0] * 50)
        low, high = bootstrap_ratio_interval(np.array([1.0] * 50 + [5.0] * 50) * sizes, sizes)
        assert 1.0 < low < 1.04 < high < 1.1

    def test_numerator_and_denominator_stay_together(self) -> None:
        sizes = np.random.default_rng(0).integers(1, 1000, 30)
        assert bootstrap_ratio_interval(2.5 * sizes, sizes) == pytest.approx((2.5, 2.5), abs=1e-12)

    def test_more_confidence_is_wider(self) -> None:
        values = np.random.default_rng(1).normal(2, 0.3, 50)
        narrow, wide = (bootstrap_ratio_interval(values, np.ones(50), confidence) for confidence in (0.5, 0.99))
        assert wide[0] < narrow[0] < narrow[1] < wide[1]

    @pytest.mark.parametrize(
        ("numerators", "denominators", "draws", "message"),
        [
            ([], [], 10, "one of each"),
            ([1.0], [1.0, 2.0], 10, "1 numerators and 2 denominators"),
            ([1.0], [0.0], 10, "positive"),
            ([math.nan], [1.0], 10, "finite"),
            ([1.0], [1.0], 0, "draws is 0"),
        ],
    )
    def test_impossible_input(
        self, numerators: list[float], denominators: list[float], draws: int, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            bootstrap_ratio_interval(numerators, denominators, draws=draws)
