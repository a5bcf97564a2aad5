"""Which earlier tokens every token may see: documents, padding, cached rows and attention masks, in one place.

CCA looks back ``k0 + k1 - 2`` tokens in its query/key convolutions and one token in its value. Left pads, right pads, packed
documents, caches and custom masks all ask the same question: which of those predecessors exist for this token? The answer
is computed here once per forward pass, from whatever the caller gave, and every layer reads it.

Terms (``B`` rows, ``S`` tokens in this call, ``L`` cached tokens):

``segment[B, S]``
    Document of each token, counted upwards over the life of a row; -1 for padding.
``reach[B, S]``
    How many tokens directly before this one, *in this call*, are real and of the same document, capped at the look-back.
    Tokens of earlier calls reach the operators as states (see `zaya_hf.cache`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

PADDING = -1


@dataclass
class RowHistory:
    """Segment and position of every cached token. Both are ``[B, L]`` int64, or None while each row is one unpadded
    document at positions 0 ... L-1, which is what `length` alone says."""

    length: int = 0
    segments: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    _slots: dict[tuple[int, int], int] = field(default_factory=dict)

    def materialise(self, batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Segments and positions of the cached tokens, both ``[B, L]``."""
        if self.segments is None or self.positions is None:
            positions = torch.arange(self.length, device=device).expand(batch_size, -1)
            return torch.zeros_like(positions), positions
        return self.segments, self.positions

    def extend(self, visibility: Visibility) -> None:
        """Append the tokens of one call."""
        if visibility.is_plain:
            self.length += visibility.sequence_length
            return
        segments, positions = self.materialise(visibility.batch_size, visibility.segment.device)
        self.segments = torch.cat([segments, visibility.segment], dim=1)
        self.positions = torch.cat([positions, visibility.position_ids.expand_as(visibility.segment)], dim=1)
        self.length = self.segments.shape[1]

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row."""
        self._slots = {}
        self.length -= tokens
        if self.segments is not None and self.positions is not None:
            self.segments, self.positions = self.segments[:, : self.length], self.positions[:, : self.length]

    def has_holes(self) -> bool:
        """Whether some row has padding after a real token (right padding, for one)."""
        if self.segments is None:
            return False
        real = self.segments != PADDING
        return bool((~real & (real.cumsum(1) > 0)).any())

    def last_run(self, limit: int) -> torch.Tensor | None:
        """``[B]``: how many real tokens of one document end each row, at most `limit`; None if only the length counts."""
        if self.segments is None:
            return None
        tail = self.segments[:, self.length - min(limit, self.length) :]
        same = (tail == tail[:, -1:]) & (tail != PADDING)
        return same.flip(1).cumprod(1).sum(1)

    def slots_for(self, tokens: int) -> int:
        """How many slots at the end hold the last `tokens` real tokens of every row: more than `tokens` where padding lies
        between them."""
        if self.segments is None or not tokens:
            return tokens
        if (self.length, tokens) not in self._slots:  # many layers ask the same once per call
            real = self.segments != PADDING
            from_end = real.flip(1).long().cumsum(1).flip(1)  # real tokens from each slot to the end
            columns = torch.arange(self.length, device=real.device).expand_as(real)
            first = torch.where(real & (from_end <= tokens), columns, self.length)
            self._slots = {(self.length, tokens): max(tokens, self.length - int(first.amin() if first.numel() else self.length))}
        return self._slots[self.length, tokens]

    def map_rows(self, fn) -> None:
        """Apply `fn` (index_select, repeat_interleave ... along dim 0) to the rows."""
        if self.segments is not None and self.positions is not None:
            self.segments, self.positions = fn(self.segments), fn(self.positions)
        self._slots = {}


@dataclass
class Visibility:
    """What one forward pass may see. Tensors that are None are trivial: see `is_plain` and `reach`."""

    batch_size: int
    sequence_length: int
    #: positions for RoPE, ``[B or 1, S]`` int64
    position_ids: torch.Tensor
    #: ``[B, S]`` int64; None when every row is one unpadded document that continues its cache
    segment: torch.Tensor | None = None
    #: ``[B, S]`` int64, capped at the look-back; None when every earlier token is in reach
    reach: torch.Tensor | None = None
    #: ``[B]`` bool: the first real token of the row continues the cached document; None without a cache, or when all do
    continues: torch.Tensor | None = None
    #: ``[B, K]`` flat indices (``row * S + column``) of the first K tokens after the cached ones, and whether each exists
    entry_index: torch.Tensor | None = None
    entry_valid: torch.Tensor | None = None
    #: ``[B]`` column of the last real token, and whether the row has any; None: the last column, and all have
    last: torch.Tensor | None = None
    has_real: torch.Tensor | None = None
    #: attention mask by layer type, in the form that the attention implementation wants
    masks: dict[str, Any] | None = None
    #: keys that each layer type's mask covers, the cached ones included
    key_lengths: dict[str, int] = field(default_factory=dict)
    #: extra arguments for variable-length attention backends
    attention_kwargs: dict[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Every row is one unpadded document whose positions go on from the cache."""
        return self.segment is None

    @property
    def real(self) -> torch.Tensor | None:
        """``[B, S]`` bool, False for padding; None when there is none."""
        return None if self.segment is None else self.segment != PADDING


