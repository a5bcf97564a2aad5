"""Jobs side by side in worker processes of one thread each, with their progress in one place.

A worker serves one job after the other. It stops when it is told to, and when the parent is gone: in both cases after a
checkpoint, between two steps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from zaya_hf.quickstart import jobs
from zaya_hf.quickstart.jobs import Job

_STOP_SECONDS = 20.0  # a step and a checkpoint take less, even on a busy machine
_SPAWN = multiprocessing.get_context("spawn")


class Watcher(Protocol):
    """Is told what happens; `job` is the index in the list of jobs."""

    def stage(self, job: int, name: str) -> None: ...
    def step(self, job: int, steps: int, loss: float) -> None: ...
    def done(self, job: int, result: dict[str, Any]) -> None: ...


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    job: int | None = None  # index of the job at work


def run_jobs(todo: Sequence[Job], processes: int, watcher: Watcher) -> list[dict[str, Any]]:
    """Carry out all of `todo`, `processes` at a time, in the given order; their results in that order.

    Raises:
        RuntimeError: a job failed, or its process died. The other processes are stopped; what is done stays done.
    """
    results: list[dict[str, Any] | None] = [None] * len(todo)
    waiting = list(range(len(todo)))
    workers = [_start() for _ in range(min(processes, len(todo)))]
    try:
        for worker in workers:
            _hand_out(worker, todo, waiting)
        while any(result is None for result in results):
            busy = [worker for worker in workers if worker.job is not None]
            for ready in wait([worker.connection for worker in busy]):
                worker = next(worker for worker in busy if worker.connection is ready)
                _attend(worker, todo, waiting, results, watcher)
    finally:
        _stop(workers)
    return [result for result in results if result is not None]


def _start() -> _Worker:
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(there,), daemon=True)
    with _sigint_ignored():
        process.start()
    there.close()  # the worker has its own copy: with ours open, its death would not be seen
    return _Worker(process, here)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """For a process that is started meanwhile, and inherits it for good.

    Ctrl-C reaches all processes of a terminal. A worker is told by its parent, so it has to ignore the signal from its
    very first instruction on.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set what signals do
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _hand_out(worker: _Worker, todo: Sequence[Job], waiting: list[int]) -> None:
    worker.job = waiting.pop(0) if waiting else None
    if worker.job is not None:
        worker.connection.send(todo[worker.job])


def _attend(
    worker: _Worker,
    todo: Sequence[Job],
    waiting: list[int],
    results: list[dict[str, Any] | None],
    watcher: Watcher,
) -> None:
    """Take one message from a worker."""
    index = worker.job
    assert index is not None
    try:
        kind, *content = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        raise RuntimeError(
            f"the process of {todo[index].label} died ({_how(worker.process.exitcode)}): the same command goes on from "
            "its last checkpoint"
        ) from None
    if kind == "step":
        watcher.step(index, *content)
    elif kind == "stage":
        watcher.stage(index, *content)
    elif kind == "failed":
        message, trace = content
        error = RuntimeError(f"{todo[index].label}: {message}")
        error.__cause__ = RuntimeError(trace)
        raise error
    else:
        results[index] = content[0]
        watcher.done(index, content[0])
        _hand_out(worker, todo, waiting)


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {-exitcode}" + (", perhaps for lack of memory" if -exitcode == signal.SIGKILL else "")
    return f"exit code {exitcode}"


def _stop(workers: Sequence[_Worker]) -> None:
    """End all workers; those in the middle of a training keep a checkpoint."""
    for worker in workers:
        worker.connection.close()  # read as "stop" at the next step, or as "no more jobs"
    for worker in workers:
        # Only training can be stopped in the middle and go on later; whatever else is repeated.
        worker.process.join(_STOP_SECONDS if worker.job is not None else 1)
        if worker.process.is_alive():
            worker.process.terminate()
            worker.process.join()


def _serve(connection: Connection) -> None:
    """The life of a worker process."""
    # A GPU would serve several workers at a time worse than the cores that they have to themselves, and the numbers
    # would be others'. One thread in every library.
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="1")
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

    def on_step(steps: int, loss: float) -> None:
        try:
            connection.send(("step", steps, loss))
            stopped = connection.poll()  # nothing is sent during a job, so this is the end of the connection
        except ConnectionError:
            stopped = True
        if stopped:
            raise KeyboardInterrupt

    try:
        while True:
            job: Job = connection.recv()
            try:
                result = jobs.run(job, on_step, lambda stage: connection.send(("stage", stage)))
            except Exception as error:
                connection.send(("failed", _one_line(error), traceback.format_exc()))
                continue
            connection.send(("done", result))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # told to stop, or nobody is there any more


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (RuntimeError, ValueError)) and text else f"{type(error).__name__}: {text}"


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
