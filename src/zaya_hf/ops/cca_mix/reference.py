"""CCA's mixing step, as the paper states it (arXiv 2510.04476, section 2): convolutions, q-k mean, norms, RoPE, values.

Shapes: ``B`` rows, ``S`` tokens, ``H`` query heads, ``G`` key/value heads, ``D`` head width, ``C = (H + G) D``
channels, ``K = k0 + k1 - 2`` tokens of look-back, ``N`` segments with a state, ``W = G D / 2`` the width of either
value half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics import promote


@dataclass
class SegmentStates:
    """What N segments saw before this call. Every cached row is such a segment; so is a chunk with a halo, or a
    continuation that shares a context.

    Attributes:
        qk: ``[N, C, K]`` raw query/key columns, oldest first; zeros where there was no token.
        value: ``[N, W]`` delayed projection of the token before; the projection of nothing where there was none.
        index: ``[N, >= max(K, 1)]`` flat position (``row * S + column``) of the segment's first tokens in this call; it
            goes with a `reach`. None: one segment per row, beginning at its first column, without a `reach`.
        valid: ``[N, >= max(K, 1)]`` bool, whether that token exists and belongs to the segment.
    """

    qk: Tensor
    value: Tensor
    index: Tensor | None = None
    valid: Tensor | None = None


def earlier_tokens(
    x: Tensor,
    steps: int,
    reach: Tensor | None,
    states: SegmentStates | None,
    columns: Tensor | None,
    nothing: Tensor | None = None,
) -> Tensor:
    """The value of every token's `steps`-th predecessor.

    Args:
        x: ``[B, S, C]``.
        steps: 0 or more.
        reach: ``[B, S]`` predecessors inside this call; None: all of the row.
        states: where segments with a past begin.
        columns: ``[N, C, M]`` their last M tokens, oldest first (`states.qk`, or the delayed value with M = 1).
        nothing: ``[C]`` what lies before the first token of a segment without a past; None: zeros.

    Returns:
        ``[B, S, C]``.
    """
    if steps == 0:
        return x
    batch_size, length, channels = x.shape
    if states is not None and states.index is None and reach is None:
        assert columns is not None
        if length == 1:
            return columns[:, None, :, -steps].to(x.dtype)
        window = torch.cat([columns.transpose(1, 2).to(x.dtype), x], dim=1)
        start = columns.shape[-1] - steps
        return window[:, start : start + length]
    shifted = F.pad(x, (0, 0, steps, 0))[:, :length]  # no size that a trace would have to know the sign of
    found = torch.arange(length, device=x.device) >= steps if reach is None else reach >= steps
    if reach is not None:
        shifted = torch.where(found[..., None], shifted, 0)
    if states is not None and length:
        assert columns is not None
        assert reach is not None, "without a reach, tokens before a segment's first one would be taken for its past"
        assert states.index is not None
        assert states.valid is not None
        # Token o of a segment (o < steps) finds its predecessor in column M - steps + o of the state.
        first = columns.shape[-1] - steps
        valid, index = states.valid[:, :steps], states.index[:, :steps].reshape(-1)
        incoming = torch.where(valid[..., None], columns[..., first:].transpose(1, 2).to(x.dtype), 0)
        flat = shifted.reshape(-1, channels).index_add(0, index, incoming.reshape(-1, channels))
        shifted = flat.view(batch_size, length, channels)
        if nothing is not None:
            arrived = torch.zeros(batch_size * length, dtype=torch.int32, device=x.device)
            arrived = arrived.index_add(0, index, valid.reshape(-1).int())
            found = found | (arrived > 0).view(batch_size, length)
    return shifted if nothing is None else torch.where(found[..., None], shifted, nothing.to(x.dtype))


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
    states: SegmentStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, S, D]`` and keys ``[B, G, S, D]`` of `op.cca_mix`, which says what each argument is.

    Args:
        key_scale: ``[G]``, fp32 or wider: factor on the normalised keys.
    """
    batch_size, length, channels = raw.shape
    dtype = raw.dtype
    groups = key_scale.shape[0]
    heads = channels // head_dim - groups
    mixed = _convolutions(raw, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, head_dim, reach, states)

    query, key = raw.split([heads * head_dim, groups * head_dim], dim=-1)
    raw_q = promote(query).view(batch_size, length, groups, heads // groups, head_dim)
    raw_k = promote(key).view(batch_size, length, groups, 1, head_dim)
    mean_q = (raw_q + raw_k) / 2
    mean_k = mean_q.mean(dim=3)
    q = mixed[:, :, :heads] + mean_q.flatten(2, 3)
    k = mixed[:, :, heads:] + mean_k

    q = rotate(unit_rms(q), cos, sin)
    k = rotate(unit_rms(k) * key_scale[:, None], cos, sin)
    return q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2)


def key_scale(temperature: Tensor, clamp: bool) -> Tensor:
    """Factor on the normalised keys, ``[G]`` in fp32 or wider."""
    scale = promote(temperature)
    return scale.clamp(1e-7, 2.0).exp() if clamp else scale