def look_back(config) -> int:
    """Tokens that CCA needs before a token: the convolutions' receptive field, and one for the delayed value."""
    return max(config.cca_time0 + config.cca_time1 - 2, 1)


# ------------------------------------------------------------------------------------------------- from arguments
def describe(
    config,
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device,
    dtype: torch.dtype,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    history: RowHistory | None = None,
    cache=None,
) -> Visibility:
    """Turn the caller's arguments into a `Visibility`.

    Args:
        attention_mask: None; ``[B, S]`` or ``[B, L + S]`` with 0 for padding; a 4-D mask ``[B or 1, heads or 1, S, L + S]``,
            bool (True: may attend) or additive.
        position_ids: ``[S]`` or ``[B or 1, S]``. A position that does not follow its predecessor's starts a document.
        cu_seq_lens: cumulative document lengths of one row, ``[documents + 1]``; documents may be empty.
        history: the cached tokens, None without a cache.
        cache: the cache itself, for the key lengths of its layers.

    Raises:
        ValueError: for shapes that fit nothing above.
    """
    past = 0 if history is None else history.length
    shape = (batch_size, sequence_length)
    if position_ids is not None:
        position_ids = _check_positions(position_ids, shape)
    mask_2d, mask_4d = _split_mask(attention_mask, shape, past)
    if cu_seq_lens is not None:
        _check_cu_seq_lens(cu_seq_lens, shape, past)
        if position_ids is None:
            position_ids = _positions_from_cu_seq_lens(cu_seq_lens, sequence_length, device)

    if _is_plain(mask_2d, mask_4d, position_ids, cu_seq_lens, history, past, sequence_length):
        plain_positions = torch.arange(past, past + sequence_length, device=device)[None]
        visibility = Visibility(*shape, position_ids=plain_positions)
        visibility.masks = _masks(config, visibility, None, past, cache, dtype, device)
        return visibility

    old_segments, old_positions = (history or RowHistory()).materialise(batch_size, device)
    if mask_2d is not None and mask_2d.shape[1] == past + sequence_length:
        old_segments = old_segments.masked_fill(~mask_2d[:, :past], PADDING)
        mask_2d = mask_2d[:, past:]

    if mask_4d is not None:
        allowed = _as_bool(mask_4d).any(1).expand(batch_size, -1, -1)
        real = allowed.diagonal(past, 1, 2)
        previous = allowed.diagonal(past - 1, 1, 2) if past else torch.nn.functional.pad(allowed.diagonal(-1, 1, 2), (1, 0))
        starts = real & ~previous
    else:
        real = torch.ones(shape, dtype=torch.bool, device=device) if mask_2d is None else mask_2d
        starts = None

    last_segment, last_position, last_slot, any_cached = _end_of_rows(old_segments, old_positions)
    if position_ids is None:
        position_ids = (last_position[:, None] + real.long().cumsum(1)).clamp_min(0)
    elif starts is None and cu_seq_lens is None:
        starts = _starts_from_positions(position_ids.expand(shape), real, last_position, last_slot, any_cached)
    if cu_seq_lens is not None:
        document = torch.searchsorted(cu_seq_lens[1:].long(), torch.arange(sequence_length, device=device), right=True)
        starts = torch.nn.functional.pad(document[1:] != document[:-1], (1, 0)).expand(shape) & real
    if starts is None:
        starts = torch.zeros_like(real)

    # The first real token of a row that has none cached opens document 0 however it was found.
    opens = real & (real.long().cumsum(1) == 1) & ~any_cached[:, None]
    segment = last_segment.clamp_min(0)[:, None] + (starts & ~opens).long().cumsum(1)
    segment = torch.where(real, segment, PADDING)

    visibility = Visibility(*shape, position_ids=position_ids, segment=segment)
    _fill_reach(visibility, look_back(config), last_segment, any_cached)
    if mask_4d is not None:
        visibility.masks = _given_masks(config, visibility, mask_4d, past, cache, dtype)
    else:
        all_segments = torch.cat([old_segments, segment], dim=1)
        visibility.masks = _masks(config, visibility, all_segments, past, cache, dtype, device)
        visibility.attention_kwargs = _varlen_kwargs(config, segment, past)
    return visibility


