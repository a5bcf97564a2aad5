"""Every kernel, at every size and with every configuration that may be chosen, compiled for every target: what it
takes of the hardware, whether that is within the limits, and the time that the target's ceilings allow.

Triton is imported only where something is compiled, and no GPU is needed for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from zaya_hf import ops
from zaya_hf.ops.common.configs import KernelConfig
from zaya_hf.ops.common.dtypes import DTYPE_NAMES
from zaya_hf.ops.common.targets import MOST_THREADS, TARGETS, Target
from zaya_hf.ops.common.workloads import Workload

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
#: compiled unless others are asked for
USUAL_DTYPES = ("bf16", "fp32")
FORMAT = 1
_MOST_WORKERS = 8
_JOBS_WORTH_A_WORKER = 8  # starting one takes as long as compiling a few kernels


class Job(NamedTuple):
    """One row of a table.

    Attributes:
        operator: name in `operators()`.
        dtype: of its tensors, a key of `DTYPES`.
        workload: which of `workloads(operator, dtype)`; `config` which of its configurations.
        arch: key of `TARGETS`, for which it is compiled.
    """

    operator: str
    dtype: str
    workload: int
    config: int
    arch: str


def operators() -> tuple[str, ...]:
    """Names of the operators that have kernels."""
    folder = Path(ops.__file__).parent
    return tuple(name for name in ops.OPERATORS if (folder / name / "workloads.py").exists())


@functools.cache
def workloads(operator: str, dtype: str) -> tuple[Workload, ...]:
    """Kernels of an operator at the sizes of ZAYA1-8B, with tensors of `dtype` ("bf16", "fp16", "fp32")."""
    module = importlib.import_module(f"zaya_hf.ops.{operator}.workloads")
    return tuple(module.workloads(DTYPES[dtype]))


def jobs(
    names: Iterable[str] | None = None, dtypes: Iterable[str] = USUAL_DTYPES, archs: Iterable[str] | None = None
) -> list[Job]:
    """The rows of a table, in its order.

    Args:
        names: of operators; None: all that have kernels.
        dtypes: keys of `DTYPES`.
        archs: keys of `TARGETS`; None: all.
    """
    names, dtypes = operators() if names is None else tuple(names), tuple(dtypes)
    found = []
    for arch in TARGETS if archs is None else archs:
        for operator in names:
            for dtype in dtypes:
                for index, workload in enumerate(workloads(operator, dtype)):
                    if TARGETS[arch].backend not in workload.backends:
                        continue
                    found += [Job(operator, dtype, index, place, arch) for place in range(len(workload.configs))]
    return found


def check_can_compile() -> None:
    """Refuse where nothing can be compiled.

    Raises:
        ValueError: there is no Triton, or it interprets kernels in this process.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError("compiling kernels needs triton, which is not installed (pip install zaya_hf[kernels])")
    if ops.selection.is_interpreting_asked_for():
        raise ValueError("TRITON_INTERPRET is set: kernels that Triton interprets cannot be compiled; unset it")


