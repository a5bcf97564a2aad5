"""The learning-rate factor over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_hf.training.config import ScheduleConfig
from zaya_hf.training.schedule import factor, learning_rate_factor


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


# ------------------------------------------------------------------------------------------------ schedules of settings
def factors(steps: int, **options: Any) -> list[float]:
    schedule = ScheduleConfig(**options)
    return [factor(step, steps, schedule) for step in range(steps + 1)]


def test_the_published_cosine() -> None:
    """ZAYA1's first phase: 6e-4 -> 2e-4."""
    steps = 476_837
    schedule = ScheduleConfig(name="cosine", final_factor=1 / 3)
    assert 6e-4 * factor(0, steps, schedule) == 6e-4
    assert 6e-4 * factor(steps, steps, schedule) == pytest.approx(2e-4, rel=1e-12)
    for step in (1, 1000, 238_418, 400_000, steps - 1):
        expected = 2e-4 + (6e-4 - 2e-4) * (1 + math.cos(math.pi * step / steps)) / 2
        assert 6e-4 * factor(step, steps, schedule) == pytest.approx(expected, rel=1e-12)


def test_cosine_after_a_warm_up() -> None:
    got = factors(10, name="cosine", warmup_steps=2, final_factor=0.2)
    falling = [0.2 + 0.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert got == pytest.approx([0.5, 1.0, *falling], rel=1e-12)


def test_linear() -> None:
    assert factors(8, name="linear", warmup_steps=4, final_factor=0.2) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )
    assert factors(4, name="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_wsd() -> None:
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(10, name="wsd", warmup_steps=2, decay_fraction=0.3, final_factor=0.25) == pytest.approx(expected)
    for steps, fraction, falling in [(10, 0.3, 3), (100, 0.07, 7), (5, 0.5, 3), (7, 1.0, 7)]:
        got = factors(steps, name="wsd", decay_fraction=fraction)
        assert sum(value == 1.0 for value in got) == steps - falling + 1  # the fall begins at 1
        assert got[-1] == 0


def test_constant() -> None:
    assert factors(5, name="constant", warmup_steps=2, final_factor=0.3) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    final=st.floats(0, 1),
    fraction=st.floats(0.01, 1),
)
def test_any_schedule_rises_then_falls_to_its_end(
    name: Any, steps: int, warmup: int, final: float, fraction: float
) -> None:
    got = factors(steps, name=name, warmup_steps=warmup, final_factor=final, decay_fraction=fraction)
    assert all(0 <= value <= 1 for value in got)
    assert all(value > 0 for value in got[:-1])
    peak = got.index(max(got))
    assert got[: peak + 1] == sorted(got[: peak + 1])
    assert got[peak:] == sorted(got[peak:], reverse=True)
    if warmup < steps and name != "wsd":
        assert max(got) == 1.0
    assert got[-1] == (1.0 if name == "constant" else final)
    later = ScheduleConfig(name=name, warmup_steps=warmup, final_factor=final, decay_fraction=fraction)
    assert factor(steps + 7, steps, later) == got[-1]


@pytest.mark.parametrize(("step", "steps"), [(0, 0), (-1, 10)])
def test_a_schedule_of_no_run(step: int, steps: int) -> None:
    with pytest.raises(ValueError, match="expected steps >= 1"):
        factor(step, steps, ScheduleConfig())
