"""The order of samples: a permutation per epoch, exact shares, O(1) access, and the same numbers for ever."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from zaya_hf.training.data import order
from zaya_hf.training.data.order import PERIOD, SampleOrder, permuted, quotas, stream

SIZES = [*range(1, 70), 97, 127, 128, 129, 1000, 1021, 4095, 4096, 4097, 65536, 65537]


# ---------------------------------------------------------------------------------------------------- permutations
@pytest.mark.parametrize("size", SIZES)
def test_each_number_once(size: int) -> None:
    for seed in range(3):
        assert sorted(permuted(np.arange(size), size, stream(seed))) == list(range(size))


@hypothesis.given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_each_number_once_for_any_size_and_key(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, np.array([key], np.uint64))), np.arange(size))


@hypothesis.given(st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 9), st.floats(0, 0.999)), min_size=1))
def test_many_permutations_in_one_call_as_one_by_one(asked: list[tuple[int, int, float]]) -> None:
    sizes, seeds = [size for size, _, _ in asked], [seed for _, seed, _ in asked]
    index = [int(size * share) for size, _, share in asked]
    together = permuted(index, sizes, stream(seeds))
    assert together.tolist() == [int(permuted(i, n, stream(s))[0]) for i, n, s in zip(index, sizes, seeds, strict=True)]
    assert (together >= 0).all()
    assert (together < sizes).all()


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_indices_outside_are_refused(index: int) -> None:
    with pytest.raises(ValueError, match="outside of range"):
        permuted(index, 5, stream(0))


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """Above this, chance is out of the question: five standard deviations."""
    return freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_few_rows_are_equally_likely(size: int) -> None:
    keys, orders = 6000, math.factorial(size)
    drawn = permuted(np.arange(size), size, stream(7, np.arange(keys))[:, None])
    found = Counter(map(tuple, drawn.tolist()))
    counts = np.array([found[each] for each in itertools.permutations(range(size))])
    assert chi_square(counts, keys / orders) < bound(orders - 1)


@pytest.mark.parametrize("size", [24, 31])
def test_pairs_are_equally_likely(size: int) -> None:
    """Of two neighbours in the order, and of two far apart, every pair of rows is equally likely."""
    keys, pairs = 20_000, size * (size - 1)
    drawn = permuted(np.arange(size), size, stream(8, np.arange(keys))[:, None])
    for first, second in ((0, 1), (5, 11), (size - 2, size - 1)):
        counts = np.zeros((size, size))
        np.add.at(counts, (drawn[:, first], drawn[:, second]), 1)
        assert counts.diagonal().sum() == 0
        assert chi_square(counts[~np.eye(size, dtype=bool)], keys / pairs) < bound(pairs - 1)


def test_a_long_permutation_has_no_pattern() -> None:
    size = 100_000
    drawn = permuted(np.arange(size), size, stream(3))
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(size)
    blocks = np.zeros((20, 20))  # where the rows of each 20th of the order lie
    np.add.at(blocks, (np.arange(size) * 20 // size, drawn * 20 // size), 1)
    assert chi_square(blocks, size / 400) < bound(19 * 19)
    assert np.sum(drawn == np.arange(size)) < 10  # fixed points: 1 is expected


# ---------------------------------------------------------------------------------------------------------- mixture
@hypothesis.settings(max_examples=2)
@hypothesis.given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
def test_shares_are_exact_over_a_period_and_near_anywhere(weights: list[float], seed: int) -> None:
    mixed = SampleOrder([3 + i for i in range(len(weights))], weights, seed)
    share = np.array(weights) / math.fsum(weights)
    assert mixed.quotas.sum() == PERIOD
    assert np.abs(mixed.quotas - share * PERIOD).max() <= len(weights)
    source, _, _ = mixed.locate(np.arange(PERIOD))
    assert np.array_equal(np.bincount(source, minlength=len(weights)), mixed.quotas)
    shifted, _, _ = mixed.locate(5 * PERIOD + np.arange(2000))  # the pattern goes on the same
    assert np.array_equal(shifted, source[:2000])
    for stop in (1, 10, 100, 1000, 12_345, PERIOD // 3):
        counts = np.bincount(source[:stop], minlength=len(weights))
        assert np.abs(counts - stop * mixed.quotas / PERIOD).max() <= len(weights)


def test_quotas_by_largest_remainder() -> None:
    assert quotas([2, 2]).tolist() == [PERIOD // 2, PERIOD // 2]
    assert quotas([1, 1, 1]).tolist() == [349526, 349525, 349525]
    assert quotas([1, 1e-12, 1e-12]).tolist() == [PERIOD - 2, 1, 1]
    assert quotas([1e-12] * 3 + [1, 1]).tolist() == [1, 1, 1, PERIOD // 2 - 2, PERIOD // 2 - 1]
    assert quotas([5e-324, 1.7e308]).tolist() == [1, PERIOD - 1]


def test_sources_have_orders_of_their_own() -> None:
    """Two sources of one size, two epochs and two seeds: four different orders."""
    orders = set()
    for seed in (0, 1):
        source, epoch, row = SampleOrder([50, 50], [1, 1], seed).locate(np.arange(300))
        for one, turn in itertools.product((0, 1), (0, 1)):
            orders.add(tuple(row[(source == one) & (epoch == turn)].tolist()))
    assert len(orders) == 8
    assert all(sorted(each) == list(range(50)) for each in orders)


@hypothesis.given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=4), seed=st.integers(0, 2**32), data=st.data())
def test_each_row_once_per_epoch(rows: list[int], seed: int, data: st.DataObject) -> None:
    weights = [data.draw(st.floats(0.1, 10)) for _ in rows]
    source, epoch, row = SampleOrder(rows, weights, seed).locate(np.arange(1500))
    for number, size in enumerate(rows):
        own = source == number
        assert (np.diff(epoch[own]) >= 0).all()
        for turn in range(int(epoch[own].max())):  # the last one may not be over
            assert sorted(row[own & (epoch == turn)]) == list(range(size))


def test_any_sample_at_once_and_far_away() -> None:
    mixed = SampleOrder([10**9, 10**7 + 19, 3], [0.7, 0.2, 0.1], 5)
    far = 10**9 + np.arange(4096)
    started = time.perf_counter()
    together = np.stack(mixed.locate(far))
    assert time.perf_counter() - started < 0.5  # about 3 ms
    one_by_one = np.concatenate([np.stack(mixed.locate(int(k))) for k in far[:50]], axis=1)
    assert np.array_equal(together[:, :50], one_by_one)
    source, epoch, row = mixed.locate(2**60)
    assert epoch[0] == (2**60 // PERIOD * mixed.quotas[source[0]]) // [10**9, 10**7 + 19, 3][source[0]]
    assert 0 <= row[0] < [10**9, 10**7 + 19, 3][source[0]]


def test_the_order_is_what_it_always_was() -> None:
    """If this fails, runs that are resumed go on with other data: raise `rows.ORDER_VERSION`, or undo the change."""
    source, epoch, row = SampleOrder([7, 1000, 3], [0.5, 0.3, 0.2], 42).locate(np.arange(20))
    assert source.tolist() == [2, 0, 0, 1, 0, 1, 0, 2, 1, 0, 0, 1, 0, 2, 0, 2, 1, 0, 0, 1]
    assert epoch.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert row.tolist() == [1, 1, 2, 387, 6, 195, 3, 0, 413, 5, 4, 412, 0, 2, 4, 0, 34, 6, 0, 813]
    source, epoch, row = SampleOrder([7, 1000, 3], [0.5, 0.3, 0.2], 42).locate(10**12 + np.arange(5))
    assert (source.tolist(), epoch.tolist(), row.tolist()) == (
        [2, 0, 1, 0, 0],
        [66666603088, 71428571428, 300000190, 71428571428, 71428571428],
        [2, 0, 451, 6, 5],
    )
    assert [int(word) for word in stream(0, [1, 2])] == [3069472533636442495, 9405607414650848140]


def test_the_round_function_is_splitmix64() -> None:
    """First outputs of the published generator for the seed 1234567."""
    state = np.uint64(1234567)
    steps = state + order.STEP * np.arange(1, 4, dtype=np.uint64)
    assert order.mixed(steps).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("rows", "weights", "seed", "message"),
    [
        ([], [], 0, "0 sources and 0 weights; expected as many, at least one"),
        ([3], [1, 2], 0, "1 sources and 2 weights"),
        ([3, 0], [1, 1], 0, "source 1 has no rows"),
        ([3, 4], [1, 0], 0, "weight of source 1 is 0; expected a number above 0"),
        ([3, 4], [float("nan"), 1], 0, "weight of source 0 is nan"),
        ([3], [float("inf")], 0, "weight of source 0 is inf"),
        ([3], [1], -1, "seed is -1"),
        ([3], [1], 2**64, "seed is 18446744073709551616"),
    ],
)
def test_what_is_no_order_is_refused(rows: list[int], weights: list[float], seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleOrder(rows, weights, seed)
