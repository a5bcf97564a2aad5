"""Gradients of residual merge and RMSNorm in one read, and the sums over rows that the vectors' gradients are.

The stream is not saved where a scale learns, since then both summands are read anyway: it is merged again from them.
Every program sums its own rows and writes the sums to a workspace, which a second kernel adds up. No atomics, so two
runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, launch
from . import configs
from .triton import DTYPES, as_rows, load_rows, load_vector, merge_constant, store_rows


@triton.jit
def store_sums(pointer, columns, inside, sums, D: tl.constexpr):
    """Sums ``[R, D]`` over rows of this program, to its row of the workspace."""
    tl.store(pointer + tl.program_id(0).to(tl.int64) * D + columns, tl.sum(sums, axis=0), mask=inside)


@triton.jit
def backward_kernel(
    stream_grad,
    normed_grad,
    output,
    residual,
    stream,
    factor,
    output_scale,
    output_bias,
    residual_scale,
    residual_bias,
    weight,
    output_grad,
    residual_grad,
    total,
    output_sum,
    residual_sum,
    weight_sum,
    rows,
    stream_grad_stride,
    normed_grad_stride,
    output_stride,
    residual_stride,
    stream_stride,
    STREAM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`stream` None: merged again. `output_scale` None: there was no merge, and `output_grad` is that of the stream.
    A gradient or sum that is None is not wanted, or did not arrive."""
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    if output_scale is not None:
        scale = load_vector(output_scale, columns, inside)
        if residual_scale is not None:
            other_scale = load_vector(residual_scale, columns, inside)
        if normed_grad is not None and stream is None:
            constant = merge_constant(output_scale, output_bias, residual_scale, residual_bias, columns, inside)
    if normed_grad is not None:
        gain = load_vector(weight, columns, inside)
    if total is not None:
        total_sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if output_sum is not None:
        output_sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if residual_sum is not None:
        residual_sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if weight_sum is not None:
        weight_sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)

    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        mask = (row < rows)[:, None] & inside[None, :]
        if output is not None:
            o = load_rows(output, row, output_stride, columns, mask)
        if residual is not None:
            r = load_rows(residual, row, residual_stride, columns, mask)
        if stream_grad is not None:
            grad = load_rows(stream_grad, row, stream_grad_stride, columns, mask)
        if normed_grad is not None:
            above = load_rows(normed_grad, row, normed_grad_stride, columns, mask)
            if stream is not None:
                x = load_rows(stream, row, stream_stride, columns, mask)
            else:
                x = o * scale + constant
                if residual is not None:
                    x += r * other_scale
                x = x.to(STREAM).to(tl.float32)
            inverse = tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
            x *= inverse
            if weight_sum is not None:
                weight_sums += above * x
            above *= gain
            along = tl.sum(above * x, axis=1)[:, None] * (1.0 / D)
            through = (above - x * along) * inverse
            if stream_grad is not None:
                grad += through
            else:
                grad = through
        if total is not None:
            total_sums += grad
        if output_sum is not None:
            output_sums += grad * o
        if residual_sum is not None:
            residual_sums += grad * r
        if output_grad is not None:
            if output_scale is not None:
                store_rows(output_grad, row, D, columns, mask, grad * scale)
            else:
                store_rows(output_grad, row, D, columns, mask, grad)
        if residual_grad is not None:
            store_rows(residual_grad, row, D, columns, mask, grad * other_scale)

    if total is not None:
        store_sums(total, columns, inside, total_sums, D)
    if output_sum is not None:
        store_sums(output_sum, columns, inside, output_sums, D)
    if residual_sum is not None:
        store_sums(residual_sum, columns, inside, residual_sums, D)
    if weight_sum is not None:
        store_sums(weight_sum, columns, inside, weight_sums, D)


