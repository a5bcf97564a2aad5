"""CCA's mixing step in few passes over memory, with its gradient written out.

The definition (`reference.py`) masks every tap of the two convolutions by itself. Here each token's depthwise output is
computed once, and the second convolution reads that of the tokens before: they are the same numbers, since a
predecessor in reach sees its own predecessors as far as this token does, and the depthwise bias alone where there is no
token. Norm, temperature and rotation then work in place, on queries and keys together.

Shapes as in `reference.py`; ``A = H + G`` heads, which lie outermost: ``[A, B, S, D]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..numerics import promote, wide_dtype
from . import reference


def covers(raw: Tensor, reach: Tensor | None, state: Tensor | None, index: Tensor | None) -> bool:
    """Plain rows, also with a state where no gradient is wanted; rows of documents without states."""
    return (
        type(raw) is Tensor
        and raw.numel() > 0
        and index is None
        and (state is None or (reach is None and not torch.is_grad_enabled()))
        and selection.is_eager()
        and raw.device.type != "meta"
        and not torch.is_autocast_enabled(raw.device.type)
    )


def mix_queries_and_keys(
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    key_scale: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    reach: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, S, D]`` and keys ``[B, G, S, D]`` from raw ones, as `reference.mix_queries_and_keys` makes them.

    Args:
        raw: ``[B, S, C]``, queries first.
        key_scale: ``[G]``, fp32 or wider: factor on the normalised keys.
        state: ``[B, C, K]`` raw columns before the rows; not together with `reach`, and outside the graph.
    """
    groups = key_scale.shape[0]
    arguments = (raw, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, key_scale)
    constants = _Constants(cos, sin, head_dim, reach, state)
    if torch.is_grad_enabled() and any(t.requires_grad for t in arguments):
        mixed = _Mix.apply(*arguments, constants)
    else:
        mixed = _forward(*arguments, constants)[0]
    query, key = mixed.transpose(0, 1).split([mixed.shape[0] - groups, groups], dim=1)
    return query, key


class _Constants:
    """What `_Mix` reads and has no gradient for."""

    def __init__(self, cos: Tensor, sin: Tensor, head_dim: int, reach: Tensor | None, state: Tensor | None):
        half = cos.shape[-1] // 2  # both halves of a table are equal
        self.cos, self.sin, self.half = cos[..., :half], sin[..., :half], half
        self.head_dim, self.reach, self.state = head_dim, reach, state

    def seen(self, steps: int) -> Tensor | None:
        """``[B, S, 1]``: whether the `steps`-th predecessor is in reach; None: `_shift` says it all."""
        return None if self.reach is None else (self.reach >= steps)[..., None]


def _shift(x: Tensor, steps: int) -> Tensor:
    """``[B, S, C]`` moved `steps` columns to the right (to the left if negative), zeros coming in."""
    return torch.nn.functional.pad(x, (0, 0, steps, -steps)) if abs(steps) < x.shape[1] else torch.zeros_like(x)


def _earlier(x: Tensor, steps: int, constants: _Constants) -> Tensor:
    """The `steps`-th predecessor of every token, zeros where it is out of reach. Its own transpose: see `_later`."""
    if steps == 0:
        return x
    seen = constants.seen(steps)
    shifted = _shift(x, steps)
    return shifted if seen is None else torch.where(seen, shifted, 0)


def _later(grad: Tensor, steps: int, constants: _Constants) -> Tensor:
    """The gradient that `_earlier` passes back."""
    if steps == 0:
        return grad
    seen = constants.seen(steps)
    return _shift(grad if seen is None else torch.where(seen, grad, 0), -steps)


def _depthwise(raw: Tensor, weight: Tensor, bias: Tensor, constants: _Constants) -> Tensor:
    """``[B, S, C]`` (with a state ``[B, k1 - 1 + S, C]``: also of the tokens that the second convolution looks at)."""
    taps = promote(weight[:, 0]).unbind(-1)
    wide = promote(raw)
    if constants.state is not None:
        window = torch.cat([promote(constants.state.transpose(1, 2)), wide], dim=1)
        length = window.shape[1] - (len(taps) - 1)
        out = torch.addcmul(promote(bias), window[:, len(taps) - 1 :], taps[-1])
        for steps in range(1, len(taps)):
            start = len(taps) - 1 - steps
            out.addcmul_(window[:, start : start + length], taps[-1 - steps])
        return out
    out = torch.addcmul(promote(bias), wide, taps[-1])
    for steps in range(1, len(taps)):
        if constants.reach is not None:
            out.addcmul_(_earlier(wide, steps, constants), taps[-1 - steps])
        elif steps < wide.shape[1]:
            out[:, steps:].addcmul_(wide[:, :-steps], taps[-1 - steps])
    return out


