"""Residual merge and RMSNorm in few passes over memory, with their gradients written out.

Both are bound by memory: every elementwise operation reads and writes the whole stream. The merge is computed as
``o s + r s' + (b s + b' s')``, whose last part is one vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..numerics import promote, wide_dtype


def covers(*tensors: Tensor | None) -> bool:
    """Plain tensors outside of traces and transforms."""
    return selection.is_eager() and selection.are_plain(*tensors)


def residual_merge(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
) -> Tensor:
    """As `reference.residual_merge`."""
    arguments = (output, residual, output_scale, output_bias, residual_scale, residual_bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments):
        return _Merge.apply(*arguments)
    return _merge(*arguments)


def _merge(output: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> Tensor:
    scale, bias, residual_scale, residual_bias = (None if v is None else promote(v) for v in vectors)
    assert scale is not None
    assert bias is not None
    constant = scale * bias
    if residual is None:
        return torch.addcmul(constant, promote(output), scale)
    assert residual_scale is not None
    assert residual_bias is not None
    constant.addcmul_(residual_scale, residual_bias)
    merged = torch.addcmul(constant, output, scale)
    if residual.dtype.itemsize > merged.dtype.itemsize:  # a float64 stream beside narrower sublayers
        return torch.addcmul(merged.to(residual.dtype), residual, residual_scale)
    return merged.addcmul_(residual, residual_scale)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output, residual, *vectors = arguments
        wanted = ctx.needs_input_grad
        ctx.dtypes = output.dtype, None if residual is None else residual.dtype
        # a frozen scale needs nothing of what it scales
        ctx.save_for_backward(output if wanted[2] else None, residual if wanted[4] else None, *vectors)
        return _merge(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output, residual, scale, bias, residual_scale, residual_bias = ctx.saved_tensors
        (grad,) = grads
        wanted = ctx.needs_input_grad
        total = grad.flatten(0, -2).sum(0) if any(wanted[2:]) else None
        halves = []
        for x, dtype, vectors, needed in (
            (output, ctx.dtypes[0], (scale, bias), (wanted[0], wanted[2], wanted[3])),
            (residual, ctx.dtypes[1], (residual_scale, residual_bias), (wanted[1], wanted[4], wanted[5])),
        ):
            halves.append(half_gradients(grad, total, x, dtype, *vectors, needed))
        (output_grad, *first), (residual_grad, *second) = halves
        return output_grad, residual_grad, *first, *second


def half_gradients(
    grad: Tensor,
    total: Tensor | None,
    x: Tensor | None,
    dtype: torch.dtype | None,
    scale: Tensor,
    bias: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (of `dtype`), scale and bias in ``(x + bias) scale``; `total` is `grad` summed over the tokens."""
    x_grad = (grad * promote(scale)).to(dtype) if wanted[0] else None
    scale_grad = bias_grad = None
    if wanted[1]:
        assert x is not None
        assert total is not None
        scale_grad = ((grad * x).flatten(0, -2).sum(0) + total * promote(bias)).to(scale.dtype)
    if wanted[2]:
        assert total is not None
        bias_grad = (total * promote(scale)).to(bias.dtype)
    return x_grad, scale_grad, bias_grad


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """As `reference.rms_norm`, in `dtype`."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps, dtype)
    return _norm(x, weight, eps, dtype)[0]


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Result, and the factor that every token was multiplied by, ``[..., 1]``."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_dtype(x.dtype))
    factor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * factor).mul_(weight).to(dtype), factor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        result, factor = _norm(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight)
        ctx.factor, ctx.eps = factor, eps
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        factor = ctx.factor
        if torch.is_grad_enabled():  # to be differentiated again
            factor = norm_factor(x, ctx.eps)
        x_grad, weight_grad = norm_gradients(grads[0], x, weight, factor, ctx.needs_input_grad[:2])
        return None if x_grad is None else x_grad.to(x.dtype), weight_grad, None, None


def norm_factor(x: Tensor, eps: float) -> Tensor:
    """What every token is multiplied by, ``[..., 1]``, as part of the graph."""
    return torch.rsqrt(promote(x).square().mean(-1, keepdim=True) + eps)


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x, fp32 or wider, and of `weight` in ``x factor weight``."""
    normed = x * factor
    x_grad = weight_grad = None
    if wanted[1]:
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if wanted[0]:
        scaled = grad * promote(weight)
        along = (scaled * normed).mean(-1, keepdim=True)
        x_grad = torch.addcmul(scaled, normed, along, value=-1) * factor
    return x_grad, weight_grad


def residual_merge_norm(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    stream_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """As `reference.residual_merge_norm`, in `dtype`."""
    merged = residual_merge(output, residual, output_scale, output_bias, residual_scale, residual_bias)
    stream = merged if stream_dtype is None else merged.to(stream_dtype)
    return stream, rms_norm(stream, weight, eps, dtype)
