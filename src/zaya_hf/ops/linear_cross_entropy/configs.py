"""Block sizes of the kernels, by words and width of a number.

Both kernels are bound by memory. A thread takes 32 bytes of a row at a time, two loads of 16. On gfx942 62 registers
leave room for 32 waves on a unit, so 64 KiB are on their way there: latency times bandwidth of an MI300X is 11 KiB.
"""

from __future__ import annotations

import torch

from ..common.configs import KernelConfig, config

#: a row of logits: few words; numbers of two bytes; numbers of four, or a cap, whose tanh takes registers
ROWS = (
    config(num_warps=4, BLOCK=2048),
    config(num_warps=8, BLOCK=8192),
    config(num_warps=8, BLOCK=4096),
)
#: adding with what rounding took: 16 bytes of three tensors for each thread
ADD = (config(num_warps=8, BLOCK=4096),)

#: words up to which a row is a few small blocks
FEW_WORDS = 4096


def choose_rows(words: int, dtype: torch.dtype, capped: bool = False) -> KernelConfig:
    """For rows of so many logits; `capped` where there is a softcap."""
    few, narrow, wide = ROWS
    return few if words <= FEW_WORDS else narrow if dtype.itemsize == 2 and not capped else wide


def choose_add() -> KernelConfig:
    """For any sums."""
    return ADD[0]
