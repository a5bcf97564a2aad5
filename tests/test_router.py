"""The router: depth averaging, norm, MLP, choice by biased and weight by unbiased probability, counts, skip slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import naive_zaya
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.modeling_zaya import ZayaRouter
from zaya_hf.testing import random_ids, redraw, tiny_config


def routers(number: int = 3, seed: int = 0, **changes: object) -> list[ZayaRouter]:
    """Routers of consecutive layers in float64, every weight drawn."""
    config = tiny_config(num_hidden_layers=number, **changes)
    model = redraw(ZayaForCausalLM(config).double(), seed=seed)
    return [layer.mlp.gate for layer in model.model.layers]


def run(chain: list[ZayaRouter], inputs: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What every router of a chain returns; each sees the state of the one before."""
    state, results = None, []
    for router, x in zip(chain, inputs, strict=True):
        results.append(router(x, state))
        state = results[-1][3]
    return results


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --------------------------------------------------------------------------------------------------------- definition
@pytest.mark.parametrize("eps", [None, 1e-6, 0.7])
@pytest.mark.parametrize("experts", [1, 4, 9])
def test_a_chain_of_routers_equals_the_definition(experts: int, eps: float | None) -> None:
    chain = routers(3, num_experts=experts, router_norm_eps=eps)
    config = tiny_config(num_experts=experts, router_norm_eps=eps)
    inputs = [draw(2, 5, 64, seed=i) for i in range(3)]
    results = run(chain, inputs)
    before: list[Tensor | None] = [None] * 10
    for router, x, (logits, slots, weights, state) in zip(chain, inputs, results, strict=True):
        tensors = router.state_dict()
        assert logits.shape == (10, experts + 1)
        assert slots.shape == weights.shape == (10,)
        assert state.shape == (2, 5, 16)
        for token, vector in enumerate(x.flatten(0, 1)):
            slot, weight, own = naive_zaya.router(tensors, "", config, vector, before[token])
            assert int(slots[token]) == slot
            torch.testing.assert_close(weights[token], weight)
            torch.testing.assert_close(state.flatten(0, 1)[token], own)
            before[token] = own


def test_the_state_is_taken_before_the_norm_and_after_the_add() -> None:
    """So history decays by the product of the scales, and no norm comes between two layers."""
    chain = routers(3)
    inputs = [draw(1, 4, 64, seed=i) for i in range(3)]
    states = [result[3] for result in run(chain, inputs)]
    own = [router.down_proj(x) for router, x in zip(chain, inputs, strict=True)]
    scales = [None, chain[1].router_states_scale, chain[2].router_states_scale]
    torch.testing.assert_close(states[0], own[0])
    torch.testing.assert_close(states[1], own[1] + scales[1] * own[0])
    torch.testing.assert_close(states[2], own[2] + scales[2] * own[1] + scales[2] * scales[1] * own[0])


def test_layer_0_has_no_averaging_and_the_others_need_their_own_scale() -> None:
    chain = routers(3)
    assert [hasattr(router, "router_states_scale") for router in chain] == [False, True, True]
    x = draw(1, 4, 64)
    state = draw(1, 4, 16, seed=1)
    with torch.no_grad():
        plain, with_state = chain[1](x, None), chain[1](x, state)
        assert not torch.allclose(plain[0], with_state[0])
        chain[1].router_states_scale.zero_()
        torch.testing.assert_close(chain[1](x, state)[0], plain[0])


