"""The router in Triton: choices, results and gradients against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPE_IDS,
    DTYPES,
    assert_near,
    error,
    gradients,
    in_float64,
    layouts,
    memory_full_of_nan,
)
from torch import Tensor
from torch.library import opcheck

from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.ops import RouterWeights, Routing, selection
from zaya_hf.ops.common.facts import Facts
from zaya_hf.ops.common.triton import recording
from zaya_hf.ops.router import configs, op, reference
from zaya_hf.testing import redraw, tiny_config

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

EPS = 1e-5
Inputs = dict[str, Any]
WEIGHTS = tuple(name for name in RouterWeights._fields if name != "eps")


@pytest.fixture(autouse=True)
def _triton() -> Any:
    with selection.use("auto", router="triton"), memory_full_of_nan():
        yield


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, dtype).requires_grad_()


def problem(
    tokens: int = 21,
    inner: int = 40,
    width: int = 32,
    slots: int = 5,
    dtype: torch.dtype = torch.float32,
    state: bool = True,
    seed: int = 0,
) -> Inputs:
    """All arguments that may learn: probabilities are far from uniform, and every bias matters."""
    shapes = {
        "x": ((tokens, inner), 1.0),
        "state": ((tokens, width), 1.0),
        "down_weight": ((width, inner), inner**-0.5),
        "down_bias": ((width,), 0.3),
        "state_scale": ((width,), 1.0),
        "norm_weight": ((width,), 1.0),
        "fc1_weight": ((width, width), width**-0.5),
        "fc1_bias": ((width,), 0.3),
        "fc2_weight": ((width, width), 2 * width**-0.5),
        "fc2_bias": ((width,), 0.3),
        "out_weight": ((slots, width), 3 * width**-0.5),
    }
    made: Inputs = {
        name: draw(*shape, seed=100 * seed + index, dtype=dtype, scale=scale)
        for index, (name, (shape, scale)) in enumerate(shapes.items())
    }
    return made if state else {**made, "state": None, "state_scale": None}


def biases_of(inputs: Inputs, seed: int = 50) -> Tensor:
    return draw(inputs["out_weight"].shape[0], seed=seed, scale=0.2).detach()


def run(
    inputs: Inputs, biases: Tensor, replayed: Tensor | None = None, by: Any = ops.route, **counting: Any
) -> Routing:
    weights = RouterWeights(**{name: inputs[name] for name in WEIGHTS}, eps=inputs.get("eps", EPS))
    return by(inputs["x"], inputs["state"], weights, biases, replayed, **counting)


def cotangents(inputs: Inputs, seed: int = 70) -> list[Tensor]:
    tokens, (slots, width) = inputs["x"].shape[0], inputs["out_weight"].shape
    return [
        draw(*shape, seed=seed + i).detach() for i, shape in enumerate([(tokens, slots), (tokens,), (tokens, width)])
    ]


def check(inputs: Inputs, replayed: Tensor | None = None, found: list[Any] | None = None, **tolerance: float) -> None:
    """Choices, results and gradients of the kernels are those of the definition in float64."""
    biases, given = biases_of(inputs), cotangents(inputs)
    chosen: list[Tensor] = []

    def own(**arguments: Any) -> list[Tensor]:
        routing = run(arguments, biases, replayed)
        chosen.append(routing.slots)
        return [routing.logits, routing.weights, routing.state]

    results, grads = gradients(own, inputs, given)
    (slots,) = chosen
    best = (torch.softmax(results[0].float(), -1) + biases).detach()
    if replayed is None:
        assert torch.equal(best.gather(1, slots[:, None])[:, 0], best.amax(1))  # of the logits as they are rounded
    else:
        assert torch.equal(slots, torch.where(replayed < 0, best.argmax(1), replayed))
    assert slots.dtype == torch.int64
    assert results[1].dtype == torch.float32

    def wide(**arguments: Any) -> list[Tensor]:
        routing = run(arguments, biases, slots, by=reference.route)
        return [routing.logits, routing.weights, routing.state]

    wanted, wide_grads = gradients(wide, in_float64(inputs), [c.double() for c in given])
    limit = {"tolerance": tolerance.get("tolerance", 1e-2 if inputs["x"].dtype != torch.float32 else 1e-5)}
    for name, got, want in zip(("logits", "weights", "state"), results, wanted, strict=True):
        assert_near(got, want, name, **limit)
    assert grads.keys() == wide_grads.keys()
    for name, got in grads.items():
        assert got is not None, name
        assert got.dtype == inputs[name].dtype
        assert_near(got, wide_grads[name], f"gradient of {name}", **limit)
    if found is not None:
        found += [*results, slots, *grads.values()]


def counting_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launchers that run from now on."""
    from zaya_hf.ops.router import triton, triton_backward

    seen: list[str] = []
    for module, name in ((triton, "project"), (triton, "choose"), (triton_backward, "walk_back")):
        real = getattr(module, name)

        def noted(*arguments: Any, real: Any = real, name: str = name) -> None:
            seen.append(name)
            real(*arguments)

        monkeypatch.setattr(module, name, noted)
    return seen


