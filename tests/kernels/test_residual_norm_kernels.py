"""Residual merge and RMSNorm in Triton: results and gradients against the definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPE_IDS,
    DTYPES,
    assert_near,
    gradients,
    in_float64,
    layouts,
    memory_full_of_nan,
)
from torch import Tensor
from torch.library import opcheck

from zaya_hf import ops
from zaya_hf.ops import selection
from zaya_hf.ops.common.triton import recording
from zaya_hf.ops.residual_norm import configs, op, operators, reference

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

EPS = 1e-5
Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def _triton() -> Any:
    with selection.use("triton"), memory_full_of_nan():
        yield


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, around: float = 0.0) -> Tensor:
    values = around + torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, dtype).requires_grad_()


def problem(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    stream: torch.dtype = torch.float32,
    residual: bool = True,
) -> Inputs:
    """All arguments of `residual_merge_norm` that may learn."""
    width = shape[-1]
    names = ("output_scale", "output_bias", "residual_scale", "residual_bias", "weight")
    inputs: Inputs = {"output": draw(*shape, seed=1, dtype=dtype)}
    inputs["residual"] = draw(*shape, seed=2, dtype=stream) if residual else None
    for index, name in enumerate(names):
        inputs[name] = draw(width, seed=3 + index, dtype=dtype, around=1 - index % 2)
        if not residual and name.startswith("residual"):
            inputs[name] = None
    return inputs


def upstream(shape: tuple[int, ...], count: int = 2) -> list[Tensor]:
    return [draw(*shape, seed=20 + index, dtype=torch.float64).detach() for index in range(count)]


def merge_norm(stream: torch.dtype = torch.float32, **inputs: Any) -> tuple[Tensor, Tensor]:
    return ops.residual_merge_norm(**inputs, eps=EPS, stream_dtype=stream)


def definition(**inputs: Any) -> tuple[Tensor, Tensor]:
    return reference.residual_merge_norm(**inputs, eps=EPS)


def check(
    run: Callable[..., Any], define: Callable[..., Any], inputs: Inputs, cotangents: list[Tensor], tolerance: Any = None
) -> None:
    """Results and all gradients of `run`, whose kernels have to have run."""
    assert all(t.dtype in DTYPES for t in inputs.values() if t is not None)
    got, got_gradients = gradients(run, inputs, cotangents)
    rounded = [t.to(result.dtype) for t, result in zip(cotangents, got, strict=True)]
    want, want_gradients = gradients(define, in_float64(inputs), rounded)
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_near(one, other, f"result {index}", tolerance)
    for name, gradient in got_gradients.items():
        expected = want_gradients[name]
        assert gradient is not None, name
        assert expected is not None, name
        assert gradient.dtype == inputs[name].dtype, name
        assert_near(gradient, expected, f"gradient of {name}", tolerance)


# ------------------------------------------------------------------------------------- against the definition
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32-stream", "narrow-stream"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "embedding"])
def test_merge_and_norm(dtype: torch.dtype, narrow: bool, residual: bool) -> None:
    stream = dtype if narrow else torch.float32
    inputs = problem((2, 7, 96), dtype, stream, residual)
    got = merge_norm(stream, **inputs)
    assert [t.dtype for t in got] == [stream, dtype]
    check(lambda **kw: merge_norm(stream, **kw), definition, inputs, upstream((2, 7, 96)))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "embedding"])
def test_merge_alone(dtype: torch.dtype, residual: bool) -> None:
    inputs = problem((3, 5, 80), dtype, residual=residual)
    del inputs["weight"]
    assert ops.residual_merge(**inputs).dtype == torch.float32
    check(ops.residual_merge, reference.residual_merge, inputs, upstream((3, 5, 80), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("stream", [torch.float32, None], ids=["fp32-stream", "narrow-stream"])
def test_norm_alone(dtype: torch.dtype, stream: torch.dtype | None) -> None:
    shape = (2, 9, 256)
    inputs = {"x": draw(*shape, seed=1, dtype=stream or dtype), "weight": draw(256, seed=2, dtype=dtype, around=1)}
    assert ops.rms_norm(**inputs, eps=EPS).dtype == dtype
    assert ops.rms_norm(**inputs, eps=EPS, dtype=torch.float32).dtype == torch.float32
    check(
        lambda **kw: ops.rms_norm(**kw, eps=EPS),
        lambda **kw: reference.rms_norm(**kw, eps=EPS),
        inputs,
        upstream(shape, 1),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_rounded_stream_is_what_is_normed(dtype: torch.dtype) -> None:
    """In both passes. fp32 vectors keep results and gradients in fp32, where an unrounded stream would show."""
    inputs, cotangents = problem((6, 64), torch.float32), upstream((6, 64))
    (stream, normed), found = gradients(lambda **kw: merge_norm(dtype, **kw), inputs, cotangents)
    assert stream.dtype == dtype
    leaf, weight = stream.detach().double(), inputs["weight"].detach().double()
    expected = reference.rms_norm(leaf, weight, EPS)
    assert_near(normed, expected)
    assert_near(found["weight"], (cotangents[1] * expected / weight).sum(0))
    unrounded = reference.residual_merge_norm(**in_float64(inputs), eps=EPS)[1]
    assert (unrounded - expected).norm() > 1e-4 * expected.norm()  # it does show


@pytest.mark.parametrize("width", [1, 2, 31, 257, 2050])
def test_widths_that_fill_no_block(width: int) -> None:
    check(merge_norm, definition, problem((3, width)), upstream((3, width)))


def test_an_fp16_stream_beyond_fp16() -> None:
    """The stream in fp32 may exceed fp16; the norm does not overflow on it."""
    ones, zeros = (
        torch.ones(64, dtype=torch.float16, device=DEVICE),
        torch.zeros(64, dtype=torch.float16, device=DEVICE),
    )
    output = torch.full((2, 64), 6e4, dtype=torch.float16, device=DEVICE)
    stream, normed = ops.residual_merge_norm(output, output.float() * 1e4, ones, zeros, ones, zeros, ones, EPS)
    torch.testing.assert_close(stream, output.float() * 10001)
    torch.testing.assert_close(normed, torch.ones_like(output))


def test_fresh_vectors_are_a_plain_residual() -> None:
    inputs = problem((4, 33))
    ones, zeros = torch.ones(33, device=DEVICE), torch.zeros(33, device=DEVICE)
    merged = ops.residual_merge(inputs["output"], inputs["residual"], ones, zeros, ones, zeros)
    assert torch.equal(merged, inputs["output"] + inputs["residual"])


# ---------------------------------------------------------------------------------- configurations and programs
def _all_configs() -> list[tuple[Any, Any, Any]]:
    return [*zip(configs.FORWARD, configs.BACKWARD, itertools.cycle(configs.REDUCTION), strict=False)]


@pytest.mark.parametrize("chosen", _all_configs(), ids=lambda chosen: str(chosen[0]))
def test_every_configuration_twice(chosen: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that each has several rows; a second run gives the same bits."""
    forward, backward, reduction = chosen
    monkeypatch.setattr(configs, "choose_forward", lambda width: forward)
    monkeypatch.setattr(configs, "choose_backward", lambda width: backward)
    monkeypatch.setattr(configs, "choose_reduction", lambda: reduction)
    monkeypatch.setattr(configs, "UNITS", 1)
    shape = (70 if forward["BLOCK_R"] > 1 else 7, 96)
    inputs, cotangents = problem(shape), upstream(shape)
    check(merge_norm, definition, inputs, cotangents)
    runs = [gradients(merge_norm, inputs, cotangents) for _ in range(2)]
    for one, other in zip(*[[*results, *found.values()] for results, found in runs], strict=True):
        assert torch.equal(one, other)


