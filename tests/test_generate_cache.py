"""`generate` with a cache that the caller brings: prefilled, returned by an earlier call, reset, forked, or wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from generated_texts import KINDS, OPEN_ENDED, greedy, model_of, padded
from zaya_hf import ZayaForCausalLM, visibility
from zaya_hf.testing import random_ids


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


@pytest.mark.parametrize("fed", ["all ids", "only new ids"])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": True}],
    ids=["", "chunks", "lookup", "assistant"],
)
def test_going_on_from_a_returned_cache(model, fed, options):
    prompt, user = random_ids(1, 5), random_ids(1, 3, seed=9)
    if "assistant_model" in options:
        options = {"assistant_model": model_of("full", seed=1)}
    first = model.generate(prompt, max_new_tokens=4, return_dict_in_generate=True, **options, **OPEN_ENDED)
    assert first.cache.get_seq_length() == 8
    whole = torch.cat([first.sequences, user], dim=1)
    if fed == "all ids":
        got = model.generate(whole, cache=first.cache, max_new_tokens=5, **options, **OPEN_ENDED)
    else:
        got = model.generate(
            whole[:, 8:],
            attention_mask=torch.ones_like(whole),
            cache=first.cache,
            max_new_tokens=5,
            **options,
            **OPEN_ENDED,
        )
    assert torch.equal(got[:, -5:], greedy(model, whole, 5))
    assert first.cache.get_seq_length() == 16


def test_going_on_from_a_cache_with_embeddings(model):
    whole = random_ids(1, 8)
    embeds = model.get_input_embeddings()(whole).detach()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs_embeds=embeds[:, :5], cache=cache)
    got = model.generate(inputs_embeds=embeds, cache=cache, max_new_tokens=5, **OPEN_ENDED)
    assert torch.equal(got, greedy(model, whole, 5))
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("fed", ["all ids", "only new ids"])
def test_going_on_after_packed_documents(model, options, fed):
    """What was cached are two documents; the text goes on in the second and never sees the first."""
    packed, new = random_ids(1, 9), random_ids(1, 3, seed=1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(packed, position_ids=positions, cache=cache)
    cache.batch_repeat_interleave(options.get("num_beams", 1))
    whole = torch.cat([packed, new], dim=1)
    given = whole if fed == "all ids" else new
    got = model.generate(
        given, attention_mask=torch.ones_like(whole), cache=cache, max_new_tokens=6, **options, **OPEN_ENDED
    )
    second = model.generate(whole[:, 4:], max_new_tokens=6, **options, **OPEN_ENDED)
    assert torch.equal(got[:, -6:], second[:, -6:])


def test_drafting_with_padding_inside_the_cache_is_refused():
    model, ids = model_of("full"), random_ids(1, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1]])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], attention_mask=mask, cache=cache)
    with pytest.raises(ValueError, match="padding between its tokens"):
        model.generate(ids, cache=cache, prompt_lookup_num_tokens=3, max_new_tokens=2)
    assert cache.get_seq_length() == 6


def test_going_on_with_padded_rows_and_more_padding(model):
    """A batch goes on with user turns of different lengths, padded on the right this time: only they are rolled."""
    ids, mask, prompts = padded([4, 7], "left")
    first = model.generate(ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **OPEN_ENDED)
    user, user_mask, turns = padded([3, 5], "right", seed=20)
    said = first.sequences[:, 7:]
    whole = torch.cat([first.sequences, user], dim=1)
    whole_mask = torch.cat([mask, torch.ones_like(said), user_mask], dim=1)
    alone = [torch.cat([prompts[row], said[row : row + 1], turns[row]], dim=1) for row in range(2)]
    past = first.cache.get_seq_length()
    for given in (whole, whole[:, past:]):
        cache = copy.deepcopy(first.cache)
        got = model.generate(given, attention_mask=whole_mask, cache=cache, max_new_tokens=5, **OPEN_ENDED)
        for row in range(2):
            assert torch.equal(got[row : row + 1, -5:], greedy(model, alone[row], 5))


def test_reset_then_another_prompt(model):
    cache = DynamicCache(config=model.config)
    model.generate(random_ids(3, 6), cache=cache, max_new_tokens=4, **OPEN_ENDED)
    cache.reset()
    assert cache.get_seq_length() == 0
    other = random_ids(1, 9, seed=7)
    got = model.generate(other, cache=cache, max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(got[:, 9:], greedy(model, other, 6))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("bare", [True, False], ids=["bare", "with config"])
def test_a_cache_of_the_callers(model, name, bare, recwarn):
    cache = DynamicCache() if bare else DynamicCache(config=model.config)
    prompt = random_ids(1, 6)
    got = model.generate(prompt, **{name: cache}, max_new_tokens=5, **OPEN_ENDED)
    assert torch.equal(got[:, 6:], greedy(model, prompt, 5))
    assert cache.get_seq_length() == 10
    assert not [w for w in recwarn if "past_key_values" in str(w.message)]


def test_a_prefix_cache_forks_into_prompts(model):
    prefix = random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prefix, cache=cache)
    for seed in (1, 2):
        whole = torch.cat([prefix, random_ids(1, 3, seed=seed)], dim=1)
        got = model.generate(whole, cache=copy.deepcopy(cache), max_new_tokens=5, **OPEN_ENDED)
        assert torch.equal(got[:, 9:], greedy(model, whole, 5))


@pytest.mark.parametrize("given", ["ids", "all ids with mask", "embeds"])
def test_no_new_token_after_the_cached_ones_is_refused(given):
    model, prompt = model_of("full"), random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, cache=cache)
    embeds = model.get_input_embeddings()(prompt).detach()
    arguments = {
        "ids": {"inputs": prompt[:, :3]},
        "all ids with mask": {"inputs": prompt, "attention_mask": torch.ones_like(prompt)},
        "embeds": {"inputs_embeds": embeds},
    }[given]
    with pytest.raises(ValueError, match="the cache holds 6 tokens and the prompt"):
        model.generate(**arguments, cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 6


def test_rows_that_the_cache_lacks_are_refused():
    model, prompt = model_of("full"), random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :5], cache=cache)
    with pytest.raises(ValueError, match="the call has 3 rows, the cache 1"):
        model.generate(prompt, cache=cache, num_beams=3, max_new_tokens=2)


def test_cache_without_use_cache_is_refused():
    model = model_of("full")
    for options in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
        with pytest.raises(ValueError, match="use_cache=False contradicts the cache"):
            model.generate(random_ids(1, 4), cache=DynamicCache(config=model.config), **options)


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of masks and positions are read for prompts, where that pays, and never for a decoding step."""
    monkeypatch.setattr(visibility, "is_free_to_read", lambda tensor: False)
    monkeypatch.setattr(visibility, "_may_read", lambda tensor, length: length > 1)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}, {"num_beams": 3}], ids=str)
def test_unpadded_rows_stay_plain_where_reading_is_dear(model, options):
    """Else every decoding step would build a mask, and a prompt one of its length squared."""
    prompt = random_ids(1, 5)
    result = model.generate(prompt, max_new_tokens=6, return_dict_in_generate=True, **options, **OPEN_ENDED)
    history = result.cache.layers[0].history
    assert (history.length, history.segments) == (10, None)
    if "num_beams" not in options:
        assert torch.equal(result.sequences[:, 5:], greedy(model, prompt, 6))


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_positions_of_the_callers_are_used_where_reading_is_dear(model):
    prompt = random_ids(1, 5)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, **OPEN_ENDED}
    result = model.generate(prompt, position_ids=torch.arange(7, 12)[None], **options)
    assert result.cache.layers[0].history.positions.tolist() == [list(range(7, 17))]
    assert torch.equal(result.sequences[:, 5:], greedy(model, prompt, 6))
    # a cached prompt whose last token alone is fed, at a position that does not follow
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :4], cache=cache)
    jump = torch.tensor([[0, 1, 2, 3, 9]])
    assert (
        model.generate(prompt, cache=cache, position_ids=jump, **options).cache.layers[0].history.segments is not None
    )
