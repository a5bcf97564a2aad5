"""Balancing biases: by hand, on drifting routers, over processes and checkpoints, and inside models however wrapped."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zaya_hf
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config
from zaya_hf.training import lora_targets
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.config import BalancingConfig

KINDS = ("adamw", "sign", "pid")


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


def config(controller: str = "adamw", **gains: Any) -> BalancingConfig:
    return BalancingConfig(controller=controller, **gains)


def stepped(balancer: BiasBalancer, *counts: Tensor) -> None:
    for each in counts:
        balancer.observe(each)
    balancer.step()


# -------------------------------------------------------------------------------------------------- what a step does
def test_it_is_torchs_adamw_on_the_error_of_the_shares() -> None:
    """To the bit where no token skips; those that do are part of what is shared."""
    modules = routers()
    expected = nn.Parameter(biases(modules)[:, :-1])
    skip = biases(modules)[:, -1]
    reference = torch.optim.AdamW([expected], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)
    balancer = BiasBalancer(modules, config(lr=0.02, betas=(0.8, 0.95), eps=1e-6))
    for step in range(40):
        micro_batches = [random_counts(seed=10 * step + i) for i in range(3)]
        if step < 20:
            for counts in micro_batches:
                counts[:, -1] = 0
        stepped(balancer, *micro_batches)
        every = torch.stack(micro_batches).sum(0).float()
        expected.grad = every[:, :-1] / every.sum(-1, keepdim=True) - 1 / 4
        reference.step()
        assert torch.equal(biases(modules)[:, :-1], expected.detach()), step
    assert torch.equal(biases(modules)[:, -1], skip)


def test_an_overloaded_expert_is_made_less_likely() -> None:
    (module,) = routers(layers=1)
    before = module.balancing_biases.clone()
    balancer = BiasBalancer([module], config(lr=0.01))
    stepped(balancer, torch.tensor([[70, 10, 10, 10, 0]]))
    change = module.balancing_biases - before
    torch.testing.assert_close(change, torch.tensor([-0.01, 0.01, 0.01, 0.01, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(balancer.max_violation(), torch.tensor([70 * 4 / 100 - 1]))


@pytest.mark.parametrize(
    ("skip_target", "expected"),
    [
        (None, [0.25 - 0.6, 0.25 - 0.1, 0.25 - 0.1, 0.25, 0.0]),
        (0.0, [0.25 - 0.6, 0.25 - 0.1, 0.25 - 0.1, 0.25, -0.2]),
        (0.4, [0.15 - 0.6, 0.15 - 0.1, 0.15 - 0.1, 0.15, 0.4 - 0.2]),
    ],
    ids=str,
)
def test_shares_are_of_all_real_tokens(skip_target: float | None, expected: list[float]) -> None:
    (module,) = routers(layers=1)
    before = module.balancing_biases.clone()
    balancer = BiasBalancer([module], config("pid", ki=1.0, clamp=None, skip_target=skip_target))
    stepped(balancer, torch.tensor([[60, 10, 10, 0, 20]]))
    torch.testing.assert_close(module.balancing_biases - before, torch.tensor(expected), atol=1e-7, rtol=0)


def test_without_counts_nothing_changes() -> None:
    modules = routers()
    balancer = BiasBalancer(modules)
    assert balancer.max_violation() is None
    assert balancer.panel() is None
    stepped(balancer, random_counts())
    after, violation, state = biases(modules), balancer.max_violation(), balancer.state_dict()
    balancer.step()  # the counts were used up
    stepped(balancer, torch.zeros_like(random_counts()))  # padding only
    assert torch.equal(biases(modules), after)
    assert torch.equal(balancer.max_violation(), violation)
    assert torch.equal(balancer.state_dict()["state"]["steps"], state["state"]["steps"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_is_as_if_it_had_not_been(kind: str) -> None:
    modules, others = routers(), routers()
    balancer, other = BiasBalancer(modules, config(kind)), BiasBalancer(others, config(kind))
    for step in range(4):
        counts = random_counts(seed=step)
        stepped(other, counts)
        balancer.observe(random_counts(seed=100 + step))
        balancer.discard()
        balancer.step()
        stepped(balancer, counts)
    assert torch.equal(biases(modules), biases(others))


def test_the_callers_counts_stay() -> None:
    balancer = BiasBalancer(routers())
    counts = random_counts()
    kept = counts.clone()
    stepped(balancer, counts, counts)
    assert torch.equal(counts, kept)


def test_a_layer_without_a_token_stays() -> None:
    modules = routers()
    balancer = BiasBalancer(modules)
    stepped(balancer, random_counts())
    before = biases(modules)
    counts = random_counts(seed=1)
    counts[0] = 0
    stepped(balancer, counts)
    assert torch.equal(biases(modules)[0], before[0])
    assert not torch.equal(biases(modules)[1], before[1])
    assert balancer.max_violation().tolist()[0] == -1


def test_a_layer_that_skips_everything_is_drawn_back() -> None:
    modules = routers()
    before = biases(modules)
    counts = random_counts()
    counts[0, :-1] = 0
    stepped(BiasBalancer(modules), counts)
    assert (biases(modules)[0, :-1] > before[0, :-1]).all()
    assert biases(modules)[0, -1] == before[0, -1]


def test_frozen_only_counts() -> None:
    modules = routers()
    before = biases(modules)
    balancer = BiasBalancer(modules, config("frozen"))
    balancer.observe(None)  # a model whose output has no counts
    stepped(balancer, random_counts())
    assert torch.equal(biases(modules), before)
    assert balancer.max_violation() is not None


def test_a_bias_that_was_set_from_outside_is_kept() -> None:
    """A checkpoint that is loaded writes into the buffers, or puts others in their place."""
    modules = routers()
    balancer = BiasBalancer(modules, config(lr=0.01))
    stepped(balancer, random_counts())
    modules[0].balancing_biases = torch.full((5,), 3.0)
    stepped(balancer, random_counts())
    assert (modules[0].balancing_biases[:-1] - 3).abs().max() < 0.02
    assert (modules[0].balancing_biases[:-1] - 3).abs().min() > 1e-4


# ---------------------------------------------------------------------------------------------------------- the panel
def test_the_panel_by_hand() -> None:
    modules = [Router(torch.tensor([0.1, -0.2, 0.3, 0.0, -1.0])), Router(torch.tensor([0.0, 0.0, 0.0, 0.5, -1.0]))]
    balancer = BiasBalancer(modules, config("frozen"))
    stepped(balancer, torch.tensor([[5, 5, 5, 5, 20], [30, 10, 0, 0, 0]]))
    panel = balancer.panel()
    assert panel is not None
    expected = {
        "load_entropy": [1.0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)],
        "max_violation": [0.0, 2.0],
        "skip_rate": [0.5, 0.0],
        "dead_experts": [0, 2],
        "bias_min": [-0.2, 0.0],
        "bias_max": [0.3, 0.5],
    }
    assert panel == {name: pytest.approx(values, abs=1e-6) for name, values in expected.items()}
    assert json.loads(json.dumps(panel)) == panel


def test_the_panel_where_no_expert_got_a_token() -> None:
    balancer = BiasBalancer(routers(), config("frozen"))
    stepped(balancer, torch.tensor([[0, 0, 0, 0, 7], [1, 1, 1, 1, 0]]))
    panel = balancer.panel()
    assert panel is not None
    got = {name: values[0] for name, values in panel.items()}
    assert (got["load_entropy"], got["max_violation"], got["skip_rate"], got["dead_experts"]) == (0, -1, 1, 4)


def test_the_entropy_of_one_busy_expert_is_no_negative_zero() -> None:
    balancer = BiasBalancer(routers(layers=1), config("frozen"))
    stepped(balancer, torch.tensor([[9, 0, 0, 0, 0]]))
    panel = balancer.panel()
    assert panel is not None
    assert str(panel["load_entropy"]) == "[0.0]"


def test_a_single_expert_is_balanced() -> None:
    modules = routers(layers=1, experts=1)
    balancer = BiasBalancer(modules)
    stepped(balancer, torch.tensor([[9, 0]]))
    panel = balancer.panel()
    assert panel is not None
    assert (panel["load_entropy"], panel["max_violation"]) == ([1.0], [0.0])


# -------------------------------------------------------------------------------------------------- drifting routers
def drift(step: int, tokens: int, drifting: Tensor, changed: Tensor, noise: torch.Generator) -> Tensor:
    """Probabilities ``[tokens, E]`` of a router with favourites that move, and are others from step 150 on."""
    favourites = (changed if step >= 150 else drifting) * (1 + 0.1 * torch.sin(torch.tensor(step / 100)))
    return torch.softmax(favourites + torch.randn(tokens, len(favourites), generator=noise), dim=-1)


@pytest.mark.parametrize(("kind", "most"), [("frozen", 9), ("adamw", 0.1), ("pid", 0.1), ("sign", 0.2)])
def test_drifting_routers_are_balanced_to_the_noise_floor(kind: str, most: float) -> None:
    experts, tokens = 8, 4096
    noise = torch.Generator().manual_seed(3)
    drifting, changed = torch.randn(2, experts, generator=noise)
    module = Router(torch.cat([torch.zeros(experts), -torch.ones(1)]))
    balancer = BiasBalancer([module], config(kind))
    violations = []
    for step in range(300):
        chosen = (drift(step, tokens, drifting, changed, noise) + module.balancing_biases[:-1]).argmax(-1)
        stepped(balancer, torch.bincount(chosen, minlength=experts + 1)[None])
        violations.append(balancer.max_violation().item())
    # The largest of 8 fair counts of 4096 tokens is about 1.4 standard deviations, 0.06 of a share, above the mean.
    settled = [sum(violations[end - 30 : end]) / 30 for end in (150, 300)]
    assert max(settled) < most
    if kind == "frozen":
        assert min(settled) > 0.5
    assert module.balancing_biases[-1] == -1


@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_target_is_reached(kind: str) -> None:
    experts, tokens, target = 4, 4096, 0.25
    noise = torch.Generator().manual_seed(3)
    favourites = torch.randn(experts + 1, generator=noise)
    module = Router(torch.zeros(experts + 1))
    balancer = BiasBalancer([module], config(kind, skip_target=target))
    rates, violations = [], []
    for _ in range(200):
        probabilities = torch.softmax(favourites + torch.randn(tokens, experts + 1, generator=noise), dim=-1)
        chosen = (probabilities + module.balancing_biases).argmax(-1)
        stepped(balancer, torch.bincount(chosen, minlength=experts + 1)[None])
        rates.append(balancer.panel()["skip_rate"][0])
        violations.append(balancer.max_violation().item())
    assert sum(rates[-30:]) / 30 == pytest.approx(target, abs=0.02)
    assert sum(violations[-30:]) / 30 < 0.15


# ---------------------------------------------------------------------------------------------------- many processes
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_have_the_same_biases_as_one_with_all_counts(kind: str, in_place: bool) -> None:
    ranks, joined = [routers() for _ in range(2)], routers()
    balancers, alone = [BiasBalancer(modules, config(kind)) for modules in ranks], BiasBalancer(joined, config(kind))
    for step in range(5):
        counts = [random_counts(seed=10 * step + rank) for rank in range(2)]
        calls, total = [], counts[0] + counts[1]

        def reduce(own: Tensor, every: Tensor = total, calls: list[Tensor] = calls) -> Tensor | None:
            assert own.dtype == torch.int64
            calls.append(own)
            if not in_place:
                return every
            own.copy_(every)
            return None

        for balancer, own in zip(balancers, counts, strict=True):
            balancer.observe(own)
            balancer.step(reduce)
        assert len(calls) == 2
        stepped(alone, *counts)
    assert torch.equal(biases(ranks[0]), biases(ranks[1]))
    assert torch.equal(biases(ranks[0]), biases(joined))


def test_a_process_without_a_micro_batch_takes_part() -> None:
    modules, joined = routers(), routers()
    balancer = BiasBalancer(modules)
    balancer.step(lambda own: own + random_counts())
    stepped(BiasBalancer(joined), random_counts())
    assert torch.equal(biases(modules), biases(joined))


# ------------------------------------------------------------------------------------------------------- saved states
@pytest.mark.parametrize("as_json", [False, True], ids=["tensors", "json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_with_the_same_numbers(kind: str, as_json: bool) -> None:
    """Also with the biases of a model that was not saved, as with an adapter."""
    straight, halfway, fresh = routers(), routers(), routers()
    balancer = BiasBalancer(straight, config(kind))
    for step in range(6):
        stepped(balancer, random_counts(seed=step))
    first = BiasBalancer(halfway, config(kind))
    for step in range(3):
        stepped(first, random_counts(seed=step))
    first.observe(random_counts(seed=3))
    state: Any = first.state_dict()
    if as_json:
        lists = {name: value.tolist() for name, value in state.items() if isinstance(value, Tensor)}
        state = json.loads(json.dumps(state | lists, default=Tensor.tolist))
    second = BiasBalancer(fresh, config(kind))
    second.load_state_dict(state)
    assert second.panel() == first.panel()
    second.step()
    for step in range(4, 6):
        stepped(second, random_counts(seed=step))
    assert torch.equal(biases(straight), biases(fresh))


def test_another_controller_goes_on_from_the_biases() -> None:
    modules, others = routers(), routers()
    balancer = BiasBalancer(modules)
    stepped(balancer, random_counts())
    after = BiasBalancer(others, config("pid", ki=1.0))
    after.load_state_dict(balancer.state_dict())
    assert torch.equal(biases(others), biases(modules))
    stepped(after, random_counts(seed=1))
    counts = random_counts(seed=1)
    error = 0.25 - counts[:, :-1] / counts.sum(-1, keepdim=True)
    torch.testing.assert_close((biases(others) - biases(modules))[:, :-1], error, atol=1e-6, rtol=0)


class TestErrors:
    def test_no_routers(self) -> None:
        with pytest.raises(ValueError, match="at least one router"):
            BiasBalancer([])

    def test_different_numbers_of_experts(self) -> None:
        with pytest.raises(ValueError, match=r"routers have \[4, 5\] slots"):
            BiasBalancer([Router(torch.zeros(5)), Router(torch.zeros(4))])

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, device="meta")], ids=["bf16", "meta"]
    )
    def test_biases_that_cannot_be_moved(self, wrong: Tensor) -> None:
        modules = routers()
        balancer = BiasBalancer(modules)
        modules[1].balancing_biases = wrong
        balancer.observe(random_counts())
        with pytest.raises(ValueError, match=rf"biases are {wrong.dtype} on {wrong.device}; expected torch\.float32"):
            balancer.step()

    @pytest.mark.parametrize(
        "counts", [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64), torch.zeros(2, 5)]
    )
    def test_counts_of_another_model(self, counts: Tensor) -> None:
        with pytest.raises(ValueError, match=r"expected torch\.int64 \[2, 5\]"):
            BiasBalancer(routers()).observe(counts)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"biases": torch.zeros(3, 5)}, r"biases of the balancing state has shape \[3, 5\]; expected \[2, 5\]"),
            ({"last": "lost"}, "last of the balancing state is no tensor of numbers"),
            ({"state": {}}, "the state of the controller 'adamw' has"),
        ],
    )
    def test_states_that_do_not_fit(self, change: dict[str, Any], message: str) -> None:
        modules = routers()
        balancer = BiasBalancer(modules)
        state, before = balancer.state_dict() | {"biases": torch.ones(2, 5)} | change, biases(modules)
        with pytest.raises(ValueError, match=message):
            balancer.load_state_dict(state)
        assert torch.equal(biases(modules), before)

    def test_a_state_that_is_incomplete(self) -> None:
        balancer = BiasBalancer(routers())
        state = balancer.state_dict()
        del state["biases"], state["last"]
        with pytest.raises(ValueError, match="the balancing state has no biases, last"):
            balancer.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------- in a model
IDS = random_ids(2, 24)
MASK = torch.ones_like(IDS)
MASK[0, :10] = 0
MASK[1, 20:] = 0
PACKED = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1)
SLOTS = torch.randint(0, 5, (2, 24, 4), generator=torch.Generator().manual_seed(1))
CALLS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "padded": {"attention_mask": MASK},
    "packed": {"position_ids": PACKED},
    "replayed": {"routed_experts": SLOTS, "attention_mask": MASK},
}


def a_model(**changes: Any) -> zaya_hf.ZayaForCausalLM:
    model = redraw(zaya_hf.ZayaForCausalLM(tiny_config(**changes)))
    assert isinstance(model, zaya_hf.ZayaForCausalLM)
    return model


def model_biases(model: zaya_hf.ZayaForCausalLM) -> Tensor:
    return torch.stack([layer.mlp.gate.balancing_biases for layer in model.model.layers]).clone()


class TestInAModel:
    def test_models_without_biases_have_no_balancer(self) -> None:
        llama = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
        assert BiasBalancer.for_model(transformers.LlamaForCausalLM(llama)) is None

    def test_stock_models_do_not_count(self) -> None:
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**TINY))
        balancer = BiasBalancer.for_model(model)
        assert balancer is not None
        output = model(random_ids(2, 8), output_router_logits=True)
        with pytest.raises(ValueError, match="its output has no tokens_per_slot: use zaya_hf's classes"):
            balancer.observe(getattr(output, "tokens_per_slot", None))

    def test_every_layer_follows_its_own_counts(self) -> None:
        model = a_model()
        balancer = BiasBalancer.for_model(model, config(lr=0.01))
        assert balancer is not None
        before = model_biases(model)
        counts = model(random_ids(2, 40), output_router_logits=True).tokens_per_slot
        stepped(balancer, counts)
        error = counts[:, :-1] / counts.sum(-1, keepdim=True) - 1 / 4
        change = model_biases(model) - before
        assert model.model.layers[0].mlp.gate.balancing_biases.dtype == torch.float32
        torch.testing.assert_close(change[:, :-1], -0.01 * error.sign(), atol=1e-6, rtol=0)
        assert not change[:, -1].any()

    def test_evaluation_changes_nothing(self) -> None:
        """Only what is observed counts, whatever the model runs through in between."""
        model = a_model()
        balancer = BiasBalancer.for_model(model)
        assert balancer is not None
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model(random_ids(2, 20), output_router_logits=True)
        balancer.step()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_biases_follow_a_model_that_is_moved(self) -> None:
        model = a_model()
        balancer = BiasBalancer.for_model(model)
        assert balancer is not None
        model.to(torch.bfloat16)  # replaces the buffers, in fp32
        before = model_biases(model)
        stepped(balancer, random_counts(layers=4))
        assert not torch.equal(model_biases(model), before)


class TestCounts:
    """Real tokens, each once, whatever is run twice for its gradient."""

    @pytest.mark.parametrize("mode", ["kept", "reentrant", "non-reentrant"])
    @pytest.mark.parametrize("call", CALLS)
    def test_every_real_token_counts_once(self, call: str, mode: str) -> None:
        given, model = CALLS[call], a_model().train()
        real = given.get("attention_mask", torch.ones_like(IDS)).bool()
        if call == "replayed":
            slots = SLOTS.unbind(-1)
        else:
            slots = a_model()(IDS, output_router_logits=True, **given).router_slots
        expected = torch.stack([torch.bincount(layer[real], minlength=5) for layer in slots])
        runs = [0]
        model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
        if mode != "kept":
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": mode[0] == "r"})
        balancer = BiasBalancer.for_model(model, config("frozen"))
        assert balancer is not None
        for _ in range(2):  # micro-batches
            output = model(IDS, labels=IDS, output_router_logits=True, **given)
            balancer.observe(output.tokens_per_slot)
            output.loss.backward()
        assert runs == [2 if mode == "kept" else 4]  # layers did run twice
        balancer.step()
        assert torch.equal(balancer.state_dict()["last"], 2 * expected)
        assert expected.sum(-1).tolist() == [int(real.sum())] * 4

    def test_what_is_in_the_padding_does_not_matter(self) -> None:
        changed = torch.where(MASK.bool(), IDS, random_ids(2, 24, seed=9))
        outputs = [a_model()(ids, attention_mask=MASK, output_router_logits=True) for ids in (IDS, changed)]
        assert torch.equal(outputs[0].tokens_per_slot, outputs[1].tokens_per_slot)

    def test_compiled_and_checkpointed(self) -> None:
        model = a_model(num_hidden_layers=1).train()
        expected = model(IDS, attention_mask=MASK, output_router_logits=True).tokens_per_slot
        model.activation_checkpointing_enable()
        torch._dynamo.reset()
        output = torch.compile(model, backend="aot_eager")(
            IDS, attention_mask=MASK, labels=IDS, output_router_logits=True
        )
        output.loss.backward()
        assert torch.equal(output.tokens_per_slot, expected)


class TestWrapped:
    def test_by_lora(self) -> None:
        model = a_model()
        wrapped = get_peft_model(copy.deepcopy(model), LoraConfig(**lora_targets(model), r=2, task_type="CAUSAL_LM"))
        balancer, plain = (BiasBalancer.for_model(m, config()) for m in (wrapped, model))
        assert balancer is not None
        assert plain is not None
        counts = wrapped(input_ids=IDS, output_router_logits=True).tokens_per_slot
        stepped(balancer, counts)
        stepped(plain, counts)
        assert torch.equal(model_biases(wrapped.get_base_model()), model_biases(model))

    def test_routers_that_an_adapter_saves_whole(self, tmp_path: Path) -> None:
        """The copy that computes is moved, and its biases are in the adapter's folder."""
        lora = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM")
        wrapped = get_peft_model(a_model(), lora)
        balancer = BiasBalancer.for_model(wrapped, config("pid", ki=1.0))
        assert balancer is not None
        assert balancer.shape == (4, 5)
        before = wrapped(input_ids=IDS, output_router_logits=True).tokens_per_slot
        for _ in range(3):
            stepped(balancer, wrapped(input_ids=IDS, output_router_logits=True).tokens_per_slot)
        after = wrapped(input_ids=IDS, output_router_logits=True).tokens_per_slot
        assert not torch.equal(after, before)
        wrapped.save_pretrained(tmp_path)
        loaded = type(wrapped).from_pretrained(a_model(), tmp_path)
        assert torch.equal(loaded(input_ids=IDS, output_router_logits=True).tokens_per_slot, after)

    @pytest.fixture
    def _one_process(self) -> Iterator[None]:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.usefixtures("_one_process")
    def test_by_ddp(self) -> None:
        model = a_model()
        before = model_biases(model)
        wrapped = DistributedDataParallel(model.train(), broadcast_buffers=False)
        balancer = BiasBalancer.for_model(wrapped)
        assert balancer is not None
        balancer.observe(wrapped(IDS, labels=IDS, output_router_logits=True).tokens_per_slot)
        balancer.step(torch.distributed.all_reduce)
        assert not torch.equal(model_biases(model), before)
