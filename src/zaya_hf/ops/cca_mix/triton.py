"""CCA's mixing step as one Triton kernel: two convolutions, q-k mean, norm, temperature, rotation, delayed values.

A program has a block of tokens and one head, or one head of the values. It reads the raw rows of its head that the two
convolutions see, which are nearly the same for all taps, and nothing but results goes back to memory.

A head's vector lives in two halves, so that rotation stays inside a thread: column i of the first half is turned with
column i of the second one, and what is not rotated fills both up (`head_columns`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, dot, launch
from . import inputs as places
from .inputs import Inputs, Values

#: What a token that begins nothing has for its place in a segment with a state.
FAR = tl.constexpr(1 << 30)
SEGMENTS = tl.constexpr(places.SEGMENTS)


@triton.jit
def block_and_part(parts, XCDS: tl.constexpr):
    """Block of tokens, and head. Programs go round-robin to the dies of an MI300X, each with an L2 of its own: all
    heads of a block go to one die, since they read the same rows."""
    program = tl.program_id(0)
    local = program // XCDS
    return (local // parts) * XCDS + program % XCDS, local % parts


@triton.jit
def block_of_tokens(block, tokens, length, BLOCK_M: tl.constexpr):
    """Flat positions, whether they are tokens, and their row and column."""
    position = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = position < tokens
    row = position // length
    return position, inside, row, position - row * length


@triton.jit
def reach_of(reach, position, inside, column, HAS_REACH: tl.constexpr):
    """Predecessors in this call that each token sees."""
    seen = column
    if HAS_REACH:
        seen = tl.minimum(tl.load(reach + position, mask=inside, other=0), column).to(tl.int32)
    return tl.where(inside, seen, 0)


@triton.jit
def origin_of(origin, position, inside, row, column, ENTRIES: tl.constexpr, STATES: tl.constexpr):
    """The segment with a state that each token is in, and its place there; `FAR` where it is in none."""
    segment, place = row, tl.where(inside, column, FAR)
    if STATES == SEGMENTS:
        code = tl.load(origin + position, mask=inside, other=-1)
        segment = tl.maximum(code, 0) // ENTRIES
        place = tl.where(code >= 0, code - segment * ENTRIES, FAR)
    return segment.to(tl.int64), place


@triton.jit
def earlier(
    raw, offsets, stride, seen, inside, columns, wanted,
    state, state_stride_n, state_stride_c, state_stride_k, segment, place,
    STEPS: tl.constexpr, LOOK_BACK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, columns]``: the raw columns of every token's `STEPS`-th predecessor, zeros where there is none."""
    found = inside & (seen >= STEPS)
    x = tl.load(
        raw + (offsets - STEPS * stride)[:, None] + columns[None, :], mask=found[:, None] & wanted[None, :], other=0.0
    )
    if (STATES != 0) and (STEPS > 0):
        incoming = place < STEPS
        past = segment * state_stride_n + (LOOK_BACK - STEPS + place) * state_stride_k
        kept = tl.load(
            state + past[:, None] + (columns.to(tl.int64) * state_stride_c)[None, :],
            mask=incoming[:, None] & wanted[None, :],
            other=0.0,
        )
        x = tl.where(incoming[:, None], kept.to(x.dtype), x)
    return x.to(tl.float32)


