"""`generate` in every mode gives what step-by-step runs without a cache and without padding give."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import DeferredStopCheck, StopCheck

from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.generation import RightPaddingMixin
from zaya_hf.testing import random_ids, redraw, tiny_config

KINDS = {
    "full": {},
    "sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4},
    "bias, widths 3 4": {"attention_bias": True, "cca_time0": 3, "cca_time1": 4},
}
#: no token ends a text, and the pad token is never chosen: a text must not look like its padding
OPEN_ENDED = {"eos_token_id": None, "suppress_tokens": [0], "do_sample": False}


@functools.cache
def model_of(kind: str, seed: int = 0) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**KINDS[kind])), seed=seed)


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


@pytest.fixture(autouse=True)
def _say_it_again(monkeypatch):
    monkeypatch.setattr(RightPaddingMixin, "_said_rolled", False)


@torch.no_grad()
def greedy(model: ZayaForCausalLM, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[1, tokens]``: the most likely next id, `tokens` times over, each from a whole run without a cache."""
    ids = prompt
    for _ in range(tokens):
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        logits[:, 0] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, prompt.shape[1] :]


def padded(lengths: list[int], side: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Ids ``[B, max length]`` padded with 0 on one side, their mask, and the prompts alone ``[1, length]``."""
    width = max(lengths)
    prompts = [random_ids(1, length, seed=seed + index) for index, length in enumerate(lengths)]
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        columns = slice(width - prompt.shape[1], width) if side == "left" else slice(0, prompt.shape[1])
        ids[row, columns], mask[row, columns] = prompt[0], 1
    return ids, mask, prompts


# ---------------------------------------------------------------------------------------------------------- greedy
def test_greedy(model):
    prompt = random_ids(1, 7)
    got = model.generate(prompt, max_new_tokens=10, **OPEN_ENDED)
    assert torch.equal(got[:, :7], prompt)
    assert torch.equal(got[:, 7:], greedy(model, prompt, 10))


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"prefill_chunk_size": 5}, {"prefill_chunk_size": 1}], ids=str
)
def test_greedy_is_the_same_with(model, options):
    prompt = random_ids(2, 12)
    want = model.generate(prompt, max_new_tokens=8, **OPEN_ENDED)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, **options, **OPEN_ENDED), want)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("given", ["mask", "pad ids alone"])
def test_left_padded_rows_are_their_prompts_alone(model, options, given):
    ids, mask, prompts = padded([4, 9, 6], "left")
    mask = mask if given == "mask" else None
    got = model.generate(ids, attention_mask=mask, max_new_tokens=10, **options, **OPEN_ENDED)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, max_new_tokens=10, **options, **OPEN_ENDED)
        assert torch.equal(got[row, 9:], alone[0, prompt.shape[1] :])
    if not options:
        assert torch.equal(got[0, 9:], greedy(model, prompts[0], 10)[0])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_starting_from_embeddings(model, length):
    prompt = random_ids(1, length)
    embeds = model.get_input_embeddings()(prompt).detach()
    got = model.generate(inputs_embeds=embeds, max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(got, greedy(model, prompt, 6))
    with_ids = model.generate(prompt, inputs_embeds=embeds, max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(with_ids[:, length:], got)


def test_starting_from_padded_embeddings(model):
    ids, mask, prompts = padded([4, 9], "left")
    embeds = model.get_input_embeddings()(ids).detach()
    got = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, **OPEN_ENDED)
    for row, prompt in enumerate(prompts):
        assert torch.equal(got[row : row + 1], greedy(model, prompt, 6))


def test_starting_from_nothing_starts_from_bos(model):
    got = model.generate(max_new_tokens=5, **OPEN_ENDED)
    assert torch.equal(got[:, 1:], greedy(model, torch.tensor([[2]]), 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_prompt_of_padding_alone_disturbs_no_other(caplog, kind, attention, dtype):
    """Row 1 has nothing to look at: what it says means nothing, but it must stay finite and to itself."""
    model = copy.deepcopy(model_of(kind)).to(dtype)
    model.set_attn_implementation(attention)
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1] = 0
    options = {"max_new_tokens": 5, "output_scores": True, "return_dict_in_generate": True, **OPEN_ENDED}
    for beams in (1, 3):
        got = model.generate(ids, attention_mask=mask, num_beams=beams, **options)
        beside_another = model.generate(ids, num_beams=beams, **options)
        assert torch.equal(got.sequences[0], beside_another.sequences[0])
        assert not any(scores.isnan().any() for scores in got.scores)
        if dtype == torch.float32:
            assert torch.equal(got.sequences[:1], model.generate(ids[:1], num_beams=beams, **options).sequences)
    assert "rolled" not in caplog.text


# ------------------------------------------------------------------------------------------------------ other modes
@torch.no_grad()
def beam_search(model: ZayaForCausalLM, prompt: torch.Tensor, beams: int, tokens: int) -> torch.Tensor:
    """The best of `beams` beams of a fixed length: log-probabilities add up, no text ends early."""
    ids, total = prompt, torch.zeros(1)
    for _ in range(tokens):
        scores = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(-1)
        scores[:, 0] = -torch.inf
        total, best = (total[:, None] + scores).flatten().topk(beams)
        vocabulary = scores.shape[1]
        ids = torch.cat([ids[best // vocabulary], (best % vocabulary)[:, None]], dim=1)
    return ids[:1]


@pytest.mark.parametrize("beams", [3, 4])
def test_beams(model, beams):
    prompt = random_ids(1, 7)
    got = model.generate(prompt, num_beams=beams, max_new_tokens=8, **OPEN_ENDED)
    assert torch.equal(got, beam_search(model, prompt, beams, 8))
    assert torch.equal(got, model.generate(prompt, num_beams=beams, max_new_tokens=8, use_cache=False, **OPEN_ENDED))


def test_beams_that_end_and_several_results(model):
    prompt = random_ids(2, 7)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
    options |= {"eos_token_id": list(range(1, 40)), "output_scores": True, "return_dict_in_generate": True}
    cached, whole = (model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.sequences.shape[0] == 6
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(cached.sequences_scores, whole.sequences_scores)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_return_sequences": 3}, {"top_k": 5, "top_p": 0.8}], ids=str
)
def test_sampling_is_repeatable_and_the_same_without_a_cache(model, options):
    ids, mask, _ = padded([4, 9], "left")
    options = {"do_sample": True, "eos_token_id": None, "suppress_tokens": [0], "max_new_tokens": 8, **options}

    def sample(seed: int, **more) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(ids, attention_mask=mask, **options, **more)

    first = sample(5)
    assert first.shape == (2 * options.get("num_return_sequences", 1), 9 + 8)
    assert torch.equal(first, sample(5))
    assert torch.equal(first, sample(5, use_cache=False))
    assert not torch.equal(first, sample(6))


@pytest.mark.parametrize("draft", ["lookup", "other model", "itself"])
@pytest.mark.parametrize("length", [2, 12])
def test_drafted_tokens_are_the_greedy_ones(model, draft, length):
    kind = next(kind for kind in KINDS if model_of(kind) is model)
    # a prompt that repeats itself, so that looking up finds something
    prompt = random_ids(1, length).repeat(1, 2)
    drafter = copy.deepcopy(model if draft == "itself" else model_of(kind, seed=1))
    drafter.generation_config.update(num_assistant_tokens=5, assistant_confidence_threshold=0.0)
    options = {"prompt_lookup_num_tokens": 3} if draft == "lookup" else {"assistant_model": drafter}
    want = greedy(model, prompt, 16)
    sizes = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, out: sizes.append(out.logits.shape[1]), with_kwargs=True
    )
    got = model.generate(prompt, max_new_tokens=16, **options, **OPEN_ENDED)
    hook.remove()
    assert torch.equal(got[:, prompt.shape[1] :], want)
    assert max(sizes) > 1  # drafts were looked at
    if draft == "itself":
        assert len(sizes) <= 4  # and accepted


@pytest.mark.parametrize("positions", [{}, {"position_ids": torch.arange(10)[None]}], ids=["", "positions"])
def test_drafting_into_a_bare_cache_and_going_on_with_it(model, positions):
    prompt = random_ids(1, 5).repeat(1, 2)
    want = greedy(model, prompt, 12)
    cache = DynamicCache()
    options = {"cache": cache, "prompt_lookup_num_tokens": 3, "max_new_tokens": 6, **OPEN_ENDED}
    first = model.generate(prompt, **positions, **options)
    assert torch.equal(first[:, 10:], want[:, :6])
    assert cache.get_seq_length() == first.shape[1] - 1
    second = model.generate(first, **options)
    assert torch.equal(second[:, 10:], want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_drafting_behind_padding(model, side):
    ids, mask, prompts = padded([6, 9], side)
    drafter = copy.deepcopy(model)
    for options in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3}):
        got = model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=10, **options, **OPEN_ENDED)
        assert torch.equal(got[:, 9:], greedy(model, prompts[0], 10))


# ------------------------------------------------------------------------------------------------------- right pads
def test_right_padded_prompts_are_rolled(model, caplog):
    ids, mask, prompts = padded([4, 9, 6], "right")
    left_ids, _, _ = padded([4, 9, 6], "left")
    embeds = model.get_input_embeddings()(ids).detach()
    positions = torch.arange(9)
    want = torch.cat([greedy(model, prompt, 8) for prompt in prompts])
    for given in (
        {"inputs": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask.bool()},
        {"inputs": ids},
        {"input_ids": ids},
        {"input_ids": ids, "generation_config": GenerationConfig(max_new_tokens=8, **OPEN_ENDED)},
        {"inputs": ids, "attention_mask": mask, "position_ids": positions.expand(3, -1)},
        {"inputs": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)},
        {"inputs": ids, "attention_mask": mask, "position_ids": positions[None]},
        {"inputs": ids, "attention_mask": mask, "position_ids": positions},
        {"inputs": ids, "attention_mask": mask, "prefill_chunk_size": 4},
        {"inputs": ids, "attention_mask": mask, "use_cache": False},
        {"inputs": ids, "attention_mask": mask, "cache": DynamicCache()},
        {"inputs_embeds": embeds, "attention_mask": mask},
        {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": mask},
        {"input_ids": ids, "inputs_embeds": embeds},
    ):
        options = {} if "generation_config" in given else {"max_new_tokens": 8, **OPEN_ENDED}
        before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        got = model.generate(**given, **options)
        assert torch.equal(got[:, -8:], want), list(given)
        if "input_ids" in given or "inputs" in given:
            assert torch.equal(got[:, :9], left_ids)
        assert all(torch.equal(given[name], value) for name, value in before.items())  # the caller's own are untouched
    assert [record.message for record in caplog.records].count(
        "generate: prompts padded on the right were rolled to left padding, as are the results."
    ) == 1
    assert "right-padding was detected" not in caplog.text


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_right_padded_prompts_with_beams(model, options):
    ids, mask, prompts = padded([4, 9], "right")
    got = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options, **OPEN_ENDED)
    per_row = options.get("num_return_sequences", 1)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, max_new_tokens=8, **options, **OPEN_ENDED)
        assert torch.equal(got[row * per_row : (row + 1) * per_row, 9:], alone[:, prompt.shape[1] :])


def test_rolling_keeps_padding_on_both_sides_and_inside(model):
    """What lies between padding stays where it is beside its neighbours, whatever the other rows look like."""
    ids = random_ids(3, 9)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1, 1, 1, 0], [1] * 9])
    got = model.generate(ids, attention_mask=mask, max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(got[0, 9:], greedy(model, ids[:1, 1:6], 6)[0])
    assert torch.equal(got[2, 9:], greedy(model, ids[2:], 6)[0])
    inside = model.generate(ids[1:2, :8], attention_mask=mask[1:2, :8], max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(got[1, 9:], inside[0, 8:])


@pytest.mark.parametrize(
    "options",
    [{}, {"eos_token_id": [1, 0]}, {"pad_token_id": 5, "eos_token_id": 5}, {"attention_mask": torch.ones(1, 6)}],
    ids=["no pads", "pad ends texts", "other pad", "mask of ones"],
)
def test_prompts_without_padding_are_left_alone(options, caplog):
    model, prompt = model_of("full"), random_ids(1, 6)
    if options:
        prompt[0, -1] = options.get("pad_token_id", 0)
    got = model.generate(prompt, max_new_tokens=3, do_sample=False, **options)
    assert torch.equal(got[:, :6], prompt)
    assert "rolled" not in caplog.text
    assert torch.equal(got[:, 6], greedy_one(model, prompt))


@torch.no_grad()
def greedy_one(model, prompt: torch.Tensor) -> torch.Tensor:
    return model(prompt, use_cache=False).logits[:, -1].argmax(-1)


# ------------------------------------------------------------------------------------------------ continuing a cache
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


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded_static"},
        {"cache": StaticCache(tiny_config(), max_cache_len=16)},
        {"cache": ((torch.zeros(1, 2, 3, 16),) * 2,) * 4},
    ],
    ids=["static", "offloaded static", "given static", "tuples"],
)
def test_other_kinds_of_cache_are_one_clear_error(options):
    model = model_of("full")
    with pytest.raises(TypeError, match=r"cache of type .*Pass DynamicCache\(config=model.config\)") as error:
        model.generate(random_ids(1, 4), max_new_tokens=3, **options)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ what comes with it
def test_scores_hidden_states_and_attentions():
    model = copy.deepcopy(model_of("sliding"))
    model.set_attn_implementation("eager")
    prompt = random_ids(1, 6)
    out = model.generate(
        prompt,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
        **OPEN_ENDED,
    )
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], use_cache=False, output_hidden_states=True, output_attentions=True)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == len(out.attentions) == 4
    torch.testing.assert_close(torch.stack(out.logits, 1), whole.logits[:, 5:], rtol=0, atol=3e-5)
    assert torch.isinf(out.scores[0][0, 0])  # the suppressed one
    for index, want in enumerate(whole.hidden_states):
        got = torch.cat([step[index] for step in out.hidden_states], dim=1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    for step, per_layer in enumerate(out.attentions):
        for index, got in enumerate(per_layer):
            query = 6 + step - 1  # the last one of the step
            keys = got.shape[-1]
            want = whole.attentions[index][:, :, query, query + 1 - keys : query + 1]
            torch.testing.assert_close(got[:, :, -1], want, rtol=0, atol=1e-5)


def test_texts_end_at_eos_and_are_padded_after_it(model):
    """Every row ends at its own place; the ids that it would have said without an end say where."""
    ids, mask, prompts = padded([4, 9, 6], "left")
    free = [greedy(model, prompt, 12)[0] for prompt in prompts]
    ends = sorted({int(free[0][2]), int(free[1][5])})
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [0], "pad_token_id": 0}
    got = model.generate(ids, attention_mask=mask, eos_token_id=ends, **options)[:, 9:]
    longest = 0
    for row, text in enumerate(free):
        hits = torch.isin(text, torch.tensor(ends)).nonzero()
        length = int(hits[0]) + 1 if len(hits) else 12
        longest = max(longest, length)
        assert torch.equal(got[row, :length], text[:length])
        assert not got[row, length:].any()
    assert got.shape[1] == longest
    assert int(free[0][2]) in got[0]


def test_streamer_sees_every_token_once(model):
    class Keep(BaseStreamer):
        def __init__(self):
            self.pieces, self.ended = [], False

        def put(self, value):
            self.pieces.append(value.flatten())

        def end(self):
            self.ended = True

    streamer, prompt = Keep(), random_ids(1, 5)
    got = model.generate(prompt, streamer=streamer, max_new_tokens=6, **OPEN_ENDED)
    assert streamer.ended
    assert [len(piece) for piece in streamer.pieces] == [5] + [1] * 6
    assert torch.equal(torch.cat(streamer.pieces), got[0])


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments and outputs of every forward that `generate` makes."""
    seen = []
    forward = ZayaForCausalLM.forward

    @functools.wraps(forward)
    def spy(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        seen.append((kwargs, output))
        return output

    monkeypatch.setattr(ZayaForCausalLM, "forward", spy)
    return seen


def test_only_the_last_logits_are_computed(calls):
    model = model_of("full")
    model.generate(random_ids(2, 6), max_new_tokens=3, **OPEN_ENDED)
    assert [output.logits.shape for _, output in calls] == [(2, 1, 128)] * 3
    calls.clear()
    model.generate(random_ids(2, 6), max_new_tokens=3, logits_to_keep=0, **OPEN_ENDED)
    assert [output.logits.shape[1] for _, output in calls] == [6, 1, 1]


def test_router_records_are_kept_only_when_asked_for(calls):
    model = copy.deepcopy(model_of("full"))
    model.config.output_router_logits = True
    prompt = random_ids(1, 6)
    assert model(prompt).router_logits is not None
    for asked in (None, False, True):
        calls.clear()
        options = {} if asked is None else {"output_router_logits": asked}
        model.generate(prompt, max_new_tokens=3, **options, **OPEN_ENDED)
        assert [output.router_logits is not None for _, output in calls] == [bool(asked)] * 3


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad", "training", "training, checkpointed"])
def test_any_mode_of_torch(mode):
    model = model_of("sliding")
    if mode.startswith("training"):
        model = copy.deepcopy(model).train()
        if "checkpointed" in mode:
            model.activation_checkpointing_enable()
    prompt = random_ids(1, 6)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        got = model.generate(prompt, max_new_tokens=5, **OPEN_ENDED)
        drafted = model.generate(prompt, max_new_tokens=5, prompt_lookup_num_tokens=2, **OPEN_ENDED)
    assert torch.equal(got, drafted)
    assert torch.equal(got[:, 6:], greedy(model_of("sliding"), prompt, 5))
    assert model.training == mode.startswith("training")


def test_generation_config_of_the_checkpoint_is_used(tmp_path):
    model = copy.deepcopy(model_of("full"))
    prompt = random_ids(1, 6)
    text = greedy(model, prompt, 8)[0]
    end = int(text[4])
    model.generation_config.update(max_new_tokens=7, eos_token_id=[end, 1], suppress_tokens=[0], do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    length = text.tolist().index(end) + 1
    assert loaded.generate(prompt)[0, 6:].tolist() == text[:length].tolist()
    assert loaded.generate(prompt, eos_token_id=None)[0, 6:].tolist() == text[:7].tolist()


def test_special_tokens_come_from_the_config():
    config = ZayaForCausalLM(tiny_config(pad_token_id=3, bos_token_id=4, eos_token_id=[5, 6])).generation_config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 4, [5, 6])
    assert isinstance(model_of("full").config, ZayaConfig)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4), (2, 0)])
