"""Residual merge and RMSNorm as one row program: what is merged and what is normalised come from one read.

A program takes some rows at a time, whole ones, and keeps the vectors for all of them. With the vectors ``[D]`` left
out the same kernel is the merge alone, or the norm alone. The backward pass is in `triton_backward.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import launch
from . import configs

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def load_vector(pointer, columns, inside):
    """``[1, D]`` in fp32."""
    return tl.load(pointer + columns, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_rows(pointer, row, stride, columns, mask):
    """``[R, D]`` in fp32, 0 where masked."""
    offsets = row.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, row, stride, columns, mask, values):
    """``[R, D]`` of fp32, rounded to what is there."""
    offsets = row.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def merge_constant(output_scale, output_bias, residual_scale, residual_bias, columns, inside):
    """``b s + b' s'``, the part of the merge that all rows share, ``[1, D]``."""
    constant = load_vector(output_scale, columns, inside) * load_vector(output_bias, columns, inside)
    if residual_scale is not None:
        constant += load_vector(residual_scale, columns, inside) * load_vector(residual_bias, columns, inside)
    return constant


@triton.jit
def forward_kernel(
    output,
    residual,
    output_scale,
    output_bias,
    residual_scale,
    residual_bias,
    weight,
    stream,
    normed,
    factor,
    rows,
    output_stride,
    residual_stride,
    eps,
    STREAM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`output_scale` None: `output` is the stream already. `weight` None: no norm. `STREAM`: dtype that the stream is
    rounded to before the norm sees it."""
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    if output_scale is not None:
        scale = load_vector(output_scale, columns, inside)
        constant = merge_constant(output_scale, output_bias, residual_scale, residual_bias, columns, inside)
        if residual is not None:
            other_scale = load_vector(residual_scale, columns, inside)
    if weight is not None:
        gain = load_vector(weight, columns, inside)
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        mask = (row < rows)[:, None] & inside[None, :]
        x = load_rows(output, row, output_stride, columns, mask)
        if output_scale is not None:
            x = x * scale + constant
            if residual is not None:
                x += load_rows(residual, row, residual_stride, columns, mask) * other_scale
            x = x.to(STREAM).to(tl.float32)
            store_rows(stream, row, D, columns, mask, x)
        if weight is not None:
            # past the width `constant` is 0, so x is
            inverse = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + eps)
            store_rows(normed, row, D, columns, mask, x * inverse[:, None] * gain)
            tl.store(factor + row, inverse, mask=row < rows)


def as_rows(x: Tensor) -> Tensor:
    """``[rows, D]`` whose columns lie side by side; copied only where they do not."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def forward(
    output: Tensor,
    residual: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    weight: Tensor | None,
    eps: float,
    stream_dtype: torch.dtype,
    normed_dtype: torch.dtype,
    config: KernelConfig | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Stream, normed rows, and the factor of each row, fp32 ``[...]``; None for what is not computed.

    Args:
        output, residual: ``[..., D]``.
        vectors: scale and bias of `output` and of `residual`, ``[D]``; all None: `output` is the stream, which is not
            written again.
        weight: ``[D]``; None: no norm.
        config: None: the one that is chosen for the width.
    """
    config = configs.choose_forward(output.shape[-1]) if config is None else config
    flat, other = as_rows(output), None if residual is None else as_rows(residual)
    rows, width = flat.shape
    merged = vectors[0] is not None
    stream = output.new_empty(output.shape, dtype=stream_dtype) if merged else None
    normed = None if weight is None else output.new_empty(output.shape, dtype=normed_dtype)
    factor = None if weight is None else output.new_empty(output.shape[:-1], dtype=torch.float32)
    contiguous: list[Any] = [None if v is None else v.contiguous() for v in (*vectors, weight)]
    launch(
        forward_kernel,
        (configs.forward_programs(rows, config),),
        config,
        flat,
        other,
        *contiguous,
        stream,
        normed,
        factor,
        rows,
        flat.stride(0),
        0 if other is None else other.stride(0),
        eps,
        STREAM=DTYPES[stream_dtype],
        D=width,
    )
    return stream, normed, factor
