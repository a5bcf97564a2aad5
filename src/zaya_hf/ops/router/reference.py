"""The router's tail (arXiv 2605.05365, eq. 4): softmax, balancing bias, argmax, weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import promote


def select_slots(logits: Tensor, balancing_biases: Tensor, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose a slot per token by biased probability, weigh it by the unbiased one.

    Args:
        logits: ``[N, E + 1]``; the last slot skips the experts.
        balancing_biases: ``[E + 1]`` fp32, outside the graph.
        replayed: ``[N]`` int64, slots that were chosen before and are taken as they are; -1: choose.

    Returns:
        slots ``[N]`` int64 (the lowest index wins a tie) and weights ``[N]``, fp32 or wider, not renormalised.
    """
    probabilities = torch.softmax(promote(logits), dim=-1)
    with torch.no_grad():
        slots = (probabilities + balancing_biases).argmax(-1)
        if replayed is not None:
            slots = torch.where(replayed < 0, slots, replayed)
    return slots, probabilities.gather(-1, slots[:, None])[:, 0]


def count_slots(slots: Tensor, num_slots: int, real: Tensor | None = None) -> Tensor:
    """Tokens per slot, ``[num_slots]`` int64.

    Args:
        slots: ``[N]`` int64.
        real: ``[N]`` bool, False for padding, which is not counted; None: all are real.
    """
    ones = torch.ones_like(slots) if real is None else real.to(slots.dtype)
    return slots.new_zeros(num_slots).index_add(0, slots, ones)


def initial_balancing_biases(num_experts: int) -> Tensor:
    """``[E + 1]`` fp32 for `num_experts` = E: no preference among them; the skip slot loses against each of them."""
    return torch.cat([torch.zeros(num_experts), -torch.ones(1)]).to(torch.float32)
