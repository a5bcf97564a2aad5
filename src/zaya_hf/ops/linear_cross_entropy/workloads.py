"""The kernels at the sizes of ZAYA1-8B."""

from __future__ import annotations

from functools import partial

import torch

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import chunked, configs, sums

WORDS, WIDTH, TOKENS = 262_272, 2048, 16_384
#: rows of few words: a small model's
FEW_WORDS = 4096


def _rows(rows: int, words: int, dtype: torch.dtype, softcap: float | None, chosen: KernelConfig) -> None:
    from . import triton as kernels

    logits = torch.empty(rows, words, dtype=dtype, device="meta")
    targets = torch.empty(rows, dtype=torch.long, device="meta")
    losses = torch.empty(rows, device="meta")
    scale = torch.empty((), device="meta")
    kernels.differentiate(logits, targets, losses, scale, -100, 1e-4, softcap, chosen)


def _add(rows: int, dtype: torch.dtype, chosen: KernelConfig) -> None:
    from . import triton as kernels

    total, rest, part = (torch.empty(rows, WIDTH, dtype=dtype, device="meta") for _ in range(3))
    kernels.add(total, rest, part, chosen)


def workloads(dtype: torch.dtype) -> list[Workload]:
    """For logits and a weight of `dtype`; a chunk of rows as it is on a GPU."""
    size, name = dtype.itemsize, DTYPE_NAMES[dtype]
    most = int(WORDS * WIDTH * chunked.WEIGHT_SHARE["cuda"]) // (WORDS * size)
    found = []
    for rows, words, softcap in ((most, WORDS, None), (most, WORDS, 30.0), (TOKENS, FEW_WORDS, None)):
        chosen = configs.choose_rows(words, dtype, softcap is not None)
        kind = "linear_cross_entropy: rows" if softcap is None else "linear_cross_entropy: rows with softcap"
        # read once, and overwritten; the second reading may come from a cache
        found.append(
            Workload(
                kind,
                f"{rows} rows of {words} words",
                name,
                (chosen,),
                partial(_rows, rows, words, dtype, softcap),
                bytes=2.0 * rows * words * size,
            )
        )
    if size == 2:
        rows = sums.slice_rows(WORDS, WIDTH, "cuda")
        found.append(
            Workload(
                "linear_cross_entropy: adding gradients",
                f"{rows} of {WORDS} words",
                name,
                configs.ADD,
                partial(_add, rows, dtype),
                bytes=5.0 * rows * WIDTH * size,
            )
        )
    return found
