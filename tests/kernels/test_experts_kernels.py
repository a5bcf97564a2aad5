"""The experts' kernels against their definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.modeling_zaya import ZayaExperts
from zaya_hf.ops import selection
from zaya_hf.ops.common.configs import config
from zaya_hf.ops.experts import configs, op, reference, top1
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

EXPERTS, SKIP = 4, 4
#: real sizes on a GPU; on a CPU sizes that are no multiples of a block
WIDTH, INNER = (2048, 1024) if DEVICE == "cuda" else (40, 24)
ROUTINGS = {
    "spread": [0, 3, 1, 2, 2, 0, 3, 1, 0, 2, 3, 1, 1, 3, 0, 2, 2, 1],
    "skips-and-empty-experts": [4, 3, 1, 4, 4, 3, 3, 1, 7, 3, 4, 1, 1, 3, 4, 3, 3, 1],
    "one-hot-expert": [2] * 18,
    "one-token": [1],
    "all-skipped": [4] * 18,
    "no-tokens": [],
}


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with selection.use("triton"):
        yield


def inputs_of(
    slots: list[int], dtype: torch.dtype = torch.float32, width: int = WIDTH, inner: int = INNER, experts: int = EXPERTS
) -> dict[str, Tensor]:
    """Arguments of `ops.experts` but for the activation, as leaves."""

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(DEVICE, dtype).requires_grad_()

    return {
        "x": leaf(len(slots), width),
        "slots": torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        "weights": (0.2 + torch.rand(len(slots))).to(DEVICE, dtype).requires_grad_(),
        "gate_up_proj": leaf(experts, 2 * inner, width, scale=width**-0.5),
        "down_proj": leaf(experts, width, inner, scale=inner**-0.5),
    }


def ours(activation: str = "silu") -> Callable[..., Tensor]:
    return lambda **inputs: ops.experts(**inputs, act_fn=ACT2FN[activation])


def definition(activation: str = "silu") -> Callable[..., Tensor]:
    return lambda **inputs: reference.experts(**inputs, act_fn=ACT2FN[activation])


def check(inputs: dict[str, Tensor], activation: str = "silu", upstream: Tensor | None = None) -> None:
    """Result and every gradient are those of the definition in float64; memory that nobody writes holds NaN."""
    cotangent = torch.randn_like(inputs["x"]) if upstream is None else upstream
    with memory_full_of_nan():
        (result,), found = gradients(ours(activation), inputs, [cotangent])
    assert result.dtype == inputs["x"].dtype
    (want,), wanted = gradients(definition(activation), in_float64(inputs), [cotangent.double()])
    assert_near(result, want, "result")
    assert not result[inputs["slots"] >= EXPERTS].any()
    for name, gradient in found.items():
        assert gradient is not None, name
        assert gradient.dtype == inputs[name].dtype
        assert_near(gradient, wanted[name], name)
        if name.endswith("proj"):
            for expert in range(gradient.shape[0]):
                if expert not in inputs["slots"].tolist():
                    assert not gradient[expert].any(), (name, expert)


# ---------------------------------------------------------------------------------------------- values and gradients
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_definition_with_all_gradients(routing: str) -> None:
    check(inputs_of(ROUTINGS[routing]))


@pytest.mark.parametrize("routing", ["skips-and-empty-experts", "one-hot-expert"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_narrow_types(dtype: torch.dtype, routing: str) -> None:
    check(inputs_of(ROUTINGS[routing], dtype))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_other_activations(activation: str) -> None:
    check(inputs_of(ROUTINGS["spread"][:6]), activation)


@pytest.mark.parametrize("count", [1, 2, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_without_gradients(dtype: torch.dtype, count: int) -> None:
    """Up to 16 tokens are not sorted."""
    inputs = inputs_of([3, 1, 4, 3, 5, 0, 3, 1, 1, 1, 2, 0, 3, 2, 4, 3, 1][:count], dtype)
    with memory_full_of_nan(), torch.no_grad():
        result = ours()(**inputs)
    assert_near(result, definition()(**in_float64(inputs)), "result")
    assert not result[inputs["slots"] >= EXPERTS].any()


def test_a_skipped_token_alone() -> None:
    with memory_full_of_nan(), torch.no_grad():
        assert not ours()(**inputs_of([4])).any()


def test_numbers_of_skipped_tokens_reach_nothing() -> None:
    """Not even NaN of theirs."""
    inputs = inputs_of(ROUTINGS["skips-and-empty-experts"])
    skips = inputs["slots"] >= EXPERTS
    broken = dict(inputs)
    for name in ("x", "weights"):
        broken[name] = (
            inputs[name].detach().clone().masked_fill_(skips.view(-1, *[1] * (inputs[name].ndim - 1)), torch.nan)
        )
        broken[name].requires_grad_()
    cotangent = torch.randn_like(inputs["x"])
    (want,), wanted = gradients(ours(), inputs, [cotangent])
    (result,), found = gradients(ours(), broken, [cotangent.masked_fill(skips[:, None], torch.nan)])
    assert torch.equal(result, want)
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("wanted", ["x", "weights", "gate_up_proj", "down_proj", "x weights", "gate_up_proj down_proj"])
def test_frozen_inputs(wanted: str) -> None:
    inputs = inputs_of(ROUTINGS["skips-and-empty-experts"])
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            tensor.requires_grad_(name in wanted.split())
    check(inputs)


@pytest.mark.parametrize("name", ["x", "weights", "gate_up_proj", "down_proj"])
def test_inputs_of_any_layout(name: str) -> None:
    inputs = inputs_of([2, 0, 4])
    for other in layouts(inputs[name]).values():
        check({**inputs, name: other})
        with torch.no_grad():  # decoding
            assert_near(ours()(**{**inputs, name: other}), definition()(**in_float64(inputs)), name)


def test_slots_of_any_layout() -> None:
    inputs = inputs_of([2, 0, 4, 2, 1])
    for other in layouts(inputs["slots"]).values():
        check({**inputs, "slots": other})


def test_upstream_gradients_of_any_layout() -> None:
    inputs = inputs_of([2, 0, 4, 2, 1])
    check(inputs, upstream=torch.ones((), device=DEVICE).expand(5, WIDTH))
    check(inputs, upstream=torch.randn(WIDTH, 5, device=DEVICE).t())
    ours()(**inputs).sum().backward()
    assert_near(
        inputs["x"].grad,
        gradients(definition(), in_float64(inputs), [torch.ones(5, WIDTH).to(DEVICE).double()])[1]["x"],
    )


def test_weights_that_are_no_leaves() -> None:
    """As adapters make them: the base plus a product."""
    inputs = inputs_of([2, 0, 4, 2, 1])
    low = {
        name: torch.randn(inputs[name].shape[:2], device=DEVICE, requires_grad=True)
        for name in ("gate_up_proj", "down_proj")
    }

    def adapted(function: Callable[..., Tensor], wide: bool) -> dict[str, Tensor]:
        arguments = in_float64(inputs) if wide else dict(inputs)
        for name, part in low.items():
            arguments[name] = arguments[name].detach() + (part.double() if wide else part)[..., None] * 0.1
        function(**arguments).square().sum().backward()
        return {name: part.grad for name, part in low.items()}

    found = {name: gradient.clone() for name, gradient in adapted(ours(), False).items()}
    for part in low.values():
        part.grad = None
    for name, want in adapted(definition(), True).items():
        assert_near(found[name], want, name)


def test_gradients_of_gradients() -> None:
    inputs = inputs_of([2, 0, 4, 2, 1])

    def second(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
        leaves = [t for t in inputs.values() if t.requires_grad]
        first = torch.autograd.grad(function(**inputs).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    for got, want in zip(second(ours(), inputs), second(definition(), in_float64(inputs)), strict=True):
        assert_near(got, want)


# ------------------------------------------------------------------------------------------------------- the kernels
def sorted_by(slots: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order and offsets as the sorting kernel gives them."""
    groups = slots.clamp(max=experts)
    counts = torch.bincount(groups, minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return groups.argsort(stable=True).int(), offsets.int()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_sorting(tokens: int) -> None:
    from zaya_hf.ops.experts import triton as kernels

    slots = torch.randint(0, 8, (tokens,), device=DEVICE)
    for chosen in (
        *configs.SORT.values(),
        config(num_warps=4, BLOCK=16, CHUNK=32),
        config(num_warps=4, BLOCK=64, CHUNK=16),
    ):
        with memory_full_of_nan():
            order, offsets = kernels.sort(slots, 6, chosen)
        want = sorted_by(slots, 6)
        assert torch.equal(order, want[0])
        assert torch.equal(offsets, want[1])


def test_sorting_among_many_experts() -> None:
    from zaya_hf.ops.experts import triton as kernels

    slots = torch.randint(0, 260, (300,), device=DEVICE)
    order, offsets = kernels.sort(slots, configs.MOST_EXPERTS, configs.choose_sort(configs.MOST_EXPERTS))
    want = sorted_by(slots, configs.MOST_EXPERTS)
    assert torch.equal(order, want[0])
    assert torch.equal(offsets, want[1])


def twice(run: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: object, **options: object) -> list[Tensor]:
    """What `run` gives, the same bits both times; NaN where it writes nothing."""
    with memory_full_of_nan():
        first, second = run(*arguments, **options), run(*arguments, **options)
    first, second = ([r] if isinstance(r, Tensor) else list(r) for r in (first, second))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return first


class Sorted:
    """Eight tokens, two of which skip, and by plain products in float64 what each kernel makes of them."""

    def __init__(self, dtype: torch.dtype, width: int, inner: int):
        inputs = inputs_of([1, 0, 2, 1, 1, 3, 0, 1], dtype, width, inner, experts=2)
        self.x, self.slots, self.scale, self.gate_up, self.down = (t.detach() for t in inputs.values())
        self.order, self.offsets = sorted_by(self.slots, 2)
        self.real = int(self.offsets[-1])
        self.token = self.order[: self.real].long()
        self.slot = self.slots[self.token]
        self.wide_x, self.wide_scale = self.x.double()[self.token], self.scale.double()[self.token, None]
        self.wide_gate_up, self.wide_down = self.gate_up.double()[self.slot], self.down.double()[self.slot]
        self.wide_pre = torch.einsum("nd,nod->no", self.wide_x, self.wide_gate_up)
        self.pre = torch.full((8, 2 * inner), torch.nan, dtype=dtype, device=DEVICE)
        self.pre[: self.real] = self.wide_pre.to(dtype)
        self.wide_hidden = self.activated(self.pre[: self.real].double())
        self.hidden = torch.full((8, inner), torch.nan, dtype=dtype, device=DEVICE)
        self.hidden[: self.real] = self.wide_hidden.to(dtype)

    @staticmethod
    def activated(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def placed(self, rows: Tensor) -> Tensor:
        """Sorted rows at their tokens' places, zeros elsewhere."""
        return rows.new_zeros(8, rows.shape[1]).index_copy(0, self.token, rows)


@pytest.mark.parametrize("sizes", [(40, 24), (256, 64)], ids=["odd", "even"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_configuration(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Twice in place: nothing depends on what was there."""
    from zaya_hf.ops.experts import triton as kernels
    from zaya_hf.ops.experts import triton_backward as backward

    case = Sorted(dtype, *sizes)
    x, order, offsets, real, scale, pre, hidden = (
        getattr(case, name) for name in ("x", "order", "offsets", "real", "scale", "pre", "hidden")
    )
    tables = configs.tables(dtype)
    for chosen in tables.gate_up.values():
        kept = torch.empty_like(pre)
        (saving,) = twice(kernels.gate_up, x, order, offsets, case.gate_up, "silu", kept, chosen)
        (got,) = twice(kernels.gate_up, x, order, offsets, case.gate_up, "silu", None, chosen)
        assert torch.equal(got[:real], saving[:real])
        assert_near(got[:real], case.wide_hidden, str(chosen))
        assert_near(kept[:real], case.wide_pre, str(chosen))
    product = torch.einsum("ni,ndi->nd", hidden[:real].double(), case.wide_down)
    for chosen in tables.down.values():
        (got,) = twice(kernels.scatter_product, hidden, order, offsets, case.down, scale, chosen)
        assert_near(got, case.placed(product * case.wide_scale), str(chosen))
    product = torch.einsum("no,nod->nd", pre[:real].double(), case.wide_gate_up)
    for chosen in tables.input_gradient.values():
        (got,) = twice(kernels.scatter_product, pre, order, offsets, case.gate_up, None, chosen, across=True)
        assert_near(got, case.placed(product), str(chosen))
    product = torch.einsum("nd,ndi->ni", case.wide_x, case.wide_down)
    leaf = pre[:real].double().requires_grad_()
    (pre_grad,) = torch.autograd.grad(case.activated(leaf), leaf, product * case.wide_scale)
    for chosen in tables.hidden_gradient.values():
        found = twice(
            backward.hidden_gradient, x, order, offsets, case.down, pre, scale, "silu", (True, True, True), chosen
        )
        assert_near(found[0][:real], pre_grad, str(chosen))
        assert_near(found[1][:real], case.wide_hidden * case.wide_scale, str(chosen))
        wanted = (hidden[:real].double() * product).sum(-1)
        assert_near(found[2][:, :real].sum(0), wanted, str(chosen), 1e-5 if dtype == torch.float32 else 1e-2)
    for chosen in tables.weight_gradient.values():
        for gathers, a, b in ((True, x, hidden), (False, pre, x)):
            (got,) = twice(backward.weight_gradient, a, b, order, offsets, gathers, chosen)
            tall, broad = (a[case.token], b[:real]) if gathers else (a[:real], b[case.token])
            for expert in range(2):
                mine = case.slot == expert
                assert_near(got[expert], tall[mine].double().T @ broad[mine].double(), str(chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_configuration_of_decoding(dtype: torch.dtype) -> None:
    from zaya_hf.ops.experts import triton as kernels

    case = Sorted(dtype, 70, 24)
    hidden, want = (
        case.placed(case.wide_hidden),
        case.placed(torch.einsum("ni,ndi->nd", case.hidden[: case.real].double(), case.wide_down) * case.wide_scale),
    )
    for count, entry in ((1, 1), (8, 16)):
        x, slots, routed = case.x[:count], case.slots[:count], case.slots[:count] < 2
        (got,) = twice(kernels.decode_gate_up, x, slots, case.gate_up, "silu", configs.DECODE_GATE_UP[dtype][entry])
        assert_near(got[routed], hidden[:count][routed])
        few = hidden[:count].to(dtype)
        (got,) = twice(
            kernels.decode_down, few, slots, case.down, case.scale[:count], configs.DECODE_DOWN[dtype][entry]
        )
        assert_near(got, want[:count])


def test_tiles_of_many_rows_and_columns() -> None:
    """Several blocks below and beside each other, experts of very different numbers of rows, and skips: every tile is
    computed once, in every order of the chiplets."""
    from zaya_hf.ops.experts import triton as kernels

    for group in (1, 3):
        slots = torch.tensor([0] * 21 + [1] + [3] * 8 + [4] * 9, device=DEVICE)[
            torch.randperm(39, device="cpu").to(DEVICE)
        ]
        inputs = inputs_of(slots.tolist(), width=70, inner=33)
        x, _, scale, gate_up, down = (t.detach() for t in inputs.values())
        chosen = configs.product(16, 16, 16, 1, group)
        with memory_full_of_nan():
            order, offsets = kernels.sort(slots, EXPERTS, configs.choose_sort(EXPERTS))
            hidden = kernels.gate_up(x, order, offsets, gate_up, "silu", None, chosen)
            got = kernels.scatter_product(hidden, order, offsets, down, scale, chosen)
        assert_near(got, definition()(**in_float64(inputs)))


def test_launches() -> None:
    """Decoding takes two, any other pass without gradients three."""
    from zaya_hf.ops.common.triton import recording

    for tokens, launches in ((1, 2), (16, 2), (17, 3), (4000, 3)):
        arguments = {name: t.detach().to("meta") for name, t in inputs_of([0] * tokens).items()}
        with recording() as written:
            top1._run_infer(*arguments.values(), "silu")
        assert len(written) == launches


# ------------------------------------------------------------------------------------------------- far apart in memory
@pytest.mark.skipif(DEVICE != "cpu", reason="memory that is not touched costs nothing on a CPU only")
def test_offsets_past_2_31() -> None:
    """Two rows at the end of tensors of more than 2^31 values, of which nothing else is touched."""
    from zaya_hf.ops.common.triton import launch
    from zaya_hf.ops.experts import triton as kernels
    from zaya_hf.ops.experts import triton_backward as backward

    tokens, width, inner = 2**26 + 3, 40, 33
    inputs = inputs_of([0, 0], torch.bfloat16, width, inner, experts=1)
    small_x, _, small_scale, gate_up, down = (t.detach() for t in inputs.values())

    def large(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    x, scale, order = large(tokens, width), large(tokens), large(tokens, dtype=torch.int32)
    rows = slice(tokens - 2, tokens)
    x[rows], scale[rows] = small_x, small_scale
    order[rows] = torch.tensor([tokens - 1, tokens - 2])
    offsets = torch.tensor([tokens - 2, tokens], dtype=torch.int32)
    small = [torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)]
    hidden, pre = large(tokens, inner), large(tokens, 2 * inner)
    chosen = configs.product(16, 64, 64, 1, group=1)
    assert hidden.numel() > 2**31
    constants = kernels.constants_of(gate_up)
    launch(
        kernels.gate_up_kernel, (1,), chosen, x, order, offsets, gate_up, hidden, pre, width, *gate_up.stride()[:2],
        width, inner, SAVES=True, ACTIVATION="silu", EVEN=False, **constants,
    )  # fmt: skip
    small_pre = torch.empty(2, 2 * inner, dtype=torch.bfloat16)
    small_hidden = kernels.gate_up(small_x, *small, gate_up, "silu", small_pre, chosen)
    assert torch.equal(hidden[rows], small_hidden)
    assert torch.equal(pre[rows], small_pre)
    out = large(tokens, width)
    launch(
        kernels.scatter_product_kernel, (1,), chosen, hidden, order, offsets, down, scale, out, *down.stride()[:2],
        inner, width, tokens, SCALES=True, ACROSS=False, EVEN=False, **constants,
    )  # fmt: skip
    assert torch.equal(out[rows], kernels.scatter_product(small_hidden, *small, down, small_scale, chosen))
    pre_grad, scaled, partial = large(tokens, 2 * inner), large(tokens, inner), large(1, tokens, dtype=torch.float32)
    launch(
        backward.hidden_gradient_kernel, (1,), chosen, x, order, offsets, down, pre, scale, pre_grad, scaled, partial,
        width, *down.stride()[:2], width, inner, tokens, WANTS_PRE=True, WANTS_SCALED=True, WANTS_SCALE=True,
        ACTIVATION="silu", EVEN=False, **constants,
    )  # fmt: skip
    want = backward.hidden_gradient(small_x, *small, down, small_pre, small_scale, "silu", (True, True, True), chosen)
    for got, right in zip((pre_grad[rows], scaled[rows], partial[:, rows]), want, strict=True):
        assert torch.equal(got, right)
    outer = configs.outer(16, 16, 16, 1)
    got = backward.weight_gradient(pre_grad, x, order, offsets, False, outer)
    assert torch.equal(got, backward.weight_gradient(want[0], small_x, *small, False, outer))


# -------------------------------------------------------------------------------------------------------- as operators
def test_opcheck() -> None:
    inputs = inputs_of([2, 0, 1, 2, 3])
    arguments = (*inputs.values(), "silu")
    torch.library.opcheck(torch.ops.zaya_hf.top1_experts_train.default, arguments)
    plain = [t.detach() for t in inputs.values()]
    torch.library.opcheck(torch.ops.zaya_hf.top1_experts.default, (*plain, "silu"))
    x, _, weights, gate_up, down = plain
    _, pre, order, offsets = torch.ops.zaya_hf.top1_experts_train(*plain, "silu")
    wanted = [True, False, True, True]
    torch.library.opcheck(
        torch.ops.zaya_hf.top1_experts_backward.default,
        (torch.randn_like(x), x, weights, gate_up, down, pre, order, offsets, "silu", wanted),
    )


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16], ids=["fp32 tokens", "bf16 tokens"])
def test_autocast(tokens: torch.dtype) -> None:
    inputs = inputs_of(ROUTINGS["skips-and-empty-experts"])
    inputs["x"] = inputs["x"].detach().to(tokens).requires_grad_()
    cotangent = torch.randn_like(inputs["x"])
    with torch.autocast(DEVICE, torch.bfloat16):
        (result,), found = gradients(ours(), inputs, [cotangent])
        assert definition()(**inputs).dtype == result.dtype
    (want,), wanted = gradients(definition(), in_float64(inputs), [cotangent.double()])
    assert_near(result, want, "result", 1e-2)
    for name, gradient in found.items():
        assert gradient.dtype == inputs[name].dtype
        assert_near(gradient, wanted[name], name, 1e-2)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_compiles_as_one_graph(autocast: bool) -> None:
    inputs = inputs_of(ROUTINGS["skips-and-empty-experts"])
    cotangent = torch.randn_like(inputs["x"])
    act_fn = ACT2FN["silu"]
    torch.compiler.reset()

    def plain(**inputs: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return ops.experts(**inputs, act_fn=act_fn)

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    (result,), found = gradients(compiled, inputs, [cotangent])
    (want,), wanted = gradients(plain, inputs, [cotangent])
    assert torch.equal(result, want)
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name
    with torch.no_grad():
        few = {name: t[:3] if t.shape[0] == 18 else t for name, t in inputs.items()}
        assert torch.equal(compiled(**few), plain(**few))


@pytest.mark.skipif(DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="two GPUs")
def test_tensors_on_another_device_than_the_current() -> None:
    inputs = {name: t.detach().to("cuda:1").requires_grad_(t.requires_grad) for name, t in inputs_of([0, 2, 1]).items()}
    with torch.cuda.device(0):
        check(inputs)


# ------------------------------------------------------------------------------------------------------------ choosing
@pytest.mark.parametrize(
    ("changes", "activation", "why"),
    [
        ({"x": torch.float64, "gate_up_proj": torch.float64, "down_proj": torch.float64}, "silu", "float64"),
        ({}, "relu", "activation ReLU"),
    ],
    ids=["float64", "relu"],
)
def test_what_the_kernels_decline(
    changes: dict[str, torch.dtype], activation: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_said", {})
    inputs = inputs_of([2, 0, 4, 2, 1])
    inputs.update({name: inputs[name].detach().to(dtype).requires_grad_() for name, dtype in changes.items()})
    for _ in range(2):
        (got,), _ = gradients(ours(activation), inputs, [torch.ones_like(inputs["x"])])
    assert_near(got, definition(activation)(**in_float64(inputs)), tolerance=1e-5)
    (said,) = selection.said("experts")
    assert why in said


def test_the_report_says_what_runs() -> None:
    assert op.backend(torch.device(DEVICE))[0] == "triton"
    with selection.use("triton", experts="reference"):
        assert op.backend(torch.device(DEVICE))[0] == "reference"


def test_a_model_takes_them_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ZAYA_OPS says of the other operators: the same logits, gradients and generated tokens."""
    ids = random_ids(2, 5).to(DEVICE)
    called: list[int] = []
    run = top1.experts
    monkeypatch.setattr(top1, "experts", lambda *a: called.append(1) or run(*a))
    results = []
    with selection.use("auto"):
        for name in ("eager", "zaya_triton"):
            model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1, skip_expert="identity"))).to(DEVICE)
            model.set_experts_implementation(name)
            assert model.config._experts_implementation == name
            model(ids, labels=ids).loss.backward()
            results.append((model, record_run(model, ids), model.generate(ids, max_new_tokens=2, do_sample=False)))
            assert bool(called) == (name == "zaya_triton" or DEVICE == "cuda")
    (want, run_of_want, tokens), (got, run_of_got, found) = results
    assert_equal_logits(run_of_got, run_of_want)
    assert torch.equal(found, tokens)
    for (name, parameter), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert_near(parameter.grad, other.grad, name, 1e-4 if "gate" in name else 1e-5)


def test_more_than_one_expert_for_a_token() -> None:
    """As other models of transformers have, by the name that a model of ours makes known; skipped choices too."""
    ZayaForCausalLM(tiny_config(num_hidden_layers=1, experts_implementation="zaya_triton"))
    triton_experts = ALL_EXPERTS_FUNCTIONS["zaya_triton"]
    module = redraw(ZayaExperts(tiny_config())).to(DEVICE)
    index = torch.tensor([[0, 2], [3, 1], [4, 2], [1, 4]], device=DEVICE)
    weights, x = torch.rand(4, 2, device=DEVICE), torch.randn(4, 64, device=DEVICE)
    got = triton_experts(module, x, index, weights)
    want = sum(module.eager(x, index[:, i : i + 1], weights[:, i : i + 1]) for i in range(2))
    assert_near(got, want)
    module.has_bias = True
    with pytest.raises(ValueError, match="zaya_triton"):
        triton_experts(module, x, index, weights)
