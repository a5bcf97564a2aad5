"""Caches that offload, and steps that transformers compiles by itself: what only an accelerator can show."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from generated_texts import KINDS, OPEN_ENDED, model_of, padded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(params=KINDS)
def model(request):
    return copy.deepcopy(model_of(request.param)).to("cuda")


@pytest.mark.parametrize("implementation", ["offloaded", "static", "offloaded_static"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 3}], ids=str)
def test_texts_are_those_of_the_cache_that_stays(model, implementation, options):
    ids, mask, _ = padded([9, 4, 7], "left")
    given = {"attention_mask": mask.cuda(), "max_new_tokens": 10, **OPEN_ENDED, **options}
    want = model.generate(ids.cuda(), **given)
    assert torch.equal(model.generate(ids.cuda(), cache_implementation=implementation, **given), want)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_keys_are_on_the_cpu_between_calls(model, kind):
    ids, _, _ = padded([9, 9], "left")
    ids = ids.cuda()
    room = {"max_cache_len": 20} if kind is StaticCache else {}
    cache = kind(config=model.config, offloading=True, **room)
    pieces = [model(piece, cache=cache).logits for piece in ids.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    full = [layer for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True) if not sliding]
    assert full[0].keys.device.type == "cpu"
    assert all(layer.states()[0].device.type == "cuda" for layer in cache.layers)
