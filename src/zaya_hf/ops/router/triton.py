"""The router forward, in one launch or two.

A program takes a block of tokens from its projection to the slots. The MLP's products have the router's whole width R
as their inner dimension, and a weight of R x R does not fit into shared memory beside the rest (128 KiB in bf16 for
R = 256). So fc1 is computed BLOCK_H outputs at a time, and each of these pieces is multiplied right away by its columns
of fc2: neither weight is ever there as a whole, and no activation goes to memory.

With many tokens the same program also projects them (`SPLITS` = 0). With few, one program per block would read the
whole projection by itself, one of hundreds of units working: then `_project` shares it out over rows, columns and
inner dimension, and the second launch adds up what it left, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, dot, launch, narrowed
from .configs import Plan
from .reference import RouterWeights, state_dtype


@triton.jit
def gelu(x):
    """With the error function, in fp32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def product_with(acc, x, x_stride, rows, in_rows, weight, columns, in_columns, begin, end, D, BLOCK_K: tl.constexpr):
    """``acc + x[rows, begin:end] @ weight[columns, begin:end].T``, in fp32.

    x: rows `x_stride` apart; weight: ``[.., D]``, contiguous.
    """
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < end
        a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=in_rows[:, None] & in_k[None, :], other=0.0)
        b = tl.load(weight + columns[None, :] * D + k[:, None], mask=in_columns[None, :] & in_k[:, None], other=0.0)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def norm_factor(own, eps, R):
    """``[N, 1]``: what RMSNorm multiplies each token by."""
    return tl.rsqrt(tl.sum(own * own, 1)[:, None] / R + eps)


