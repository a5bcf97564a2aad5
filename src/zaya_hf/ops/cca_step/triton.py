"""The kernel of a decoding step: one program for each block of rows and each head, whose channels it has to itself.

A program convolves its head's columns, adds the q-k mean (which reads raw columns only, so that no program waits for
another), norms, scales and rotates, and then moves the head's part of the state on. The delayed values are programs
of their own. States may be written over where they were read: their channels belong to one program, which has read
what it needs before it writes.

The convolutions are one product over ``(channel, tap)``, in the order in which the second one's weight is stored. The
two dimensions of a head that are rotated together are computed in two accumulators, so that nothing has to be
shuffled; dimensions that are not rotated are dealt out to both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.triton import dot


@triton.jit
def _tokens(
    row,
    column,
    here,
    reach_ptr,
    continues_ptr,
    entry_index_ptr,
    entry_valid_ptr,
    reach_stride,
    entry_stride,
    LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Tokens and what they see: row, column, predecessors inside the call, whether those before them are in the state,
    and whether the token exists."""
    if PLAIN:
        reach = column
        in_state = here
    else:
        reach = tl.load(reach_ptr + row * reach_stride + column, here, other=0).to(tl.int32)
        offset = column - (tl.load(entry_index_ptr + row * entry_stride, here, other=0) - row * LENGTH)
        known = here & (offset >= 0) & (offset < ENTRIES)
        in_state = tl.load(entry_valid_ptr + row * entry_stride + offset, known, other=0) != 0
        in_state = in_state & (tl.load(continues_ptr + row, here, other=0) != 0)
    return row[:, None], column[:, None], reach[:, None], in_state[:, None], here[:, None]


@triton.jit
def _earlier(tokens, raw_ptr, strides, state_ptr, state_strides, channel, steps, wanted, COLUMNS: tl.constexpr):
    """Channels of the tokens' `steps`-th predecessors; zeros where there are none. All arguments broadcast."""
    row, column, reach, in_state, here = tokens
    in_call = here & wanted & (steps <= reach)
    at = row * strides[0] + (column - steps).to(tl.int64) * strides[1] + channel
    found = tl.load(raw_ptr + at, in_call, other=0.0)
    in_state = here & wanted & in_state & (steps > reach)
    at = row * state_strides[0] + channel.to(tl.int64) * state_strides[1]
    at += (COLUMNS - steps + reach) * state_strides[2]
    return tl.where(in_call, found, tl.load(state_ptr + at, in_state, other=0.0).to(found.dtype))


