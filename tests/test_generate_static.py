"""`generate` with a static cache writes what it writes with a growing one; a compiled step is compiled once."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, StaticCache

from generated_texts import KINDS, OPEN_ENDED, greedy, model_of, padded
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids

STATIC = {"cache_implementation": "static", **OPEN_ENDED}


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("given", ["ids", "embeddings"])
def test_greedy(model, length, given):
    prompt = random_ids(1, length)
    want = greedy(model, prompt, 10)
    if given == "ids":
        assert torch.equal(model.generate(prompt, max_new_tokens=10, **STATIC)[:, length:], want)
    else:
        embeds = model.get_input_embeddings()(prompt)
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=10, **STATIC), want)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}, {"max_cache_len": 50}], ids=str)
def test_padded_rows_are_their_prompts_alone(model, side, options):
    ids, mask, prompts = padded([9, 4, 7], side)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=8, **STATIC, **options)
    for row, prompt in enumerate(prompts):
        assert torch.equal(got[row : row + 1, 9:], greedy(model, prompt, 8))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beams(model, options):
    ids, mask, _ = padded([7, 4], "left")
    given = {"attention_mask": mask, "max_new_tokens": 8, **OPEN_ENDED, **options}
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), model.generate(ids, **given))


def test_sampling(model):
    ids, mask, _ = padded([7, 4], "left")
    given = {"attention_mask": mask, "max_new_tokens": 12, **OPEN_ENDED, "do_sample": True, "num_return_sequences": 3}
    texts = []
    for implementation in ("static", None):
        torch.manual_seed(3)
        texts.append(model.generate(ids, cache_implementation=implementation, **given))
    assert torch.equal(*texts)


@pytest.mark.parametrize("draft", ["assistant", "itself", "prompt lookup"])
@pytest.mark.parametrize("length", [1, 8])
def test_drafted_tokens_are_the_greedy_ones(model, draft, length):
    prompt = random_ids(1, 4).repeat(1, 2)[:, :length]
    kind = next(kind for kind in KINDS if model_of(kind) is model)
    options = {
        "assistant": {"assistant_model": model_of(kind, seed=1)},
        "itself": {"assistant_model": model},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
    }[draft]
    got = model.generate(prompt, max_new_tokens=14, **STATIC, **options)
    assert torch.equal(got[:, length:], greedy(model, prompt, 14))


@pytest.mark.parametrize("given", ["an implementation", "a cache"])
def test_drafts_end_with_the_text(model, given):
    """A repetitive prompt, so that looked-up drafts would reach beyond the last token; a cache has no slots there."""
    for seed in range(2):
        prompt = random_ids(1, 3, seed=seed).repeat(1, 3)
        for new in (2, 3, 5):
            options = dict(OPEN_ENDED, max_new_tokens=new, prompt_lookup_num_tokens=6)
            if given == "a cache":
                cache = StaticCache(config=model.config, max_cache_len=8 + new)
                cache.activate_past_recording()
                got = model.generate(prompt, cache=cache, **options)
            else:
                got = model.generate(prompt, cache_implementation="static", **options)
            assert torch.equal(got[:, 9:], greedy(model, prompt, new))


def test_going_on_from_a_returned_cache_and_after_a_reset(model):
    prompt, more = random_ids(1, 5), random_ids(1, 3, seed=2)
    cache = StaticCache(config=model.config, max_cache_len=40)
    first = model.generate(prompt, cache=cache, max_new_tokens=4, **OPEN_ENDED)
    whole = torch.cat([first, more], dim=1)
    got = model.generate(whole, cache=cache, max_new_tokens=6, **OPEN_ENDED)
    assert torch.equal(got[:, whole.shape[1] :], greedy(model, whole, 6))
    cache.reset()
    other, mask, prompts = padded([4, 9], "left", seed=8)
    got = model.generate(other, attention_mask=mask, cache=cache, max_new_tokens=6, **OPEN_ENDED)
    for row, alone in enumerate(prompts):
        assert torch.equal(got[row : row + 1, 9:], greedy(model, alone, 6))


@pytest.fixture
def graphs(monkeypatch) -> list[int]:
    """Counts the compiled programs of `generate`, which it compiles on accelerators only unless told otherwise."""
    torch._dynamo.reset()
    counted: list[int] = []

    def backend(module, inputs):
        counted.append(len(inputs))
        return module.forward

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    monkeypatch.setattr("test_generate_static.COMPILED", {"compile_config": config, **STATIC}, raising=False)
    yield counted
    torch._dynamo.reset()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("sliding", [7]), ("sliding", [7, 4]), ("bias, widths 3 4", [7, 4])],
    ids=["one row", "left pads", "left pads, full"],
)
def test_the_step_is_compiled_once(kind, lengths, graphs):
    model = model_of(kind)
    for width, seed in ((7, 3), (5, 4)):  # the second prompt has another length, but the cache is as large
        ids, mask, prompts = padded([min(length, width) for length in lengths], "left", seed=seed)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=12 + 7 - width, **COMPILED)
        for row, prompt in enumerate(prompts):
            assert torch.equal(got[row : row + 1, width : width + 12], greedy(model, prompt, 12))
        assert len(graphs) == 1


COMPILED: dict = {}


@pytest.mark.usefixtures("graphs")
def test_drafts_with_compiling_on(model):
    """A cache that records is not compiled, and says so to the library."""
    prompt = random_ids(1, 6)
    got = model.generate(prompt, max_new_tokens=10, prompt_lookup_num_tokens=2, **COMPILED)
    assert torch.equal(got[:, 6:], greedy(model, prompt, 10))
