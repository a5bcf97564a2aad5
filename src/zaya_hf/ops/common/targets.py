"""The GPUs that the kernels are compiled for, and what of them bounds a kernel.

Sources: AMD's CDNA3 and CDNA4 guides and NVIDIA's Hopper guide for sizes; AMD's published "maximum achievable" product
rates and copy bandwidths, and, where there are none, the best figures people measured with torch, for the ceilings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
        arch: compilers' name, and `backend` Triton's ("hip" or "cuda").
        name: of the product that the ceilings are for.
        wave: threads of a wave (a warp).
        units: compute units (multiprocessors).
        lds_bytes: shared memory that one workgroup may have, and `unit_lds_bytes` what a unit has.
        registers: 32-bit registers per thread that one SIMD has for the threads of one wave slot, `simds` of them in a
            unit, `most_waves` waves on each, handed out in steps of `register_step`.
        bytes_per_second: what copies reach; `flops`: what products of a dtype reach, not what the datasheet says.
    """

    arch: str
    backend: str
    name: str
    wave: int
    units: int
    lds_bytes: int
    unit_lds_bytes: int
    registers: int
    simds: int
    most_waves: int
    register_step: int
    bytes_per_second: float
    flops: tuple[tuple[str, float], ...]

    def flops_of(self, dtype: str) -> float:
        """Of products of "bf16", "fp16" or "fp32"."""
        return dict(self.flops)[dtype]


TARGETS = {
    target.arch: target
    for target in (
        Target(
            "gfx942", "hip", "MI300X", 64, 304, 64 << 10, 64 << 10, 512, 4, 8, 8, 4.2e12,
            (("bf16", 708e12), ("fp16", 654e12), ("fp32", 100e12)),
        ),
        Target(
            "gfx950", "hip", "MI355X", 64, 256, 160 << 10, 160 << 10, 512, 4, 8, 8, 5.5e12,
            (("bf16", 1565e12), ("fp16", 1565e12), ("fp32", 120e12)),
        ),
        Target(
            "sm_90", "cuda", "H100 SXM", 32, 132, 227 << 10, 228 << 10, 512, 4, 16, 8, 3.036e12,
            (("bf16", 794e12), ("fp16", 794e12), ("fp32", 60e12)),
        ),
    )
}  # fmt: skip

#: no workgroup has more threads, on any of them
MOST_THREADS = 1024
