"""Triton's kernels: the rows of a chunk of logits, and adding up the weight's gradient.

A row is read once for its largest logit and its sum of exponentials, and once more to be overwritten by its gradient;
all arithmetic is fp32. The products before and after are torch's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, launch, narrowed
from . import configs

#: the lowest fp32 that is finite: lanes that have seen no logit subtract it without making a NaN
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _tanh(x):
    """As exact for small values as for large ones."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    s = x * x
    series = size * (1.0 - s * (0.33333333333333 - s * (0.13333333333333 - s * 0.05396825396825)))
    t = tl.where(size < 0.1, series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t)


@triton.jit
def _tanh_slope(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _rows(
    logits,
    targets,
    losses,
    scale,
    words,
    stride,
    ignore_index,
    z_loss,
    softcap,
    CAPPED: tl.constexpr,
    DIFFERENTIATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != ignore_index
    end = tl.where(counted, words, 0)  # logits that are read
    is_word = (target >= 0) & (target < words)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)

    nothing = tl.where(counted, float("nan"), 0.0)
    of_target = tl.load(logits + target, mask=counted & is_word, other=nothing).to(tl.float32)
    if CAPPED:
        of_target = softcap * _tanh(of_target / softcap)

    # Each lane has a largest value and a sum of its own, so waves meet once per row. Starting from the target's logit
    # also means that every wave has read it before any wave, after they have met, can overwrite it.
    largest = tl.zeros([BLOCK], tl.float32) + tl.maximum(of_target, _LOWEST)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < words, other=0.0).to(tl.float32)
        if CAPPED:
            x = softcap * _tanh(x / softcap)
        x = tl.where(at < words, x, float("-inf"))
        above = tl.maximum(largest, x)
        total = total * tl.exp(largest - above) + tl.exp(x - above)
        largest = above
    top = tl.max(largest, 0)
    total = tl.where(counted, tl.sum(total * tl.exp(largest - top), 0), 1.0)
    rest = tl.log(total)
    loss = top - of_target + rest + z_loss * (top + rest) * (top + rest)
    tl.store(losses + row, tl.where(counted, loss, 0.0))

    if DIFFERENTIATED:
        factor = tl.where(is_word, tl.load(scale).to(tl.float32), float("nan"))
        share = (1.0 + 2.0 * z_loss * (top + rest)) / total
        last = (words - 1) // BLOCK * BLOCK
        for done in range(0, words, BLOCK):  # backwards: what was read last is likely to be in a cache
            at = last - done + lanes
            x = tl.load(logits + at, mask=at < end, other=top).to(tl.float32)
            if CAPPED:
                slope = _tanh_slope(x / softcap)
                x = softcap * _tanh(x / softcap)
            d = tl.exp(x - top) * share
            d = tl.where(at == target, d - 1.0, d) * factor
            if CAPPED:
                d *= slope
            d = tl.where(counted, d, 0.0)
            tl.store(logits + at, narrowed(d, logits.dtype.element_ty), mask=at < words)


@triton.jit
def _add(total, rest, part, number, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < number
    exact = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
    exact += tl.load(part + at, mask=there, other=0.0).to(tl.float32)
    exact += tl.load(rest + at, mask=there, other=0.0).to(tl.float32)
    rounded = narrowed(exact, total.dtype.element_ty)
    tl.store(total + at, rounded, mask=there)
    tl.store(rest + at, narrowed(exact - rounded.to(tl.float32), rest.dtype.element_ty), mask=there)


def differentiate(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chosen: KernelConfig | None = None,
) -> None:
    """As `rows.differentiate`, on rows that may lack a target. The loss and the gradient of a row whose target is no
    word are NaN, for looking at the targets would make the processor wait.

    Args:
        logits: ``[T, V]`` of fp32, bf16 or fp16; rows of any distance, each contiguous.
        targets: ``[T]``, contiguous.
        losses: ``[T]`` fp32, contiguous.
        scale: scalar tensor; None: the logits stay, no gradient is wanted.
        ignore_index: of rows that have no target.
        z_loss, softcap: as in `op.linear_cross_entropy`.
        chosen: one of `configs.ROWS`; None: what their rule says.
    """
    number, words = logits.shape
    launch(
        _rows,
        (number,),
        chosen or configs.choose_rows(words, logits.dtype, softcap is not None),
        logits,
        targets,
        losses,
        losses if scale is None else scale,  # not read
        words,
        logits.stride(0),
        ignore_index,
        float(z_loss),
        1.0 if softcap is None else float(softcap),
        CAPPED=softcap is not None,
        DIFFERENTIATED=scale is not None,
    )


def add(total: Tensor, rest: Tensor, part: Tensor, chosen: KernelConfig | None = None) -> None:
    """``total += part`` as if `total` had twice its digits; `rest` has the further ones.

    Args:
        total, rest: of one shape and dtype, contiguous.
        part: of that shape and any dtype up to fp32, contiguous.
        chosen: one of `configs.ADD`.
    """
    chosen = chosen or configs.choose_add()
    number = total.numel()
    launch(_add, (blocks_of(number, chosen["BLOCK"]),), chosen, total, rest, part, number)
