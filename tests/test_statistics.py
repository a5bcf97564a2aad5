"""Intervals of scores against hand values, scipy and simulated data."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_hf.evaluation.bootstrap import bca_interval, percentile_interval, resampled_sums
from zaya_hf.evaluation.statistics import above_chance, bootstrap_ratio_interval, holm, pass_at_k, wilson_interval


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


class TestResampledSums:
    def test_equal_rows_are_counted_as_if_each_was_drawn(self) -> None:
        """Sums of 0 and 1 redrawn are binomial: mean n p, variance n p (1 - p)."""
        rows = np.repeat([[1.0, 1.0], [0.0, 1.0]], [30, 70], axis=0)
        sums = resampled_sums(rows, 40_000, np.random.default_rng(0))
        assert (sums[:, 1] == 100).all()
        assert sums[:, 0].mean() == pytest.approx(30, abs=0.1)
        assert sums[:, 0].var() == pytest.approx(21, rel=0.03)

    def test_columns_are_drawn_together(self) -> None:
        rows = np.random.default_rng(0).normal(size=(50, 1)) @ [[1.0, -2.0, 0.5]]
        sums = resampled_sums(rows, 100, np.random.default_rng(1))
        assert sums[:, 1] == pytest.approx(-2 * sums[:, 0])

    def test_memory_is_bounded_and_parts_do_not_show(self) -> None:
        rows = np.random.default_rng(0).normal(size=(14_042, 2))
        tracemalloc.start()
        sums = resampled_sums(rows, 600, np.random.default_rng(1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60e6  # the counts alone would be 67 MB, and as much again as fractions
        first = resampled_sums(rows, 200, np.random.default_rng(1))
        np.testing.assert_array_equal(sums[:200], first)

    def test_one_row_and_equal_rows_do_not_move(self) -> None:
        for rows in (np.array([[2.0, 1.0]]), np.full((7, 2), 0.1)):
            sums = resampled_sums(rows, 5, np.random.default_rng(0))
            assert np.ptp(sums, axis=0).tolist() == [0, 0]
            assert sums[0] == pytest.approx(rows.sum(axis=0))

    @pytest.mark.parametrize(("rows", "draws", "message"), [(0, 5, "nothing to draw"), (3, 0, "draws is 0")])
    def test_impossible_input(self, rows: int, draws: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            resampled_sums(np.ones((rows, 2)), draws, np.random.default_rng(0))


class TestBca:
    @pytest.mark.parametrize("confidence", [0.9, 0.95])
    @pytest.mark.parametrize("draw", ["exponential", "binary"])
    def test_scipy_gives_the_same(self, draw: str, confidence: float) -> None:
        stats = pytest.importorskip("scipy.stats")
        rng = np.random.default_rng(0)
        values = rng.exponential(size=40) if draw == "exponential" else (rng.random(40) < 0.2) * 1.0
        options = {"n_resamples": 2000, "confidence_level": confidence, "method": "BCa"}
        expected = stats.bootstrap((values,), np.mean, rng=np.random.default_rng(1), **options)
        drawn = expected.bootstrap_distribution
        left_out = (values.sum() - values) / (len(values) - 1)
        found = bca_interval(drawn, values.mean(), left_out, confidence)
        assert found == pytest.approx(tuple(expected.confidence_interval), abs=1e-12)
        assert found != pytest.approx(percentile_interval(drawn, confidence), abs=1e-3)

    def test_nothing_to_correct_by(self) -> None:
        drawn = np.linspace(0, 1, 101)
        expected = percentile_interval(drawn)
        assert bca_interval(drawn, 2.0, np.array([0.0, 1.0])) == expected  # value outside
        assert bca_interval(drawn, 0.5, np.full(9, 0.5)) == expected  # every item weighs the same

    def test_impossible_confidence(self) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            bca_interval(np.ones(3), 1.0, np.ones(3), 95)


class TestPassAtK:
    @pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 2), (6, 0), (6, 6), (7, 3)])
    def test_it_is_the_share_of_the_sets_of_k_that_hold_a_right_one(self, n: int, correct: int) -> None:
        answers = [1] * correct + [0] * (n - correct)
        for k in range(1, n + 1):
            sets = list(itertools.combinations(answers, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, sets)) / len(sets))

    def test_published_form(self) -> None:
        """Chen et al. (2021), figure 3: 1 - prod(1 - k / arange(n - c + 1, n + 1))."""
        for correct, k in ((1, 10), (13, 10), (55, 100)):
            expected = 1 - np.prod(1 - k / np.arange(200 - correct + 1, 201))
            assert pass_at_k(200, correct, k) == pytest.approx(expected, abs=1e-12)
        assert pass_at_k(200, 13, 10) > 1 - (1 - 13 / 200) ** 10 + 0.008  # the plug-in estimate is too low

    @pytest.mark.parametrize(("n", "correct", "k"), [(0, 0, 1), (3, 4, 1), (3, 1, 0), (3, 1, 4)])
    def test_impossible_counts(self, n: int, correct: int, k: int) -> None:
        with pytest.raises(ValueError, match=r"successes of|pass@"):
            pass_at_k(n, correct, k)


class TestHolm:
    def test_textbook_case(self) -> None:
        """Four hypotheses at 0.05, of which the fourth and the first are rejected: 4 * 0.005 and 3 * 0.01, but not
        2 * 0.03; the one after a failure cannot pass it, so 0.04 is 0.06 too."""
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_ends(self) -> None:
        assert holm([]) == []
        assert holm([0.2]) == [0.2]
        assert holm([0.9, 0.8, 1.0]) == [1.0, 1.0, 1.0]
        assert holm([0.0, 0.01]) == [0.0, 0.01]

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
    def test_order_is_kept_and_no_p_gets_smaller(self, values: list[float]) -> None:
        found = holm(values)
        assert all(p <= adjusted <= min(1, p * len(values)) for p, adjusted in zip(values, found, strict=True))
        order = sorted(range(len(values)), key=lambda index: values[index])
        assert [found[index] for index in order] == sorted(found)

    @pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
    def test_impossible_p(self, p: float) -> None:
        with pytest.raises(ValueError, match="0 to 1"):
            holm([0.5, p])
