"""The router backward: one launch for everything per token, and products of torch over all tokens.

Of the forward pass only its inputs, the next state and the logits are there. A program computes the MLP of its tokens
again, walks back through it, and writes the gradient before each linear layer and what the layer multiplied; the
weights' gradients are products of those, which torch's library does better than a kernel could beside this work. Sums
over tokens, of biases, norm and scale, leave each program as one row, and are added up in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, dot, launch, narrowed
from .reference import RouterWeights
from .triton import contiguous, gelu, norm_factor, second_layer, width_block


@triton.jit
def gelu_slope(x):
    """The derivative of `gelu`."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)


@triton.jit
def _store_sum(sums, index, values, columns, in_columns, R, SUMS: tl.constexpr):
    """Over the tokens of a program, into one of its rows."""
    row = tl.program_id(0).to(tl.int64) * SUMS + index
    tl.store(sums + row * R + columns, tl.sum(values, 0), mask=in_columns)


@triton.jit
def _route_backward(
    grad_logits,
    grad_weights,
    grad_state,
    state,
    state_scale,
    norm_weight,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    out_weight,
    own_state,
    logits,
    slots,
    normed_out,
    first_out,
    first_grad_out,
    second_out,
    second_grad_out,
    logits_grad_out,
    down_grad_out,
    state_grad_out,
    sums_out,
    N,
    eps,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS_E: tl.constexpr,
):
    """DEPTH: how far back: 0 to the logits, 1 to what fc2 gave, 2 to what fc1 gave, 3 to the inputs.

    sums_out: ``[programs, SUMS, R]`` fp32, the first rows of: the biases of fc2 and fc1, the norm's weight, the bias of
    the projection, the scale. The others are of the weights' dtype (state_grad_out: the state's), or None.
    """
    dtype = fc1_weight.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_R)
    in_rows, in_columns = rows < N, columns < R
    inside = in_rows[:, None] & in_columns[None, :]
    wide_place = rows[:, None] * R + columns[None, :]

    own = tl.load(own_state + wide_place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(in_rows[:, None], norm_factor(own, eps, R), 0.0)
    norm = tl.load(norm_weight + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    normed = narrowed(narrowed(own * factor * norm, norm_weight.dtype.element_ty).to(tl.float32), dtype)
    if normed_out is not None:
        tl.store(normed_out + wide_place, normed, mask=inside)
    second = second_layer(
        normed, fc1_weight, fc1_bias, fc2_weight, fc2_bias, first_out, rows, in_rows, columns, in_columns, R, BLOCK_N,
        BLOCK_R, BLOCK_H,
    )  # fmt: skip
    if second_out is not None:
        tl.store(second_out + wide_place, narrowed(gelu(second), dtype), mask=inside)

    # Through the softmax, a block of slots at a time.
    most = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for block in tl.static_range(BLOCKS_E):
        slot = block * BLOCK_E + tl.arange(0, BLOCK_E)
        mask = in_rows[:, None] & (slot < SLOTS)[None, :]
        wide = tl.load(logits + rows[:, None] * SLOTS + slot[None, :], mask=mask, other=0.0).to(tl.float32)
        wide = tl.where((slot < SLOTS)[None, :], wide, float("-inf"))
        higher = tl.maximum(most, tl.max(wide, 1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(wide - higher[:, None]), 1)
        most = higher
    chosen = tl.load(slots + rows, mask=in_rows, other=0)
    pull = tl.zeros((BLOCK_N,), tl.float32)  # of the weight: its gradient times the chosen probability
    if grad_weights is not None:
        of_chosen = tl.load(logits + rows * SLOTS + chosen, mask=in_rows, other=0.0).to(tl.float32)
        pull = tl.load(grad_weights + rows, mask=in_rows, other=0.0) * tl.exp(of_chosen - most) / total
    grad = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for block in tl.static_range(BLOCKS_E):
        slot = block * BLOCK_E + tl.arange(0, BLOCK_E)
        in_slots = slot < SLOTS
        mask = in_rows[:, None] & in_slots[None, :]
        place = rows[:, None] * SLOTS + slot[None, :]
        wide = tl.load(logits + place, mask=mask, other=0.0).to(tl.float32)
        share = tl.exp(wide - most[:, None]) / total[:, None]
        of_logits = pull[:, None] * (tl.where(slot[None, :] == chosen[:, None], 1.0, 0.0) - share)
        if grad_logits is not None:
            of_logits += tl.load(grad_logits + place, mask=mask, other=0.0).to(tl.float32)
        of_logits = narrowed(tl.where(mask, of_logits, 0.0), dtype)
        if logits_grad_out is not None:
            tl.store(logits_grad_out + place, of_logits, mask=mask)
        if DEPTH >= 1:
            of_slots = tl.load(
                out_weight + slot[:, None] * R + columns[None, :],
                mask=in_slots[:, None] & in_columns[None, :],
                other=0.0,
            )
            grad = dot(of_logits, of_slots, grad)

    if DEPTH >= 1:
        grad *= gelu_slope(second)
        _store_sum(sums_out, 0, grad, columns, in_columns, R, SUMS)
        second_grad = narrowed(grad, dtype)
        if second_grad_out is not None:
            tl.store(second_grad_out + wide_place, second_grad, mask=inside)
    if DEPTH >= 2:
        grad = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        for start in tl.range(0, R, BLOCK_H, num_stages=1):
            h = start + tl.arange(0, BLOCK_H)
            in_h = h < R
            w = tl.load(
                fc1_weight + h[None, :] * R + columns[:, None], mask=in_h[None, :] & in_columns[:, None], other=0.0
            )
            first = dot(normed, w, tl.zeros((BLOCK_N, BLOCK_H), tl.float32))
            first += tl.load(fc1_bias + h, mask=in_h, other=0.0).to(tl.float32)[None, :]
            first = narrowed(first, dtype).to(tl.float32)
            w = tl.load(
                fc2_weight + columns[:, None] * R + h[None, :], mask=in_columns[:, None] & in_h[None, :], other=0.0
            )
            part = dot(second_grad, w, tl.zeros((BLOCK_N, BLOCK_H), tl.float32)) * gelu_slope(first)
            _store_sum(sums_out, 1, part, h, in_h, R, SUMS)
            part = narrowed(part, dtype)
            if first_grad_out is not None:
                tl.store(first_grad_out + rows[:, None] * R + h[None, :], part, mask=in_rows[:, None] & in_h[None, :])
            if DEPTH >= 3:
                w = tl.load(
                    fc1_weight + h[:, None] * R + columns[None, :], mask=in_h[:, None] & in_columns[None, :], other=0.0
                )
                grad = dot(part, w, grad)
    if DEPTH >= 3:
        own = tl.load(own_state + wide_place, mask=inside, other=0.0).to(tl.float32) * factor
        _store_sum(sums_out, 2, grad * own, columns, in_columns, R, SUMS)
        grad *= norm
        grad = (grad - own * (tl.sum(grad * own, 1)[:, None] / R)) * factor
        if grad_state is not None:
            grad += tl.load(grad_state + wide_place, mask=inside, other=0.0).to(tl.float32)
        _store_sum(sums_out, 3, grad, columns, in_columns, R, SUMS)
        if down_grad_out is not None:
            tl.store(down_grad_out + wide_place, narrowed(grad, dtype), mask=inside)
        if state is not None:
            before = tl.load(state + wide_place, mask=inside, other=0.0)
            _store_sum(sums_out, 4, grad * before.to(tl.float32), columns, in_columns, R, SUMS)
            if state_grad_out is not None:
                scale = tl.load(state_scale + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
                tl.store(
                    state_grad_out + wide_place, narrowed(grad * scale, state_grad_out.dtype.element_ty), mask=inside
                )


#: what the kernel writes by token, in its order
OUTPUTS = ("normed", "first", "first_grad", "second", "second_grad", "logits_grad", "down_grad", "state_grad")


def walk_back(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    state: Tensor | None,
    weights: RouterWeights,
    own: Tensor,
    logits: Tensor,
    slots: Tensor,
    outputs: dict[str, Tensor],
    sums: Tensor,
    depth: int,
    config: KernelConfig,
) -> None:
    """Launch `_route_backward`.

    Args:
        grads, state: gradients of logits, weights and next state, and the state before; contiguous.
        own: the next state.
        outputs: those of `OUTPUTS` that are wanted.
        sums: ``[programs, rows, R]`` fp32, as many rows as `depth` (and a state) give.
    """
    (tokens, width), num_slots = own.shape, logits.shape[1]
    launch(
        _route_backward,
        (blocks_of(tokens, config["BLOCK_N"]),),
        config,
        *(*grads, state, None if state is None else weights.state_scale, weights.norm_weight),
        *(weights.fc1_weight, weights.fc1_bias, weights.fc2_weight, weights.fc2_bias, weights.out_weight),
        *(own, logits, slots, *(outputs.get(name) for name in OUTPUTS), sums),
        *(tokens, weights.eps),
        R=width,
        SLOTS=num_slots,
        DEPTH=depth,
        SUMS=sums.shape[1],
        BLOCK_R=width_block(width),
        BLOCKS_E=blocks_of(num_slots, config["BLOCK_E"]),
    )


#: how far back their gradients lie, see `_route_backward`
_DEPTHS = {"out_weight": 0, "fc2_weight": 1, "fc2_bias": 1, "fc1_weight": 2, "fc1_bias": 2}
#: what their gradients are made of
_NEEDS = {
    "x": ("down_grad",),
    "state": ("state_grad",),
    "down_weight": ("down_grad",),
    "fc1_weight": ("normed", "first_grad"),
    "fc2_weight": ("first", "second_grad"),
    "out_weight": ("second", "logits_grad"),
}
#: rows of sums, the nearest first
_SUMS = ("fc2_bias", "fc1_bias", "norm_weight", "down_bias", "state_scale")


def route_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    own: Tensor,
    logits: Tensor,
    slots: Tensor,
    wanted: frozenset[str],
    config: KernelConfig,
) -> dict[str, Tensor]:
    """The gradients that are `wanted`, by name.

    Args:
        wanted: of "x", "state" and the fields of `RouterWeights`.
        grads: of logits, weights and next state; None: zeros.
        own, logits, slots: next state, logits and slots, as `triton.route` made them.
    """
    state = None if state is None else state.contiguous()
    (tokens, width), num_slots = own.shape, logits.shape[1]
    outputs = {}
    for name in sorted({need for want in wanted for need in _NEEDS.get(want, ())}):
        columns = num_slots if name == "logits_grad" else width
        dtype = state.dtype if name == "state_grad" and state is not None else x.dtype
        outputs[name] = x.new_empty(tokens, columns, dtype=dtype)
    depth = max((_DEPTHS.get(name, 3) for name in wanted), default=0)
    written = _SUMS[: 4 if depth == 3 and state is None else len(_SUMS) if depth == 3 else depth]
    sums = x.new_empty(blocks_of(tokens, config["BLOCK_N"]), len(written), width, dtype=torch.float32)
    of_logits, of_weights, of_state = (None if grad is None else grad.contiguous() for grad in grads)
    weights, given = contiguous(weights), (of_logits, of_weights, of_state)
    walk_back(given, state, weights, own, logits, slots, outputs, sums, depth, config)

    found = {}
    if "x" in wanted:
        found["x"] = outputs["down_grad"] @ weights.down_weight
    if "state" in wanted:
        found["state"] = outputs["state_grad"]
    if "down_weight" in wanted:
        found["down_weight"] = outputs["down_grad"].t() @ x
    if "fc1_weight" in wanted:
        found["fc1_weight"] = outputs["first_grad"].t() @ outputs["normed"]
    if "fc2_weight" in wanted:
        found["fc2_weight"] = outputs["second_grad"].t() @ outputs["first"]
    if "out_weight" in wanted:
        found["out_weight"] = outputs["logits_grad"].t() @ outputs["second"]
    if not wanted.isdisjoint(written):
        for name, total in zip(written, sums.sum(0).unbind(0), strict=True):
            if name in wanted:
                found[name] = total.to(getattr(weights, name).dtype, copy=True)
    return found
