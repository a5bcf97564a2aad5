"""The gradients as formulas that can be differentiated again, for ``create_graph=True``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import promote
from . import fused, reference


def gradients(
    stream_grad: Tensor | None,
    normed_grad: Tensor | None,
    output: Tensor | None,
    residual: Tensor | None,
    stream: Tensor | None,
    factor: Tensor | None,
    *parameters: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Of output, residual, the four vectors and the norm's weight, each if `wanted`.

    Args:
        stream_grad, normed_grad: upstream; at least one of them.
        output, residual: ``[..., D]``, those whose scale learns.
        stream: None: the merge of both.
        factor: not read: it is no part of the graph.
        parameters: scale and bias of output and of residual, weight of the norm, ``[D]``.
        dtypes: of output, residual and stream.
        eps: of the norm.
    """
    scale, bias, residual_scale, residual_bias, weight = parameters
    grad = None if stream_grad is None else promote(stream_grad)
    weight_grad = None
    if normed_grad is not None:
        assert weight is not None
        if stream is None:
            assert output is not None
            assert scale is not None
            assert bias is not None
            merged = reference.residual_merge(output, residual, scale, bias, residual_scale, residual_bias)
            stream = merged.to(dtypes[2])
        factor = fused.norm_factor(stream, eps)
        through, weight_grad = fused.norm_gradients(normed_grad, stream, weight, factor, (True, wanted[6]))
        assert through is not None
        grad = through if grad is None else grad + through
    assert grad is not None
    if scale is None or bias is None:  # the norm alone
        return grad.to(dtypes[0]) if wanted[0] else None, *(None,) * 5, weight_grad
    total = grad.flatten(0, -2).sum(0) if any(wanted[2:6]) else None
    first = fused.half_gradients(grad, total, output, dtypes[0], scale, bias, (wanted[0], wanted[2], wanted[3]))
    if residual_scale is None or residual_bias is None:
        return first[0], None, *first[1:], None, None, weight_grad
    second = fused.half_gradients(
        grad, total, residual, dtypes[1], residual_scale, residual_bias, (wanted[1], wanted[4], wanted[5])
    )
    return first[0], second[0], *first[1:], *second[1:], weight_grad