def test_prompts_without_rows_or_tokens_are_refused(shape):
    model, ids = model_of("full"), torch.zeros(shape, dtype=torch.long)
    for given in ({"inputs": ids}, {"input_ids": ids}, {"inputs_embeds": torch.zeros(*shape, 64)}):
        with pytest.raises(ValueError, match="at least one row and one token"):
            model.generate(**given, max_new_tokens=2)


def test_embeddings_where_ids_are_needed_are_refused():
    model, embeds = model_of("full"), torch.zeros(1, 8, 64)
    with pytest.raises(ValueError, match="prefill_chunk_size splits ids"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=5, max_new_tokens=2)
    for options in ({"assistant_model": model_of("full", seed=1)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="drafts from ids"):
            model.generate(inputs_embeds=embeds, max_new_tokens=2, **options)


def test_early_exit_is_refused_before_it_changes_the_config():
    model = model_of("full")
    with pytest.raises(ValueError, match="assistant_early_exit"):
        model.generate(random_ids(1, 4), assistant_early_exit=2, max_new_tokens=2)
    assert model.config.num_hidden_layers == 4


def test_stopping_one_step_late_leaves_no_trace(model, monkeypatch):
    """Where reading the device is slow, the library decides one step late and crops that step from the cache."""

    class LateStop(DeferredStopCheck):
        def __init__(self, input_ids, max_length, cache, cache_is_returned, streamer=None):
            StopCheck.__init__(self, streamer)
            self.max_length, self.cache = max_length, cache if cache_is_returned else None
            self.slots, self.stop_reported, self.due = (), False, False
            if self.cache is not None:
                self.cache.activate_past_recording()

        def __call__(self, unfinished_sequences, tokens, length):
            self.stop_reported, self.due = self.due, bool(unfinished_sequences.max() == 0)
            stopping = self.stop_reported or length >= self.max_length
            if not stopping and self.cache is not None:
                self.cache.crop(0)
            return stopping

    LateStop.is_supported = staticmethod(lambda *args, **kwargs: True)
    prompt = random_ids(1, 6)
    text = greedy(model, prompt, 12)
    options = {**OPEN_ENDED, "eos_token_id": int(text[0, 4]), "max_new_tokens": 12, "return_dict_in_generate": True}
    want = model.generate(prompt, **options)
    monkeypatch.setattr("transformers.generation.utils.DeferredStopCheck", LateStop)
    got = model.generate(prompt, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert got.sequences.shape[1] < 6 + 12
    assert got.cache.get_seq_length() == want.cache.get_seq_length()
    options["eos_token_id"] = None
    whole = torch.cat([got.sequences, random_ids(1, 2, seed=1)], dim=1)
    on = model.generate(whole, cache=got.cache, **{**options, "max_new_tokens": 5})
    assert torch.equal(on.sequences[:, -5:], greedy(model, whole, 5))


def test_misspelt_arguments_are_named():
    with pytest.raises(ValueError, match="atention_mask"):
        model_of("full").generate(random_ids(1, 4), atention_mask=torch.ones(1, 4), max_new_tokens=2)


@pytest.fixture(autouse=True)
def _propagate(caplog):
    caplog.set_level(logging.WARNING, logger="zaya_hf")
