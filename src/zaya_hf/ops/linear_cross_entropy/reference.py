"""Cross-entropy of a linear layer, by way of all its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics import promote, wide_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | None = None,
    ignore_index: int = -100,
    wide_logits: bool = False,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """See `op.linear_cross_entropy`."""
    if wide_logits:
        wide = wide_dtype(hidden.dtype)
        hidden, weight, bias = hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    total = of_logits(F.linear(hidden, weight, bias), targets, ignore_index, z_loss, softcap)
    return total if divisor is None else total / divisor


def of_logits(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0, softcap: float | None = None
) -> Tensor:
    """The sum for logits ``[N, V]`` and `targets` ``[N]``, in fp32 or wider; the others as in
    `op.linear_cross_entropy`."""
    values = promote(logits)
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    total = F.cross_entropy(values, targets, ignore_index=ignore_index, reduction="sum")
    if z_loss:
        squares = values.logsumexp(1).square()
        total = total + z_loss * squares.masked_fill(targets == ignore_index, 0).sum()
    return total
