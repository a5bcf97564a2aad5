"""Which implementation of the residual merge and of RMSNorm runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
from . import fused, reference


def residual_merge(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None = None,
    residual_bias: Tensor | None = None,
) -> Tensor:
    """``(output + b) s + (residual + b') s'`` in fp32 or wider; see `reference.residual_merge`.

    Args:
        output, residual: ``[..., hidden_size]``; without a residual the first summand alone.
        output_scale, output_bias: s and b, ``[hidden_size]``.
        residual_scale, residual_bias: s' and b', likewise.
    """
    arguments = (output, residual, output_scale, output_bias, residual_scale, residual_bias)
    chosen = fused if not selection.reference_only("residual_norm") and fused.covers(output, residual) else reference
    return chosen.residual_merge(*arguments)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last dimension; see `reference.rms_norm`."""
    chosen = fused if not selection.reference_only("residual_norm") and fused.covers(x, weight) else reference
    return chosen.rms_norm(x, weight, eps, weight.dtype if dtype is None else dtype)


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    return selection.outcome(
        "residual_norm", device, ("fused", "few passes over memory, its own gradients; the reference while compiling")
    )