@triton.jit
def second_layer(
    normed,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    first_out,
    rows,
    in_rows,
    columns,
    in_columns,
    R,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """What fc2 gives, before its GELU, in fp32 with the weights' rounding. `first_out` takes what fc1 gave after its
    GELU, if it is not None."""
    dtype = fc1_weight.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for start in tl.range(0, R, BLOCK_H, num_stages=1):
        h = start + tl.arange(0, BLOCK_H)
        in_h = h < R
        w = tl.load(fc1_weight + h[None, :] * R + columns[:, None], mask=in_h[None, :] & in_columns[:, None], other=0.0)
        first = dot(normed, w, tl.zeros((BLOCK_N, BLOCK_H), tl.float32))
        first += tl.load(fc1_bias + h, mask=in_h, other=0.0).to(tl.float32)[None, :]
        first = narrowed(gelu(narrowed(first, dtype).to(tl.float32)), dtype)
        if first_out is not None:
            tl.store(first_out + rows[:, None] * R + h[None, :], first, mask=in_rows[:, None] & in_h[None, :])
        w = tl.load(fc2_weight + columns[None, :] * R + h[:, None], mask=in_columns[None, :] & in_h[:, None], other=0.0)
        acc = dot(first, w, acc)
    acc += tl.load(fc2_bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    return narrowed(acc, dtype).to(tl.float32)


@triton.jit
def _project(
    x,
    weight,
    partials,
    N,
    D,
    R,
    x_stride,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums over parts of the inner dimension, ``[SPLITS, N, R]`` fp32."""
    program = tl.program_id(0)
    split = program % SPLITS
    column_blocks = tl.cdiv(R, BLOCK_C)
    columns = (program // SPLITS) % column_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = (program // SPLITS // column_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < N, columns < R
    share = tl.cdiv(tl.cdiv(D, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * share
    end = min(begin + share, D)
    acc = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    acc = product_with(acc, x, x_stride, rows, in_rows, weight, columns, in_columns, begin, end, D, BLOCK_K)
    to = partials + (split * tl.full((), 1, tl.int64) * N + rows)[:, None] * R + columns[None, :]
    tl.store(to, acc, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _logits_of(hidden, out_weight, columns, in_columns, slot, SLOTS, R, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    """Logits of the slots `slot`, rounded to the weights' dtype, as fp32."""
    w = tl.load(
        out_weight + slot[None, :] * R + columns[:, None],
        mask=(slot < SLOTS)[None, :] & in_columns[:, None],
        other=0.0,
    )
    logits = dot(hidden, w, tl.zeros((BLOCK_N, BLOCK_E), tl.float32))
    return narrowed(logits, out_weight.dtype.element_ty)


@triton.jit
def _route(
    x,
    partials,
    state,
    down_weight,
    down_bias,
    state_scale,
    norm_weight,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    out_weight,
    balancing_biases,
    replayed,
    real,
    logits_out,
    slots_out,
    weights_out,
    state_out,
    counts_out,
    N,
    D,
    x_stride,
    state_stride,
    eps,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS_E: tl.constexpr,
):
    """From ``x`` (or, with SPLITS, from what `_project` made of it) to slots, weights, and the next state."""
    dtype = down_weight.dtype.element_ty
    program = tl.program_id(0)
    rows = program.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_R)
    in_rows, in_columns = rows < N, columns < R
    inside = in_rows[:, None] & in_columns[None, :]

    own = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    if SPLITS == 0:
        own = product_with(own, x, x_stride, rows, in_rows, down_weight, columns, in_columns, 0, D, D, BLOCK_K)
    else:
        for split in range(SPLITS):
            place = (split * tl.full((), 1, tl.int64) * N + rows)[:, None] * R + columns[None, :]
            own += tl.load(partials + place, mask=inside, other=0.0)
    own += tl.load(down_bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    own = narrowed(own, dtype).to(tl.float32)
    if state is not None:
        before = tl.load(state + rows[:, None] * state_stride + columns[None, :], mask=inside, other=0.0)
        scale = tl.load(state_scale + columns, mask=in_columns, other=0.0)
        scaled = scale.to(tl.float32)[None, :] * before.to(tl.float32)
        if state.dtype.element_ty == state_scale.dtype.element_ty:  # else fp32 comes out
            scaled = narrowed(scaled, state.dtype.element_ty).to(tl.float32)
        own += scaled
    own = narrowed(own, state_out.dtype.element_ty)
    tl.store(state_out + rows[:, None] * R + columns[None, :], own, mask=inside)
    own = own.to(tl.float32)

    normed = own * norm_factor(own, eps, R) * tl.load(norm_weight + columns, mask=in_columns, other=0.0).to(tl.float32)
    normed = narrowed(narrowed(normed, norm_weight.dtype.element_ty).to(tl.float32), dtype)
    hidden = second_layer(
        normed, fc1_weight, fc1_bias, fc2_weight, fc2_bias, None, rows, in_rows, columns, in_columns, R, BLOCK_N,
        BLOCK_R, BLOCK_H,
    )  # fmt: skip
    hidden = narrowed(gelu(hidden), dtype)

    # Softmax: first the largest logit and the sum, over all blocks of slots, then what is chosen.
    most = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    logits = tl.zeros((BLOCK_N, BLOCK_E), dtype)
    for block in tl.static_range(BLOCKS_E):
        slot = block * BLOCK_E + tl.arange(0, BLOCK_E)
        logits = _logits_of(hidden, out_weight, columns, in_columns, slot, SLOTS, R, BLOCK_N, BLOCK_E)
        in_slots = (slot < SLOTS)[None, :]
        tl.store(logits_out + rows[:, None] * SLOTS + slot[None, :], logits, mask=in_rows[:, None] & in_slots)
        wide = tl.where(in_slots, logits.to(tl.float32), float("-inf"))
        higher = tl.maximum(most, tl.max(wide, 1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(wide - higher[:, None]), 1)
        most = higher
    told = tl.full((BLOCK_N,), -1, tl.int64)
    if replayed is not None:
        told = tl.load(replayed + rows, mask=in_rows, other=-1)
    best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK_N,), tl.int64)
    weight = tl.zeros((BLOCK_N,), tl.float32)
    for block in tl.static_range(BLOCKS_E):
        slot = block * BLOCK_E + tl.arange(0, BLOCK_E)
        if BLOCKS_E > 1:  # keeping those of all blocks would take more than computing them again
            logits = _logits_of(hidden, out_weight, columns, in_columns, slot, SLOTS, R, BLOCK_N, BLOCK_E)
        in_slots = (slot < SLOTS)[None, :]
        share = tl.where(in_slots, tl.exp(logits.to(tl.float32) - most[:, None]) / total[:, None], 0.0)
        biased = share + tl.load(balancing_biases + slot, mask=slot < SLOTS, other=0.0)[None, :]
        biased = tl.where(biased == biased, biased, float("inf"))  # NaN is chosen, as by torch
        biased = tl.where(in_slots, biased, float("-inf"))
        here = tl.max(biased, 1)
        first = tl.min(tl.where((biased == here[:, None]) & in_slots, slot[None, :], SLOTS), 1).to(tl.int64)
        better = here > best
        if block == 0:  # also where a bias of -inf leaves no slot
            better = here >= best
        best = tl.where(better, here, best)
        chosen = tl.where(better, first, chosen)
        of_first = tl.sum(tl.where(slot[None, :] == first[:, None], share, 0.0), 1)
        of_told = tl.sum(tl.where(slot[None, :] == told[:, None], share, 0.0), 1)
        weight = tl.where(told < 0, tl.where(better, of_first, weight), weight + of_told)
    chosen = tl.where(told < 0, chosen, told)
    tl.store(slots_out + rows, chosen, mask=in_rows)
    tl.store(weights_out + rows, weight, mask=in_rows)
    if counts_out is not None:
        counted = in_rows
        if real is not None:
            counted = tl.load(real + rows, mask=in_rows, other=0) != 0
        for block in tl.static_range(BLOCKS_E):
            slot = block * BLOCK_E + tl.arange(0, BLOCK_E)
            hits = (slot[None, :] == chosen[:, None]) & counted[:, None]
            number = tl.sum(hits.to(tl.int32), 0)
            tl.store(counts_out + program.to(tl.int64) * SLOTS + slot, number, mask=slot < SLOTS)


def rows_of(x: Tensor) -> Tensor:
    """`x` itself if its rows are contiguous, at any distance from each other, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def contiguous(weights: RouterWeights) -> RouterWeights:
    """As the kernels read them."""
    *tensors, eps = weights
    return RouterWeights(*(None if t is None else t.contiguous() for t in tensors), eps=eps)  # type: ignore[misc, arg-type]


def width_block(width: int) -> int:
    """Columns of a tile that holds the router's whole width."""
    return max(16, triton.next_power_of_2(width))


def project(x: Tensor, weight: Tensor, partials: Tensor, splits: int, config: KernelConfig) -> None:
    """Launch `_project`: ``[N, D]`` and ``[R, D]`` to ``[splits, N, R]``."""
    (tokens, inner), width = x.shape, weight.shape[0]
    grid = (blocks_of(tokens, config["BLOCK_N"]) * blocks_of(width, config["BLOCK_C"]) * splits,)
    launch(_project, grid, config, x, weight, partials, tokens, inner, width, x.stride(0), SPLITS=splits)


def choose(
    x: Tensor,
    partials: Tensor | None,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None,
    real: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    config: KernelConfig,
) -> None:
    """Launch `_route`.

    Args:
        partials: of `project`; None: `x` is projected here.
        results: logits, slots, weights, state; and counts ``[programs, E + 1]`` int32, or None.
    """
    (tokens, inner), (slots, width) = x.shape, weights.out_weight.shape
    counts = results[-1]
    launch(
        _route,
        (blocks_of(tokens, config["BLOCK_N"]),),
        config,
        *(x, partials, state, weights.down_weight, weights.down_bias),
        *(None if state is None else weights.state_scale, weights.norm_weight),
        *(weights.fc1_weight, weights.fc1_bias, weights.fc2_weight, weights.fc2_bias, weights.out_weight),
        *(balancing_biases, replayed, real if counts is not None else None, *results),
        *(tokens, inner, x.stride(0), 0 if state is None else state.stride(0), weights.eps),
        R=width,
        SLOTS=slots,
        SPLITS=0 if partials is None else partials.shape[0],
        BLOCK_R=width_block(width),
        BLOCKS_E=blocks_of(slots, config["BLOCK_E"]),
    )


def route(
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None,
    real: Tensor | None,
    count: bool,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `reference.route`; without `count` the counts are ``[0]``."""
    x, state = rows_of(x), None if state is None else rows_of(state)
    weights = contiguous(weights)
    tokens, (slots, width) = x.shape[0], weights.out_weight.shape
    logits = x.new_empty(tokens, slots)
    chosen = x.new_empty(tokens, dtype=torch.int64)
    weight = x.new_empty(tokens, dtype=torch.float32)
    own = x.new_empty(tokens, width, dtype=state_dtype(x, state, weights.state_scale))
    counts = x.new_empty(blocks_of(tokens, plan.route["BLOCK_N"]), slots, dtype=torch.int32) if count else None
    partials = None
    if plan.project is not None:
        partials = x.new_empty(plan.splits, tokens, width, dtype=torch.float32)
        project(x, weights.down_weight, partials, plan.splits, plan.project)
    replayed = None if replayed is None else replayed.contiguous()
    real = None if real is None else real.contiguous()
    results = (logits, chosen, weight, own, counts)
    choose(x, partials, state, weights, balancing_biases.contiguous(), replayed, real, results, plan.route)
    return logits, chosen, weight, own, counts.sum(0) if counts is not None else chosen.new_empty(0)
