"""Ending a run from outside: signals and a budget of time, agreed on by all processes at the end of a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

__all__ = ["EXIT_CODES", "REASONS", "Stopper", "reason_of"]

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
#: why a run stops before its last step, in the order in which one is named where several hold
REASONS = (*SIGNALS, "wall clock")
#: of a process that saved and stopped: 128 + the number for the signals that ask for an end; 0 where going on later is
#: what was planned
EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 0, "wall clock": 0}


class Stopper:
    """Notes in `with stopper:` that the run should stop; the loop asks at the end of each step, saves and ends.

    The handlers of before are put back at the end. A second SIGINT (Ctrl-C) stops at once, by KeyboardInterrupt,
    without saving. Signals reach the main thread alone: elsewhere none is caught.

    Args:
        wall_clock_minutes: since this object was made, for everything including the last save; None: no limit. The run
            stops when the longest time between two questions so far (a step, with an evaluation or a save perhaps) and
            that of the slowest save would no longer fit.
        signals: names of those that are caught.
        clock: seconds, for tests.

    Raises:
        ValueError: for a budget that is not above 0.
    """

    def __init__(
        self,
        wall_clock_minutes: float | None = None,
        *,
        signals: Sequence[str] = SIGNALS,
        clock: Callable[[], float] = time.monotonic,
    ):
        if wall_clock_minutes is not None and not wall_clock_minutes > 0:
            raise ValueError(f"wall_clock_minutes is {wall_clock_minutes}; expected more than 0, or None.")
        self._signals = tuple(signals)
        self._clock = clock
        self._end = None if wall_clock_minutes is None else clock() + 60 * wall_clock_minutes
        self._asked_at: float | None = None
        self._longest_step = 0.0
        self._longest_save = 0.0
        self._received: set[str] = set()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for name in self._signals:
                number = getattr(signal, name, None)  # there is no SIGUSR1 on Windows
                if number is not None:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def flags(self) -> list[float]:
        """1 or 0 for each of `REASONS`, as this process sees it; for a sum over all processes."""
        now = self._clock()
        if self._asked_at is not None:
            self._longest_step = max(self._longest_step, now - self._asked_at)
        self._asked_at = now
        late = self._end is not None and now + self._longest_step + self._longest_save >= self._end
        return [float(late if reason == "wall clock" else reason in self._received) for reason in REASONS]

    def saved(self, seconds: float) -> None:
        """Tell how long a save took."""
        self._longest_save = max(self._longest_save, seconds)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and name in self._received:
            raise KeyboardInterrupt
        self._received.add(name)


def reason_of(flags: Sequence[float]) -> str | None:
    """The first of `REASONS` that holds in any process, given their summed `flags`."""
    return next((reason for reason, flag in zip(REASONS, flags, strict=True) if flag > 0), None)
