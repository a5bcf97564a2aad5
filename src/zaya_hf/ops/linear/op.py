"""Which backend multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
from ..numerics import promote
from . import compiled, onednn, packed, reference
from .packed import PackedWeight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed_weight: PackedWeight | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., K]``; `weight`: ``[N, K]``, of any strides; `bias`: ``[N]``.
        packed_weight: of `weight`; used where no gradient is wanted, and never after `weight` has changed.

    Returns:
        ``[..., N]``.
    """
    if not selection.reference_only("linear"):
        if torch.compiler.is_compiling():
            if compiled.covers(weight, packed_weight):
                return compiled.linear(x, weight, bias, packed_weight)
        elif packed_weight is not None and packed.covers(x, weight, packed_weight):
            return packed.linear(x, packed_weight, bias)
        elif onednn.covers(x, weight):
            return onednn.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


#: elements of a weight that are cast at a time: they stay in a processor's cache until they are multiplied
CAST_AT_ONCE = 1 << 21


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in fp32 or wider, whatever the dtype of the weight.

    Outside the graph no wide copy of a narrow weight is made: it is cast and multiplied part by part.

    Args:
        x: ``[..., K]``; `weight`: ``[N, K]``; `bias`: ``[N]``.

    Returns:
        ``[..., N]``, fp32 or wider.
    """
    x, bias = promote(x), None if bias is None else promote(bias)
    rows = max(CAST_AT_ONCE // max(weight.shape[1], 1), 1)
    whole = weight.dtype == x.dtype or weight.shape[0] <= rows
    if whole or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return linear(x, weight.to(x.dtype), bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], rows):
        part = linear(x, weight[start : start + rows].to(x.dtype))
        out[..., start : start + rows] = part if bias is None else part + bias[start : start + rows]
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of ``[M, K]`` and ``[N, K]``, both of any strides: ``[M, N]``."""
    return linear(a, b)


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    if selection.reference_only("linear"):
        return "reference", f"ZAYA_OPS={selection.description()}"
    if onednn.is_available():
        return "onednn", "fp32 products on a CPU; torch's own elsewhere"
    return "reference", "this build of torch has no oneDNN"
