"""Tests of paired differences against published cases, closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zaya_hf.evaluation.paired import (
    correlation,
    mcnemar,
    sign_flips,
    smallest_detectable,
    smallest_detectable_by_mcnemar,
    stderr_of_strata,
)

# Height of crossed minus self-fertilised maize in eighths of an inch: Darwin's data in Fisher (1935), The Design of
# Experiments, chapter III.
DARWIN = np.array([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48], dtype=np.float64)


class TestMcNemar:
    @pytest.mark.parametrize(
        ("n10", "n01", "p"),
        [
            (3, 7, 2 * (1 + 10 + 45 + 120) / 1024),  # Rosner, Fundamentals of Biostatistics, section 10.4: 0.344
            (20, 7, 0.0192),  # HellaSwag-100, a small model and the same with noise in its weights
            (0, 5, 2 / 32),
            (1, 0, 1.0),
            (6, 6, 1.0),
            (0, 0, 1.0),
        ],
    )
    def test_known_cases(self, n10: int, n01: int, p: float) -> None:
        assert mcnemar(n10, n01) == pytest.approx(p, abs=5e-5)
        assert mcnemar(n01, n10) == mcnemar(n10, n01)

    def test_many_items(self) -> None:
        """Agresti (2002), table 10.1: approval at two surveys, 150 and 86 changed their minds; z is 4.17."""
        z = (150 - 86) / math.sqrt(150 + 86)
        assert z == pytest.approx(4.17, abs=0.005)
        assert mcnemar(150, 86) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.35)

    def test_impossible_counts(self) -> None:
        with pytest.raises(ValueError, match="-1 and 3"):
            mcnemar(-1, 3)


class TestSignFlips:
    def test_fishers_own(self) -> None:
        """1,726 of the 32,768 arrangements have a sum of 314 or more either way: 5.267 %."""
        assert sign_flips(DARWIN, 200_000, np.random.default_rng(0)) == pytest.approx(1726 / 32768, abs=0.002)

    def test_scipy_gives_the_same(self) -> None:
        stats = pytest.importorskip("scipy.stats")
        differences = np.round(np.random.default_rng(3).normal(0.3, 1, 12), 1)
        exact = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
        found = sign_flips(differences, 100_000, np.random.default_rng(0))
        assert found == pytest.approx(exact.pvalue, abs=0.006)

    def test_of_right_and_wrong_it_is_mcnemars(self) -> None:
        differences = np.repeat([1.0, -1.0, 0.0], [20, 7, 73])
        assert sign_flips(differences, 200_000, np.random.default_rng(0)) == pytest.approx(mcnemar(20, 7), abs=0.002)

    def test_rounding_does_not_hide_equal_sums(self) -> None:
        """Of three equal differences, 2 of 8 flips are as far from 0, although 0.1 * 3 is not 0.1 + 0.1 + 0.1."""
        found = sign_flips(np.array([0.1, 0.1, 0.1]), 50_000, np.random.default_rng(0))
        assert found == pytest.approx(0.25, abs=0.01)

    def test_nothing_differs(self) -> None:
        assert sign_flips(np.zeros(5), 100, np.random.default_rng(0)) == 1.0

    def test_it_is_never_zero_and_the_seed_decides(self) -> None:
        large = np.linspace(1, 2, 500)
        assert sign_flips(large, 999, np.random.default_rng(0)) == 1 / 1000
        first, again, other = (sign_flips(DARWIN, 500, np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert first == again != other

    def test_false_alarms_are_as_many_as_said(self) -> None:
        rng = np.random.default_rng(0)
        found = [sign_flips(rng.normal(size=20), 400, rng) for _ in range(1000)]
        assert np.mean([p <= 0.05 for p in found]) == pytest.approx(0.05, abs=0.02)


class TestStderr:
    def test_single_items(self) -> None:
        """Fisher: mean 20.93, standard error 9.746, t 2.148."""
        found = stderr_of_strata([DARWIN - DARWIN.mean()], 15)
        assert found == pytest.approx(DARWIN.std(ddof=1) / math.sqrt(15))
        assert found == pytest.approx(9.746, abs=5e-4)
        assert DARWIN.mean() / found == pytest.approx(2.148, abs=5e-4)

    def test_clusters(self) -> None:
        """Miller (2024), equation 4: the variance of single items and the products of those of one cluster."""
        rng = np.random.default_rng(0)
        clusters = np.repeat(np.arange(12), 4)
        errors = rng.normal(size=12)[clusters] + rng.normal(size=48)
        errors -= errors.mean()
        products = sum(errors[i] * errors[j] for i in range(48) for j in range(48) if clusters[i] == clusters[j])
        expected = math.sqrt(products) / 48
        sums = np.bincount(clusters, errors)
        assert stderr_of_strata([sums], 48) == pytest.approx(expected * math.sqrt(12 / 11))
        assert stderr_of_strata([sums], 48) > 1.3 * (stderr_of_strata([errors], 48) or 0)

    def test_strata(self) -> None:
        """sqrt(sum of w**2 sd**2 / n) with the strata's shares of the items as weights (Cochran, 1977, 5.6)."""
        first, second = np.array([0.0, 1.0, 1.0, 0.0]), np.array([10.0, 11.0, 10.0, 11.0, 12.0, 10.0])
        expected = math.sqrt(0.4**2 * first.var(ddof=1) / 4 + 0.6**2 * second.var(ddof=1) / 6)
        mean = np.concatenate([first, second]).mean()
        assert stderr_of_strata([first - mean, second - mean], 10) == pytest.approx(expected)

    def test_few(self) -> None:
        assert stderr_of_strata([np.array([1.0])], 1) is None
        assert stderr_of_strata([np.zeros(9)], 9) == 0
        # A stratum of one item has no variance of its own: all as one.
        assert stderr_of_strata([np.array([1.0]), np.array([-1.0])], 2) == pytest.approx(math.sqrt(2 * 2) / 2)


