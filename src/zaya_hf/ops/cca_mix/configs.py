"""Block sizes of the kernels, and which of them a size gets. Figures are of gfx942, head_dim 128 and two taps each.

All products use 16 x 16 matrix instructions: 32 x 32 ones need twice the registers for the same tile (280 instead of
156), which leaves one wave per SIMD.
"""

from __future__ import annotations

import torch

from ..common.configs import KernelConfig, config

_FEW_TOKENS = 1024  # up to here blocks of 64 tokens would leave compute units without a program
_UNITS = 304  # of an MI300X

# Through the convolutions, forward and backward. A head's vector stays in registers, so that norm and rotation need no
# memory; input channels come 32 at a time, since 64 at a time need 254 registers instead of 156. Half the tokens over
# eight waves, where numbers or heads are twice as wide: 112 registers in fp32, four waves per SIMD.
CONVOLUTIONS = {
    "few tokens": config(BLOCK_M=16, BLOCK_K=32, num_warps=4, matrix_instr_nonkdim=16),
    "narrow": config(BLOCK_M=64, BLOCK_K=32, num_warps=4, matrix_instr_nonkdim=16),
    "wide": config(BLOCK_M=32, BLOCK_K=32, num_warps=8, matrix_instr_nonkdim=16),
}
# Back to the raw columns: 128 registers with BLOCK_K 64, one less wave per SIMD with 32.
RAW = {
    "few tokens": config(BLOCK_M=16, BLOCK_N=64, BLOCK_K=32, num_warps=4, matrix_instr_nonkdim=16),
    "small heads": config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, matrix_instr_nonkdim=16),
    "narrow": config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, matrix_instr_nonkdim=16),
    "wide": config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=32, num_warps=8, matrix_instr_nonkdim=16),
}
# One product per step of a long loop over tokens: the only loop whose loads run ahead (two stages).
WEIGHTS = {
    "small heads": config(BLOCK_O=64, BLOCK_I=64, BLOCK_T=32, num_warps=4, num_stages=2, matrix_instr_nonkdim=16),
    "narrow": config(BLOCK_O=128, BLOCK_I=128, BLOCK_T=32, num_warps=8, num_stages=2, matrix_instr_nonkdim=16),
    "wide": config(BLOCK_O=128, BLOCK_I=128, BLOCK_T=16, num_warps=8, num_stages=2, matrix_instr_nonkdim=16),
}
# 16 columns of a head are a 64-byte piece of every row of the workspace.
FINISH = {"narrow": config(BLOCK_I=16, num_warps=8), "wide": config(BLOCK_I=16, num_warps=4)}
VALUES = config(BLOCK_M=64, BLOCK_W=128, num_warps=4)


def choose_convolutions(tokens: int, head_dim: int, dtype: torch.dtype) -> KernelConfig:
    """For the forward kernel and the first backward one."""
    if head_dim > 128:
        return CONVOLUTIONS["wide"]
    if tokens <= _FEW_TOKENS:
        return CONVOLUTIONS["few tokens"]
    return CONVOLUTIONS["wide" if dtype.itemsize > 2 else "narrow"]


def choose_raw(tokens: int, head_dim: int, dtype: torch.dtype) -> KernelConfig:
    if tokens <= _FEW_TOKENS:
        return RAW["few tokens"]
    if head_dim <= 64:
        return RAW["small heads"]
    return RAW["wide" if dtype.itemsize > 2 else "narrow"]


def choose_weights(head_dim: int, dtype: torch.dtype) -> KernelConfig:
    if head_dim <= 64:
        return WEIGHTS["small heads"]
    return WEIGHTS["wide" if dtype.itemsize > 2 else "narrow"]


def choose_finish(head_dim: int) -> KernelConfig:
    return FINISH["wide" if head_dim > 128 else "narrow"]


def matrices(heads: int, taps: int, head_dim: int, chosen: KernelConfig) -> int:
    """Blocks of sums that each share of the tokens has, with `chosen` from `choose_weights`."""
    return heads * taps * -(-head_dim // chosen["BLOCK_O"]) * -(-head_dim // chosen["BLOCK_I"])


def choose_splits(tokens: int, matrices: int) -> int:
    """Shares of the tokens over which `matrices` blocks of sums are spread: some two programs for each compute unit,
    no share under 512 tokens. Whole eights of them, where it matters, so that a share stays with one die's L2."""
    splits = max(min(2 * _UNITS // matrices, tokens // 512), 1)
    return splits // 8 * 8 if splits > 8 else splits
