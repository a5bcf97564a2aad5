"""The gradient of CCA's mixing step: which kernels of `triton_backward` run, on what."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, launch
from . import configs
from . import triton_backward as kernels
from .inputs import Inputs, half_width, power_of_two
from .triton import dies, programs


def query_and_key_gradients(
    inputs: Inputs,
    query_grad: Tensor,
    key_grad: Tensor,
    dtypes: tuple[torch.dtype, ...],
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Of raw columns, depthwise weight and bias, grouped weight and bias, and the factor on the keys (fp32).

    Args:
        query_grad, key_grad: ``[B, H, S, D]`` and ``[B, G, S, D]``.
        dtypes: of the four parameters.
        wanted: which of the six are.
    """
    tokens, head_dim, dtype = inputs.tokens, inputs.head_dim, inputs.raw.dtype
    convolutions = configs.choose_convolutions(tokens, head_dim, dtype)
    mixed_grad, scale_part = mixed_gradient(inputs, query_grad, key_grad, convolutions)
    raw_grad: Tensor | None = None
    weight_grads: tuple[Tensor | None, ...] = (None,) * 4
    if wanted[0]:
        raw_grad = raw_gradient(inputs, mixed_grad, configs.choose_raw(tokens, head_dim, dtype))
    if any(wanted[1:5]):
        parts = weight_parts(inputs, mixed_grad, configs.choose_weights(head_dim, dtype))
        weight_grads = weight_gradients(inputs, *parts, dtypes, configs.choose_finish(head_dim))
    return raw_grad, *weight_grads, scale_part.sum(0) if wanted[5] else None


