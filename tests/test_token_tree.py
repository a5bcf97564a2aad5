"""Forests of texts: what each holds, and which texts go into one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_hf.token_tree import common_beginning, grow, packs

TEXTS = st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=14).map(sorted)


@given(TEXTS)
def test_every_text_is_a_path_and_every_token_stands_once(texts: list[tuple[int, ...]]) -> None:
    tree = grow(texts)
    assert len(tree) == len({text[:end] for text in texts for end in range(1, len(text) + 1)})
    allowed = tree.allowed()
    for text, leaf in zip(texts, tree.leaves, strict=True):
        path = tree.path(leaf)
        assert tuple(tree.ids[path]) == text
        assert tree.positions[path].tolist() == list(range(len(text)))
        assert set(np.flatnonzero(allowed[path[-1]])) == set(path.tolist())
        for tokens in range(len(text) + 2):
            assert tree.path(leaf, tokens).tolist() == path.tolist()[len(path) - min(tokens, len(path)) :]


@given(TEXTS)
def test_what_goes_on_from_a_segment_lies_behind_it(texts: list[tuple[int, ...]]) -> None:
    tree = grow(texts)
    segments, allowed = tree.segment_of(), tree.allowed()
    for segment, (start, end, rest) in enumerate(zip(tree.starts, tree.ends, tree.subtree_ends, strict=True)):
        assert (segments[start:end] == segment).all()
        seen_by = np.flatnonzero(allowed[:, end - 1])  # its last token is seen by itself and by all that goes on
        assert seen_by.tolist() == list(range(end - 1, rest))


@given(TEXTS, st.integers(1, 40))
def test_packs_are_neighbours_within_the_budget(texts: list[tuple[int, ...]], budget: int) -> None:
    found = packs(texts, budget)
    assert [index for pack in found for index in pack] == list(range(len(texts)))
    for pack in found:
        assert len(pack) == 1 or len(grow(texts[pack.start : pack.stop])) <= budget


def test_a_full_pack_ends_between_questions() -> None:
    chance = random.Random(0)
    texts = []
    for question in range(12):
        context = [question] + [chance.randrange(100) for _ in range(29)]
        texts += [(*context, 100 + answer, answer) for answer in range(4)]
    for pack in packs(texts, budget=100):  # two questions are 76 tokens, two and a half would fit
        assert pack.start % 4 == pack.stop % 4 == 0


def test_common_beginning() -> None:
    assert common_beginning((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_beginning((1, 2), (1, 2, 3)) == 2
    assert common_beginning((1,), (2,)) == common_beginning((), (1,)) == 0


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least one token"),
        ([()], "at least one token"),
        ([(1,), (1,)], "different and in rising order"),
        ([(2,), (1,)], "different and in rising order"),
    ],
)
def test_refused(texts: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow(texts)
