"""The learning-rate factor over a run."""

from __future__ import annotations

import pytest

from zaya_hf.training.schedule import learning_rate_factor


@pytest.mark.parametrize("steps", [1, 2, 9, 40, 600])
@pytest.mark.parametrize("warmup", [0, 1, 40, 10_000])
def test_it_rises_holds_and_falls(steps: int, warmup: int) -> None:
    factors = [learning_rate_factor(step, steps, warmup) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1
    peak = factors.index(1)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] <= 2 / steps or steps == 1


def test_exact_values() -> None:
    assert [learning_rate_factor(step, 20, 4) for step in range(20)] == [
        *([0.5] + [1.0] * 9),  # the warm-up is cut to a tenth of the steps
        *[(20 - step) / 10 for step in range(10, 20)],
    ]
    assert [learning_rate_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate_factor(0, 100, 0) == 1.0


def test_after_the_run_it_is_zero() -> None:
    assert learning_rate_factor(20, 20, 4) == 0
    assert learning_rate_factor(25, 20, 4) == 0


@pytest.mark.parametrize(("step", "steps", "warmup"), [(0, 0, 1), (-1, 10, 1), (0, 10, -1)])
def test_numbers_that_are_no_run(step: int, steps: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="expected steps >= 1"):
        learning_rate_factor(step, steps, warmup)
