"""The loss without the logits, its rows by Triton's kernel: values, every gradient, layouts, graphs and limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPE_IDS,
    DTYPES,
    TOLERANCES,
    assert_near,
    gradients,
    in_float64,
    layouts,
    memory_full_of_nan,
)
from torch import Tensor

from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.ops import selection
from zaya_hf.ops.common.triton import recording
from zaya_hf.ops.linear_cross_entropy import chunked, configs, reference, rows
from zaya_hf.ops.linear_cross_entropy.workloads import WORDS, workloads
from zaya_hf.testing import random_ids, redraw, tiny_config

kernels = pytest.importorskip("zaya_hf.ops.linear_cross_entropy.triton")
pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

IGNORED = -100
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 3.0},
    "both": {"z_loss": 0.05, "softcap": 3.0},
}


@pytest.fixture(autouse=True)
def _kernels_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selection, "_said", {})
    with selection.use("auto", linear_cross_entropy="triton"):
        yield


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the targets, as on a GPU."""
    monkeypatch.setattr(chunked, "LOOKED_AT", ())


def split(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Chunks of so many rows."""
    monkeypatch.setattr(chunked, "_chunk_size", lambda *_: number)


def draw(
    dtype: torch.dtype, number: int = 9, words: int = 131, width: int = 16, bias: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        "hidden": torch.randn(number, width, generator=generator),
        "weight": torch.randn(words, width, generator=generator) * 0.5,
    }
    if bias:
        found["bias"] = torch.randn(words, generator=generator)
    targets = torch.randint(0, words, (number,), generator=generator)
    targets[torch.rand(number, generator=generator) < 0.3] = IGNORED
    return {n: t.to(DEVICE, dtype).requires_grad_() for n, t in found.items()} | {"targets": targets.to(DEVICE)}


def loss(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return ops.linear_cross_entropy(hidden, weight, bias, targets, **options)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return reference.linear_cross_entropy(hidden, weight, bias, targets, **options)


def assert_as_exact(inputs: dict[str, Tensor], options: dict[str, Any], function: Callable[..., Tensor] = loss) -> None:
    """Loss and gradients against the reference in float64, from the same numbers."""
    upstream = [torch.tensor(0.7, device=DEVICE, dtype=torch.float64)]
    with memory_full_of_nan():
        (got,), found = gradients(lambda **given: function(**given, **options), inputs, upstream)
    (want,), wanted = gradients(lambda **given: exact(**given, **options), in_float64(inputs), upstream)
    assert got.dtype == torch.float32
    assert_near(got, want, "loss", TOLERANCES[inputs["hidden"].dtype])
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient is not None
        assert wanted[name] is not None
        assert gradient.dtype == inputs[name].dtype
        assert gradient.is_contiguous()
        assert_near(gradient, wanted[name], name)
    if "hidden" in found:
        assert not found["hidden"][inputs["targets"] == options.get("ignore_index", IGNORED)].any()


# ------------------------------------------------------------------------------------------------ values and gradients
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_loss_and_gradients(dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 4)
    divisor = torch.tensor(6.0, device=DEVICE)
    assert_as_exact(draw(dtype), {**options, "divisor": divisor})
    monkeypatch.setattr(chunked, "LOOKED_AT", ())
    assert_as_exact(draw(dtype), options)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_random_problems(dtype: torch.dtype, test_seed: int, fuzzing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(test_seed, test_seed + (100 if fuzzing else 6)):
        pick = random.Random(seed)
        split(monkeypatch, pick.choice([3, 5, 64]))
        words = pick.choice([1, 2, 5, 64, 131, 4096, 5000])
        inputs = draw(dtype, pick.choice([1, 2, 7, 16]), words, pick.choice([1, 3, 32]), pick.random() < 0.5, seed)
        options: dict[str, Any] = dict(pick.choice(list(OPTIONS.values())))
        options["wide_logits"] = pick.random() < 0.3
        if words > 1 and pick.random() < 0.3:
            options["ignore_index"] = int(inputs["targets"][0].clamp_min(0))
            inputs["targets"] = inputs["targets"].clamp_min(0)
        if words == 1 and options.get("z_loss") is None:
            continue  # every gradient is 0, and of what is 0 no share can be wrong
        assert_as_exact(inputs, options)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=[*DTYPE_IDS, "wide"])
@pytest.mark.parametrize("chosen", configs.ROWS, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["both"]], ids=["plain", "both"])
def test_rows_of_every_configuration(dtype: torch.dtype, chosen: Any, options: dict[str, Any]) -> None:
    """In place, and twice: a second run from the same logits gives the same bits."""
    words = 2 * chosen["BLOCK"] + 37
    logits = torch.randn(3, words, device=DEVICE).mul_(4).to(dtype)
    targets = torch.tensor([words - 1, IGNORED, 5], device=DEVICE)
    counted, scale = targets != IGNORED, torch.tensor(0.25, device=DEVICE)
    want, losses = logits.double(), torch.empty(3, dtype=torch.float64, device=DEVICE)
    rows.differentiate(want, targets.clamp_min(0), counted, losses, 0.25, **options)
    found = []
    for _ in range(2):
        wider = torch.full((3, words + 3), torch.nan, device=DEVICE, dtype=dtype)  # rows that are further apart
        got, mine = wider[:, :words].copy_(logits), torch.full((3,), torch.nan, device=DEVICE)
        kernels.differentiate(got, targets, mine, scale, IGNORED, **options, chosen=chosen)
        assert wider[:, words:].isnan().all()
        found.append((mine, got))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    assert_near(found[0][0], losses, "losses", 1e-5)
    assert_near(found[0][1], want, "gradients")
    assert not found[0][1][1].any()


def test_without_gradients_the_logits_stay() -> None:
    logits, losses = torch.randn(3, 70, device=DEVICE), torch.full((3,), torch.nan, device=DEVICE)
    before, targets = logits.clone(), torch.tensor([1, 2, IGNORED], device=DEVICE)
    kernels.differentiate(logits, targets, losses, None, IGNORED)
    assert torch.equal(logits, before)
    want = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("chosen", configs.ADD, ids=str)
def test_adding_keeps_what_rounding_took(dtype: torch.dtype, chosen: Any) -> None:
    parts = torch.randn(20, 5, 1001, device=DEVICE).to(dtype)
    found = []
    for _ in range(2):
        total, rest = parts[0].clone(), torch.zeros(5, 1001, device=DEVICE, dtype=dtype)
        for part in parts[1:]:
            kernels.add(total, rest, part, chosen)
        found.append((total, rest))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    total, rest = found[0]
    want = parts.double().sum(0)
    assert (rest.double().abs() <= total.double().abs() * torch.finfo(dtype).eps / 2).all()  # half a digit at most
    assert_near(total.double() + rest.double(), want, "both", 20 * torch.finfo(dtype).eps ** 2)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_many_chunks_are_as_exact_as_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(dtype, 80, 50, 8, bias=False)
    upstream = [torch.tensor(1.0, device=DEVICE)]
    _, want = gradients(exact, in_float64(inputs), upstream)
    errors = []
    for number in (80, 2):
        split(monkeypatch, number)
        _, found = gradients(loss, inputs, upstream)
        assert found["weight"] is not None
        assert want["weight"] is not None
        errors.append(float((found["weight"].double() - want["weight"]).norm()))
    assert errors[1] <= 2 * errors[0]  # added up in bf16 it would be several times that


@pytest.mark.parametrize("cap", [0.1, 1.0, 30.0, 1e4])
def test_caps_of_every_size(cap: float) -> None:
    inputs = draw(torch.float32)
    assert_as_exact(inputs, {"softcap": cap})


def test_two_runs_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 2)
    inputs = draw(torch.bfloat16)
    runs = [gradients(loss, inputs, [torch.tensor(1.0, device=DEVICE)]) for _ in range(2)]
    assert torch.equal(runs[0][0][0], runs[1][0][0])
    for name, gradient in runs[0][1].items():
        assert torch.equal(gradient, runs[1][1][name]), name


# --------------------------------------------------------------------------------------------------------- odd numbers
def run_rows(logits: list[list[float]], targets: list[int]) -> tuple[Tensor, Tensor]:
    values, losses = torch.tensor(logits, device=DEVICE), torch.empty(len(targets), device=DEVICE)
    scale = torch.ones((), device=DEVICE)
    kernels.differentiate(values, torch.tensor(targets, device=DEVICE), losses, scale, IGNORED)
    return losses.cpu(), values.cpu()


def test_words_that_are_impossible() -> None:
    inf = float("inf")
    losses, slopes = run_rows([[0.0, -inf, 0.0], [-inf, 500.0, 0.0], [3e38, -3e38, 0.0]], [0, 2, 0])
    torch.testing.assert_close(losses, torch.tensor([2.0, torch.e**500, 1.0]).log().where(losses != 500, 500))
    assert losses[1] == 500  # its share is 0 in fp32; its loss is a difference of logits
    torch.testing.assert_close(slopes, torch.tensor([[-0.5, 0.0, 0.5], [0.0, 1.0, -1.0], [0.0, 0.0, 0.0]]))


def test_logits_without_a_softmax_make_nan() -> None:
    inf, nan = float("inf"), float("nan")
    for row in ([inf, 0.0], [nan, 0.0], [0.0, nan], [-inf, -inf]):
        losses, slopes = run_rows([row, [0.0, 0.0]], [1, 0])
        assert losses[0].isnan()
        assert slopes[0].isnan().any()
        assert losses[1] == torch.tensor(2.0).log()


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("target", [-1, 131, 2**40])
def test_a_target_that_is_no_word(target: int) -> None:
    """Nothing outside the row is read, and the fault cannot be overlooked."""
    inputs = draw(torch.float32)
    inputs["targets"][3] = target
    (got,), found = gradients(loss, inputs, [torch.tensor(1.0, device=DEVICE)])
    assert got.isnan()
    assert found["hidden"] is not None
    assert found["hidden"][3].isnan().all()
    assert found["hidden"][:3].isfinite().all()


def test_offsets_past_31_bits() -> None:
    """Rows far apart, in memory of which only a few pages are touched."""
    far = 2**30 + 64
    memory = torch.empty(2 * far + 600, dtype=torch.bfloat16, device=DEVICE)
    logits = memory.as_strided((3, 600), (far, 1))
    values = torch.randn(3, 600, device=DEVICE).bfloat16()
    logits.copy_(values)
    targets, losses = torch.tensor([1, 2, 599], device=DEVICE), torch.empty(3, device=DEVICE)
    kernels.differentiate(logits, targets, losses, torch.ones((), device=DEVICE), IGNORED)
    want, exact_losses = values.double(), torch.empty(3, dtype=torch.float64, device=DEVICE)
    rows.differentiate(want, targets, None, exact_losses, 1.0)
    assert_near(losses, exact_losses)
    assert_near(logits, want)


# ------------------------------------------------------------------------------------------------- layouts and subsets
@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_layouts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 4)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(dtype)
        for how, tensor in layouts(inputs[name]).items():
            with memory_full_of_nan():
                (got,), found = gradients(loss, {**inputs, name: tensor}, [torch.tensor(1.0, device=DEVICE)])
            (want,), wanted = gradients(exact, in_float64(inputs), [torch.tensor(1.0, device=DEVICE)])
            assert_near(got, want, how, TOLERANCES[dtype])
            for key, gradient in found.items():
                assert gradient is not None
                assert wanted[key] is not None
                assert_near(gradient, wanted[key], f"{how}: {key}")


@pytest.mark.usefixtures("unseen")
def test_targets_and_upstream_gradients_of_other_strides() -> None:
    inputs = draw(torch.float32)
    want = loss(**inputs)
    spread = torch.stack([inputs["targets"], inputs["targets"] * 0], 1)[:, 0]
    assert not spread.is_contiguous()
    torch.testing.assert_close(loss(**{**inputs, "targets": spread}), want)
    same = inputs["targets"][:1].clamp_min(0).expand(9)
    torch.testing.assert_close(
        loss(**{**inputs, "targets": same}), exact(**{**inputs, "targets": same}), rtol=1e-5, atol=0
    )
    (one,) = torch.autograd.grad(want, inputs["weight"])
    (three,) = torch.autograd.grad(loss(**inputs).expand(3).sum(), inputs["weight"])
    torch.testing.assert_close(three, 3 * one)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")])
def test_only_some_gradients_are_wanted(frozen: tuple[str, ...]) -> None:
    inputs = draw(torch.float32)
    for name in frozen:
        inputs[name].requires_grad_(False)
    assert_as_exact(inputs, {})


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("number", [0, 3])
def test_no_rows_and_no_targets(number: int, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LOOKED_AT", ("cpu",) if seen else ())
    inputs = draw(torch.bfloat16, number)
    inputs["targets"].fill_(IGNORED)
    with memory_full_of_nan():
        (got,), found = gradients(loss, inputs, [torch.tensor(1.0, device=DEVICE)])
    assert got == 0
    for name, gradient in found.items():
        assert gradient is not None
        assert gradient.shape == inputs[name].shape
        assert not gradient.any()


# ----------------------------------------------------------------------------------------- graphs, autocast, operators
def arguments(dtype: torch.dtype, bias: bool, **options: Any) -> tuple[Any, ...]:
    inputs = draw(dtype, bias=bias)
    wanted = [dtype != torch.float16] * 2 + [dtype != torch.float16 and bias]
    beside = (dtype, IGNORED, options.get("z_loss", 0.0), options.get("softcap"), wanted)
    divisor = torch.tensor(5.0, device=DEVICE)
    return (inputs["hidden"], inputs["weight"], inputs.get("bias"), inputs["targets"], divisor, *beside)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_operators_keep_torchs_rules(dtype: torch.dtype, bias: bool) -> None:
    given = arguments(dtype, bias, **OPTIONS["both"])
    torch.library.opcheck(torch.ops.zaya_hf.linear_cross_entropy.default, given)
    grad = torch.tensor(0.5, device=DEVICE)
    values = [value.detach() if isinstance(value, Tensor) else value for value in given[:-1]]
    backward = torch.ops.zaya_hf.linear_cross_entropy_backward.default
    torch.library.opcheck(backward, (grad, *values, [True, False, bias]))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["both"]], ids=["plain", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_in_a_compiled_graph(dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 4)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_as_exact(draw(dtype), options, compiled)
    with torch.no_grad():
        inputs = draw(dtype, seed=3)
        torch.testing.assert_close(compiled(**inputs, **options), loss(**inputs, **options))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(narrow: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 4)
    torch.compiler.reset()
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    inputs = draw(torch.float32)
    upstream = [torch.tensor(1.0, device=DEVICE)]
    with torch.autocast(DEVICE, narrow):
        (got,), found = gradients(function, inputs, upstream)
    (want,), wanted = gradients(exact, in_float64(inputs), upstream)
    assert got.dtype == torch.float32
    assert_near(got, want, "loss", 1e-2)
    for name, gradient in found.items():
        assert gradient is not None
        assert wanted[name] is not None
        assert gradient.dtype == torch.float32
        assert_near(gradient, wanted[name], name, 1e-2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivatives(options: dict[str, Any]) -> None:
    inputs = draw(torch.float32, 4, 7, 3)
    leaves = [inputs[name] for name in ("hidden", "weight", "bias")]
    found = []
    for kind in ("eager", "operator", "exact"):
        if kind == "operator":
            beside = (None, *arguments(torch.float32, bias=True, **options)[5:])
            total = torch.ops.zaya_hf.linear_cross_entropy(*leaves, inputs["targets"], *beside)[0]
        else:
            total = (loss if kind == "eager" else exact)(**inputs, **options)
        first = torch.autograd.grad(total, leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        found.append([*first, *torch.autograd.grad(penalty, leaves)])
    for eager, operator, want in zip(*found, strict=True):
        torch.testing.assert_close(eager, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(operator, want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- what declines
def test_what_the_kernels_do_not_take(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    real = kernels.differentiate
    monkeypatch.setattr(kernels, "differentiate", lambda *a, **k: launched.append(a) or real(*a, **k))
    inputs = draw(torch.float32)
    want = loss(**inputs)
    assert launched
    launched.clear()
    wide = in_float64(inputs)
    for _ in range(2):
        assert_near(loss(**wide), want, tolerance=1e-5)
    hidden = inputs["hidden"].detach()
    torch.func.grad(lambda h: loss(**{**inputs, "hidden": h}))(hidden)
    meta = {name: tensor.detach().to("meta") for name, tensor in inputs.items()}
    assert loss(**meta).shape == ()
    assert not launched
    said = selection.said("linear_cross_entropy")
    assert len(said) == len(set(said)) == 3
    assert "float64" in said[0]


def test_what_is_reported() -> None:
    assert ops.backends(DEVICE)["linear_cross_entropy"][0] == "triton"
    facts = ops.Facts(torch.device(DEVICE), torch.float64, 8, 9, 2, 1, 4, (2, 2), 2, 8, "silu", 4)
    name, why = ops.backends(DEVICE, facts)["linear_cross_entropy"]
    assert name == "chunked"
    assert "float64" in why


# --------------------------------------------------------------------------------------------------- model, real sizes
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_training_step(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 7)
    config = tiny_config(tie_word_embeddings=tied, lm_head_bias=not tied, num_hidden_layers=1)
    model = redraw(ZayaForCausalLM(config)).train().to(DEVICE)
    ids = random_ids(2, 12).to(DEVICE)
    found = []
    for how in ("triton", "reference"):
        model.zero_grad()
        with selection.use("auto", linear_cross_entropy=how):
            output = model(ids, labels=ids, z_loss=1e-2, logit_softcap=20.0, num_items_in_batch=30)
            output.loss.backward()
        assert output.logits is None
        found.append({name: p.grad for name, p in model.named_parameters()} | {"loss": output.loss.detach()})
    for name, gradient in found[0].items():
        assert_near(gradient, found[1][name], name, 2e-5)


def test_every_configuration_is_in_the_workloads() -> None:
    for dtype in DTYPES:
        for workload in workloads(dtype):
            for chosen in workload.configs:
                with recording() as launches:
                    workload.launch(chosen)
                (launch,) = launches
                assert launch.config == chosen
                assert workload.bytes > 0
    used = {chosen for dtype in DTYPES for workload in workloads(dtype) for chosen in workload.configs}
    assert used == {*configs.ROWS, *configs.ADD}


@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes take a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_real_sizes(dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(4000, 2048, generator=generator, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, 2048, generator=generator, device=DEVICE) * 0.03).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (4000,), generator=generator, device=DEVICE)
    found = []
    for how in ("triton", "reference"):
        with selection.use("auto", linear_cross_entropy=how):
            total = ops.linear_cross_entropy(hidden, weight, None, targets, z_loss=1e-4, wide_logits=how == "reference")
        found.append((total.detach(), *torch.autograd.grad(total, (hidden, weight))))
    for got, want in zip(*found, strict=True):
        assert_near(got, want, tolerance=TOLERANCES[dtype])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_runs_it() -> None:
    inputs = draw(torch.bfloat16)
    want = loss(**inputs)
    other = {name: tensor.detach().to("cuda:1").requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()}
    got = loss(**other)
    got.backward()
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), want.cpu())
