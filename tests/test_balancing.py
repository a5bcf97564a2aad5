"""The balancing biases' own AdamW: by hand, on drifting routers, and inside a model."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import zaya_hf
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config
from zaya_hf.training.balancing import BiasBalancer


class Router(nn.Module):
    def __init__(self, biases: Tensor):
        super().__init__()
        self.balancing_biases = nn.Buffer(biases)


def routers(layers: int = 2, experts: int = 4) -> list[Router]:
    generator = torch.Generator().manual_seed(5)
    return [Router(torch.randn(experts + 1, generator=generator) * 0.1) for _ in range(layers)]


def random_counts(layers: int = 2, experts: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(0, 50, (layers, experts + 1), generator=torch.Generator().manual_seed(seed))


def biases(modules: list[Router]) -> Tensor:
    return torch.stack([m.balancing_biases for m in modules]).clone()


def test_it_is_torchs_adamw_on_the_error_of_the_shares() -> None:
    modules = routers()
    expected = nn.Parameter(biases(modules)[:, :-1])
    skip = biases(modules)[:, -1]
    reference = torch.optim.AdamW([expected], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    balancer = BiasBalancer(modules, lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    for step in range(6):
        micro_batches = [random_counts(seed=10 * step + i) for i in range(3)]
        for counts in micro_batches:
            balancer.observe(counts)
        balancer.step()
        taken = torch.stack(micro_batches).sum(0)[:, :-1].double()
        expected.grad = (taken / taken.sum(-1, keepdim=True) - 1 / 4).float()
        reference.step()
    torch.testing.assert_close(biases(modules)[:, :-1], expected.detach(), atol=1e-6, rtol=0)
    assert torch.equal(biases(modules)[:, -1], skip)


def test_an_overloaded_expert_is_made_less_likely() -> None:
    (module,) = routers(layers=1)
    before = module.balancing_biases.clone()
    balancer = BiasBalancer([module], lr=0.01)
    balancer.observe(torch.tensor([[70, 10, 10, 10, 1000]]))
    balancer.step()
    change = module.balancing_biases - before
    torch.testing.assert_close(change, torch.tensor([-0.01, 0.01, 0.01, 0.01, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(balancer.max_violation(), torch.tensor([70 * 4 / 100 - 1]))


def test_without_counts_nothing_changes() -> None:
    modules = routers()
    balancer = BiasBalancer(modules)
    assert balancer.max_violation() is None
    balancer.observe(random_counts())
    balancer.step()
    after, violation = biases(modules), balancer.max_violation()
    balancer.step()  # the counts were used up
    assert torch.equal(biases(modules), after)
    assert violation is not None
    assert torch.equal(balancer.max_violation(), violation)


def test_the_callers_counts_stay() -> None:
    balancer = BiasBalancer(routers())
    counts = random_counts()
    kept = counts.clone()
    balancer.observe(counts)
    balancer.observe(counts)
    assert torch.equal(counts, kept)


def test_a_layer_whose_experts_got_nothing_stays() -> None:
    modules = routers()
    balancer = BiasBalancer(modules)
    balancer.observe(random_counts())
    balancer.step()
    before = biases(modules)
    counts = random_counts(seed=1)
    counts[0, :-1] = 0
    balancer.observe(counts)
    balancer.step()
    assert torch.equal(biases(modules)[0], before[0])
    assert not torch.equal(biases(modules)[1], before[1])
    assert balancer.max_violation().tolist()[0] == -1


def test_lr_zero_only_counts() -> None:
    modules = routers()
    before = biases(modules)
    balancer = BiasBalancer(modules, lr=0)
    balancer.observe(random_counts())
    balancer.step()
    assert torch.equal(biases(modules), before)
    assert balancer.max_violation() is not None


def test_a_bias_that_was_set_from_outside_is_kept() -> None:
    """A checkpoint that is loaded writes into the buffers, or puts others in their place."""
    modules = routers()
    balancer = BiasBalancer(modules, lr=0.01)
    balancer.observe(random_counts())
    balancer.step()
    modules[0].balancing_biases = torch.full((5,), 3.0)
    balancer.observe(random_counts())
    balancer.step()
    assert (modules[0].balancing_biases[:-1] - 3).abs().max() < 0.02
    assert (modules[0].balancing_biases[:-1] - 3).abs().min() > 1e-4


def drift(step: int, tokens: int, drifting: Tensor, changed: Tensor, noise: torch.Generator) -> Tensor:
    """Probabilities ``[tokens, E]`` of a router with favourites that move, and are others from step 200 on."""
    favourites = (changed if step >= 200 else drifting) * (1 + 0.1 * torch.sin(torch.tensor(step / 100)))
    return torch.softmax(favourites + torch.randn(tokens, len(favourites), generator=noise), dim=-1)


@pytest.mark.parametrize("lr", [0.0, 5e-3])
def test_drifting_routers_are_balanced_to_the_noise_floor(lr: float) -> None:
    experts, tokens = 8, 4096
    noise = torch.Generator().manual_seed(3)
    drifting, changed = torch.randn(2, experts, generator=noise)
    module = Router(torch.cat([torch.zeros(experts), -torch.ones(1)]))
    balancer = BiasBalancer([module], lr=lr)
    violations = []
    for step in range(400):
        chosen = (drift(step, tokens, drifting, changed, noise) + module.balancing_biases[:-1]).argmax(-1)
        counts = torch.bincount(chosen, minlength=experts + 1)
        balancer.observe(counts[None])
        balancer.step()
        violation = balancer.max_violation()
        assert violation is not None
        violations.append(violation.item())
    # The largest of 8 fair counts of 4096 tokens is about 1.4 standard deviations, 0.06 of a share, above the mean.
    settled = [sum(violations[end - 50 : end]) / 50 for end in (200, 400)]
    if lr == 0:
        assert min(settled) > 0.5
    else:
        assert max(settled) < 0.1
    assert module.balancing_biases[-1] == -1


def test_a_saved_state_continues_with_the_same_numbers() -> None:
    straight, halfway = routers(), routers()
    balancer = BiasBalancer(straight)
    for step in range(6):
        balancer.observe(random_counts(seed=step))
        balancer.step()
    first = BiasBalancer(halfway)
    for step in range(3):
        first.observe(random_counts(seed=step))
        first.step()
    first.observe(random_counts(seed=3))
    state = first.state_dict()
    second = BiasBalancer(halfway, lr=1.0)
    second.load_state_dict(state)
    assert torch.equal(second.max_violation(), first.max_violation())
    second.step()
    for step in range(4, 6):
        second.observe(random_counts(seed=step))
        second.step()
    assert torch.equal(biases(straight), biases(halfway))


class TestErrors:
    def test_no_routers(self) -> None:
        with pytest.raises(ValueError, match="at least one router"):
            BiasBalancer([])

    def test_different_numbers_of_experts(self) -> None:
        with pytest.raises(ValueError, match=r"routers have \[4, 5\] slots"):
            BiasBalancer([Router(torch.zeros(5)), Router(torch.zeros(4))])

    def test_negative_rate(self) -> None:
        with pytest.raises(ValueError, match="learning rate is -1"):
            BiasBalancer(routers(), lr=-1)

    @pytest.mark.parametrize(
        "counts", [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64), torch.zeros(2, 5)]
    )
    def test_counts_of_another_model(self, counts: Tensor) -> None:
        with pytest.raises(ValueError, match=r"expected torch\.int64 \[2, 5\]"):
            BiasBalancer(routers()).observe(counts)


class TestInAModel:
    def test_models_without_biases_have_no_balancer(self) -> None:
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
        assert BiasBalancer.for_model(transformers.LlamaForCausalLM(config)) is None

    def test_stock_models_have_one(self) -> None:
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**TINY))
        assert BiasBalancer.for_model(model) is not None

    def test_every_layer_follows_its_own_counts(self) -> None:
        model = redraw(zaya_hf.ZayaForCausalLM(tiny_config()))
        balancer = BiasBalancer.for_model(model, lr=0.01)
        assert balancer is not None
        before = [layer.mlp.gate.balancing_biases.clone() for layer in model.model.layers]
        counts = model(random_ids(2, 40), output_router_logits=True).tokens_per_slot
        balancer.observe(counts)
        balancer.step()
        for layer, old, taken in zip(model.model.layers, before, counts, strict=True):
            new = layer.mlp.gate.balancing_biases
            error = taken[:-1] / taken[:-1].sum() - 1 / 4
            assert new.dtype == torch.float32
            torch.testing.assert_close(new[:-1] - old[:-1], -0.01 * error.sign(), atol=1e-6, rtol=0)
            assert new[-1] == old[-1]

    def test_padding_does_not_count(self) -> None:
        model = redraw(zaya_hf.ZayaForCausalLM(tiny_config()))
        ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
        mask[0, :12] = 0
        mask[1, 15:] = 0
        changed = torch.where(mask.bool(), ids, random_ids(2, 20, seed=9))
        results = []
        for given in (ids, changed):
            redraw(model)
            balancer = BiasBalancer.for_model(model)
            assert balancer is not None
            counts = model(given, attention_mask=mask, output_router_logits=True).tokens_per_slot
            assert counts.sum(-1).tolist() == [23] * 4
            balancer.observe(counts)
            balancer.step()
            results.append([layer.mlp.gate.balancing_biases.clone() for layer in model.model.layers])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_evaluation_changes_nothing(self) -> None:
        """Only what is observed counts, whatever the model runs through in between."""
        model = redraw(zaya_hf.ZayaForCausalLM(tiny_config()))
        balancer = BiasBalancer.for_model(model)
        assert balancer is not None
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(random_ids(2, 20), output_router_logits=True)
        balancer.step()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_biases_follow_a_model_that_is_moved(self) -> None:
        model = redraw(zaya_hf.ZayaForCausalLM(tiny_config()))
        balancer = BiasBalancer.for_model(model)
        assert balancer is not None
        model.to(torch.bfloat16)  # replaces the buffers, in fp32
        gate = model.model.layers[0].mlp.gate
        before = gate.balancing_biases.clone()
        balancer.observe(random_counts(layers=4))
        balancer.step()
        assert not torch.equal(gate.balancing_biases, before)
