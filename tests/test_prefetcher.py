"""Batches from worker processes are those of no workers, whatever is asked for, and no process is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from memory_documents import numbered
from zaya_hf.training.data.documents import TokenDocuments
from zaya_hf.training.data.loader import Prefetcher
from zaya_hf.training.data.rows import TrainingData


def data_of(documents: TokenDocuments | None = None) -> TrainingData:
    sources = [numbered([5] * 30, name="a") if documents is None else documents, numbered([9] * 30, name="b")]
    return TrainingData(sources, [2, 1], length=8, packing="best_fit", seed=3)


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    assert not left, left


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers(workers: int) -> None:
    data = data_of()
    with nothing_left(), Prefetcher(data, workers) as prefetcher:
        for step in range(9):
            got = prefetcher.micro_batches(step * 7, 7, 1, 2, 2)
            assert same(got, data.micro_batches(step * 7, 7, 1, 2, 2))
            assert all(batch["labels"] is batch["shift_labels"] for batch in got)


def test_steps_in_any_order() -> None:
    """A window that is skipped, a roll-back, and another size of step."""
    data = data_of()
    with nothing_left(), Prefetcher(data, 2) as prefetcher:
        for first, count in ((0, 4), (4, 4), (12, 4), (16, 4), (4, 4), (8, 4), (12, 8), (20, 8)):
            assert same(prefetcher.micro_batches(first, count), data.micro_batches(first, count))


def test_the_next_steps_are_ready_before_they_are_asked_for() -> None:
    prefetcher = Prefetcher(data_of(), 1)
    with nothing_left(), prefetcher:
        prefetcher.micro_batches(0, 4)
        (worker,) = multiprocessing.active_children()
        prefetcher.micro_batches(4, 4)
        assert multiprocessing.active_children() == [worker]  # it goes on
        prefetcher.micro_batches(0, 4)
        assert multiprocessing.active_children() != [worker]  # what it had made is of no use


def test_random_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1]
    with Prefetcher(data_of(), 1) as prefetcher:
        prefetcher.micro_batches(0, 4)
        prefetcher.micro_batches(40, 4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


class Broken:
    """Documents of which one cannot be read."""

    def __init__(self, error: Exception) -> None:
        self._inner, self._error = numbered([8] * 6), error
        self.name, self.lengths = "broken", self._inner.lengths

    def targets(self, document: int, start: int, stop: int) -> None:
        return None

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        if document == 4:
            raise self._error
        return self._inner.tokens(document, start, stop)


class Local(ValueError):
    """Cannot be sent to another process."""

    def __reduce__(self) -> str:
        raise TypeError("stays here")


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("disk gone"), OSError), (KeyError("id"), KeyError), (Local("here"), RuntimeError)]
)
def test_errors_of_workers_are_those_of_no_workers(error: Exception, kind: type[Exception]) -> None:
    data = TrainingData([Broken(error)], [1], length=8, packing="contiguous", seed=0)  # type: ignore[list-item]
    (sample,) = (k for k in range(6) if data.packed[0].pieces(int(data.order.locate(k)[2][0]))[0].document == 4)
    with nothing_left(), Prefetcher(data, 2) as prefetcher:
        for step in range(sample):
            prefetcher.micro_batches(step, 1)  # made ahead, the error waits for its turn
        with pytest.raises(kind, match=f"sample {sample}, row {data.order.locate(sample)[2][0]} of 'broken'") as raised:
            prefetcher.micro_batches(sample, 1)
        assert type(raised.value) is kind
        assert "in tokens" in str(raised.value.__cause__)  # the trace, down to the line
        assert not multiprocessing.active_children()
        assert prefetcher.micro_batches(sample + 1, 1)  # and on behind it


def test_a_killed_worker_is_an_error() -> None:
    with nothing_left(), Prefetcher(data_of(), 1) as prefetcher:
        prefetcher.micro_batches(0, 4)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="worker"):
            ask(prefetcher, range(4, 400, 4))


def ask(prefetcher: Prefetcher, samples: range) -> None:
    for sample in samples:
        prefetcher.micro_batches(sample, 4)


def test_signals_for_the_whole_job_leave_workers_alone() -> None:
    data = data_of()
    with nothing_left(), Prefetcher(data, 1) as prefetcher:
        prefetcher.micro_batches(0, 4)
        (worker,) = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid, number)
        for step in range(1, 8):
            assert same(prefetcher.micro_batches(step * 4, 4), data.micro_batches(step * 4, 4))
        assert multiprocessing.active_children() == [worker]


def killed_trainer(workers: Connection) -> None:
    prefetcher = Prefetcher(data_of(), 2)
    prefetcher.micro_batches(0, 4)
    workers.send([worker.pid for worker in multiprocessing.active_children()])
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_trainer_that_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=killed_trainer, args=(theirs,))
    trainer.start()
    workers = ours.recv()
    trainer.join()
    assert trainer.exitcode == -signal.SIGKILL
    assert len(workers) == 2
    deadline = time.monotonic() + 60  # torch's workers look for their parent every 5 seconds
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive the process that made them"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="workers is -1; expected 0 or more processes"):
        Prefetcher(data_of(), -1)
