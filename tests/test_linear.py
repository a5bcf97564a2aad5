"""`ops.linear`: the same product by every way, its gradients, and when which way is taken."""

from __future__ import annotations

import copy
import pickle
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zaya_hf import ops
from zaya_hf.ops import selection
from zaya_hf.ops.linear import PackedWeight, can_pack, onednn, op, packed, product

# rows, inputs, outputs; the first is below what goes to oneDNN, the last two are one row and odd sizes
SHAPES = [(3, 16, 24), (64, 160, 200), (1, 1024, 1536), (77, 131, 157)]
LARGE = SHAPES[1]

needs_onednn = pytest.mark.skipif(not onednn.is_available(), reason="this build of torch has no oneDNN")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the first factors that oneDNN got."""
    seen: list[tuple[int, ...]] = []
    library = onednn.multiply

    def spy(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(a.shape))
        return library(a, b, bias)

    monkeypatch.setattr(onednn, "multiply", spy)
    return seen


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, int, int], with_bias: bool, test_seed: int) -> None:
    rows, inputs, outputs = shape
    exact = [draw(2, rows, inputs, seed=test_seed), draw(outputs, inputs, seed=test_seed + 1)]
    exact += [draw(outputs, seed=test_seed + 2)] if with_bias else []
    grad = draw(2, rows, outputs, seed=test_seed + 3)
    leaves = [t.clone().requires_grad_() for t in exact]
    got = ops.linear(*leaves)
    wide = [t.double().requires_grad_() for t in exact]
    want = F.linear(*wide)
    assert got.shape == want.shape
    assert relative_error(got, want) < 2e-6
    with torch.no_grad():
        assert relative_error(ops.linear(*exact), want) < 2e-6
    got_grads, want_grads = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, wide, grad.double())
    for a, b in zip(got_grads, want_grads, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 2e-6


@needs_onednn
def test_factors_of_any_strides(test_seed: int, multiplied: list[tuple[int, ...]]) -> None:
    """Slices of a fused projection, transposed weights, an expert's matrix, expanded rows."""
    base, weight = draw(70, 400, seed=test_seed), draw(6, 180, 200, seed=test_seed + 1)
    for a, b in (
        (base[:, 200:], weight[3]),
        (base[:, :180], weight[2].t()),
        (base[::2, :200], weight[1]),
        (base[:1, :200].expand(64, 200), weight[0]),
        (base.t()[:200].t(), weight[4]),
    ):
        assert relative_error(product(a, b), a.double() @ b.double().t()) < 2e-6
    assert len(multiplied) == 5


@needs_onednn
def test_it_can_be_differentiated_twice(multiplied: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0).requires_grad_(), draw(outputs, inputs, seed=1).requires_grad_()
    second = {}
    for name, how in (("fast", ops.linear), ("torch", F.linear)):
        (first,) = torch.autograd.grad(how(x, weight).square().sum(), x, create_graph=True)
        second[name] = torch.autograd.grad(first.square().sum(), (x, weight))
    for a, b in zip(second["fast"], second["torch"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
    assert len(multiplied) > 4


def test_only_wanted_gradients_are_computed(multiplied: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0), draw(outputs, inputs, seed=1)
    y = ops.linear(x, weight.requires_grad_())
    forward = len(multiplied)
    y.sum().backward()
    assert len(multiplied) - forward == (1 if onednn.is_available() else 0)
    frozen = ops.linear(x.requires_grad_(), weight.detach())
    forward = len(multiplied)
    frozen.sum().backward()
    assert len(multiplied) - forward == (1 if onednn.is_available() else 0)


# ------------------------------------------------------------------------------------------------------ which way
@needs_onednn
@pytest.mark.parametrize(
    ("name", "around", "dtype"),
    [
        ("float64", nullcontext(), torch.float64),
        ("bf16", nullcontext(), torch.bfloat16),
        ("autocast", torch.autocast("cpu", dtype=torch.bfloat16), torch.float32),
        ("flop counter", FlopCounterMode(display=False), torch.float32),
        ("reference", selection.use("reference"), torch.float32),
        ("mkldnn off", torch.backends.mkldnn.flags(enabled=False), torch.float32),
    ],
)
def test_where_torchs_own_product_runs(
    name: str, around: AbstractContextManager, dtype: torch.dtype, multiplied: list[tuple[int, ...]]
) -> None:
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0, dtype=dtype), draw(outputs, inputs, seed=1, dtype=dtype)
    with around:
        got = ops.linear(x, weight)
        want = F.linear(x, weight)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert multiplied == [], name
    if dtype == torch.float32:
        ops.linear(x, weight)
        assert len(multiplied) == 1


def test_transforms_of_torch_func(multiplied: list[tuple[int, ...]]) -> None:
    """They cannot look into our functions, so they get torch's product."""
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0), draw(outputs, inputs, seed=1)
    per_row = torch.func.vmap(lambda row: ops.linear(row[None].expand(64, -1), weight)[0])(x)
    torch.testing.assert_close(per_row, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    _, tangent = torch.func.jvp(lambda w: ops.linear(x, w), (weight,), (weight,))
    torch.testing.assert_close(tangent, F.linear(x, weight))
    grads = torch.func.grad(lambda w: ops.linear(x, w).square().sum())(weight)
    torch.testing.assert_close(grads, 2 * F.linear(x, weight).t() @ x, rtol=1e-4, atol=1e-2)
    assert multiplied == []


@needs_onednn
def test_compiled_functions_hold_torchs_product() -> None:
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0), draw(outputs, inputs, seed=1)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(ops.linear, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, weight), F.linear(x, weight))
    assert any("linear" in str(node.target) for node in graphs[0].graph.nodes)
    assert not any("mkldnn" in str(node.target) for node in graphs[0].graph.nodes)


