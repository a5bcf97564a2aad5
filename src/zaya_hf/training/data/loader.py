"""The next steps' batches, made in worker processes while the model trains."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .rows import Arrays, Batch, TrainingData, to_tensors

__all__ = ["Prefetcher"]

#: first sample, count, rank, processes, rows of a micro-batch: the arguments of `TrainingData.micro_batches`
Request = tuple[int, int, int, int, int]

STEPS_AHEAD = 2  # per worker


class Prefetcher:
    """`TrainingData.micro_batches` with the same results, ready before they are asked for.

    Workers take for granted that a call goes on where the one before it ended. One that does not (a run that is rolled
    back, or skips a window) is right as well, but waits for workers to start anew.

    Workers ignore SIGINT, SIGTERM and SIGUSR1: schedulers send those to every process of a job, and it is the trainer
    that decides what to do. They end with `close`, with this object, and with the process that made them, however it
    ends. Where processes can be forked they are; else `data` has to be picklable.

    Used as a context manager, it closes itself.
    """

    def __init__(self, data: TrainingData, workers: int = 0) -> None:
        """
        Args:
            workers: processes; 0: batches are made when they are asked for, by the caller's.

        Raises:
            ValueError: for a negative number.
        """
        if workers < 0:
            raise ValueError(f"workers is {workers}; expected 0 or more processes.")
        self.data, self.workers = data, workers
        self._coming: Iterator[list[Arrays] | _Failure] | None = None
        self._next: Request | None = None

    def micro_batches(
        self, first_sample: int, count: int, rank: int = 0, world_size: int = 1, micro_rows: int = 1
    ) -> list[Batch]:
        """As `TrainingData.micro_batches`.

        Raises:
            What that raises, when the batch is asked for; the trace in the worker is its cause.
            RuntimeError: a worker was killed.
        """
        if not self.workers:
            return self.data.micro_batches(first_sample, count, rank, world_size, micro_rows)
        request = first_sample, count, rank, world_size, micro_rows
        if self._coming is None or request != self._next:
            self._start(request)
        assert self._coming is not None
        try:
            found = next(self._coming)
        except BaseException:
            self.close()
            raise
        if isinstance(found, _Failure):
            self.close()
            raise found.error from RuntimeError(f"in a worker process:\n{found.trace}")
        self._next = first_sample + count, count, rank, world_size, micro_rows
        return [to_tensors(arrays) for arrays in found]

    def close(self) -> None:
        """End the workers. The next call starts new ones."""
        self._coming = self._next = None  # torch's iterator joins its workers when it goes

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, first: Request) -> None:
        self.close()
        fork = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        loader: DataLoader[Any] = DataLoader(
            _Steps(self.data),
            sampler=_Requests(first),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=STEPS_AHEAD,
            collate_fn=_as_it_is,  # arrays go through a pipe; tensors would use up shared memory and open files
            worker_init_fn=_ignore_signals,
            multiprocessing_context=fork,
            generator=torch.Generator(),  # else each start would draw from the generator of the run
        )
        self._coming = iter(loader)


class _Failure:
    """An exception in a worker. As a value, since torch would make a text of its class and message."""

    def __init__(self, error: Exception) -> None:
        self.trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it could not be sent, and the trainer would wait for it for ever
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self.error = error.with_traceback(None)


class _Steps(Dataset[Any]):
    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getitem__(self, request: Request) -> list[Arrays] | _Failure:
        try:
            return self._data.micro_arrays(*request)
        except Exception as error:
            return _Failure(error)


class _Requests(Sampler[Request]):
    """What is going to be asked for, without end."""

    def __init__(self, first: Request) -> None:
        self._first = first

    def __iter__(self) -> Iterator[Request]:
        first_sample, count, *rest = self._first
        while True:
            yield (first_sample, count, *rest)  # type: ignore[misc]
            first_sample += count


def _as_it_is(item: Any) -> Any:
    return item


def _ignore_signals(worker: int) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
