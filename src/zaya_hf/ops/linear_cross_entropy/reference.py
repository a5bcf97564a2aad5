"""Cross-entropy of a linear layer, by way of all its logits."""

from __future__ import annotations

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
) -> Tensor:
    """See `op.linear_cross_entropy`."""
    if wide_logits:
        wide = wide_dtype(hidden.dtype)
        hidden, weight, bias = hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    logits = F.linear(hidden, weight, bias)
    total = F.cross_entropy(promote(logits), targets, ignore_index=ignore_index, reduction="sum")
    return total if divisor is None else total / divisor