def test_selection_is_checked_and_restored() -> None:
    with pytest.raises(ValueError, match="fastest"), selection.use("fastest"):
        pass
    with selection.use("reference"):
        assert selection.reference_only("linear")
        with selection.use("auto"):
            assert not selection.reference_only("linear")
        assert selection.reference_only("linear")
        assert all(backend == "reference" for backend, _ in ops.backends().values())
    assert not selection.reference_only("linear")


# --------------------------------------------------------------------------------------------------------- packed
@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights(shape: tuple[int, int, int], dtype: torch.dtype, multiplied: list[tuple[int, ...]]) -> None:
    rows, inputs, outputs = shape
    x, weight = draw(2, rows, inputs, seed=0, dtype=dtype), draw(outputs, inputs, seed=1, dtype=dtype)
    bias = draw(outputs, seed=2, dtype=dtype)
    if not can_pack(weight):
        pytest.skip(f"this processor has no instructions for {dtype}")
    kept = PackedWeight(weight)
    with torch.no_grad():
        got = ops.linear(x, weight, bias, kept)
    want = F.linear(x.double(), weight.double(), bias.double())
    assert got.shape == want.shape
    assert relative_error(got, want) < (2e-6 if dtype == torch.float32 else 4e-3)
    assert len(multiplied) == (1 if 2 * rows * inputs * outputs >= onednn.FEWEST_MULTIPLICATIONS else 0)


@needs_onednn
def test_a_packed_weight_does_not_outlive_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, inputs, outputs = LARGE
    x, weight = draw(rows, inputs, seed=0), draw(outputs, inputs, seed=1)
    kept = PackedWeight(weight)
    used: list[bool] = []
    library = packed.linear
    monkeypatch.setattr(packed, "linear", lambda *args: used.append(True) or library(*args))
    with torch.no_grad():
        ops.linear(x, weight, packed_weight=kept)
        assert len(used) == 1
        assert (
            relative_error(ops.linear(x, weight.clone(), packed_weight=kept), x.double() @ weight.double().t()) < 2e-6
        )
        weight.mul_(2)
        assert relative_error(ops.linear(x, weight, packed_weight=kept), x.double() @ weight.double().t()) < 2e-6
        assert len(used) == 1
    ops.linear(x, weight, packed_weight=PackedWeight(weight))  # a gradient may be wanted: not from a copy
    assert len(used) == 1
    assert copy.deepcopy(kept) is None
    assert pickle.loads(pickle.dumps(kept)) is None


def test_what_cannot_be_packed() -> None:
    assert not can_pack(draw(8, 8, seed=0, dtype=torch.float64))
    assert not can_pack(torch.empty(8, 8, device="meta"))


# ------------------------------------------------------------------------------------------------------------- wide
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_wide_product_of_narrow_weights(
    dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch, test_seed: int
) -> None:
    """Exact products of narrow numbers, part by part: 7 rows of the weight at a time, the last part shorter."""
    monkeypatch.setattr(op, "CAST_AT_ONCE", 7 * 48)
    x, weight = draw(2, 5, 48, seed=test_seed, dtype=dtype), draw(100, 48, seed=test_seed + 1, dtype=dtype)
    bias = draw(100, seed=test_seed + 2, dtype=dtype) if with_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got = ops.wide_linear(x, weight, bias)
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