@triton.jit
def head_columns(HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr):
    """Columns of a head that its two halves hold, and which of the `HALF` places are used. Written so
    that the compiler sees which of them lie side by side, and loads more than one at a time."""
    i = tl.arange(0, HALF)
    turned = i < ROTATED // 2
    first = tl.where(turned, i, i + ROTATED // 2)
    second = tl.where(turned, i + ROTATED // 2, i + HEAD_DIM // 2)
    return first, second, i < HEAD_DIM // 2


@triton.jit
def mixed_halves(
    raw, offsets, stride, seen, inside,
    depthwise_weight, depthwise_bias, weight, grouped_bias,
    state, state_stride_n, state_stride_c, state_stride_k, segment, place,
    head, heads, groups,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, STATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head after both convolutions and the q-k mean, before its norm: two halves ``[BLOCK_M, HALF]`` in fp32."""
    column1, column2, used = head_columns(HEAD_DIM, ROTATED, HALF)
    LOOK_BACK: tl.constexpr = WIDTH0 + WIDTH1 - 2
    first = tl.zeros((BLOCK_M, HALF), tl.float32)
    second = tl.zeros((BLOCK_M, HALF), tl.float32)
    for begin in tl.range(0, HEAD_DIM, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        wanted = k < HEAD_DIM
        columns = head * HEAD_DIM + k
        bias = tl.load(depthwise_bias + columns, mask=wanted, other=0.0).to(tl.float32)
        for delay in tl.static_range(WIDTH1):
            x = tl.zeros((BLOCK_M, BLOCK_K), tl.float32) + bias[None, :]
            for tap in tl.static_range(WIDTH0):
                factor = tl.load(depthwise_weight + columns * WIDTH0 + (WIDTH0 - 1 - tap), mask=wanted, other=0.0)
                x += factor.to(tl.float32)[None, :] * earlier(
                    raw, offsets, stride, seen, inside, columns, wanted,
                    state, state_stride_n, state_stride_c, state_stride_k, segment, place,
                    delay + tap, LOOK_BACK, STATES,
                )  # fmt: skip
            x = x.to(raw.dtype.element_ty)
            rows = weight + ((head * WIDTH1 + (WIDTH1 - 1 - delay)) * HEAD_DIM + k)[:, None] * HEAD_DIM
            in_use = wanted[:, None] & used[None, :]
            first = dot(x, tl.load(rows + column1[None, :], mask=in_use, other=0.0), first)
            second = dot(x, tl.load(rows + column2[None, :], mask=in_use, other=0.0), second)

    bias1 = tl.load(grouped_bias + head * HEAD_DIM + column1, mask=used, other=0.0).to(tl.float32)
    bias2 = tl.load(grouped_bias + head * HEAD_DIM + column2, mask=used, other=0.0).to(tl.float32)
    queries = heads - groups
    per_group = queries // groups
    in_use = inside[:, None] & used[None, :]
    rows = raw + offsets[:, None]
    if head < queries:
        key = (queries + head // per_group) * HEAD_DIM
        own = head * HEAD_DIM
        mean1 = tl.load(rows + (own + column1)[None, :], mask=in_use, other=0.0).to(tl.float32)
        mean2 = tl.load(rows + (own + column2)[None, :], mask=in_use, other=0.0).to(tl.float32)
    else:
        key = head * HEAD_DIM
        mean1 = tl.zeros((BLOCK_M, HALF), tl.float32)
        mean2 = tl.zeros((BLOCK_M, HALF), tl.float32)
        for member in range(per_group):
            own = ((head - queries) * per_group + member) * HEAD_DIM
            mean1 += tl.load(rows + (own + column1)[None, :], mask=in_use, other=0.0).to(tl.float32)
            mean2 += tl.load(rows + (own + column2)[None, :], mask=in_use, other=0.0).to(tl.float32)
        mean1 = mean1 / per_group
        mean2 = mean2 / per_group
    mean1 += tl.load(rows + (key + column1)[None, :], mask=in_use, other=0.0).to(tl.float32)
    mean2 += tl.load(rows + (key + column2)[None, :], mask=in_use, other=0.0).to(tl.float32)
    return first + bias1[None, :] + 0.5 * mean1, second + bias2[None, :] + 0.5 * mean2


@triton.jit
def tables(cos, sin, offsets, inside, ROTATED: tl.constexpr, HALF: tl.constexpr):
    """Cosine and sine for every pair, 1 and 0 for what is not rotated. Both halves of a table are equal."""
    i = tl.arange(0, HALF)
    turned = inside[:, None] & (i < ROTATED // 2)[None, :]
    at = offsets[:, None] + i[None, :]
    c = tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def length_of(first, second, EPS: tl.constexpr):
    """Norm of vectors in two halves, and the same no less than `EPS`."""
    norm = tl.sqrt(tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1))
    return norm, tl.maximum(norm, EPS)


@triton.jit
def _forward(
    raw, value_current, value_delayed, depthwise_weight, depthwise_bias, weight, grouped_bias, key_scale, cos, sin,
    nothing, reach, state, state_value, origin, query, key, value,
    tokens, length, heads, groups,
    raw_stride_b, raw_stride_s, current_stride_b, current_stride_s, delayed_stride_b, delayed_stride_s,
    cos_stride_b, cos_stride_s, state_stride_n, state_stride_c, state_stride_k, state_value_stride_n,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
    HAS_NOTHING: tl.constexpr, HAS_REACH: tl.constexpr, STATES: tl.constexpr, EPS: tl.constexpr, XCDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block, part = block_and_part(heads + groups, XCDS)
    position, inside, row, column = block_of_tokens(block, tokens, length, BLOCK_M)
    seen = reach_of(reach, position, inside, column, HAS_REACH)
    ENTRIES: tl.constexpr = WIDTH0 + WIDTH1 - 2 if WIDTH0 + WIDTH1 > 3 else 1
    segment, place = origin_of(origin, position, inside, row, column, ENTRIES, STATES)
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    if part < heads:
        offsets = row * raw_stride_b + column * raw_stride_s
        first, second = mixed_halves(
            raw, offsets, raw_stride_s, seen, inside, depthwise_weight, depthwise_bias, weight, grouped_bias,
            state, state_stride_n, state_stride_c, state_stride_k, segment, place,
            part, heads, groups, HEAD_DIM, ROTATED, WIDTH0, WIDTH1, STATES, BLOCK_M, BLOCK_K, HALF,
        )  # fmt: skip
        _, clamped = length_of(first, second, EPS)
        factor = tl.sqrt(HEAD_DIM * 1.0) / clamped
        queries = heads - groups
        if part >= queries:
            factor *= tl.load(key_scale + part - queries).to(tl.float32)
        first *= factor[:, None]
        second *= factor[:, None]
        c, s = tables(cos, sin, row * cos_stride_b + column * cos_stride_s, inside, ROTATED, HALF)
        column1, column2, used = head_columns(HEAD_DIM, ROTATED, HALF)
        in_use = inside[:, None] & used[None, :]
        turned1 = (first * c - second * s).to(raw.dtype.element_ty)
        turned2 = (second * c + first * s).to(raw.dtype.element_ty)
        if part < queries:
            rows = query + (((row * queries + part) * length + column) * HEAD_DIM)[:, None]
            tl.store(rows + column1[None, :], turned1, mask=in_use)
            tl.store(rows + column2[None, :], turned2, mask=in_use)
        else:
            rows = key + (((row * groups + part - queries) * length + column) * HEAD_DIM)[:, None]
            tl.store(rows + column1[None, :], turned1, mask=in_use)
            tl.store(rows + column2[None, :], turned2, mask=in_use)
    else:
        head = part - heads
        width = groups * HEAD_DIM // 2
        i = tl.arange(0, 2 * HALF)
        held = i < HEAD_DIM
        channel = head * HEAD_DIM + i
        own = held & (channel < width)
        late = held & (channel >= width)
        channel = tl.where(channel < width, channel, channel - width)
        at = value_current + (row * current_stride_b + column * current_stride_s)[:, None] + channel[None, :]
        result = tl.load(at, mask=inside[:, None] & own[None, :], other=0.0)
        before = (seen >= 1)[:, None] & late[None, :]
        at = value_delayed + (row * delayed_stride_b + (column - 1) * delayed_stride_s)[:, None] + channel[None, :]
        delayed = tl.load(at, mask=before, other=0.0)
        if HAS_NOTHING:
            fresh = tl.load(nothing + channel, mask=late, other=0.0).to(result.dtype)
            delayed = tl.where(before, delayed, fresh[None, :])
        if STATES != 0:
            incoming = (place < 1)[:, None] & late[None, :]
            at = state_value + (segment * state_value_stride_n)[:, None] + channel[None, :]
            delayed = tl.where(incoming, tl.load(at, mask=incoming, other=0.0).to(result.dtype), delayed)
        result = tl.where(own[None, :], result, delayed)
        at = value + (((row * groups + head) * length + column) * HEAD_DIM)[:, None] + i[None, :]
        tl.store(at, result, mask=inside[:, None] & held[None, :])


#: dies of an MI300X and of an MI355X; elsewhere it is only an order of programs
DIES = 8


def dies(tokens: int, block_m: int) -> int:
    """Dies over which `block_and_part` deals blocks: with few blocks their heads are dealt instead."""
    return DIES if blocks_of(tokens, block_m) >= DIES else 1


def programs(tokens: int, parts: int, block_m: int) -> int:
    """Programs for `parts` heads of every block of tokens, see `block_and_part`."""
    over = dies(tokens, block_m)
    return blocks_of(blocks_of(tokens, block_m), over) * over * parts


def forward(inputs: Inputs, values: Values, config: KernelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, H, S, D]``, keys and values ``[B, G, S, D]``, contiguous, in the dtype of the raw ones."""
    raw, tokens, heads, groups = inputs.raw, inputs.tokens, inputs.heads, inputs.key_scale.shape[0]
    batch_size, length, _ = raw.shape
    query = raw.new_empty(batch_size, heads - groups, length, inputs.head_dim)
    key, value = (raw.new_empty(batch_size, groups, length, inputs.head_dim) for _ in range(2))
    launch(
        _forward,
        (programs(tokens, heads + groups, config["BLOCK_M"]),),
        config,
        raw,
        values.current,
        values.delayed,
        inputs.depthwise_weight,
        inputs.depthwise_bias,
        inputs.weight,
        inputs.grouped_bias,
        inputs.key_scale,
        inputs.cos,
        inputs.sin,
        values.nothing,
        inputs.reach,
        inputs.state,
        values.state,
        inputs.origin,
        query,
        key,
        value,
        tokens,
        length,
        heads,
        groups,
        *raw.stride()[:2],
        *values.current.stride()[:2],
        *values.delayed.stride()[:2],
        *inputs.table_strides(),
        *inputs.state_strides(),
        0 if values.state is None else values.state.stride(0),
        HAS_NOTHING=values.nothing is not None,
        XCDS=dies(tokens, config["BLOCK_M"]),
        **inputs.constants(),
    )
    return query, key, value
