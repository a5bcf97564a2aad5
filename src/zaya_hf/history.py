"""What the rows of a cache hold: for every slot the document and the position of its token, or padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

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

    def materialise(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Segments and positions of the cached tokens, both ``[B, L]``."""
        if self.segments is None or self.positions is None:
            positions = torch.arange(self.length, device=device).expand(batch_size, -1)
            return torch.zeros_like(positions), positions
        return self.segments, self.positions

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
        if self.segments is None:
            return False
        real = self.segments != PADDING
        return bool((~real & (real.cumsum(1) > 0)).any())

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


def last_cached(segments: Tensor, positions: Tensor) -> LastCached:
    """From `RowHistory.materialise`, ``[B, L]`` each."""
    batch_size, length = segments.shape
    if length == 0:
        nothing = segments.new_full((batch_size,), -1)
        return LastCached(nothing >= 0, nothing, nothing, nothing + 1, nothing)
    last = torch.where(segments != PADDING, torch.arange(length, device=segments.device), -1).amax(1)
    exists, slot = last >= 0, last.clamp_min(0)
    segment, position = (torch.where(exists, t.gather(1, slot[:, None])[:, 0], -1) for t in (segments, positions))
    return LastCached(exists, segment, position, slot, positions[:, -1])