def test_every_row_belongs_to_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows, also a single one, and more programs' sums than the second kernel takes at once."""
    for rows in (1, 8, 9):
        check(merge_norm, definition, problem((rows, 16)), upstream((rows, 16)))
    monkeypatch.setattr(configs, "choose_backward", lambda width: configs.BACKWARD[1])
    check(merge_norm, definition, problem((70, 40)), upstream((70, 40)))


def test_sizes_decide_and_nothing_else() -> None:
    for width in (1, 256, 257, 2048, 2049, 4096, configs.MOST_COLUMNS):
        for chosen in (configs.choose_forward(width), configs.choose_backward(width)):
            assert chosen["BLOCK_D"] >= width
            assert chosen.num_warps * 64 <= 1024
    for chosen in configs.BACKWARD:
        for rows in (0, 1, 100, 4096, 16384, 10**6):
            programs = configs.backward_programs(rows, chosen)
            assert programs <= 2 * configs.UNITS
            assert programs * chosen["BLOCK_R"] <= max(rows + chosen["BLOCK_R"] - 1, 0)


# ---------------------------------------------------------------------------------------- what may be asked for
@pytest.mark.parametrize("result", [0, 1], ids=["stream", "normed"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "embedding"])
def test_a_gradient_that_does_not_arrive(result: int, residual: bool) -> None:
    """Of the other result: the weight of a norm that nobody used has none."""
    inputs, cotangents = problem((5, 24), residual=residual), upstream((5, 24))
    _, got = gradients(lambda **kw: merge_norm(**kw)[result], inputs, cotangents[:1])
    _, want = gradients(lambda **kw: definition(**kw)[result], in_float64(inputs), cotangents[:1])
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None
        else:
            assert_near(got[name], gradient, name)


