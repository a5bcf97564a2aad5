"""Which implementation of CCA's mixing step runs."""

from __future__ import annotations

from torch import Tensor

from .. import selection
from . import fused, reference
from .reference import SegmentStates


def cca_mix(
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    *,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    clamp_temperature: bool = False,
    value_of_nothing: Tensor | None = None,
    reach: Tensor | None = None,
    states: SegmentStates | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values for attention from the projections; see `reference.cca_mix`."""
    state, index = (None, None) if states is None else (states.qk, states.index)
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    if selection.reference_only() or not fused.covers(raw, reach, state, index):
        return reference.cca_mix(
            raw,
            value_current,
            value_delayed,
            depthwise_weight=depthwise_weight,
            depthwise_bias=depthwise_bias,
            grouped_weight=grouped_weight,
            grouped_bias=grouped_bias,
            temperature=temperature,
            cos=cos,
            sin=sin,
            head_dim=head_dim,
            clamp_temperature=clamp_temperature,
            value_of_nothing=value_of_nothing,
            reach=reach,
            states=states,
        )
    scale = reference.key_scale(temperature, clamp_temperature)
    query, key = fused.mix_queries_and_keys(raw, *weights, scale, cos, sin, head_dim, reach, state)
    value = reference.delayed_values(value_current, value_delayed, head_dim, value_of_nothing, reach, states)
    return query, key, value


def backend() -> tuple[str, str]:
    """What runs, and why."""
    if selection.reference_only():
        return "reference", "ZAYA_OPS=reference"
    return "fused", "few passes over memory, its own gradient; the reference for documents that go on from a cache"
