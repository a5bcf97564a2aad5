"""What the kernels are given: the operator's arguments, with memory as the kernels want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: what `Inputs.states` says: every row goes on from a state; or the segments do whose tokens `origin` names
ROWS, SEGMENTS = 1, 2


def power_of_two(size: int) -> int:
    """The smallest one that is no less than `size`."""
    return 1 << max(size - 1, 0).bit_length()


def half_width(head_dim: int) -> int:
    """Places in half a head's vector: a power of two that a product takes."""
    return max(power_of_two(head_dim // 2), 16)


def arrange_weight(grouped_weight: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """``[C, D, k1]`` to ``[A, k1, D (in), D (out)]`` in the products' dtype: a matrix per head and tap."""
    by_head = grouped_weight.view(-1, head_dim, head_dim, grouped_weight.shape[-1])
    arranged = by_head.permute(0, 3, 2, 1)
    return (
        arranged.contiguous() if arranged.dtype == dtype else arranged.to(dtype, memory_format=torch.contiguous_format)
    )


@dataclass(frozen=True)
class Inputs:
    """What queries and keys are made of, with memory as the kernels want it. Shapes as in `op.cca_mix`.

    Attributes:
        weight: ``[A, k1, D (in), D (out)]``, from `arrange_weight`.
        key_scale: ``[G]`` factor on the keys.
        state: ``[N, C, K]``.
        origin: ``[B S]`` int32, from `origins`; None: every row goes on from its state, if there is one.
    """

    raw: Tensor
    depthwise_weight: Tensor
    depthwise_bias: Tensor
    weight: Tensor
    grouped_bias: Tensor
    key_scale: Tensor
    cos: Tensor
    sin: Tensor
    reach: Tensor | None
    state: Tensor | None
    origin: Tensor | None

    @property
    def tokens(self) -> int:
        return self.raw.shape[0] * self.raw.shape[1]

    @property
    def head_dim(self) -> int:
        return self.weight.shape[-1]

    @property
    def heads(self) -> int:
        """Query and key heads."""
        return self.weight.shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        return self.depthwise_weight.shape[-1], self.weight.shape[1]

    @property
    def look_back(self) -> int:
        return sum(self.widths) - 2

    @property
    def states(self) -> int:
        if self.state is None:
            return 0
        return ROWS if self.origin is None else SEGMENTS

    def constants(self) -> dict[str, Any]:
        """Compile-time facts that every kernel which goes through the convolutions has."""
        return {
            "HEAD_DIM": self.head_dim,
            "ROTATED": self.cos.shape[-1],
            "WIDTH0": self.widths[0],
            "WIDTH1": self.widths[1],
            "HAS_REACH": self.reach is not None,
            "STATES": self.states,
            "EPS": torch.finfo(torch.float32).eps,
            "HALF": half_width(self.head_dim),
        }

    def state_strides(self) -> tuple[int, int, int]:
        return (0, 0, 0) if self.state is None else self.state.stride()  # type: ignore[return-value]

    def table_strides(self) -> tuple[int, int]:
        """Row and column strides of `cos` and `sin`; one table may be for all rows."""
        return self.cos.stride(0) if self.cos.shape[0] > 1 else 0, self.cos.stride(1)


def prepare(
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
) -> Inputs:
    """Arranges the weight, and copies what has no unit stride along its last dimension."""
    cos, sin = _unit_stride(cos), _unit_stride(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    tokens, entries = raw.shape[0] * raw.shape[1], max(depthwise_weight.shape[-1] + grouped_weight.shape[-1] - 2, 1)
    return Inputs(
        _unit_stride(raw),
        depthwise_weight.contiguous(),
        depthwise_bias.contiguous(),
        arrange_weight(grouped_weight, head_dim, raw.dtype),
        grouped_bias.contiguous(),
        key_scale.contiguous(),
        cos,
        sin,
        None if reach is None else reach.contiguous(),
        state,
        None if index is None or valid is None else origins(index, valid, tokens, entries),
    )


@dataclass(frozen=True)
class Values:
    """What the values are made of.

    Attributes:
        current, delayed: ``[B, S, W]``.
        nothing: ``[W]``, before the first token.
        state: ``[N, W]``.
    """

    current: Tensor
    delayed: Tensor
    nothing: Tensor | None
    state: Tensor | None


def prepare_values(current: Tensor, delayed: Tensor, nothing: Tensor | None, state: Tensor | None) -> Values:
    """Copies what has no unit stride along its last dimension."""
    return Values(
        _unit_stride(current),
        _unit_stride(delayed),
        None if nothing is None else nothing.contiguous(),
        None if state is None else _unit_stride(state),
    )


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def origins(index: Tensor, valid: Tensor, tokens: int, entries: int) -> Tensor:
    """``[tokens]`` int32: ``n * entries + o`` for token o of segment n which has a state, -1 for all others.

    Args:
        index, valid: ``[N, >= entries]`` as in `reference.SegmentStates`.
        tokens: flat positions in the call; `entries`: first tokens of a segment that may see its state.
    """
    index, valid = index[:, :entries], valid[:, :entries]
    numbers = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    places = torch.where(valid, index, tokens).reshape(-1)  # what is not valid goes to a place that nobody reads
    found = torch.full((tokens + 1,), -1, dtype=torch.int32, device=index.device)
    return found.scatter_(0, places, numbers)[:tokens]
