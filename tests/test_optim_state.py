"""HybridMuon in sharded checkpoints, on sharded parameters, and from the settings of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zaya_hf
from optimizer_runs import draw_gradients, parameters, run
from zaya_hf.testing import random_ids, redraw, tiny_config
from zaya_hf.training.config import OptimizerConfig
from zaya_hf.training.optim import HybridMuon, build_optimizer, optimizer_for


class Layers(nn.Module):
    """One parameter of every role."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(3, 16, 12))
        self.experts.down_proj = nn.Parameter(torch.randn(3, 12, 8))
        self.embedding = nn.Embedding(20, 8)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "by name"])
class TestDistributedCheckpointState:
    """torch.distributed.checkpoint asks for states by name, and steps an optimizer without state to get at one."""

    def test_asking_for_the_state_changes_nothing(self, flat: bool) -> None:
        model = Layers()
        optimizer = build_optimizer(model, weight_decay=0.5)
        before = [p.detach().clone() for p in model.parameters()]
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert all(p.grad is None for p in model.parameters())
        own = {key: float(value.sum()) for states in optimizer.state.values() for key, value in states.items()}
        assert set(own.values()) == {0.0}
        if flat:
            assert {"state.linear.weight.momentum_buffer", "state.embedding.weight.exp_avg_sq"} <= state.keys()

    def test_it_goes_on_with_the_same_numbers(self, flat: bool) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        torch.manual_seed(0)
        straight, first = Layers(), Layers()
        first.load_state_dict(straight.state_dict())
        optimizer = build_optimizer(straight)
        run(optimizer, list(straight.parameters()), range(5))
        begun = build_optimizer(first)
        run(begun, list(first.parameters()), range(3))
        state = get_optimizer_state_dict(first, begun, options=options)
        second = Layers()
        second.load_state_dict(first.state_dict())
        goes_on = build_optimizer(second)
        set_optimizer_state_dict(second, goes_on, state, options=options)
        steps = [states["step"].item() for states in goes_on.state.values() if "step" in states]
        assert set(steps) == {3.0}
        run(goes_on, list(second.parameters()), range(3, 5))
        assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


