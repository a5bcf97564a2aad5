"""`routed_experts`: the slots that were chosen elsewhere are taken, and weighed by their probability now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from zaya_hf import ZayaForCausalLM
from zaya_hf.ops import select_slots
from zaya_hf.testing import random_ids, redraw, tiny_config

IDS = random_ids(2, 12)
LAYERS, SLOTS = 4, 5


def a_model(seed: int = 0, **changes: Any) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**changes)), seed)
    assert isinstance(model, ZayaForCausalLM)
    return model


def stacked(slots: Any) -> Tensor:
    """``[B, S, layers]`` of what an output has per layer."""
    return torch.stack(list(slots), dim=-1)


def gradients(model: ZayaForCausalLM, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def other_slots(seed: int = 7) -> Tensor:
    """Random slots, the skip slot among them."""
    return torch.randint(0, SLOTS, (*IDS.shape, LAYERS), generator=torch.Generator().manual_seed(seed))


def test_op_takes_the_slots_it_is_given_and_weighs_them() -> None:
    logits = torch.randn(6, SLOTS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    biases = torch.tensor([0.0, 0.1, 0.0, 0.0, -1.0])
    replayed = torch.tensor([3, -1, 4, 0, -1, 2])
    slots, weights = select_slots(logits, biases, replayed)
    probabilities = logits.softmax(-1)
    chosen = (probabilities + biases).argmax(-1)
    assert slots.tolist() == [3, chosen[1], 4, 0, chosen[4], 2]
    torch.testing.assert_close(weights, probabilities[range(6), slots])
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.softmax(-1)[range(6), slots].sum(), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("form", ["per layer", "stacked", "top-1", "int16", "uint16", "nothing told"])
def test_own_slots_change_nothing(form: str) -> None:
    model = a_model().train()
    own = model(IDS, output_router_logits=True).router_slots
    told = {
        "per layer": own,
        "stacked": stacked(own),
        "top-1": stacked(own)[..., None],
        "int16": stacked(own).to(torch.int16),
        "uint16": stacked(own).to(torch.uint16),  # torch finds no bounds of these
        "nothing told": torch.full((*IDS.shape, LAYERS), -1),
    }[form]
    assert torch.equal(model(IDS, routed_experts=told).logits, model(IDS).logits)
    loss, expected = gradients(model)
    replayed_loss, got = gradients(model, routed_experts=told)
    assert torch.equal(loss, replayed_loss)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def replay_by_hand(model: ZayaForCausalLM, slots: Tensor) -> Tensor:
    """Logits where each router is made to choose by a bias that no probability can outweigh, one token at a time.

    A token's own slots matter to later ones only through what it is: so decode with a cache, and set the biases.
    """
    columns = []
    for row, tokens in zip(slots, IDS, strict=True):
        cache, outputs = DynamicCache(config=model.config), []
        for column, token in enumerate(tokens):
            for layer, slot in zip(model.model.layers, row[column], strict=True):
                biases = layer.mlp.gate.balancing_biases
                biases.zero_()
                biases[slot] = 100
            outputs.append(model(token.view(1, 1), cache=cache).logits)
        columns.append(torch.cat(outputs, dim=1))
    return torch.cat(columns)


@pytest.mark.parametrize("skip_expert", ["zero", "identity"])
def test_other_slots_are_taken(skip_expert: str) -> None:
    model = a_model(skip_expert=skip_expert)
    slots = other_slots()
    output = model(IDS, routed_experts=slots, output_router_logits=True)
    assert torch.equal(stacked(output.router_slots), slots)
    counts = torch.stack([slots[..., layer].flatten().bincount(minlength=SLOTS) for layer in range(LAYERS)])
    assert torch.equal(output.tokens_per_slot, counts)
    with torch.no_grad():
        expected = replay_by_hand(a_model(skip_expert=skip_expert), slots)
        assert float((output.logits - model(IDS).logits).abs().max()) > 0.1
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)


def test_routers_learn_through_the_weight_of_the_replayed_slot() -> None:
    """In float64, against differences: the loss as a function of one router's weights, all slots held."""
    model = a_model().double()
    slots = other_slots()
    _, got = gradients(model, routed_experts=slots)
    name = "model.layers.1.mlp.gate.router_mlp.fc2.weight"
    parameter = model.get_parameter(name)
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            parameter.add_(direction, alpha=step)
            losses.append(float(model(IDS, labels=IDS, routed_experts=slots).loss))
    slope = (losses[0] - losses[1]) / 2e-5
    assert abs(slope) > 1e-4
    assert slope == pytest.approx(float((got[name] * direction).sum()), rel=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_replays_too(use_reentrant: bool) -> None:
    model = a_model().train()
    slots = other_slots()
    _, expected = gradients(model, routed_experts=slots)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    _, got = gradients(model, routed_experts=slots)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-7, rtol=1e-6, msg=name)


