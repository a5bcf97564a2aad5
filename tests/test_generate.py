"""`generate` in every mode gives what step-by-step runs without a cache and without padding give."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from generated_texts import KINDS, OPEN_ENDED, greedy, model_of, padded
from zaya_hf import ZayaForCausalLM
from zaya_hf.generation import ZayaGenerationMixin
from zaya_hf.testing import random_ids


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


@pytest.fixture(autouse=True)
def _say_it_again(monkeypatch):
    monkeypatch.setattr(ZayaGenerationMixin, "_said_rolled", False)


@pytest.fixture(autouse=True)
def _propagate(caplog):
    caplog.set_level(logging.WARNING, logger="zaya_hf")


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
