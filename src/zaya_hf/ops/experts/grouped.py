"""Top-1 gated experts on a CPU: tokens sorted once, one product per expert that has tokens, gradients written in place.

The weights of all experts are one tensor, and so is their gradient. Autograd would build it from the gradients of the
experts by copying each; here every expert's product goes to its own part of it, and zeros to the experts that no token
reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..linear import PackedWeight, Transient, linear, product


def covers(x: Tensor) -> bool:
    """Reading the slots must be free, and a trace must not depend on them."""
    return (
        x.device.type == "cpu"
        and type(x) is Tensor
        and x.shape[0] > 0
        and selection.is_eager()
        and not torch.is_autocast_enabled("cpu")
    )


class PackedExperts(Transient):
    """The weights of all experts, `gate_up_proj` and `down_proj`, packed one by one (`ops.linear.PackedWeight`)."""

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor):
        self.gate_up = [PackedWeight(weight) for weight in gate_up_proj]
        self.down = [PackedWeight(weight) for weight in down_proj]
        self.handle = self.new_handle()


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    packed: PackedExperts | None = None,
) -> Tensor:
    """As `reference.experts`, for an `x` that `covers` accepts."""
    num_experts = gate_up_proj.shape[0]
    gate_up_packed, down_packed = (None, None) if packed is None else (packed.gate_up, packed.down)
    if x.shape[0] == 1 and not torch.is_grad_enabled():  # decoding: nothing to sort
        slot = int(slots)
        if slot >= num_experts:
            return torch.zeros_like(x)
        gate, up = _product_of(slot, x, gate_up_proj, gate_up_packed).chunk(2, dim=-1)
        return _product_of(slot, act_fn(gate).mul_(up), down_proj, down_packed).mul_(weights[:, None])
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=num_experts)[:num_experts].tolist()
    real = sum(counts)
    order = order[:real] if real < x.shape[0] else order
    gate, up = grouped_product(x[order], gate_up_proj, counts, gate_up_packed).chunk(2, dim=-1)
    hidden = grouped_product(act_fn(gate) * up, down_proj, counts, down_packed)
    hidden = hidden * weights[order, None].to(x.dtype)
    return torch.zeros_like(x).index_copy(0, order, hidden)


def grouped_product(x: Tensor, weight: Tensor, counts: list[int], packed: list[PackedWeight] | None = None) -> Tensor:
    """Consecutive rows of `x` times the transposed matrices of `weight`.

    Args:
        x: ``[N, K]``, sorted by group.
        weight: ``[E, O, K]``.
        counts: rows of each of the E groups; they sum to N.
        packed: the E matrices packed, for use outside the graph.

    Returns:
        ``[N, O]``.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GroupedProduct.apply(x, weight, counts)
    return _multiply_groups(x, weight, counts, packed)


def _multiply_groups(x: Tensor, weight: Tensor, counts: list[int], packed: list[PackedWeight] | None = None) -> Tensor:
    groups = [(group, rows) for group, rows in enumerate(x.split(counts)) if len(rows)]
    parts = [_product_of(group, rows, weight, packed) for group, rows in groups]
    return torch.cat(parts) if parts else x.new_empty(0, weight.shape[1])


def _product_of(group: int, rows: Tensor, weight: Tensor, packed: list[PackedWeight] | None) -> Tensor:
    return linear(rows, weight[group], packed_weight=None if packed is None else packed[group])


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        # what a frozen factor would need is not kept
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.counts = counts
        return _multiply_groups(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_product(grad, weight.transpose(1, 2), ctx.counts)
        if ctx.needs_input_grad[1]:
            grad_weight = _GroupedOuter.apply(grad, x, ctx.counts)
        return grad_x, grad_weight, None


class _GroupedOuter(torch.autograd.Function):
    """``grad_g.T @ x_g`` of every group, ``[E, O, K]``; 0 for a group without rows. A function of its own so that the
    gradient can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(grad, x)
        ctx.counts = counts
        outer = grad.new_empty(len(counts), grad.shape[1], x.shape[1])
        for group, (rows, columns) in enumerate(zip(grad.split(counts), x.split(counts), strict=True)):
            if len(rows) == 0:
                outer[group].zero_()
            else:
                outer_product_into(outer[group], rows, columns)
        return outer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad, x = ctx.saved_tensors
        (outer_grad,) = grads
        wanted = ctx.needs_input_grad
        grad_grad = grouped_product(x, outer_grad, ctx.counts) if wanted[0] else None
        grad_x = grouped_product(grad, outer_grad.transpose(1, 2), ctx.counts) if wanted[1] else None
        return grad_grad, grad_x, None


#: rows from which the faster product is worth copying its result
MANY_ROWS = 128


def outer_product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a.T @ b`` for ``[n, O]`` and ``[n, K]``: ``[O, K]``. With few rows writing `out` is all the work."""
    if len(a) >= MANY_ROWS:
        out.copy_(product(a.t(), b.t()))
    else:
        torch.mm(a.t(), b, out=out)
