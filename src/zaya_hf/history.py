"""What the rows of a cache hold: for every slot the document and the position of its token, or padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

if TYPE_CHECKING:
    from .visibility import Visibility

#: segment of a padding token
PADDING = -1


@dataclass
class RowHistory:
    """Segment and position of every cached token. Both are ``[B, L]`` int64, or None while each row is one unpadded
    document at positions 0 ... L-1, which is what `length` alone says."""

    length: int = 0
    segments: Tensor | None = None
    positions: Tensor | None = None
    _slots: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether `length` alone says everything."""
        return self.segments is None

    def materialise(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Segments and positions of the cached tokens, both ``[B, L]``."""
        if self.segments is None or self.positions is None:
            positions = torch.arange(self.length, device=device).expand(batch_size, -1)
            return torch.zeros_like(positions), positions
        return self.segments, self.positions

    def clear(self) -> None:
        """Forget everything."""
        self.length, self.segments, self.positions, self._slots = 0, None, None, {}

    def extend(self, visible: Visibility) -> None:
        """Append the tokens of one call."""
        if visible.segment is None:
            self.length += visible.sequence_length
            return
        segments, positions = self.materialise(visible.batch_size, visible.segment.device)
        self.segments = torch.cat([segments, visible.segment], dim=1)
        self.positions = torch.cat([positions, visible.position_ids.expand_as(visible.segment)], dim=1)
        self.length = self.segments.shape[1]

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row."""
        self._slots = {}
        self.length -= tokens
        if self.segments is not None and self.positions is not None:
            self.segments, self.positions = self.segments[:, : self.length], self.positions[:, : self.length]

    def counted_on(self) -> tuple[Tensor, Tensor]:
        """Positions of the cached tokens, ``[B, L]``, and of each row's last real one, ``[B]`` (-1 without one); for
        rows that are not plain."""
        assert self.segments is not None
        assert self.positions is not None
        return self.positions, last_cached(self.segments, self.positions).position

    def has_holes(self) -> bool:
        """Whether some row has padding after a real token (right padding, for one)."""
        return self.segments is not None and bool(holes(self.segments).any())

    def last_run(self, limit: int) -> Tensor | None:
        """``[B]``: how many real tokens of one document end each row, at most `limit`; None for rows that are one
        document."""
        if self.segments is None:
            return None
        tail = self.segments[:, self.length - min(limit, self.length) :]
        same = (tail == tail[:, -1:]) & (tail != PADDING)
        return same.flip(1).cumprod(1).sum(1)

    def slots_for(self, tokens: int) -> int:
        """How many slots at the end hold the last `tokens` real tokens of every row: more than `tokens` where padding
        lies between them."""
        if self.segments is None or not tokens:
            return tokens
        if (self.length, tokens) not in self._slots:  # many layers ask the same once per call
            real = self.segments != PADDING
            from_end = real.flip(1).long().cumsum(1).flip(1)  # real tokens from each slot to the end
            columns = torch.arange(self.length, device=real.device).expand_as(real)
            first = torch.where(real & (from_end <= tokens), columns, self.length)
            behind_first = self.length - int(first.amin()) if first.numel() else 0
            self._slots = {(self.length, tokens): max(tokens, behind_first)}
        return self._slots[self.length, tokens]

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` (index_select, repeat_interleave ... along dim 0) to the rows."""
        if self.segments is not None and self.positions is not None:
            self.segments, self.positions = fn(self.segments), fn(self.positions)
        self._slots = {}


class StaticRowHistory(RowHistory):
    """The history of a static cache, in memory of a fixed size that compiled programs can write.

    How many tokens there are is a tensor, `filled`, which all calls count on. `length` is the same number for eager
    code; after a compiled call it is read from the tensor, when it is next asked for.

    Args:
        capacity: tokens that the cache can hold.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.filled = marked(torch.zeros((), dtype=torch.long))
        #: whether padding may have lain behind real tokens
        self.has_had_holes = False
        #: whether some layer has fewer slots than this, and must be told of holes
        self.is_used_in_turn = False
        self._length: int | None = 0
        #: segments and positions, ``[2, B, capacity]``; None while rows are plain
        self._rows: Tensor | None = None
        self._slots = {}

    @property
    def length(self) -> int:  # type: ignore[override]
        if self._length is None:
            self._length = int(self.filled)
        return self._length

    @property
    def segments(self) -> Tensor | None:  # type: ignore[override]
        return None if self._rows is None else self._rows[0, :, : self.length]

    @property
    def positions(self) -> Tensor | None:  # type: ignore[override]
        return None if self._rows is None else self._rows[1, :, : self.length]

    @property
    def is_plain(self) -> bool:
        return self._rows is None

    def next_slots(self, tokens: int, device: torch.device) -> Tensor:
        """``[tokens]`` int64: where the tokens of the next call go."""
        offset: Any = self.filled.to(device) if is_tracing() else self.length
        return torch.arange(tokens, device=device) + offset

    def whole_rows(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Segments and positions of all slots, both ``[B, capacity]``, with padding behind the filled ones. Reads no
        number, so it can be traced."""
        slots = torch.arange(self.capacity, device=device).expand(batch_size, -1)
        segments, positions = (torch.zeros_like(slots), slots) if self._rows is None else self._rows.unbind(0)
        return torch.where(slots < self.filled.to(device), segments, PADDING), positions

    def clear(self) -> None:
        self.filled = writable(self.filled).zero_()
        self._length, self._rows, self._slots, self.has_had_holes = 0, None, {}, False

    def extend(self, visible: Visibility) -> None:
        slots, tokens = visible.slots, visible.sequence_length
        assert slots is not None
        if self.filled.device != slots.device:
            self.filled = marked(self.filled.to(slots.device))
        if visible.segment is not None:
            if self._rows is None:
                rows = self.whole_rows(visible.batch_size, slots.device)
                self._rows = marked(torch.stack(rows))
            new = torch.stack([visible.segment, visible.position_ids.expand_as(visible.segment)])
            self._rows = writable(self._rows).index_copy_(2, slots, new)
        self.filled = writable(self.filled).add_(tokens)
        if visible.makes_holes:
            self.has_had_holes = True
        if is_tracing():
            self._length = None
        elif self._length is not None:
            self._length += tokens

    def crop(self, tokens: int) -> None:
        self._slots = {}
        self._length = self.length - tokens
        self.filled = writable(self.filled).sub_(tokens)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self._rows is not None:
            self._rows = in_place(self._rows, torch.stack([fn(self._rows[0]), fn(self._rows[1])]))
        self._slots = {}


def marked(tensor: Tensor) -> Tensor:
    """`tensor`, announced to the compiler as one whose address stays, so that programs write it in place."""
    if not is_tracing():
        torch._dynamo.mark_static_address(tensor)
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy where it was made in inference mode and this is another."""
    if is_tracing() or not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return marked(tensor.clone())


def in_place(held: Tensor | None, new: Tensor) -> Tensor:
    """`new`, detached, in the memory of `held` if it fits."""
    if held is None or held.shape != new.shape or held.dtype != new.dtype or held.device != new.device:
        # contiguous: a copy would keep the strides of a single row, and a compiled program is one for its strides
        return marked(new.detach().clone(memory_format=torch.contiguous_format))
    return writable(held).copy_(new.detach())


def holes(segments: Tensor) -> Tensor:
    """``[B, L]`` bool: padding behind a real token of its row."""
    real = segments != PADDING
    return ~real & (real.cumsum(1) > 0)


class LastCached(NamedTuple):
    """The last real cached token of each row, all ``[B]``."""

    exists: Tensor
    #: -1 if there is none
    segment: Tensor
    #: -1 if there is none
    position: Tensor
    #: its slot, 0 if there is none
    slot: Tensor
    #: position of the last slot, be it padding; -1 without a cache
    end_position: Tensor


def last_cached(segments: Tensor, positions: Tensor, filled: Tensor | None = None) -> LastCached:
    """From `RowHistory.materialise`, ``[B, L]`` each; or from `StaticRowHistory.whole_rows`, of which the first
    `filled` slots (``[]`` int64) hold tokens."""
    batch_size, length = segments.shape
    if length == 0:
        nothing = segments.new_full((batch_size,), -1)
        return LastCached(nothing >= 0, nothing, nothing, nothing + 1, nothing)
    last = torch.where(segments != PADDING, torch.arange(length, device=segments.device), -1).amax(1)
    exists, slot = last >= 0, last.clamp_min(0)
    segment, position = (torch.where(exists, t.gather(1, slot[:, None])[:, 0], -1) for t in (segments, positions))
    if filled is None:
        return LastCached(exists, segment, position, slot, positions[:, -1])
    end = positions.index_select(1, (filled - 1).clamp_min(0)[None])[:, 0]
    return LastCached(exists, segment, position, slot, torch.where(filled > 0, end, -1))