class TestSmallestDetectable:
    def test_worked_figure(self) -> None:
        """27 of 100 items discordant, difference 0.13: 2.8 * sqrt((0.27 - 0.13**2) / 100)."""
        stderr = math.sqrt((0.27 - 0.13**2) / 100)
        assert smallest_detectable(stderr) == pytest.approx(0.1409, abs=5e-5)

    def test_that_difference_is_found_four_times_in_five(self) -> None:
        rng = np.random.default_rng(0)
        found = rng.normal(smallest_detectable(1.0), 1.0, 20_000)
        assert np.mean(np.abs(found) > 1.96) == pytest.approx(0.8, abs=0.01)

    @pytest.mark.parametrize("options", [{"power": 80}, {"alpha": 0.0}])
    def test_impossible(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            smallest_detectable(1.0, **options)


class TestCorrelation:
    def test_of_right_and_wrong(self) -> None:
        """phi = (n11 n00 - n10 n01) / sqrt(of the four margins): 20 both, 53 neither, 20 and 7 one."""
        first = np.repeat([1.0, 1.0, 0.0, 0.0], [20, 20, 7, 53])
        second = np.repeat([1.0, 0.0, 1.0, 0.0], [20, 20, 7, 53])
        expected = (20 * 53 - 20 * 7) / math.sqrt(40 * 60 * 27 * 73)
        assert correlation(first, second) == pytest.approx(expected)
        assert correlation(first, second) == pytest.approx(0.42, abs=0.005)

    def test_constant_scores_have_none(self) -> None:
        assert correlation(np.ones(4), np.arange(4.0)) is None
        assert correlation(np.arange(4.0), np.arange(4.0)) == pytest.approx(1)


class TestSmallestDetectableByMcNemar:
    def test_by_hand_for_few_items(self) -> None:
        """Of six items all must be discordant and on one side (p = 1/32), which a difference d gives with d**6."""
        assert smallest_detectable_by_mcnemar(6, 0.0) == pytest.approx(0.8 ** (1 / 6), abs=1e-5)
        assert smallest_detectable_by_mcnemar(5, 0.4) is None
        assert smallest_detectable_by_mcnemar(0, 0.0) is None

    def test_large_samples_are_as_by_the_normal_approximation(self) -> None:
        found = smallest_detectable_by_mcnemar(5000, 0.2)
        assert found == pytest.approx(2.8016 * math.sqrt((0.2 - found**2) / 5000), rel=0.04)

    @pytest.mark.parametrize(("items", "discordant"), [(20, 0.05), (100, 0.05), (164, 0.3)])
    def test_it_is_found_in_four_of_five_cases(self, items: int, discordant: float) -> None:
        least = smallest_detectable_by_mcnemar(items, discordant)
        assert least is not None
        rng = np.random.default_rng(0)
        share = max(discordant, least)
        better, worse = (share + least) / 2, (share - least) / 2
        drawn = rng.multinomial(items, [better, worse, 1 - better - worse], size=4000)
        significant = np.mean([mcnemar(int(a), int(b)) <= 0.05 for a, b, _ in drawn])
        assert 0.77 <= significant <= 0.83
