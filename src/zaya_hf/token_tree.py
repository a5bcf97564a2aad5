"""Many texts that begin alike as one packed row in which every token stands once.

Questions share their examples, answers share their question. As a forest, each common beginning is computed once: a
token attends to the tokens on the way from its root to itself, and CCA looks back along the same way. A forest is data;
how a model reads one is in `tree_attention`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

#: of a full pack, the share at the end in which a better place to cut is looked for
_LOOK_FOR_A_CUT = 4


@dataclass(frozen=True)
class TokenTree:
    """A forest of segments, in the order of depth-first search.

    Attributes:
        ids: ``[T]`` int64, the tokens.
        positions: ``[T]`` int64, how many tokens lie between a token and its root.
        starts, ends: ``[N]`` int64, first token of a segment and the one behind its last.
        subtree_ends: ``[N]`` int64, behind the last token of all that goes on from a segment, which is contiguous.
        parents: ``[N]`` int64, the segment at whose end this one begins; -1 for a root. Parents come first.
        leaves: for each text, in the order given, the segment at whose end it ends.
    """

    ids: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    subtree_ends: np.ndarray
    parents: np.ndarray
    leaves: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, segment: int, tokens: int | None = None) -> np.ndarray:
        """Where the last `tokens` tokens up to the end of `segment` lie, oldest first, ``[min(tokens, depth)]`` int64;
        None: all of them from the root on."""
        pieces, left = [], len(self.ids) if tokens is None else tokens
        while segment >= 0 and left > 0:
            start, end = int(self.starts[segment]), int(self.ends[segment])
            pieces.append(np.arange(max(start, end - left), end))
            left -= end - start
            segment = int(self.parents[segment])
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int64)

    def segment_of(self) -> np.ndarray:
        """``[T]`` int64: the segment of every token."""
        return np.repeat(np.arange(len(self.starts)), self.ends - self.starts)

    def allowed(self) -> np.ndarray:
        """``[T, T]`` bool: whether the token of a row may attend to that of a column. For devices and tests; its memory
        is the square of the tokens."""
        segments, count = self.segment_of(), len(self.starts)
        above = np.eye(count, dtype=bool)
        for segment, parent in enumerate(self.parents):
            if parent >= 0:
                above[segment] |= above[parent]
        order = np.arange(len(self.ids))
        return above[segments][:, segments] & (order[None] <= order[:, None])


def grow(texts: Sequence[Sequence[int]]) -> TokenTree:
    """The forest of `texts`.

    Args:
        texts: token ids, each at least one, all different and in rising order (Python's, of lists or tuples).

    Raises:
        ValueError: for texts that are empty, equal or not in order.
    """
    for before, text in pairwise(texts):
        if tuple(before) >= tuple(text):
            raise ValueError("the texts of a tree must be different and in rising order.")
    if not texts or not texts[0]:
        raise ValueError("a tree needs texts of at least one token.")
    # What a text adds to the one before it is one stretch, cut where later texts leave it.
    common = [0, *(common_beginning(a, b) for a, b in pairwise(texts))]
    cuts: list[set[int]] = [{len(text)} for text in texts]
    left_from: list[int] = []
    open_stretches: list[int] = []
    for index, depth in enumerate(common):
        while open_stretches and common[open_stretches[-1]] >= depth:
            open_stretches.pop()
        left_from.append(open_stretches[-1] if open_stretches else -1)
        if open_stretches:
            cuts[open_stretches[-1]].add(depth)
        open_stretches.append(index)

    starts: list[int] = []
    ends: list[int] = []
    parents: list[int] = []
    leaves: list[int] = []
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    offset = 0
    numbers: list[tuple[list[int], int]] = []  # of each stretch: its cuts in order, number of its first segment
    for index, text in enumerate(texts):
        depth, ordered = common[index], sorted(cuts[index])
        if left_from[index] < 0:
            parent = -1
        else:
            at, first = numbers[left_from[index]]
            parent = first + bisect_left(at, depth)
        numbers.append((ordered, len(starts)))
        begin = depth
        for end in ordered:
            starts.append(offset + begin - depth)
            ends.append(offset + end - depth)
            parents.append(parent)
            parent, begin = len(starts) - 1, end
        leaves.append(parent)
        ids.append(np.asarray(text[depth:], dtype=np.int64))
        positions.append(np.arange(depth, len(text)))
        offset += len(text) - depth
    subtree_ends = list(ends)
    for segment in reversed(range(len(starts))):
        if parents[segment] >= 0:
            subtree_ends[parents[segment]] = max(subtree_ends[parents[segment]], subtree_ends[segment])
    return TokenTree(
        np.concatenate(ids),
        np.concatenate(positions),
        starts=np.asarray(starts, dtype=np.int64),
        ends=np.asarray(ends, dtype=np.int64),
        subtree_ends=np.asarray(subtree_ends, dtype=np.int64),
        parents=np.asarray(parents, dtype=np.int64),
        leaves=leaves,
    )


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared in C, so halving beats a loop over tokens
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def packs(texts: Sequence[Sequence[int]], budget: int) -> list[range]:
    """Which neighbours among `texts` (as for `grow`) go into one forest of at most `budget` tokens.

    Where a pack is full, it ends at the place in its last quarter that is cheapest: what the texts on both sides have
    in common is computed once more. A text of more tokens than the budget is a pack of its own.
    """
    found, first, tokens = [], 0, 0
    shared: list[int] = []  # with the text before, for each text of the open pack
    sizes: list[int] = []
    index = 0
    while index < len(texts):
        common = common_beginning(texts[index - 1], texts[index]) if index > first else 0
        added = len(texts[index]) - common
        if index > first and tokens + added > budget:
            cut, best, so_far = index, common, tokens
            while cut - 1 > first:
                so_far -= sizes[-1]
                if so_far < budget - budget // _LOOK_FOR_A_CUT:
                    break
                cut -= 1
                sizes.pop()
                if shared[cut - first] < best:
                    best, index = shared[cut - first], cut
            found.append(range(first, index))
            first, tokens, shared, sizes = index, 0, [], []
            continue
        shared.append(common)
        sizes.append(added)
        tokens += added
        index += 1
    if first < len(texts):
        found.append(range(first, len(texts)))
    return found
