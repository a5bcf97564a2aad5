"""Which implementation of CCA's mixing step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.dtypes import DTYPE_NAMES
from ..common.facts import Facts
from . import fused, operators, reference
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
    if selection.wants_triton("cca_mix", raw.device):
        parameters = (*weights, temperature, value_of_nothing)
        why_not = selection.triton_declines(raw.device) or _declines(
            (raw, value_current, value_delayed), parameters, (cos, sin), head_dim, reach, states
        )
        if why_not is None:
            kept = (None,) * 4 if states is None else (states.qk, states.value, states.index, states.valid)
            return operators.mix(
                raw, *weights, scale, cos, sin, reach, kept[0], kept[2], kept[3], head_dim,
                value_current, value_delayed, value_of_nothing, kept[1],
            )  # fmt: skip
        selection.say_once("cca_mix", why_not)
    state, index = (None, None) if states is None else (states.qk, states.index)
    if not selection.reference_only("cca_mix") and fused.covers(raw, reach, state, index):
        query, key = fused.mix_queries_and_keys(raw, *weights, scale, cos, sin, head_dim, reach, state)
    else:
        query, key = reference.mix_queries_and_keys(raw, *weights, scale, cos, sin, head_dim, reach, states)
    value = reference.delayed_values(value_current, value_delayed, head_dim, value_of_nothing, reach, states)
    return query, key, value


def _declines(
    projections: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, ...],
    tables: tuple[Tensor, Tensor],
    head_dim: int,
    reach: Tensor | None,
    states: SegmentStates | None,
) -> str | None:
    """Why the kernels do not take these tensors; None: they do."""
    raw = projections[0]
    kept = () if states is None else (states.qk, states.value)
    places = (reach,) if states is None else (reach, states.index, states.valid)
    floats = [t for t in (*projections, *parameters, *tables, *kept) if t is not None]
    if not selection.are_plain(*floats, *places):
        return "a tensor is of a subclass, or not strided"
    for t in floats:
        if t.dtype not in DTYPE_NAMES:
            return f"they take fp32, fp16 and bf16, not {t.dtype}"
    if any(t.dtype != raw.dtype for t in projections):
        return "the projections differ in dtype"
    if torch.is_autocast_enabled(raw.device.type) and torch.get_autocast_dtype(raw.device.type) != raw.dtype:
        return f"autocast is on, and the projections are in {raw.dtype}"
    if any(t.device != raw.device for t in (*floats, *places) if t is not None):
        return "the tensors are on several devices"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tables, *kept)):
        return "a gradient of states or tables is wanted"
    if states is not None and (states.index is None) != (reach is None):
        return "a state goes with a reach if it says where its tokens are, and only then"
    depthwise_weight, _, grouped_weight, _, temperature, _ = parameters
    assert depthwise_weight is not None
    assert grouped_weight is not None
    assert temperature is not None
    if 2 * projections[1].shape[-1] != temperature.shape[0] * head_dim:
        return "the values are not as wide as the keys"
    if tables[0].shape[1] != raw.shape[1] or tables[0].shape[0] not in (1, raw.shape[0]):
        return "the tables are not for these tokens"
    return _sizes_decline(head_dim, tables[0].shape[-1], (depthwise_weight.shape[-1], grouped_weight.shape[-1]))


def _sizes_decline(head_dim: int, rotated: int, widths: tuple[int, int]) -> str | None:
    if not 16 <= head_dim <= 256 or head_dim % 2:
        return f"they take even head widths from 16 to 256, not {head_dim}"
    if rotated % 2:
        return f"they rotate pairs, not {rotated} columns"
    if max(widths) > 4:
        return f"they take convolutions of up to 4 taps, not {widths[0]} and {widths[1]}"
    return None


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    declined = None
    if facts is not None:
        declined = _sizes_decline(facts.head_dim, 0, facts.widths)
        if facts.dtype not in DTYPE_NAMES:
            declined = f"they take fp32, fp16 and bf16, not {facts.dtype}"
    return selection.outcome(
        "cca_mix",
        device,
        ("fused", "few passes over memory, its own gradient; the reference for documents that go on from a cache"),
        declined,
    )
