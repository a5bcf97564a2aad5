"""The kernels as operators of torch, with their gradients.

Saved for the backward pass are inputs only: raw queries and keys, parameters, tables, reach and states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.library import define
from . import configs, reference
from .inputs import prepare, prepare_values

_QUERIES_AND_KEYS = (
    "Tensor raw, Tensor depthwise_weight, Tensor depthwise_bias, Tensor grouped_weight, Tensor grouped_bias, "
    "Tensor key_scale, Tensor cos, Tensor sin, Tensor? reach, Tensor? state, Tensor? index, Tensor? valid, int head_dim"
)


def _run(
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    key_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    reach: Tensor | None,
    state: Tensor | None,
    index: Tensor | None,
    valid: Tensor | None,
    head_dim: int,
    value_current: Tensor,
    value_delayed: Tensor,
    nothing: Tensor | None,
    state_value: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from . import triton as kernels

    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    inputs = prepare(raw, *weights, key_scale, cos, sin, reach, state, index, valid, head_dim)
    values = prepare_values(value_current, value_delayed, nothing, state_value)
    config = configs.choose_convolutions(inputs.tokens, head_dim, raw.dtype)
    return kernels.forward(inputs, values, config)


def _fake(raw: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch_size, length, channels = raw.shape
    groups, head_dim = arguments[4].shape[0], arguments[11]
    heads = channels // head_dim - groups
    return (
        raw.new_empty(batch_size, heads, length, head_dim),
        raw.new_empty(batch_size, groups, length, head_dim),
        raw.new_empty(batch_size, groups, length, head_dim),
    )


def _run_backward(
    query_grad: Tensor | None,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    key_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    reach: Tensor | None,
    state: Tensor | None,
    index: Tensor | None,
    valid: Tensor | None,
    head_dim: int,
    wanted: list[bool],
) -> list[Tensor]:
    from . import backward

    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    if raw.numel() == 0:
        arguments = (query_grad, key_grad, value_grad, raw, *weights, key_scale, cos, sin, reach, state, index, valid)
        return [torch.zeros_like(grad) for grad in _fake_backward(*arguments, head_dim, wanted)]
    inputs = prepare(raw, *weights, key_scale, cos, sin, reach, state, index, valid, head_dim)
    found: list[Tensor | None] = [None] * len(wanted)
    if any(wanted[:6]):
        groups = key_scale.shape[0]
        if query_grad is None:
            query_grad = _zeros(raw, raw.shape[2] // head_dim - groups, head_dim)
        if key_grad is None:
            key_grad = _zeros(raw, groups, head_dim)
        found[:6] = backward.query_and_key_gradients(
            inputs, query_grad, key_grad, tuple(weight.dtype for weight in weights), wanted[:6]
        )
    if any(wanted[6:]):
        assert value_grad is not None
        found[6:] = backward.value_gradients(inputs, value_grad)
    return [grad for grad, needed in zip(found, wanted, strict=True) if needed and grad is not None]


def _zeros(raw: Tensor, heads: int, head_dim: int) -> Tensor:
    return raw.new_zeros(()).expand(raw.shape[0], heads, raw.shape[1], head_dim)


def _fake_backward(
    query_grad: Tensor | None,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    raw: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    *weights, key_scale = arguments[:5]
    head_dim, wanted = arguments[-2:]
    width = key_scale.shape[0] * head_dim // 2
    batch_size, length, _ = raw.shape
    grads = (
        raw.new_empty(raw.shape),
        *(weight.new_empty(weight.shape) for weight in weights),
        key_scale.new_empty(key_scale.shape, dtype=torch.float32),
        raw.new_empty(batch_size, length, width),
        raw.new_empty(batch_size, length, width),
        raw.new_empty(width, dtype=torch.float32),
    )
    return [grad for grad, needed in zip(grads, wanted, strict=True) if needed]


_backward = define(
    f"cca_mix_backward(Tensor? query_grad, Tensor? key_grad, Tensor? value_grad, {_QUERIES_AND_KEYS}, bool[] wanted) "
    "-> Tensor[]",
    _run_backward,
    _fake_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    needed = ctx.needs_input_grad
    # raw, the five parameters; the value's halves, what lies before the first token
    ctx.wanted = [*needed[:6], *needed[13:16]]
    ctx.head_dim, ctx.nothing_dtype = inputs[12], None if inputs[15] is None else inputs[15].dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:12])


def _gradients(
    ctx: Any, query_grad: Tensor | None, key_grad: Tensor | None, value_grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    mixes, carries = query_grad is not None or key_grad is not None, value_grad is not None
    wanted = [needed and (mixes if n < 6 else carries) for n, needed in enumerate(ctx.wanted)]
    grads: list[Tensor | None] = [None] * 9
    if any(wanted):
        compute = _differentiable if torch.is_grad_enabled() else _backward
        arguments: tuple[Any, ...] = (query_grad, key_grad, value_grad, *ctx.saved_tensors, ctx.head_dim, wanted)
        found = iter(compute(*arguments))
        grads = [next(found) if needed else None for needed in wanted]
    if grads[8] is not None:
        grads[8] = grads[8].to(ctx.nothing_dtype)
    return *grads[:6], *(None,) * 7, *grads[6:], None


def _differentiable(
    query_grad: Tensor | None,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    key_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    reach: Tensor | None,
    state: Tensor | None,
    index: Tensor | None,
    valid: Tensor | None,
    head_dim: int,
    wanted: list[bool],
) -> list[Tensor | None]:
    """The same as part of the graph, by way of the definition, to be differentiated again."""
    inputs = (raw, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, key_scale)
    width = key_scale.shape[0] * head_dim // 2
    states = None
    if state is not None:
        states = reference.SegmentStates(state, state.new_zeros(state.shape[0], width), index, valid)
    found: list[Tensor | None] = []
    mixed = [x for x, needed in zip(inputs, wanted[:6], strict=True) if needed]
    if mixed:
        query, key = reference.mix_queries_and_keys(*inputs, cos, sin, head_dim, reach, states)
        results = [(x, grad) for x, grad in ((query, query_grad), (key, key_grad)) if grad is not None]
        found += _graph_of(results, mixed)
    if any(wanted[6:]):
        # linear in all three, so their numbers do not matter
        halves = [raw.new_zeros(*raw.shape[:2], width), raw.new_zeros(*raw.shape[:2], width), raw.new_zeros(width)]
        leaves = [x.requires_grad_() for x in halves]
        value = reference.delayed_values(leaves[0], leaves[1], head_dim, leaves[2], reach, states)
        assert value_grad is not None
        chosen = [x for x, needed in zip(leaves, wanted[6:], strict=True) if needed]
        found += _graph_of([(value, value_grad)], chosen)
    return found


def _graph_of(results: list[tuple[Tensor, Tensor]], inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    outputs, grads = zip(*results, strict=True)
    return torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True)


#: queries, keys, values
mix = define(
    f"cca_mix({_QUERIES_AND_KEYS}, Tensor value_current, Tensor value_delayed, Tensor? nothing, Tensor? state_value) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    backward=_gradients,
    setup_context=_save,
)