LEARNERS = ("output", "residual", "output_scale", "output_bias", "residual_scale", "residual_bias", "weight")


@pytest.mark.parametrize(
    "learns",
    [
        *[(name,) for name in LEARNERS],
        ("output", "residual"),
        ("output", "output_scale", "weight"),
        ("residual", "residual_scale"),
        ("output_bias", "residual_bias"),
    ],
    ids="+".join,
)
def test_frozen_inputs(learns: tuple[str, ...]) -> None:
    inputs = {
        name: t.detach().requires_grad_(name in learns) if t is not None else None
        for name, t in problem((2, 3, 40)).items()
    }
    check(merge_norm, definition, inputs, upstream((2, 3, 40)))
    inputs.pop("weight")
    if learns != ("weight",):
        check(ops.residual_merge, reference.residual_merge, inputs, upstream((2, 3, 40), 1))


def saved_bytes(run: Callable[[], Any]) -> int:
    """Of different memory that the graph keeps."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


def test_what_is_saved() -> None:
    """Learning scales: both summands and a factor for each row. Frozen ones: the stream and the factors."""
    rows, width = 50, 64
    inputs = problem((rows, width), torch.bfloat16)
    vectors = 5 * width * 2
    assert saved_bytes(lambda: merge_norm(**inputs)) == rows * (width * (2 + 4) + 4) + vectors
    frozen = {name: t.detach().requires_grad_(t.ndim > 1) for name, t in inputs.items()}
    assert saved_bytes(lambda: merge_norm(**frozen)) == rows * (width * 4 + 4) + vectors
    with torch.no_grad():
        assert saved_bytes(lambda: merge_norm(**inputs)) == 0


def test_zero_rows() -> None:
    for shape in ((0, 5, 16), (2, 0, 16)):
        inputs = problem(shape)
        results, found = gradients(merge_norm, inputs, upstream(shape))
        assert all(t.shape == shape for t in results)
        for name, gradient in found.items():
            assert gradient.shape == inputs[name].shape
            assert not gradient.any()


# ----------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", ["output", "residual", "output_scale", "residual_bias", "weight"])
def test_layouts_of_inputs(name: str) -> None:
    inputs, cotangents = problem((2, 6, 12)), upstream((2, 6, 12))
    for laid_out in layouts(inputs[name]).values():
        check(merge_norm, definition, inputs | {name: laid_out}, cotangents)
    x = inputs[name]
    expanded = x.detach()[..., :1].expand(x.shape).requires_grad_()
    check(merge_norm, definition, inputs | {name: expanded}, cotangents)


@pytest.mark.parametrize("result", [0, 1], ids=["stream", "normed"])
def test_layouts_of_upstream_gradients(result: int) -> None:
    inputs, cotangents = problem((2, 6, 12)), upstream((2, 6, 12))
    cotangents = [t.float() for t in cotangents]
    for laid_out in layouts(cotangents[result]).values():
        given = [laid_out if index == result else t for index, t in enumerate(cotangents)]
        check(merge_norm, definition, inputs, given)
    _, got = gradients(lambda **kw: (merge_norm(**kw)[result].sum(),), inputs, [torch.ones((), device=DEVICE)])
    _, want = gradients(
        lambda **kw: (definition(**kw)[result].sum(),), in_float64(inputs), [torch.ones((), device=DEVICE)]
    )
    for name, gradient in want.items():
        if gradient is not None:
            assert_near(got[name], gradient, name)


@pytest.mark.parametrize("name", ["output", "residual"])
def test_rows_further_apart_than_int32(name: str) -> None:
    """The last of three starts at element 2^31 + 2^21 of memory of which little else is ever touched; the stride itself
    fits into int32, so its product with the row is what must not overflow."""
    stride = 2**30 + 2**20
    try:
        memory = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).new_zeros(1).untyped_storage()
        memory.resize_(2 * (2 * stride + 64))
    except RuntimeError:
        pytest.skip("no room for four gigabytes of addresses")
    far = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(memory, 0, (3, 32), (stride, 1))
    inputs = problem((3, 32), torch.bfloat16, torch.bfloat16)
    far.copy_(inputs[name].detach())
    check(merge_norm, definition, inputs | {name: far.requires_grad_()}, upstream((3, 32)))


def test_inputs_stay_as_they_are() -> None:
    inputs, cotangents = problem((4, 24)), upstream((4, 24))
    before = {name: t.detach().clone() for name, t in inputs.items()}
    gradients(merge_norm, inputs, cotangents)
    assert all(torch.equal(before[name], t) for name, t in inputs.items())


# ------------------------------------------------------------------------------------------- torch's machinery
def test_operators_keep_torchs_rules() -> None:
    inputs = problem((2, 7, 96), torch.bfloat16)
    output, residual, *vectors, weight = inputs.values()
    opcheck(operators.merge_norm, (output, residual, *vectors, weight, EPS, torch.float32, torch.bfloat16))
    opcheck(operators.merge_norm, (output, None, *vectors[:2], None, None, weight, EPS, torch.bfloat16, torch.float32))
    opcheck(operators.merge, (output, residual, *vectors))
    opcheck(operators.norm, (residual, weight, EPS, torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic: bool) -> None:
    def layer(**kw: Any) -> tuple[Tensor, Tensor]:
        weight = kw["weight"]
        stream, normed = ops.residual_merge_norm(**kw, eps=EPS)
        merged = ops.residual_merge(ops.rms_norm(normed.sin(), weight, EPS), stream, weight, weight, weight, weight)
        return merged, normed

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        inputs, cotangents = problem((2, rows, 48)), upstream((2, rows, 48))
        got, got_gradients = gradients(compiled, inputs, cotangents)
        want, want_gradients = gradients(layer, inputs, cotangents)
        for one, other in zip([*got, *got_gradients.values()], [*want, *want_gradients.values()], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def test_autocast_changes_nothing() -> None:
    """fp32 parameters beside bf16 activations: the norm's result has the weight's dtype, as without autocast."""
    inputs, cotangents = problem((3, 32)), upstream((3, 32))
    inputs["output"] = inputs["output"].detach().bfloat16().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        stream, normed = merge_norm(**inputs)
        assert stream.dtype == normed.dtype == torch.float32
        got, got_gradients = gradients(merge_norm, inputs, cotangents)
    want, want_gradients = gradients(definition, in_float64(inputs), cotangents)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other)
    for name, gradient in got_gradients.items():
        assert gradient.dtype == inputs[name].dtype
        assert_near(gradient, want_gradients[name], name)


@pytest.mark.parametrize(
    "learns", [LEARNERS, ("output", "residual"), ("output_scale", "weight")], ids=["all", "x", "s"]
)
def test_gradients_of_gradients(learns: tuple[str, ...]) -> None:
    def second(run: Callable[..., Any], inputs: Inputs) -> list[Tensor | None]:
        leaves = [inputs[name] for name in learns]
        results = run(**inputs)
        first = torch.autograd.grad([r.sin().sum() for r in results], leaves, create_graph=True)
        return list(torch.autograd.grad([g.square().sum() for g in first], leaves))

    inputs = {name: t.detach().requires_grad_(name in learns) for name, t in problem((2, 3, 20)).items()}
    for one, other in zip(second(merge_norm, inputs), second(definition, in_float64(inputs)), strict=True):
        assert_near(one, other)


def test_gradients_of_gradients_of_parts() -> None:
    inputs = {name: t.detach().double() for name, t in problem((2, 10)).items()}
    single = {name: t.float().requires_grad_() for name, t in inputs.items()}
    for run, define, names in (
        (ops.residual_merge, reference.residual_merge, LEARNERS[:-1]),
        (lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: reference.rms_norm(x, w, EPS), ("output", "weight")),
    ):
        found = []
        for function, values in ((run, single), (define, in_float64(single))):
            leaves = [values[name] for name in names]
            first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        for name, one, other in zip(names, *found, strict=True):
            assert_near(one, other, name)


# ------------------------------------------------------------------------------------------------- declined
class Odd(Tensor):
    """A subclass of its own."""


def declined_inputs() -> dict[str, tuple[Inputs, str]]:
    plain = problem((2, 8))
    wide = configs.MOST_COLUMNS + 1
    return {
        "float64": (problem((2, 8), torch.float64, torch.float64), "not torch.float64"),
        "subclass": (plain | {"output": plain["output"].detach().as_subclass(Odd)}, "subclass"),
        "broadcast": (plain | {"residual": draw(8, seed=9)}, "differ in shape"),
        "short vector": (plain | {"output_bias": draw(1, seed=9)}, "not as wide"),
        "too wide": (problem((1, wide)), f"not of {wide}"),
    }


@pytest.mark.parametrize("case", ["float64", "subclass", "broadcast", "short vector", "too wide"])
def test_what_is_declined_is_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, why = declined_inputs()[case]
    said = []
    monkeypatch.setattr(selection.logger, "warning", said.append)
    monkeypatch.setattr(selection, "_said", {})
    for _ in range(2):
        got = merge_norm(inputs["output"].dtype if case == "float64" else torch.float32, **inputs)
    assert len(said) == 1
    assert why in said[0]
    for one, other in zip(got, definition(**in_float64(inputs)), strict=True):
        assert_near(torch.Tensor(one) if case == "subclass" else one.float(), other)


def test_the_kernels_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the other implementations is called, and each call is one launch."""
    for module in (reference, op.fused):
        for name in ("residual_merge", "rms_norm", "residual_merge_norm"):
            monkeypatch.setattr(module, name, None)
    inputs = {name: t.detach() for name, t in problem((2, 8)).items()}
    merged = {name: t for name, t in inputs.items() if name != "weight"}
    for run in (
        lambda: merge_norm(**inputs),
        lambda: ops.residual_merge(**merged),
        lambda: ops.rms_norm(inputs["output"], inputs["weight"], EPS),
    ):
        with recording() as launches:
            run()
        assert len(launches) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one() -> None:
    inputs = {name: t.detach().to("cuda:1").requires_grad_() for name, t in problem((5, 96)).items()}
    assert torch.cuda.current_device() == 0
    check(merge_norm, definition, inputs, [t.to("cuda:1") for t in upstream((5, 96))])


@pytest.mark.skipif(DEVICE != "cuda", reason="real sizes need a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_real_sizes(dtype: torch.dtype) -> None:
    check(merge_norm, definition, problem((4096, 2048), dtype), upstream((4096, 2048)))


def test_what_reports_say() -> None:
    sizes = {"vocab_size": 64, "heads": 2, "groups": 1, "head_dim": 16, "widths": (2, 2), "num_experts": 4}
    sizes |= {"intermediate": 32, "activation": "silu", "router_width": 32}
    device = torch.device(DEVICE)

    def said(dtype: torch.dtype = torch.bfloat16, hidden_size: int = 64) -> tuple[str, str]:
        facts = ops.Facts(device=device, dtype=dtype, hidden_size=hidden_size, **sizes)
        return op.backend(device, facts)

    assert said()[0] == op.backend(device)[0] == "triton"
    for backend, why in (said(torch.float64), said(hidden_size=configs.MOST_COLUMNS + 1)):
        assert backend == "fused"
        assert "not triton, since they take" in why
