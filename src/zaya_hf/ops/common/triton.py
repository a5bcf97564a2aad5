"""Launching Triton kernels, and the functions that all of them use.

A kernel gets to a device only through `launch`. Inside `recording` nothing runs: what would be launched is written
down, and tensors without memory (device "meta") are enough. So the table of compiled kernels shows what is launched
and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import KernelConfig

#: oldest version that the kernels are written for
OLDEST = (3, 6)
#: Triton reads TRITON_INTERPRET when a kernel is defined; it holds for the life of the process.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32, without TF32. Triton's interpreter would multiply the raw bits of bf16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sigmoid(x):
    """Of fp32, without overflow for large negative values."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """fp32 `x` in `dtype`, rounded to the nearest. Triton's interpreter would cut bf16 off instead."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).to(tl.float32, bitcast=True)
    return x.to(dtype)


@dataclass(frozen=True)
class Launch:
    """One launch that was written down.

    Attributes:
        kernel: the jitted function; `grid` its programs.
        config: how it is to be compiled.
        arguments: by name, as they were given: tensors, whole numbers, floats, None.
        constants: compile-time values by name, block sizes included.
    """

    kernel: Any
    grid: tuple[int, ...]
    config: KernelConfig
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)


_recorded: list[Launch] | None = None
#: while Triton's interpreter runs a kernel, it replaces functions of the module `triton.language` for all threads
_interpreter = threading.RLock()


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Write launches down instead of running them."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def launch(kernel: Any, grid: tuple[int, ...], config: KernelConfig, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor.

    Args:
        kernel: a ``@triton.jit`` function whose parameters are `arguments` in order, then constants.
        grid: programs along up to three axes; with a 0 among them nothing runs. Only the first may exceed 65,535.
        config: its blocks are added to the constants.
        arguments: tensors (as pointers), whole numbers, floats, None.
    """
    if 0 in grid:
        return
    constants = {**dict(config.blocks), **constants}
    if _recorded is not None:
        names = kernel.arg_names[: len(arguments)]
        _recorded.append(Launch(kernel, grid, config, dict(zip(names, arguments, strict=True)), constants))
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.type == "cpu":
        with _interpreter:
            kernel[grid](*arguments, **constants)
        return
    options = config.options("hip" if torch.version.hip else "cuda")
    # the current device, which Triton launches on, need not be the tensors'
    with torch.cuda.device(device) if device.index != torch.cuda.current_device() else nullcontext():
        kernel[grid](*arguments, **constants, **options)


def is_interpreted() -> bool:
    """Whether kernels run on a CPU. Triton's own functions have to be interpreted like ours; they were defined when
    Triton was imported."""
    return bool(INTERPRETED.value) and not isinstance(tl.sum, triton.JITFunction)


def version() -> tuple[int, ...]:
    """Of Triton, major and minor."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def blocks_of(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The lowest that is no less than `size`, as the length of a block has to be."""
    return int(triton.next_power_of_2(size))