def delayed_values(
    value_current: Tensor,
    value_delayed: Tensor,
    head_dim: int,
    value_of_nothing: Tensor | None,
    reach: Tensor | None,
    states: SegmentStates | None,
) -> Tensor:
    """``[B, G, S, D]``: half of each token's values is its own, half that of the token before."""
    batch_size, length, width = value_current.shape
    delayed_columns = None if states is None else states.value[..., None]
    delayed = earlier_tokens(value_delayed, 1, reach, states, delayed_columns, value_of_nothing)
    return (
        torch.cat([value_current, delayed], dim=-1)
        .view(batch_size, length, 2 * width // head_dim, head_dim)
        .transpose(1, 2)
    )


def _convolutions(
    raw: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    head_dim: int,
    reach: Tensor | None,
    states: SegmentStates | None,
) -> Tensor:
    """Depthwise, then per-head convolution, ``[B, S, C]`` -> ``[B, S, H + G, D]`` (fp32 or wider)."""
    batch_size, length, channels = raw.shape
    heads = channels // head_dim
    width0, width1 = depthwise_weight.shape[-1], grouped_weight.shape[-1]
    columns = None if states is None else states.qk
    earlier = [promote(earlier_tokens(raw, steps, reach, states, columns)) for steps in range(width0 + width1 - 1)]
    taps = promote(depthwise_weight[:, 0]).unbind(-1)  # the last tap is the token itself
    depthwise = []
    for delay in reversed(range(width1)):  # oldest first, as the grouped weight is stored
        out = promote(depthwise_bias)
        for tap in range(width0):
            out = out + taps[width0 - 1 - tap] * earlier[delay + tap]
        depthwise.append(out.to(raw.dtype).reshape(batch_size * length, heads, head_dim))
    stacked = torch.stack(depthwise, dim=-1).flatten(2).transpose(0, 1)  # [heads, B S, D k1]
    weight = grouped_weight.view(heads, head_dim, -1).transpose(1, 2)
    mixed = torch.bmm(stacked, weight.to(raw.dtype)).transpose(0, 1)
    return promote(mixed).reshape(batch_size, length, heads, head_dim) + promote(grouped_bias).view(heads, head_dim)


def unit_rms(x: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length sqrt(D) (L2, not RMSNorm's eps): zero stays zero."""
    return F.normalize(x, dim=-1, eps=torch.finfo(x.dtype).eps) * x.shape[-1] ** 0.5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first R dimensions of ``[B, S, heads, D]``; dimension i pairs with i + R / 2."""
    width = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated, passed = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([rotated * cos + turned * sin, passed], dim=-1)


def next_states(
    raw: Tensor,
    value_delayed: Tensor,
    before: tuple[Tensor, Tensor],
    *,
    reach: Tensor | None = None,
    states: SegmentStates | None = None,
    last: Tensor | None = None,
    has_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The states of every row after this call.

    Args:
        raw: ``[B, S, C]`` concatenated raw queries and keys; `value_delayed` ``[B, S, W]``.
        before: ``[B, C, K]`` and ``[B, W]``, the states before this call, which rows without a real token keep.
        reach, states: as in `cca_mix`; `states` with one segment per row.
        last: ``[B]`` column of each row's last real token; None: the last column.
        has_real: ``[B]`` whether the row had one; None: all had.

    Returns:
        ``[B, C, K]`` and ``[B, W]``, new tensors.
    """
    batch_size, length, _ = raw.shape
    if length == 0:
        return before
    look_back = before[0].shape[-1]
    if reach is None and last is None and has_real is None:
        assert states is None or states.index is None
        columns = raw[:, -look_back:].transpose(1, 2) if look_back else raw[:, :0].transpose(1, 2)
        if length < look_back:
            columns = torch.cat([before[0][..., length:].to(raw.dtype), columns], dim=-1)
        # own memory: views would keep the projections of a long prompt
        return columns.clone(memory_format=torch.contiguous_format), value_delayed[:, -1].clone()
    rows = torch.arange(batch_size, device=raw.device)
    column = rows.new_full((batch_size,), length - 1) if last is None else last
    past = None if states is None else states.qk
    steps = reversed(range(look_back))
    picked = [earlier_tokens(raw, step, reach, states, past)[rows, column] for step in steps]
    qk = torch.stack(picked, dim=-1) if picked else before[0]
    value = value_delayed[rows, column]
    if has_real is not None:
        qk = torch.where(has_real[:, None, None], qk, before[0].to(qk.dtype))
        value = torch.where(has_real[:, None], value, before[1].to(value.dtype))
    return qk, value


def initial_states(
    raw: Tensor, value_delayed: Tensor, look_back: int, value_of_nothing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What position 0 of a fresh sequence reads: ``[B, C, K]`` zeros, and ``[B, W]`` the projection of nothing.

    Args:
        raw, value_delayed: ``[B, S, C]`` and ``[B, S, W]``, for shape, dtype and device.
        look_back: K, the tokens before it that the convolutions see.
        value_of_nothing: ``[W]``; None: zeros.
    """
    qk = raw.new_zeros(raw.shape[0], raw.shape[-1], look_back)
    value = value_delayed.new_zeros(raw.shape[0], value_delayed.shape[-1])
    return qk, value if value_of_nothing is None else value + value_of_nothing.to(value.dtype)
