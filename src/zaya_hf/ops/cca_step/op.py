"""Which implementation of a decoding step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.dtypes import DTYPE_NAMES
from ..common.facts import Facts
from . import operators, reference
from .reference import StepRows

#: most new tokens of a row that are a step
MOST_TOKENS = 8
HEAD_DIMS = range(2, 257)
WIDTHS = range(1, 5)


def cca_step(
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    qk_state: Tensor,
    value_state: Tensor,
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
    rows: StepRows | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of new tokens of rows that have states, and the states after them: `cca_mix`, then
    `next_states`. One to eight tokens per row are one launch where Triton's kernel takes them and no gradient is
    wanted.

    Args:
        raw, value_current, value_delayed, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias,
            temperature, cos, sin, head_dim, clamp_temperature, value_of_nothing: as in `cca_mix`.
        qk_state: ``[B, C, K]`` raw columns before the new tokens, oldest first.
        value_state: ``[B, W]`` delayed projection of the token before.
        rows: padding and beginnings of documents; None: all tokens continue their row.
        in_place: whether the states may be written over. Where they were, they are returned; else, new tensors are.

    Returns:
        ``[B, H, S, D]``, ``[B, G, S, D]`` and ``[B, G, S, D]`` in the dtype of `raw`; ``[B, C, K]`` and ``[B, W]``.
    """
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    given = (raw, value_current, value_delayed, qk_state, value_state, *weights, value_of_nothing)
    if selection.wants_triton("cca_step", raw.device):
        why_not = selection.triton_declines(raw.device)  # before anything asks for the number of tokens in an export
        is_kernels = why_not is None and is_step(raw) and not _wants_gradient(given)
        if is_kernels:
            why_not = _declines(*given, cos, sin, head_dim, rows)
        if why_not is not None:
            selection.say_once("cca_step", why_not)
        elif is_kernels:
            told = (None,) * 6 if rows is None else rows.tensors()
            others = (*weights, cos, sin, head_dim, clamp_temperature, value_of_nothing, *told)
            if in_place:
                results = operators.step_in_place(raw, value_current, value_delayed, qk_state, value_state, *others)
                return *results, qk_state, value_state
            return operators.step(raw, value_current, value_delayed, qk_state, value_state, *others)
    return reference.cca_step(
        raw,
        value_current,
        value_delayed,
        qk_state,
        value_state,
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
        rows=rows,
    )


def is_step(raw: Tensor) -> bool:
    """Whether ``[B, S, C]`` are few enough tokens per row, and some."""
    return 0 < raw.shape[1] <= MOST_TOKENS and raw.shape[0] > 0


def _wants_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _declines(
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    qk_state: Tensor,
    value_state: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    value_of_nothing: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rows: StepRows | None,
) -> str | None:
    activations = (raw, value_current, value_delayed, qk_state, value_state)
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    told = () if rows is None else rows.tensors()
    tensors = (*activations, *weights, value_of_nothing, cos, sin, *told)
    if not selection.are_plain(*tensors):
        return "a tensor is of a class of its own"
    if any(t is not None and t.device != raw.device for t in tensors):
        return "the tensors are on several devices"
    if any(t is None for t in told):
        return "the rows are not told in full"
    groups = temperature.shape[0]
    heads, widths = raw.shape[-1] // head_dim - groups, (depthwise_weight.shape[-1], grouped_weight.shape[-1])
    why_not = declines_sizes(raw.dtype, heads=heads, groups=groups, head_dim=head_dim, widths=widths)
    if why_not is not None:
        return why_not
    if any(t.dtype != raw.dtype for t in activations):
        return "the projections and the states are of several dtypes"
    if any(t is not None and t.dtype not in DTYPE_NAMES for t in (*weights, value_of_nothing, cos, sin)):
        return "the weights are neither fp32 nor fp16 nor bf16"
    if torch.is_autocast_enabled(raw.device.type) and torch.get_autocast_dtype(raw.device.type) != raw.dtype:
        return f"autocast is on and the projections are {raw.dtype}"
    return None


def declines_sizes(
    dtype: torch.dtype, *, heads: int, groups: int, head_dim: int, widths: tuple[int, int]
) -> str | None:
    """Why the kernel does not take these sizes; None: it does.

    Args:
        dtype: of the projections.
        heads, groups: query heads and key/value heads, each of `head_dim`.
        widths: of the two convolutions.
    """
    if dtype not in DTYPE_NAMES:
        return f"it takes fp32, fp16 and bf16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS or head_dim * groups % 2:
        return f"it takes heads of 2 to 256, not {groups} of {head_dim}"
    if any(width not in WIDTHS for width in widths):
        return f"it takes convolutions of width 1 to 4, not {widths[0]} and {widths[1]}"
    return None if heads >= groups and not heads % groups else f"{heads} query heads are not shared by {groups} others"


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    declined = None
    if facts is not None:
        declined = declines_sizes(
            facts.dtype, heads=facts.heads, groups=facts.groups, head_dim=facts.head_dim, widths=facts.widths
        )
    return selection.outcome("cca_step", device, ("reference", "cca_mix, then the next states"), declined)
