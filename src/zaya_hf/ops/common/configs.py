"""A configuration of a kernel: its block sizes, and how it is compiled. Every operator has a table of them and a rule
that picks one by shape; nothing is tried out at run time, so results do not depend on what was timed fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """
    Attributes:
        blocks: block sizes by the name of the kernel's parameter.
        num_warps: waves of a workgroup (64 threads each on AMD, 32 on NVIDIA).
        num_stages: how far loads run ahead. On gfx942 2 for a loop with one product, 1 for chained ones or none.
        waves_per_eu: AMD: waves that the compiler should leave registers for; 0: its choice.
        matrix_instr_nonkdim: AMD: rows of a matrix instruction, 16 or 32; 0: the compiler's choice.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 1
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0

    def __getitem__(self, name: str) -> int:
        """A block size."""
        return dict(self.blocks)[name]

    def options(self, backend: str) -> dict[str, Any]:
        """What Triton is told for "hip" or "cuda". Fusing multiplications and additions is said outright, since
        Triton's default for it is changing."""
        options: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        if backend == "hip":
            options["waves_per_eu"] = self.waves_per_eu
            options["matrix_instr_nonkdim"] = self.matrix_instr_nonkdim
        return options

    def __str__(self) -> str:
        blocks = " ".join(f"{name}={size}" for name, size in self.blocks)
        return f"{blocks} warps={self.num_warps} stages={self.num_stages}"


def config(
    num_warps: int = 4, num_stages: int = 1, waves_per_eu: int = 0, matrix_instr_nonkdim: int = 0, **blocks: int
) -> KernelConfig:
    """A `KernelConfig` with its block sizes as keywords."""
    return KernelConfig(tuple(blocks.items()), num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim)
