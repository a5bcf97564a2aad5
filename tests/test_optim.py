"""HybridMuon against torch's own optimizers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from optimizer_runs import copies, draw_gradients, parameters, run
from zaya_hf.training import muon
from zaya_hf.training.newton_schulz import newton_schulz_dtype, orthogonalise
from zaya_hf.training.optim import HybridMuon


def fp32_iteration(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch's iteration as it is written there, without its cast to bf16."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


SHAPES = [(24, 24), (16, 40), (40, 16), (16, 40), (7, 3), (1, 5)]
MUON_OPTIONS = [
    {},
    {"adjust_lr": "match_rms_adamw"},
    {"nesterov": False, "momentum": 0.8},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def torch_muon(tensors: list[nn.Parameter], options: dict[str, Any]) -> torch.optim.Muon:
    renamed = {"adjust_lr_fn" if key == "adjust_lr" else key: value for key, value in options.items()}
    return torch.optim.Muon(tensors, lr=0.02, **{"weight_decay": 0.1, **renamed})


def hybrid(tensors: list[nn.Parameter], role: str = "matrix", **options: Any) -> HybridMuon:
    return HybridMuon([{"params": tensors, "role": role}], **{"weight_decay": 0.1, **options})


class TestMuon:
    @pytest.mark.parametrize("options", MUON_OPTIONS)
    def test_it_is_torchs_in_fp32(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", fp32_iteration)
        ours = parameters(*SHAPES)
        theirs = copies(ours)
        run(hybrid(ours, newton_schulz_dtype=torch.float32, **options), ours)
        run(torch_muon(theirs, options), theirs)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("options", MUON_OPTIONS)
    def test_it_is_torchs_in_bf16(self, options: dict[str, Any]) -> None:
        ours = parameters(*SHAPES)
        theirs, start = copies(ours), copies(ours)
        run(hybrid(ours, newton_schulz_dtype=torch.bfloat16, **options), ours)
        run(torch_muon(theirs, options), theirs)
        for a, b, c in zip(ours, theirs, start, strict=True):
            # Sums are rounded in another order; an unrelated update would be off by more than 1.
            assert (a - b).norm() < 0.03 * (a - c).norm()

    def test_bf16_parameters(self) -> None:
        ours = [nn.Parameter(p.detach().bfloat16()) for p in parameters(*SHAPES[:3])]
        theirs, start = copies(ours), copies(ours)
        run(hybrid(ours, newton_schulz_dtype=torch.bfloat16), ours)
        run(torch_muon(theirs, {}), theirs)
        for a, b, c in zip(ours, theirs, start, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a - b).float().norm() < 0.1 * (a - c).float().norm()

    @pytest.mark.parametrize("options", [{}, {"adjust_lr": "match_rms_adamw"}])
    def test_each_expert_and_each_half_is_a_matrix_of_its_own(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", fp32_iteration)
        gate_up, down = parameters((4, 2 * 12, 20), (4, 20, 12))
        halves = [nn.Parameter(half.detach().clone()) for expert in gate_up for half in expert.chunk(2)]
        singles = [nn.Parameter(expert.detach().clone()) for expert in down]
        groups = [{"params": [gate_up], "role": "gate_up_experts"}, {"params": [down], "role": "experts"}]
        ours = HybridMuon(groups, weight_decay=0.1, newton_schulz_dtype=torch.float32, **options)
        theirs = torch_muon(halves + singles, options)
        for step in range(4):
            draw_gradients([gate_up, down], step)
            assert gate_up.grad is not None
            assert down.grad is not None
            for single, gradient in zip(
                halves + singles,
                [*[half for expert in gate_up.grad for half in expert.chunk(2)], *down.grad],
                strict=True,
            ):
                single.grad = gradient.clone()
            ours.step()
            theirs.step()
        torch.testing.assert_close(gate_up.detach().flatten(0, 1), torch.cat(halves).detach(), atol=2e-5, rtol=0)
        torch.testing.assert_close(down.detach(), torch.stack(singles).detach(), atol=2e-5, rtol=0)

    @settings(max_examples=40, deadline=None)
    @given(
        data=st.data(),
        experts=st.integers(1, 4),
        adjust=st.sampled_from(["original", "match_rms_adamw"]),
        nesterov=st.booleans(),
        momentum=st.floats(0, 0.99),
        seed=st.integers(0, 2**16),
    )
    def test_any_stack_of_any_shapes_is_a_loop_of_torchs(
        self, data: st.DataObject, experts: int, adjust: str, nesterov: bool, momentum: float, seed: int
    ) -> None:
        """2-D and 3-D, wide and tall, of equal and transposed shapes, all in one optimizer."""
        rows, columns = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))
        stacked = parameters(
            (rows, columns),
            (columns, rows),
            (experts, rows, columns),
            (experts, 2 * rows, columns),
            (experts, 2 * columns, rows),
            seed=seed,
        )
        roles = ("matrix", "matrix", "experts", "gate_up_experts", "gate_up_experts")

        def apart(tensors: list[Tensor]) -> list[Tensor]:
            first, second, plain, *fused = tensors
            halves = [half for stack in fused for expert in stack for half in expert.chunk(2)]
            return [first, second, *plain, *halves]

        singles = [nn.Parameter(t.clone()) for t in apart([p.detach() for p in stacked])]
        options = {"adjust_lr": adjust, "nesterov": nesterov, "momentum": momentum}
        groups = [{"params": [t], "role": r} for t, r in zip(stacked, roles, strict=True)]
        ours = HybridMuon(groups, weight_decay=0.1, newton_schulz_dtype=torch.float32, **options)
        theirs = torch_muon(singles, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", fp32_iteration)
            for step in range(2):
                draw_gradients(stacked, step)
                for single, gradient in zip(
                    singles, apart([t.grad for t in stacked if t.grad is not None]), strict=True
                ):
                    single.grad = gradient.clone()
                ours.step()
                theirs.step()
        # The iteration multiplies rounding errors by up to 3.4^5 where a matrix is nearly singular.
        torch.testing.assert_close(
            apart([p.detach() for p in stacked]), [p.detach() for p in singles], atol=2e-4, rtol=0
        )

    @pytest.mark.parametrize("shape", [(64, 64), (32, 128), (4, 48, 96)])
    def test_bf16_is_fp32_up_to_its_rounding(self, shape: tuple[int, ...]) -> None:
        role = "matrix" if len(shape) == 2 else "experts"
        wide, narrow, start = (parameters(shape) for _ in range(3))
        for tensors, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
            run(hybrid(tensors, role, newton_schulz_dtype=dtype, weight_decay=0.0), tensors, range(1))
        moved = (wide[0] - start[0]).norm()
        assert 0 < (wide[0] - narrow[0]).norm() < 0.05 * moved

    def test_gate_and_up_together_would_be_another_update(self) -> None:
        apart, together = parameters((2, 24, 20)), parameters((2, 24, 20))
        run(hybrid(apart, "gate_up_experts"), apart)
        run(hybrid(together, "experts"), together)
        assert (apart[0] - together[0]).abs().max() > 1e-3

    def test_equal_shapes_share_one_iteration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def spy(matrices: Tensor, *rest: Any) -> Tensor:
            seen.append(tuple(matrices.shape))
            return orthogonalise(matrices, *rest)

        monkeypatch.setattr(muon, "orthogonalise", spy)
        wide, tall, experts, gate_up, square = parameters((8, 12), (12, 8), (3, 12, 8), (3, 16, 12), (8, 8))
        groups = [
            {"params": [wide, tall, square], "role": "matrix"},
            {"params": [experts], "role": "experts", "lr": 0.1},
            {"params": [gate_up], "role": "gate_up_experts"},
        ]
        run(HybridMuon(groups), [wide, tall, square, experts, gate_up], range(1))
        assert sorted(seen) == [(1, 8, 8), (1 + 1 + 3 + 6, 8, 12)]

    def test_a_batch_has_a_limit_that_changes_no_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = parameters((8, 12), (12, 8), (8, 12), (8, 12))
        divided = copies(whole)
        run(hybrid(whole, newton_schulz_dtype=torch.float32), whole)
        sizes = []

        def spy(matrices: Tensor, *rest: Any) -> Tensor:
            sizes.append(len(matrices))
            return orthogonalise(matrices, *rest)

        monkeypatch.setattr(muon, "orthogonalise", spy)
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", 3 * 8 * 12)
        run(hybrid(divided, newton_schulz_dtype=torch.float32), divided, range(5))
        assert sizes == [3, 1] * 5
        torch.testing.assert_close(whole, divided, atol=1e-6, rtol=0)

    def test_different_settings_do_not_share_one(self) -> None:
        few, many = parameters((8, 12), (8, 12))
        alone = copies([few, many])
        groups = [
            {"params": [few], "role": "matrix", "ns_steps": 2, "lr": 0.5},
            {"params": [many], "role": "matrix", "weight_decay": 0.0},
        ]
        run(HybridMuon(groups, newton_schulz_dtype=torch.float32), [few, many])
        options: list[dict[str, Any]] = [
            {"ns_steps": 2, "muon_lr": 0.5, "weight_decay": 0.01},
            {"weight_decay": 0.0},
        ]
        both = [hybrid([p], newton_schulz_dtype=torch.float32, **o) for p, o in zip(alone, options, strict=True)]
        for step in range(5):
            draw_gradients(alone, step)
            for optimizer in both:
                optimizer.step()
        torch.testing.assert_close([few, many], alone, atol=1e-6, rtol=0)

    def test_an_expert_without_tokens_goes_on_by_its_momentum(self) -> None:
        (experts,) = parameters((2, 6, 8))
        optimizer = hybrid([experts], "experts", weight_decay=0.0)
        start = experts.detach().clone()
        experts.grad = torch.randn_like(experts)
        experts.grad[1] = 0
        optimizer.step()
        assert torch.equal(experts[1], start[1])  # it never had a gradient: zeros stay zeros
        moved = experts.detach().clone()
        momentum = optimizer.state[experts]["momentum_buffer"].clone()
        experts.grad = torch.zeros_like(experts)
        optimizer.step()
        torch.testing.assert_close(optimizer.state[experts]["momentum_buffer"], 0.95 * momentum)
        assert (experts[0] - moved[0]).abs().max() > 1e-3
        assert torch.isfinite(experts).all()

    @pytest.mark.parametrize("shape", [(1, 16, 16), (3, 8, 32)])
    def test_singular_values_come_close_to_one(self, shape: tuple[int, ...]) -> None:
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape) * 1e3))
        assert values.min() > 0.3
        assert values.max() < 1.3
        assert torch.equal(orthogonalise(torch.zeros(shape)), torch.zeros(shape))

    def test_non_contiguous_parameters(self) -> None:
        straight = parameters((12, 8), (3, 12, 8))
        turned = [nn.Parameter(p.detach().mT.contiguous().mT) for p in straight]
        assert not turned[0].is_contiguous()
        for tensors in (straight, turned):
            groups = [
                {"params": tensors[:1], "role": "matrix"},
                {"params": tensors[1:], "role": "gate_up_experts"},
            ]
            run(HybridMuon(groups, newton_schulz_dtype=torch.float32), tensors)
        torch.testing.assert_close(straight, turned, atol=1e-6, rtol=0)


class TestAdamW:
    @pytest.mark.parametrize(("role", "decay"), [("adamw", 0.1), ("adamw_no_decay", 0.0)])
    def test_it_is_torchs(self, role: str, decay: float) -> None:
        ours = parameters((8, 12), (5,), (), (4, 3, 2))
        theirs = copies(ours)
        run(hybrid(ours, role, adamw_lr=0.03, betas=(0.8, 0.9), adamw_eps=1e-6), ours)
        run(torch.optim.AdamW(theirs, lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay), theirs)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)

    def test_bf16_parameters(self) -> None:
        ours = [nn.Parameter(p.detach().bfloat16()) for p in parameters((8, 12), (5,))]
        theirs = copies(ours)
        for tensors, optimizer in (
            (ours, hybrid(ours, "adamw", adamw_lr=0.03)),
            (theirs, torch.optim.AdamW(theirs, lr=0.03, betas=(0.9, 0.95), weight_decay=0.1, fused=True)),
        ):
            run(optimizer, tensors)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def mixed(seed: int = 0) -> tuple[list[nn.Parameter], Callable[..., HybridMuon]]:
    tensors = parameters((8, 12), (3, 16, 12), (3, 12, 8), (20, 8), (8,), seed=seed)
    roles = ("matrix", "gate_up_experts", "experts", "adamw", "adamw_no_decay")

    def build(**options: Any) -> HybridMuon:
        return HybridMuon([{"params": [t], "role": r} for t, r in zip(tensors, roles, strict=True)], **options)

    return tensors, build


class TestAsAnOptimizer:
    def test_a_step_at_lr_zero_changes_no_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(muon, "orthogonalise")  # nor does it iterate for nothing
        tensors, build = mixed()
        before = copies(tensors)
        run(build(muon_lr=0.0, adamw_lr=0.0), tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))

    def test_groups_have_learning_rates_of_their_own(self) -> None:
        _, build = mixed()
        assert [g["lr"] for g in build(muon_lr=0.1, adamw_lr=0.2).param_groups] == [0.1, 0.1, 0.1, 0.2, 0.2]
        assert [g["weight_decay"] for g in build(weight_decay=0.3).param_groups] == [0.3, 0.3, 0.3, 0.3, 0.0]

    def test_lambda_lr_scales_each(self) -> None:
        _, build = mixed()
        optimizer = build(muon_lr=0.1, adamw_lr=0.2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer.step()
        schedule.step()
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.05, 0.05, 0.1, 0.1]

    def test_state_is_there_from_the_start(self) -> None:
        tensors, build = mixed()
        optimizer = build()
        keys = {i: sorted(state) for i, state in optimizer.state_dict()["state"].items()}
        adamw = ["exp_avg", "exp_avg_sq", "step"]
        assert list(keys.values()) == [["momentum_buffer"]] * 3 + [adamw] * 2
        run(optimizer, tensors)
        assert keys == {i: sorted(state) for i, state in optimizer.state_dict()["state"].items()}

    def test_a_saved_state_continues_with_the_same_numbers(self) -> None:
        straight, build = mixed()
        run(build(), straight, range(6))
        halfway, build = mixed()
        first = build()
        run(first, halfway, range(3))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        for tensor in halfway:
            tensor.grad = None
        second = build(muon_lr=7.0, betas=(0.1, 0.1))  # options come with the state, as in torch
        second.load_state_dict(torch.load(file, weights_only=True))
        run(second, halfway, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(straight, halfway, strict=True))

    def test_a_state_of_other_groups_is_refused(self) -> None:
        first, second = parameters((4, 4), (4, 4))
        state = hybrid([first]).state_dict()
        with pytest.raises(ValueError, match=r"groups of roles \['matrix'\]; this optimizer has \['adamw'\]"):
            hybrid([second], "adamw").load_state_dict(state)
        names = [HybridMuon([{"params": [(name, first)], "role": "matrix"}]) for name in ("a.weight", "b.weight")]
        with pytest.raises(ValueError, match=r"other parameters: \['a.weight', 'b.weight'\]"):
            names[0].load_state_dict(names[1].state_dict())

    def test_a_state_in_another_order_is_refused(self) -> None:
        first, second = parameters((4, 4), (4, 4))
        named = [("a.weight", first), ("b.weight", second)]
        one, other = (HybridMuon([{"params": params, "role": "matrix"}]) for params in (named, named[::-1]))
        with pytest.raises(ValueError, match=r"another order, from b\.weight on"):
            one.load_state_dict(other.state_dict())

    def test_parameters_without_gradient_are_left_alone(self) -> None:
        tensors, build = mixed()
        optimizer = build(weight_decay=0.5)
        before = copies(tensors)
        draw_gradients(tensors, 0)
        for index in (1, 3):
            tensors[index].grad = None
        optimizer.step()
        assert [torch.equal(a, b) for a, b in zip(tensors, before, strict=True)] == [False, True, False, True, False]
        assert optimizer.state[tensors[3]]["step"] == 0

    def test_without_any_gradient_nothing_happens(self) -> None:
        tensors, build = mixed()
        before = copies(tensors)
        build().step()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))

    def test_closure(self) -> None:
        tensors, build = mixed()
        optimizer = build()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([t.square().sum() for t in tensors]).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(10)]
        assert losses == sorted(losses, reverse=True)

    def test_sparse_gradients(self) -> None:
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = hybrid([embedding.weight], "adamw")
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse=False"):
            optimizer.step()


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"muon_lr": -1.0}, "lr is -1.0"),
            ({"muon_lr": float("nan")}, "lr is nan"),
            ({"weight_decay": -0.1}, "weight_decay is -0.1"),
            ({"momentum": 1.0}, "momentum is 1.0"),
            ({"betas": (0.9, 1.0)}, "betas is"),
            ({"betas": (0.9,)}, "betas is"),
            ({"ns_steps": 0}, "ns_steps is 0"),
            ({"muon_eps": 0.0}, "muon_eps is 0; expected more"),
            ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is"),
            ({"adjust_lr": "none"}, "adjust_lr is 'none'"),
            ({"newton_schulz_dtype": torch.float16}, "newton_schulz_dtype is torch.float16"),
            ({"adamw_eps": -1e-8}, "adamw_eps is -1e-08"),
        ],
    )
    def test_options(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=re.escape(text)):
            hybrid(parameters((4, 4)), **options)

    @pytest.mark.parametrize(
        ("role", "shape", "text"),
        [
            ("matrix", (4,), "takes 2 dimensions"),
            ("matrix", (2, 4, 4), "takes 2 dimensions"),
            ("experts", (4, 4), "takes 3 dimensions"),
            ("gate_up_experts", (2, 5, 4), "even number of rows"),
            ("muon", (4, 4), "role 'muon'"),
            (None, (4, 4), "role None"),
        ],
    )
    def test_roles_and_ranks(self, role: str, shape: tuple[int, ...], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            hybrid(parameters(shape), role)

    def test_the_parameter_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"layer\.bias has shape \(4,\)"):
            HybridMuon([{"params": [("layer.bias", parameters((4,))[0])], "role": "matrix"}])

    def test_complex_parameters(self) -> None:
        with pytest.raises(ValueError, match="real floating-point"):
            hybrid([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])

    def test_a_refused_group_leaves_no_trace(self) -> None:
        optimizer = hybrid(parameters((4, 4)))
        with pytest.raises(ValueError, match="takes 2 dimensions"):
            optimizer.add_param_group({"params": parameters((4,)), "role": "matrix"})
        assert len(optimizer.param_groups) == 1
        run(optimizer, optimizer.param_groups[0]["params"])


class TestDtype:
    @pytest.mark.parametrize(
        ("capabilities", "expected"),
        [
            ({"avx512_bf16": True}, torch.bfloat16),
            ({"amx_bf16": True}, torch.bfloat16),
            ({"avx512_bf16": False, "amx_bf16": False, "avx2": True}, torch.float32),
            ({}, torch.float32),
        ],
    )
    def test_cpus(self, capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        assert newton_schulz_dtype("cpu") is expected
        assert hybrid(parameters((4, 4))).param_groups[0]["newton_schulz_dtype"] is expected

    def test_a_torch_that_cannot_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        assert newton_schulz_dtype("cpu") is torch.float32

    def test_devices(self) -> None:
        assert newton_schulz_dtype(torch.device("cuda", 1)) is torch.bfloat16
        assert newton_schulz_dtype("mps") is torch.float32
