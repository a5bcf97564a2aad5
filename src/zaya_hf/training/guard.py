"""Steps that must not be taken: numbers that are none, and spikes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from .config import GuardConfig

__all__ = ["Diverged", "Guard", "Judgement", "Verdict"]

#: a standard deviation in units of the median absolute deviation, for normal numbers
DEVIATIONS = 1.4826
#: smallest scale, relative to the median: numbers that hardly differ make no spike of a rounding error
SMALLEST_SCALE = 1e-3


class Diverged(RuntimeError):
    """Too many bad steps in a row, and no way back that is left."""


class Verdict(Enum):
    """What to do with a step."""

    TAKE = "take"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class Judgement:
    """What is to be done with a step.

    Attributes:
        verdict: take it, skip it, or go back.
        reason: what is wrong with the step, in words; empty where it is taken.
    """

    verdict: Verdict
    reason: str = ""


class Guard:
    """Judges each step by its loss and the norm of its gradient.

    A number that is not finite is bad. So is one far above its like: its robust z-score, (x - median) / (1.4826 MAD)
    over the last `window` steps that were taken, is above `spike_z`; the scale is at least a thousandth of the median.
    Only upwards, and only once `minimum` steps were taken. A bad step is skipped. The `roll_back_after`-th in a row
    sends the run back instead: see `loop.train`.

    The judgement follows from numbers that are the same in every process, and from what `state_dict` holds: all
    processes judge alike, and a run that was killed and goes on judges as it would have.

    Args:
        config: limits; None: `GuardConfig`'s defaults.

    Attributes:
        streak: step and data window of the bad steps since the last good one.
        roll_backs: so far.
    """

    def __init__(self, config: GuardConfig | None = None):
        self.config = GuardConfig() if config is None else config
        self._losses: deque[float] = deque(maxlen=self.config.window)
        self._norms: deque[float] = deque(maxlen=self.config.window)
        self.streak: list[tuple[int, int]] = []
        self.roll_backs = 0

    def judge(self, loss: float, grad_norm: float, *, step: int, window: int) -> Judgement:
        """Judge a step, and remember it.

        Args:
            loss: nats per target, over all processes.
            grad_norm: of all gradients together, before clipping.
            step: steps before it.
            window: number of the data window that it was made of.
        """
        reason = self._fault("the loss", loss, self._losses) or self._fault(
            "the gradient's norm", grad_norm, self._norms
        )
        if reason is None:
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self.streak.clear()
            return Judgement(Verdict.TAKE)
        self.streak.append((step, window))
        bad = len(self.streak) >= self.config.roll_back_after
        return Judgement(Verdict.ROLL_BACK if bad else Verdict.SKIP, reason)

    def _fault(self, name: str, value: float, before: deque[float]) -> str | None:
        if not math.isfinite(value):
            return f"{name} is {value}"
        limit = self.config.spike_z
        if limit is None or len(before) < self.config.minimum:
            return None
        middle = median(before)
        scale = DEVIATIONS * median(abs(x - middle) for x in before)
        z = (value - middle) / max(scale, SMALLEST_SCALE * abs(middle), math.ulp(1.0))
        return f"{name} is {value:.6g}, {z:.3g} deviations above {middle:.6g}" if z > limit else None

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "streak": [list(bad) for bad in self.streak],
            "roll_backs": self.roll_backs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; of more steps than `window`, the last ones."""
        self._losses = deque(state["losses"], maxlen=self.config.window)
        self._norms = deque(state["norms"], maxlen=self.config.window)
        self.streak = [(step, window) for step, window in state["streak"]]
        self.roll_backs = state["roll_backs"]