def _check_positions(position_ids: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]:
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}; expected [{shape[0]}, {shape[1]}] or [1, {shape[1]}]."
        )
    return position_ids.long()


def _split_mask(mask: Any, shape: tuple[int, int], past: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if mask is None:
        return None, None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        what = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
        raise ValueError(f"attention_mask has {what}; expected a 2-D or a 4-D tensor.")
    batch_size, length = shape
    if mask.ndim == 2:
        if mask.shape[0] != batch_size or mask.shape[1] not in (length, past + length):
            wanted = f"[{batch_size}, {length}]" + (f" or [{batch_size}, {past + length}] (with the cache)" if past else "")
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {wanted}.")
        return mask.bool() if not mask.is_floating_point() else mask > 0, None
    if mask.shape[0] not in (1, batch_size) or mask.shape[2:] != (length, past + length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected [{batch_size} or 1, heads or 1, {length}, {past + length}]."
        )
    return None, mask


def _check_cu_seq_lens(cu_seq_lens: torch.Tensor, shape: tuple[int, int], past: int) -> None:
    if shape[0] != 1 or past:
        what = f"{shape[0]} rows" if shape[0] != 1 else f"a cache of {past} tokens"
        raise ValueError(f"cu_seq_lens describe one row without a cache, but the call has {what}; use position_ids.")
    if cu_seq_lens.ndim != 1 or cu_seq_lens.numel() < 1:
        raise ValueError(f"cu_seq_lens have shape {tuple(cu_seq_lens.shape)}; expected [documents + 1].")
    if is_tracing(cu_seq_lens) or cu_seq_lens.device.type != "cpu":
        return
    if cu_seq_lens[0] != 0 or cu_seq_lens[-1] != shape[1] or bool((cu_seq_lens.diff() < 0).any()):
        raise ValueError(f"cu_seq_lens {cu_seq_lens.tolist()} do not rise from 0 to the {shape[1]} tokens of the row.")


def _positions_from_cu_seq_lens(cu_seq_lens: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    columns = torch.arange(length, device=device)
    cu_seq_lens = cu_seq_lens.to(device).long()
    document = torch.searchsorted(cu_seq_lens[1:], columns, right=True)
    return (columns - cu_seq_lens[document])[None]


def _is_plain(mask_2d, mask_4d, position_ids, cu_seq_lens, history, past, length) -> bool:
    """Whether the general description would say nothing. Values are read on CPU only, where that waits for nobody; on a
    device, and under tracing, only absent arguments count."""
    if mask_4d is not None or (history is not None and history.segments is not None):
        return False
    given = [t for t in (mask_2d, position_ids, cu_seq_lens) if t is not None]
    if not given:
        return True
    if any(is_tracing(t) or t.device.type != "cpu" for t in given):
        return False
    if mask_2d is not None and not bool(mask_2d.all()):
        return False
    return position_ids is None or bool((position_ids == torch.arange(past, past + length)).all())


def _end_of_rows(segments: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each cached row: segment and position of its last real token (-1 if none), the position of its last slot, and
    whether it has a real token. All ``[B]``."""
    batch_size, length = segments.shape
    if length == 0:
        nothing = segments.new_full((batch_size,), -1)
        return nothing, nothing, nothing, nothing.bool() & False
    real = segments != PADDING
    last = (real.long() * torch.arange(1, length + 1, device=segments.device)).amax(1) - 1
    any_real = last >= 0
    pick = last.clamp_min(0)[:, None]
    last_segment = torch.where(any_real, segments.gather(1, pick)[:, 0], -1)
    last_position = torch.where(any_real, positions.gather(1, pick)[:, 0], -1)
    return last_segment, last_position, positions[:, -1], any_real


def _starts_from_positions(positions, real, last_position, last_slot, any_cached) -> torch.Tensor:
    """A real token whose position is not its real predecessor's + 1 starts a document. Positions that count on through
    padding (a row padded on the right, then continued) are no start either; a restart inside padding is none."""
    batch_size, length = positions.shape
    columns = torch.arange(length, device=positions.device).expand(batch_size, -1)
    # column of the nearest real token before each token, -1: it lies in the cache or nowhere
    before = torch.where(real, columns, -1).cummax(1).values if length else columns
    before = torch.nn.functional.pad(before[:, :-1], (1, 0), value=-1) if length else before
    previous = torch.where(before >= 0, positions.gather(1, before.clamp_min(0)), last_position[:, None])
    has_previous = (before >= 0) | any_cached[:, None]
    slot = torch.cat([last_slot[:, None], positions[:, :-1]], dim=1)[:, :length]
    counts_on = (positions - slot == 1) & (positions > previous)
    return real & has_previous & (positions - previous != 1) & ~counts_on


def _fill_reach(visibility: Visibility, limit: int, last_segment: torch.Tensor, any_cached: torch.Tensor) -> None:
    segment = visibility.segment
    assert segment is not None
    batch_size, length = segment.shape
    real = segment != PADDING
    columns = torch.arange(length, device=segment.device).expand(batch_size, -1)
    breaks = torch.ones_like(real)
    breaks[:, 1:] = ~real[:, :-1] | (segment[:, 1:] != segment[:, :-1])
    run = columns - (torch.where(breaks, columns, 0).cummax(1).values if length else columns)
    visibility.reach = torch.where(real, run, 0).clamp_max(limit)

    visibility.has_real = real.any(1)
    first = torch.where(real, columns, length).amin(1).clamp_max(max(length - 1, 0)) if length else columns.sum(1)
    visibility.last = torch.where(real, columns, 0).amax(1) if length else columns.sum(1)
    if length == 0:
        visibility.continues = any_cached
        return
    first_segment = segment.gather(1, first[:, None])[:, 0]
    visibility.continues = any_cached & visibility.has_real & (first_segment == last_segment)
    offsets = torch.arange(limit, device=segment.device)
    entry = (first[:, None] + offsets).clamp_max(length - 1)
    inside = first[:, None] + offsets < length
    visibility.entry_valid = inside & real.gather(1, entry) & (visibility.reach.gather(1, entry) == offsets)
    visibility.entry_index = entry + columns.new_tensor(length) * torch.arange(batch_size, device=segment.device)[:, None]

    # One real token per row that continues its cache (a decoding step) leaves nothing to mask: say so where asking is free.
    if length == 1 and not is_tracing(segment) and segment.device.type == "cpu" and bool(visibility.continues.all()):
        visibility.reach = visibility.continues = visibility.entry_index = visibility.entry_valid = None
        visibility.last = visibility.has_real = None


# ------------------------------------------------------------------------------------------------ attention masks
def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    """Bool masks as they are; additive ones allow what they do not push far down; integer ones allow non-zeros."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def _window(config, layer_type: str) -> int | None:
    return config.sliding_window if layer_type == "hybrid_sliding" else None


def _first_keys(config, visibility: Visibility, cache, past: int) -> dict[str, int]:
    """By layer type, the absolute index of the first key that its layers return; fills in how many they return."""
    first = {}
    for layer_type in dict.fromkeys(config.layer_types):
        length = visibility.sequence_length
        keys, offset = past + length, 0
        if cache is not None:
            keys, offset = cache.layers[config.layer_types.index(layer_type)].get_mask_sizes(length)
        visibility.key_lengths[layer_type], first[layer_type] = keys, offset
    return first


def _masks(config, visibility, all_segments, past, cache, dtype, device) -> dict[str, Any]:
    """Causal masks inside documents; `all_segments` is ``[B, L + S]``, None for plain rows. A padding query sees itself, so
    that no softmax runs over nothing."""
    name = config._attn_implementation
    length = visibility.sequence_length
    masks: dict[str, Any] = {}
    ranges = _first_keys(config, visibility, cache, past)
    for layer_type in dict.fromkeys(config.layer_types):
        window = _window(config, layer_type)
        keys, offset = visibility.key_lengths[layer_type], ranges[layer_type]
        if name not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
            if all_segments is not None:
                raise ValueError(
                    f"attention implementation {name!r} has no mask function, so padding and documents would be ignored; "
                    "register one under the same name with AttentionMaskInterface.register."
                )
            masks[layer_type] = None
            continue
        if all_segments is None and name == "sdpa" and _sdpa_needs_no_mask(past, length, window):
            masks[layer_type] = None
            continue
        masks[layer_type] = ALL_MASK_ATTENTION_FUNCTIONS[name](
            batch_size=visibility.batch_size,
            q_length=length,
            kv_length=keys,
            q_offset=past,
            kv_offset=offset,
            mask_function=_document_mask(all_segments, window),
            attention_mask=_keys_of_last_document(name, all_segments, length, offset),
            local_size=window,
            allow_is_causal_skip=False,
            dtype=dtype,
            device=device,
            config=config,
            use_vmap=False,
        )
    return masks


def _sdpa_needs_no_mask(past: int, length: int, window: int | None) -> bool:
    """`is_causal` (empty cache) or no mask at all (one query) already say everything. Not while exporting: the traced
    length would be baked in. A sliding layer's cache returns at most `window` keys to one query."""
    if is_tracing():
        return False
    return length == 1 or (past == 0 and (window is None or length <= window))


def _document_mask(all_segments: torch.Tensor | None, window: int | None):
    """Index-based mask function in transformers' sense; indices are absolute (cached tokens first). A window counts real
    tokens: padding between them does not use it up."""
    rank = None if all_segments is None or window is None else (all_segments != PADDING).long().cumsum(1)

    def may_attend(batch_idx, head_idx, q_idx, kv_idx):
        allowed = kv_idx <= q_idx
        if rank is not None:
            allowed = allowed & (rank[batch_idx, kv_idx] > rank[batch_idx, q_idx] - window)
        elif window is not None:
            allowed = allowed & (kv_idx > q_idx - window)
        if all_segments is not None:
            query, key = all_segments[batch_idx, q_idx], all_segments[batch_idx, kv_idx]
            allowed = (allowed & (query == key) & (query != PADDING)) | (q_idx == kv_idx)
        return allowed

    return may_attend


def _keys_of_last_document(name: str, all_segments: torch.Tensor | None, length: int, offset: int) -> torch.Tensor | None:
    """Flash attention knows no mask but ``[B, keys]``. That is enough for one query per row; longer calls without a cache
    go through cumulative lengths instead (`_varlen_kwargs`)."""
    if "flash" not in (name or "") or all_segments is None or all_segments.shape[1] == length:
        return None
    visible = (all_segments == all_segments[:, -1:]) & (all_segments != PADDING)
    if length > 1:
        raise ValueError(
            f"{name} cannot continue padded or packed rows of a cache with {length} tokens at once; feed one at a time, or use "
            "attn_implementation='sdpa'."
        )
    return visible


def _varlen_kwargs(config, segment: torch.Tensor, past: int) -> dict[str, Any] | None:
    """Cumulative lengths over the flattened batch for flash attention: every run of one segment is a sequence."""
    if "flash" not in (config._attn_implementation or "") or past:
        return None
    flat = segment.flatten()
    edge = torch.ones_like(flat, dtype=torch.bool)
    edge[1:] = flat[1:] != flat[:-1]
    edge[:: max(segment.shape[1], 1)] = True
    cumulative = torch.nn.functional.pad(edge.nonzero()[:, 0], (0, 1), value=flat.numel()).int()
    longest = int(cumulative.diff().max()) if cumulative.numel() > 1 else 0
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}


def _given_masks(config, visibility: Visibility, mask: torch.Tensor, past: int, cache, dtype) -> dict[str, Any]:
    """A caller's 4-D mask for every layer type; sliding layers keep their window, with and without a cache."""
    name = config._attn_implementation
    if name not in ("eager", "sdpa"):
        raise ValueError(f"a 4-D attention_mask needs attn_implementation 'eager' or 'sdpa', not {name!r}.")
    length, total = mask.shape[2:]
    masks: dict[str, Any] = {}
    ranges = _first_keys(config, visibility, cache, past)
    for layer_type in dict.fromkeys(config.layer_types):
        given = mask if mask.is_floating_point() else _as_bool(mask)
        window = _window(config, layer_type)
        if window is not None:
            queries = torch.arange(past, past + length, device=mask.device)[:, None]
            outside = torch.arange(total, device=mask.device)[None] <= queries - window
            given = given.masked_fill(outside, False if given.dtype == torch.bool else torch.finfo(given.dtype).min)
        keys, offset = visibility.key_lengths[layer_type], ranges[layer_type]
        given = given[..., offset : offset + keys]
        # a query that may attend to nothing attends to itself: its output is never read, but must stay finite
        queries = torch.arange(past, past + length, device=mask.device)[:, None]
        itself = torch.arange(offset, offset + keys, device=mask.device)[None] == queries
        allowed = _as_bool(given)
        alone = itself & ~allowed.any(-1, keepdim=True)
        if given.dtype == torch.bool and name == "sdpa":
            masks[layer_type] = allowed | alone
        elif given.dtype == torch.bool:
            masks[layer_type] = torch.where(allowed | alone, 0.0, torch.finfo(dtype).min).to(dtype)
        else:
            # the smallest number of a wide dtype is -inf in a narrow one
            masks[layer_type] = given.clamp_min(torch.finfo(dtype).min).to(dtype).masked_fill(alone, 0)
    return masks
