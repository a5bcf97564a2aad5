"""Rows of one length out of documents: which tokens of which documents lie in which row.

Both modes keep every token, and every token that has a predecessor in its document is a target exactly once: a piece
that ends inside its document also knows the token that comes after it (see `rows`). What a cut takes away is context:
the next piece starts anew, with positions from 0, and sees nothing of the one before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .order import DOCUMENTS, stream

if TYPE_CHECKING:
    from .documents import TokenDocuments

__all__ = ["PackedRows", "Piece", "pack"]

Integers = NDArray[np.int64]


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document."""

    document: int
    start: int
    stop: int


class PackedRows(ABC):
    """Rows of `length` tokens, counted from 0; the order in which they are used is `order`'s business.

    Args:
        lengths: int64 [documents], tokens of each.
        length: of a row.

    Attributes:
        length: tokens per row, the padding behind its pieces included.
        tokens: tokens in all documents, which are the tokens in all rows.
    """

    def __init__(self, lengths: Integers, length: int) -> None:
        self.length = length
        self.tokens = int(lengths.sum())
        self._lengths = lengths

    @property
    def fill(self) -> float:
        """Share of the places that hold tokens; the rest is padding. 1 where there are no rows."""
        return self.tokens / (len(self) * self.length) if len(self) else 1.0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pieces(self, row: int) -> list[Piece]:
        """What lies in a row, from its first place on and without gaps.

        Raises:
            IndexError: for a row that is not there.
        """

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}.")


def pack(documents: TokenDocuments, length: int, mode: Literal["contiguous", "best_fit"], seed: int = 0) -> PackedRows:
    """Lay documents into rows.

    ``contiguous``: documents, in an order drawn by `seed`, behind each other; the row's end cuts. Only the last row has
    padding. 16 bytes of memory per document.

    ``best_fit``: documents stay whole; only what is longer than a row is cut, into rows of its own and a rest.
    Documents and rests are placed by best-fit decreasing: the longest first, each where it leaves the least room, into
    a new row where it fits nowhere; among equals `seed` decides. Rows end in padding, see `PackedRows.fill`. 16 bytes
    of memory per piece; beside sorting them, the time is proportional to their number.

    Documents without tokens are in no row.

    Raises:
        ValueError: for a length below 1 and another mode.
    """
    if length < 1:
        raise ValueError(f"length is {length}; expected at least 1 token per row.")
    if mode not in ("contiguous", "best_fit"):
        raise ValueError(f"packing is {mode!r}; expected 'contiguous' or 'best_fit'.")
    lengths = np.asarray(documents.lengths, dtype=np.int64)
    # A sort by random numbers, stable: the same with every version of numpy, unlike its generators' permutations.
    order = np.argsort(stream(DOCUMENTS, seed, np.arange(len(lengths))), kind="stable")
    order = order[lengths[order] > 0]
    return (_Contiguous if mode == "contiguous" else _BestFit)(lengths, length, order)


class _Contiguous(PackedRows):
    def __init__(self, lengths: Integers, length: int, order: Integers) -> None:
        super().__init__(lengths, length)
        self._order = order
        self._ends = np.cumsum(lengths[order])  # of each document in the stream of all of them

    def __len__(self) -> int:
        return -(-self.tokens // self.length)

    def pieces(self, row: int) -> list[Piece]:
        self._check(row)
        place, end = row * self.length, min((row + 1) * self.length, self.tokens)
        found = []
        number = int(np.searchsorted(self._ends, place, side="right"))
        while place < end:
            document, document_end = int(self._order[number]), int(self._ends[number])
            start = place - (document_end - int(self._lengths[document]))
            stop = start + min(end, document_end) - place
            found.append(Piece(document, start, stop))
            place += stop - start
            number += 1
        return found


class _BestFit(PackedRows):
    def __init__(self, lengths: Integers, length: int, order: Integers) -> None:
        super().__init__(lengths, length)
        pieces = -(-lengths[order] // length)
        document = np.repeat(order, pieces)
        number = np.arange(len(document)) - np.repeat(
            np.cumsum(pieces) - pieces, pieces
        )  # of the piece, in its document
        tokens = np.minimum(lengths[document] - number * length, length)
        longest_first = np.argsort(-tokens, kind="stable")
        row_of, rows = _best_fit_decreasing(tokens[longest_first], length)
        by_row = longest_first[np.argsort(row_of, kind="stable")]
        self._document, self._start = document[by_row], number[by_row] * length
        self._first = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])

    def __len__(self) -> int:
        return len(self._first) - 1

    def pieces(self, row: int) -> list[Piece]:
        self._check(row)
        own = slice(self._first[row], self._first[row + 1])
        found = zip(self._document[own].tolist(), self._start[own].tolist(), strict=True)
        return [Piece(doc, start, min(start + self.length, int(self._lengths[doc]))) for doc, start in found]


def _best_fit_decreasing(sizes: Integers, capacity: int) -> tuple[Integers, int]:
    """Bin of each item, and the number of bins.

    Items of one size are placed together. The fullest bin that has room for one is filled with as many of them as it
    takes, since after each it is the fullest still; then all bins that were as full as it, then the next fullest. So a
    bin is touched once per size of what it gets, and not once per item.

    Args:
        sizes: descending, in 1 ... `capacity`.
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bins = 0
    open_bins: dict[int, list[Integers]] = {}  # by the room that is left
    rooms: list[int] = []  # the keys of it, ascending

    def leave(room: int, some: Integers) -> None:
        if room and len(some):
            if room not in open_bins:
                open_bins[room] = []
                insort(rooms, room)
            open_bins[room].append(some)

    def take(room: int, count: int) -> Integers:
        """At most so many bins with this room; those that were left last come first."""
        taken, stack = [], open_bins[room]
        while stack and count:
            some = stack.pop()
            if len(some) > count:
                stack.append(some[count:])
                some = some[:count]
            taken.append(some)
            count -= len(some)
        if not stack:
            del open_bins[room], rooms[bisect_left(rooms, room)]
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    starts = np.flatnonzero(np.diff(sizes, prepend=0))
    for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(sizes)], strict=False):
        size = int(sizes[first])
        while first < stop:
            fitting = bisect_left(rooms, size)
            room = rooms[fitting] if fitting < len(rooms) else capacity
            each = room // size
            wanted = -(-(stop - first) // each)
            if fitting < len(rooms):
                some = take(room, wanted)
            else:
                some = np.arange(bins, bins + wanted)
                bins += wanted
            placed = min(stop - first, len(some) * each)
            bin_of[first : first + placed] = np.repeat(some, each)[:placed]
            full, more = divmod(placed, each)
            leave(room - each * size, some[:full])
            leave(room - more * size, some[full:])
            first += placed
    return bin_of, bins
