"""What a user sees while the quickstart works: a bar for each model on a terminal, a few lines anywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from zaya_hf.quickstart.jobs import Job
from zaya_hf.reporting.formats import score

_LINES_PER_JOB = 4  # where there are no bars


def say(what: str, text: str) -> None:
    """One line of the quickstart's account on standard output."""
    print(f"{what:<10} {text}", flush=True)


def draws_bars(stream: TextIO) -> bool:
    """Whether bars can be drawn: on a terminal, and not on one that says it has no columns or lines, as under some
    build services."""
    if not stream.isatty():
        return False
    size = os.get_terminal_size(stream.fileno())
    return size.columns > 0 and size.lines > 0


@contextmanager
def waiting(text: str, stream: TextIO) -> Iterator[None]:
    """Something that takes some seconds and has no steps: a spinner with `text` on `stream` if it is a terminal."""
    if not draws_bars(stream):
        yield
        return
    with Console(file=stream).status(text):
        yield


def describe(result: dict[str, Any], steps: int) -> str:
    """What came of a job, in one line."""
    tail = result["losses"][-min(20, steps) :]
    parts = [f"loss {sum(tail) / len(tail):.3f}", f"{result['tokens_per_second']:,.0f} tokens/s"]
    tasks = result.get("evaluation", {}).get("tasks", {})
    bits = [found["bits_per_byte"] for found in tasks.values() if found["kind"] == "bits_per_byte"]
    parts += [f"{score(value, 'bits_per_byte')} bits per byte held out" for value in bits]
    return ", ".join(parts)


class Lines:
    """Progress as lines, four for each job, and one when it is done."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._recent: list[list[float]] = [[] for _ in jobs]
        self._begun: set[int] = set()

    def stage(self, job: int, name: str) -> None:
        if name == "evaluating":
            say(self._jobs[job].label, "evaluating")

    def step(self, job: int, steps: int, loss: float) -> None:
        total = self._jobs[job].recipe.steps
        recent = self._recent[job]
        if job not in self._begun and steps > 1:
            say(self._jobs[job].label, f"goes on after step {steps - 1}")
        self._begun.add(job)
        recent.append(loss)
        if steps < total and steps * _LINES_PER_JOB // total > (steps - 1) * _LINES_PER_JOB // total:
            say(self._jobs[job].label, f"{steps} of {total} steps, loss {sum(recent) / len(recent):.3f}")
            recent.clear()

    def done(self, job: int, result: dict[str, Any]) -> None:
        say(self._jobs[job].label, describe(result, self._jobs[job].recipe.steps))


class Bars:
    """A bar for each job: steps, loss, speed, time left."""

    def __init__(self, jobs: Sequence[Job], progress: Progress) -> None:
        self._jobs = jobs
        self._progress = progress
        self._started: dict[int, tuple[int, float]] = {}  # job -> (steps, time) at its first report
        self._tasks: list[TaskID] = [
            progress.add_task(job.label, total=job.recipe.steps, note="waiting") for job in jobs
        ]

    def stage(self, job: int, name: str) -> None:
        completed = self._jobs[job].recipe.steps if name == "evaluating" else 0
        self._progress.update(self._tasks[job], completed=completed, note=name)

    def step(self, job: int, steps: int, loss: float) -> None:
        since, start = self._started.setdefault(job, (steps, time.monotonic()))
        left = ""
        if steps > since:
            seconds = (time.monotonic() - start) / (steps - since) * (self._jobs[job].recipe.steps - steps)
            left = f", {int(seconds) // 60}:{int(seconds) % 60:02d} left"
        self._progress.update(self._tasks[job], completed=steps, note=f"loss {loss:.3f}{left}")

    def done(self, job: int, result: dict[str, Any]) -> None:
        steps = self._jobs[job].recipe.steps
        self._progress.update(self._tasks[job], completed=steps, note=describe(result, steps))


@contextmanager
def watching(jobs: Sequence[Job], stream: TextIO) -> Iterator[Lines | Bars]:
    """A watcher of `jobs` for `pool.run_jobs`: bars on `stream` if it is a terminal, else lines on standard output."""
    if not draws_bars(stream):
        yield Lines(jobs)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(file=stream)) as progress:
        yield Bars(jobs, progress)
