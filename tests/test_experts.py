"""The experts, in each of the three implementations: values, gradients, and that nothing is computed for nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations import moe

import naive_zaya
from zaya_hf import ZayaForCausalLM, experts_dispatch, ops
from zaya_hf.modeling_zaya import ZayaSparseMoeBlock
from zaya_hf.ops import selection
from zaya_hf.ops.experts import op, reference
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config

IMPLEMENTATIONS = ("zaya", "eager", "batched_mm", "grouped_mm")
EXPERTS, SKIP, WIDTH, INNER = 4, 4, 64, 32

# slots of 12 tokens
ROUTINGS = {
    "spread": [0, 3, 1, 2, 2, 0, 3, 1, 0, 2, 3, 1],
    "with-skips": [4, 3, 1, 4, 4, 0, 3, 1, 0, 2, 4, 1],
    "empty-experts": [3, 3, 1, 1, 3, 3, 1, 3, 1, 1, 1, 3],
    "one-hot-expert": [2] * 12,
    "first-only-and-skips": [4, 0, 4, 0, 4, 4, 4, 4, 0, 0, 0, 4],
    "last-only-and-skips": [4, 3, 4, 3, 4, 4, 4, 4, 3, 3, 3, 4],
    "one-token": [1],
    "one-skipped-token": [4],
    "all-skipped": [4] * 12,
    "no-tokens": [],
}


class Chosen(nn.Module):
    """Stands in for the router: the slots and weights of a test."""

    def __init__(self, slots: Tensor, weights: Tensor):
        super().__init__()
        self.slots, self.weights = slots, weights

    def forward(
        self, x: Tensor, state: Tensor | None, replayed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x.new_zeros(x.shape[0] * x.shape[1], EXPERTS + 1), self.slots, self.weights, x[..., :1]


class Case:
    """A mixture block with a given routing, and its inputs as leaves."""

    def __init__(self, implementation: str, routing: str, skip: str = "zero", dtype: torch.dtype = torch.float64):
        config = tiny_config(experts_implementation=implementation, skip_expert=skip, num_hidden_layers=1)
        model = redraw(ZayaForCausalLM(config).to(dtype), seed=3)
        self.block: ZayaSparseMoeBlock = model.model.layers[0].mlp
        assert self.block.config._experts_implementation == implementation
        slots = torch.tensor(ROUTINGS[routing], dtype=torch.int64)
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(1, len(slots), WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.weights = (0.2 + torch.rand(len(slots), generator=generator, dtype=torch.float64)).to(dtype)
        self.weights.requires_grad_()
        self.slots, self.skip = slots, skip
        self.block.gate = Chosen(slots, self.weights)
        self.leaves = {
            "x": self.x,
            "weights": self.weights,
            "gate_up_proj": self.block.experts.gate_up_proj,
            "down_proj": self.block.experts.down_proj,
        }

    def run(self) -> Tensor:
        return self.block(self.x, None)[0]

    def naive(self) -> Tensor:
        rows = []
        for token, slot in enumerate(self.slots.tolist()):
            vector = self.x[0, token]
            if slot == SKIP:
                rows.append(vector * self.weights[token] if self.skip == "identity" else torch.zeros_like(vector))
            else:
                out = naive_zaya.swiglu(vector, self.leaves["gate_up_proj"][slot], self.leaves["down_proj"][slot])
                rows.append(out * self.weights[token])
        return (torch.stack(rows)[None] if rows else torch.zeros_like(self.x)) + 0 * self.x

    def gradients(self, output: Tensor) -> dict[str, Tensor | None]:
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = torch.autograd.grad(
            (output * direction.to(output.dtype)).sum(), list(self.leaves.values()), allow_unused=True
        )
        return dict(zip(self.leaves, found, strict=True))


def assert_close(got: Tensor, want: Tensor, name: str, roundings: int = 64) -> None:
    """Equal up to some roundings of the largest number: sums over 64 and 32 products cancel."""
    largest = float(want.detach().abs().max()) if want.numel() else 0.0
    bound = roundings * torch.finfo(got.dtype).eps * max(largest, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=bound, msg=lambda m: f"{name}: {m}")


def poison() -> None:
    """Leave NaN in memory that is about to be handed out again, so that an unset result shows."""
    for size in (WIDTH, INNER, 2 * INNER * WIDTH, EXPERTS * 2 * INNER * WIDTH, EXPERTS * INNER * WIDTH, 12 * WIDTH):
        blocks = [torch.full((size,), torch.nan, dtype=torch.float64) for _ in range(4)]
        del blocks


# ------------------------------------------------------------------------------------------------ values and gradients
@pytest.mark.parametrize("skip", ["zero", "identity"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_equals_the_definition_with_all_gradients(
    dtype: torch.dtype, implementation: str, routing: str, skip: str
) -> None:
    """In float64 torch has no grouped product; the reference runs then."""
    case = Case(implementation, routing, skip, dtype)
    poison()
    output = case.run()
    poison()
    got = case.gradients(output)
    expected = case.naive()
    assert_close(output, expected, "output")
    want = case.gradients(expected)
    for name, gradient in got.items():
        assert gradient is not None, name
        right = torch.zeros_like(gradient) if want[name] is None else want[name]
        assert_close(gradient, right, name)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_without_tokens_get_gradients_of_exactly_0(
    implementation: str, routing: str, dtype: torch.dtype
) -> None:
    """Never None, which would stall a distributed reduction, and never what was left in memory."""
    case = Case(implementation, routing, dtype=dtype)
    poison()
    output = case.run()
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert not output[0, case.slots == SKIP].any()
    poison()
    output.float().square().sum().backward()
    hit = {slot for slot in case.slots.tolist() if slot != SKIP}
    for name in ("gate_up_proj", "down_proj"):
        gradient = case.leaves[name].grad
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        for expert in range(EXPERTS):
            assert bool(gradient[expert].any()) == (expert in hit), (name, expert)
    for name in ("x", "weights"):  # the latter leads to the router's parameters
        assert case.leaves[name].grad is not None, name
    assert not case.x.grad[0, case.slots == SKIP].any()
    assert not case.weights.grad[case.slots == SKIP].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whole_model_agrees_with_eager(implementation: str) -> None:
    ids = random_ids(2, 12)
    want = redraw(ZayaForCausalLM(tiny_config(experts_implementation="eager", skip_expert="identity")))
    got = redraw(ZayaForCausalLM(tiny_config(experts_implementation=implementation, skip_expert="identity")))
    assert_equal_logits(record_run(got, ids), record_run(want, ids))
    got(ids, labels=ids).loss.backward()
    want(ids, labels=ids).loss.backward()
    for (name, parameter), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, name, roundings=500)


# ---------------------------------------------------------------------------------------------- nothing for nobody
def routed(case: Case) -> int:
    return int((case.slots != SKIP).sum())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_arithmetic_is_that_of_the_routed_tokens(implementation: str, routing: str) -> None:
    """Forward: three matrix products per routed token. Backward: twice that. Skipped tokens: none."""
    case = Case(implementation, routing)
    one_token = 2 * WIDTH * 3 * INNER
    with FlopCounterMode(display=False) as counter:
        output = case.run()
    assert counter.get_total_flops() == routed(case) * one_token
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * routed(case) * one_token


@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_mm_multiplies_the_routed_rows_only(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    library = nn.functional.grouped_mm

    def spy(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(offs.clone())
        return library(x, weight, offs=offs)

    monkeypatch.setattr(nn.functional, "grouped_mm", spy)
    case = Case("grouped_mm", routing, dtype=torch.float32)
    case.run()
    counts = torch.tensor([ROUTINGS[routing].count(expert) for expert in range(EXPERTS)])
    assert len(calls) == (2 if ROUTINGS[routing] else 0)
    for offsets in calls:
        assert offsets.tolist() == counts.cumsum(0).tolist()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_eager_calls_each_hit_expert_once(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    library = nn.functional.linear

    def spy(x: Tensor, weight: Tensor, *args: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return library(x, weight, *args)

    monkeypatch.setattr(reference.F, "linear", spy)
    case = Case("eager", routing)
    case.run()
    hit = [count for expert in range(EXPERTS) if (count := ROUTINGS[routing].count(expert))]
    assert sorted(rows) == sorted(hit * 2)


def test_all_skipped_calls_no_library_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """batched_mm has no way to leave rows out; with nothing to do it is not even called."""

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("called for nobody")

    monkeypatch.setattr(torch, "bmm", refuse)
    for routing in ("all-skipped", "no-tokens"):
        output = Case("batched_mm", routing).run()
        assert not output.any()


# ------------------------------------------------------------------------------------------------------------ switching
def spies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Which implementations have run since the last call."""
    seen: set[str] = set()

    def watch(name: str, function: Callable) -> Callable:
        def spy(*args: object, **kwargs: object) -> Tensor:
            seen.add(name)
            return function(*args, **kwargs)

        return spy

    for name in ("batched_mm", "grouped_mm"):
        function = moe.ALL_EXPERTS_FUNCTIONS[name]
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, name, watch(name, function))
    monkeypatch.setattr(ops, "experts", watch("eager", ops.experts))

    def since() -> set[str]:
        result = set(seen)
        seen.clear()
        return result

    return since