def mixed_gradient(inputs: Inputs, query_grad: Tensor, key_grad: Tensor, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Gradient of the mixed heads before their norm, ``[B S, C]`` in the raw columns' dtype, and that of the factor on
    the keys, in parts ``[blocks, G]`` fp32."""
    raw, tokens, heads, groups = inputs.raw, inputs.tokens, inputs.heads, inputs.key_scale.shape[0]
    mixed_grad = raw.new_empty(tokens, heads * inputs.head_dim)
    scale_part = raw.new_empty(blocks_of(tokens, config["BLOCK_M"]), groups, dtype=torch.float32)
    launch(
        kernels._heads,
        (programs(tokens, heads, config["BLOCK_M"]),),
        config,
        raw,
        inputs.depthwise_weight,
        inputs.depthwise_bias,
        inputs.weight,
        inputs.grouped_bias,
        inputs.key_scale,
        inputs.cos,
        inputs.sin,
        inputs.reach,
        inputs.state,
        inputs.origin,
        query_grad,
        key_grad,
        mixed_grad,
        scale_part,
        tokens,
        raw.shape[1],
        heads,
        groups,
        *raw.stride()[:2],
        *inputs.table_strides(),
        *inputs.state_strides(),
        *query_grad.stride(),
        *key_grad.stride(),
        XCDS=dies(tokens, config["BLOCK_M"]),
        **inputs.constants(),
    )
    return mixed_grad, scale_part


def raw_gradient(inputs: Inputs, mixed_grad: Tensor, config: KernelConfig) -> Tensor:
    """``[B, S, C]`` from `mixed_gradient`."""
    tokens, heads = inputs.tokens, inputs.heads
    raw_grad = inputs.raw.new_empty(inputs.raw.shape)
    launch(
        kernels._raw,
        (programs(tokens, heads * blocks_of(inputs.head_dim, config["BLOCK_N"]), config["BLOCK_M"]),),
        config,
        mixed_grad,
        inputs.depthwise_weight,
        inputs.weight,
        inputs.reach,
        raw_grad,
        tokens,
        inputs.raw.shape[1],
        heads,
        inputs.key_scale.shape[0],
        HEAD_DIM=inputs.head_dim,
        WIDTH0=inputs.widths[0],
        WIDTH1=inputs.widths[1],
        HAS_REACH=inputs.reach is not None,
        XCDS=dies(tokens, config["BLOCK_M"]),
    )
    return raw_grad


def weight_parts(inputs: Inputs, mixed_grad: Tensor, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Sums over shares of the tokens, fp32: ``[shares, A, K + 1, D (out), D (in)]`` of the gradient times the raw
    columns 0 to K tokens before, and ``[shares, A, D]`` of the gradient."""
    tokens, heads, head_dim, taps = inputs.tokens, inputs.heads, inputs.head_dim, inputs.look_back + 1
    block = config["BLOCK_T"]
    tiles = configs.matrices(heads, taps, head_dim, config)
    share = blocks_of(blocks_of(tokens, configs.choose_splits(tokens, tiles)), block) * block
    shares = blocks_of(tokens, share)
    matrix_part = inputs.raw.new_empty(shares, heads, taps, head_dim, head_dim, dtype=torch.float32)
    bias_part = inputs.raw.new_empty(shares, heads, head_dim, dtype=torch.float32)
    launch(
        kernels._weights,
        (shares * tiles,),
        config,
        inputs.raw,
        mixed_grad,
        inputs.reach,
        inputs.state,
        inputs.origin,
        matrix_part,
        bias_part,
        tokens,
        inputs.raw.shape[1],
        heads,
        share,
        *inputs.raw.stride()[:2],
        *inputs.state_strides(),
        HEAD_DIM=head_dim,
        WIDTH0=inputs.widths[0],
        WIDTH1=inputs.widths[1],
        HAS_REACH=inputs.reach is not None,
        STATES=inputs.states,
    )
    return matrix_part, bias_part


def weight_gradients(
    inputs: Inputs, matrix_part: Tensor, bias_part: Tensor, dtypes: tuple[torch.dtype, ...], config: KernelConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the depthwise weight and bias and the grouped weight and bias, from `weight_parts`.

    Args:
        dtypes: of these four.
    """
    heads, head_dim = inputs.heads, inputs.head_dim
    channels = heads * head_dim
    shapes = ((channels, 1, inputs.widths[0]), (channels,), (channels, head_dim, inputs.widths[1]), (channels,))
    grads = tuple(matrix_part.new_empty(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    launch(
        kernels._finish,
        (heads * blocks_of(head_dim, config["BLOCK_I"]),),
        config,
        matrix_part,
        bias_part,
        inputs.depthwise_weight,
        inputs.depthwise_bias,
        inputs.weight,
        *grads,
        heads,
        matrix_part.shape[0],
        HEAD_DIM=head_dim,
        WIDTH0=inputs.widths[0],
        WIDTH1=inputs.widths[1],
        TAPS=power_of_two(inputs.widths[0]),
        OUT=2 * half_width(head_dim),
    )
    return grads  # type: ignore[return-value]


def value_gradients(
    inputs: Inputs, value_grad: Tensor, config: KernelConfig = configs.VALUES
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the current and the delayed projection, ``[B, S, W]`` each, and of what lies before the first token, ``[W]``
    in fp32."""
    batch_size, length, _ = inputs.raw.shape
    width = inputs.key_scale.shape[0] * inputs.head_dim // 2
    blocks = blocks_of(inputs.tokens, config["BLOCK_M"])
    current_grad, delayed_grad = (inputs.raw.new_empty(batch_size, length, width) for _ in range(2))
    nothing_part = inputs.raw.new_empty(blocks, width, dtype=torch.float32)
    launch(
        kernels._values,
        (blocks, blocks_of(width, config["BLOCK_W"])),
        config,
        value_grad,
        inputs.reach,
        inputs.origin,
        current_grad,
        delayed_grad,
        nothing_part,
        inputs.tokens,
        length,
        width,
        *value_grad.stride(),
        HEAD_DIM=inputs.head_dim,
        HAS_REACH=inputs.reach is not None,
        STATES=inputs.states,
        ENTRIES=max(inputs.look_back, 1),
    )
    return current_grad, delayed_grad, nothing_part.sum(0)
