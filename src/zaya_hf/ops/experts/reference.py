"""Top-1 gated experts, sorted once: nothing is computed for skipped tokens or experts without tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """``weights[n] * down(act(gate(x[n])) * up(x[n]))`` with the expert that slot n names.

    Args:
        x: ``[N, D]``.
        slots: ``[N]`` int64, from 0 up (which is not checked); E or more: no expert, the result is 0.
        weights: ``[N]``.
        gate_up_proj: ``[E, 2 I, D]``, gate first; `down_proj`: ``[E, D, I]``.

    Returns:
        ``[N, D]`` in the dtype of `x`. Experts without tokens get gradients of exactly 0; so does all else if every
        token skips.
    """
    if x.shape[0] == 0:
        return _nothing(x, weights, gate_up_proj, down_proj)
    num_experts = gate_up_proj.shape[0]
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=num_experts)[:num_experts].tolist()
    order = order[: sum(counts)]
    parts = []
    # unbind, not indexing: its backward is one stack, where each index would build a gradient of all experts
    gate_up, down = gate_up_proj.unbind(0), down_proj.unbind(0)
    for expert, rows in enumerate(order.split(counts)):
        if rows.numel() == 0:
            continue
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        parts.append(F.linear(act_fn(gate) * up, down[expert]) * weights[rows, None].to(x.dtype))
    if not parts:
        return _nothing(x, weights, gate_up_proj, down_proj)
    return torch.zeros_like(x).index_copy(0, order, torch.cat(parts).to(x.dtype))


def _nothing(x: Tensor, *others: Tensor) -> Tensor:
    """Zeros like `x`. Empty slices keep all inputs in the graph, so that their gradients are zeros and not missing."""
    return torch.zeros_like(x) + sum(t[:0].sum().to(x.dtype) for t in (x, *others))
