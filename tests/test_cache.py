"""The cache: fed in any pieces, rearranged, cropped, forked and reset, it gives what an uncached run gives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers import ZayaConfig as NativeConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer as LibraryFull
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer as LibrarySliding

from cached_runs import (
    KINDS,
    assert_close,
    assert_crop_refused,
    assert_same_contents,
    cache_for,
    contents,
    feed,
    left_padded,
    model_of,
    uncached,
)
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import RecordedRun, random_ids, record_run

SPLITS = [[1] * 12, [1, 11], [2, 10], [5, 1, 6], [3, 3, 3, 3]]
PADS = 5

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


# ------------------------------------------------------------------------------------------------- feeding in pieces
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_pieces_give_the_logits_of_one_call(model, sizes):
    ids = random_ids(2, 12)
    got = feed(model, cache_for(model), ids, sizes)
    assert_close(got, uncached(model, ids))


@pytest.mark.parametrize("sizes", [[8, 9], [3, 14], [3, 1, 1, 1, 11], [1] * 17], ids=str)
@pytest.mark.parametrize("mask_form", ["grown", "of the piece"])
def test_pieces_behind_left_pads(model, sizes, mask_form):
    ids, mask = left_padded(17, 12)
    got = feed(model, cache_for(model), ids, sizes, mask, mask_form)
    assert_close(got, uncached(model, ids, attention_mask=mask), where=mask.bool())
    alone = uncached(model, ids[1:, PADS:])
    assert_close(got[1:, PADS:], alone)


@given(data=st.data())
def test_any_pieces_and_pads(data):
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    lengths = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=3))
    ids, mask = left_padded(*lengths, width=max(lengths) + data.draw(st.integers(0, 4)))
    sizes, rest = [], ids.shape[1]
    while rest:
        sizes.append(data.draw(st.integers(1, rest)))
        rest -= sizes[-1]
    model, mask_form = model_of(kind, torch.float64), data.draw(st.sampled_from(["grown", "of the piece"]))
    with torch.no_grad():
        got = feed(model, cache_for(model), ids, sizes, mask, mask_form)
        for row, length in enumerate(lengths):
            start = ids.shape[1] - length
            assert_close(got[row, start:], uncached(model, ids[row : row + 1, start:]))


def test_positions_as_generate_gives_them_are_no_documents(model):
    """`generate` counts real tokens and gives every pad position 0."""
    ids, mask = left_padded(12, 7)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    cache = cache_for(model)
    runs = [
        record_run(
            model, ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part], cache=cache
        )
        for part in (slice(0, 3), slice(3, 11), slice(11, 12))
    ]
    assert_close(RecordedRun.join(runs), uncached(model, ids, attention_mask=mask), where=mask.bool())


def test_bare_cache_works(model):
    ids = random_ids(2, 9)
    cache = DynamicCache()
    got = feed(model, cache, ids, [4, 1, 4])
    assert_close(got, uncached(model, ids))
    assert cache.get_seq_length() == 9
    assert len(cache) == 4


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_cache_made_with_the_config_of_the_stock_class_works(kind):
    model, ids = model_of(kind), random_ids(2, 9)
    values = {key: getattr(model.config, key) for key in ("num_hidden_layers", "layer_types", "sliding_window")}
    got = feed(model, DynamicCache(config=NativeConfig(**values)), ids, [4, 1, 4])
    assert_close(got, uncached(model, ids))


def test_model_makes_the_cache_itself_and_returns_it(model):
    ids = random_ids(2, 9)
    first = model(ids[:, :5], use_cache=True)
    assert first.cache is first.past_key_values
    last = record_run(model, ids[:, 5:], cache=first.cache)
    assert_close(last, uncached(model, ids)[:, 5:])


def test_both_argument_names_mean_the_same(model):
    ids = random_ids(1, 8)
    runs = {}
    for name in ("cache", "past_key_values"):
        cache = cache_for(model)
        model(ids[:, :5], **{name: cache})
        runs[name] = model(ids[:, 5:], **{name: cache})
        assert cache.get_seq_length() == 8
    assert torch.equal(runs["cache"].logits, runs["past_key_values"].logits)
    assert_close(runs["cache"].logits, uncached(model, ids)[:, 5:].logits)
    # also positional, also the base model, and one cache under both names
    cache = cache_for(model)
    model.model(ids[:, :5], past_key_values=cache)
    again = model(ids[:, 5:], None, None, cache, past_key_values=cache)
    assert torch.equal(again.logits, runs["cache"].logits)


def test_two_different_caches_are_refused():
    model = model_of("full")
    with pytest.raises(ValueError, match="two names of one argument"):
        model(random_ids(1, 3), cache=cache_for(model), past_key_values=cache_for(model))


def test_a_given_cache_is_used_but_not_returned_without_use_cache(model):
    ids = random_ids(1, 8)
    cache = cache_for(model)
    assert model(ids[:, :5], cache=cache, use_cache=False).cache is None
    output = model(ids[:, 5:], cache=cache, use_cache=False)
    assert output.cache is None
    assert cache.get_seq_length() == 8
    assert_close(output.logits, uncached(model, ids)[:, 5:].logits)


def test_call_without_tokens_changes_nothing(model):
    ids = random_ids(2, 8)
    cache = cache_for(model)
    feed(model, cache, ids[:, :5], [5])
    before = contents(cache)
    assert model(ids[:, :0], cache=cache).logits.shape == (2, 0, 128)
    assert_same_contents(cache, before)
    assert_close(record_run(model, ids[:, 5:], cache=cache), uncached(model, ids)[:, 5:])


# ------------------------------------------------------------------------------------------------ what a cache holds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@each_kind
def test_states_are_few_and_have_the_dtype_of_the_activations(kind, dtype):
    model = model_of(kind, dtype)
    config = model.config
    cache = cache_for(model)
    for step in (random_ids(3, 6), random_ids(3, 1)):
        model(step, cache=cache)
        for layer in cache.layers:
            qk, value = layer.conv_states[0], layer.conv_states[1]
            assert qk.shape == (3, (4 + 2) * 16, config.cca_time0 + config.cca_time1 - 2)
            assert value.shape == (3, 16, 1)
            assert {qk.dtype, value.dtype, layer.keys.dtype, layer.values.dtype} == {dtype}
            assert not any(layer.is_recurrent_states_initialized.values())
    assert cache.has_previous_state()


@pytest.mark.parametrize("kind", ["sliding", "sliding first", "window 1"])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 31)], ids=["unpadded", "left pads"])
def test_sliding_layers_keep_one_slot_less_than_the_window(kind, lengths):
    model = model_of(kind)
    ids, mask = left_padded(*lengths)
    cache = cache_for(model)
    for sizes in ([30], [1], [1], [8]):
        start = cache.get_seq_length()
        part = slice(start, start + sizes[0])
        model(ids[:, part], attention_mask=mask[:, : part.stop], cache=cache)
        for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
            assert layer.get_seq_length() == part.stop
            kept = part.stop if layer_type == "hybrid" else model.config.sliding_window - 1
            for tensor in (layer.keys, layer.values):
                assert tensor.shape == (2, 2, kept, 16)
                # nor does a view keep the rest alive
                assert tensor.untyped_storage().nbytes() <= 2 * (kept + 1) * 2 * 2 * 16 * 4


def test_sliding_layers_keep_the_last_real_tokens_of_right_padded_rows():
    model, window = model_of("sliding"), 4
    ids = random_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 5:] = 0
    cache = cache_for(model)
    model(ids, attention_mask=mask, cache=cache)
    assert cache.layers[1].keys.shape[-2] == 12 - 5 + window - 1
    new = random_ids(2, 6, seed=1)
    got = feed(model, cache, new, [1, 2, 3])
    for row, length in enumerate((12, 5)):
        whole = torch.cat([ids[row : row + 1, :length], new[row : row + 1]], dim=1)
        assert_close(got[row], uncached(model, whole)[:, length:])
    # the short row has six tokens behind its padding now, so no slot before them is needed any more
    assert cache.layers[1].keys.shape[-2] == window - 1


def test_library_tables_stay_the_librarys():
    assert DYNAMIC_LAYER_TYPE_MAPPING["hybrid"] is LibraryFull
    assert DYNAMIC_LAYER_TYPE_MAPPING["hybrid_sliding"] is LibrarySliding
    for kind in ("full", "sliding"):
        feed(model_of(kind), cache_for(model_of(kind)), random_ids(1, 6), [3, 3])
    assert DYNAMIC_LAYER_TYPE_MAPPING["hybrid"] is LibraryFull
    assert DYNAMIC_LAYER_TYPE_MAPPING["hybrid_sliding"] is LibrarySliding
    for table in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
        assert not [cls for cls in table.values() if cls.__module__.startswith("zaya_hf")]


# --------------------------------------------------------------------------------------------------- operations on rows
ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select by list": (lambda cache: cache.batch_select_indices([1]), [1]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("operation", ROWS)
@pytest.mark.parametrize("lengths", [(12, 12, 12), (12, 5, 9)], ids=["unpadded", "left pads"])
def test_rows_move_together(model, operation, lengths):
    apply, rows = ROWS[operation]
    ids, mask = left_padded(*lengths)
    cache = cache_for(model)
    feed(model, cache, ids, [12], mask)
    apply(cache)
    new = random_ids(len(rows), 3, seed=5)
    got = feed(model, cache, new, [1, 2])
    whole = torch.cat([ids[rows], new], dim=1)
    whole_mask = torch.nn.functional.pad(mask[rows], (0, 3), value=1)
    assert_close(got, uncached(model, whole, attention_mask=whole_mask)[:, 12:])


@pytest.mark.parametrize("operation", ROWS)
def test_crop_after_rows_moved(model, operation):
    apply, rows = ROWS[operation]
    ids, mask = left_padded(12, 5, 9)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids, [12], mask)
    apply(cache)
    cache.crop(-4)
    new = random_ids(len(rows), 3, seed=5)
    got = feed(model, cache, new, [2, 1])
    whole = torch.cat([ids[rows, :8], new], dim=1)
    whole_mask = torch.nn.functional.pad(mask[rows, :8], (0, 3), value=1)
    assert_close(got, uncached(model, whole, attention_mask=whole_mask)[:, 8:])


def test_one_prompt_repeated_for_many_continuations(model):
    prompt, new = random_ids(1, 7), random_ids(3, 4, seed=1)
    cache = cache_for(model)
    model(prompt, cache=cache)
    cache.batch_repeat_interleave(3)
    got = feed(model, cache, new, [4])
    assert_close(got, uncached(model, torch.cat([prompt.expand(3, -1), new], dim=1))[:, 7:])


def test_reset_makes_a_fresh_cache_of_it(model):
    cache = cache_for(model, recording=True)
    ids, mask = left_padded(9, 4, 6)
    feed(model, cache, ids, [5, 4], mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state()
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    other = random_ids(2, 11, seed=8)
    got = feed(model, cache, other, [4, 1, 6])
    assert cache.get_seq_length() == 11
    assert_close(got, uncached(model, other))
    cache.crop(-8)
    assert_close(record_run(model, other[:, 3:], cache=cache), uncached(model, other)[:, 3:])


def test_reset_before_the_first_call_is_harmless(model):
    cache = cache_for(model)
    cache.reset()
    ids = random_ids(2, 6)
    assert_close(feed(model, cache, ids, [6]), uncached(model, ids))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"]
)
def test_a_prompt_forks(model, copied):
    ids, mask = left_padded(9, 5)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids, [9], mask)
    fork = copied(cache)
    assert len({id(layer.history) for layer in fork.layers}) == 1
    assert fork.layers[0].history is not cache.layers[0].history
    for branch, seed in ((fork, 1), (cache, 2)):
        new = random_ids(2, 4, seed=seed)
        got = feed(model, branch, new, [1, 3])
        branch.crop(-2)
        again = feed(model, branch, new[:, 2:], [2])
        whole_mask = torch.nn.functional.pad(mask, (0, 4), value=1)
        want = uncached(model, torch.cat([ids, new], dim=1), attention_mask=whole_mask)[:, 9:]
        assert_close(got, want)
        assert_close(again, want[:, 2:])


def test_offload_and_prefetch_lose_nothing(model):
    ids = random_ids(2, 9)
    cache = cache_for(model, recording=True)
    model(ids[:, :6], cache=cache)
    before = contents(cache)
    for index in range(len(cache)):
        cache.offload(index, only_non_sliding=False)
        cache.layers[index].prefetch()
    assert_same_contents(cache, before)
    assert_close(record_run(model, ids[:, 6:], cache=cache), uncached(model, ids)[:, 6:])


# ------------------------------------------------------------------------------------------------------------ cropping
@pytest.mark.parametrize("tail", [1, 3])
def test_crop_then_other_tokens(model, tail):
    ids, new = random_ids(1, 12), random_ids(1, tail, seed=4)
    cache = cache_for(model, recording=True)
    model(ids, cache=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 8
    got = feed(model, cache, new, [tail])
    assert_close(got, uncached(model, torch.cat([ids[:, :8], new], dim=1))[:, 8:])


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_crop_into_the_prompt_as_far_as_its_first_token(model, left):
    ids, new = random_ids(2, 9), random_ids(2, 5, seed=4)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids, [5, 4])
    cache.crop(left - 9)
    assert cache.get_seq_length() == left
    got = feed(model, cache, new, [2, 3])
    assert_close(got, uncached(model, torch.cat([ids[:, :left], new], dim=1))[:, left:])


def test_crop_of_nothing_keeps_everything_but_the_record(model):
    ids = random_ids(2, 12)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids[:, :8], [8])
    cache.crop(0)
    assert cache.get_seq_length() == 8
    for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
        assert layer.recorded[1].shape[-1] == 1
        kept = 8 if layer_type == "hybrid" else model.config.sliding_window - 1
        assert layer.keys.shape[-2] == kept
    assert_close(feed(model, cache, ids[:, 8:], [1, 3]), uncached(model, ids)[:, 8:])
    cache.crop(-4)
    assert_close(feed(model, cache, ids[:, 8:], [4]), uncached(model, ids)[:, 8:])
    cache.crop(0)
    with pytest.raises(RuntimeError, match="reaches beyond the 0 tokens"):
        cache.crop(-1)


def test_crop_back_into_left_pads(model):
    """Row 1 keeps one real token, row 2 none; both go on as if the rest had never been."""
    ids, mask = left_padded(12, 8, 6)
    cache = cache_for(model, recording=True)
    feed(model, cache, ids, [2, 10], mask)
    cache.crop(-7)
    new = random_ids(3, 4, seed=4)
    got = feed(model, cache, new, [1, 3])
    whole = torch.cat([ids[:, :5], new], dim=1)
    whole_mask = torch.nn.functional.pad(mask[:, :5], (0, 4), value=1)
    assert_close(got, uncached(model, whole, attention_mask=whole_mask)[:, 5:])
    assert_close(got[2], uncached(model, new[2:]))


@pytest.mark.parametrize("remove", [1, 4, 5, 6, 8])
def test_crop_after_packed_documents(model, remove):
    """Three documents of 3, 4 and 5 tokens; the crop ends inside the third, between two, or inside the second."""
    ids, new = random_ids(1, 12), random_ids(1, 3, seed=4)
    positions = torch.cat([torch.arange(n) for n in (3, 4, 5)])[None]
    cache = cache_for(model, recording=True)
    model(ids, position_ids=positions, cache=cache)
    cache.crop(-remove)
    kept = 12 - remove
    got = feed(model, cache, new, [1, 2])
    on = positions[:, kept - 1 : kept] + torch.arange(1, 4)
    whole_positions = torch.cat([positions[:, :kept], on], dim=1)
    want = uncached(model, torch.cat([ids[:, :kept], new], dim=1), position_ids=whole_positions)
    assert_close(got, want[:, kept:])


def test_crop_without_recording_is_refused(model):
    ids = random_ids(1, 9)
    cache = cache_for(model)
    model(ids[:, :6], cache=cache)
    assert_crop_refused(cache, -1, "activate_past_recording")
    cache.crop(0)
    assert_close(record_run(model, ids[:, 6:], cache=cache), uncached(model, ids)[:, 6:])


def test_crop_beyond_the_record_is_refused(model):
    ids = random_ids(1, 12)
    cache = cache_for(model)
    model(ids[:, :6], cache=cache)
    cache.activate_past_recording()
    assert_crop_refused(cache, -1, "activate_past_recording")
    feed(model, cache, ids[:, 6:9], [1, 2])
    assert_crop_refused(cache, -4, "reaches beyond the 3 tokens")
    cache.crop(-3)
    assert_close(feed(model, cache, ids[:, 6:], [2, 4]), uncached(model, ids)[:, 6:])


def test_crop_after_recording_stopped_is_refused(model):
    """The library stops it by hand; what was recorded until then says nothing about later tokens."""
    ids = random_ids(1, 12)
    cache = cache_for(model, recording=True)
    model(ids[:, :6], cache=cache)
    for layer in cache.layers:
        layer.record_past = False
    model(ids[:, 6:9], cache=cache)
    assert_crop_refused(cache, -1, "activate_past_recording")
    cache.activate_past_recording()
    feed(model, cache, ids[:, 9:], [3])
    assert_crop_refused(cache, -4, "reaches beyond the 3 tokens")
    cache.crop(-2)
    assert_close(feed(model, cache, ids[:, 10:], [2]), uncached(model, ids)[:, 10:])


def test_crop_by_a_positive_number_is_refused(model):
    cache = cache_for(model, recording=True)
    model(random_ids(1, 6), cache=cache)
    assert_crop_refused(cache, 3, "0 or a negative number")


def test_crop_with_padding_behind_tokens_is_refused(model):
    ids = random_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4:] = 0
    cache = cache_for(model, recording=True)
    model(ids, attention_mask=mask, cache=cache)
    assert_crop_refused(cache, -1, "padding behind real tokens")
    new = random_ids(2, 3, seed=1)
    got = feed(model, cache, new, [1, 2])
    for row, length in enumerate((9, 4)):
        whole = torch.cat([ids[row : row + 1, :length], new[row : row + 1]], dim=1)
        assert_close(got[row], uncached(model, whole)[:, length:])


def test_crop_of_a_bare_cache_that_never_recorded_says_why():
    model = model_of("full")
    cache = DynamicCache()
    cache.activate_past_recording()  # has no layers to tell
    model(random_ids(1, 6), cache=cache)
    assert_crop_refused(cache, -1, "bare DynamicCache")
    cache.activate_past_recording()
    model(random_ids(1, 2), cache=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 6


def test_gradients_flow_through_a_cache(model):
    """Through the states and keys of an earlier call the gradients are those of one call."""
    ids = random_ids(2, 7)
    grads = []
    for sizes in ([7], [4, 3], [6, 1]):
        with torch.enable_grad():
            cache, logits = cache_for(model), []
            for part in ids.split(sizes, dim=1):
                logits.append(model(part, cache=cache).logits)
            torch.cat(logits, dim=1).pow(2).mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    for other in grads[1:]:
        assert other.keys() == grads[0].keys()
        torch.testing.assert_close(other, grads[0], rtol=1e-4, atol=1e-5)
