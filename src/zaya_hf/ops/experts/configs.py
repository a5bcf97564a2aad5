"""Block sizes of the experts' kernels, and which are taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.configs import KernelConfig, config

#: tokens up to which no sorting is done: one tile of 16 rows, what a matrix instruction has at least, holds them all
DECODING_TOKENS = 16
#: chiplets of MI300X and MI355X; programs are dealt to them in turn
CHIPLETS = 8
#: experts that the sorting kernel counts
MOST_EXPERTS = 254
#: rows of a tile where products limit the time, and not the reading of the weights
MANY_ROWS = 128


def product(rows: int, columns: int, depth: int, num_warps: int, group: int = 4, waves_per_eu: int = 0) -> KernelConfig:
    """A tile of a grouped product.

    Args:
        rows, columns, depth: rows of one expert, columns of its result, values multiplied at a time.
        num_warps, waves_per_eu: see `KernelConfig`.
        group: tiles below each other that take the same columns in turn.
    """
    return config(
        num_warps=num_warps,
        num_stages=2,
        waves_per_eu=waves_per_eu,
        matrix_instr_nonkdim=16,
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=depth,
        GROUP=group,
    )


def outer(tall: int, wide: int, tokens: int, num_warps: int) -> KernelConfig:
    """A tile of a weight's gradient, `tall` by `wide`, with `tokens` multiplied at a time."""
    return config(
        num_warps=num_warps, num_stages=2, matrix_instr_nonkdim=16, BLOCK_P=tall, BLOCK_Q=wide, BLOCK_T=tokens
    )


@dataclass(frozen=True)
class Tables:
    """Configurations for a dtype, by rows of a tile (tokens at a time for the weights' gradients).

    Attributes:
        gate_up, down: the two products; `gate_up` has two accumulators of its columns.
        hidden_gradient, input_gradient: products with the weights' columns.
        weight_gradient: sums over the tokens of each expert.
    """

    gate_up: dict[int, KernelConfig]
    down: dict[int, KernelConfig]
    hidden_gradient: dict[int, KernelConfig]
    input_gradient: dict[int, KernelConfig]
    weight_gradient: dict[int, KernelConfig]


#: 16-bit types. 128 rows and not 256: an expert's last tile is half empty, which for 1,000 rows is 6 % and not 12 % of
#: the work. With few rows for an expert its weights are all that is read, and flat tiles do.
NARROW = Tables(
    gate_up={128: product(128, 128, 64, 8), 64: product(64, 64, 64, 4), 16: product(16, 32, 128, 2, group=1)},
    down={128: product(128, 256, 64, 8), 64: product(64, 128, 64, 4), 16: product(16, 64, 128, 2, group=1)},
    # left alone, the largest takes 132 registers, four more than two workgroups on a unit may have
    hidden_gradient={
        128: product(128, 64, 64, 8, waves_per_eu=4),
        64: product(64, 64, 64, 8),
        16: product(16, 64, 128, 2, group=1),
    },
    input_gradient={128: product(128, 256, 64, 8), 64: product(64, 128, 64, 4), 16: product(16, 64, 128, 2, group=1)},
    weight_gradient={64: outer(128, 256, 64, 8), 32: outer(128, 128, 32, 4)},
)
#: twice the bytes, a tenth of the products per second: smaller tiles are as good
FP32 = Tables(
    gate_up={128: product(128, 64, 32, 8), 16: product(16, 32, 64, 2, group=1)},
    down={128: product(128, 128, 32, 8), 16: product(16, 64, 64, 2, group=1)},
    hidden_gradient={128: product(128, 64, 32, 8), 16: product(16, 64, 64, 2, group=1)},
    input_gradient={128: product(128, 128, 32, 8), 16: product(16, 64, 64, 2, group=1)},
    weight_gradient={32: outer(128, 128, 32, 8)},
)

#: tokens that one program sorts, and those that it counts at a time, by the slots that it tells apart
SORT = {32: config(num_warps=8, BLOCK=256, CHUNK=1024), 256: config(num_warps=8, BLOCK=32, CHUNK=1024)}
#: the router weights' gradient: tokens of a program
REDUCE = config(num_warps=4, BLOCK=256)


def _decoding(columns: int, depth: int) -> dict[int, KernelConfig]:
    """One token: no matrix instruction, `columns` for each of four waves, so that every unit has several programs with
    all their loads under way. A few: a wave each, which takes the columns of one instruction."""
    few = config(num_warps=1, num_stages=2, matrix_instr_nonkdim=16, BLOCK_N=16, BLOCK_K=depth)
    return {1: config(num_warps=4, BLOCK_N=columns, BLOCK_K=1024), DECODING_TOKENS: few}


#: by tokens; of the first product there are two accumulators
DECODE_GATE_UP = {torch.float32: _decoding(4, 32), torch.bfloat16: _decoding(4, 128), torch.float16: _decoding(4, 128)}
DECODE_DOWN = {torch.float32: _decoding(8, 32), torch.bfloat16: _decoding(8, 128), torch.float16: _decoding(8, 128)}


def tables(dtype: torch.dtype) -> Tables:
    """The configurations for a dtype."""
    return FP32 if dtype == torch.float32 else NARROW


def choose_rows(tokens: int, experts: int) -> int:
    """Rows of a tile that fit this many tokens for all experts. Products limit the time from about 170 rows for an
    expert on; below, it is the weights, which every tile of an expert reads."""
    return MANY_ROWS if tokens >= 96 * experts else 64 if tokens >= 24 * experts else 16


def choose(table: dict[int, KernelConfig], tokens: int, experts: int) -> KernelConfig:
    """Of a table of products, the entry for this many tokens: that with the most rows within `choose_rows`."""
    return table[max(rows for rows in table if rows <= choose_rows(tokens, experts))]


def choose_weight_gradient(table: dict[int, KernelConfig], tokens: int, experts: int) -> KernelConfig:
    """Of the weights' gradients: with few tokens for an expert, fewer at a time."""
    return table[max(table)] if tokens >= 48 * experts else table[min(table)]


def choose_sort(experts: int) -> KernelConfig:
    """By how many slots there are to tell apart: the experts, none, and beyond the end."""
    return SORT[32] if experts + 2 <= 32 else SORT[256]


def choose_decoding(table: dict[int, KernelConfig], tokens: int) -> KernelConfig:
    """One token, or a few."""
    return table[1 if tokens == 1 else DECODING_TOKENS]
