"""Block sizes of the kernels, by width and number of rows.

The kernels are bound by memory, so what counts is bytes in flight. A block holds whole rows, 8 numbers of each thread
and tensor: loads of 16 bytes of the narrower tensors, and few enough registers that several workgroups share a unit:
one loads while another sums its row. The backward pass keeps four sums beside, so 4 numbers per thread at the width
that matters, and no wider rows than fit into registers on every target. Narrow rows (the router's norm) are taken
several at a time.
"""

from __future__ import annotations

from ..common.configs import KernelConfig, config

#: one for each width of a block, narrowest first
FORWARD = (
    config(num_warps=4, BLOCK_R=8, BLOCK_D=256),
    config(num_warps=4, BLOCK_R=1, BLOCK_D=2048),
    config(num_warps=8, BLOCK_R=1, BLOCK_D=4096),
)
BACKWARD = (
    config(num_warps=4, BLOCK_R=8, BLOCK_D=256),
    config(num_warps=8, BLOCK_R=1, BLOCK_D=2048),
    config(num_warps=8, BLOCK_R=1, BLOCK_D=4096),
)
#: sums of the programs' sums, some columns at a time: 128 bytes of each row
REDUCTION = (config(num_warps=4, BLOCK_P=32, BLOCK_C=32),)

#: compute units of an MI300X. Other GPUs get as many programs, so that sums are the same everywhere.
UNITS = 304
#: wider rows do not fit into registers
MOST_COLUMNS = BACKWARD[-1]["BLOCK_D"]


def choose_forward(width: int) -> KernelConfig:
    """For rows of `width`."""
    return next(each for each in FORWARD if each["BLOCK_D"] >= width)


def choose_backward(width: int) -> KernelConfig:
    """For rows of `width`."""
    return next(each for each in BACKWARD if each["BLOCK_D"] >= width)


def choose_reduction() -> KernelConfig:
    """For any sums."""
    return REDUCTION[0]


def forward_programs(rows: int, chosen: KernelConfig) -> int:
    """Four workgroups for each unit, each with an even share of the rows; fewer where there are few rows."""
    return min(-(-rows // chosen["BLOCK_R"]), 4 * UNITS)


def backward_programs(rows: int, chosen: KernelConfig) -> int:
    """Two workgroups for each unit, and one where rows are few: every program writes sums as large as four rows, which
    is to be little beside the rows that it reads."""
    blocks = -(-rows // chosen["BLOCK_R"])
    return min(blocks, 2 * UNITS if blocks >= 16 * UNITS else UNITS)
