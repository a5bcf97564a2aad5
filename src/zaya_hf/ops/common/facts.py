"""What of a model decides which implementation of an operator takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Facts:
    """Sizes of a model, and in what it computes.

    Attributes:
        device, dtype: of its weights.
        hidden_size: D; `vocab_size` words.
        heads, groups: query heads and key/value heads, each of `head_dim`; `widths` of the two convolutions.
        num_experts, intermediate: experts and the width inside one; `activation` as transformers calls it.
        router_width: of the router's MLP.
    """

    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    vocab_size: int
    heads: int
    groups: int
    head_dim: int
    widths: tuple[int, int]
    num_experts: int
    intermediate: int
    activation: str
    router_width: int
