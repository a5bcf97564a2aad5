"""The loss as one operator inside a compiled graph, which else would hold the logits of all rows.

The forward operator returns the gradients too, as `chunked` does, and the graph keeps them until its backward part
multiplies them by what comes from above. Exported programs and transforms of torch.func have the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..common.library import define
from ..numerics import wide_dtype
from . import chunked
from .chunked import Gradients, Problem, Wanted


def declines() -> str | None:
    """Why the graph that is being compiled cannot hold the operator; None: it can."""
    if selection.is_exporting():
        return "a program is being exported, which has to run without this package"
    return selection.transforms_decline()


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
    dtype = chunked.product_dtype(hidden, wide_logits)
    divisor = None if divisor is None else chunked.widened(divisor, hidden, dtype)
    wanted = list(chunked.wanted_of(hidden, weight, bias))
    if chunked.comes_later(dtype):
        wanted = [False] * 3
    results = torch.ops.zaya_hf.linear_cross_entropy(
        hidden, weight, bias, targets, divisor, dtype, ignore_index, z_loss, softcap, wanted
    )
    loss: Tensor = results[0]
    return loss


_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? divisor, "
    "ScalarType dtype, int ignore_index, float z_loss, float? softcap, bool[] wanted"
)
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Problem, Wanted]


def _inputs(arguments: tuple[Any, ...]) -> Inputs:
    hidden, weight, bias, targets, divisor, dtype, ignore_index, z_loss, softcap, wanted = arguments
    return hidden, weight, bias, targets, divisor, Problem(dtype, ignore_index, z_loss, softcap), tuple(wanted)


def _whole(gradients: Gradients, like: Tensor) -> list[Tensor]:
    """An operator returns tensors; without elements where there is no gradient."""
    return [like.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias, targets, divisor, problem, wanted = _inputs(arguments)
    scale = 1.0 if divisor is None else divisor.reciprocal()
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        total, gradients = chunked.compute(hidden, weight, bias, targets, problem, wanted, scale)
    return total if divisor is None else total / divisor, *_whole(gradients, hidden)


def _run_later(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias, targets, divisor, problem, wanted = _inputs(arguments)
    scale = grad if divisor is None else grad / divisor
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        _, gradients = chunked.compute(hidden, weight, bias, targets, problem, wanted, scale)
    return tuple(_whole(gradients, hidden))


def _fake_gradients(arguments: tuple[Any, ...]) -> list[Tensor]:
    tensors, wanted = arguments[:3], arguments[-1]
    like = [t.new_empty(t.shape) if needed else None for t, needed in zip(tensors, wanted, strict=True)]
    first, second, third = like
    return _whole((first, second, third), arguments[0])


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, dtype = arguments[0], arguments[5]
    return hidden.new_empty((), dtype=wide_dtype(dtype)), *_fake_gradients(arguments)


def _fake_later(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(_fake_gradients(arguments))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.others = inputs[5:9]
    ctx.wanted = inputs[9]
    ctx.save_for_backward(*inputs[:5], *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, divisor, *ahead = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    nothing = (None,) * 7
    if grad is None:
        return None, None, None, *nothing
    if torch.is_grad_enabled():  # create_graph
        problem = Problem(*ctx.others)
        return *chunked.differentiable(hidden, weight, bias, targets, divisor, problem, needed, grad), *nothing
    if all(there or not need for there, need in zip(ctx.wanted, needed, strict=True)):
        return *(g * grad if need else None for g, need in zip(ahead, needed, strict=True)), *nothing
    found = torch.ops.zaya_hf.linear_cross_entropy_backward(
        grad, hidden, weight, bias, targets, divisor, *ctx.others, list(needed)
    )
    return *(g if need else None for g, need in zip(found, needed, strict=True)), *nothing


define(f"linear_cross_entropy({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", _run, _fake,
       backward=_backward, setup_context=_setup_context)  # fmt: skip
define(f"linear_cross_entropy_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)", _run_later, _fake_later)
