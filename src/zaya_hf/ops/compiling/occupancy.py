"""How many waves fit on a compute unit."""

from __future__ import annotations

import dataclasses

from ..common.targets import Target
from .assembly import Compiled

#: shared memory is handed out in such steps, and NVIDIA keeps 1 KiB of it for itself in every workgroup
_LDS_STEP = {"gfx942": 512, "gfx950": 1280}
_KEPT = {"cuda": 1024}
#: AMD: a wave with more scalar registers leaves no room for an eighth one
_SGPRS_OF_EIGHT_WAVES = 100


def waves_per_simd(target: Target, vgprs: int, sgprs: int | None, threads: int) -> int:
    """Waves of one kernel that a SIMD (a quarter of a multiprocessor) has registers for: whole workgroups of `threads`
    only, which are spread over the SIMDs evenly.

    gfx942 and gfx950 hand out 512 registers in steps of 8: 64 or fewer make 8 waves, 72 make 7, 80 6, 96 5, 128 4,
    168 3, 256 2, more 1.
    """
    step = target.register_step
    waves = min(target.most_waves, target.registers // (-(-max(vgprs, 1) // step) * step))
    if sgprs is not None and sgprs > _SGPRS_OF_EIGHT_WAVES:
        waves = min(waves, 7)
    of_group = -(-threads // target.wave)
    return waves * target.simds // of_group * of_group // target.simds if of_group > target.simds else waves


def waves_per_unit(target: Target, vgprs: int, sgprs: int | None, lds_bytes: int, threads: int) -> int:
    """Waves of one kernel on a compute unit (a multiprocessor): whole workgroups that its registers and its shared
    memory have room for."""
    of_group = -(-threads // target.wave)
    groups = waves_per_simd(target, vgprs, sgprs, threads) * target.simds // of_group
    step = _LDS_STEP.get(target.arch, 128)
    taken = -(-(lds_bytes + _KEPT.get(target.backend, 0)) // step) * step
    if taken:
        groups = min(groups, target.unit_lds_bytes // taken)
    return groups * of_group


def with_occupancy(compiled: Compiled, target: Target) -> Compiled:
    """`compiled` with its waves, where its registers are known."""
    if compiled.vgprs is None:
        return compiled
    registers = (compiled.vgprs, compiled.sgprs)
    return dataclasses.replace(
        compiled,
        waves_per_simd=waves_per_simd(target, *registers, compiled.threads),
        waves_per_unit=waves_per_unit(target, *registers, compiled.lds_bytes, compiled.threads),
    )