def _stack_taps(depthwise: Tensor, bias: Tensor, width: int, dtype: torch.dtype, constants: _Constants) -> Tensor:
    """What the second convolution multiplies, ``[A, B S, D k1]`` in the order of its weight: tap last, oldest first."""
    batch_size, length, channels = depthwise.shape
    if constants.state is not None:
        length -= width - 1
    heads = channels // constants.head_dim
    stacked = depthwise.new_empty(heads, batch_size, length, constants.head_dim, width, dtype=dtype)
    by_row = stacked.permute(1, 2, 0, 3, 4)
    for steps in range(width):
        target = by_row[..., width - 1 - steps]
        if constants.state is not None:
            start = width - 1 - steps
            target.copy_(depthwise[:, start : start + length].unflatten(2, (heads, -1)))
            continue
        seen = constants.seen(steps)
        if steps and seen is not None:
            value = torch.where(seen, _shift(depthwise, steps), bias)
            target.copy_(value.unflatten(2, (heads, -1)))
        else:
            target[:, steps:].copy_(depthwise[:, : max(length - steps, 0)].unflatten(2, (heads, -1)))
            if steps:
                target[:, :steps].copy_(bias.view(heads, -1).expand_as(target[:, :steps]))
    return stacked.view(heads, batch_size * length, constants.head_dim * width)


