"""Times of several pieces of work, taken in alternation, and what the machine itself reaches."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from zaya_hf import ops

_LEAST_SAMPLES = 3
_LONG = 20.0  # seconds of one row after which fewer samples have to do
_MOST_SAMPLES = 400
_COLLECT_EVERY = 1.0  # seconds of work between two collections of garbage


@dataclass(frozen=True)
class Work:
    """What one side does in a sample.

    Attributes:
        run: what is timed.
        ready: what goes before it, untimed: a cache to fill, gradients to drop.
    """

    run: Callable[[], Any]
    ready: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Times:
    """Seconds of the samples of one side."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)


def alternate(works: dict[str, Work], seconds: float, take: Callable[[Work], float] | None = None) -> dict[str, Times]:
    """Run every side once unmeasured, then one after the other until each had about `seconds` and three samples; fewer
    where a sample takes long. `take` runs a piece of work and says how long it took; None: `sample`."""
    take = sample if take is None else take
    for work in works.values():
        take(work)
    samples: dict[str, list[float]] = {name: [] for name in works}
    since_collected, spent = 0.0, 0.0
    count = 0
    gc.collect()
    with _no_collection():
        while (
            count < 2
            or (count < _LEAST_SAMPLES and spent < _LONG)
            or (spent < seconds * len(works) and count < _MOST_SAMPLES)
        ):
            for name, work in works.items():
                samples[name].append(take(work))
                spent += samples[name][-1]
                since_collected += samples[name][-1]
            count += 1
            if since_collected > _COLLECT_EVERY:
                gc.collect()
                since_collected = 0.0
    return {name: Times(values) for name, values in samples.items()}


def sample(work: Work) -> float:
    """Seconds of one run."""
    work.ready()
    start = time.perf_counter()
    result = work.run()
    elapsed = time.perf_counter() - start
    del result  # freeing it is not part of the work
    return elapsed


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------- what the machine does
def machine(quick: bool) -> dict[str, Any]:
    """Processor, threads, versions, and the rates that torch reaches here: reading memory, products of matrices."""
    repeats = 2 if quick else 7
    return {
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "bandwidth_gb_per_s": round(_bandwidth(repeats) / 1e9, 2),
        "gemm_gflop_per_s": {
            name: round(_gemm_rate(dtype, repeats) / 1e9, 1)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        },
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _bandwidth(repeats: int) -> float:
    """Bytes per second: the best of summing a large tensor, copying it, and multiplying it by a vector."""
    large = torch.ones(2**16, 1024)  # 256 MiB, many times a cache
    other, vector = torch.empty_like(large), torch.ones(1024)
    out = torch.empty(large.shape[0])
    size = large.numel() * large.element_size()
    return max(
        size / _best(lambda: large.sum(), repeats),
        2 * size / _best(lambda: other.copy_(large), repeats),
        size / _best(lambda: torch.mv(large, vector, out=out), repeats),
    )


def _gemm_rate(dtype: torch.dtype, repeats: int) -> float:
    width = 2048
    a, b = (torch.ones(width, width, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        return 2 * width**3 / _best(lambda: ops.linear(a, b), repeats)


def _best(run: Callable[[], Any], repeats: int) -> float:
    return min(sample(Work(run)) for _ in range(repeats))


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, only on a terminal; call what comes back with the name of what is next."""
    from tqdm import tqdm

    with tqdm(total=total, disable=not sys.stderr.isatty(), unit="row") as bar:
        started = False

        def following(name: str) -> None:
            nonlocal started
            if started:
                bar.update()
            started = True
            bar.set_postfix_str(name)

        yield following
        bar.update(int(started))
