"""What `generate` cannot do for ZAYA is one clear line, and nothing has run or changed."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from cached_runs import assert_close, model_of, uncached
from zaya_hf.testing import random_ids

FEW = {"max_new_tokens": 3, "do_sample": False}

REFUSED = {
    "quantised": ({"cache_implementation": "quantized"}, r"convolution states too. Leave it out, or use 'offloaded'"),
    "quantised by hqq": (
        {"cache_implementation": "quantized", "cache_config": {"backend": "hqq"}},
        r"convolution states too. Leave it out",
    ),
    "paged": ({"cache_implementation": "paged"}, r"in pages and has no place for ZAYA's convolution states; give gen"),
    "offloaded": ({"cache_implementation": "offloaded"}, r"'offloaded' moves .* but the model is on the CPU; leave it"),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, r"'offloaded_static' moves .* is on the CPU"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0.6 asks for contrastive search, which"),
    "DoLa": ({"dola_layers": "high"}, r"dola_layers='high' asks for DoLa, which transformers has moved out"),
    "group beams": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, r"num_beam_groups=2 asks for"),
    "forced words": ({"num_beams": 2, "force_words_ids": [[5]]}, r"asks for constrained beam search, which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings(name):
    options, match = REFUSED[name]
    model = model_of("full")
    calls = []
    hook = model.model.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        with pytest.raises(ValueError, match=match) as error:
            model.generate(random_ids(1, 4), **FEW, **options)
        if "num_beams" not in options and "cache_config" not in options:
            with pytest.raises(ValueError, match=match):
                model.generate(random_ids(1, 4), generation_config=GenerationConfig(**FEW, **options))
    finally:
        hook.remove()
    assert "\n" not in str(error.value)
    assert not calls


def test_settings_that_choose_nothing_are_let_through():
    model, ids = model_of("full"), random_ids(1, 4)
    want = model.generate(ids, **FEW)
    assert torch.equal(model.generate(ids, penalty_alpha=0.0, num_beam_groups=1, **FEW), want)


def test_continuous_batching():
    """`transformers serve` asks for the attribute, and answers request by request without it."""
    model = model_of("full")
    assert not hasattr(model, "init_continuous_batching")
    for call in (model.generate_batch, model.continuous_batching_context_manager):
        with pytest.raises(NotImplementedError, match="no place for ZAYA's convolution states; give generate several"):
            call([[3, 4, 5]])


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_caches_that_offload_while_the_model_is_on_the_cpu(kind, monkeypatch):
    model, ids = model_of("full"), random_ids(1, 6)
    monkeypatch.setattr(torch, "Stream", lambda *args, **kwargs: None)  # there is none without an accelerator
    room = {"max_cache_len": 12} if kind is StaticCache else {}
    cache = kind(config=model.config, offloading=True, **room)
    for call in (lambda: model(ids, cache=cache), lambda: model.generate(ids, cache=cache, **FEW)):
        with pytest.raises(ValueError, match="the cache offloads keys and values to the CPU, but the model is on the"):
            call()
    cache.offloading = False
    assert_close(model(ids, cache=cache), uncached(model, ids).logits)
