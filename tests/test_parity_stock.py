"""Equal to transformers' own `zaya` class, on random small models, where that class is right.

Compared: logits, loss and every gradient, in fp32, eager and sdpa, whole and left-padded batches, full and sliding
layers, tied and untied heads, with and without a head bias. Both models are made in memory and get the same weights, so
the skip bias may be anything.

Not compared, because the class in transformers 5.24 is wrong or cannot do it (test_definition.py judges there instead):

- packed documents (`position_ids` that restart): its convolutions and delayed value look across the border;
- `attention_bias` together with padding: its pads reach the first real tokens through the biases;
- a 4-D mask with padding: its convolutions then see the pads;
- decoding after right padding, empty batches, a batch without targets (NaN), and the switches that it lacks
  (clamp_temp, skip_expert="identity", ...);
- bf16: it rounds in between (test_numerics.py compares the distances from fp32);
- padding itself: neither its logits nor what they predict.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config

NUMBER = 120


def draw_fields(seed: int) -> dict[str, Any]:
    """Fields of a small config that both classes take."""
    chance = random.Random(seed)
    groups = chance.choice([1, 1, 2, 2, 3, 4])
    head_dim = chance.choice([4, 8, 12, 16, 32])
    layers = chance.randint(1, 4)
    layer_types = [chance.choice(["hybrid", "hybrid", "hybrid_sliding"]) for _ in range(layers)]
    factor = chance.choice([0.5, 0.5, 1.0]) if head_dim % 4 == 0 else 1.0
    return {
        "vocab_size": chance.choice([40, 97]),
        "hidden_size": chance.choice([16, 24, 48]),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * chance.randint(1, 4),
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "cca_time0": chance.randint(1, 4),
        "cca_time1": chance.randint(1, 4),
        "layer_types": layer_types,
        "sliding_window": chance.randint(2, 6) if "hybrid_sliding" in layer_types else None,
        "num_experts": chance.randint(1, 7),
        "moe_intermediate_size": chance.choice([4, 8, 20]),
        "router_hidden_size": chance.choice([4, 8, 16]),
        "rms_norm_eps": chance.choice([1e-5, 1e-6, 1e-2]),
        "attention_bias": chance.random() < 0.3,
        "lm_head_bias": chance.random() < 0.3,
        "tie_word_embeddings": chance.random() < 0.5,
        "hidden_act": chance.choice(["silu", "silu", "gelu"]),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
            for kind, theta in (("hybrid", chance.choice([1e4, 5e6])), ("hybrid_sliding", chance.choice([100.0, 1e4])))
        },
    }


def pair(seed: int, implementation: str) -> tuple[ZayaForCausalLM, StockForCausalLM]:
    """The two classes with the same drawn weights; every other pair has stock's skip bias, the others any."""
    fields = draw_fields(seed)
    settings = {"attn_implementation": implementation, "experts_implementation": "eager"}
    ours = redraw(ZayaForCausalLM(tiny_config(**fields, **settings)), seed=seed)
    if seed % 2:
        for layer in ours.model.layers:
            layer.mlp.gate.balancing_biases[-1] = -1.0
    stock = StockForCausalLM(StockConfig(**tiny_config(**fields).to_dict(), **settings)).eval()
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def batch(seed: int, fields: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and mask; padding on the left in half of the cases that have no attention bias."""
    chance = random.Random(seed + 10_000)
    rows, length = chance.randint(1, 3), chance.randint(2, 9)
    ids = random_ids(rows, length, seed=seed, high=fields["vocab_size"])
    mask = torch.ones(rows, length, dtype=torch.int64)
    if not fields["attention_bias"] and chance.random() < 0.5:
        for row in range(rows):
            mask[row, : chance.randint(0, length - 1)] = 0
    return ids * mask, mask


def assert_same_gradients(ours: torch.nn.Module, stock: torch.nn.Module) -> None:
    want = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = want.pop(name).grad
        got = parameter.grad
        assert got is not None, name
        # stock leaves a gradient out where no token reached the parameter
        expected = torch.zeros_like(got) if expected is None else expected
        error, size = float((got - expected).norm()), float(expected.norm())
        assert error <= 2e-5 * size + 2e-5, f"gradient of {name}: off by {error:.2e} of {size:.2e}"
    assert not want


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("number", range(NUMBER))
def test_logits_loss_and_gradients(number: int, implementation: str, test_seed: int) -> None:
    seed = 1000 * test_seed + number
    ours, stock = pair(seed, implementation)
    ids, mask = batch(seed, draw_fields(seed))
    given = {"use_cache": False} if number % 3 == 0 else {"attention_mask": mask, "use_cache": False}
    if bool((mask == 0).any()):
        given["attention_mask"] = mask
    with torch.no_grad():
        got, want = record_run(ours, ids, **given), record_run(stock, ids, **given)
    scale = max(float(want.logits.abs().max()), 1.0)
    assert_equal_logits(got, want, atol=1e-5 * scale, where=mask.bool())
    if not torch.equal(got.slots[mask.bool()], want.slots[mask.bool()]):
        pytest.skip("rounding tipped a choice (or the comparison above would have failed), so gradients differ too")

    # a padding token's prediction of the first real one is not compared either
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1) & (mask[:, :1] == 0), -100)
    losses = [model(ids, labels=labels, **given).loss for model in (ours, stock)]
    if not bool((labels[:, 1:] != -100).any()):
        assert losses[0].item() == 0  # stock: NaN
        return
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    assert_same_gradients(ours, stock)


def test_the_draw_covers_what_it_should() -> None:
    """If the draw changes, these comparisons must not quietly become narrower."""
    fields = [draw_fields(seed) for seed in range(NUMBER)]
    masks = [batch(seed, f)[1] for seed, f in enumerate(fields)]
    assert {f["num_key_value_heads"] for f in fields} == {1, 2, 3, 4}
    assert {(f["cca_time0"], f["cca_time1"]) for f in fields} == {(a, b) for a in range(1, 5) for b in range(1, 5)}
    for name in ("attention_bias", "lm_head_bias", "tie_word_embeddings"):
        assert 15 < sum(f[name] for f in fields) < NUMBER - 15
    assert sum("hybrid_sliding" in f["layer_types"] for f in fields) > 40
    assert sum(bool((mask == 0).any()) for mask in masks) > 20
    assert {f["num_experts"] for f in fields} == set(range(1, 8))


def test_the_comparison_can_fail() -> None:
    """A small change of any weight of ours is seen."""
    ours, stock = pair(1, "sdpa")
    ids, _ = batch(1, draw_fields(1))
    for name, parameter in ours.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.001)
            got, want = record_run(ours, ids), record_run(stock, ids)
            parameter.div_(1.001)
        if (got.logits - want.logits).abs().max() < 1e-4 and got.biased.allclose(want.biased, atol=1e-6, rtol=0):
            pytest.fail(f"{name} does not matter in this draw")
        with pytest.raises(AssertionError):
            assert_equal_logits(got.logits, want.logits, atol=1e-6)
