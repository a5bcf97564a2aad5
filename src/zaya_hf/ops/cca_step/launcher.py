"""Launches the kernel of a decoding step. To be imported only where Triton is."""

from __future__ import annotations

from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, launch, power_of_2
from .reference import StepRows
from .triton import step_kernel


def step(
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    qk_state: Tensor,
    value_state: Tensor,
    next_qk: Tensor,
    next_value: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    clamp_temperature: bool,
    value_of_nothing: Tensor | None,
    rows: StepRows | None,
    config: KernelConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """`op.cca_step` by one kernel.

    Args:
        next_qk, next_value: ``[B, C, K]`` and ``[B, W]`` that the next states are written to; they may be `qk_state`
            and `value_state`.
        config: from `configs.choose_step`.

    Returns:
        queries ``[B, H, S, D]``, keys and values ``[B, G, S, D]``, contiguous.
    """
    batch_size, length, channels = raw.shape
    groups = temperature.shape[0]
    heads = channels // head_dim - groups
    width0, width1 = depthwise_weight.shape[-1], grouped_weight.shape[-1]
    raw, value_current, value_delayed, cos, sin = map(_dense, (raw, value_current, value_delayed, cos, sin))
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    query = raw.new_empty(batch_size, heads, length, head_dim)
    key, value = (raw.new_empty(batch_size, groups, length, head_dim) for _ in range(2))
    known = (None,) * 6 if rows is None else rows.tensors()
    told = [None if tensor is None else tensor.contiguous() for tensor in known]
    reach, _, entry_index, entry_valid, _, _ = told
    launch(
        step_kernel,
        (blocks_of(batch_size, config["BLOCK_ROWS"]), heads + 2 * groups),
        config,
        raw,
        value_current,
        value_delayed,
        qk_state,
        value_state,
        next_qk,
        next_value,
        *(weight.contiguous() for weight in weights),
        cos,
        sin,
        None if value_of_nothing is None else value_of_nothing.contiguous(),
        *told,
        query,
        key,
        value,
        batch_size,
        *raw.stride()[:2],
        *value_current.stride()[:2],
        *value_delayed.stride()[:2],
        *qk_state.stride(),
        *value_state.stride(),
        *next_qk.stride(),
        *next_value.stride(),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        0 if reach is None else reach.stride(0),
        0 if entry_index is None else entry_index.stride(0),
        LENGTH=length,
        HEADS=heads,
        GROUPS=groups,
        WIDTH=head_dim,
        ROTATED=cos.shape[-1],
        TAPS0=width0,
        TAPS1=width1,
        ENTRIES=1 if entry_valid is None else entry_valid.shape[1],
        CLAMP=clamp_temperature,
        PLAIN=rows is None,
        TOKENS=power_of_2(length),
        PAIRS=max(power_of_2(-(-head_dim // 2)), 16),
        PLACES=power_of_2(max(width0 + width1 - 2, 1)),
    )
    return query, key, value


def _dense(tensor: Tensor) -> Tensor:
    """With neighbouring channels next to each other in memory."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
