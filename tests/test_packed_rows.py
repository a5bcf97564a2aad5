"""Packing: every token in one place, every pair of neighbours a target once, best fit as it is defined, and fast."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from memory_documents import numbered
from zaya_hf.training.data.packing import PackedRows, Piece, pack

MODES = ["contiguous", "best_fit"]
each_mode = pytest.mark.parametrize("mode", MODES)
lengths_of_documents = st.lists(st.integers(0, 30), max_size=40)


def all_pieces(rows: PackedRows) -> list[Piece]:
    return [piece for row in range(len(rows)) for piece in rows.pieces(row)]


@each_mode
@hypothesis.given(lengths=lengths_of_documents, length=st.integers(1, 12), seed=st.integers(0, 2**32))
@hypothesis.example(lengths=[3, 0, 0, 5, 0, 0, 0, 2], length=12, seed=0)
def test_every_token_is_in_one_place(mode: str, lengths: list[int], length: int, seed: int) -> None:
    rows = pack(numbered(lengths), length, mode, seed)
    found = [(doc, token) for doc, start, stop in all_pieces(rows) for token in range(start, stop)]
    assert sorted(found) == [(doc, token) for doc, tokens in enumerate(lengths) for token in range(tokens)]
    for row in range(len(rows)):
        assert all(start < stop for _, start, stop in rows.pieces(row))
        assert 0 < sum(stop - start for _, start, stop in rows.pieces(row)) <= length
    assert rows.tokens == sum(lengths)
    assert rows.fill == (pytest.approx(sum(lengths) / len(rows) / length) if lengths and sum(lengths) else 1)


@hypothesis.given(lengths=lengths_of_documents, length=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_contiguous_rows_are_one_stream(lengths: list[int], length: int, seed: int) -> None:
    rows = pack(numbered(lengths), length, "contiguous", seed)
    sizes = [sum(stop - start for _, start, stop in rows.pieces(row)) for row in range(len(rows))]
    assert all(size == length for size in sizes[:-1])
    assert len(rows) == -(-sum(lengths) // length)
    pieces = all_pieces(rows)
    for before, after in itertools.pairwise(pieces):
        goes_on = after.document == before.document and after.start == before.stop
        assert goes_on or (after.start == 0 and before.stop == lengths[before.document])


def naive_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Room that is left in each bin, sorted; one item after the other."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        room = min(fitting, default=None)
        if room is None:
            rooms.append(capacity - size)
        else:
            rooms[rooms.index(room)] -= size
    return sorted(rooms)


@hypothesis.given(lengths=st.lists(st.integers(0, 30), max_size=60), length=st.integers(1, 12), seed=st.integers(0, 9))
def test_best_fit_is_best_fit_decreasing(lengths: list[int], length: int, seed: int) -> None:
    rows = pack(numbered(lengths), length, "best_fit", seed)
    pieces = [min(length, tokens - first) for tokens in lengths for first in range(0, tokens, length)]
    room = [length - sum(stop - start for _, start, stop in rows.pieces(row)) for row in range(len(rows))]
    assert sorted(room) == naive_best_fit(pieces, length)


@hypothesis.given(lengths=st.lists(st.integers(1, 40), max_size=40), length=st.integers(1, 12))
def test_best_fit_cuts_only_what_is_longer_than_a_row(lengths: list[int], length: int) -> None:
    rows = pack(numbered(lengths), length, "best_fit", 0)
    cuts = Counter(document for document, _, _ in all_pieces(rows))
    assert cuts == {document: -(-tokens // length) for document, tokens in enumerate(lengths)}
    assert all(start % length == 0 for _, start, _ in all_pieces(rows))


@each_mode
def test_the_seed_decides_what_lies_together(mode: str) -> None:
    documents = numbered([7, 3, 5, 2, 4, 6, 1] * 20)
    packed = [
        [tuple(rows.pieces(row)) for row in range(len(rows))]
        for rows in (pack(documents, 16, mode, s) for s in (0, 0, 1))
    ]
    assert packed[0] == packed[1]
    assert packed[0] != packed[2]


def test_packing_is_what_it_always_was() -> None:
    """If this fails, runs that are resumed go on with other data: raise `rows.ORDER_VERSION`, or undo the change."""
    documents = numbered([7, 3, 0, 5, 21, 4, 6, 1])
    contiguous, best_fit = (pack(documents, 8, mode, 42) for mode in MODES)
    assert [list(map(tuple, contiguous.pieces(row))) for row in range(len(contiguous))] == [
        [(5, 0, 4), (0, 0, 4)],
        [(0, 4, 7), (6, 0, 5)],
        [(6, 5, 6), (1, 0, 3), (4, 0, 4)],
        [(4, 4, 12)],
        [(4, 12, 20)],
        [(4, 20, 21), (7, 0, 1), (3, 0, 5)],
    ]
    assert [list(map(tuple, best_fit.pieces(row))) for row in range(len(best_fit))] == [
        [(4, 0, 8)],
        [(4, 8, 16)],
        [(0, 0, 7), (7, 0, 1)],
        [(6, 0, 6)],
        [(4, 16, 21), (1, 0, 3)],
        [(3, 0, 5)],
        [(5, 0, 4)],
    ]


@pytest.mark.parametrize("length", [4096, 131_072])
@each_mode
def test_a_million_documents_take_seconds(mode: str, length: int) -> None:
    draw = np.random.default_rng(0)
    documents = numbered([1])
    for name, lengths in {
        "lognormal": np.maximum(1, draw.lognormal(6, 1.2, 10**6).astype(np.int64)),
        "uniform": draw.integers(1, length, 10**6),
    }.items():
        object.__setattr__(documents, "lengths", lengths)
        started = time.process_time()
        rows = pack(documents, length, mode, 0)
        seconds = time.process_time() - started
        assert seconds < 15, name  # 0.1 to 2 s on an idle machine
        assert rows.fill > (0.99 if name == "lognormal" or mode == "contiguous" else 0.98)


@each_mode
def test_no_documents_no_rows(mode: str) -> None:
    for lengths in ([], [0, 0]):
        rows = pack(numbered(lengths), 8, mode, 0)
        assert (len(rows), rows.tokens, rows.fill) == (0, 0, 1.0)


@each_mode
def test_what_cannot_be_packed_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="length is 0; expected at least 1 token per row"):
        pack(numbered([3]), 0, mode, 0)
    with pytest.raises(ValueError, match="packing is 'first_fit'; expected 'contiguous' or 'best_fit'"):
        pack(numbered([3]), 8, "first_fit", 0)
    rows = pack(numbered([3]), 2, mode, 0)
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            rows.pieces(row)
