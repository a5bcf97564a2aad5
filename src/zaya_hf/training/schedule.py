"""The learning rate over a run, as a factor of its peak."""

from __future__ import annotations


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up over at most a tenth of the steps, flat until half of them, then linear to zero.

    Args:
        step: counted from 0; the factor is that of the update after this step's backward pass. From `steps` on it is 0.
        steps: of the whole run.
        warmup: steps that rise, with the first already above zero; 0: none.

    Raises:
        ValueError: for negative numbers and a run without steps.
    """
    if steps < 1 or step < 0 or warmup < 0:
        raise ValueError(f"step {step} of {steps} with a warm-up of {warmup}: expected steps >= 1, the others >= 0.")
    warmup = min(warmup, max(1, steps // 10))
    half = steps // 2
    rising = 1.0 if warmup == 0 else min(1.0, (step + 1) / warmup)
    falling = 1.0 if step < half else max(0, steps - step) / (steps - half)
    return min(rising, falling)