def test_packed_padded_and_cached_rows() -> None:
    model = a_model()
    slots = other_slots()
    with torch.no_grad():
        expected = model(IDS, routed_experts=slots).logits
        positions = torch.arange(12).repeat(2)[None]
        packed = model(IDS.reshape(1, 24), position_ids=positions, routed_experts=slots.reshape(1, 24, LAYERS)).logits
        torch.testing.assert_close(packed.view_as(expected), expected, atol=1e-5, rtol=0)

        pads = torch.zeros(2, 3, dtype=torch.long)
        mask = torch.cat([pads, torch.ones_like(IDS)], dim=1)
        beside = torch.full((2, 3, LAYERS), -1)
        padded = model(torch.cat([pads, IDS], 1), mask, routed_experts=torch.cat([beside, slots], 1))
        torch.testing.assert_close(padded.logits[:, 3:], expected, atol=1e-5, rtol=0)

        cache = DynamicCache(config=model.config)
        parts = [
            model(IDS[:, a:b], cache=cache, routed_experts=slots[:, a:b]).logits for a, b in ((0, 5), (5, 6), (6, 12))
        ]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)


def test_padded_rows_replay_their_own_record() -> None:
    """`router_slots` of padding are -1, which is what `routed_experts` takes for it."""
    model = a_model()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    output = model(IDS, mask, output_router_logits=True)
    assert int(output.router_slots[0].min()) == -1
    again = model(IDS, mask, routed_experts=output.router_slots)
    assert torch.equal(again.logits[mask.bool()], output.logits[mask.bool()])


def test_generate_then_train() -> None:
    """A policy that has moved since the rollout is trained with the experts of the rollout."""
    model = a_model()
    rollout = model.generate(IDS[:, :6], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        record = model(rollout, output_router_logits=True)
    assert torch.equal(rollout[:, 6:], record.logits[:, 5:-1].argmax(-1))
    moved = a_model().train()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter), alpha=0.02)
    output = moved(rollout, labels=rollout, routed_experts=record.router_slots, output_router_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(output.router_slots, record.router_slots, strict=True))
    output.loss.backward()
    gates = [p.grad for n, p in moved.named_parameters() if ".gate." in n and p.grad is not None]
    assert gates
    assert all(bool(g.isfinite().all()) for g in gates)


def test_a_compiled_model_replays_too() -> None:
    model = a_model(num_hidden_layers=2)
    slots = other_slots()[:, -1:, :2]

    @torch.no_grad()
    def last_step() -> Tensor:
        cache = DynamicCache(config=model.config)
        model(IDS[:, :-1], cache=cache)
        return model(IDS[:, -1:], cache=cache, routed_experts=slots).logits

    expected = last_step()
    model.compile_decoding(backend="eager")
    torch.testing.assert_close(last_step(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(2, 11, 4, dtype=torch.long), ValueError, r"shape \(2, 11, 4\); expected \[2, 12, 4\]"),
        (torch.zeros(4, 2, 12, dtype=torch.long), ValueError, r"shape \(4, 2, 12\); expected \[2, 12, 4\]"),
        (torch.zeros(2, 12, 4, 2, dtype=torch.long), ValueError, r"shape \(2, 12, 4, 2\)"),
        (torch.zeros(2, 12, 4), ValueError, "dtype torch.float32; expected int64"),
        (torch.zeros(2, 12, 4, dtype=torch.bool), ValueError, "dtype torch.bool"),
        (torch.full((2, 12, 4), 5), ValueError, r"contain 5; slots lie in 0 \.\.\. 3, 4 skips"),
        (torch.full((2, 12, 4), -2), ValueError, "contain -2"),
        ((torch.zeros(2, 12, dtype=torch.long),) * 3, ValueError, r"shape \(2, 12, 3\)"),
        ((torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 11, dtype=torch.long)), ValueError, "different shapes"),
        ((), TypeError, "a tensor"),
        ([[1, 2]], TypeError, "a tensor"),
        (3, TypeError, "a tensor"),
    ],
)
def test_what_fits_nothing_is_refused_in_one_line(given: Any, error: type[Exception], message: str) -> None:
    cache = DynamicCache(config=tiny_config())
    with pytest.raises(error, match=message) as raised:
        a_model()(IDS, cache=cache, routed_experts=given)
    assert "\n" not in str(raised.value)
    assert "routed_experts" in str(raised.value)
    assert cache.get_seq_length() == 0


def test_generate_does_not_take_them() -> None:
    with pytest.raises(ValueError, match="routed_experts are for forward"):
        a_model().generate(IDS, routed_experts=other_slots(), max_new_tokens=2)
