"""The learning rate over a run, as a factor of its peak: a function of the step alone, so nothing of it is saved."""

from __future__ import annotations

import math

from .config import ScheduleConfig

__all__ = ["factor", "learning_rate_factor"]


def factor(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """The factor of the peak learning rate for one update.

    It rises linearly over `warmup_steps`, with the first already above zero, and then follows the named curve, which
    begins at 1 and reaches `final_factor` at the end of the run, after the last update:

    - "constant": stays at 1; `final_factor` is not used.
    - "linear", "cosine": from the end of the warm-up on; half a wave of the cosine.
    - "wsd": stays at 1 and falls linearly over the last `decay_fraction` of the steps (rounded up).

    A warm-up that is not over when the fall of "wsd" begins ends where the two meet. From `steps` on the factor stays
    what it is at the end.

    Args:
        step: counted from 0; the factor is that of the update after this step's backward pass.
        steps: of the whole run.
        schedule: see `ScheduleConfig`.

    Raises:
        ValueError: for negative numbers and a run without steps.
    """
    warmup = schedule.warmup_steps
    _check(step, steps, warmup)
    rising = min(1.0, (step + 1) / warmup) if warmup and step < steps else 1.0
    if schedule.name == "constant":
        return rising
    falls = math.ceil(steps * schedule.decay_fraction - 1e-9) if schedule.name == "wsd" else max(0, steps - warmup)
    to_go = max(0, steps - step)
    left = 1.0 if to_go > falls else to_go / max(1, falls)  # of the fall
    if schedule.name == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return min(rising, schedule.final_factor + (1 - schedule.final_factor) * left)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up over at most a tenth of the steps, flat until half of them, then linear to zero.

    Args:
        step: counted from 0; the factor is that of the update after this step's backward pass. From `steps` on it is 0.
        steps: of the whole run.
        warmup: steps that rise, with the first already above zero; 0: none.

    Raises:
        ValueError: for negative numbers and a run without steps.
    """
    _check(step, steps, warmup)
    capped = min(warmup, max(1, steps // 10))
    return factor(step, steps, ScheduleConfig(name="wsd", warmup_steps=capped, final_factor=0.0, decay_fraction=0.5))


def _check(step: int, steps: int, warmup: int) -> None:
    if steps < 1 or step < 0 or warmup < 0:
        raise ValueError(f"step {step} of {steps} with a warm-up of {warmup}: expected steps >= 1, the others >= 0.")