def build(wanted: Sequence[Job], workers: int | None = None) -> dict[str, Any]:
    """Compile and describe `wanted`, with a progress bar on a terminal.

    Args:
        workers: processes; None: one per core, up to eight, and no more than pays.

    Returns:
        plain JSON values: "versions", "targets" by name, "rows" as `row` gives them in the order of `wanted`, and how
        many are over a limit.

    Raises:
        ValueError: nothing can be compiled here, see `check_can_compile`; a workload that launches not just one kernel.
    """
    check_can_compile()
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(1, min(cores, _MOST_WORKERS, len(wanted) // _JOBS_WORTH_A_WORKER))
    spawn = multiprocessing.get_context("spawn")  # torch and Triton have threads, which a fork would break
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_leave_interrupts) if workers > 1 else None
    with pool or nullcontext(), tqdm(total=len(wanted), unit="kernel", disable=not sys.stderr.isatty()) as bar:
        rows = []
        try:
            for found in pool.map(row, wanted) if pool else map(row, wanted):
                rows.append(found)
                bar.update()
        except BaseException:
            if pool:
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {
        "made_by": "zaya bench kernels --compile-only",
        "format": FORMAT,
        "gpu": None,
        "note": "compiled for these GPUs, not run on them",
        "versions": {name: _version(name) for name in ("zaya_hf", "torch", "triton")},
        "targets": {arch: _described(TARGETS[arch]) for arch in dict.fromkeys(job.arch for job in wanted)},
        "rows": rows,
        "over_limits": sum(bool(found["over"]) for found in rows),
    }


def row(job: Job) -> dict[str, Any]:
    """Compile one kernel and say what there is to say of it, as plain JSON values.

    "over" names the limits that it violates; a kernel that does not compile violates that one alone, and its figures
    are None. "floor_us" is the time that the target's measured ceilings allow, in microseconds.

    Args:
        job: which one.

    Raises:
        ValueError: the workload launches not just one kernel.
    """
    workload, target = workloads(job.operator, job.dtype)[job.workload], TARGETS[job.arch]
    return describe(job.operator, workload, workload.configs[job.config], target)


def describe(operator: str, workload: Workload, config: KernelConfig, target: Target) -> dict[str, Any]:
    """As `row`, for a workload that need not be in a table.

    Args:
        operator: name in the row.
        workload, config: what is launched, and how.
        target: what for.

    Raises:
        ValueError: the workload launches not just one kernel.
    """
    common = importlib.import_module("zaya_hf.ops.common.triton")
    compiling = importlib.import_module("zaya_hf.ops.compiling.triton")
    with common.recording() as launches:
        workload.launch(config)
    if len(launches) != 1:
        raise ValueError(f"{operator}, {workload.kernel}, {workload.size}: {len(launches)} launches in place of one")
    (launch,) = launches
    try:
        compiled, error = compiling.compile_launch(launch, target), None
    except Exception as failure:  # one kernel that cannot be compiled is a row; the others go on
        compiled, error = None, f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]
    programs = math.prod(launch.grid)
    memory = workload.bytes / target.bytes_per_second
    products = workload.flops / target.flops_of(workload.dtype) if workload.flops else 0.0
    facts = compiled and {**vars(compiled), "matrix_instructions": compiled.matrix_instructions}
    return {
        "target": target.arch,
        "operator": operator,
        "kernel": workload.kernel,
        "size": workload.size,
        "dtype": workload.dtype,
        "config": label(config),
        "blocks": dict(config.blocks),
        "options": config.options(target.backend),
        "error": error,
        "over": [f"does not compile: {error}"] if facts is None else violations(facts, workload, target),
        "facts": facts,
        "programs": programs,
        "fill": round(programs / (-(-programs // target.units) * target.units), 3),
        "bytes": int(workload.bytes),
        "flops": int(workload.flops),
        "flops_per_byte": _digits(workload.flops / workload.bytes),
        "floor_us": _digits(max(memory, products) * 1e6),
        "bound_by": "memory" if memory >= products else "products",
    }


def violations(facts: dict[str, Any], workload: Workload, target: Target) -> list[str]:
    """Limits that a compiled kernel violates, in words.

    Args:
        facts: fields of `zaya_hf.ops.compiling.assembly.Compiled` and "matrix_instructions".
        workload: what it computes.
        target: what it was compiled for.
    """
    found = []
    if facts["vgpr_spills"] or facts["sgpr_spills"]:
        found.append(f"spills {facts['vgpr_spills'] or 0} vector and {facts['sgpr_spills'] or 0} scalar registers")
    if facts["scratch_bytes"]:
        found.append(f"{facts['scratch_bytes']} bytes of scratch memory")
    if facts["lds_bytes"] > target.lds_bytes:
        found.append(f"{facts['lds_bytes']:,} bytes of shared memory, of {target.lds_bytes:,}")
    if facts["threads"] > MOST_THREADS:
        found.append(f"{facts['threads']:,} threads, of {MOST_THREADS:,}")
    # NVIDIA has no matrix instruction that multiplies fp32 without rounding it first.
    possible = not (target.backend == "cuda" and workload.dtype == "fp32")
    if workload.flops and possible and not facts["matrix_instructions"]:
        found.append("products, and no matrix instruction")
    return found


def label(config: KernelConfig) -> str:
    """A configuration in few characters: blocks, then w(aves), s(tages), and where they are set waves per SIMD ("e")
    and rows of a matrix instruction ("i").

    Args:
        config: the configuration.
    """
    blocks = [f"{name.removeprefix('BLOCK_')}={size}" for name, size in config.blocks]
    others = [f"w{config.num_warps}", f"s{config.num_stages}"]
    others += [f"e{config.waves_per_eu}"] if config.waves_per_eu else []
    others += [f"i{config.matrix_instr_nonkdim}"] if config.matrix_instr_nonkdim else []
    return " ".join(blocks + others)


def _leave_interrupts() -> None:
    """A terminal sends Ctrl-C to all processes; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _described(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "backend": target.backend,
        "units": target.units,
        "lds_bytes": target.lds_bytes,
        "bytes_per_second": target.bytes_per_second,
        "flops": dict(target.flops),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _digits(number: float) -> float:
    """Four significant digits."""
    return float(f"{number:.4g}")
