"""Every kind of cache through every operation: what follows is what an uncached run of the same rows gives.

Growing and static caches, full and sliding layers, three pairs of convolution widths. What only one kind has (room that
grows, slots that are used in turn) is in `test_cache_growth` and `test_static_cache`.
"""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch

from cached_runs import assert_close, cache_for, feed, left_padded, uncached
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

LAYERS = {
    "full": {},
    "sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4},
}
WIDTHS = [(1, 1), (2, 2), (3, 4)]


@functools.cache
def model_with(layers: str, widths: tuple[int, int]) -> ZayaForCausalLM:
    config = tiny_config(**LAYERS[layers], cca_time0=widths[0], cca_time1=widths[1])
    return redraw(ZayaForCausalLM(config))


@pytest.fixture(params=["dynamic", "static"])
def kind(request) -> str:
    return request.param


@pytest.fixture(params=LAYERS)
def layers(request) -> str:
    return request.param


@pytest.fixture(params=WIDTHS, ids=lambda widths: f"widths {widths[0]} {widths[1]}")
def model(request, layers) -> ZayaForCausalLM:
    return model_with(layers, request.param)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


MOVES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
}


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 3, 6)], ids=["unpadded", "left pads"])
@pytest.mark.parametrize("operation", MOVES)
def test_rows_move_together(model, kind, operation, lengths):
    move, rows = MOVES[operation]
    ids, mask = left_padded(*lengths)
    cache = cache_for(model, kind=kind)
    feed(model, cache, ids, [5, 4], mask)
    move(cache)
    new = random_ids(len(rows), 7, seed=5)
    got = feed(model, cache, new, [1, 1, 3, 2])
    whole_mask = torch.nn.functional.pad(mask[rows], (0, 7), value=1)
    assert_close(got, uncached(model, torch.cat([ids[rows], new], dim=1), attention_mask=whole_mask)[:, 9:])


@pytest.mark.parametrize("left", [0, 1, 5, 8])
def test_crop_then_other_tokens(model, kind, left):
    ids, new = random_ids(2, 9), random_ids(2, 8, seed=4)
    cache = cache_for(model, recording=True, kind=kind)
    feed(model, cache, ids, [6, 1, 2])
    cache.crop(left - 9)
    assert cache.get_seq_length() == left
    got = feed(model, cache, new, [1, 4, 3])
    assert_close(got, uncached(model, torch.cat([ids[:, :left], new], dim=1))[:, left:])


def test_recording_that_begins_later(model, kind):
    ids, new = random_ids(2, 12), random_ids(2, 6, seed=4)
    cache = cache_for(model, kind=kind)
    feed(model, cache, ids[:, :7], [7])
    cache.activate_past_recording()
    feed(model, cache, ids[:, 7:], [1, 4])
    cache.crop(-4)
    got = feed(model, cache, new, [4, 2])
    assert_close(got, uncached(model, torch.cat([ids[:, :8], new], dim=1))[:, 8:])


@pytest.mark.parametrize("rows", [3, 1])
def test_reset_then_another_prompt(model, kind, rows):
    cache = cache_for(model, kind=kind)
    ids, mask = left_padded(9, 4, 6)
    feed(model, cache, ids, [5, 4], mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state()
    other = random_ids(rows, 11, seed=8)
    got = feed(model, cache, other, [4, 1, 6])
    assert cache.get_seq_length() == 11
    assert_close(got, uncached(model, other))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("copied", COPIES)
def test_a_prompt_forks(model, kind, copied):
    ids, mask = left_padded(9, 5)
    cache = cache_for(model, kind=kind)
    feed(model, cache, ids, [9], mask)
    fork = COPIES[copied](cache)
    for step, sizes in enumerate(([1, 3], [2, 2])):  # in turns: neither writes into the other
        for branch, seed in ((fork, 1), (cache, 2)):
            new = random_ids(2, 8, seed=seed)
            got = feed(model, branch, new[:, 4 * step : 4 * step + 4], sizes)
            whole = torch.cat([ids, new[:, : 4 * step + 4]], dim=1)
            whole_mask = torch.nn.functional.pad(mask, (0, 4 * step + 4), value=1)
            assert_close(got, uncached(model, whole, attention_mask=whole_mask)[:, -4:])


@pytest.mark.parametrize("padding", ["right", "both", "inside"])
def test_padding_behind_tokens_then_more(model, kind, padding):
    """What follows right padding sees the real tokens; windows count those alone."""
    ids, new = random_ids(2, 9), random_ids(2, 7, seed=6)
    mask = torch.ones(2, 9, dtype=torch.long)
    hidden = {"right": slice(5, 9), "both": slice(6, 9), "inside": slice(3, 6)}[padding]
    mask[1, hidden] = 0
    if padding == "both":
        mask[1, :2] = 0
    cache = cache_for(model, kind=kind)
    feed(model, cache, ids, [9], mask)
    got = feed(model, cache, new, [1, 2, 1, 3])
    if padding == "inside":  # within one call the convolutions' look-back ends at padding
        whole_mask = torch.nn.functional.pad(mask, (0, 7), value=1)
        assert_close(got, uncached(model, torch.cat([ids, new], dim=1), attention_mask=whole_mask)[:, 9:])
        return
    for row in range(2):
        alone = torch.cat([ids[row, mask[row].bool()], new[row]])[None]
        assert_close(got[row : row + 1], uncached(model, alone)[:, -7:])


def test_packed_documents_then_more(model, kind):
    """The last document goes on, the others are hidden."""
    ids, new = random_ids(1, 9), random_ids(1, 6, seed=6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    cache = cache_for(model, kind=kind)
    feed(model, cache, ids, [9], position_ids=positions)
    got = feed(model, cache, new, [1, 3, 2])
    assert_close(got, uncached(model, torch.cat([ids[:, 6:], new], dim=1))[:, 3:])
