"""Attention and CCA over a forest of texts (`token_tree`), for ZAYA and for transformers' own model classes.

The forest is one packed row. On CPU its attention is computed in blocks: a long stretch sees itself causally and is
seen whole by all that goes on from it, small neighbours are one product with a mask; the softmaxes of a token's blocks
are put together by how much of the whole each has seen. Elsewhere there is one mask over all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import prepared_masks
from .attention import _FLASH_ON_CPU, Plan, _for_every_query_head
from .token_tree import TokenTree
from .visibility import Visibility, look_back

#: name under which transformers' classes find `_attention`
NAME = "zaya_token_tree"

#: neighbours of up to so many tokens together are one product with a mask: cheaper than a call for each
SMALL = 192

#: arguments of attention functions that change the result and that blocks do not know
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass
class Block:
    """Queries and keys of one call, as half-open ranges of tokens.

    Attributes:
        kind: "causal" (the same range), "full" (every query sees every key) or "masked".
        first: whether no block before it has these queries.
    """

    kind: str
    queries: tuple[int, int]
    keys: tuple[int, int]
    first: bool


@dataclass
class Taken:
    """What a forward pass leaves behind, per layer in their order.

    Attributes:
        keys, values: ``[1, G, T, D]``.
        states: for CCA, raw query/key columns ``[1, T, C]`` and delayed values ``[1, T, W]``.
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class TreePlan(Plan):
    """Attention over a forest in the place of a mask."""

    tree: TokenTree | None = None
    #: of sliding layers: a token sees itself and the `window` - 1 tokens before it
    window: int | None = None
    taken: Taken | None = None
    _blocks: list[Block] | None = None
    _masks: dict[Any, Tensor] = field(default_factory=dict)

    def takes(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        if self.taken is not None:
            return True  # only `attend` takes keys and values
        return self._in_blocks(query, key, dropout)

    def _in_blocks(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        wanted = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        same = query.dtype == key.dtype and query.shape[2] == key.shape[2] == self.keys
        return _FLASH_ON_CPU is not None and same and not dropout and not wanted and query.device.type == "cpu"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float) -> Tensor:
        if self.taken is not None:
            self.taken.keys.append(key)
            self.taken.values.append(value)
        if not self._in_blocks(query, key, dropout):
            key, value = _for_every_query_head(query.shape[1], key, value)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=self.mask(query.device), dropout_p=dropout, scale=scaling
            )
            return output.transpose(1, 2)
        return self._attend_in_blocks(query, key, value, scaling).transpose(1, 2)

    def _attend_in_blocks(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert _FLASH_ON_CPU is not None
        heads, tokens = query.shape[1:3]
        wide_key, wide_value = _for_every_query_head(heads, key, value)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        seen = query.new_empty(1, heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        if self._blocks is None:
            self._blocks = blocks(self.tree)
        for block in self._blocks:
            start, end = block.queries
            queries, keys = query[:, :, start:end], slice(*block.keys)
            mask = self._mask_of(block, query.dtype)
            if block.kind == "full" and mask is None:
                # All queries of one key head see all of the keys, so they are rows of one product.
                rows = queries.reshape(1, key.shape[1], -1, query.shape[-1])
                part, part_seen = _FLASH_ON_CPU(rows, key[:, :, keys], value[:, :, keys], 0.0, False, scale=scaling)
                part, part_seen = part.reshape(queries.shape), part_seen.reshape(1, heads, end - start)
            else:
                causal = block.kind == "causal" and mask is None
                part, part_seen = _FLASH_ON_CPU(
                    queries,
                    wide_key[:, :, keys],
                    wide_value[:, :, keys],
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=scaling,
                )
            if mask is not None and block.kind == "full":  # a window may leave a query nothing to see here
                nothing = ~(mask > -torch.inf).any(-1)
                part = part.masked_fill(nothing[..., None], 0)
                part_seen = part_seen.masked_fill(nothing, -torch.inf)
            held, held_seen = output[:, :, start:end], seen[:, :, start:end]
            if block.first:
                held.copy_(part)
                held_seen.copy_(part_seen)
            else:
                share = torch.sigmoid(part_seen - held_seen)[..., None].to(part.dtype)
                held.lerp_(part, share)
                held_seen.copy_(torch.logaddexp(held_seen, part_seen))
        return output

    def _mask_of(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a block, ``[1, 1, queries, keys]``; None: nothing is hidden, or the kernel's
        own causal mask says it all."""
        key = (block.kind, block.queries, block.keys, dtype)
        if key in self._masks:
            return self._masks[key]
        assert self.tree is not None
        rows, columns = (np.arange(*span) for span in (block.queries, block.keys))
        positions = self.tree.positions
        ages = positions[rows][:, None] - positions[columns]
        hidden = None
        if self.window is not None and ages.max() >= self.window:
            hidden = ages >= self.window
            if block.kind == "causal":
                hidden |= ages < 0
        if block.kind == "masked":
            not_on_the_way = ~_on_the_way(self.tree, rows)
            hidden = not_on_the_way if hidden is None else hidden | not_on_the_way
        if hidden is None:
            return None
        mask = torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        self._masks[key] = mask
        return mask


def blocks(tree: TokenTree | None) -> list[Block]:
    """The calls that together are attention over `tree`; those that have a query first come first."""
    assert tree is not None
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(segment)
    starts, ends, subtree_ends = (values.tolist() for values in (tree.starts, tree.ends, tree.subtree_ends))
    first, later = [], []
    siblings = [children[-1]]
    while siblings:
        together: list[int] = []
        for segment in siblings.pop():
            size = subtree_ends[segment] - starts[segment]
            if together and subtree_ends[segment] - starts[together[0]] > SMALL:
                first.append(_joined(together, starts, ends, subtree_ends))
                together = []
            if size <= SMALL:
                together.append(segment)
                continue
            if together:
                first.append(_joined(together, starts, ends, subtree_ends))
                together = []
            own, rest = (starts[segment], ends[segment]), (ends[segment], subtree_ends[segment])
            first.append(Block("causal", own, own, first=True))
            if segment in children:
                later.append(Block("full", rest, own, first=False))
                siblings.append(children[segment])
        if together:
            first.append(_joined(together, starts, ends, subtree_ends))
    return first + later


def _joined(segments: list[int], starts: list[int], ends: list[int], subtree_ends: list[int]) -> Block:
    span = starts[segments[0]], subtree_ends[segments[-1]]
    alone = len(segments) == 1 and ends[segments[0]] == subtree_ends[segments[0]]
    return Block("causal" if alone else "masked", span, span, first=True)


def _on_the_way(tree: TokenTree, rows: np.ndarray) -> np.ndarray:
    """``[n, n]`` bool for n neighbouring tokens that are whole subtrees: whether the column's is on the way to the
    row's."""
    first, last = int(rows[0]), int(rows[-1])
    allowed = np.zeros((len(rows), len(rows)), dtype=bool)
    segment = int(np.searchsorted(tree.starts, first, side="left"))
    while segment < len(tree.starts) and tree.starts[segment] <= last:
        start, end, rest = (int(values[segment]) - first for values in (tree.starts, tree.ends, tree.subtree_ends))
        allowed[start:rest, start:end] = True
        allowed[start:end, start:end] = np.tri(end - start, dtype=bool)
        segment += 1
    return allowed


@dataclass(eq=False)
class Ghosts:
    """CCA's look-back where a segment's predecessors do not lie directly before it: copies of them are put there for
    the convolutions and taken out again behind them.

    Attributes:
        source: ``[T + ghosts]`` int64, which token is where.
        reach: ``[1, T + ghosts]`` int64, see `visibility`.
        kept: ``[T]`` int64, where the tokens themselves are.
        taken: what the layers leave behind; None: nothing.
    """

    source: Tensor
    reach: Tensor
    kept: Tensor
    taken: Taken | None = None

    def to(self, device: Any, non_blocking: bool = False) -> Ghosts:
        source, reach, kept = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (self.source, self.reach, self.kept)
        )
        return Ghosts(source, reach, kept, self.taken)


def ghosts(tree: TokenTree, width: int) -> Ghosts:
    """For a look-back of `width` tokens."""
    source, reach, kept = [], [], []
    offset = 0
    for segment in range(len(tree.starts)):
        start, end, parent = int(tree.starts[segment]), int(tree.ends[segment]), int(tree.parents[segment])
        tokens = np.arange(start, end)
        directly = parent >= 0 and int(tree.ends[parent]) == start  # then what lies before it is its past
        before = tree.path(parent, width) if parent >= 0 and not directly else tokens[:0]
        source += [before, tokens]
        past = min(width, int(tree.positions[start]))
        reach += [np.arange(len(before)), np.minimum(np.arange(end - start) + past, width)]
        kept.append(np.arange(offset + len(before), offset + len(before) + end - start))
        offset += len(before) + end - start
    found = (torch.from_numpy(np.concatenate(values)) for values in (source, reach, kept))
    where, steps, places = found
    return Ghosts(where, steps[None], places)


def zaya_masks(tree: TokenTree, config: Any, taken: Taken | None = None, device: Any = "cpu") -> dict[str, Any]:
    """What a ZAYA model takes as `attention_mask` with `tree.ids` as its only row, without a cache.

    Args:
        config: the model's `ZayaConfig`.
        taken: is filled with the keys, values and columns of all layers.
    """
    extra = ghosts(tree, look_back(config))
    extra.taken = taken
    positions = torch.from_numpy(tree.positions)[None]
    visible = Visibility(1, len(tree), positions, segment=torch.from_numpy(tree.segment_of())[None], ghosts=extra)
    visible = visible.to(device)
    windows = {"hybrid": None, "hybrid_sliding": config.sliding_window}
    visible.masks = {
        layer_type: plan(tree, windows[layer_type], taken) for layer_type in dict.fromkeys(config.layer_types)
    }
    return prepared_masks.to_dict(visible)


def plan(tree: TokenTree, window: int | None = None, taken: Taken | None = None) -> TreePlan:
    """Attention over `tree` for layers with that window."""

    def make_mask() -> Tensor:
        allowed = tree.allowed()
        if window is not None:
            allowed &= tree.positions[:, None] - tree.positions < window
        return torch.from_numpy(allowed)[None, None]

    return TreePlan(len(tree), make_mask, tree=tree, window=window, taken=taken)


# ------------------------------------------------------------------------------------------ transformers' own classes
@dataclass(eq=False)
class _Reading:
    """The forest that a model of transformers is reading: a plan for every window that its layers have."""

    tree: TokenTree
    taken: Taken | None
    plans: dict[int | None, TreePlan] = field(default_factory=dict)

    def plan(self, window: int | None) -> TreePlan:
        if window not in self.plans:
            self.plans[window] = plan(self.tree, window, self.taken)
        return self.plans[window]


_reading: ContextVar[_Reading | None] = ContextVar("zaya_token_tree", default=None)


def can_read(model: PreTrainedModel) -> bool:
    """Whether the class lets its attention be replaced. Whether that is enough for forests, only a trial tells."""
    supported = getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)
    in_chunks = getattr(model.config.get_text_config(), "attention_chunk_size", None)  # masked by blocks of positions
    return bool(supported) and not in_chunks


def prepare(model: PreTrainedModel) -> None:
    """Make a model of transformers able to read forests; for everything else its attention is sdpa."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


@contextmanager
def reading(tree: TokenTree, taken: Taken | None = None) -> Iterator[None]:
    """Inside, a prepared model's forward pass takes its row for `tree`."""
    before = _reading.set(_Reading(tree, taken))
    try:
        yield
    finally:
        _reading.reset(before)


def _mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """In the place of a mask, the plan for layers of this window."""
    now = _reading.get()
    if now is not None:
        return now.plan(local_size)
    return sdpa_mask(*args, **kwargs, local_size=local_size)  # type: ignore[misc]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, TreePlan):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    # A model whose mask was not made by `_mask` never comes here, and fails the trial.
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"attention over forests of texts does not know {unknown[0]}.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_mask.attend(query, key, value, dropout, scaling), None
