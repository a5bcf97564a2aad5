"""Compiled decoding with a static cache: one program for every step, the tokens of a run without compiler or cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

PROMPT, ROOM = 6, 20


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()
    counters.clear()


def build(implementation: str = "zaya", **changes: Any) -> ZayaForCausalLM:
    both = {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 5}
    built = redraw(ZayaForCausalLM(tiny_config(**both, attention_bias=True, **changes)))
    built.set_experts_implementation(implementation)
    return built


@pytest.mark.parametrize(
    ("widths", "implementation"),
    [
        ((2, 2), "zaya"),
        ((3, 4), "batched_mm"),
        pytest.param((1, 1), "grouped_mm", marks=pytest.mark.slow),
        pytest.param((2, 2), "eager", marks=pytest.mark.slow),
    ],
)
def test_one_program_for_all_steps(widths: tuple[int, int], implementation: str) -> None:
    """Beyond the window, and again for another prompt after a reset."""
    model = build(implementation, cca_time0=widths[0], cca_time1=widths[1])
    backend = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    for seed in range(2):
        ids = random_ids(2, ROOM, seed=seed)
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
            model(ids[:, :PROMPT], cache=cache)
            got = [step(ids[:, at : at + 1], cache=cache).logits for at in range(PROMPT, ROOM)]
        torch.testing.assert_close(torch.cat(got, dim=1), want[:, PROMPT:], atol=1e-5, rtol=0)
        assert cache.get_seq_length() == ROOM
        cache.reset()
    assert backend.frame_count == 1


def test_generate_compiles_by_itself() -> None:
    """With a static cache and a `CompileConfig`, on left-padded prompts: a program of the steps, tokens as without."""
    model, ids = build(), random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **settings)
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiling._compile_all_devices = True  # else transformers compiles on accelerators only
    for _ in range(2):
        got = model.generate(ids, **settings, cache_implementation="static", compile_config=compiling)
        assert torch.equal(got, want)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