def what_runs(implementation: str) -> str:
    """On a CPU ours is `ops.experts`, as "eager" is everywhere, and the kernels cannot run."""
    return "eager" if implementation.startswith("zaya") else implementation


def test_the_switch_changes_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = spies(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 6)
    for layer in model.model.layers:  # nobody skips, so that each implementation runs alone
        layer.mlp.gate.balancing_biases[-1] = -5.0
    with torch.no_grad():
        want = model(ids).logits
        ran()
        for name in (*IMPLEMENTATIONS, "zaya_triton", *reversed(IMPLEMENTATIONS)):
            model.set_experts_implementation(name)
            assert model.config._experts_implementation == name
            torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
            assert ran() == {what_runs(name)}


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "zaya_triton"])
def test_the_constructor_and_the_config_choose_too(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = spies(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation=implementation)))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -5.0
    model(random_ids(1, 4))
    assert ran() == {what_runs(implementation)}


def test_an_unknown_implementation_is_an_error_that_names_it() -> None:
    model = ZayaForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="gruoped_mm"):
        model.set_experts_implementation("gruoped_mm")
    assert model.config._experts_implementation in IMPLEMENTATIONS


@pytest.mark.filterwarnings("ignore:.*balancing_biases")
def test_kernels_that_cannot_run_here_are_missed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_said", {})
    model = redraw(ZayaForCausalLM(tiny_config()))
    model.save_pretrained(tmp_path)
    named = ZayaForCausalLM.from_pretrained(tmp_path, experts_implementation="zaya_triton")
    assert named.config._experts_implementation == "zaya_triton"
    ids = random_ids(2, 6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(named(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert len(selection.said("experts")) == 1


def test_the_definition_is_run_instead_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the definitions gets them, also from a model that names the kernels."""
    monkeypatch.setattr(selection, "_said", {})
    ran: list[int] = []
    run = reference.experts
    monkeypatch.setattr(reference, "experts", lambda *a: ran.append(1) or run(*a))
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation="zaya_triton", num_hidden_layers=1)))
    with selection.use("auto", experts="reference"), torch.no_grad():
        model(random_ids(1, 4))
    assert ran == [1]
    assert not selection.said("experts")


BF16, FP32, CUDA = torch.bfloat16, torch.float32, torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("hip", "capability", "dtype", "tokens", "faster"),
    [
        (None, (9, 0), BF16, 16384, True),
        (None, (10, 0), BF16, 16384, True),
        (None, (9, 0), BF16, 64, False),  # weights are all that is read
        (None, (9, 0), FP32, 16384, False),  # a loop over the experts
        (None, (8, 0), BF16, 16384, False),
        (None, (12, 0), BF16, 16384, False),
        ("7.2", (9, 4), BF16, 16384, False),  # an MI300X
    ],
)
def test_when_torchs_grouped_product_is_taken(
    hip: str | None,
    capability: tuple[int, int],
    dtype: torch.dtype,
    tokens: int,
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what reports say of it."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(selection, "triton_declines", lambda device: None)
    assert op.grouped_mm_is_faster(CUDA, dtype, 16, tokens) == faster
    with torch.no_grad():
        assert not op.grouped_mm_is_faster(CUDA, dtype, 16, None)
    assert not op.grouped_mm_is_faster(torch.device("cpu"), dtype, 16, tokens)
    module = SimpleNamespace(
        config=SimpleNamespace(_experts_implementation="zaya"),
        gate_up_proj=torch.empty(16, 2, 2, dtype=dtype, device="meta"),
        num_experts=16,
    )
    x = SimpleNamespace(device=CUDA, shape=(tokens, 2))
    facts = ops.Facts(CUDA, dtype, 2048, 262272, 8, 2, 128, (2, 2), 16, 2048, "silu", 256)
    assert experts_dispatch._takes_kernels(module, x) != faster
    name, why = op.backend(CUDA, facts)
    assert name == "triton"
    assert ("grouped_mm" in why) == (capability[0] in (9, 10) and dtype == BF16 and hip is None)
    with selection.use("auto", experts="triton"):
        assert experts_dispatch._takes_kernels(module, x)
        assert "grouped_mm" not in op.backend(CUDA, facts)[1]
    with selection.use("reference"):
        assert not experts_dispatch._takes_kernels(module, x)
        assert op.backend(CUDA, facts)[0] == "reference"


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"activation": "relu"}, "activation ReLU"), ({"dtype": torch.float64}, "float64"), ({"num_experts": 300}, "300")],
    ids=str,
)
def test_reports_name_what_the_kernels_decline(
    changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "triton_declines", lambda device: None)
    facts = ops.Facts(CUDA, BF16, 2048, 262272, 8, 2, 128, (2, 2), 16, 2048, "silu", 256)
    name, reason = op.backend(CUDA, dataclasses.replace(facts, **changes))
    assert name != "triton"
    assert why in reason


# ------------------------------------------------------------------------------------------------------- skip_expert
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_skip_expert_in_a_model(implementation: str) -> None:
    """All tokens skip: "zero" leaves the mixture out, "identity" gives the normed input times its weight."""
    outputs = {}
    for skip in ("zero", "identity"):
        config = tiny_config(num_hidden_layers=1, experts_implementation=implementation, skip_expert=skip)
        model = redraw(ZayaForCausalLM(config))
        layer = model.model.layers[0]
        layer.mlp.gate.balancing_biases.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0]))
        kept: list[Tensor] = []
        layer.mlp.register_forward_hook(lambda module, args, output, k=kept: k.extend([args[0], output[0]]))
        run = record_run(model, random_ids(2, 5))
        assert (run.slots == SKIP).all()
        given, outputs[skip] = kept
    assert not outputs["zero"].any()
    shares = run.biased[:, :, 0, -1] - 5.0
    torch.testing.assert_close(outputs["identity"], given * shares[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_empty_input_compiles(implementation: str, shape: tuple[int, int]) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1)))
    model.set_experts_implementation(implementation)
    torch.compiler.reset()  # or models of other tests count as recompilations of this one
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(torch.zeros(shape, dtype=torch.long), use_cache=False).logits.shape == (*shape, 128)


@pytest.mark.parametrize("changes", [{"hidden_size": 10}, {"moe_intermediate_size": 6}], ids=str)
def test_widths_that_torchs_grouped_product_refuses(changes: dict[str, int]) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation="grouped_mm", **changes)))
    assert model.config._experts_implementation == "grouped_mm"
    ids = random_ids(2, 6)
    with torch.no_grad():
        got = model(ids).logits
        model.set_experts_implementation("eager")
        assert torch.equal(got, model(ids).logits)