@triton.jit
def sum_of_programs(pointer, column, inside, programs, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of some columns of ``[programs, D]``."""
    sums = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        offsets = program.to(tl.int64)[:, None] * D + column[None, :]
        sums += tl.load(pointer + offsets, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def store_vector(pointer, column, inside, values):
    """Of fp32, rounded to what is there."""
    tl.store(pointer + column, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def half_gradients(scale, bias, scale_grad, bias_grad, sums, total, column, inside):
    """Of scale and bias in ``(x + bias) scale``, from the sums of ``grad x`` and of ``grad``."""
    if scale_grad is not None:
        values = sums + total * tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        store_vector(scale_grad, column, inside, values)
    if bias_grad is not None:
        store_vector(bias_grad, column, inside, total * tl.load(scale + column, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def reduction_kernel(
    total,
    output_sum,
    residual_sum,
    weight_sum,
    output_scale,
    output_bias,
    residual_scale,
    residual_bias,
    output_scale_grad,
    output_bias_grad,
    residual_scale_grad,
    residual_bias_grad,
    weight_grad,
    programs,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Axis 1 of the grid: 0 the norm's weight, 1 the vectors of the output, 2 those of the residual."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < D
    half = tl.program_id(1)
    if half == 0:
        if weight_grad is not None:
            sums = sum_of_programs(weight_sum, column, inside, programs, D, BLOCK_P, BLOCK_C)
            store_vector(weight_grad, column, inside, sums)
    elif total is not None:
        grads = sum_of_programs(total, column, inside, programs, D, BLOCK_P, BLOCK_C)
        if half == 1:
            sums = grads
            if output_sum is not None:
                sums = sum_of_programs(output_sum, column, inside, programs, D, BLOCK_P, BLOCK_C)
            half_gradients(output_scale, output_bias, output_scale_grad, output_bias_grad, sums, grads, column, inside)
        else:
            sums = grads
            if residual_sum is not None:
                sums = sum_of_programs(residual_sum, column, inside, programs, D, BLOCK_P, BLOCK_C)
            half_gradients(
                residual_scale, residual_bias, residual_scale_grad, residual_bias_grad, sums, grads, column, inside
            )


class Sums:
    """The workspace: for each sum over rows that is wanted ``[programs, D]`` in fp32.

    Args:
        like: a tensor on the device.
        wanted: which gradients are: of output, residual, the four vectors, the norm's weight.
    """

    def __init__(self, like: Tensor, programs: int, width: int, wanted: tuple[bool, ...]):
        kinds = (any(wanted[2:6]), wanted[2], wanted[4], wanted[6])
        space = iter(like.new_empty((sum(kinds), programs, width), dtype=torch.float32).unbind(0))
        self.programs, self.width = programs, width
        self.tensors = tuple(next(space) if kind else None for kind in kinds)

    @property
    def any(self) -> bool:
        """Whether any is wanted."""
        return any(tensor is not None for tensor in self.tensors)


def rows_backward(
    config: KernelConfig,
    sums: Sums,
    upstream: tuple[Tensor | None, Tensor | None],
    summands: tuple[Tensor | None, Tensor | None],
    stream: Tensor | None,
    factor: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    weight: Tensor | None,
    results: tuple[Tensor | None, Tensor | None],
    stream_dtype: torch.dtype,
) -> None:
    """Write the gradients of output and residual, and the sums over rows.

    Args:
        upstream: gradients of stream and of normed rows; None: none arrived.
        summands: output and residual, where they are needed.
        stream: None: to be merged again from `summands`.
        factor: of the norm, fp32 ``[rows]``.
        vectors, weight: as in the forward pass.
        results: where the gradients of output and residual go, contiguous.
    """
    strided = [None if t is None else as_rows(t) for t in (*upstream, *summands, stream)]
    rows = next(t.shape[0] for t in strided if t is not None)
    contiguous: list[Any] = [None if v is None else v.contiguous() for v in (*vectors, weight)]
    launch(
        backward_kernel,
        (sums.programs,),
        config,
        *strided,
        factor,
        *contiguous,
        *results,
        *sums.tensors,
        rows,
        *(0 if t is None else t.stride(0) for t in strided),
        STREAM=DTYPES[stream_dtype],
        D=sums.width,
    )


def reduce(
    config: KernelConfig, sums: Sums, vectors: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...]
) -> None:
    """Write the gradients of the four vectors and of the norm's weight to `results`, where they are wanted."""
    contiguous: list[Any] = [None if v is None else v.contiguous() for v in vectors]
    launch(
        reduction_kernel,
        (blocks_of(sums.width, config["BLOCK_C"]), 3),
        config,
        *sums.tensors,
        *contiguous,
        *results,
        sums.programs,
        D=sums.width,
    )


def backward(
    upstream: tuple[Tensor | None, Tensor | None],
    summands: tuple[Tensor | None, Tensor | None],
    stream: Tensor | None,
    factor: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    weight: Tensor | None,
    results: list[Tensor | None],
    stream_dtype: torch.dtype,
) -> None:
    """Fill `results`: the gradients of output, residual, the four vectors and the norm's weight that are wanted."""
    like = next(t for t in (*upstream, *summands, stream) if t is not None)
    width = like.shape[-1]
    rows = like.numel() // width
    config = configs.choose_backward(width)
    sums = Sums(like, configs.backward_programs(rows, config), width, tuple(r is not None for r in results))
    rows_backward(
        config, sums, upstream, summands, stream, factor, vectors, weight, (results[0], results[1]), stream_dtype
    )
    if sums.any:
        reduce(configs.choose_reduction(), sums, vectors, tuple(results[2:]))
