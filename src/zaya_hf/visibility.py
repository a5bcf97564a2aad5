"""Which earlier tokens every token may see: documents, padding, cached rows and attention masks, in one place.

CCA looks back ``k0 + k1 - 2`` tokens in its query/key convolutions and one token in its value. Left pads, right pads,
packed documents, caches and custom masks all ask the same question: which of those predecessors exist for this token?
The answer is computed here once per forward pass, from whatever the caller gave, and every layer reads it. The masks
are made in `attention_masks`, and what rows of a cache hold is in `history`.

Terms (``B`` rows, ``S`` tokens in this call, ``L`` cached tokens):

``segment[B, S]``
    Document of each token, counted upwards over the life of a row; -1 for padding.
``reach[B, S]``
    How many tokens directly before this one, *in this call*, are real and of the same document, capped at the
    look-back. Tokens of earlier calls reach the operators as states (see `zaya_hf.cache`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from .attention_masks import allowed_pairs, document_masks, given_masks, is_free_to_read, key_ranges, varlen_kwargs
from .history import PADDING, LastCached, RowHistory, StaticRowHistory, holes, last_cached
from .ops import selection


@dataclass
class Visibility:
    """What one forward pass may see. Tensors that are None are trivial: see `is_plain` and `reach`."""

    batch_size: int
    sequence_length: int
    #: positions for RoPE, ``[B or 1, S]`` int64
    position_ids: Tensor
    #: ``[B, S]`` int64; None when every row is one unpadded document that continues its cache
    segment: Tensor | None = None
    #: ``[B, S]`` int64, capped at the look-back; None when every earlier token is in reach
    reach: Tensor | None = None
    #: ``[B]`` bool: the first real token of the row continues the cached document; None where there is nothing to mask
    continues: Tensor | None = None
    #: ``[B, K]`` flat indices (``row * S + column``) of the first K real tokens of the row, and whether each directly
    #: follows the first one in its document
    entry_index: Tensor | None = None
    entry_valid: Tensor | None = None
    #: ``[B]`` column of the last real token, and whether the row has any; None: the last column, and all have
    last: Tensor | None = None
    has_real: Tensor | None = None
    #: attention mask by layer type, in the form that the attention implementation wants, or an `attention.Plan`
    masks: dict[str, Any] | None = None
    #: keys that each layer type's mask covers, the cached ones included
    key_lengths: dict[str, int] = field(default_factory=dict)
    #: ``[S]`` int64, where in a static cache the tokens of this call go; None for other caches
    slots: Tensor | None = None
    #: for a static cache that uses slots in turn: whether this call may put padding behind real tokens of a row
    makes_holes: bool | None = None
    #: extra arguments for variable-length attention backends
    attention_kwargs: dict[str, Any] | None = None
    #: for a forest of texts: what the convolutions see before each of its segments, a `tree_attention.Ghosts`
    ghosts: Any = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Visibility:
        """A copy with its tensors on `device`: what accelerate asks for between layers on different devices."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(item) for name, item in value.items()}
            return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value

        return replace(self, **{item.name: moved(getattr(self, item.name)) for item in fields(self)})

    @property
    def is_plain(self) -> bool:
        """Every row is one unpadded document whose positions go on from the cache."""
        return self.segment is None

    @property
    def real(self) -> Tensor | None:
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
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    history: RowHistory | None = None,
    cache=None,
    fixed: bool = False,
) -> Visibility:
    """Turn the caller's arguments into a `Visibility`.

    A document starts where any of `position_ids`, `cu_seq_lens` and `seq_idx` says so; with a 4-D mask the mask alone
    decides. Padding belongs to no document. Within one call the look-back ends at padding; between two calls it goes on
    from the last real token of the first.

    Args:
        attention_mask: None; ``[B, S]`` or ``[B, L + S]`` with 0 for padding; a 4-D mask ``[B or 1, heads or 1, S,
            L + S]``, bool (True: may attend), integer (non-zero: may attend) or additive. In a 4-D mask a token that
            may not attend to itself is padding, and one that may not attend to the real token before it starts a
            document. Tokens that were fed as padding stay padding in later calls.
        position_ids: ``[S]`` or ``[B or 1, S]``. A real token whose position is not its real predecessor's + 1 starts a
            document, unless positions count on through the padding between the two.
        cu_seq_lens: cumulative document lengths of one row, ``[documents + 1]``; documents may be empty.
        seq_idx: ``[B or 1, S]`` a number per document; only where it changes matters.
        history: the cached tokens, None without a cache.
        cache: the cache itself, for the key lengths of its layers.
        fixed: whether the masks must cover all slots of a static cache, whatever is cached: then a compiled forward
            meets the same shapes in every step. While tracing with a static cache they always do.

    Raises:
        ValueError: for shapes that fit nothing above, for `cu_seq_lens` or `seq_idx` with cached tokens, for a mask
            that hides the cached token from which a row's state was taken (seen on CPU only), for an attention
            implementation that cannot express what was asked, and for what a traced call with a static cache cannot.
    """
    static = history if isinstance(history, StaticRowHistory) else None
    traced = static is not None and is_tracing()
    if traced and (cu_seq_lens is not None or seq_idx is not None or getattr(attention_mask, "ndim", 2) == 4):
        raise ValueError(
            "a compiled or exported call with a static cache takes no cu_seq_lens, seq_idx or 4-D mask; pass "
            "position_ids, or make the masks outside with create_masks_for_generate."
        )
    # Nothing of a traced program may depend on how much is cached: there, numbers are tensors.
    past: Any = 0 if history is None else static.filled.to(device) if static and traced else history.length
    fixed = static is not None and (fixed or traced)
    shape = (batch_size, sequence_length)
    position_ids = _check_per_token("position_ids", position_ids, shape)
    seq_idx = _check_per_token("seq_idx", seq_idx, shape)
    given = past
    if traced and attention_mask is not None:
        given = attention_mask.shape[1] - sequence_length
    mask_2d, mask_4d = _split_mask(attention_mask, shape, given, config.num_attention_heads)
    if cu_seq_lens is not None:
        _check_cu_seq_lens(cu_seq_lens, shape, past)
        cu_seq_lens = cu_seq_lens.to(device).long()
    if seq_idx is not None and past:
        raise ValueError(f"seq_idx describe rows without a cache, but {past} tokens are cached; use position_ids.")

    ranges = key_ranges(config, sequence_length, past, cache, fixed)
    slots = static.next_slots(sequence_length, device) if static else None
    columns = torch.arange(past, past + sequence_length, device=device) if slots is None else slots
    visible = Visibility(*shape, position_ids=columns[None], slots=slots)
    visible.key_lengths = {layer_type: keys for layer_type, (keys, _) in ranges.items()}
    if mask_4d is None and _is_plain(mask_2d, position_ids, cu_seq_lens, seq_idx, history, shape):
        visible.masks = document_masks(config, visible, None, ranges, past, dtype, device, fixed)
        return visible

    if static is not None and traced:
        old_segments, old_positions = static.whole_rows(batch_size, device)
        cached = last_cached(old_segments, old_positions, past)
    else:
        old_segments, old_positions = (history or RowHistory()).materialise(batch_size, device)
        cached = last_cached(old_segments, old_positions)
    real = torch.ones(shape, dtype=torch.bool, device=device)
    if mask_2d is not None:
        real = mask_2d[:, mask_2d.shape[1] - sequence_length :]
        if mask_2d.shape[1] > sequence_length:
            _check_states_visible(mask_2d[:, :given], cached, real)
            hidden = torch.nn.functional.pad(~mask_2d[:, :given], (0, old_segments.shape[1] - given))
            old_segments = old_segments.masked_fill(hidden, PADDING)
    allowed = None
    if mask_4d is not None:
        allowed = allowed_pairs(mask_4d).any(1).expand(batch_size, -1, -1)
        real = allowed.diagonal(past, 1, 2)

    before = _real_before(real)
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    if allowed is not None:
        starts = _starts_from_pairs(allowed, before, cached, past)
    else:
        if cu_seq_lens is not None:
            columns = torch.arange(sequence_length, device=device)
            document = torch.searchsorted(cu_seq_lens[1:], columns, right=True)
            starts = starts | _starts_from_ids(document[None].expand(shape), before)
            if position_ids is None:
                position_ids = (columns - cu_seq_lens[document])[None]
        if seq_idx is not None:
            starts = starts | _starts_from_ids(seq_idx.expand(shape), before)
        if position_ids is not None:
            starts = starts | _starts_from_positions(position_ids.expand(shape), before, cached)
    if position_ids is None:
        position_ids = (cached.position[:, None] + real.long().cumsum(1)).clamp_min(0)

    segment = cached.segment.clamp_min(0)[:, None] + (starts & real).long().cumsum(1)
    visible.position_ids = position_ids
    visible.segment = segment = torch.where(real, segment, PADDING)
    _fill_reach(visible, look_back(config), cached)
    if static is not None and traced:
        assert visible.slots is not None
        all_segments = old_segments.index_copy(1, visible.slots, segment)
    else:
        all_segments = torch.cat([old_segments, segment], dim=1)
    if static is not None and static.is_used_in_turn:
        visible.makes_holes = traced or bool(holes(all_segments).any()) or None
    if static is not None and fixed and not traced:
        behind = static.capacity - all_segments.shape[1]
        all_segments = torch.nn.functional.pad(all_segments, (0, behind), value=PADDING)
    if mask_4d is not None:
        visible.masks = given_masks(config, mask_4d, all_segments, ranges, past, dtype)
    else:
        visible.masks = document_masks(config, visible, all_segments, ranges, past, dtype, device, fixed)
        visible.attention_kwargs = varlen_kwargs(config, segment, past)
    return visible


