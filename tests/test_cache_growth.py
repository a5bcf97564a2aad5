"""Memory of a growing cache: written in place where nobody can notice, never shared, and not much more than is held."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from transformers import DynamicCache

from cached_runs import KINDS, assert_close, assert_same_contents, cache_for, contents, feed, model_of, uncached
from zaya_hf import ZayaForCausalLM
from zaya_hf.cache_growth import SMALLEST_ROOM, appended, with_room
from zaya_hf.testing import RecordedRun, random_ids, record_run
from zaya_hf.visibility import Visibility


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


def held_by(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def addresses(cache: DynamicCache) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in held_by(cache)]


def tokens(*shape: int, start: float = 0.0, **kwargs) -> torch.Tensor:
    return start + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(**kwargs)


# ---------------------------------------------------------------------------------------------------------- in place
@torch.no_grad()
def test_steps_write_their_own_tokens_only() -> None:
    model = model_of("full")
    cache, ids = cache_for(model), random_ids(2, 40 + SMALLEST_ROOM)
    model(ids[:, :40], cache=cache)
    first, kept = addresses(cache), held_by(cache)
    assert len(set(first)) == len(first)  # no two share memory
    for step in ids[:, 40:].split(1, dim=1):
        before = [tensor.clone() for tensor in held_by(cache)]
        model(step, cache=cache)
        assert addresses(cache) == first
        for old, new in zip(before, held_by(cache), strict=True):
            assert torch.equal(old, new[:, :, :-1])
    model(ids[:, :1], cache=cache)  # the room is used up; `kept` keeps its addresses from being given out again
    assert len(kept) == len(first)
    assert not set(addresses(cache)) & set(first)


@torch.no_grad()
def test_memory_stays_near_what_is_held(model) -> None:
    """A quarter more at most, and never much for a short row; a sliding layer has twice its window at most."""
    cache, ids = cache_for(model), random_ids(1, 400)
    for part in ids.split([300, *[1] * 60, 40], dim=1):
        model(part, cache=cache)
        for layer in cache.layers:
            held = cache.get_seq_length()
            limit = 2 * (layer.sliding_window - 1) if layer.is_sliding else 1.25 * held + SMALLEST_ROOM
            for tensor in (layer.keys, layer.values):
                assert tensor.untyped_storage().nbytes() <= limit * 2 * 16 * 4


@torch.no_grad()
def test_tokens_are_copied_a_few_times_however_long_the_row() -> None:
    for steps in (1000, 8000):
        held, whole, copied = tokens(1, 1, 8, 1), None, 0
        for step in range(steps):
            before = None if whole is None else whole.data_ptr()
            held, whole = appended(held, tokens(1, 1, 1, 1, start=step), whole, with_room(held.shape[2] + 1))
            copied += held.shape[2] if whole.data_ptr() != before else 1
        assert copied < 8 * steps
        assert held[0, 0, -steps:, 0].tolist() == list(range(steps))


@torch.no_grad()
def test_a_sliding_layer_wanders_through_its_memory() -> None:
    model = model_of("sliding")
    cache, ids = cache_for(model), random_ids(1, 60)
    model(ids[:, :20], cache=cache)
    seen = []
    for step in ids[:, 20:].split(1, dim=1):
        model(step, cache=cache)
        seen.append(cache.layers[1].keys.untyped_storage().data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(seen))
    assert 1 <= moves <= len(seen) // (model.config.sliding_window - 1)


# ------------------------------------------------------------------------------------------------------ never shared
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("name", COPIES)
@torch.no_grad()
def test_a_copied_layer_and_its_original_never_write_into_each_other(model, name: str) -> None:
    """Tokens in turns, a crop, tokens in turns: each layer has its own behind the common ones."""
    cache = cache_for(model, recording=True)
    feed(model, cache, random_ids(2, 10), [9, 1])
    seen = Visibility(2, 1, torch.zeros(1, 1), key_lengths={"hybrid": 1, "hybrid_sliding": 1})
    for original in cache.layers:
        copied = COPIES[name](original)
        want = {id(layer): layer.keys.clone() for layer in (original, copied)}
        for step in range(4):
            for sign, layer in ((1, original), (-1, copied)):
                new = tokens(2, 2, 1, 16, start=100 + step) * sign
                layer.update(new, -new, seen)
                want[id(layer)] = torch.cat([want[id(layer)], new], dim=2)
            if step == 2:
                original.keys, original.values = original.keys[:, :, :-3], original.values[:, :, :-3]
                want[id(original)] = want[id(original)][:, :, :-3]
        for layer in (original, copied):
            assert torch.equal(layer.keys, want[id(layer)])
            assert torch.equal(layer.values[:, :, 10:], -want[id(layer)][:, :, 10:])
        assert original.keys.untyped_storage().data_ptr() != copied.keys.untyped_storage().data_ptr()


@torch.no_grad()
def test_a_fork_holds_no_room_of_its_parent(model) -> None:
    cache = cache_for(model)
    feed(model, cache, random_ids(1, 300), [299, 1])
    for fork in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert not set(addresses(fork)) & set(addresses(cache)) - {0}  # 0: no tokens are held
        for tensor in held_by(fork):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


@torch.no_grad()
def test_many_forks_of_one_prompt(model) -> None:
    prompt = random_ids(1, 9)
    cache = cache_for(model, recording=True)
    feed(model, cache, prompt, [8, 1])
    before = contents(cache)
    forks = [copy.deepcopy(cache) for _ in range(3)]
    news = [random_ids(1, 5, seed=10 + index) for index in range(3)]
    runs: list[list[RecordedRun]] = [[], [], []]
    for column in range(5):  # in turns
        for fork, new, of_fork in zip(forks, news, runs, strict=True):
            of_fork.append(record_run(model, new[:, column : column + 1], cache=fork))
    assert_same_contents(cache, before)
    for new, of_fork in zip(news, runs, strict=True):
        want = uncached(model, torch.cat([prompt, new], dim=1))
        assert_close(RecordedRun.join(of_fork), want[:, 9:])


@torch.no_grad()
def test_crop_and_other_tokens_overwrite(model) -> None:
    ids = random_ids(1, 30)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids[:, :12], [11, 1])
    for seed in range(4):
        new = random_ids(1, 3, seed=20 + seed)
        got = feed(model, cache, new, [1, 2])
        assert_close(got, uncached(model, torch.cat([ids[:, :12], new], dim=1))[:, 12:])
        cache.crop(-3)
    assert_close(feed(model, cache, ids[:, 12:], [1, 17]), uncached(model, ids)[:, 12:])


@pytest.mark.parametrize(
    ("operation", "rows"),
    [
        (lambda cache: cache.batch_select_indices(slice(1, 2)), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])), [1, 1, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    ],
    ids=["slice", "select", "repeat", "reorder"],
)
@torch.no_grad()
def test_moved_rows_are_owned(model, operation, rows) -> None:
    ids = random_ids(2, 10)
    cache = cache_for(model)
    feed(model, cache, ids, [9, 1])
    old, before = held_by(cache), [tensor.clone() for tensor in held_by(cache)]
    operation(cache)
    new = random_ids(len(rows), 4, seed=1)
    got = feed(model, cache, new, [1, 1, 2])
    assert_close(got, uncached(model, torch.cat([ids[rows], new], dim=1))[:, 10:])
    for tensor, was in zip(old, before, strict=True):
        assert torch.equal(tensor, was)


@torch.no_grad()
def test_keys_that_somebody_replaced(model) -> None:
    """Another tensor of the same contents, one expanded over the rows, one of another dtype."""
    ids = random_ids(1, 8)
    for replace in (torch.clone, lambda t: t[:, :, :, :], lambda t: t.expand(1, -1, -1, -1).contiguous()):
        cache = cache_for(model)
        feed(model, cache, ids[:, :6], [5, 1])
        for layer in cache.layers:
            layer.keys, layer.values = replace(layer.keys), replace(layer.values)
        assert_close(feed(model, cache, ids[:, 6:], [1, 1]), uncached(model, ids)[:, 6:])


def test_expanded_rows_and_other_dtypes_are_copied() -> None:
    with torch.no_grad():
        held, whole = appended(tokens(1, 2, 3, 4), tokens(1, 2, 1, 4), None, 10)
        expanded = held.expand(3, -1, -1, -1)
        grown, own = appended(expanded, tokens(3, 2, 1, 4, start=50), whole, 10)
        assert own is not whole
        assert torch.equal(grown, torch.cat([expanded, tokens(3, 2, 1, 4, start=50)], dim=2))
        foreign, _ = appended(tokens(1, 2, 3, 4, start=30), tokens(1, 2, 1, 4), None, 10)  # of the same strides
        grown, own = appended(foreign, tokens(1, 2, 1, 4, start=50), whole, 10)
        assert own is not whole
        assert torch.equal(grown, torch.cat([foreign, tokens(1, 2, 1, 4, start=50)], dim=2))
        wide, own = appended(held, tokens(1, 2, 1, 4, dtype=torch.float64), whole, 10)
        assert own is None
        assert wide.dtype == torch.float64
        # two layers that were given one tensor: only the one whose memory it is writes there
        other, own = appended(held, tokens(1, 2, 1, 4, start=60), None, 10)
        mine, same = appended(held, tokens(1, 2, 1, 4, start=70), whole, 10)
        assert same is whole
        assert own is not whole
        assert torch.equal(other[:, :, -1:], tokens(1, 2, 1, 4, start=60))
        assert torch.equal(mine[:, :, -1:], tokens(1, 2, 1, 4, start=70))


# ------------------------------------------------------------------------------------------------ gradients and modes
def test_a_graph_keeps_what_it_saved(model) -> None:
    """Grad mode, then none, then grad mode: nothing that a graph needs is overwritten."""
    ids = random_ids(1, 9)
    with torch.no_grad():
        cache = cache_for(model, recording=True)
        feed(model, cache, ids[:, :5], [4, 1])
    held = [(t, t.clone()) for t in held_by(cache)]
    first = model(ids[:, 5:7], cache=cache).logits
    with torch.no_grad():
        feed(model, cache, ids[:, 7:], [1, 1])
        cache.crop(-2)
    second = model(ids[:, 7:], cache=cache).logits
    model.zero_grad(set_to_none=True)
    (first.sum() + second.pow(2).sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        assert_close(torch.cat([first, second], dim=1).detach(), uncached(model, ids)[:, 5:].logits)
    for tensor, was in held:
        assert torch.equal(tensor, was)


@pytest.mark.parametrize(
    "modes",
    [
        [torch.inference_mode, torch.no_grad],
        [torch.no_grad, torch.inference_mode],
        [torch.inference_mode, torch.inference_mode],
        [torch.no_grad, torch.enable_grad, torch.no_grad],
        [torch.enable_grad, torch.inference_mode, torch.no_grad],
    ],
    ids=lambda modes: ", ".join(mode.__name__ for mode in modes),
)
def test_a_cache_goes_from_mode_to_mode(model, modes) -> None:
    ids = random_ids(1, 10)
    cache, logits, start = cache_for(model), [], 0
    for index, mode in enumerate(modes):
        with mode():
            for size in (3, 1) if index == 0 else (1, 1):
                logits.append(model(ids[:, start : start + size], cache=cache).logits.detach().clone())
                start += size
    with torch.no_grad():
        want = uncached(model, ids[:, :start]).logits
    assert_close(torch.cat(logits, dim=1), want)