@pytest.fixture
def two_processes() -> Iterator[DeviceMesh]:
    """A mesh of two processes of which this is the first; nothing is sent, so a step that had to would be seen."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        dist.destroy_process_group()


class TestShardedParameters:
    def test_a_process_steps_the_experts_it_has(self, two_processes: DeviceMesh) -> None:
        """As FSDP2 has it: experts sharded by expert, vectors and embeddings by row, matrices replicated."""
        roles = ("matrix", "gate_up_experts", "experts", "adamw", "adamw_no_decay")
        shapes = ((8, 12), (4, 16, 12), (4, 12, 8), (20, 8), (8,))
        placements = (Replicate(), Shard(0), Shard(0), Shard(0), Shard(0))
        whole = parameters(*shapes)

        def part(tensor: Tensor, placement: Any) -> Tensor:
            return tensor.chunk(2)[0] if isinstance(placement, Shard) else tensor

        def spread(tensor: Tensor, placement: Any) -> DTensor:
            return DTensor.from_local(part(tensor, placement).clone(), two_processes, [placement], run_check=False)

        sharded = [nn.Parameter(spread(p.detach(), place)) for p, place in zip(whole, placements, strict=True)]
        optimizers = [
            HybridMuon([{"params": [t], "role": r} for t, r in zip(ts, roles, strict=True)], weight_decay=0.1)
            for ts in (whole, sharded)
        ]
        for step in range(3):
            draw_gradients(whole, step)
            for tensor, own, place in zip(whole, sharded, placements, strict=True):
                assert tensor.grad is not None
                own.grad = spread(tensor.grad, place)
            for optimizer in optimizers:
                optimizer.step()
        for tensor, own, place in zip(whole, sharded, placements, strict=True):
            assert isinstance(own.data, DTensor)
            torch.testing.assert_close(own.data.to_local(), part(tensor.detach(), place), atol=1e-6, rtol=0)
        momentum = optimizers[1].state[sharded[1]]["momentum_buffer"]
        assert isinstance(momentum, DTensor)
        assert momentum.shape == (4, 16, 12)
        assert momentum.to_local().shape == (2, 16, 12)

    def test_a_process_without_experts(self, two_processes: DeviceMesh) -> None:
        empty = DTensor.from_local(
            torch.zeros(0, 16, 12), two_processes, [Shard(0)], run_check=False, shape=(1, 16, 12), stride=(192, 12, 1)
        )
        parameter = nn.Parameter(empty)
        parameter.grad = empty.clone()
        HybridMuon([{"params": [parameter], "role": "gate_up_experts"}]).step()
        assert parameter.data.to_local().numel() == 0  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("shape", "role", "placement"),
        [
            ((8, 12), "matrix", Shard(0)),
            ((8, 12), "matrix", Shard(1)),
            ((2, 16, 12), "experts", Shard(1)),
            ((2, 16, 12), "gate_up_experts", Shard(2)),
            ((2, 16, 12), "experts", Partial()),
        ],
    )
    def test_matrices_in_pieces_are_refused(
        self, shape: tuple[int, ...], role: str, placement: Any, two_processes: DeviceMesh
    ) -> None:
        piece = DTensor.from_local(torch.zeros(shape), two_processes, [placement], run_check=False)
        with pytest.raises(ValueError, match="its matrices lie in several processes"):
            HybridMuon([{"params": [nn.Parameter(piece)], "role": role}])


class TestOfSettings:
    def test_every_setting_arrives(self) -> None:
        config = OptimizerConfig(
            lr=0.3,
            adamw_lr=0.2,
            weight_decay=0.05,
            betas=(0.8, 0.9),
            eps=1e-6,
            momentum=0.7,
            nesterov=False,
            adjust_lr="original",
            ns_steps=4,
            ns_dtype="bfloat16",
        )
        optimizer = optimizer_for(Layers(), config)
        by_role = {group["role"]: group for group in optimizer.param_groups}
        assert set(by_role) == {"matrix", "experts", "gate_up_experts", "adamw", "adamw_no_decay"}
        for role, group in by_role.items():
            assert group["lr"] == (0.2 if role.startswith("adamw") else 0.3)
            assert group["weight_decay"] == (0.0 if role == "adamw_no_decay" else 0.05)
            assert (group["momentum"], group["nesterov"], group["adjust_lr"]) == (0.7, False, "original")
            assert (group["ns_steps"], group["newton_schulz_dtype"]) == (4, torch.bfloat16)
            assert (group["betas"], group["adamw_eps"]) == ((0.8, 0.9), 1e-6)

    def test_without_a_rate_of_its_own_adamw_has_muons(self) -> None:
        optimizer = optimizer_for(Layers(), OptimizerConfig(lr=0.3))
        assert {group["lr"] for group in optimizer.param_groups} == {0.3}
        assert {group["adjust_lr"] for group in optimizer.param_groups} == {"match_rms_adamw"}

    def test_adamw_alone_is_torchs_with_the_same_tensors_decaying(self) -> None:
        torch.manual_seed(0)
        ours, theirs = Layers(), Layers()
        theirs.load_state_dict(ours.state_dict())
        config = OptimizerConfig(name="adamw", lr=0.03, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
        optimizer = optimizer_for(ours, config)
        assert [group["role"] for group in optimizer.param_groups] == ["adamw", "adamw_no_decay"]
        decaying = [p for p in theirs.parameters() if p.ndim > 1]
        vectors = [p for p in theirs.parameters() if p.ndim < 2]
        groups = [{"params": decaying, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
        run(optimizer, list(ours.parameters()))
        run(torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.9), eps=1e-6), list(theirs.parameters()))
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("name", ["hybrid_muon", "adamw"])
    def test_a_model_learns(self, name: Any) -> None:
        torch.manual_seed(0)
        model = zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=2)).train()
        optimizer = optimizer_for(model, OptimizerConfig(name=name, lr=3e-3))
        ids = random_ids(2, 24)
        losses = []
        for _ in range(8):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_factors_of_adapters_are_adamws(self) -> None:
        peft = pytest.importorskip("peft")
        base = redraw(zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=1)))
        targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
        optimizer = optimizer_for(peft.get_peft_model(base, peft.LoraConfig(r=4, **targets)), OptimizerConfig(lr=0.1))
        assert [group["role"] for group in optimizer.param_groups] == ["adamw"]
        assert len(optimizer.param_groups[0]["params"]) == 4
