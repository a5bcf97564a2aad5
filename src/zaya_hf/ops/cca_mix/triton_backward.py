"""The gradient of CCA's mixing step in Triton kernels. Nothing is kept from the forward pass but its inputs.

1. `_heads`: goes through the convolutions again and writes the gradient of each mixed head, before its norm.
2. `_raw`: takes it back through both convolutions at once, to the raw columns.
3. `_weights`: a matrix per head and look-back, the mixed head's gradient times the raw columns so many tokens before.
   Both convolutions are linear, so all their gradients are sums of these, which is what 4. `_finish` makes of them.
5. `_values`: the two halves of the values.

Sums over tokens go to a workspace, a part each, and are added up in order: two runs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.triton import dot
from .triton import (
    block_and_part,
    block_of_tokens,
    head_columns,
    length_of,
    mixed_halves,
    origin_of,
    reach_of,
    tables,
)


@triton.jit
def _halves(
    grad, base, stride_s, stride_d, row, column, stride_b, in_use, column1, column2
):  # fmt: skip
    """Both halves of a head's upstream gradient, in fp32."""
    rows = grad + base + (row * stride_b + column * stride_s)[:, None]
    first = tl.load(rows + (column1.to(tl.int64) * stride_d)[None, :], mask=in_use, other=0.0)
    second = tl.load(rows + (column2.to(tl.int64) * stride_d)[None, :], mask=in_use, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _heads(
    raw, depthwise_weight, depthwise_bias, weight, grouped_bias, key_scale, cos, sin, reach, state, origin,
    query_grad, key_grad, mixed_grad, scale_part,
    tokens, length, heads, groups, raw_stride_b, raw_stride_s, cos_stride_b, cos_stride_s,
    state_stride_n, state_stride_c, state_stride_k,
    query_stride_b, query_stride_h, query_stride_s, query_stride_d,
    key_stride_b, key_stride_h, key_stride_s, key_stride_d,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
    HAS_REACH: tl.constexpr, STATES: tl.constexpr, EPS: tl.constexpr, XCDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block, head = block_and_part(heads, XCDS)
    position, inside, row, column = block_of_tokens(block, tokens, length, BLOCK_M)
    seen = reach_of(reach, position, inside, column, HAS_REACH)
    ENTRIES: tl.constexpr = WIDTH0 + WIDTH1 - 2 if WIDTH0 + WIDTH1 > 3 else 1
    segment, place = origin_of(origin, position, inside, row, column, ENTRIES, STATES)
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    first, second = mixed_halves(
        raw, row * raw_stride_b + column * raw_stride_s, raw_stride_s, seen, inside,
        depthwise_weight, depthwise_bias, weight, grouped_bias,
        state, state_stride_n, state_stride_c, state_stride_k, segment, place,
        head, heads, groups, HEAD_DIM, ROTATED, WIDTH0, WIDTH1, STATES, BLOCK_M, BLOCK_K, HALF,
    )  # fmt: skip
    norm, clamped = length_of(first, second, EPS)
    column1, column2, used = head_columns(HEAD_DIM, ROTATED, HALF)
    in_use = inside[:, None] & used[None, :]
    queries = heads - groups
    if head < queries:
        base = head.to(tl.int64) * query_stride_h
        grad1, grad2 = _halves(
            query_grad, base, query_stride_s, query_stride_d, row, column, query_stride_b, in_use, column1, column2
        )
    else:
        base = (head - queries).to(tl.int64) * key_stride_h
        grad1, grad2 = _halves(
            key_grad, base, key_stride_s, key_stride_d, row, column, key_stride_b, in_use, column1, column2
        )
    c, s = tables(cos, sin, row * cos_stride_b + column * cos_stride_s, inside, ROTATED, HALF)
    turned1 = grad1 * c + grad2 * s
    turned2 = grad2 * c - grad1 * s
    along = tl.sum(turned1 * first, axis=1) + tl.sum(turned2 * second, axis=1)
    factor = tl.sqrt(HEAD_DIM * 1.0) / clamped
    if head >= queries:
        group = head - queries
        here = block < tl.cdiv(tokens, BLOCK_M)
        tl.store(scale_part + block * groups + group, tl.sum(tl.where(inside, along * factor, 0.0)), mask=here)
        factor *= tl.load(key_scale + group).to(tl.float32)
    along = tl.where(norm > EPS, -along / (clamped * clamped), 0.0)
    turned1 = (turned1 + first * along[:, None]) * factor[:, None]
    turned2 = (turned2 + second * along[:, None]) * factor[:, None]
    rows = mixed_grad + (position.to(tl.int64) * (heads * HEAD_DIM) + head * HEAD_DIM)[:, None]
    tl.store(rows + column1[None, :], turned1.to(mixed_grad.dtype.element_ty), mask=in_use)
    tl.store(rows + column2[None, :], turned2.to(mixed_grad.dtype.element_ty), mask=in_use)


@triton.jit
def _raw(
    mixed_grad, depthwise_weight, weight, reach, raw_grad,
    tokens, length, heads, groups,
    HEAD_DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HAS_REACH: tl.constexpr, XCDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A token's raw columns count for itself and for the tokens after it that see it: the `steps`-th one takes them
    through every pair of taps whose delays add up to `steps`, which are one matrix."""
    PARTS_N: tl.constexpr = (HEAD_DIM + BLOCK_N - 1) // BLOCK_N
    block, part = block_and_part(heads * PARTS_N, XCDS)
    head = part // PARTS_N
    position, inside, _, column = block_of_tokens(block, tokens, length, BLOCK_M)
    channels = heads * HEAD_DIM
    n = (part % PARTS_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = n < HEAD_DIM
    offsets = position.to(tl.int64) * channels
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for steps in tl.static_range(WIDTH0 + WIDTH1 - 1):
        sees = inside & (column + steps < length)
        if HAS_REACH and steps > 0:
            sees = sees & (tl.load(reach + position + steps, mask=sees, other=0) >= steps)
        for begin in tl.range(0, HEAD_DIM, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            wanted = k < HEAD_DIM
            later = tl.load(
                mixed_grad + (offsets + steps * channels)[:, None] + (head * HEAD_DIM + k)[None, :],
                mask=sees[:, None] & wanted[None, :],
                other=0.0,
            )
            matrix = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            for tap in tl.static_range(WIDTH0):
                if (steps - tap >= 0) and (steps - tap < WIDTH1):
                    factor = tl.load(
                        depthwise_weight + (head * HEAD_DIM + n) * WIDTH0 + (WIDTH0 - 1 - tap), mask=held, other=0.0
                    )
                    at = (head * WIDTH1 + (WIDTH1 - 1 - steps + tap)) * HEAD_DIM + n
                    taken = tl.load(
                        weight + at[None, :] * HEAD_DIM + k[:, None], mask=wanted[:, None] & held[None, :], other=0.0
                    )
                    matrix += factor.to(tl.float32)[None, :] * taken.to(tl.float32)
            total = dot(later, matrix.to(mixed_grad.dtype.element_ty), total)

    # the q-k mean, which skips the convolutions
    in_use = inside[:, None] & held[None, :]
    rows = mixed_grad + offsets[:, None]
    queries = heads - groups
    per_group = queries // groups
    own = tl.load(rows + (head * HEAD_DIM + n)[None, :], mask=in_use, other=0.0).to(tl.float32)
    if head < queries:
        key = (queries + head // per_group) * HEAD_DIM + n
        mean = tl.load(rows + key[None, :], mask=in_use, other=0.0).to(tl.float32) / per_group
    else:
        mean = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for member in range(per_group):
            query = ((head - queries) * per_group + member) * HEAD_DIM + n
            mean += tl.load(rows + query[None, :], mask=in_use, other=0.0).to(tl.float32)
    total += 0.5 * (own + mean)
    at = raw_grad + offsets[:, None] + (head * HEAD_DIM + n)[None, :]
    tl.store(at, total.to(raw_grad.dtype.element_ty), mask=in_use)


@triton.jit
def _weights(
    raw, mixed_grad, reach, state, origin, matrix_part, bias_part,
    tokens, length, heads, tokens_of_split, raw_stride_b, raw_stride_s, state_stride_n, state_stride_c, state_stride_k,
    HEAD_DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, HAS_REACH: tl.constexpr, STATES: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``sum over t of grad[t, out] * raw[t - steps, in]`` for one head, one look-back and a share of the tokens."""
    LOOK_BACK: tl.constexpr = WIDTH0 + WIDTH1 - 2
    ENTRIES: tl.constexpr = LOOK_BACK if LOOK_BACK > 1 else 1
    PARTS_O: tl.constexpr = (HEAD_DIM + BLOCK_O - 1) // BLOCK_O
    PARTS_I: tl.constexpr = (HEAD_DIM + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    split = program % tl.cdiv(tokens, tokens_of_split)
    rest = program // tl.cdiv(tokens, tokens_of_split)
    part_i = rest % PARTS_I
    part_o = rest // PARTS_I % PARTS_O
    steps = rest // (PARTS_I * PARTS_O) % (LOOK_BACK + 1)
    head = rest // (PARTS_I * PARTS_O * (LOOK_BACK + 1))
    o = part_o * BLOCK_O + tl.arange(0, BLOCK_O)
    i = part_i * BLOCK_I + tl.arange(0, BLOCK_I)
    channels = heads * HEAD_DIM
    total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    bias = tl.zeros((BLOCK_O,), tl.float32)
    start = split * tokens_of_split
    for begin in range(start, tl.minimum(start + tokens_of_split, tokens), BLOCK_T):
        position = begin + tl.arange(0, BLOCK_T)
        inside = position < tokens
        row = position // length
        column = position - row * length
        seen = reach_of(reach, position, inside, column, HAS_REACH)
        row64 = row.to(tl.int64)
        offsets = row64 * raw_stride_b + (column - steps).to(tl.int64) * raw_stride_s
        x = tl.load(
            raw + offsets[:, None] + (head * HEAD_DIM + i)[None, :],
            mask=(inside & (seen >= steps))[:, None] & (i < HEAD_DIM)[None, :],
            other=0.0,
        )
        if STATES != 0:
            segment, place = origin_of(origin, position, inside, row, column, ENTRIES, STATES)
            incoming = place < steps
            past = segment * state_stride_n + (LOOK_BACK - steps + place) * state_stride_k
            kept = tl.load(
                state + past[:, None] + ((head * HEAD_DIM + i).to(tl.int64) * state_stride_c)[None, :],
                mask=incoming[:, None] & (i < HEAD_DIM)[None, :],
                other=0.0,
            )
            x = tl.where(incoming[:, None], kept.to(x.dtype), x)
        grad = tl.load(
            mixed_grad + (position.to(tl.int64) * channels + head * HEAD_DIM)[None, :] + o[:, None],
            mask=inside[None, :] & (o < HEAD_DIM)[:, None],
            other=0.0,
        )
        total = dot(grad, x, total)
        if (steps == 0) & (part_i == 0):
            bias += tl.sum(grad.to(tl.float32), axis=1)
    at = ((split * heads + head) * (LOOK_BACK + 1) + steps).to(tl.int64) * HEAD_DIM * HEAD_DIM
    tl.store(
        matrix_part + at + o[:, None] * HEAD_DIM + i[None, :],
        total,
        mask=(o < HEAD_DIM)[:, None] & (i < HEAD_DIM)[None, :],
    )
    if (steps == 0) & (part_i == 0):
        tl.store(bias_part + (split * heads + head) * HEAD_DIM + o, bias, mask=o < HEAD_DIM)


@triton.jit
def _finish(
    matrix_part, bias_part, depthwise_weight, depthwise_bias, weight,
    depthwise_weight_grad, depthwise_bias_grad, grouped_weight_grad, grouped_bias_grad,
    heads, splits,
    HEAD_DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, TAPS: tl.constexpr, OUT: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Adds the shares up and makes the gradients of both convolutions' parameters of them, some columns of a head at a
    time. With M_s the sum for look-back s, w the depthwise taps and b its bias, W the grouped matrices, by delay:
    ``dW_d = sum_j w_j M_(d + j) + b (sum of grad)``, ``dw_j = sum_d, out W_d M_(d + j)``, ``db = sum_d, out W_d (sum of
    grad)``.
    """
    PARTS_I: tl.constexpr = (HEAD_DIM + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    head = program // PARTS_I
    part_i = program % PARTS_I
    o = tl.arange(0, OUT)
    i = part_i * BLOCK_I + tl.arange(0, BLOCK_I)
    wanted = i < HEAD_DIM
    channel = head * HEAD_DIM + i
    in_use = (o < HEAD_DIM)[:, None] & wanted[None, :]
    bias = tl.zeros((OUT,), tl.float32)
    for split in range(splits):
        bias += tl.load(bias_part + (split * heads + head) * HEAD_DIM + o, mask=o < HEAD_DIM, other=0.0)
    if part_i == 0:
        at = grouped_bias_grad + head * HEAD_DIM + o
        tl.store(at, bias.to(grouped_bias_grad.dtype.element_ty), mask=o < HEAD_DIM)
    size = HEAD_DIM * HEAD_DIM
    by_tap = tl.zeros((TAPS, BLOCK_I), tl.float32)
    bias_in = tl.zeros((BLOCK_I,), tl.float32)
    constant = tl.load(depthwise_bias + channel, mask=wanted, other=0.0).to(tl.float32)
    for delay in tl.static_range(WIDTH1):
        at = weight + ((head * WIDTH1 + (WIDTH1 - 1 - delay)) * HEAD_DIM + i)[None, :] * HEAD_DIM + o[:, None]
        matrix = tl.load(at, mask=in_use, other=0.0).to(tl.float32)
        bias_in += tl.sum(matrix * bias[:, None], axis=0)
        grad = bias[:, None] * constant[None, :]
        for tap in tl.static_range(WIDTH0):
            found = tl.zeros((OUT, BLOCK_I), tl.float32)
            at = matrix_part + (head * (WIDTH0 + WIDTH1 - 1) + delay + tap).to(tl.int64) * size
            for _ in range(splits):
                found += tl.load(at + o[:, None] * HEAD_DIM + i[None, :], mask=in_use, other=0.0)
                at += heads.to(tl.int64) * (WIDTH0 + WIDTH1 - 1) * size
            factor = tl.load(depthwise_weight + channel * WIDTH0 + (WIDTH0 - 1 - tap), mask=wanted, other=0.0)
            grad += factor.to(tl.float32)[None, :] * found
            here = (tl.arange(0, TAPS) == WIDTH0 - 1 - tap)[:, None]
            by_tap += tl.where(here, tl.sum(matrix * found, axis=0)[None, :], 0.0)
        at = grouped_weight_grad + ((head * HEAD_DIM + o)[:, None] * HEAD_DIM + i[None, :]) * WIDTH1
        tl.store(at + (WIDTH1 - 1 - delay), grad.to(grouped_weight_grad.dtype.element_ty), mask=in_use)
    tl.store(depthwise_bias_grad + channel, bias_in.to(depthwise_bias_grad.dtype.element_ty), mask=wanted)
    taps = tl.arange(0, TAPS)
    at = depthwise_weight_grad + (channel * WIDTH0)[None, :] + taps[:, None]
    in_use = (taps < WIDTH0)[:, None] & wanted[None, :]
    tl.store(at, by_tap.to(depthwise_weight_grad.dtype.element_ty), mask=in_use)


@triton.jit
def _values(
    value_grad, reach, origin, current_grad, delayed_grad, nothing_part,
    tokens, length, width, stride_b, stride_h, stride_s, stride_d,
    HEAD_DIM: tl.constexpr, HAS_REACH: tl.constexpr, STATES: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Some columns of both halves. A delayed column counts for the token after it, if that one sees it; where nothing
    came before a token, `nothing_part` gets its share."""
    block = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    wanted = i < width
    position, inside, row, column = block_of_tokens(block, tokens, length, BLOCK_M)
    seen = reach_of(reach, position, inside, column, HAS_REACH)
    _, place = origin_of(origin, position, inside, row, column, ENTRIES, STATES)
    rows = row.to(tl.int64) * stride_b + column.to(tl.int64) * stride_s
    results = position.to(tl.int64) * width
    in_use = inside[:, None] & wanted[None, :]
    at = (i // HEAD_DIM).to(tl.int64) * stride_h + (i % HEAD_DIM).to(tl.int64) * stride_d
    grad = tl.load(value_grad + rows[:, None] + at[None, :], mask=in_use, other=0.0)
    tl.store(current_grad + results[:, None] + i[None, :], grad.to(current_grad.dtype.element_ty), mask=in_use)
    late = i + width
    at = (late // HEAD_DIM).to(tl.int64) * stride_h + (late % HEAD_DIM).to(tl.int64) * stride_d
    sees = inside & (column + 1 < length)
    if HAS_REACH:
        sees = sees & (tl.load(reach + position + 1, mask=sees, other=0) >= 1)
    grad = tl.load(
        value_grad + (rows + stride_s)[:, None] + at[None, :], mask=sees[:, None] & wanted[None, :], other=0.0
    )
    tl.store(delayed_grad + results[:, None] + i[None, :], grad.to(delayed_grad.dtype.element_ty), mask=in_use)
    alone = inside & (seen < 1)
    if STATES != 0:
        alone = alone & (place >= 1)
    grad = tl.load(value_grad + rows[:, None] + at[None, :], mask=alone[:, None] & wanted[None, :], other=0.0)
    tl.store(nothing_part + block * width + i, tl.sum(grad.to(tl.float32), axis=0), mask=wanted)