def test_the_model_hands_the_state_from_layer_to_layer() -> None:
    """In the model every router gets exactly the state that the one before returned, and the first gets none."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    given, returned = [], []

    def keep(module: ZayaRouter, args: tuple, output: tuple) -> None:
        given.append(args[1])
        returned.append(output[3])

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(keep)
    model(random_ids(2, 5))
    assert given[0] is None
    assert all(g is r for g, r in zip(given[1:], returned[:-1], strict=True))


def test_router_norm_eps_defaults_to_the_other_norms_eps() -> None:
    for config, eps in (
        (tiny_config(rms_norm_eps=1e-3), 1e-3),
        (tiny_config(rms_norm_eps=1e-3, router_norm_eps=1e-6), 1e-6),
        (tiny_config(rms_norm_eps=1e-3, router_norm_eps=0.0), 0.0),
    ):
        model = ZayaForCausalLM(config)
        assert {layer.mlp.gate.router_mlp.norm.eps for layer in model.model.layers} == {eps}
        assert model.model.norm.eps == model.model.layers[0].input_layernorm.eps == 1e-3


# ------------------------------------------------------------------------------------------------- choice and weight
def test_weights_are_unbiased_probabilities_and_not_renormalised() -> None:
    logits = draw(200, 5)
    biases = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.25])
    slots, weights = ops.select_slots(logits, biases)
    probabilities = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    assert torch.equal(slots, (probabilities + biases).argmax(-1))
    assert (slots != probabilities.argmax(-1)).any()  # the biases did matter
    torch.testing.assert_close(weights, probabilities[torch.arange(200), slots])
    assert slots.dtype == torch.int64
    assert set(slots.tolist()) == {0, 1, 2, 3, 4}  # the skip slot too


def test_biases_choose_and_do_not_weigh() -> None:
    """The same added to all changes nothing; a large one moves every token but weighs it by its small share."""
    logits = draw(50, 5)
    plain = ops.select_slots(logits, torch.zeros(5))
    shifted = ops.select_slots(logits, torch.full((5,), 0.75))
    assert torch.equal(plain[0], shifted[0])
    assert torch.equal(plain[1], shifted[1])
    slots, weights = ops.select_slots(logits, torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]))
    assert (slots == 2).all()
    torch.testing.assert_close(weights, torch.softmax(logits, -1)[:, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0]], dtype=dtype)
    assert ops.select_slots(logits, torch.zeros(4))[0].tolist() == [0, 1, 2]
    many = torch.zeros(3000, 17, dtype=dtype)
    assert not ops.select_slots(many, torch.zeros(17))[0].any()


def test_the_softmax_runs_in_fp32() -> None:
    """bf16 logits are promoted first: the probabilities of close logits stay apart, and so does a close bias."""
    logits = draw(64, 5).to(torch.bfloat16)
    slots, weights = ops.select_slots(logits, torch.zeros(5))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, torch.softmax(logits.float(), -1).gather(-1, slots[:, None])[:, 0])
    even = torch.zeros(1, 5, dtype=torch.bfloat16)
    assert ops.select_slots(even, torch.tensor([8.0, 8.003, 8.006, 8.009, 0]))[0].item() == 3


def test_the_skip_slot_is_the_last_one() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0]))
    output = model(random_ids(2, 6), output_router_logits=True)
    assert output.tokens_per_slot.tolist() == [[0, 0, 0, 0, 12]] * 4


# ---------------------------------------------------------------------------------------------------------- gradients
def test_gradients_reach_every_router_parameter() -> None:
    chain = routers(3)
    results = run(chain, [draw(2, 5, 64, seed=i) for i in range(3)])
    sum((i + 1) * result[2].square().sum() for i, result in enumerate(results)).backward()
    for index, router in enumerate(chain):
        for name, parameter in router.named_parameters():
            assert parameter.grad is not None, (index, name)
            assert parameter.grad.abs().max() > 0, (index, name)
    # The softmax of the chosen weight reaches the rows of all slots.
    assert (chain[0].router_mlp.out_proj.weight.grad.abs().amax(1) > 0).all()


def test_no_layer_is_detached_from_the_ones_before() -> None:
    """The weight of the last layer alone moves the first layer's projection, through two averages."""
    chain = routers(3)
    results = run(chain, [draw(2, 5, 64, seed=i) for i in range(3)])
    results[2][2].sum().backward()
    for router in chain:
        assert router.down_proj.weight.grad.abs().max() > 0
    assert chain[0].router_mlp.fc1.weight.grad is None  # its own choice has no part in it


def test_gradients_equal_the_definition() -> None:
    chain = routers(2, seed=4)
    config = tiny_config()
    inputs = [draw(1, 4, 64, seed=i).requires_grad_() for i in range(2)]
    results = run(chain, inputs)
    weighted = sum(result[2].sum() for result in results) + results[1][3].square().sum()
    leaves = [*inputs, *(p for router in chain for p in router.parameters())]
    got = torch.autograd.grad(weighted, leaves, allow_unused=True)

    total: Tensor | float = 0.0
    for token in range(4):
        state = None
        for index, router in enumerate(chain):
            tensors = dict(router.named_parameters()) | dict(router.named_buffers())
            _, weight, state = naive_zaya.router(tensors, "", config, inputs[index][0, token], state)
            total = total + weight
        total = total + state.square().sum()
    want = torch.autograd.grad(total, leaves, allow_unused=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def test_biases_are_outside_the_graph() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    names = [name for name, _ in model.named_parameters()]
    assert not any("balancing_biases" in name for name in names)
    buffers = {name: b for name, b in model.named_buffers() if "balancing_biases" in name}
    assert len(buffers) == 4
    assert all(not b.requires_grad and name in model.state_dict() for name, b in buffers.items())
    biases = torch.zeros(5, requires_grad=True)
    logits = draw(8, 5).requires_grad_()
    slots, weights = ops.select_slots(logits, biases)
    assert not slots.requires_grad
    weights.sum().backward()
    assert biases.grad is None
    assert logits.grad is not None


# ------------------------------------------------------------------------------------------------------------- counts
def test_counts_leave_padding_out() -> None:
    slots = torch.tensor([0, 3, 3, 4, 0, 0, 1])
    real = torch.tensor([True, True, False, True, False, True, True])
    assert ops.count_slots(slots, 5).tolist() == [3, 1, 0, 2, 1]
    counts = ops.count_slots(slots, 5, real)
    assert counts.tolist() == [2, 1, 0, 1, 1]
    assert counts.dtype == torch.int64
    assert ops.count_slots(slots[:0], 5).tolist() == [0] * 5
    assert ops.count_slots(slots, 5, torch.zeros_like(real)).tolist() == [0] * 5
    generator = torch.Generator().manual_seed(0)
    many, mask = torch.randint(0, 5, (5000,), generator=generator), torch.rand(5000, generator=generator) < 0.5
    want = [int(((many == slot) & mask).sum()) for slot in range(5)]
    assert ops.count_slots(many, 5, mask).tolist() == want
    assert ops.count_slots(many, 5, mask).sum() == mask.sum()