@triton.jit
def _values(
    group,
    tokens,
    ends,
    moves,
    current_ptr,
    current_strides,
    delayed_ptr,
    delayed_strides,
    state_ptr,
    state_strides,
    next_ptr,
    next_strides,
    nothing_ptr,
    value_ptr,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """A head of values: the first half of all heads' dimensions is the token's own, the second that of the one before.
    `ends` are the last tokens of the rows."""
    row, column, reach, in_state, here = tokens
    half: tl.constexpr = GROUPS * WIDTH // 2
    inner = tl.arange(0, 2 * PAIRS)[None, :]
    channel = group * WIDTH + inner
    own = (inner < WIDTH) & (channel < half)
    late = (inner < WIDTH) & (channel >= half)
    at = row * current_strides[0] + column.to(tl.int64) * current_strides[1] + channel
    current = tl.load(current_ptr + at, here & own, other=0.0)
    channel -= half
    delayed = _earlier(tokens, delayed_ptr, delayed_strides, state_ptr, state_strides, channel, 1, late, 1)
    if nothing_ptr is not None:
        nothing = tl.load(nothing_ptr + channel, late, other=0.0).to(delayed.dtype)
        delayed = tl.where((reach >= 1) | in_state, delayed, nothing)
    at = ((row * GROUPS + group) * LENGTH + column) * WIDTH + inner
    tl.store(value_ptr + at, tl.where(own, current, delayed), here & (inner < WIDTH))

    kept = _earlier(ends, delayed_ptr, delayed_strides, state_ptr, state_strides, channel, 0, late & moves, 1)
    if not PLAIN:
        at = ends[0] * state_strides[0] + channel.to(tl.int64) * state_strides[1]
        held = tl.load(state_ptr + at, ends[4] & late & ~moves, other=0.0)
        kept = tl.where(moves, kept, held.to(kept.dtype))
    tl.debug_barrier()  # all of the state has been read
    at = ends[0] * next_strides[0] + channel.to(tl.int64) * next_strides[1]
    tl.store(next_ptr + at, kept, ends[4] & late)


@triton.jit
def _move(
    base,
    ends,
    moves,
    raw_ptr,
    raw_strides,
    state_ptr,
    state_strides,
    next_ptr,
    next_strides,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLAIN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The next state of a head, some channels at a time."""
    for start in range(0, WIDTH, BLOCK_C):
        flat = tl.arange(0, BLOCK_C * PLACES)[None, :]
        inner, place = start + flat // PLACES, flat % PLACES
        inside = (inner < WIDTH) & (place < COLUMNS)
        channel = base + inner
        steps = COLUMNS - 1 - place
        kept = _earlier(ends, raw_ptr, raw_strides, state_ptr, state_strides, channel, steps, inside & moves, COLUMNS)
        if not PLAIN:
            held_at = ends[0] * state_strides[0] + channel.to(tl.int64) * state_strides[1] + place * state_strides[2]
            held = tl.load(state_ptr + held_at, ends[4] & inside & ~moves, other=0.0)
            kept = tl.where(moves, kept, held.to(kept.dtype))
        tl.debug_barrier()  # all of these channels' state has been read
        at = ends[0] * next_strides[0] + channel.to(tl.int64) * next_strides[1] + place * next_strides[2]
        tl.store(next_ptr + at, kept, ends[4] & inside)


@triton.jit
def _head(
    head,
    tokens,
    ends,
    moves,
    raw_ptr,
    raw_strides,
    state_ptr,
    state_strides,
    next_ptr,
    next_strides,
    depthwise_weight_ptr,
    depthwise_bias_ptr,
    grouped_weight_ptr,
    grouped_bias_ptr,
    temperature_ptr,
    cos_ptr,
    sin_ptr,
    table_strides,
    query_ptr,
    key_ptr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    TAPS0: tl.constexpr,
    TAPS1: tl.constexpr,
    CLAMP: tl.constexpr,
    PLAIN: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A head of queries, or behind those one of keys, for COUNT tokens."""
    columns: tl.constexpr = TAPS0 + TAPS1 - 2
    row, column, _, _, here = tokens
    dtype = raw_ptr.dtype.element_ty
    base = head * WIDTH
    pair = tl.arange(0, PAIRS)
    turned = pair < ROTATED // 2
    first = tl.where(turned, pair, 2 * pair)
    second = tl.where(turned, pair + ROTATED // 2, 2 * pair + 1)
    has_first, has_second = first < WIDTH, second < WIDTH

    # the two convolutions
    mixed_first = tl.zeros([COUNT, PAIRS], tl.float32)
    mixed_second = tl.zeros([COUNT, PAIRS], tl.float32)
    for start in range(0, WIDTH * TAPS1, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inside = inner < WIDTH * TAPS1
        channel = base + inner // TAPS1
        delay = TAPS1 - 1 - inner % TAPS1
        bias = tl.load(depthwise_bias_ptr + channel, inside, other=0.0).to(tl.float32)
        out = tl.zeros([COUNT, BLOCK_K], tl.float32) + bias[None, :]
        for tap in tl.static_range(TAPS0):
            at = depthwise_weight_ptr + channel * TAPS0 + (TAPS0 - 1 - tap)
            weight = tl.load(at, inside, other=0.0).to(tl.float32)
            steps = (delay + tap)[None, :]
            seen = _earlier(
                tokens,
                raw_ptr,
                raw_strides,
                state_ptr,
                state_strides,
                channel[None, :],
                steps,
                inside[None, :],
                columns,
            )
            out += weight[None, :] * seen.to(tl.float32)
        out = out.to(dtype)
        at = grouped_weight_ptr + base * WIDTH * TAPS1 + inner[None, :]
        mask = has_first[:, None] & inside[None, :]
        weight_first = tl.load(at + first[:, None] * WIDTH * TAPS1, mask, other=0.0).to(dtype)
        mask = has_second[:, None] & inside[None, :]
        weight_second = tl.load(at + second[:, None] * WIDTH * TAPS1, mask, other=0.0).to(dtype)
        if COUNT >= 16:
            mixed_first = dot(out, tl.trans(weight_first), mixed_first)
            mixed_second = dot(out, tl.trans(weight_second), mixed_second)
        else:  # one token: a product of a matrix and a vector
            wide = out.to(tl.float32)
            mixed_first += tl.sum(wide * weight_first.to(tl.float32), axis=1)[None, :]
            mixed_second += tl.sum(wide * weight_second.to(tl.float32), axis=1)[None, :]

    # q-k mean
    is_query = head < HEADS
    group = head // (HEADS // GROUPS) if is_query else head - HEADS
    queries = head if is_query else group * (HEADS // GROUPS)
    count = 1 if is_query else HEADS // GROUPS
    mask_first, mask_second = here & has_first[None, :], here & has_second[None, :]
    at = raw_ptr + row * raw_strides[0] + column.to(tl.int64) * raw_strides[1]
    key_first = tl.load(at + (HEADS + group) * WIDTH + first[None, :], mask_first, other=0.0).to(tl.float32)
    key_second = tl.load(at + (HEADS + group) * WIDTH + second[None, :], mask_second, other=0.0).to(tl.float32)
    mean_first = tl.zeros([COUNT, PAIRS], tl.float32)
    mean_second = tl.zeros([COUNT, PAIRS], tl.float32)
    for query in range(queries, queries + count):
        raw_first = tl.load(at + query * WIDTH + first[None, :], mask_first, other=0.0).to(tl.float32)
        raw_second = tl.load(at + query * WIDTH + second[None, :], mask_second, other=0.0).to(tl.float32)
        mean_first += (raw_first + key_first) * 0.5
        mean_second += (raw_second + key_second) * 0.5
    bias = tl.load(grouped_bias_ptr + base + first, has_first, other=0.0).to(tl.float32)
    mixed_first = tl.where(has_first[None, :], mixed_first + bias[None, :] + mean_first / count, 0.0)
    bias = tl.load(grouped_bias_ptr + base + second, has_second, other=0.0).to(tl.float32)
    mixed_second = tl.where(has_second[None, :], mixed_second + bias[None, :] + mean_second / count, 0.0)

    # norm, temperature and rotation
    length = tl.sqrt(tl.sum(mixed_first * mixed_first, axis=1) + tl.sum(mixed_second * mixed_second, axis=1))
    factor = (WIDTH**0.5) / tl.maximum(length, 1.1920928955078125e-07)  # fp32's eps, as in `unit_rms`
    if not is_query:
        temperature = tl.load(temperature_ptr + group).to(tl.float32)
        if CLAMP:
            temperature = tl.exp(tl.minimum(tl.maximum(temperature, 1e-7), 2.0))
        factor *= temperature
    mixed_first *= factor[:, None]
    mixed_second *= factor[:, None]
    table = row * table_strides[0] + column.to(tl.int64) * table_strides[1] + pair[None, :]
    mask = here & turned[None, :]
    cos = tl.load(cos_ptr + table, mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask, other=0.0).to(tl.float32)
    rotated_first = mixed_first * cos - mixed_second * sin
    cos = tl.load(cos_ptr + table + ROTATED // 2, mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + table + ROTATED // 2, mask, other=0.0).to(tl.float32)
    rotated_second = mixed_second * cos + mixed_first * sin
    if is_query:
        at = query_ptr + ((row * HEADS + head) * LENGTH + column) * WIDTH
        tl.store(at + first[None, :], rotated_first, mask_first)
        tl.store(at + second[None, :], rotated_second, mask_second)
    else:
        at = key_ptr + ((row * GROUPS + group) * LENGTH + column) * WIDTH
        tl.store(at + first[None, :], rotated_first, mask_first)
        tl.store(at + second[None, :], rotated_second, mask_second)
    if columns > 0:
        _move(
            base,
            ends,
            moves,
            raw_ptr,
            raw_strides,
            state_ptr,
            state_strides,
            next_ptr,
            next_strides,
            WIDTH,
            columns,
            PLAIN,
            PLACES,
            BLOCK_C,
        )


@triton.jit
def step_kernel(
    raw_ptr,
    current_ptr,
    delayed_ptr,
    qk_state_ptr,
    value_state_ptr,
    next_qk_ptr,
    next_value_ptr,
    depthwise_weight_ptr,
    depthwise_bias_ptr,
    grouped_weight_ptr,
    grouped_bias_ptr,
    temperature_ptr,
    cos_ptr,
    sin_ptr,
    nothing_ptr,
    reach_ptr,
    continues_ptr,
    entry_index_ptr,
    entry_valid_ptr,
    last_ptr,
    has_real_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    rows,
    raw_stride_row,
    raw_stride_token,
    current_stride_row,
    current_stride_token,
    delayed_stride_row,
    delayed_stride_token,
    qk_stride_row,
    qk_stride_channel,
    qk_stride_column,
    value_stride_row,
    value_stride_channel,
    next_qk_stride_row,
    next_qk_stride_channel,
    next_qk_stride_column,
    next_value_stride_row,
    next_value_stride_channel,
    table_stride_row,
    table_stride_token,
    reach_stride,
    entry_stride,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    TAPS0: tl.constexpr,
    TAPS1: tl.constexpr,
    ENTRIES: tl.constexpr,
    CLAMP: tl.constexpr,
    PLAIN: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """
    LENGTH tokens of each row. WIDTH: of a head, of which the first ROTATED dimensions are rotated. TOKENS is LENGTH,
    rounded up to a power of two, as PAIRS is from half a WIDTH, and PLACES from the columns of a state.
    """
    part = tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    token = tl.arange(0, BLOCK_ROWS * TOKENS)
    row = start + token // TOKENS
    column = token % TOKENS
    tokens = _tokens(
        row,
        column,
        (row < rows) & (column < LENGTH),
        reach_ptr,
        continues_ptr,
        entry_index_ptr,
        entry_valid_ptr,
        reach_stride,
        entry_stride,
        LENGTH,
        ENTRIES,
        PLAIN,
    )
    # behind the last real token of each row its next state begins; a row without one keeps its state
    row = start + tl.arange(0, BLOCK_ROWS)
    here = row < rows
    if PLAIN:
        last = tl.zeros([BLOCK_ROWS], tl.int32) + (LENGTH - 1)
        moves = here
    else:
        last = tl.load(last_ptr + row, here, other=0).to(tl.int32)
        moves = tl.load(has_real_ptr + row, here, other=0) != 0
    ends = _tokens(
        row,
        last,
        here,
        reach_ptr,
        continues_ptr,
        entry_index_ptr,
        entry_valid_ptr,
        reach_stride,
        entry_stride,
        LENGTH,
        ENTRIES,
        PLAIN,
    )
    if part >= HEADS + GROUPS:
        _values(
            part - HEADS - GROUPS,
            tokens,
            ends,
            moves[:, None],
            current_ptr,
            (current_stride_row, current_stride_token),
            delayed_ptr,
            (delayed_stride_row, delayed_stride_token),
            value_state_ptr,
            (value_stride_row, value_stride_channel, 0),
            next_value_ptr,
            (next_value_stride_row, next_value_stride_channel),
            nothing_ptr,
            value_ptr,
            LENGTH,
            GROUPS,
            WIDTH,
            PAIRS,
            PLAIN,
        )
    else:
        _head(
            part,
            tokens,
            ends,
            moves[:, None],
            raw_ptr,
            (raw_stride_row, raw_stride_token),
            qk_state_ptr,
            (qk_stride_row, qk_stride_channel, qk_stride_column),
            next_qk_ptr,
            (next_qk_stride_row, next_qk_stride_channel, next_qk_stride_column),
            depthwise_weight_ptr,
            depthwise_bias_ptr,
            grouped_weight_ptr,
            grouped_bias_ptr,
            temperature_ptr,
            cos_ptr,
            sin_ptr,
            (table_stride_row, table_stride_token),
            query_ptr,
            key_ptr,
            LENGTH,
            HEADS,
            GROUPS,
            WIDTH,
            ROTATED,
            TAPS0,
            TAPS1,
            CLAMP,
            PLAIN,
            BLOCK_ROWS * TOKENS,
            PAIRS,
            PLACES,
            BLOCK_K,
            BLOCK_C,
        )
