"""The router's kernels at the sizes of ZAYA1-8B, for the table of compiled kernels and the benchmarks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import configs
from .reference import RouterWeights

INNER, WIDTH, SLOTS = 2048, 256, 17
#: tokens of a training step, of a prompt, of requests that decode
MANY, PROMPT, FEW = 16384, 4096, 16
#: multiplications per token of the projection, of fc1 or fc2, of the last layer
DOWN, SQUARE, OUT = INNER * WIDTH, WIDTH * WIDTH, WIDTH * SLOTS


def workloads(dtype: torch.dtype) -> list[Workload]:
    """Every kernel of the router with all its configurations for `dtype`."""
    plans = [(tokens, configs.choose_route(tokens, INNER, WIDTH, dtype)) for tokens in (MANY, PROMPT, FEW)]
    found = []
    for tokens, plan in plans:
        if plan.project is not None:
            found.append(_project(tokens, plan.splits, plan.project, dtype))
        found.append(_route(tokens, 0 if plan.project is None else plan.splits, plan.route, dtype))
    found.append(_backward(MANY, configs.choose_backward(dtype), dtype))
    # see `op`: fp32 runs as exact matrix instructions, which NVIDIA's GPUs have not
    return [dataclasses.replace(one, backends=("hip",)) for one in found] if dtype == torch.float32 else found


def _made(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _weights(dtype: torch.dtype) -> RouterWeights:
    vector, square = _made(WIDTH, dtype=dtype), _made(WIDTH, WIDTH, dtype=dtype)
    down, out = _made(WIDTH, INNER, dtype=dtype), _made(SLOTS, WIDTH, dtype=dtype)
    return RouterWeights(down, vector, vector, vector, square, vector, square, vector, out, eps=1e-5)


def _project(tokens: int, splits: int, config: KernelConfig, dtype: torch.dtype) -> Workload:
    from . import triton

    x, weight = _made(tokens, INNER, dtype=dtype), _weights(dtype).down_weight
    partials = _made(splits, tokens, WIDTH, dtype=torch.float32)
    return Workload(
        "router projection",
        f"{tokens} tokens",
        DTYPE_NAMES[dtype],
        (config,),
        lambda chosen: triton.project(x, weight, partials, splits, chosen),
        (x.numel() + weight.numel()) * dtype.itemsize + 4 * partials.numel(),
        2.0 * tokens * DOWN,
    )


def _route(tokens: int, splits: int, config: KernelConfig, dtype: torch.dtype) -> Workload:
    """Without `splits` the kernel projects itself."""
    from . import triton

    x, state, weights = _made(tokens, INNER, dtype=dtype), _made(tokens, WIDTH, dtype=dtype), _weights(dtype)
    partials = _made(splits, tokens, WIDTH, dtype=torch.float32) if splits else None
    biases, weight = _made(SLOTS, dtype=torch.float32), _made(tokens, dtype=torch.float32)
    results = _made(tokens, SLOTS, dtype=dtype), _made(tokens, dtype=torch.int64), weight, torch.empty_like(state), None
    read = (x.numel() + weights.down_weight.numel()) * dtype.itemsize if partials is None else 4 * partials.numel()
    # beside it: fc1 and fc2, the state in and out, logits, slots and weights
    others = (2 * SQUARE + tokens * (2 * WIDTH + SLOTS)) * dtype.itemsize + 12 * tokens
    return Workload(
        "router forward, projecting" if partials is None else "router forward, projected",
        f"{tokens} tokens",
        DTYPE_NAMES[dtype],
        (config,),
        lambda chosen: triton.choose(x, partials, state, weights, biases, None, None, results, chosen),
        read + others,
        2.0 * tokens * ((DOWN if partials is None else 0) + 2 * SQUARE + OUT),
    )


def _backward(tokens: int, config: KernelConfig, dtype: torch.dtype) -> Workload:
    """All gradients but the products over all tokens, which are torch's."""
    from . import triton_backward

    state, logits, weights = _made(tokens, WIDTH, dtype=dtype), _made(tokens, SLOTS, dtype=dtype), _weights(dtype)
    slots, of_weights = _made(tokens, dtype=torch.int64), _made(tokens, dtype=torch.float32)
    outputs = {name: logits if name == "logits_grad" else state for name in triton_backward.OUTPUTS}
    sums = _made(-(-tokens // config["BLOCK_N"]), 5, WIDTH, dtype=torch.float32)
    grads = (logits, of_weights, state)
    # per token: three rows of the width and two of logits in, seven and one out; a slot and a weight's gradient
    moved = (tokens * (10 * WIDTH + 3 * SLOTS) + 2 * SQUARE) * dtype.itemsize + 12 * tokens + 4 * sums.numel()
    return Workload(
        "router backward",
        f"{tokens} tokens",
        DTYPE_NAMES[dtype],
        (config,),
        lambda chosen: triton_backward.walk_back(grads, state, weights, state, logits, slots, outputs, sums, 3, chosen),
        moved,
        2.0 * tokens * (5 * SQUARE + OUT),
    )
