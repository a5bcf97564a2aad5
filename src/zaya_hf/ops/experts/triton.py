"""The experts' kernels: sorting, the two grouped products, and two for decoding.

Rows are sorted by expert. A tile is a block of one expert's rows and a block of columns; how many tiles there are is
known on the device alone, so the grid is an upper bound that follows from shapes, and programs beyond do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.triton import blocks_of, dot, launch, narrowed, sigmoid
from . import configs


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of fp32."""
    if ACTIVATION == "silu":
        share = sigmoid(x)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # gelu_tanh: 0.5 (1 + tanh(u)) is the sigmoid of 2 u
        share = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    return x * share


@triton.jit
def chiplet_order(pid, total, CHIPLETS: tl.constexpr):
    """Which of `total` tiles a program takes. Programs are dealt to chiplets in turn; each chiplet gets one run of
    tiles, as even as can be, so that what neighbouring tiles share is in one L2."""
    chiplet = pid % CHIPLETS
    return chiplet * (total // CHIPLETS) + tl.minimum(chiplet, total % CHIPLETS) + pid // CHIPLETS


@triton.jit
def find_tile(
    offsets,
    columns,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHIPLETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The tile of this program: expert (EXPERTS: none is left), first row, end of the expert's rows, block of columns.
    For a program without a tile the first row is its number among those instead."""
    pid = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    starts = tl.load(offsets + experts, mask=experts < EXPERTS, other=0)
    ends = tl.load(offsets + experts + 1, mask=experts < EXPERTS, other=0)
    rows = (ends - starts + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(rows, 0) * columns  # tiles of this expert and those before
    total = tl.sum(rows, 0) * columns
    tile = tl.where(pid < total, chiplet_order(pid, total, CHIPLETS), pid)
    expert = tl.sum(((until <= tile) & (experts < EXPERTS)).to(tl.int32), 0)
    mine = experts == expert
    start = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    count = tl.sum(tl.where(mine, rows, 0), 0)
    tile -= tl.sum(tl.where(mine, until - rows * columns, 0), 0)
    # within an expert: GROUP tiles below each other, then the next columns
    above = tile // (GROUP * columns) * GROUP
    height = tl.maximum(tl.minimum(count - above, GROUP), 1)
    within = tile % (GROUP * columns)
    row = tl.where(expert < EXPERTS, start + (above + within % height) * BLOCK_M, pid - total)
    return expert, row, end, within // height


@triton.jit
def load_groups(slots, token, until, EXPERTS: tl.constexpr):
    """The slots of tokens before `until`: EXPERTS for those that skip, EXPERTS + 1 for those from `until` on."""
    slot = tl.load(slots + token, mask=token < until, other=EXPERTS)
    slot = tl.where((slot < 0) | (slot > EXPERTS), EXPERTS, slot).to(tl.int32)
    return tl.where(token < until, slot, EXPERTS + 1)


@triton.jit
def sort_kernel(
    slots, order, offsets, tokens,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A stable counting sort in one launch: every program counts all tokens and places its own. Skipped tokens come
    last; offsets ``[E + 1]`` say where each expert's rows begin, the last where the skipped begin."""
    begin = tl.program_id(0) * BLOCK
    groups = tl.arange(0, PADDED)
    each = tl.arange(0, CHUNK)
    whole = begin // CHUNK * CHUNK
    before = tl.zeros((PADDED,), tl.int32)
    for first in range(0, whole, CHUNK):
        before += tl.histogram(load_groups(slots, first + each, tokens, EXPERTS), PADDED)
    total = before
    before += tl.histogram(load_groups(slots, whole + each, begin, EXPERTS), PADDED)
    for first in range(whole, tokens, CHUNK):
        total += tl.histogram(load_groups(slots, first + each, tokens, EXPERTS), PADDED)
    starts = tl.cumsum(total, 0) - total
    token = begin + tl.arange(0, BLOCK)
    group = load_groups(slots, token, tokens, EXPERTS)
    chosen = (group[:, None] == groups[None, :]).to(tl.int32)
    rank = tl.cumsum(chosen, 0) - 1 + (starts + before)[None, :]
    place = tl.sum(chosen * rank, 1)
    tl.store(order + place, token, mask=token < tokens)
    written = tl.where(begin == 0, EXPERTS + 1, 0)
    tl.store(offsets + groups, starts, mask=groups < written)


@triton.jit
def gate_up_kernel(
    x, order, offsets, weight, hidden, pre, x_row, weight_expert, weight_row, width, inner,
    SAVES: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHIPLETS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """``hidden = act(x Wg') (x Wu')`` for sorted rows; `pre` gets both products if it SAVES them."""
    expert, row, end, column = find_tile(offsets, tl.cdiv(inner, BLOCK_N), EXPERTS, PADDED, CHIPLETS, BLOCK_M, GROUP)
    if expert < EXPERTS:
        rows = row + tl.arange(0, BLOCK_M)
        token = tl.load(order + tl.minimum(rows, end - 1)).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        x_at = x + token[:, None] * x_row + depth[None, :]
        # rows of the weight beyond its end: the last again, as their results are not stored
        inside = tl.minimum(columns, inner - 1)
        weight += expert.to(tl.int64) * weight_expert
        gate_at = weight + inside[None, :] * weight_row + depth[:, None]
        up_at = gate_at + inner * weight_row
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, width, BLOCK_K):
            if EVEN:
                a = tl.load(x_at)
                gate = dot(a, tl.load(gate_at), gate)
                up = dot(a, tl.load(up_at), up)
            else:
                left = width - k
                a = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
                gate = dot(a, tl.load(gate_at, mask=depth[:, None] < left, other=0.0), gate)
                up = dot(a, tl.load(up_at, mask=depth[:, None] < left, other=0.0), up)
            x_at += BLOCK_K
            gate_at += BLOCK_K
            up_at += BLOCK_K
        kept = (rows < end)[:, None] & (columns < inner)[None, :]
        gate = narrowed(gate, hidden.dtype.element_ty)
        up = narrowed(up, hidden.dtype.element_ty)
        # one wide offset for the tile, narrow ones inside it
        first = row.to(tl.int64)
        below = tl.arange(0, BLOCK_M)[:, None]
        if SAVES:
            pre += first * (2 * inner)
            at = below * (2 * inner) + columns[None, :]
            tl.store(pre + at, gate, mask=kept)
            tl.store(pre + at + inner, up, mask=kept)
        value = activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
        hidden += first * inner
        tl.store(hidden + below * inner + columns[None, :], narrowed(value, hidden.dtype.element_ty), mask=kept)


@triton.jit
def scatter_product_kernel(
    a, order, offsets, weight, scale, out, weight_expert, weight_row, width, outer, tokens,
    SCALES: tl.constexpr, ACROSS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHIPLETS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sorted rows ``[., width]`` times the rows of each expert's weight, or its columns if ACROSS, to ``[., outer]``;
    scaled, and put to the tokens' places. Skipped tokens get zeros from the programs that have no tile."""
    blocks = tl.cdiv(outer, BLOCK_N)
    expert, row, end, column = find_tile(offsets, blocks, EXPERTS, PADDED, CHIPLETS, BLOCK_M, GROUP)
    if expert < EXPERTS:
        rows = row + tl.arange(0, BLOCK_M)
        inside = tl.minimum(rows, end - 1)
        token = tl.load(order + inside).to(tl.int64)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        a_at = a + inside.to(tl.int64)[:, None] * width + depth[None, :]
        weight += expert.to(tl.int64) * weight_expert
        if ACROSS:
            weight_at = weight + depth[:, None] * weight_row + columns[None, :]
            step = BLOCK_K * weight_row
        else:
            weight_at = weight + tl.minimum(columns, outer - 1)[None, :] * weight_row + depth[:, None]
            step = BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, width, BLOCK_K):
            if EVEN:
                acc = dot(tl.load(a_at), tl.load(weight_at), acc)
            else:
                left = width - k
                inner_mask = depth[:, None] < left
                if ACROSS:
                    inner_mask = inner_mask & (columns < outer)[None, :]
                left_rows = tl.load(a_at, mask=depth[None, :] < left, other=0.0)
                acc = dot(left_rows, tl.load(weight_at, mask=inner_mask, other=0.0), acc)
            a_at += BLOCK_K
            weight_at += step
        if SCALES:
            # rounded as the product is, then once more as the scaled one
            acc = narrowed(acc, out.dtype.element_ty).to(tl.float32) * tl.load(scale + token).to(tl.float32)[:, None]
        kept = (rows < end)[:, None] & (columns < outer)[None, :]
        tl.store(out + token[:, None] * outer + columns[None, :], narrowed(acc, out.dtype.element_ty), mask=kept)
    else:
        rows = tl.load(offsets + EXPERTS) + row // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = row % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tl.load(order + rows, mask=rows < tokens, other=0).to(tl.int64)
        kept = (rows < tokens)[:, None] & (columns < outer)[None, :]
        zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
        tl.store(out + token[:, None] * outer + columns[None, :], zeros, mask=kept)


@triton.jit
def leads(slots, token, tokens, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Of a decoding token: its slot, whether it is the first that goes to that expert, and which tokens go there."""
    rows = tl.arange(0, ROWS)
    slot = tl.load(slots + token)
    same = (tl.load(slots + rows, mask=rows < tokens, other=-1) == slot) & (rows < tokens)
    first = tl.sum((same & (rows < token)).to(tl.int32), 0) == 0
    return slot, first & (slot >= 0) & (slot < EXPERTS), same


@triton.jit
def decode_gate_up_kernel(
    x, slots, weight, hidden, x_row, weight_expert, weight_row, width, inner, tokens,
    ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `gate_up_kernel` for up to ROWS tokens in their own order. The first token of each expert takes all of them:
    every weight is read once."""
    slot, leads_here, same = leads(slots, tl.program_id(1), tokens, EXPERTS, ROWS)
    if leads_here:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(columns, inner - 1)
        depth = tl.arange(0, BLOCK_K)
        weight += slot.to(tl.int64) * weight_expert
        if ROWS == 1:
            gate_at = weight + inside[:, None] * weight_row + depth[None, :]
            gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for k in range(0, width, BLOCK_K):
                within = depth < width - k
                a = tl.load(x + k + depth, mask=within, other=0.0).to(tl.float32)[None, :]
                gate += a * tl.load(gate_at + k, mask=within[None, :], other=0.0).to(tl.float32)
                up += a * tl.load(gate_at + inner * weight_row + k, mask=within[None, :], other=0.0).to(tl.float32)
            gate = narrowed(tl.sum(gate, 1), hidden.dtype.element_ty).to(tl.float32)
            up = narrowed(tl.sum(up, 1), hidden.dtype.element_ty).to(tl.float32)
            value = activate(gate, ACTIVATION) * up
            tl.store(hidden + columns, narrowed(value, hidden.dtype.element_ty), mask=columns < inner)
        else:
            rows = tl.arange(0, ROWS)
            gate_at = weight + inside[None, :] * weight_row + depth[:, None]
            x_at = x + rows.to(tl.int64)[:, None] * x_row + depth[None, :]
            gates = tl.zeros((ROWS, BLOCK_N), tl.float32)
            ups = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for k in range(0, width, BLOCK_K):
                left = width - k
                a = tl.load(x_at + k, mask=same[:, None] & (depth[None, :] < left), other=0.0)
                within = depth[:, None] < left
                gates = dot(a, tl.load(gate_at + k, mask=within, other=0.0), gates)
                ups = dot(a, tl.load(gate_at + inner * weight_row + k, mask=within, other=0.0), ups)
            gates = narrowed(gates, hidden.dtype.element_ty).to(tl.float32)
            ups = narrowed(ups, hidden.dtype.element_ty).to(tl.float32)
            values = activate(gates, ACTIVATION) * ups
            kept = same[:, None] & (columns < inner)[None, :]
            tl.store(
                hidden + rows[:, None] * inner + columns[None, :], narrowed(values, hidden.dtype.element_ty), mask=kept
            )


@triton.jit
def decode_down_kernel(
    hidden, slots, weight, scale, out, weight_expert, weight_row, inner, width, tokens,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The second product, scaled; zeros for a token that skips."""
    token = tl.program_id(1)
    slot, leads_here, same = leads(slots, token, tokens, EXPERTS, ROWS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    if leads_here:
        inside = tl.minimum(columns, width - 1)
        weight += slot.to(tl.int64) * weight_expert
        if ROWS == 1:
            weight_at = weight + inside[:, None] * weight_row + depth[None, :]
            acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for k in range(0, inner, BLOCK_K):
                within = depth < inner - k
                a = tl.load(hidden + k + depth, mask=within, other=0.0).to(tl.float32)[None, :]
                acc += a * tl.load(weight_at + k, mask=within[None, :], other=0.0).to(tl.float32)
            value = narrowed(tl.sum(acc, 1), out.dtype.element_ty).to(tl.float32) * tl.load(scale).to(tl.float32)
            tl.store(out + columns, narrowed(value, out.dtype.element_ty), mask=columns < width)
        else:
            rows = tl.arange(0, ROWS)
            weight_at = weight + inside[None, :] * weight_row + depth[:, None]
            a_at = hidden + rows[:, None] * inner + depth[None, :]
            accs = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for k in range(0, inner, BLOCK_K):
                left = inner - k
                a = tl.load(a_at + k, mask=same[:, None] & (depth[None, :] < left), other=0.0)
                accs = dot(a, tl.load(weight_at + k, mask=depth[:, None] < left, other=0.0), accs)
            factor = tl.load(scale + rows, mask=same, other=0.0).to(tl.float32)
            values = narrowed(accs, out.dtype.element_ty).to(tl.float32) * factor[:, None]
            kept = same[:, None] & (columns < width)[None, :]
            tl.store(out + rows[:, None] * width + columns[None, :], narrowed(values, out.dtype.element_ty), mask=kept)
    elif (slot < 0) | (slot >= EXPERTS):
        zeros = tl.zeros((BLOCK_N,), out.dtype.element_ty)
        tl.store(out + token * width + columns, zeros, mask=columns < width)


def sort(slots: Tensor, experts: int, chosen: KernelConfig) -> tuple[Tensor, Tensor]:
    """Tokens sorted by expert, ``[N]`` int32, skipped ones last, and where each expert's begin, ``[E + 1]`` int32."""
    tokens = slots.shape[0]
    order = torch.empty(tokens, dtype=torch.int32, device=slots.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=slots.device)
    grid = (blocks_of(tokens, chosen["BLOCK"]),)
    padded = triton.next_power_of_2(experts + 2)
    launch(sort_kernel, grid, chosen, slots, order, offsets, tokens, EXPERTS=experts, PADDED=padded)
    return order, offsets


def constants_of(weight: Tensor) -> dict[str, int]:
    """What every kernel over tiles is compiled for: the experts, and the chiplets of the device."""
    experts = weight.shape[0]
    nvidia = weight.device.type == "cuda" and torch.version.hip is None
    return {
        "EXPERTS": experts,
        "PADDED": triton.next_power_of_2(experts),
        "CHIPLETS": 1 if nvidia else configs.CHIPLETS,
    }


def tiles_of(tokens: int, experts: int, block: int) -> int:
    """Blocks of rows that there can be at most, whatever the routing: of the experts and of those that skip."""
    return blocks_of(tokens, block) + min(tokens, experts)


def dense_rows(x: Tensor) -> Tensor:
    """`x` with neighbouring values in its last dimension; a copy if that is not so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def gate_up(
    x: Tensor,
    order: Tensor,
    offsets: Tensor,
    weight: Tensor,
    activation: str,
    pre: Tensor | None,
    chosen: KernelConfig,
) -> Tensor:
    """Hidden values ``[N, I]`` of sorted rows; those of skipped tokens stay as the memory was. `pre` ``[N, 2 I]``: gets
    what the activation is given."""
    (tokens, width), inner = x.shape, weight.shape[1] // 2
    hidden = x.new_empty(tokens, inner)
    grid = (tiles_of(tokens, weight.shape[0], chosen["BLOCK_M"]) * blocks_of(inner, chosen["BLOCK_N"]),)
    launch(
        gate_up_kernel, grid, chosen, x, order, offsets, weight, hidden, pre,
        x.stride(0), *weight.stride()[:2], width, inner,
        SAVES=pre is not None, ACTIVATION=activation, EVEN=width % chosen["BLOCK_K"] == 0, **constants_of(weight),
    )  # fmt: skip
    return hidden


def scatter_product(
    a: Tensor,
    order: Tensor,
    offsets: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    chosen: KernelConfig,
    across: bool = False,
) -> Tensor:
    """Sorted rows `a` times each expert's weight, at the tokens' places: ``[N, outer]``.

    Args:
        a: contiguous, ``[N, width]``.
        order, offsets: of `sort`.
        weight: ``[E, outer, width]``, or ``[E, width, outer]`` if `across`.
        scale: ``[N]`` by token.
        chosen: the configuration.
        across: multiply by columns.
    """
    (tokens, width), outer = a.shape, weight.shape[2 if across else 1]
    out = a.new_empty(tokens, outer)
    grid = (tiles_of(tokens, weight.shape[0], chosen["BLOCK_M"]) * blocks_of(outer, chosen["BLOCK_N"]),)
    even = width % chosen["BLOCK_K"] == 0 and (not across or outer % chosen["BLOCK_N"] == 0)
    launch(
        scatter_product_kernel, grid, chosen, a, order, offsets, weight, scale, out, *weight.stride()[:2], width, outer,
        tokens, SCALES=scale is not None, ACROSS=across, EVEN=even, **constants_of(weight),
    )  # fmt: skip
    return out


def decode_gate_up(x: Tensor, slots: Tensor, weight: Tensor, activation: str, chosen: KernelConfig) -> Tensor:
    """Hidden values ``[N, I]`` of at most 16 tokens, in their order."""
    (tokens, width), inner = x.shape, weight.shape[1] // 2
    hidden = x.new_empty(tokens, inner)
    launch(
        decode_gate_up_kernel, (blocks_of(inner, chosen["BLOCK_N"]), tokens), chosen, x, slots, weight, hidden,
        x.stride(0), *weight.stride()[:2], width, inner, tokens,
        ACTIVATION=activation, EXPERTS=weight.shape[0], ROWS=1 if tokens == 1 else configs.DECODING_TOKENS,
    )  # fmt: skip
    return hidden


def decode_down(hidden: Tensor, slots: Tensor, weight: Tensor, scale: Tensor, chosen: KernelConfig) -> Tensor:
    """The result ``[N, D]`` of at most 16 tokens."""
    (tokens, inner), width = hidden.shape, weight.shape[1]
    out = hidden.new_empty(tokens, width)
    launch(
        decode_down_kernel, (blocks_of(width, chosen["BLOCK_N"]), tokens), chosen, hidden, slots, weight, scale, out,
        *weight.stride()[:2], inner, width, tokens, EXPERTS=weight.shape[0],
        ROWS=1 if tokens == 1 else configs.DECODING_TOKENS,
    )  # fmt: skip
    return out
