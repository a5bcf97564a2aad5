"""A kernel at the sizes of a real model: what the table of compiled kernels and the benchmarks go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .configs import KernelConfig


@dataclass(frozen=True)
class Workload:
    """One kernel and one size, with every configuration that may be chosen for it.

    Attributes:
        kernel: name in tables, like "cca_mix backward: weights".
        size: what is computed, like "4096 tokens".
        dtype: "bf16", "fp16" or "fp32", of the tensors that most of the bytes or products are in.
        configs: all that the operator's rule may pick for such a size on any target.
        launch: launches the kernel, and only it, on tensors without memory (device "meta"); to be called inside
            `common.triton.recording`.
        bytes: that have to be read and written at least once.
        flops: of the products; 0 where there are none that a matrix instruction could do.
        backends: of the GPUs on which the operator takes it, see `targets.Target`.
    """

    kernel: str
    size: str
    dtype: str
    configs: tuple[KernelConfig, ...]
    launch: Callable[[KernelConfig], None]
    bytes: float
    flops: float = 0.0
    backends: tuple[str, ...] = ("hip", "cuda")
