"""The kernel of a decoding step at ZAYA1-8B's sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import configs
from .reference import StepRows

_HEADS, _GROUPS, _HEAD_DIM, _ROTATED = 8, 2, 128, 64
_CHANNELS, _WIDTH, _COLUMNS = (_HEADS + _GROUPS) * _HEAD_DIM, _GROUPS * _HEAD_DIM // 2, 2


def workloads(dtype: torch.dtype) -> list[Workload]:
    """One row, and batches of rows of one to eight tokens, plain and padded: every configuration."""
    sizes = ((1, 1, False), (1, 1, True), (64, 1, False), (64, 1, True), (32, 2, False), (16, 4, True), (8, 8, True))
    found = []
    for batch_size, length, is_padded in sizes:
        # one row takes no matrix instruction: it waits for the weights alone
        products = 0.0 if batch_size == 1 else 2.0 * batch_size * length * _CHANNELS * _HEAD_DIM * 2
        chosen = configs.choose_step(batch_size, length, dtype)
        rows = "padded rows" if is_padded else "rows"
        found.append(
            Workload(
                "cca_step",
                f"{batch_size} {rows} of {length}",
                DTYPE_NAMES[dtype],
                (chosen,),
                functools.partial(_launch, batch_size, length, dtype, is_padded),
                _bytes(batch_size, length, dtype),
                products,
            )
        )
    return found


def _bytes(batch_size: int, length: int, dtype: torch.dtype) -> float:
    """Weights once, projections and results once, states read and written; positions' tables are fp32."""
    weights = _CHANNELS * (_HEAD_DIM * 2 + 2 + 1 + 1) + _GROUPS
    tokens = batch_size * length * 2 * (_CHANNELS + 2 * _WIDTH)
    states = batch_size * 2 * (_CHANNELS * _COLUMNS + _WIDTH)
    return float((weights + tokens + states) * dtype.itemsize + length * _ROTATED * 2 * 4)


def _launch(batch_size: int, length: int, dtype: torch.dtype, is_padded: bool, config: KernelConfig) -> None:
    from . import launcher

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    projected = empty(batch_size, length, _CHANNELS + 2 * _WIDTH)  # of `fuse_for_inference`
    raw, current, delayed = projected.split([_CHANNELS, _WIDTH, _WIDTH], dim=-1)
    states = empty(batch_size, _CHANNELS, _COLUMNS), empty(batch_size, _WIDTH, 1)[..., 0]
    rows = None
    if is_padded:
        count, flag = torch.long, torch.bool
        rows = StepRows(
            empty(batch_size, length, of=count),
            empty(batch_size, of=flag),
            empty(batch_size, _COLUMNS, of=count),
            empty(batch_size, _COLUMNS, of=flag),
            empty(batch_size, of=count),
            empty(batch_size, of=flag),
        )
    weights = empty(_CHANNELS, 1, 2), empty(_CHANNELS), empty(_CHANNELS, _HEAD_DIM, 2), empty(_CHANNELS)
    table = empty(batch_size if is_padded else 1, length, _ROTATED, of=torch.float32)
    tables = table, torch.empty_like(table)
    others = (empty(_GROUPS), *tables, _HEAD_DIM, False, None, rows, config)
    arguments: list[Any] = [raw, current, delayed, *states, *states, *weights, *others]
    launcher.step(*arguments)
