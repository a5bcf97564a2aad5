"""What whoever watches a run sees: a live line on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from transformers.utils import logging as transformers_logging

from ..reporting.formats import duration, plain, short_count

_LINES = 50  # of a whole run, where there is no terminal and no `every`
_REFRESH = 0.1  # seconds between two drawings of the live line
_RECENT = 100  # steps that speed and the time left are told from


class Console:
    """Shows the steps of a run on `stream`: step, loss, learning rate, tokens/s, MFU, the time left.

    Args:
        total: steps of the whole run.
        every: steps between two lines where there is no terminal; None: 2 % of them.
        stream: by default standard output.
        live: whether to draw the live line; None: if `stream` is a terminal of some size.
    """

    def __init__(
        self, total: int, *, every: int | None = None, stream: TextIO | None = None, live: bool | None = None
    ) -> None:
        self._total = total
        self._every = every or max(1, total // _LINES)
        self._stream = stream or sys.stdout
        self._live = is_terminal(self._stream) if live is None else live
        self._progress: Progress | None = None
        self._first = True
        self._losses: list[float] = []
        self._forget()

    def step(self, record: Mapping[str, Any]) -> None:
        """One more step is done; `record` as of `Recorder.step`."""
        step, now = record["step"], time.monotonic()
        self._times.append((step, now))
        if not record.get("skipped"):
            self._losses.append(float(record["loss"]))
        self._speeds.append((record.get("tokens_per_second"), record.get("mfu")))
        if self._live:
            self._draw(record, now)
        elif self._first or step % self._every == 0 or step == self._total:
            self._print(f"step {step}/{self._total}  {self._words(record)}")
            self._losses.clear()
        self._first = False

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """The result of an evaluation, in one line."""
        parts = []
        if "loss" in record:
            parts.append(f"held-out loss {float(record['loss']):.4f}")
        if record.get("bits_per_byte") is not None:
            parts.append(f"{float(record['bits_per_byte']):.4f} bits per byte")
        if record.get("ema"):
            parts.append(f"averaged weights {float(record['ema']['loss']):.4f}")
        for name, score in (record.get("tasks") or {}).items():
            if "accuracy" in score:
                parts.append(f"{name} {score['accuracy']:.3f} (chance {score['chance']:.3f})")
            else:
                parts.append(f"{name} {score['bits_per_byte']:.4f} bits per byte")
        self.say(f"step {record['step']}: {', '.join(parts)}")

    def event(self, kind: str, step: int, details: Mapping[str, Any]) -> None:
        """What happened, in one line."""
        words = ", ".join(
            f"{name.replace('_', ' ')} {plain(value)}" for name, value in details.items() if value is not None
        )
        self.say(f"step {step}: {kind.replace('_', ' ')}{f' ({words})' if words else ''}")

    def say(self, text: str) -> None:
        """A line of its own; above the live one."""
        if self._progress is not None:
            self._progress.console.print(Text(text))
        else:
            self._print(text)

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: what was measured before says nothing about the time left."""
        self._forget()
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leave the line as it is."""
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()
            self._progress = None

    def _forget(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._speeds: deque[tuple[float | None, float | None]] = deque(maxlen=_RECENT)
        self._losses.clear()

    def _words(self, record: Mapping[str, Any]) -> str:
        recent = self._losses[-20:] if self._live else self._losses
        parts = [f"loss {sum(recent) / len(recent):.4f}" if recent else "loss \u2013"]
        if record.get("skipped"):
            parts.append("skipped")
        if isinstance(record.get("lr"), (int, float)):
            parts.append(f"lr {record['lr']:.2e}")
        speeds = [speed for speed, _ in self._speeds if speed is not None]
        if speeds:
            # Equal numbers of tokens a step: the mean speed is the harmonic one.
            rate = len(speeds) / sum(1 / speed for speed in speeds) if all(speeds) else 0.0
            parts.append(f"{short_count(rate)} tokens/s")
        shares = [share for _, share in self._speeds if share is not None]
        if shares:
            parts.append(f"MFU {100 * sum(shares) / len(shares):.1f} %")
        left = self.seconds_left()
        if left is not None and left > 0:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts).replace("\u00a0", " ")

    def seconds_left(self) -> float | None:
        """By the wall clock over the last steps, with the evaluations and checkpoints among them; None before two."""
        if len(self._times) < 2:
            return None
        (first, began), (last, now) = self._times[0], self._times[-1]
        return (now - began) / (last - first) * (self._total - last) if last > first else None

    def _draw(self, record: Mapping[str, Any], now: float) -> None:
        if self._progress is None:
            columns = (BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}"))
            # No thread of its own: it would draw while the process forks or ends.
            self._progress = Progress(
                *columns,
                TextColumn("{task.fields[note]}", markup=False),
                console=Screen(file=self._stream, force_terminal=True),
                auto_refresh=False,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, note="")
            self._drawn = 0.0
        del self._losses[:-20]
        if now - self._drawn >= _REFRESH or record["step"] == self._total:
            self._drawn = now
            self._progress.update(self._task, completed=record["step"], note=self._words(record), refresh=True)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def is_terminal(stream: TextIO) -> bool:
    """Whether a live line can be drawn: on a terminal, and not on one that says it has no columns or lines."""
    if not stream.isatty():
        return False
    size = os.get_terminal_size(stream.fileno())
    return size.columns > 0 and size.lines > 0


@contextmanager
def transformers_bars(shown: bool) -> Iterator[None]:
    """Whether transformers draws its progress bars, one for every model that it reads or writes."""
    before = transformers_logging.is_progress_bar_enabled()
    if before and not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()
