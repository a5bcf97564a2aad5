"""Which row of which source is sample number k: a closed form, so that a run's place in its data is one number.

Nothing here has a state. The order follows from the seed, the sources' sizes and their weights, and is the same for any
number of processes, workers and micro-batches. All of it is integer arithmetic on 64 bits: the same on every platform
and with every version of numpy, whose own generators promise no such thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["SampleOrder", "permuted", "stream"]

#: Samples after which the pattern of sources repeats; in each stretch of this length every source has its exact number.
PERIOD = 2**20
#: Rounds of the Feistel network. 4 are enough for large domains (Luby and Rackoff, SIAM J. Comput. 17, 1988); of 4 or 5
#: rows, all orders are equally likely only after 16.
ROUNDS = 24
# Numbers that go into `stream` first, so that different uses of one seed have nothing in common.
DOCUMENTS, ROWS, MIXTURE = range(3)
# splitmix64 with variant 13 of its mixer: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

Unsigned = NDArray[np.uint64]


def mixed(bits: Unsigned) -> Unsigned:
    """The output function of splitmix64: every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> _SHIFTS[0])) * _FACTORS[0]
    bits = (bits ^ (bits >> _SHIFTS[1])) * _FACTORS[1]
    return bits ^ (bits >> _SHIFTS[2])


def _unsigned(values: ArrayLike) -> Unsigned:
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)  # arrays wrap around silently, scalars warn


def stream(*parts: ArrayLike) -> Unsigned:
    """64 random-looking bits for each combination of `parts`, whole numbers from 0 on that are broadcast together."""
    bits = np.zeros(1, dtype=np.uint64)
    for part in parts:
        bits = mixed(bits + STEP + _unsigned(part))
    return bits


def permuted(index: ArrayLike, size: ArrayLike, key: ArrayLike) -> NDArray[np.int64]:
    """Element `index` of a permutation of ``range(size)`` that `key` names, without the others: O(1) time and memory.

    A Feistel network over the (column, row) of a rectangle that just covers `size`. What lands outside of `size` goes
    through it again until it is inside (cycle walking), which is seldom: the rectangle is larger by about two rows.

    Args:
        index: in ``range(size)``.
        size: at least 1.
        key: 64 bits, of `stream`.

    All three are broadcast together, so one call takes numbers of many permutations.

    Returns:
        int64, one dimension at least.

    Raises:
        ValueError: for an index that is out of range.
    """
    if (np.less(index, 0) | np.greater_equal(index, size)).any():
        raise ValueError("an index is outside of range(size).")
    place, sizes, keys = np.broadcast_arrays(_unsigned(index), _unsigned(size), _unsigned(key))
    # An even number of columns: rounds that all are even permutations would leave half of the orders out.
    columns = (_square_root(sizes) // np.uint64(2) + np.uint64(1)) * np.uint64(2)
    rows = sizes // columns + np.uint64(1)
    result = place.copy()
    outside = np.ones(place.shape, dtype=bool)
    while outside.any():
        result[outside] = _network(result[outside], columns[outside], rows[outside], keys[outside])
        outside = result >= sizes
    return result.astype(np.int64)


def _square_root(values: Unsigned) -> Unsigned:
    """Rounded down, exactly."""
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([math.isqrt(int(value)) for value in unique], dtype=np.uint64)[inverse].reshape(values.shape)


def _network(place: Unsigned, columns: Unsigned, rows: Unsigned, key: Unsigned) -> Unsigned:
    """A bijection of ``range(columns * rows)``: each round adds to one coordinate a number that hangs on the other."""
    row, column = np.divmod(place, columns)
    for _ in range(ROUNDS // 2):
        key = key + STEP
        column = (column + mixed(row ^ mixed(key)) % columns) % columns
        key = key + STEP
        row = (row + mixed(column ^ mixed(key)) % rows) % rows
    return row * columns + column


class SampleOrder:
    """Sample number k of a run -> source, epoch of that source, and row in it.

    - Mixture: of `PERIOD` samples in a row, source i has exactly ``quotas[i]``, its weight's share in 1,048,576ths by
      largest remainders, at least 1. They are spread evenly with a random jitter: of any first n samples, a source has
      its share of n to within as many samples as there are sources.
    - Epochs: a source's n-th sample is row ``permutation(n mod rows)`` of epoch ``n // rows``. Each epoch has a
      permutation of its own, so each row comes exactly once per epoch.

    Memory does not grow with the run or the sources: a table of 12 MB for the mixture.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """
        Args:
            rows: number of rows of each source, at least 1.
            weights: shares of the samples, in any unit.
            seed: from 0 on, below 2**64.

        Raises:
            ValueError: for sources without rows, weights that are not above 0 and finite, and other lengths.
        """
        if not rows or len(rows) != len(weights):
            raise ValueError(f"{len(rows)} sources and {len(weights)} weights; expected as many, at least one.")
        if min(rows) < 1:
            raise ValueError(f"source {rows.index(min(rows))} has no rows.")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; expected a whole number from 0 on, below 2**64.")
        self.seed = seed
        self._rows = np.array(rows, dtype=np.int64)
        self.quotas = quotas(weights)
        self._source, self._rank = _pattern(self.quotas, seed)

    def locate(self, samples: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Source, epoch and row of each of `samples` (numbers from 0 on), int64 ``[samples]`` each."""
        period, place = np.divmod(np.atleast_1d(np.asarray(samples, dtype=np.int64)), PERIOD)
        source = self._source[place].astype(np.int64)
        rows = self._rows[source]
        epoch, index = np.divmod(period * self.quotas[source] + self._rank[place], rows)
        return source, epoch, permuted(index, rows, stream(ROWS, self.seed, source, epoch))


def quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """How many of `PERIOD` samples each source gets.

    Raises:
        ValueError: for weights that are not above 0 and finite, and for more than `PERIOD` of them.
    """
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight of source {number} is {weight}; expected a number above 0.")
    if len(weights) > PERIOD:
        raise ValueError(f"{len(weights)} sources; at most {PERIOD} can be mixed.")
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) * PERIOD / total for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    by_need = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    missing = PERIOD - sum(counts)
    for i in by_need[: max(0, missing)]:
        counts[i] += 1
    for _ in range(-missing):  # what sources of less than one sample got too much
        counts[counts.index(max(counts))] -= 1
    return np.array(counts, dtype=np.int64)


def _pattern(counts: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For each place of a period, its source, and how many samples of that source lie before it in the period.

    The n-th of a source's c samples is due at a random point of the n-th of c equal parts of the period.
    """
    due = []
    for source, count in enumerate(counts):
        number = np.arange(count, dtype=np.uint64)
        jitter = stream(MIXTURE, seed, source, number) >> np.uint64(32)
        due.append((((number << np.uint64(32)) + jitter) << np.uint64(11)) // np.uint64(count))
    order = np.argsort(np.concatenate(due), kind="stable")
    source_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rank_of = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    return source_of[order], rank_of[order]
