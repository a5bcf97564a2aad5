"""Caches that cannot be used, and calls that fail: one clear line, and the cache is as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, QuantizedCache
from transformers import ZayaConfig as NativeConfig
from transformers import ZayaForCausalLM as NativeZaya
from transformers.cache_utils import EncoderDecoderCache

from cached_runs import KINDS, assert_close, assert_same_contents, cache_for, contents, feed, model_of, uncached
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, record_run, tiny_config


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


WHAT_TO_PASS = r"Pass DynamicCache\(config=model.config\) or StaticCache\("


@pytest.mark.parametrize(
    "wrong",
    [
        lambda config: QuantizedCache(backend="fp8", config=LlamaConfig(num_hidden_layers=4)),
        lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache()),
        lambda config: tuple((torch.zeros(1, 2, 3, 16),) * 2 for _ in range(4)),
        lambda config: "dynamic",
    ],
    ids=["quantised", "encoder-decoder", "tuple", "text"],
)
def test_other_kinds_of_cache_are_refused(wrong):
    model = model_of("full")
    with pytest.raises(TypeError, match=WHAT_TO_PASS) as error:
        model(random_ids(1, 3), cache=wrong(model.config))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LlamaConfig(num_hidden_layers=4), "layer 0 of the cache is a DynamicLayer"),
        (LlamaConfig(num_hidden_layers=2), "has 2 layers, the model 4"),
        (tiny_config(num_hidden_layers=3), "has 3 layers, the model 4"),
        (tiny_config(**KINDS["sliding"]), "layer 1 of the cache is a LinearAttentionAndSlidingWindow"),
    ],
    ids=["llama", "shallow llama", "shallow", "sliding"],
)
def test_caches_of_other_models_are_refused(config, match):
    cache = DynamicCache(config=config)
    with pytest.raises(ValueError, match=f"{match}.*{WHAT_TO_PASS}"):
        model_of("full")(random_ids(1, 3), cache=cache)


def test_cache_with_another_window_is_refused():
    cache = DynamicCache(config=tiny_config(**{**KINDS["sliding"], "sliding_window": 8}))
    with pytest.raises(ValueError, match=f"window of 8, the model 4.*{WHAT_TO_PASS}"):
        model_of("sliding")(random_ids(1, 3), cache=cache)


@pytest.mark.parametrize("used_with", ["sliding", "widths 3 4"])
def test_cache_in_use_by_another_zaya_model_is_refused(used_with):
    cache = DynamicCache()
    model_of(used_with)(random_ids(1, 3), cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match=f"another ZAYA model.*{WHAT_TO_PASS}"):
        model_of("full")(random_ids(1, 3), cache=cache)
    assert_same_contents(cache, before)


def test_cache_filled_by_the_stock_class_is_refused():
    model = model_of("full")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    values = {name: getattr(model.config, name) for name in names}
    native = NativeZaya(NativeConfig(**values, num_experts=4, moe_intermediate_size=32, router_hidden_size=16))
    cache = native(random_ids(1, 3), use_cache=True).cache
    with pytest.raises(ValueError, match="filled by another model class"):
        model(random_ids(1, 3), cache=cache)


def test_another_number_of_rows_is_refused(model):
    ids = random_ids(2, 8)
    cache = cache_for(model)
    model(ids[:, :5], cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="the call has 3 rows, the cache 2"):
        model(random_ids(3, 1), cache=cache)
    assert_same_contents(cache, before)
    assert_close(record_run(model, ids[:, 5:], cache=cache), uncached(model, ids)[:, 5:])


FAILING = {
    "id too large": {"input_ids": torch.tensor([[3, 128]])},
    "negative id": {"input_ids": torch.tensor([[3, -1]])},
    "ids without rows": {"input_ids": torch.tensor([3, 4])},
    "mask too short": {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 4)},
    "mask too long": {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 9)},
    "mask of other rows": {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(3, 7)},
    "4-D mask of other keys": {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 1, 2, 6)},
    "positions too long": {"input_ids": torch.tensor([[3, 4]]), "position_ids": torch.arange(7)[None]},
    "embeddings too narrow": {"inputs_embeds": torch.ones(1, 2, 32)},
    "embeddings without rows": {"inputs_embeds": torch.ones(2, 64)},
    "ids and embeddings": {"input_ids": torch.tensor([[3, 4]]), "inputs_embeds": torch.ones(1, 2, 64)},
    "neither": {},
    "packed lengths": {"input_ids": torch.tensor([[3, 4]]), "cu_seq_lens_q": torch.tensor([0, 1, 2])},
}


@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind, failing):
    model, ids = model_of(kind), random_ids(1, 8)
    cache = cache_for(model, recording=True)
    model(ids[:, :5], cache=cache)
    before = contents(cache)
    with pytest.raises(ValueError) as error:
        model(**FAILING[failing], cache=cache)
    assert "\n" not in str(error.value)
    assert_same_contents(cache, before)
    assert_close(feed(model, cache, ids[:, 5:], [1, 2]), uncached(model, ids)[:, 5:])


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_call_that_dies_in_a_layer_is_noticed(monkeypatch, at):
    model, ids = model_of("sliding"), random_ids(1, 8)
    cache = cache_for(model)
    model(ids[:, :5], cache=cache)

    def out_of_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[at].self_attn, "forward", out_of_memory)
        with pytest.raises(MemoryError):
            model(ids[:, 5:], cache=cache)
    with pytest.raises(RuntimeError, match="half-filled"):
        model(ids[:, 5:], cache=cache)
    cache.reset()
    assert_close(feed(model, cache, ids, [5, 3]), uncached(model, ids))


def test_gradient_checkpointing_refuses_a_cache():
    """Layers that run twice would store twice; the library's layers drop the cache there, with the context in it."""
    model = copy.deepcopy(model_of("full")).train()
    model.activation_checkpointing_enable()
    cache = cache_for(model)
    model(random_ids(1, 4), cache=cache)  # without gradients nothing is checkpointed
    with torch.enable_grad(), pytest.raises(ValueError, match="gradient checkpointing"):
        model(random_ids(1, 2), cache=cache)
    with torch.enable_grad():
        assert model(random_ids(1, 2), use_cache=True).cache is None
    assert cache.get_seq_length() == 4
