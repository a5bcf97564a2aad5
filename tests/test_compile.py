"""Full-graph compilation and export of calls without a cache: no graph break, and no routing baked in."""

from __future__ import annotations

import pytest
import torch

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

IMPLEMENTATIONS = ["grouped_mm", "batched_mm"]  # "eager" loops over the experts that were hit
PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None]
LEFT = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
CALLS = {
    "plain": {},
    "packed": {"position_ids": PACKED},
    "left pads": {"attention_mask": LEFT},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Every test compiles models of its own; the compiler counts them as recompilations of one."""
    torch.compiler.reset()


@pytest.fixture(params=IMPLEMENTATIONS)
def model(request: pytest.FixtureRequest) -> ZayaForCausalLM:
    built = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))
    built.set_experts_implementation(request.param)
    return built


def hide_expert(model: ZayaForCausalLM, expert: int) -> None:
    """No token chooses `expert` in any layer."""
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[expert] -= 9.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_equal_eager_ones(model: ZayaForCausalLM, name: str, attention: str) -> None:
    model.set_attn_implementation(attention)
    ids = random_ids(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, labels=ids, use_cache=False, **CALLS[name])
        want = model(ids, labels=ids, use_cache=False, **CALLS[name])
    torch.testing.assert_close((got.logits, got.loss), (want.logits, want.loss), atol=1e-5, rtol=0)


def test_compiled_training_has_the_same_gradients(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 12)
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            got[name], parameter.grad, atol=1e-5, rtol=0, msg=lambda text, name=name: name + text
        )


def test_an_exported_program_routes_anew(model: ZayaForCausalLM) -> None:
    """An expert that no token chose while tracing is used afterwards."""
    ids, others = random_ids(2, 12), random_ids(2, 12, seed=7)
    with torch.no_grad():
        slots = torch.stack(model(others, use_cache=False, output_router_logits=True).router_slots)
        used_later = int(slots.flatten().mode().values)
        hide_expert(model, used_later)
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False).module()
        for layer, traced in zip(model.model.layers, exported.model.layers.children(), strict=True):
            layer.mlp.gate.balancing_biases[used_later] += 9.0
            traced.mlp.gate.balancing_biases.copy_(layer.mlp.gate.balancing_biases)
        want = model(others, use_cache=False, output_router_logits=True)
        assert used_later in torch.stack(want.router_slots)
        torch.testing.assert_close(exported(others, use_cache=False).logits, want.logits, atol=1e-5, rtol=0)