# ------------------------------------------------------------------------------------------------------- checks
def _may_read(tensor: Tensor, length: int) -> bool:
    """Whether values may decide that nothing needs a mask. For a prompt or a training row one wait for the device costs
    less than a ``[B, 1, S, L + S]`` mask and the attention kernels that take one; for a decoding step it does not."""
    return is_free_to_read(tensor) or (length > 1 and tensor.device.type != "cpu" and not is_tracing(tensor))


def is_one_of(number: Any, *numbers: Any) -> bool:
    """`in` for sizes: where one is a symbol of a compiler and another a number, Python's compares the objects."""
    return any(number == each for each in numbers)


def _check_per_token(name: str, values: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if values is None:
        return None
    given = tuple(values.shape)
    if values.ndim == 1:
        values = values[None]
    if values.ndim != 2 or not is_one_of(values.shape[0], 1, shape[0]) or values.shape[1] != shape[1]:
        raise ValueError(f"{name} have shape {given}; expected [{shape[0]}, {shape[1]}] or [1, {shape[1]}].")
    return values.long()


def _split_mask(mask: Any, shape: tuple[int, int], past: int, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask as a bool 2-D or a 4-D one."""
    if mask is None:
        return None, None
    batch_size, length = shape
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask has type {type(mask).__name__}; expected a 2-D or a 4-D tensor.")
    if mask.ndim == 2:
        if mask.shape[0] != batch_size or not is_one_of(mask.shape[1], length, past + length):
            wanted = f"[{batch_size}, {length}]"
            wanted += f" or [{batch_size}, {past + length}] (with the {past} cached tokens)" if past else ""
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {wanted}.")
        if mask.is_floating_point() and is_free_to_read(mask) and bool((mask < 0).any()):
            raise ValueError("a 2-D attention_mask has 1 for real tokens and 0 for padding; this one has negatives.")
        return mask.bool(), None
    fits = mask.ndim == 4 and is_one_of(mask.shape[0], 1, batch_size) and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2:] != (length, past + length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; expected [{batch_size}, {length}] or "
            f"[{batch_size} or 1, {heads} or 1, {length}, {past + length}]."
        )
    return None, mask


def _check_cu_seq_lens(cu_seq_lens: Tensor, shape: tuple[int, int], past: int) -> None:
    if shape[0] != 1 or past:
        what = f"{shape[0]} rows" if shape[0] != 1 else f"a cache of {past} tokens"
        raise ValueError(f"cu_seq_lens describe one row without a cache, but the call has {what}; use position_ids.")
    if cu_seq_lens.ndim != 1 or cu_seq_lens.numel() < 1:
        raise ValueError(f"cu_seq_lens have shape {tuple(cu_seq_lens.shape)}; expected [documents + 1].")
    if not is_free_to_read(cu_seq_lens):
        return
    if cu_seq_lens[0] != 0 or cu_seq_lens[-1] != shape[1] or bool((cu_seq_lens.diff() < 0).any()):
        raise ValueError(f"cu_seq_lens {cu_seq_lens.tolist()} do not rise from 0 to the {shape[1]} tokens of the row.")


def _is_plain(
    mask_2d: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    seq_idx: Tensor | None,
    history: RowHistory | None,
    shape: tuple[int, int],
) -> bool:
    """Whether the general description would say nothing. Where values may not be read, only absent arguments count."""
    if history is not None and not history.is_plain:
        return False
    given = [t for t in (mask_2d, position_ids, cu_seq_lens, seq_idx) if t is not None]
    if not all(_may_read(t, shape[1]) for t in given):
        return False
    says_nothing = mask_2d is None or bool(mask_2d.all())
    if position_ids is not None:
        past = 0 if history is None else history.length
        plain = torch.arange(past, past + shape[1], device=position_ids.device)
        says_nothing = says_nothing and bool((position_ids == plain).all())
    if cu_seq_lens is not None:
        says_nothing = says_nothing and bool(((cu_seq_lens == 0) | (cu_seq_lens == shape[1])).all())
    if seq_idx is not None:
        says_nothing = says_nothing and bool((seq_idx == seq_idx[:, :1]).all())
    return says_nothing


# ---------------------------------------------------------------------------------------- documents and look-back
def _check_states_visible(mask: Tensor, cached: LastCached, real: Tensor) -> None:
    """Refuse a mask ``[B, L]`` that hides the token from which a row's state was taken: it cannot be taken back."""
    if not is_free_to_read(mask):
        return
    hidden = cached.exists & real.any(1) & ~mask.gather(1, cached.slot[:, None])[:, 0]
    if bool(hidden.any()):
        row = int(hidden.nonzero()[0])
        raise ValueError(
            f"attention_mask hides cached token {int(cached.slot[row])} of row {row}, which was fed as a real one and "
            "to which the next token looks back; pass the mask with the call that feeds the padding."
        )


def _real_before(real: Tensor) -> Tensor:
    """``[B, S]``: column of the nearest real token before each token in this call; -1 if there is none."""
    if real.shape[1] == 0:
        return real.long()
    columns = torch.arange(real.shape[1], device=real.device)
    return torch.nn.functional.pad(_latest(real, columns), (1, 0), value=-1)[:, :-1]


def _latest(flags: Tensor, columns: Tensor) -> Tensor:
    """``[B, S]``: column of the last True of ``flags[B, S]`` at or before each column; -1 if there is none."""
    own = torch.where(flags, columns, -1)
    if not selection.is_exporting():
        return own.cummax(1).values
    # ONNX knows no running maximum. The n-th True writes its column into place n; all else writes -1 into place 0.
    rank = flags.long().cumsum(1)
    table = torch.nn.functional.pad(torch.full_like(own, -1), (1, 0), value=-1)
    return table.scatter(1, torch.where(flags, rank, 0), own).gather(1, rank)


def _starts_from_pairs(allowed: Tensor, before: Tensor, cached: LastCached, past: int) -> Tensor:
    """Tokens that may not attend to their real predecessor; ``allowed[B, S, L + S]``."""
    predecessor = torch.where(before >= 0, past + before, cached.slot[:, None])
    sees_it = allowed.gather(2, predecessor[..., None])[..., 0]
    return ((before >= 0) | cached.exists[:, None]) & ~sees_it


def _starts_from_ids(document: Tensor, before: Tensor) -> Tensor:
    """Tokens whose number ``document[B, S]`` is not their real predecessor's."""
    return (before >= 0) & (document != document.gather(1, before.clamp_min(0)))


def _starts_from_positions(positions: Tensor, before: Tensor, cached: LastCached) -> Tensor:
    """Tokens whose position is not their real predecessor's + 1. Positions that count on through padding (a row padded
    on the right, then continued) are no start; a restart inside padding is none either."""
    predecessor = torch.where(before >= 0, positions.gather(1, before.clamp_min(0)), cached.position[:, None])
    slot_before = torch.cat([cached.end_position[:, None], positions], dim=1)[:, :-1]
    counts_on = (positions - slot_before == 1) & (positions > predecessor)
    return ((before >= 0) | cached.exists[:, None]) & (positions - predecessor != 1) & ~counts_on


def _fill_reach(visible: Visibility, limit: int, cached: LastCached) -> None:
    """Reach of every token, and where and whether each row goes on from its cache."""
    segment = visible.segment
    assert segment is not None
    batch_size, length = segment.shape
    real = segment != PADDING
    if length == 0:
        visible.reach, visible.continues = segment, cached.exists
        visible.has_real, visible.last = real.any(1), cached.slot * 0
        return
    columns = torch.arange(length, device=segment.device).expand(batch_size, -1)
    breaks = segment != torch.nn.functional.pad(segment, (1, 0), value=PADDING - 1)[:, :-1]
    run = columns - _latest(breaks, columns)
    visible.reach = torch.where(real, run, 0).clamp_max(limit)

    visible.has_real = real.any(1)
    visible.last = torch.where(real, columns, 0).amax(1)
    first = torch.where(real, columns, length).amin(1).clamp_max(length - 1)
    first_segment = segment.gather(1, first[:, None])[:, 0]
    visible.continues = cached.exists & visible.has_real & (first_segment == cached.segment)
    offsets = torch.arange(limit, device=segment.device)
    entry = (first[:, None] + offsets).clamp_max(length - 1)
    # reach counts from the first real token, so a column that was clamped has another one
    visible.entry_valid = real.gather(1, entry) & (visible.reach.gather(1, entry) == offsets)
    visible.entry_index = entry + torch.arange(batch_size, device=segment.device)[:, None] * length

    # One real token per row that continues its cache (a decoding step) leaves nothing to mask: say so if that is free.
    if length == 1 and is_free_to_read(segment) and bool(visible.continues.all()):
        visible.reach = visible.continues = visible.entry_index = visible.entry_valid = None
        visible.last = visible.has_real = None