def _forward(
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    key_scale: Tensor,
    constants: _Constants,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result ``[A, B, S, D]``; and for the gradient the stacked taps, the mixed heads before their norm, the norm."""
    batch_size, length, channels = raw.shape
    head_dim, groups = constants.head_dim, key_scale.shape[0]
    heads = channels // head_dim
    queries, per_group = heads - groups, (heads - groups) // groups
    depthwise = _depthwise(raw, depthwise_weight, depthwise_bias, constants)
    stacked = _stack_taps(depthwise, promote(depthwise_bias), grouped_weight.shape[-1], raw.dtype, constants)
    weight = grouped_weight.view(heads, head_dim, -1).to(raw.dtype)
    mixed = promote(torch.bmm(stacked, weight.transpose(1, 2))).view(heads, batch_size, length, head_dim)
    mixed += promote(grouped_bias).view(heads, 1, 1, head_dim)

    by_head = raw.view(batch_size, length, heads, head_dim).permute(2, 0, 1, 3)
    raw_q = by_head[:queries].unflatten(0, (groups, per_group))
    raw_k = by_head[queries:]
    mixed[:queries].unflatten(0, (groups, per_group)).add_(raw_q, alpha=0.5).add_(raw_k[:, None], alpha=0.5)
    mean = raw_q[:, 0] if per_group == 1 else promote(raw_q).sum(1)
    mixed[queries:].add_(mean, alpha=0.5 / per_group).add_(raw_k, alpha=0.5)

    norm = torch.linalg.vector_norm(mixed, dim=-1, keepdim=True)
    result = mixed * _scale(norm, key_scale, head_dim)
    _rotate_(result, constants.cos, constants.sin, constants.half)
    return result.to(raw.dtype), stacked, mixed, norm


def _scale(norm: Tensor, key_scale: Tensor, head_dim: int) -> Tensor:
    """Factor that gives a vector the length sqrt(D), and keys their temperature: ``[A, B, S, 1]``."""
    scale = head_dim**0.5 / norm.clamp_min(torch.finfo(norm.dtype).eps)
    scale[-key_scale.shape[0] :] *= key_scale.view(-1, 1, 1, 1)
    return scale


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> None:
    """RoPE in place on the first ``2 half`` dimensions of ``[A, B, S, D]``; with -sin its inverse."""
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        result, stacked, mixed, norm = _forward(*arguments)
        frozen = not ctx.needs_input_grad[3]
        ctx.save_for_backward(*arguments[:-1], None if frozen else stacked, mixed, norm)
        ctx.constants = arguments[-1]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if torch.is_grad_enabled():  # to be differentiated again: what follows works in place
            return *_differentiable(ctx, grad), None
        raw, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, key_scale, stacked, mixed, norm = (
            ctx.saved_tensors
        )
        constants: _Constants = ctx.constants
        batch_size, length, channels = raw.shape
        head_dim, groups = constants.head_dim, key_scale.shape[0]
        heads = channels // head_dim
        queries, per_group = heads - groups, (heads - groups) // groups
        wide = wide_dtype(raw.dtype)

        grad = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
        _rotate_(grad, constants.cos, -constants.sin, constants.half)
        dot = (grad * mixed).sum(-1, keepdim=True)
        floor = torch.finfo(wide).eps
        clamped = norm.clamp_min(floor)
        key_scale_grad = (dot[queries:] * (head_dim**0.5 / clamped[queries:])).sum((1, 2, 3))
        along = torch.where(norm > floor, -dot / clamped.square(), 0)
        grad.addcmul_(mixed, along).mul_(_scale(norm, key_scale, head_dim))
        grouped_bias_grad = grad.sum((1, 2)).view(-1)

        flat = grad.view(heads, batch_size * length, head_dim).to(raw.dtype)
        weight = grouped_weight.view(heads, head_dim, -1).to(raw.dtype)
        grouped_weight_grad = None
        if stacked is not None:
            grouped_weight_grad = torch.bmm(flat.transpose(1, 2), stacked).view_as(grouped_weight)
            grouped_weight_grad = grouped_weight_grad.to(grouped_weight.dtype)
        taps_grad = promote(torch.bmm(flat, weight)).view(heads, batch_size, length, head_dim, -1)
        taps_grad = taps_grad.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, S, C, k1]
        width = taps_grad.shape[-1]
        later = [_later(taps_grad[..., width - 1 - steps], steps, constants) for steps in range(width)]
        depthwise_bias_grad = taps_grad.sum((0, 1, 3))
        depthwise_grad = later[0].contiguous()
        for part in later[1:]:
            depthwise_grad = depthwise_grad + part

        taps = promote(depthwise_weight[:, 0]).unbind(-1)
        wide_raw = promote(raw)
        raw_grad = depthwise_grad * taps[-1]
        tap_grads = [(depthwise_grad * wide_raw).sum((0, 1))]
        for steps in range(1, len(taps)):
            tap_grads.insert(0, (depthwise_grad * _earlier(wide_raw, steps, constants)).sum((0, 1)))
            raw_grad += _later(depthwise_grad * taps[-1 - steps], steps, constants)
        depthwise_weight_grad = torch.stack(tap_grads, dim=-1)[:, None]

        by_head = raw_grad.view(batch_size, length, heads, head_dim).permute(2, 0, 1, 3)
        query_grad, key_grad = grad[:queries].unflatten(0, (groups, per_group)), grad[queries:]
        by_head[:queries].unflatten(0, (groups, per_group)).add_(query_grad, alpha=0.5).add_(
            key_grad[:, None], alpha=0.5 / per_group
        )
        by_head[queries:].add_(query_grad.sum(1), alpha=0.5).add_(key_grad, alpha=0.5)
        return (
            raw_grad.to(raw.dtype),
            depthwise_weight_grad.to(depthwise_weight.dtype),
            depthwise_bias_grad.to(depthwise_bias.dtype),
            grouped_weight_grad,
            grouped_bias_grad.to(grouped_bias.dtype),
            key_scale_grad,
            None,
        )


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The wanted gradients as part of the graph, by way of the definition."""
    constants: _Constants = ctx.constants
    arguments = ctx.saved_tensors[:6]
    raw, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, key_scale = arguments
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    cos, sin = (torch.cat([half, half], dim=-1) for half in (constants.cos, constants.sin))
    result = reference.mix_queries_and_keys(raw, *weights, key_scale, cos, sin, constants.head_dim, constants.reach)
    wanted = [tensor for tensor, needed in zip(arguments, ctx.needs_input_grad, strict=False) if needed]
    by_head = torch.cat(result, dim=1).transpose(0, 1)
    found = iter(torch.autograd.grad(by_head, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:6])
