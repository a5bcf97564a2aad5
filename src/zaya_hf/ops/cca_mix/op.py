"""Which implementation of CCA's mixing step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
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
    """Queries, keys and values for attention from the four projections.

    Both convolutions are linear and padded once, with zeros before the first, so a token at reach r reads zeros for
    every raw column beyond r, and the depthwise bias alone where the second convolution looks before the first token.

    Args:
        raw: ``[B, S, C]`` projected queries, then keys.
        value_current, value_delayed: ``[B, S, W]`` each.
        depthwise_weight, depthwise_bias: ``[C, 1, k0]``, ``[C]``.
        grouped_weight, grouped_bias: ``[C, D, k1]``, ``[C]``; one group per head.
        temperature: ``[G]`` factor on the normalised keys; with `clamp_temperature` exp(clamp(t, 1e-7, 2)).
        cos, sin: ``[B or 1, S, R]`` with R <= D even; the first R dimensions of each head are rotated (half-split
            pairs).
        head_dim: D, the width of a head.
        value_of_nothing: ``[W]`` delayed value before the first token; None: zeros.
        reach: ``[B, S]``, see `reference.earlier_tokens`.
        states: the past of the segments that have one.

    Returns:
        ``[B, H, S, D]``, ``[B, G, S, D]`` and ``[B, G, S, D]``, in the dtype of `raw`. Normalisation, temperature and
        rotation run in fp32 or wider.
    """
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    scale = reference.key_scale(temperature, clamp_temperature)
    state, index = (None, None) if states is None else (states.qk, states.index)
    if not selection.reference_only("cca_mix") and fused.covers(raw, reach, state, index):
        query, key = fused.mix_queries_and_keys(raw, *weights, scale, cos, sin, head_dim, reach, state)
    else:
        query, key = reference.mix_queries_and_keys(raw, *weights, scale, cos, sin, head_dim, reach, states)
    value = reference.delayed_values(value_current, value_delayed, head_dim, value_of_nothing, reach, states)
    return query, key, value


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    return selection.outcome(
        "cca_mix",
        device,
        ("fused", "few passes over memory, its own gradient; the reference for documents that go on from a cache"),
    )
