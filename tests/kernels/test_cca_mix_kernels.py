"""CCA's mixing step in Triton: results and gradients against the definition, token by token or in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, DTYPE_IDS, DTYPES, assert_near, gradients, in_float64, layouts, memory_full_of_nan
from torch import Tensor
from torch.library import opcheck

from cca_problems import LAYOUTS, Document, Problem, describe, draw, layout, mix, naive, with_random_past
from zaya_hf import ops
from zaya_hf.ops import selection
from zaya_hf.ops.cca_mix import configs, op, operators, reference
from zaya_hf.ops.common.triton import recording

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

Inputs = dict[str, Any]
RESULTS = ("query", "key", "value")


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with selection.use("triton"), memory_full_of_nan():
        yield


# ------------------------------------------------------------------------------------------ against token by token
def on_device(problem: Problem) -> Problem:
    tensors = {n: t.detach().to(DEVICE).requires_grad_(t.requires_grad) for n, t in problem.tensors.items()}
    return Problem(tensors, problem.head_dim, problem.look_back)


def check(problem: Problem, documents: list[Document], tolerance: float | None = None, **arguments: Any) -> None:
    """Results and every gradient, with the documents' states (which get none). Tables are as wide as they are."""
    rows, length = problem.tensors["query"].shape[:2]
    exact = Problem(in_float64(problem.tensors), problem.head_dim, problem.look_back)
    exact_documents = [
        Document(
            d.row, d.start, d.length, *(None if t is None else t.detach().double() for t in (d.past, d.past_value))
        )
        for d in documents
    ]
    for d in documents:
        if d.past is not None and d.past_value is not None:
            d.past, d.past_value = d.past.detach(), d.past_value.detach()
    reach, states = describe(documents, rows, length, problem.look_back)
    if states is not None:
        states = replace(states, **{name: t.to(DEVICE) for name, t in vars(states).items()})
    ours = on_device(problem)
    got = mix(ours, reach=reach.to(DEVICE), states=states, **arguments)
    want = naive(exact, exact_documents, **arguments)
    generator = torch.Generator().manual_seed(99)
    dtype = problem.tensors["query"].dtype
    cotangents = [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(dtype) for w in want]
    for name, g, w in zip(RESULTS, got, want, strict=True):
        assert g.dtype == dtype
        assert_near(g.cpu(), w, name, tolerance)
    leaves, exact_leaves = ours.leaves(), exact.leaves()
    found = torch.autograd.grad(got, list(leaves.values()), [c.to(DEVICE) for c in cotangents])
    wanted = torch.autograd.grad(want, list(exact_leaves.values()), [c.double() for c in cotangents], allow_unused=True)
    for name, g, w in zip(leaves, found, wanted, strict=True):
        assert g.dtype == leaves[name].dtype
        expected = torch.zeros_like(g, dtype=torch.float64, device="cpu") if w is None else w
        assert_near(g.cpu(), expected, f"gradient of {name}", tolerance)


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_padding_and_states(name: str) -> None:
    rows, length, documents, with_past = layout(name)
    problem = draw(2, 1, 16, 2, 2, rows, length, 1, torch.float32)
    with_random_past(documents, problem, with_past, 2)
    check(problem, documents)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_dtypes(dtype: torch.dtype) -> None:
    rows, length, documents, with_past = layout("segments-with-a-past")
    problem = draw(2, 1, 32, 2, 2, rows, length, 3, dtype)
    with_random_past(documents, problem, with_past, 4)
    check(problem, documents)


@pytest.mark.parametrize("widths", [(1, 1), (1, 2), (4, 1), (3, 4)], ids=str)
def test_widths_of_the_convolutions(widths: tuple[int, int]) -> None:
    rows, length, documents, with_past = layout("segments-with-a-past")
    problem = draw(1, 1, 16, *widths, rows, length, 5, torch.float32)
    with_random_past(documents, problem, with_past, 6)
    check(problem, documents)


