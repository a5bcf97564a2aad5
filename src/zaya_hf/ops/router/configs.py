"""Configurations of the router's kernels, and which sizes take which.

All fit gfx942's 64 KiB of shared memory without spilling for every width up to 256 and any number of slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.configs import KernelConfig, config

#: widest router that a program holds in registers, and most slots, which are unrolled block by block
WIDEST, MOST_SLOTS = 256, 256

#: A program has a compute unit to itself, for its tile of BLOCK_N x 256 takes the registers: what counts is how many
#: programs there are. 16,384 tokens make 256 of 64, one round on 304 units; each reads all weights once, mostly from
#: the second cache. BLOCK_H are the outputs of fc1 that are there at a time.
ROUTE = {
    "many": config(BLOCK_N=64, BLOCK_K=64, BLOCK_H=32, BLOCK_E=32, num_warps=8, num_stages=2, matrix_instr_nonkdim=16),
    "few": config(BLOCK_N=16, BLOCK_K=64, BLOCK_H=64, BLOCK_E=32, num_warps=8, matrix_instr_nonkdim=16),
    "fp32": config(BLOCK_N=32, BLOCK_K=16, BLOCK_H=16, BLOCK_E=32, num_warps=4, num_stages=2, matrix_instr_nonkdim=16),
}
#: The projection by itself, where `ROUTE` would leave units idle.
PROJECT = {
    "many": config(BLOCK_N=64, BLOCK_C=64, BLOCK_K=64, num_warps=4, num_stages=2, matrix_instr_nonkdim=16),
    "few": config(BLOCK_N=16, BLOCK_C=64, BLOCK_K=128, num_warps=4, num_stages=2, matrix_instr_nonkdim=16),
    "fp32": config(BLOCK_N=32, BLOCK_C=64, BLOCK_K=32, num_warps=4, num_stages=2, matrix_instr_nonkdim=16),
}
#: Two products of the whole width are chained twice: with 16 rows what they hold fits into the registers everywhere.
BACKWARD = {
    "narrow": config(BLOCK_N=16, BLOCK_H=64, BLOCK_E=32, num_warps=8, matrix_instr_nonkdim=16),
    "fp32": config(BLOCK_N=16, BLOCK_H=16, BLOCK_E=32, num_warps=4, matrix_instr_nonkdim=16),
}


@dataclass(frozen=True)
class Plan:
    """How the forward pass is launched.

    Attributes:
        route: of the kernel that chooses.
        project: of the one before it; None: there is none, `route` projects.
        splits: parts of the inner dimension that `project` sums apart.
    """

    route: KernelConfig
    project: KernelConfig | None = None
    splits: int = 1


#: programs from which on `ROUTE` projects: two thirds of MI300X's 304 units
ENOUGH = 192
#: programs that `PROJECT` aims at, and into how many parts it may cut the inner dimension for them
AIM, MOST_SPLITS = 256, 16
#: tokens up to which blocks have 16 rows
FEW = 1024


def choose_route(tokens: int, inner: int, width: int, dtype: torch.dtype) -> Plan:
    """Of `tokens` from `inner` to `width` columns, multiplied in `dtype`."""
    whole = ROUTE[_kind(dtype, "many")]
    if -(-tokens // whole["BLOCK_N"]) >= ENOUGH:
        return Plan(whole)
    project = PROJECT[_kind(dtype, "few" if tokens <= FEW else "many")]
    programs, splits = -(-tokens // project["BLOCK_N"]) * -(-width // project["BLOCK_C"]), 1
    while splits < MOST_SPLITS and 2 * splits * programs <= AIM and 2 * splits * project["BLOCK_K"] <= inner:
        splits *= 2
    return Plan(ROUTE[_kind(dtype, "few")], project, splits)


def choose_backward(dtype: torch.dtype) -> KernelConfig:
    """Of products in `dtype`."""
    return BACKWARD[_kind(dtype, "narrow")]


def _kind(dtype: torch.dtype, otherwise: str) -> str:
    return "fp32" if dtype == torch.float32 else otherwise
