"""The kernels at ZAYA1-8B's sizes: eight query heads and two key heads, 128 wide, two taps each, half of it rotated.
Heads of 64 and 256 are no ZAYA1's, but what the tables have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import configs
from .inputs import Inputs, Values, prepare, prepare_values

_HEADS, _GROUPS, _HEAD_DIM, _WIDTHS = 8, 2, 128, (2, 2)
_LENGTH, _TOKENS, _PROMPT = 4096, 16_384, 256


def workloads(dtype: torch.dtype) -> list[Workload]:
    """Every kernel, forward and backward, on packed rows; the forward one also on rows that go on from a cache."""
    return [
        _forward(_TOKENS, _HEAD_DIM, dtype),
        _forward(_PROMPT, _HEAD_DIM, dtype),
        _forward(_TOKENS, _HEAD_DIM, dtype, states=True),
        *_backward(_TOKENS, _HEAD_DIM, dtype),
        *_backward(_PROMPT, _HEAD_DIM, dtype)[:2],
        *(
            made
            for head_dim in (64, 256)
            for made in (_forward(_TOKENS, head_dim, dtype), *_backward(_TOKENS, head_dim, dtype))
        ),
    ]


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _rows(tokens: int) -> tuple[int, int]:
    return max(tokens // _LENGTH, 1), min(tokens, _LENGTH)


def _inputs(tokens: int, head_dim: int, dtype: torch.dtype, states: bool = False) -> tuple[Inputs, Values]:
    """`Inputs` and `Values` of tensors without memory."""
    (rows, length), channels, width = _rows(tokens), (_HEADS + _GROUPS) * head_dim, _GROUPS * head_dim // 2
    width0, width1 = _WIDTHS
    look_back = width0 + width1 - 2
    inputs = prepare(
        _empty(rows, length, channels, dtype=dtype),
        _empty(channels, 1, width0, dtype=dtype),
        _empty(channels, dtype=dtype),
        _empty(channels, head_dim, width1, dtype=dtype),
        _empty(channels, dtype=dtype),
        _empty(_GROUPS, dtype=torch.float32),
        _empty(rows, length, head_dim // 2, dtype=dtype),
        _empty(rows, length, head_dim // 2, dtype=dtype),
        _empty(rows, length, dtype=torch.int64),
        _empty(rows, channels, look_back, dtype=dtype) if states else None,
        _empty(rows, look_back, dtype=torch.int64) if states else None,
        _empty(rows, look_back, dtype=torch.bool) if states else None,
        head_dim,
    )
    half = _empty(rows, length, width, dtype=dtype)
    return inputs, prepare_values(half, half, None, _empty(rows, width, dtype=dtype) if states else None)


def _size(tokens: int, head_dim: int, more: str = "") -> str:
    return f"{tokens} tokens" + ("" if head_dim == _HEAD_DIM else f", heads of {head_dim}") + more


def _workload(
    kernel: str,
    size: str,
    dtype: torch.dtype,
    config: KernelConfig,
    launch: Callable[[KernelConfig], Any],
    moved: float,
    flops: float = 0.0,
) -> Workload:
    return Workload(f"cca_mix: {kernel}", size, DTYPE_NAMES[dtype], (config,), launch, moved, flops)


def _forward(tokens: int, head_dim: int, dtype: torch.dtype, states: bool = False) -> Workload:
    def launch(config: KernelConfig) -> None:
        from . import triton as kernels

        kernels.forward(*_inputs(tokens, head_dim, dtype, states), config)

    channels, values, one = (_HEADS + _GROUPS) * head_dim, _GROUPS * head_dim, dtype.itemsize
    return _workload(
        "forward",
        _size(tokens, head_dim, ", states" if states else ""),
        dtype,
        configs.choose_convolutions(tokens, head_dim, dtype),
        launch,
        # raw columns and values in and out, half of both rotary tables, reach; the grouped weight
        tokens * (2 * (channels + values) * one + head_dim // 2 * one + 8) + channels * head_dim * _WIDTHS[1] * one,
        2.0 * tokens * channels * head_dim * _WIDTHS[1],
    )


def _backward(tokens: int, head_dim: int, dtype: torch.dtype) -> list[Workload]:
    (rows, length), channels, one = _rows(tokens), (_HEADS + _GROUPS) * head_dim, dtype.itemsize
    taps = sum(_WIDTHS) - 1

    def grad(heads: int) -> Tensor:
        return _empty(rows, heads, length, head_dim, dtype=dtype)

    def mixed_grad() -> Tensor:
        return _empty(tokens, channels, dtype=dtype)

    def heads(config: KernelConfig) -> None:
        from . import backward

        backward.mixed_gradient(_inputs(tokens, head_dim, dtype)[0], grad(_HEADS), grad(_GROUPS), config)

    def raw(config: KernelConfig) -> None:
        from . import backward

        backward.raw_gradient(_inputs(tokens, head_dim, dtype)[0], mixed_grad(), config)

    def weights(config: KernelConfig) -> None:
        from . import backward

        backward.weight_parts(_inputs(tokens, head_dim, dtype)[0], mixed_grad(), config)

    def finish(config: KernelConfig) -> None:
        from . import backward

        heads = _HEADS + _GROUPS
        matrix_part = _empty(shares, heads, taps, head_dim, head_dim, dtype=torch.float32)
        bias_part = _empty(shares, heads, head_dim, dtype=torch.float32)
        inputs, _ = _inputs(tokens, head_dim, dtype)
        backward.weight_gradients(inputs, matrix_part, bias_part, (dtype,) * 4, config)

    def values(config: KernelConfig) -> None:
        from . import backward

        backward.value_gradients(_inputs(tokens, head_dim, dtype)[0], grad(_GROUPS), config)

    weights_config = configs.choose_weights(head_dim, dtype)
    shares = configs.choose_splits(tokens, configs.matrices(_HEADS + _GROUPS, taps, head_dim, weights_config))
    parts = shares * channels * taps * head_dim * 4
    size, product = _size(tokens, head_dim), 2.0 * tokens * channels * head_dim
    convolutions = configs.choose_convolutions(tokens, head_dim, dtype)
    passes = tokens * channels * one
    return [
        _workload(
            "backward, heads",
            size,
            dtype,
            convolutions,
            heads,
            3 * passes + tokens * (head_dim // 2 * one + 8),
            product * _WIDTHS[1],
        ),
        _workload(
            "backward, raw columns",
            size,
            dtype,
            configs.choose_raw(tokens, head_dim, dtype),
            raw,
            2 * passes + tokens * 8,
            product * taps,
        ),
        _workload("backward, weights", size, dtype, weights_config, weights, 2 * passes + parts, product * taps),
        _workload(
            "backward, sum of weights",
            size,
            dtype,
            configs.choose_finish(head_dim),
            finish,
            parts + channels * head_dim * 2 * one,
        ),
        _workload("backward, values", size, dtype, configs.VALUES, values, tokens * (2 * _GROUPS * head_dim * one + 8)),
    ]
