"""Gradients of the experts. All sums run over a fixed order: two runs give the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, dot, launch, narrowed, sigmoid
from .triton import activate, chiplet_order, constants_of, find_tile, tiles_of


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The derivative of `activate`."""
    if ACTIVATION == "silu":
        share = sigmoid(x)
        change = share * (1.0 - share)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        change = tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        share = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        change = share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return share + x * change


@triton.jit
def hidden_gradient_kernel(
    grad, order, offsets, weight, pre, scale, pre_grad, scaled, partial,
    grad_row, weight_expert, weight_row, width, inner, tokens,
    WANTS_PRE: tl.constexpr, WANTS_SCALED: tl.constexpr, WANTS_SCALE: tl.constexpr, ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHIPLETS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """From the result's gradient to that of gate and up, for sorted rows: ``grad W`` is the gradient of the hidden
    values but for the token's scale, and its product with them, summed, is the gradient of that scale.

    Also writes the hidden values times the scale, whose product with `grad` is the gradient of the second weight.
    """
    expert, row, end, column = find_tile(offsets, tl.cdiv(inner, BLOCK_N), EXPERTS, PADDED, CHIPLETS, BLOCK_M, GROUP)
    if expert < EXPERTS:
        rows = row + tl.arange(0, BLOCK_M)
        inside = tl.minimum(rows, end - 1)
        token = tl.load(order + inside).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if WANTS_PRE or WANTS_SCALE:
            depth = tl.arange(0, BLOCK_K)
            grad_at = grad + token[:, None] * grad_row + depth[None, :]
            weight += expert.to(tl.int64) * weight_expert
            weight_at = weight + depth[:, None] * weight_row + columns[None, :]
            for k in range(0, width, BLOCK_K):
                if EVEN:
                    acc = dot(tl.load(grad_at), tl.load(weight_at), acc)
                else:
                    left = width - k
                    within = (depth[:, None] < left) & (columns < inner)[None, :]
                    a = tl.load(grad_at, mask=depth[None, :] < left, other=0.0)
                    acc = dot(a, tl.load(weight_at, mask=within, other=0.0), acc)
                grad_at += BLOCK_K
                weight_at += BLOCK_K * weight_row
        kept = (rows < end)[:, None] & (columns < inner)[None, :]
        # one wide offset for the tile, narrow ones inside it
        first = row.to(tl.int64)
        at = (inside - row)[:, None] * (2 * inner) + columns[None, :]
        pre += first * (2 * inner)
        gate = tl.load(pre + at, mask=kept, other=0.0).to(tl.float32)
        up = tl.load(pre + at + inner, mask=kept, other=0.0).to(tl.float32)
        factor = tl.load(scale + token).to(tl.float32)[:, None]
        active = activate(gate, ACTIVATION)
        if WANTS_SCALED or WANTS_SCALE:
            hidden = narrowed(active * up, pre.dtype.element_ty).to(tl.float32)
            if WANTS_SCALED:
                scaled += first * inner
                at_hidden = (inside - row)[:, None] * inner + columns[None, :]
                tl.store(scaled + at_hidden, narrowed(hidden * factor, pre.dtype.element_ty), mask=kept)
            if WANTS_SCALE:
                part = tl.sum(hidden * acc, 1)  # beyond the last column both are 0
                tl.store(partial + column.to(tl.int64) * tokens + rows, part, mask=rows < end)
        if WANTS_PRE:
            acc *= factor
            pre_grad += first * (2 * inner)
            gate_grad = acc * up * slope(gate, ACTIVATION)
            tl.store(pre_grad + at, narrowed(gate_grad, pre.dtype.element_ty), mask=kept)
            tl.store(pre_grad + at + inner, narrowed(acc * active, pre.dtype.element_ty), mask=kept)


@triton.jit
def scale_gradient_kernel(partial, order, offsets, out, parts, tokens, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the parts of each token's scale, in order; 0 for those that skip."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < tl.load(offsets + EXPERTS)
    total = tl.zeros((BLOCK,), tl.float32)
    at = partial + rows
    for _ in range(parts):
        total += tl.load(at, mask=real, other=0.0)
        at += tokens
    token = tl.load(order + rows, mask=rows < tokens, other=0)
    tl.store(out + token, narrowed(total, out.dtype.element_ty), mask=rows < tokens)


@triton.jit
def weight_gradient_kernel(
    a, b, order, offsets, out, a_row, b_row, tall, wide,
    GATHERS_A: tl.constexpr, CHIPLETS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``a' b`` of each expert's rows, ``[E, tall, wide]``, in their order. One of the two is in tokens' order and read
    through `order`, the other is sorted.

    The tiles of every expert are spread over all chiplets, a run of them on each, as experts differ in their rows.
    """
    across = tl.cdiv(wide, BLOCK_Q)
    total = tl.cdiv(tall, BLOCK_P) * across
    expert = tl.program_id(0) // total
    tile = chiplet_order(tl.program_id(0) % total, total, CHIPLETS)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    p = tile // across * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tile % across * BLOCK_Q + tl.arange(0, BLOCK_Q)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for first in range(start, end, BLOCK_T):
        rows = first + tl.arange(0, BLOCK_T)
        real = rows < end
        token = tl.load(order + rows, mask=real, other=0).to(tl.int64)
        a_rows = token if GATHERS_A else rows.to(tl.int64)
        b_rows = rows.to(tl.int64) if GATHERS_A else token
        a_mask = real[:, None]
        b_mask = real[:, None]
        if not EVEN:
            a_mask = a_mask & (p < tall)[None, :]
            b_mask = b_mask & (q < wide)[None, :]
        left = tl.load(a + a_rows[:, None] * a_row + p[None, :], mask=a_mask, other=0.0)
        right = tl.load(b + b_rows[:, None] * b_row + q[None, :], mask=b_mask, other=0.0)
        acc = dot(tl.trans(left), right, acc)
    kept = (p < tall)[:, None] & (q < wide)[None, :]
    out += expert.to(tl.int64) * tall * wide
    tl.store(out + p[:, None] * wide + q[None, :], narrowed(acc, out.dtype.element_ty), mask=kept)


def hidden_gradient(
    grad: Tensor,
    order: Tensor,
    offsets: Tensor,
    weight: Tensor,
    pre: Tensor,
    scale: Tensor,
    activation: str,
    wanted: tuple[bool, bool, bool],
    chosen: KernelConfig,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradient of `pre`, ``[N, 2 I]``, the hidden values times the scale, ``[N, I]``, both sorted, and parts of the
    scale's gradient, ``[parts, N]``: those that are `wanted`."""
    (tokens, width), inner = grad.shape, weight.shape[2]
    blocks = blocks_of(inner, chosen["BLOCK_N"])
    pre_grad = torch.empty_like(pre) if wanted[0] else None
    scaled = pre.new_empty(tokens, inner) if wanted[1] else None
    partial = torch.empty(blocks, tokens, dtype=torch.float32, device=pre.device) if wanted[2] else None
    even = width % chosen["BLOCK_K"] == 0 and inner % chosen["BLOCK_N"] == 0
    launch(
        hidden_gradient_kernel, (tiles_of(tokens, weight.shape[0], chosen["BLOCK_M"]) * blocks,), chosen,
        grad, order, offsets, weight, pre, scale, pre_grad, scaled, partial,
        grad.stride(0), *weight.stride()[:2], width, inner, tokens,
        WANTS_PRE=wanted[0], WANTS_SCALED=wanted[1], WANTS_SCALE=wanted[2], ACTIVATION=activation, EVEN=even,
        **constants_of(weight),
    )  # fmt: skip
    return pre_grad, scaled, partial


def scale_gradient(partial: Tensor, order: Tensor, offsets: Tensor, dtype: torch.dtype, chosen: KernelConfig) -> Tensor:
    """Gradient of the scale, ``[N]`` by token."""
    parts, tokens = partial.shape
    out = torch.empty(tokens, dtype=dtype, device=partial.device)
    launch(
        scale_gradient_kernel, (blocks_of(tokens, chosen["BLOCK"]),), chosen, partial, order, offsets, out, parts,
        tokens, EXPERTS=offsets.shape[0] - 1,
    )  # fmt: skip
    return out


def weight_gradient(
    a: Tensor, b: Tensor, order: Tensor, offsets: Tensor, gathers_a: bool, chosen: KernelConfig
) -> Tensor:
    """``a' b`` of each expert's rows, ``[E, P, Q]``.

    Args:
        a, b: ``[N, P]`` and ``[N, Q]``.
        order, offsets: of `triton.sort`.
        gathers_a: `a` has the tokens in their own order and `b` sorted; else the other way round.
        chosen: the configuration.
    """
    experts, tall, wide = offsets.shape[0] - 1, a.shape[1], b.shape[1]
    out = a.new_empty(experts, tall, wide)
    grid = (experts * blocks_of(tall, chosen["BLOCK_P"]) * blocks_of(wide, chosen["BLOCK_Q"]),)
    even = tall % chosen["BLOCK_P"] == 0 and wide % chosen["BLOCK_Q"] == 0
    launch(
        weight_gradient_kernel, grid, chosen, a, b, order, offsets, out, a.stride(0), b.stride(0), tall, wide,
        GATHERS_A=gathers_a, EVEN=even, CHIPLETS=constants_of(out)["CHIPLETS"],
    )  # fmt: skip
    return out
