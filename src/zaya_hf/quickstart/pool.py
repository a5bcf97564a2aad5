"""Jobs side by side in worker processes of one thread each, with their progress in one place.

A worker serves one job after the other. It stops when it is told to and when the parent is gone: a training after a
checkpoint, between two steps; anything else at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from zaya_hf.quickstart import jobs
from zaya_hf.quickstart.jobs import Job

_STOP_SECONDS = 20.0  # a step and a checkpoint take less, even on a busy machine
_SPAWN = multiprocessing.get_context("spawn")
# Of a worker, from its first import on. A GPU would serve several workers at a time worse than a core that each has to
# itself, and the numbers would be others'.
_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


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
    stage: str = ""


def run_jobs(todo: Sequence[Job], processes: int, watcher: Watcher) -> list[dict[str, Any]]:
    """Carry out all of `todo`, up to `processes` at a time, in the given order; their results in that order.

    Raises:
        RuntimeError: a job failed, or its process died. The other processes are stopped; what is done stays done.
    """
    results: list[dict[str, Any] | None] = [None] * len(todo)
    waiting = list(range(len(todo)))
    workers: list[_Worker] = []
    try:
        for _ in range(min(processes, len(todo))):
            workers.append(_start())
            _hand_out(workers[-1], todo, waiting)
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
    with _workers_environment(), _sigint_blocked():
        process.start()
    there.close()  # the worker has its own copy: with ours open, its death would not be seen
    return _Worker(process, here)


@contextmanager
def _workers_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """For a process that is started meanwhile, which inherits it for good; here the signal only waits.

    Ctrl-C reaches all processes of a terminal. A worker is told by its parent, so it must not see the signal, from its
    very first instruction on.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it unblocks the signal, and the first process would start it now
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_out(worker: _Worker, todo: Sequence[Job], waiting: list[int]) -> None:
    """Give a worker the next job, if there is one."""
    worker.job, worker.stage = (waiting.pop(0) if waiting else None), ""
    if worker.job is None:
        return
    try:
        worker.connection.send(todo[worker.job])
    except ConnectionError:
        raise _died(worker, todo[worker.job]) from None


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
        raise _died(worker, todo[index]) from None
    if kind == "step":
        watcher.step(index, *content)
    elif kind == "stage":
        (worker.stage,) = content
        watcher.stage(index, worker.stage)
    elif kind == "failed":
        message, trace = content
        error = RuntimeError(f"{todo[index].label}: {message}")
        error.__cause__ = RuntimeError(trace)
        raise error
    else:
        results[index] = content[0]
        watcher.done(index, content[0])
        _hand_out(worker, todo, waiting)


def _died(worker: _Worker, job: Job) -> RuntimeError:
    """The error of a process that has closed its end of the connection."""
    worker.process.join()
    code = worker.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {-code}" + (", perhaps for lack of memory" if -code == signal.SIGKILL else "")
    return RuntimeError(f"the process of {job.label} died ({how}): the same command goes on from its last checkpoint")


def _stop(workers: Sequence[_Worker]) -> None:
    """End all workers; those in the middle of a training keep a checkpoint."""
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.connection.close()  # read as "stop" at the next step, or as "no more jobs"
        if worker.job is not None and worker.stage != "training":
            worker.process.terminate()  # what it does is repeated as a whole
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.terminate()
            worker.process.join()


def _serve(connection: Connection) -> None:
    """The life of a worker process."""
    stage = ""

    def on_stage(name: str) -> None:
        nonlocal stage
        stage = name
        connection.send(("stage", name))

    def on_step(steps: int, loss: float) -> None:
        try:
            connection.send(("step", steps, loss))
            stopped = connection.poll()  # nothing is sent during a job, so this is the end of the connection
        except ConnectionError:
            stopped = True
        if stopped:
            raise KeyboardInterrupt

    def outlive_nobody() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            wait([parent.sentinel])
        if stage != "training":  # which ends by itself, after a checkpoint
            os._exit(1)

    threading.Thread(target=outlive_nobody, daemon=True).start()
    try:
        while True:
            job: Job = connection.recv()
            try:
                result = jobs.run(job, on_step, on_stage)
            except Exception as error:
                connection.send(("failed", _one_line(error), traceback.format_exc()))
                continue
            stage = ""
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
