"""How the kernel of a decoding step is cut up.

A head's weights of the grouped convolution are 64 KiB in bf16, and at ZAYA1-8B's sizes there are 12 programs per block
of rows: a step waits for memory, not for arithmetic.
"""

from __future__ import annotations

import torch

from ..common.configs import KernelConfig, config

#: One token: products and sums element by element. All of a head's weights are asked for at once, by 512 threads that
#: take 128 bytes of them each, so that the program waits for memory once.
ONE_TOKEN = config(BLOCK_ROWS=1, BLOCK_K=256, BLOCK_C=128, num_warps=8)
#: More: the 16 tokens of the smallest matrix instruction, which read the weights once. Blocks of 32 need so many masks
#: that scalar registers spill, and there are enough programs only from thousands of tokens on. By the tokens of a row.
TILES = {
    tokens: config(
        BLOCK_ROWS=16 // tokens, BLOCK_K=64, BLOCK_C=16 * tokens, num_warps=4, num_stages=2, matrix_instr_nonkdim=16
    )
    for tokens in (1, 2, 4, 8)
}


def choose_step(batch_size: int, length: int, dtype: torch.dtype) -> KernelConfig:
    """For `batch_size` rows of `length` tokens, 1 to 8.

    Args:
        dtype: of the projections; all take the same blocks, at most 36 KiB of LDS in fp32.
    """
    if batch_size == length == 1:
        return ONE_TOKEN
    return TILES[1 << (length - 1).bit_length()]  # rounded up, as in the kernel
