"""The kernels as one operator of torch and another for its gradient, so that compiled graphs can hold them.

Nothing here imports Triton before an operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.library import define
from . import configs, reference
from .reference import RouterWeights, Routing, state_dtype

#: what has a gradient, in the order of the operators' arguments
INPUTS = ("x", "state", *(name for name in RouterWeights._fields if name != "eps"))
_WEIGHTS = (
    "Tensor down_weight, Tensor down_bias, Tensor? state_scale, Tensor norm_weight, Tensor fc1_weight, "
    "Tensor fc1_bias, Tensor fc2_weight, Tensor fc2_bias, Tensor out_weight, float eps"
)


def _run(x: Tensor, state: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    from . import triton as kernels

    weights, (balancing_biases, replayed, real, count) = RouterWeights(*rest[:10]), rest[10:]
    plan = configs.choose_route(x.shape[0], x.shape[1], weights.out_weight.shape[1], x.dtype)
    return kernels.route(x, state, weights, balancing_biases, replayed, real, count, plan)


def _fake(x: Tensor, state: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    weights, count = RouterWeights(*rest[:10]), rest[13]
    tokens, (slots, width) = x.shape[0], weights.out_weight.shape
    return (
        x.new_empty(tokens, slots),
        x.new_empty(tokens, dtype=torch.int64),
        x.new_empty(tokens, dtype=torch.float32),
        x.new_empty(tokens, width, dtype=state_dtype(x, state, weights.state_scale)),
        x.new_empty(slots if count else 0, dtype=torch.int64),
    )


def _run_backward(*arguments: Any) -> list[Tensor]:
    from .triton_backward import route_backward

    grads, x, state, weights = arguments[:3], arguments[3], arguments[4], RouterWeights(*arguments[5:15])
    own, logits, slots, wanted = arguments[15:]
    names = [name for name, is_wanted in zip(INPUTS, wanted, strict=True) if is_wanted]
    config = configs.choose_backward(x.dtype)
    found = route_backward(grads, x, state, weights, own, logits, slots, frozenset(names), config)
    return [found[name] for name in names]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    inputs, wanted = (*arguments[3:5], *arguments[5:14]), arguments[18]
    return [t.new_empty(t.shape) for t, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, slots, _, own, _ = output
    ctx.save_for_backward(*inputs[:11], own, logits, slots)
    ctx.eps = inputs[11]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    of_logits, _, of_weights, of_state, _ = grads
    *inputs, own, logits, slots = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[: len(INPUTS)])
    given = (of_logits, of_weights, of_state)
    if torch.is_grad_enabled():  # to be differentiated again
        found = iter(_differentiable(given, inputs, ctx.eps, slots, wanted))
    else:
        found = iter(_ROUTE_BACKWARD(*given, *inputs, ctx.eps, own, logits, slots, wanted))
    # eps, biases, replayed, real, count have none
    return *(next(found) if is_wanted else None for is_wanted in wanted), *[None] * 5


def _differentiable(
    grads: Sequence[Tensor | None], inputs: list[Any], eps: float, slots: Tensor, wanted: list[bool]
) -> Sequence[Tensor]:
    """The wanted gradients as part of the graph, by way of the definition with the slots that were chosen."""
    x, state = inputs[:2]
    with torch.autocast(x.device.type, enabled=False):
        named = RouterWeights._make((*inputs[2:11], eps))
        routing = reference.route(x, state, named, x.new_zeros(named.out_weight.shape[0]), slots)
    pairs = zip((routing.logits, routing.weights, routing.state), grads, strict=True)
    results, given = zip(*((result, grad) for result, grad in pairs if grad is not None), strict=True)
    leaves = [t for t, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
    return torch.autograd.grad(results, leaves, given, create_graph=True)


_ROUTE_BACKWARD = define(
    f"route_backward(Tensor? of_logits, Tensor? of_weights, Tensor? of_state, Tensor x, Tensor? state, {_WEIGHTS}, "
    "Tensor own, Tensor logits, Tensor slots, bool[] wanted) -> Tensor[]",
    _run_backward,
    _fake_backward,
)
_ROUTE = define(
    f"route(Tensor x, Tensor? state, {_WEIGHTS}, Tensor balancing_biases, Tensor? replayed, Tensor? real, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)


def route(
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None = None,
    *,
    count: bool = False,
    real: Tensor | None = None,
) -> Routing:
    """As `reference.route`, for what `op.takes` takes."""
    logits, slots, chosen, own, counts = _ROUTE(x, state, *weights, balancing_biases, replayed, real, count)
    return Routing(logits, slots, chosen, own, counts if count else None)
