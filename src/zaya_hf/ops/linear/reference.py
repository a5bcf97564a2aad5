"""The product of a linear layer, as torch computes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., K]``, ``[N, K]``, ``[N]`` -> ``[..., N]``."""
    return F.linear(x, weight, bias)
