"""Residual scaling (arXiv 2605.05365, eq. 6, in the form of the released weights) and RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import promote


def residual_merge(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None = None,
    residual_bias: Tensor | None = None,
) -> Tensor:
    """``(output + b) s + (residual + b') s'``, all in fp32 or wider, without a rounding in between.

    Args:
        output: ``[..., D]`` of a sublayer; without `residual`, the embedding, whose merge has only this half.
        residual: ``[..., D]`` stream.
        output_scale, output_bias, residual_scale, residual_bias: ``[D]``.

    Returns:
        ``[..., D]``, fp32 or wider.
    """
    merged = (promote(output) + promote(output_bias)) * promote(output_scale)
    if residual is None:
        return merged
    assert residual_scale is not None
    assert residual_bias is not None
    return merged + (promote(residual) + promote(residual_bias)) * promote(residual_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last dimension, in fp32 or wider, rounded once.

    Args:
        x: ``[..., D]``, any floating dtype (the stream comes in fp32).
        weight: ``[D]``.
        dtype: of the result; None: the weight's.
    """
    wide = promote(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * promote(weight)).to(weight.dtype if dtype is None else dtype)


def residual_merge_norm(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The merge, and the norm of what was merged.

    Args:
        output, residual, output_scale, output_bias, residual_scale, residual_bias: as in `residual_merge`.
        weight, eps, dtype: as in `rms_norm`.
        stream_dtype: what the merge is rounded to before the norm; None: not at all.

    Returns:
        the stream and the normed stream, ``[..., D]``.
    """
    merged = residual_merge(output, residual, output_scale, output_bias, residual_scale, residual_bias)
    stream = merged if stream_dtype is None else merged.to(stream_dtype)
    return stream, rms_norm(stream, weight, eps, dtype)