# ---------------------------------------------------------------------------------------------- results and gradients
@pytest.mark.parametrize("state", [True, False], ids=["state", "first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_results_and_gradients(dtype: torch.dtype, state: bool) -> None:
    check(problem(dtype=dtype, state=state))


@pytest.mark.parametrize(
    ("tokens", "inner", "width", "slots"),
    [(1, 8, 16, 2), (33, 130, 48, 17), (17, 64, 80, 33), (5, 300, 16, 100), (3, 24, 144, 256), (2, 16, 256, 17)],
)
def test_sizes_that_fill_no_block(tokens: int, inner: int, width: int, slots: int) -> None:
    check(problem(tokens, inner, width, slots))


def test_without_epsilon() -> None:
    """What fills the last block is then 0 / 0, and must not reach the sums over tokens."""
    check({**problem(), "eps": 0.0})


def narrow_plans() -> dict[str, configs.Plan]:
    """Every configuration with and without a projection of its own."""
    plans = {f"whole {name}": configs.Plan(route) for name, route in configs.ROUTE.items()}
    for name, project in configs.PROJECT.items():
        route = configs.ROUTE["fp32" if name == "fp32" else "few"]
        for splits in (1, 4):
            plans[f"project {name} in {splits}"] = configs.Plan(route, project, splits)
    return plans


@pytest.mark.parametrize("name", list(narrow_plans()))
def test_every_configuration_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the memory that the first run used: nothing adds to what is there, and the results are the same bits."""
    plan = narrow_plans()[name]
    narrow = "fp32" not in name
    backward = configs.BACKWARD["narrow" if narrow else "fp32"]
    monkeypatch.setattr(configs, "choose_route", lambda *_: plan)
    monkeypatch.setattr(configs, "choose_backward", lambda *_: backward)
    inputs = problem(tokens=19, inner=200, dtype=torch.float16 if narrow else torch.float32)
    first: list[Tensor] = []
    second: list[Tensor] = []
    check(inputs, found=first)
    check(inputs, found=second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fp32_products_are_not_tf32() -> None:
    """4096 x 256 x 17: 1e-5 of float64 at worst, where the ten bits of TF32 miss by far; the largest are eager's."""
    from zaya_hf.ops.router import triton

    x, weight = draw(4096, 256, seed=1).detach(), draw(17, 256, seed=2, scale=0.1).detach()
    wide = x.double() @ weight.double().T
    out = torch.empty(1, 4096, 17, device=DEVICE)
    triton.project(x, weight, out, 1, configs.PROJECT["fp32"])
    limit = 1e-5 * wide.abs().max()
    assert (out[0].double() - wide).abs().max() <= limit
    cut = x.half().double() @ weight.half().double().T  # ten bits
    assert (cut - wide).abs().max() > 10 * limit
    assert torch.equal(out[0].argmax(1), (x @ weight.T).argmax(1))


def test_choices_are_eagers() -> None:
    """At R = 256 and 17 slots, wherever two slots are not within rounding of each other."""
    inputs = {name: t.detach() for name, t in problem(4096 if DEVICE == "cuda" else 96, 64, 256, 17).items()}
    biases = biases_of(inputs)
    got, eager = run(inputs, biases), run(inputs, biases, by=reference.route)
    wide = run(in_float64(inputs), biases.double(), by=reference.route)
    assert (got.logits.double() - wide.logits).abs().max() <= 1e-5 * wide.logits.abs().max()
    top = (torch.softmax(wide.logits, 1) + biases).topk(2, 1).values
    decided = top[:, 0] - top[:, 1] > 1e-5
    assert decided.float().mean() > 0.99
    assert torch.equal(got.slots[decided], eager.slots[decided])
    assert torch.equal(got.slots[decided], wide.slots[decided])
    assert len(got.slots.unique()) > 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_narrow_dtypes_round_where_the_definition_does(dtype: torch.dtype) -> None:
    """Next states are the definition's bits, but for sums in another order; far nearer than to float64."""
    inputs = {name: t.detach() for name, t in problem(120, 48, 32, 9, dtype=dtype).items()}
    biases = biases_of(inputs)
    got, want = run(inputs, biases), run(inputs, biases, by=reference.route)
    assert (got.state == want.state).float().mean() > 0.98
    assert (got.logits == want.logits).float().mean() > 0.6
    top = (torch.softmax(want.logits.float(), 1) + biases).topk(2, 1).values
    decided = top[:, 0] - top[:, 1] > 0.05
    assert decided.float().mean() > 0.5
    assert torch.equal(got.slots[decided], want.slots[decided])


# --------------------------------------------------------------------------------------------------- choice and counts
def test_ties_go_to_the_lowest_slot() -> None:
    for slots in (5, 70):  # one block of slots, and several
        inputs = problem(20, 8, 16, slots)
        with torch.no_grad():
            inputs["out_weight"].zero_()
        flat = torch.zeros(slots, device=DEVICE)
        assert run(inputs, flat).slots.tolist() == [0] * 20
        flat[[3, slots - 1]] = 0.5
        assert run(inputs, flat).slots.tolist() == [3] * 20
        assert_near(run(inputs, flat).weights, torch.full((20,), 1 / slots, device=DEVICE))
        worst = torch.full((slots,), float("-inf"), device=DEVICE)
        assert run(inputs, worst).slots.tolist() == [0] * 20
        assert_near(run(inputs, worst).weights, torch.full((20,), 1 / slots, device=DEVICE))


def test_a_nan_stays_in_its_token_and_in_range() -> None:
    inputs = {name: t.detach() for name, t in problem(8, slots=40).items()}
    inputs["x"][2] = float("nan")
    biases = biases_of(inputs)
    got, want = run(inputs, biases), run(inputs, biases, by=reference.route)
    assert torch.equal(got.slots, want.slots)
    assert got.slots[2] == 0
    assert got.weights.isnan().tolist() == [i == 2 for i in range(8)]


@pytest.mark.parametrize("slots", [5, 40])
def test_replayed_slots(slots: int) -> None:
    told = torch.full((21,), -1, device=DEVICE)
    told[::3] = torch.arange(7, device=DEVICE) % slots
    told[4] = slots - 1
    check(problem(slots=slots), told)
    spread = torch.full((42,), 99, device=DEVICE)
    spread[::2] = told
    check(problem(slots=slots), spread[::2])


@pytest.mark.parametrize("slots", [5, 40])
def test_counts(slots: int) -> None:
    inputs = problem(35, 8, 16, slots)
    biases = biases_of(inputs)
    real = torch.rand(35, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.6
    for mask in (None, real, torch.zeros_like(real), real.repeat_interleave(2)[::2]):
        for _ in range(2):  # not twice as many
            got = run(inputs, biases, count=True, real=mask)
            assert got.counts is not None
            assert got.counts.dtype == torch.int64
            assert torch.equal(got.counts, reference.count_slots(got.slots, slots, mask))
            assert got.counts.sum() == (35 if mask is None else mask.sum())
    assert run(inputs, biases).counts is None


def test_biases_are_outside_the_graph() -> None:
    inputs = problem()
    biases = biases_of(inputs).requires_grad_()
    routing = run(inputs, biases)
    assert not routing.slots.requires_grad
    routing.weights.sum().backward()
    assert biases.grad is None
    assert inputs["x"].grad is not None


# ---------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_results_that_nobody_used(used: tuple[int, ...]) -> None:
    inputs, biases = problem(), biases_of(problem())
    given = cotangents(inputs)
    slots = run(inputs, biases).slots

    def part(by: Any) -> Any:
        def results(**arguments: Any) -> list[Tensor]:
            routing = run(arguments, biases, slots, by=by)
            return [(routing.logits, routing.weights, routing.state)[index] for index in used]

        return results

    _, got = gradients(part(ops.route), inputs, [given[index] for index in used])
    _, want = gradients(part(reference.route), in_float64(inputs), [given[index] for index in used])
    for name, grad in got.items():
        expected = want[name]
        if expected is None:  # only the state was used: the MLP has no part in it
            assert used == (2,)
            assert grad is None or not grad.any()
        else:
            assert grad is not None
            assert_near(grad, expected, name)


@pytest.mark.parametrize(
    "learns",
    [(name,) for name in ("x", "state", *WEIGHTS)]
    + [("out_weight", "fc2_weight"), ("fc2_bias", "fc1_weight"), ("fc1_bias",), ("x", "out_weight", "norm_weight")],
    ids="+".join,
)
def test_frozen_inputs(learns: tuple[str, ...]) -> None:
    inputs = {name: t.detach().requires_grad_(name in learns) for name, t in problem(9, 24, 16).items()}
    check(inputs)


def test_frozen_weights_skip_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a wanted gradient is made of is written, and the walk ends where nothing is wanted any more."""
    from zaya_hf.ops.router import triton_backward

    seen: list[tuple[int, set[str]]] = []
    real = triton_backward.walk_back

    def noted(*arguments: Any) -> None:
        seen.append((arguments[8], set(arguments[6])))
        real(*arguments)

    monkeypatch.setattr(triton_backward, "walk_back", noted)
    for learns, depth, written in (
        ({"out_weight"}, 0, {"second", "logits_grad"}),
        ({"fc2_bias"}, 1, set()),
        ({"fc1_weight"}, 2, {"normed", "first_grad"}),
        ({"x"}, 3, {"down_grad"}),
        ({"state"}, 3, {"state_grad"}),
    ):
        inputs = {name: t.detach().requires_grad_(name in learns) for name, t in problem(4, 8, 16).items()}
        run(inputs, biases_of(inputs)).weights.sum().backward()
        assert seen.pop() == (depth, written)


def test_what_is_saved() -> None:
    """The inputs, the next state, the logits and the slots; no activation of the MLP."""
    inputs = problem(64, 40, 32, 5)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        routing = run(inputs, biases_of(inputs))
    given = {t.data_ptr() for t in inputs.values()}
    added = {t.data_ptr(): t.shape for t in saved if t.data_ptr() not in given}
    assert sorted(added.values()) == [(64,), (64, 5), (64, 32)]
    assert {routing.state.data_ptr(), routing.logits.data_ptr(), routing.slots.data_ptr()} == added.keys()


@pytest.mark.parametrize("learns", [("x", "state"), ("x", *WEIGHTS)], ids=["inputs", "weights"])
def test_gradients_of_gradients(learns: tuple[str, ...]) -> None:
    inputs = problem(4, 8, 16, 3)
    biases, given = biases_of(inputs), cotangents(inputs)
    slots = run(inputs, biases).slots
    names = [name for name in learns if inputs[name] is not None]

    def second(by: Any, arguments: Inputs) -> list[Tensor]:
        routing = run(arguments, biases, slots, by=by)
        total = sum(
            (r * c.to(r.dtype)).sum()
            for r, c in zip((routing.logits, routing.weights, routing.state), given, strict=True)
        )
        leaves = [arguments[name] for name in names]
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    for name, got, want in zip(
        names, second(ops.route, inputs), second(reference.route, in_float64(inputs)), strict=True
    ):
        assert_near(got, want, name)


# ------------------------------------------------------------------------------------------------------ memory, layout
@pytest.mark.parametrize("name", ["x", "state", *WEIGHTS])
def test_layouts_of_inputs(name: str) -> None:
    inputs = problem(7, 24, 16)
    for kind, other in layouts(inputs[name]).items():
        try:
            check({**inputs, name: other})
        except AssertionError as wrong:
            raise AssertionError(f"{name}: {kind}") from wrong


@pytest.mark.parametrize("result", [0, 1, 2])
def test_layouts_of_upstream_gradients(result: int) -> None:
    inputs = problem(7, 24, 16)
    biases, given = biases_of(inputs), cotangents(inputs)[result]
    slots = run(inputs, biases).slots
    expanded = given.flatten()[0].expand(given.shape)
    kinds = {**layouts(given), "expanded": expanded}
    for kind, grad in kinds.items():
        found = []
        for by, arguments in ((ops.route, inputs), (reference.route, in_float64(inputs))):
            routing = run(arguments, biases, slots, by=by)
            wanted = (routing.logits, routing.weights, routing.state)[result]
            leaves = [arguments[name] for name in ("x", "state", "down_weight", "state_scale")]
            found.append(torch.autograd.grad(wanted, leaves, grad.to(wanted.dtype)))
        for got, want in zip(*found, strict=True):
            assert_near(got, want, kind)


def test_expanded_inputs() -> None:
    inputs = problem(7, 24, 16)
    for name in ("x", "state"):
        check({**inputs, name: inputs[name].detach()[:1].expand(7, -1).requires_grad_()})


def test_zero_tokens() -> None:
    inputs = problem(0)
    routing = run(inputs, biases_of(inputs), count=True)
    assert [tuple(t.shape) for t in routing] == [(0, 5), (0,), (0,), (0, 32), (5,)]
    assert not routing.counts.any()
    (routing.logits.sum() + routing.weights.sum() + routing.state.sum()).backward()
    for name, t in inputs.items():
        assert t.grad is not None, name
        assert t.grad.shape == t.shape
        assert not t.grad.any(), name


@pytest.mark.parametrize("name", ["x", "state"])
def test_rows_further_apart_than_int32(name: str) -> None:
    """The third row lies more than 2^31 elements behind the first, at a stride that fits into 32 bits, in memory of
    which only these rows are ever touched."""
    inputs = problem(3, 24, 16)
    apart = 2**30 + 64
    far = torch.UntypedStorage((2 * apart + 64) * 4, device=DEVICE)
    spread = torch.empty(0, device=DEVICE).set_(far, 0, inputs[name].shape, (apart, 1))  # type: ignore[call-overload]
    spread.copy_(inputs[name].detach())
    check({**inputs, name: spread.requires_grad_()})


def test_results_past_int32_are_addressed_in_64_bits() -> None:
    """More tokens than 2^31 elements of a state: nothing runs, but what would be launched says so."""
    tokens = 2**31 // 256 + 1024

    def made(*shape: int, of: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    square, row = made(256, 256), made(256)
    weights = RouterWeights(made(256, 2048), row, row, row, square, row, square, row, made(17, 256), EPS)
    from zaya_hf.ops.router import triton

    plan = configs.choose_route(tokens, 2048, 256, torch.bfloat16)
    with recording() as launches:
        triton.route(made(tokens, 2048), made(tokens, 256), weights, made(17, of=torch.float32), None, None, True, plan)
    (launch,) = launches
    assert launch.grid == (-(-tokens // launch.config["BLOCK_N"]),)
    assert launch.arguments["counts_out"].shape == (launch.grid[0], 17)


def test_inputs_stay_as_they_are() -> None:
    inputs = problem()
    before = {name: t.detach().clone() for name, t in inputs.items()}
    check(inputs)
    assert all(torch.equal(before[name], t) for name, t in inputs.items())


# ----------------------------------------------------------------------------------------------------------- selection
def test_sizes_decide_and_nothing_else() -> None:
    half, full = torch.bfloat16, torch.float32
    many = configs.choose_route(16384, 2048, 256, half)
    assert many == configs.Plan(configs.ROUTE["many"])
    one = configs.choose_route(1, 2048, 256, half)
    assert (one.route, one.project, one.splits) == (configs.ROUTE["few"], configs.PROJECT["few"], 16)
    prompt = configs.choose_route(4096, 2048, 256, half)
    assert (prompt.project, prompt.splits) == (configs.PROJECT["many"], 1)
    assert configs.choose_route(8, 48, 16, full).splits == 1  # nothing to split
    assert configs.choose_route(16384, 2048, 256, full).route == configs.ROUTE["fp32"]
    assert configs.choose_backward(half) == configs.BACKWARD["narrow"]
    assert configs.choose_backward(full) == configs.BACKWARD["fp32"]


def test_configurations_can_be_launched() -> None:
    for table in (configs.ROUTE, configs.PROJECT, configs.BACKWARD):
        for chosen in table.values():
            assert chosen.num_warps * 64 <= 1024


def module(**changes: Any) -> Any:
    """The router of a second layer."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2, **changes))).to(DEVICE)
    return model.model.layers[1].mlp.gate


def test_the_models_router_runs_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting_launches(monkeypatch)
    gate = module()
    x, state = draw(2, 5, 64, seed=1), draw(2, 5, 16, seed=2)
    told = torch.full((2, 5), -1, device=DEVICE)
    told[1, 2] = 3
    got = gate(x, state, told)
    assert seen == ["project", "choose"]
    sum(r.sum() for r in (got[0], got[2], got[3])).backward()
    assert seen.pop() == "walk_back"
    grads = {name: p.grad.clone() for name, p in gate.named_parameters()}
    gate.zero_grad()
    with selection.use("reference"):
        want = gate(x, state, told)
        sum(r.sum() for r in (want[0], want[2], want[3])).backward()
    assert len(seen) == 2
    assert torch.equal(got[1], want[1])
    for g, w in zip((got[0], got[2], got[3]), (want[0], want[2], want[3]), strict=True):
        assert_near(g, w)
    for name, p in gate.named_parameters():
        assert_near(grads[name], p.grad, name)
    first = redraw(ZayaForCausalLM(tiny_config())).to(DEVICE).model.layers[0].mlp.gate
    first(x)
    assert len(seen) == 4


class Doubled(torch.nn.Module):
    """What an adapter does: something around a layer."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def change(gate: Any, case: str) -> None:
    mlp = gate.router_mlp
    if case == "wrapped":
        mlp.fc1 = Doubled(mlp.fc1)
    elif case == "hooked":
        gate.down_proj.register_forward_hook(lambda module, args, output: 2 * output)
    elif case == "hooked MLP":
        mlp.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    elif case == "own forward":
        mlp.norm.forward = lambda x: 2 * x
    elif case == "other activation":
        mlp.act_fn = torch.nn.GELU("tanh")
    elif case == "parametrised":
        torch.nn.utils.parametrize.register_parametrization(mlp.fc2, "weight", Doubled(torch.nn.Identity()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", ["wrapped", "hooked", "hooked MLP", "own forward", "other activation", "parametrised"])
def test_layers_that_do_more_are_called(case: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting_launches(monkeypatch)
    gate = module()
    x, state = draw(2, 5, 64, seed=1), draw(2, 5, 16, seed=2)
    before = gate(x, state)[0]
    seen.clear()
    change(gate, case)
    call = torch.compile(gate, backend="eager") if compiled else gate
    got = call(x, state)[0]
    with selection.use("reference"):
        want = gate(x, state)[0]
    assert not seen
    assert error(before, want) > 1e-5  # the change was one
    assert_near(got, want)


DECLINED: dict[str, Any] = {
    "float64": lambda i: {name: t.detach().double() for name, t in i.items()},
    "mixed": lambda i: {**i, "x": i["x"].detach().half(), "down_weight": i["down_weight"].detach().half(),
                        "down_bias": i["down_bias"].detach().half()},
    "width": lambda i: problem(4, 8, 24),
    "wide": lambda i: problem(4, 8, 272),
    "slots": lambda i: problem(4, 8, 16, 257),
    "subclass": lambda i: {**i, "x": i["x"].detach().as_subclass(type("Mine", (Tensor,), {}))},
}  # fmt: skip


@pytest.mark.parametrize("case", list(DECLINED))
def test_what_is_declined_is_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(selection, "say_once", lambda operator, why: said.append(f"{operator}: {why}"))
    seen = counting_launches(monkeypatch)
    inputs = DECLINED[case](problem(4, 8, 16))
    biases = biases_of(inputs)
    got, want = run(inputs, biases), run(inputs, biases, by=reference.route)
    assert not seen
    assert len(said) == 1
    assert said[0].startswith("router: ")
    assert torch.equal(torch.as_tensor(got.logits), torch.as_tensor(want.logits))
    assert torch.equal(got.slots, want.slots)


def test_backends_say_what_runs() -> None:
    facts = Facts(torch.device(DEVICE), torch.float32, 64, 128, 4, 2, 16, (2, 2), 4, 32, "silu", 16)
    device = torch.device(DEVICE)
    assert op.backend(device, facts)[0] == "triton"
    for changes in ({"router_width": 24}, {"router_width": 512}, {"num_experts": 300}, {"dtype": torch.float64}):
        backend, why = op.backend(device, Facts(**{**vars(facts), **changes}))
        assert backend == "reference"
        assert "not triton, since" in why
    with selection.use("reference"):
        assert op.backend(device, facts)[0] == "reference"


# ------------------------------------------------------------------------------------------- operators of torch
@pytest.mark.parametrize("state", [True, False], ids=["state", "first"])
def test_the_operators_keep_torchs_rules(state: bool) -> None:
    inputs = problem(6, 24, 16, state=state)
    weights = [inputs[name] for name in WEIGHTS]
    told, real = torch.full((6,), -1, device=DEVICE), torch.ones(6, dtype=torch.bool, device=DEVICE)
    arguments = (inputs["x"], inputs["state"], *weights, EPS, biases_of(inputs))
    opcheck(torch.ops.zaya_hf.route.default, (*arguments, None, None, False))
    opcheck(torch.ops.zaya_hf.route.default, (*arguments, told, real, True))
    routing = run(inputs, biases_of(inputs))
    leaves = [None if t is None else t.detach() for t in (inputs["x"], inputs["state"], *weights)]
    wanted = [t is not None for t in leaves]
    outputs = (routing.state.detach(), routing.logits.detach(), routing.slots, wanted)
    opcheck(torch.ops.zaya_hf.route_backward.default, (*cotangents(inputs), *leaves, EPS, *outputs))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_compiled_whole(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's router in one graph, forward and backward, on the kernels."""
    seen = counting_launches(monkeypatch)
    gate = module()
    found = []
    for call in (gate, torch.compile(gate, fullgraph=True, backend="aot_eager")):
        x, state = draw(2, 5, 64, seed=1), draw(2, 5, 16, seed=2)
        gate.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            logits, slots, weights, own = call(x, state)
        (logits.float().sum() + weights.sum() + own.float().square().sum()).backward()
        grads = {name: p.grad for name, p in gate.named_parameters()}
        found.append([logits, weights, own, slots, x.grad, state.grad, *grads.values()])
        assert seen == ["project", "choose", "walk_back"]
        seen.clear()
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have eager's dtypes, the parameters' gradients are fp32, and all is as near to float64 as eager is."""
    seen = counting_launches(monkeypatch)
    gate = module()
    found = []
    for how in ("triton", "reference"):
        x, state = draw(3, 7, 64, seed=1), draw(3, 7, 16, seed=2)
        gate.zero_grad()
        with selection.use("auto", router=how), torch.autocast(DEVICE, dtype):
            logits, _, weights, own = gate(x, state)
        (logits.float().sum() + weights.sum() + own.float().square().sum()).backward()
        found.append([logits, weights, own, x.grad, state.grad, *(p.grad for p in gate.parameters())])
        assert seen == ["project", "choose", "walk_back"]  # of the first run
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert_near(got, want, tolerance=2e-2)
    assert {p.grad.dtype for p in gate.parameters()} == {torch.float32}


# ----------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    inputs = {name: t.detach().to("cuda:1") for name, t in problem().items()}
    biases = biases_of(inputs).to("cuda:1")
    with torch.cuda.device(0):
        got = run(inputs, biases)
    assert_near(got.logits, run(inputs, biases, by=reference.route).logits)


@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes are for a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 700, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_real_sizes(dtype: torch.dtype, tokens: int) -> None:
    if dtype == torch.float32 and not torch.version.hip:
        pytest.skip("declined on NVIDIA's GPUs")
    check(problem(tokens, 2048, 256, 17, dtype=dtype))
