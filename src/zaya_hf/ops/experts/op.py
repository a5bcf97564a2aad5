"""Which implementation of the experts runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
from . import grouped, reference, traced
from .grouped import PackedExperts


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    packed: PackedExperts | None = None,
) -> Tensor:
    """``weights[n] * down(act(gate(x[n])) * up(x[n]))`` with the expert that slot n names; see `reference.experts`.

    Args:
        x: ``[N, D]``.
        slots, weights: ``[N]`` int64, the expert of each token (E or more: none, the result is 0), and its weight.
        gate_up_proj, down_proj: ``[E, 2 I, D]``, gate first, and ``[E, D, I]``.
        act_fn: the activation of the gate.
        packed: the two weights packed; used where no gradient is wanted, and never after the weights have changed.
    """
    arguments = (x, slots, weights, gate_up_proj, down_proj, act_fn)
    if traced.covers():
        return traced.experts(*arguments)
    if selection.reference_only("experts") or not grouped.covers(x):
        return reference.experts(*arguments)
    return grouped.experts(*arguments, packed)


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    return selection.outcome("experts", device, ("grouped", "on a CPU; elsewhere what experts_implementation names"))