@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "rotated", "length"),
    [(3, 1, 48, 20, 11), (1, 1, 80, 80, 11), (4, 2, 18, 0, 11), (1, 1, 256, 128, 11)],
    ids=str,
)
def test_sizes_of_heads(heads: int, groups: int, head_dim: int, rotated: int, length: int) -> None:
    """Also no power of two, and nothing or everything rotated."""
    problem = draw(heads, groups, head_dim, 1, 1 if head_dim > 128 else 2, 1, length, 7, torch.float32)
    angles = torch.randn(1, length, rotated // 2, generator=torch.Generator().manual_seed(8))
    angles = torch.cat([angles, angles], dim=-1)
    problem.tensors["cos"], problem.tensors["sin"] = angles.cos(), angles.sin()
    check(problem, [Document(0, 0, 7), Document(0, 8, length - 8)])


def test_clamped_temperature_and_no_value_before_the_first() -> None:
    problem = draw(2, 2, 16, 2, 2, 1, 5, 9, torch.float32)
    problem.tensors["temperature"] = torch.tensor([0.3, 3.0], requires_grad=True)
    nothing = problem.tensors.pop("nothing")
    problem.tensors["nothing"] = torch.zeros_like(nothing)
    check(problem, [Document(0, 1, 4)], clamp_temperature=True)


# ---------------------------------------------------------------------------------------- against the definition
def arguments(
    problem: Problem, reach: Tensor | None = None, states: ops.SegmentStates | None = None, **changed: Any
) -> Inputs:
    """The arguments of `ops.cca_mix` that may learn, as leaves on the device."""
    t = on_device(problem).tensors
    raw = torch.cat([t.pop("query"), t.pop("key")], dim=-1).detach().requires_grad_()
    return {"raw": raw, **t, **changed}


def run(reach: Tensor | None = None, states: Any = None, **inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs["value_of_nothing"] = inputs.pop("nothing")
    return ops.cca_mix(**inputs, reach=reach, states=states, head_dim=16)


def definition(**inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    with selection.use("reference"):
        return run(**inputs)


def small(
    dtype: torch.dtype = torch.float32, rows: int = 2, length: int = 5, widths: tuple[int, int] = (2, 2)
) -> Inputs:
    return arguments(draw(2, 1, 16, *widths, rows, length, 11, dtype))


def upstream(inputs: Inputs) -> list[Tensor]:
    rows, length, width = inputs["value_current"].shape
    groups = 2 * width // 16
    sizes = (inputs["raw"].shape[-1] // 16 - groups, groups, groups)
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(rows, heads, length, 16, generator=generator).to(DEVICE) for heads in sizes]


def compare(
    inputs: Inputs,
    cotangents: list[Tensor],
    function: Callable[..., Any] = run,
    define: Callable[..., Any] = definition,
    tolerance: float | None = None,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Results and gradients, which have to be those of the definition in float64."""
    got, got_gradients = gradients(function, inputs, cotangents)
    rounded = [c.to(g.dtype) for c, g in zip(cotangents, got, strict=True)]
    want, want_gradients = gradients(define, in_float64(inputs), rounded)
    for name, one, other in zip(RESULTS, got, want, strict=True):
        assert_near(one, other, name, tolerance)
    assert set(got_gradients) == set(want_gradients)
    for name, gradient in got_gradients.items():
        assert gradient is not None, name
        assert gradient.dtype == inputs[name].dtype, name
        expected = want_gradients[name]
        assert_near(gradient, torch.zeros_like(gradient) if expected is None else expected, name, tolerance)
    return got, got_gradients


@pytest.mark.parametrize("states", [False, True], ids=["fresh", "states"])
def test_without_reach_a_row_is_one_document(states: bool) -> None:
    inputs = small()
    if states:
        past = torch.randn(3, 2, 48, 2).to(DEVICE)
        kept = ops.SegmentStates(past[1], torch.randn(2, 16).to(DEVICE)[:, ::2])
        inputs["states"] = kept
        wide = ops.SegmentStates(kept.qk.double(), kept.value.double())
        compare(inputs, upstream(inputs), define=lambda **kw: definition(**{**kw, "states": wide}))
    else:
        compare(inputs, upstream(inputs))


@torch.no_grad()
def test_chunks_go_on_from_states() -> None:
    inputs = small(length=8, widths=(3, 2))
    whole, begin = run(**inputs), 0
    before = ops.initial_states(inputs["raw"], inputs["value_delayed"], 3, inputs["nothing"])
    for size in (4, 1, 3):
        span = slice(begin, begin + size)
        cut = {name: inputs[name][:, span] for name in ("raw", "value_current", "value_delayed", "cos", "sin")}
        states = ops.SegmentStates(*before)
        for name, got, full in zip(RESULTS, run(**{**inputs, **cut}, states=states), whole, strict=True):
            assert_near(got, full[:, :, span], name, 1e-6)
        before = ops.next_states(cut["raw"], cut["value_delayed"], before, states=states)
        begin += size


def test_garbage_in_padding_stays_there() -> None:
    """Results of documents, and the gradients of their raw columns."""
    rows, length, documents = 1, 9, [Document(0, 1, 4), Document(0, 6, 2)]
    reach, _ = describe(documents, rows, length, 2)
    clean = {**arguments(draw(2, 1, 16, 2, 2, rows, length, 13, torch.float32)), "reach": reach.to(DEVICE)}
    real = torch.zeros(rows, length, dtype=torch.bool, device=DEVICE)
    for d in documents:
        real[d.row, d.start : d.start + d.length] = True
    dirty = dict(clean)
    for name, garbage in (("raw", torch.nan), ("value_current", torch.inf), ("value_delayed", -torch.inf)):
        dirty[name] = torch.where(real[..., None], clean[name].detach(), garbage).requires_grad_()
    cotangents = [torch.where(real[:, None, :, None], c, 0) for c in upstream(clean)]
    (got, found), (want, wanted) = (gradients(run, x, cotangents) for x in (dirty, clean))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.transpose(1, 2)[real], other.transpose(1, 2)[real])
    for name in ("raw", "value_current", "value_delayed"):
        assert torch.equal(found[name][real], wanted[name][real])


def test_a_zero_vector_stays_zero_and_has_finite_gradients() -> None:
    inputs = small(rows=1, length=3)
    for name in ("raw", "value_current", "value_delayed", "depthwise_bias", "grouped_bias"):
        inputs[name] = torch.zeros_like(inputs[name]).requires_grad_()
    results, found = gradients(run, inputs, [torch.ones_like(c) for c in upstream(inputs)])
    assert not results[0].any()
    assert not results[1].any()
    assert all(gradient.isfinite().all() for gradient in found.values())


# ------------------------------------------------------------------------------------------------- configurations
@pytest.mark.parametrize("place", range(4))
def test_every_configuration_twice(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tables, also in several shares of the tokens. A second run gives the same bits."""
    for name in ("convolutions", "raw", "weights", "finish"):
        table = [*getattr(configs, name.upper()).values()]
        assert len(table) <= 4
        chosen = table[place % len(table)]
        monkeypatch.setattr(configs, f"choose_{name}", lambda *sizes, chosen=chosen: chosen)
    monkeypatch.setattr(configs, "choose_splits", lambda *sizes: 2)
    inputs = arguments(draw(1, 1, 16, 2, 2, 1, 19, 14, torch.float32))
    cotangents = upstream(inputs)
    runs = [compare(inputs, cotangents) for _ in range(2)]
    for one, other in zip(*[[*results, *found.values()] for results, found in runs], strict=True):
        assert torch.equal(one, other)


def test_blocks_go_to_dies_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than dies: some programs have no block."""
    from zaya_hf.ops.cca_mix import triton as kernels

    monkeypatch.setattr(kernels, "DIES", 2)
    inputs = arguments(draw(1, 1, 16, 1, 1, 1, 35, 15, torch.float32))
    assert kernels.programs(35, 3, 16) == 12
    compare(inputs, upstream(inputs))


def test_sizes_decide_and_nothing_else() -> None:
    for dtype in DTYPES:
        for head_dim in (16, 48, 64, 128, 256):
            for tokens in (0, 1, 1024, 1025, 10**6):
                assert configs.choose_convolutions(tokens, head_dim, dtype) in configs.CONVOLUTIONS.values()
                assert configs.choose_raw(tokens, head_dim, dtype) in configs.RAW.values()
            assert configs.choose_weights(head_dim, dtype) in configs.WEIGHTS.values()
            assert configs.choose_finish(head_dim) in configs.FINISH.values()
    for tokens in (0, 1, 511, 4096, 16_384, 10**6):
        for matrices in (1, 30, 120, 5000):
            splits = configs.choose_splits(tokens, matrices)
            assert splits >= 1
            assert splits == 1 or (tokens / splits >= 512 and splits * matrices <= 608)
            assert splits < 8 or splits % 8 == 0


# ---------------------------------------------------------------------------------------- what may be asked for
LEARNERS = (
    ("raw",),
    ("temperature",),
    ("depthwise_weight", "grouped_bias"),
    ("value_delayed", "nothing"),
    ("value_current",),
    ("raw", "value_current", "value_delayed"),
)


@pytest.mark.parametrize("learns", LEARNERS, ids="+".join)
def test_frozen_inputs(learns: tuple[str, ...]) -> None:
    inputs = {name: t.detach().requires_grad_(name in learns) for name, t in small(rows=1).items()}
    compare(inputs, upstream(inputs))


@pytest.mark.parametrize("result", range(3), ids=RESULTS)
def test_a_result_that_nobody_used(result: int) -> None:
    inputs = small(rows=1)
    cotangents = [upstream(inputs)[result]]
    _, got = gradients(lambda **kw: run(**kw)[result], inputs, cotangents)
    _, want = gradients(lambda **kw: definition(**kw)[result], in_float64(inputs), cotangents)
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None or not got[name].any(), name
        else:
            assert_near(got[name], gradient, name)


@pytest.mark.parametrize(("rows", "length"), [(0, 3), (2, 0)])
def test_zero_tokens(rows: int, length: int) -> None:
    inputs = arguments(draw(2, 1, 16, 2, 2, rows, length, 1, torch.float32))
    results, found = gradients(run, inputs, upstream(inputs))
    assert [tuple(t.shape) for t in results] == [(rows, 2, length, 16), (rows, 1, length, 16), (rows, 1, length, 16)]
    for name, gradient in found.items():
        assert gradient.shape == inputs[name].shape
        assert not gradient.any()


def test_only_inputs_are_saved() -> None:
    inputs = small(torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(**inputs)
    names = ("raw", "depthwise_weight", "depthwise_bias", "grouped_weight", "grouped_bias", "cos", "sin")
    # bf16 each, and the factor on the keys in fp32
    assert sum(kept.values()) == 2 * sum(inputs[name].numel() for name in names) + 4
    with torch.no_grad():
        kept.clear()
        run(**inputs)
    assert not kept


# ----------------------------------------------------------------------------------------------------------- memory
def with_layout(inputs: Inputs, kind: str) -> Inputs:
    return {name: layouts(t).get(kind, t) if isinstance(t, Tensor) else t for name, t in inputs.items()}


@pytest.mark.parametrize("kind", layouts(torch.zeros(2, 2)))
def test_layouts(kind: str) -> None:
    """Of every input and of the upstream gradients, at once."""
    inputs = small()
    states = ops.SegmentStates(*(torch.randn(*shape).to(DEVICE) for shape in ((2, 48, 2), (2, 8))))
    laid = ops.SegmentStates(*(layouts(t)[kind] for t in (states.qk, states.value)))
    wide = ops.SegmentStates(states.qk.double(), states.value.double())
    compare(
        with_layout(inputs, kind),
        [layouts(c)[kind] for c in upstream(inputs)],
        lambda **kw: run(**kw, states=laid),
        lambda **kw: definition(**kw | {"grouped_weight": kw["grouped_weight"].contiguous()}, states=wide),
    )


def test_expanded_inputs_and_upstream_gradients() -> None:
    inputs = small()
    inputs["raw"] = inputs["raw"].detach()[:1].expand(2, 5, 48).requires_grad_()
    inputs["cos"], inputs["sin"] = (inputs[name].expand(2, 5, 8) for name in ("cos", "sin"))
    inputs["value_delayed"] = inputs["value_delayed"].detach()[..., :1].expand(2, 5, 8).requires_grad_()
    ones = [torch.ones((), device=DEVICE)] * 3
    _, got = gradients(lambda **kw: [x.sum() for x in run(**kw)], inputs, ones)
    _, want = gradients(lambda **kw: [x.sum() for x in definition(**kw)], in_float64(inputs), ones)
    for name, gradient in got.items():
        assert_near(gradient, want[name], name)


def far_apart(x: Tensor) -> Tensor:
    """The same, its third row further from the first than int32 counts, though the stride itself is none too large;
    only what is written to takes memory."""
    stride = 2**30 + 2**20
    try:
        memory = torch.empty(0, dtype=x.dtype, device=DEVICE).new_zeros(1).untyped_storage()
        memory.resize_(x.element_size() * (stride * (x.shape[0] - 1) + x[0].numel()))
    except RuntimeError:
        pytest.skip("no room for so many addresses")
    far = torch.empty(0, dtype=x.dtype, device=DEVICE).set_(memory, 0, x.shape, (stride, *x.stride()[1:]))
    far.copy_(x.detach())
    return far


def test_rows_further_apart_than_int32() -> None:
    inputs = small(torch.bfloat16, rows=3, length=2)
    for name in ("raw", "value_current", "value_delayed"):
        inputs[name] = far_apart(inputs[name]).requires_grad_()
    compare(inputs, [far_apart(c.bfloat16()) for c in upstream(inputs)])


def test_inputs_stay_as_they_are() -> None:
    inputs = small(rows=1)
    before = {name: t.detach().clone() for name, t in inputs.items()}
    gradients(run, inputs, upstream(inputs))
    assert all(torch.equal(before[name], t) for name, t in inputs.items())


# ------------------------------------------------------------------------------------------------- torch's machinery
def operator_arguments(inputs: Inputs, reach: Tensor | None, states: ops.SegmentStates | None) -> tuple[Any, ...]:
    names = ("raw", "depthwise_weight", "depthwise_bias", "grouped_weight", "grouped_bias", "temperature", "cos", "sin")
    kept = (None,) * 4 if states is None else (states.qk, states.value, states.index, states.valid)
    values = (inputs["value_current"], inputs["value_delayed"], inputs["nothing"])
    return *(inputs[name] for name in names), reach, kept[0], kept[2], kept[3], 16, *values, kept[1]


def test_the_operator_keeps_torchs_rules() -> None:
    rows, length, documents, with_past = layout("segments-with-a-past")
    problem = draw(1, 1, 16, 2, 1, rows, length, 16, torch.float32)
    with_random_past(documents, problem, with_past, 17)
    reach, kept = describe(documents, rows, length, 1)
    assert kept is not None
    kept = replace(kept, **{name: t.detach().to(DEVICE) for name, t in vars(kept).items()})
    opcheck(operators.mix, operator_arguments(arguments(problem), reach.to(DEVICE), kept))
    plain = operator_arguments(arguments(problem), None, None)
    opcheck(operators.mix, plain, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_compiled_whole(autocast: bool) -> None:
    """With sizes that change; under autocast with parameters in fp32."""

    def layer(x: Tensor, **kw: Any) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            raw = x @ kw["projection"]
            inputs = {name: t for name, t in kw.items() if name != "projection"}
            if autocast:
                inputs["value_current"], inputs["value_delayed"] = raw[..., :8].tanh(), raw[..., 8:16]
            return run(**inputs, raw=raw)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (3, 5) if autocast else (4,):
        inputs = arguments(draw(1, 1, 16, 2, 1, 1, length, 11, torch.float32))
        x, projection = torch.randn(1, length, 6), torch.randn(6, 32) / 2
        inputs |= {"x": x.to(DEVICE).requires_grad_(), "projection": projection.to(DEVICE).requires_grad_()}
        cotangents = upstream(inputs)
        del inputs["raw"]
        got, got_gradients = gradients(compiled, inputs, cotangents)
        want, want_gradients = gradients(layer, inputs, cotangents)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for name, gradient in got_gradients.items():
            if gradient is None:
                assert want_gradients[name] is None, name
            else:
                torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-5, atol=1e-5)


def test_autocast() -> None:
    """bf16 projections beside fp32 parameters, whose gradients are fp32."""
    inputs = small()
    for name in ("raw", "value_current", "value_delayed"):
        inputs[name] = inputs[name].detach().bfloat16().requires_grad_()
    cotangents = upstream(inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert all(t.dtype == torch.bfloat16 for t in run(**inputs))
        got, found = gradients(run, inputs, cotangents)
    want, wanted = gradients(definition, in_float64(inputs), [c.bfloat16() for c in cotangents])
    for one, other in zip(got, want, strict=True):
        assert_near(one, other)
    for name, gradient in found.items():
        assert gradient.dtype == inputs[name].dtype
        assert_near(gradient, wanted[name], name, 1e-2)


@pytest.mark.parametrize("states", [False, True], ids=["plain", "states"])
def test_gradients_of_gradients(states: bool) -> None:
    rows, length, documents, with_past = layout("segments-with-a-past" if states else "one-document-per-row")
    problem = draw(2, 1, 16, 2, 2, rows, length, 18, torch.float32)
    with_random_past(documents, problem, with_past, 19)
    reach, kept = describe(documents, rows, length, 2)
    if kept is not None:
        kept = replace(kept, **{name: t.detach().to(DEVICE) for name, t in vars(kept).items()})
    inputs = arguments(problem)
    learns = [name for name, t in inputs.items() if t.requires_grad]
    found = []
    for function, values in ((run, inputs), (definition, in_float64(inputs))):
        wide = values["raw"].dtype == torch.float64 and kept is not None
        given = replace(kept, qk=kept.qk.double(), value=kept.value.double()) if wide else kept
        leaves = [values[name] for name in learns]
        results = function(**values, reach=reach.to(DEVICE) if states else None, states=given)
        first = torch.autograd.grad([r.sin().sum() for r in results], leaves, create_graph=True)
        found.append(torch.autograd.grad([g.square().sum() for g in first], leaves))
    for name, one, other in zip(learns, *found, strict=True):
        assert_near(one, other, name)


# -------------------------------------------------------------------------------------------------------- declined
class Odd(Tensor):
    """A subclass of its own."""


def declined_inputs() -> dict[str, tuple[Inputs, str]]:
    plain = small(rows=1, length=3)
    kept = ops.SegmentStates(torch.randn(1, 48, 2).to(DEVICE).requires_grad_(), torch.randn(1, 8).to(DEVICE))
    return {
        "float64": (in_float64(plain), "not torch.float64"),
        "subclass": (plain | {"cos": plain["cos"].as_subclass(Odd)}, "subclass"),
        "mixed": (plain | {"value_current": plain["value_current"].detach().bfloat16()}, "differ in dtype"),
        "wide values": (
            plain | {n: torch.cat([plain[n]] * 2, -1).detach() for n in ("value_current", "value_delayed", "nothing")},
            "as wide as the keys",
        ),
        "one table entry": (plain | {n: plain[n][:, :1] for n in ("cos", "sin")}, "tables"),
        "gradient of a state": (plain | {"states": kept}, "gradient of states"),
        "wide convolution": (small(rows=1, length=3, widths=(5, 1)), "not 5 and 1"),
    }


@pytest.mark.parametrize(
    "case",
    ["float64", "subclass", "mixed", "wide values", "one table entry", "gradient of a state", "wide convolution"],
)
def test_what_is_declined_is_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, why = declined_inputs()[case]
    said: list[str] = []
    monkeypatch.setattr(selection.logger, "warning", said.append)
    monkeypatch.setattr(selection, "_said", {})
    monkeypatch.setattr(operators, "mix", None)
    for _ in range(2):
        for one, other in zip(run(**inputs), definition(**inputs), strict=True):
            torch.testing.assert_close(Tensor(one), Tensor(other), rtol=1e-5, atol=1e-5)
    assert len(said) == 1
    assert why in said[0]


def test_sizes_that_are_declined() -> None:
    for sizes, why in (
        ((8, 4, (2, 2)), "not 8"),
        ((17, 4, (2, 2)), "not 17"),
        ((258, 4, (2, 2)), "not 258"),
        ((64, 3, (2, 2)), "not 3 columns"),
        ((64, 4, (1, 5)), "not 1 and 5"),
    ):
        assert why in (op._sizes_decline(*sizes) or "")
    assert op._sizes_decline(16, 0, (4, 4)) is None


def test_the_kernels_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the other implementations is called; forward is one launch, backward five."""
    for module in (reference, op.fused):
        monkeypatch.setattr(module, "mix_queries_and_keys", None)
    monkeypatch.setattr(reference, "delayed_values", None)
    inputs = small(rows=1, length=3)
    with recording() as launches:
        results = run(**inputs)
        assert len(launches) == 1
        torch.autograd.grad(results, [t for t in inputs.values() if t.requires_grad], upstream(inputs))
    assert [launch.kernel.__name__ for launch in launches[1:]] == ["_heads", "_raw", "_weights", "_finish", "_values"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    inputs = {name: t.detach().to("cuda:1").requires_grad_(t.requires_grad) for name, t in small().items()}
    assert torch.cuda.current_device() == 0
    compare(inputs, [c.to("cuda:1") for c in upstream(inputs)])


@pytest.mark.skipif(DEVICE != "cuda", reason="real sizes need a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_real_sizes(dtype: torch.dtype) -> None:
    problem = draw(8, 2, 128, 2, 2, 2, 4096, 20, dtype)
    inputs = arguments(problem)
    generator = torch.Generator().manual_seed(21)
    cotangents = [torch.randn(2, heads, 4096, 128, generator=generator).to(DEVICE) for heads in (8, 2, 2)]

    def sized(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**kw: Any) -> Any:
            return function(**{"value_of_nothing" if n == "nothing" else n: t for n, t in kw.items()}, head_dim=128)

        return call

    def define(**kw: Any) -> Any:
        with selection.use("reference"):
            return ops.cca_mix(**kw)

    compare(inputs, cotangents, sized(ops.cca_mix), sized(define))
