"""The kernel of a decoding step against its definition in float64, and the model that decodes with it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from kernel_checks import DEVICE, DTYPE_IDS, DTYPES, assert_near, in_float64, layouts, memory_full_of_nan
from torch import Tensor
from transformers import DynamicCache, StaticCache

from step_problems import LAYOUTS, Step, draw_step
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.ops import selection
from zaya_hf.ops.cca_step import configs, operators, reference
from zaya_hf.ops.cca_step import launcher as kernels
from zaya_hf.testing import random_ids, redraw, tiny_config

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

NAMES = ("query", "key", "value", "qk state", "value state")
SMALL = (2, 1, 16)
REAL = (8, 2, 128)


@pytest.fixture(autouse=True)
def _on_kernels() -> Any:
    with selection.use("reference", cca_step="triton"), torch.no_grad():
        yield


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    rows = arguments["rows"]
    if rows is not None:
        rows = ops.StepRows(*(tensor.to(DEVICE) for tensor in rows.tensors()))
    moved = {name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in arguments.items()}
    return {**moved, "rows": rows}


def drawn(step: Step, dtype: torch.dtype, **others: Any) -> dict[str, Any]:
    return on_device(step.arguments(dtype, **others))


def definition(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """In float64."""
    given = {name: value for name, value in in_float64(arguments).items() if name != "in_place"}
    with selection.use("reference"):
        return reference.cca_step(**given)


def check(arguments: dict[str, Any], want: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Run the kernel in memory full of NaN; it is what the definition says, and the next states are so to the bit."""
    want = definition(arguments) if want is None else want
    with memory_full_of_nan(), Launched() as launched:
        got = ops.cca_step(**arguments)
    assert launched.count == 1
    nothing = arguments["value_of_nothing"]
    is_cast = nothing is not None and nothing.dtype != arguments["raw"].dtype
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert g.dtype == arguments["raw"].dtype
        if name in ("query", "key") or (name == "value" and is_cast):
            assert_near(g, w, name)
        else:
            assert torch.equal(g.double(), w), name
    assert all(out.is_contiguous() for out in got[:3])
    return got


class Launched:
    """How often the kernel was launched."""

    def __enter__(self) -> Launched:
        self.count, self._launch = 0, kernels.launch

        def counting(*arguments: Any, **constants: Any) -> None:
            self.count += 1
            self._launch(*arguments, **constants)

        kernels.launch = counting
        return self

    def __exit__(self, *raised: Any) -> None:
        kernels.launch = self._launch


# ----------------------------------------------------------------------------------------------- against the definition
@pytest.mark.parametrize("layout", [(1, 1), (3, 1), (3, 3), *LAYOUTS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_equals_the_definition(dtype: torch.dtype, layout: Any) -> None:
    step = draw_step(SMALL, (2, 2), LAYOUTS[layout] if isinstance(layout, str) else layout, seed=1)
    check(drawn(step, dtype))


@pytest.mark.parametrize("layout", [(1, 1), "padding"], ids=str)
@pytest.mark.parametrize("widths", [(1, 1), (1, 3), (3, 4), (4, 1)], ids=str)
def test_widths(widths: tuple[int, int], layout: Any) -> None:
    step = draw_step((2, 1, 16), widths, LAYOUTS[layout] if isinstance(layout, str) else layout, seed=2)
    check(drawn(step, torch.float32))


@pytest.mark.parametrize("layout", [(1, 1), "documents"], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (4, 2, 16), (3, 3, 10), (6, 3, 20)], ids=str)
def test_heads(shape: tuple[int, int, int], layout: Any) -> None:
    """Widths that are no powers of two, a head of values that is half a token's own, groups of one to three."""
    step = draw_step(shape, (2, 2), LAYOUTS[layout] if isinstance(layout, str) else layout, seed=3)
    check(drawn(step, torch.float32))


@pytest.mark.parametrize("rotated", [2, 8, 16])
def test_any_part_of_a_head_is_rotated(rotated: int) -> None:
    """With tables whose halves differ: each dimension is turned by its own entry."""
    arguments = drawn(draw_step(SMALL, (2, 2), (2, 2)), torch.float32)
    arguments["cos"], arguments["sin"] = torch.randn(2, 2, 2, rotated, device=DEVICE)
    check(arguments)


def test_clamped_temperatures_without_a_value_of_nothing() -> None:
    step = draw_step((2, 2, 16), (2, 2), LAYOUTS["documents"])
    arguments = drawn(step, torch.float32, value_of_nothing=None)
    arguments["temperature"] = torch.tensor([-1.0, 3.0], device=DEVICE)
    check({**arguments, "clamp_temperature": True})


@pytest.mark.parametrize("length", [1, 5])
def test_zero_vectors_stay_zero(length: int) -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), (2, length)), torch.float32)
    for name in ("raw", "qk_state", "depthwise_bias", "grouped_bias"):
        arguments[name].zero_()
    query, key, *_ = check(arguments)
    assert not query.any()
    assert not key.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="takes a GPU")
@pytest.mark.parametrize("layout", [(1, 1), (64, 1), (16, 4), "padding", "eight"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_real_sizes(dtype: torch.dtype, layout: Any) -> None:
    step = draw_step(REAL, (2, 2), LAYOUTS[layout] if isinstance(layout, str) else layout)
    check(drawn(step, dtype))


# -------------------------------------------------------------------------------------------- states and configurations
@pytest.mark.parametrize("layout", [(1, 1), (20, 1), *LAYOUTS], ids=str)
def test_every_configuration_twice_in_place(layout: Any) -> None:
    """Two steps over the same states are two steps of the definition, and bit for bit those with new states."""
    segments = LAYOUTS[layout] if isinstance(layout, str) else layout
    arguments = drawn(draw_step(SMALL, (2, 2), segments), torch.float32)
    length = arguments["raw"].shape[1]
    fitting = [c for t, c in configs.TILES.items() if t >= length and t < 2 * length]
    if arguments["raw"].shape[:2] == (1, 1):
        fitting.append(configs.ONE_TOKEN)
    want = definition(arguments)
    want = (want, definition({**arguments, "qk_state": want[3], "value_state": want[4]}))
    positional = list({name: t for name, t in arguments.items() if name != "rows"}.values())
    tensors, others = positional[:3], positional[5:]
    given = [others[i] for i in (0, 1, 2, 3, 4, 5, 6)]
    rest = (arguments["head_dim"], False, arguments["value_of_nothing"], arguments["rows"])
    for chosen in fitting:
        states = arguments["qk_state"].clone(), arguments["value_state"].clone()
        fresh = states
        for wanted in want:
            after = tuple(torch.full_like(state, float("nan")) for state in states)
            apart = kernels.step(*tensors, *fresh, *after, *given, *rest, chosen)
            fresh = after
            in_place = kernels.step(*tensors, *states, *states, *given, *rest, chosen)
            for name, one, other, w in zip(NAMES, (*apart, *after), (*in_place, *states), wanted, strict=True):
                assert torch.equal(one, other), (name, str(chosen))
                assert_near(other, w, f"{name} with {chosen}")
    assert fitting


def test_blocks_do_not_matter() -> None:
    """A row gives the same alone and among others; two runs are equal bit for bit."""
    arguments = drawn(draw_step(SMALL, (2, 2), (37, 1)), torch.float32)
    whole, again = ops.cca_step(**arguments), ops.cca_step(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    names = ("raw", "value_current", "value_delayed", "qk_state", "value_state")
    part = ops.cca_step(**{**arguments, **{name: arguments[name][30:34] for name in names}})
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[30:34], b)


def test_states_are_written_over_where_allowed() -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), LAYOUTS["padding"]), torch.bfloat16)
    want = ops.cca_step(**arguments)
    states = arguments["qk_state"], arguments["value_state"]
    versions = [state._version for state in states]
    got = ops.cca_step(**arguments, in_place=True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert got[3] is states[0]
    assert got[4] is states[1]
    assert all(state._version > version for state, version in zip(states, versions, strict=True))


def test_states_of_inference_mode_are_written_in_it() -> None:
    with torch.inference_mode():
        arguments = drawn(draw_step(SMALL, (2, 2), (2, 1)), torch.float32)
        want = ops.cca_step(**arguments)
        got = ops.cca_step(**arguments, in_place=True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


# --------------------------------------------------------------------------------------------------------------- memory
def test_any_strides() -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), [[0, 1], [-1, 0]]), torch.float32)
    want = definition(arguments)
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor):
            for kind, other in layouts(tensor).items():
                got = ops.cca_step(**{**arguments, name: other})
                for result, g, w in zip(NAMES, got, want, strict=True):
                    assert_near(g, w, f"{result} with {name} as {kind}")


@pytest.mark.parametrize("kind", ["every second column", "columns of a wider tensor", "transposed"])
def test_states_of_any_strides_are_written_over(kind: str) -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), LAYOUTS["padding"]), torch.float32)
    want = definition(arguments)
    for name in ("qk_state", "value_state"):
        arguments[name] = layouts(arguments[name])[kind]
    ops.cca_step(**arguments, in_place=True)
    assert torch.equal(arguments["qk_state"].double(), want[3])
    assert torch.equal(arguments["value_state"].double(), want[4])


def test_one_product_for_all_projections() -> None:
    """Views of one tensor, as `fuse_for_inference` gives them, and a table that is the same for all rows."""
    arguments = drawn(draw_step(SMALL, (2, 2), (3, 2)), torch.float32)
    want = definition(arguments)
    names = ("raw", "value_current", "value_delayed")
    whole = torch.cat([arguments[name] for name in names], dim=-1)
    views = whole.split([arguments[name].shape[-1] for name in names], dim=-1)
    arguments.update(zip(names, views, strict=True))
    for name in ("cos", "sin"):
        arguments[name] = arguments[name].expand(3, -1, -1)
    check(arguments, want)


def test_rows_far_apart_in_memory() -> None:
    """More than 2^31 elements; pages that are not touched take no memory."""
    arguments = drawn(draw_step((2, 1, 16), (2, 2), (2, 1)), torch.float16)
    want = definition(arguments)
    for name in ("raw", "value_current", "value_delayed", "qk_state", "value_state"):
        tensor = arguments[name]
        strides = (2**31 + 16, *tensor.stride()[1:])
        far = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        far = far.new_empty(2**31 + 16 + tensor[0].numel()).as_strided(tensor.shape, strides)
        got = ops.cca_step(**{**arguments, name: far.copy_(tensor)})
        for result, g, w in zip(NAMES, got, want, strict=True):
            assert_near(g, w, f"{result} with {name} far apart")
        del far


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_runs_where_its_tensors_are() -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), (2, 1)), torch.float32)
    there = {name: t.to("cuda:1") if isinstance(t, Tensor) else t for name, t in arguments.items()}
    for here, far in zip(ops.cca_step(**arguments), ops.cca_step(**there), strict=True):
        assert far.device == torch.device("cuda:1")
        assert torch.equal(here, far.to(here.device))


# ----------------------------------------------------------------------------------------------------- what is declined
def said(arguments: dict[str, Any]) -> tuple[tuple[Tensor, ...], list[str]]:
    """Results of a call in which no kernel ran, and what was said (by `selection.say_once`, which says it once)."""
    with mock.patch.object(selection, "say_once") as say_once, Launched() as launched:
        got = ops.cca_step(**arguments)
    assert launched.count == 0
    return got, [why for _, why in (call.args for call in say_once.call_args_list)]


@pytest.mark.parametrize("case", ["float64", "a wide state", "float64 weights", "autocast", "half of the rows told"])
def test_what_it_does_not_take_runs_by_the_definition(case: str) -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), LAYOUTS["padding"]), torch.float32)
    why = {
        "float64": "fp32, fp16 and bf16, not float64",
        "a wide state": "several dtypes",
        "float64 weights": "neither fp32 nor fp16 nor bf16",
        "autocast": "autocast is on and the projections are torch.float32",
        "half of the rows told": "not told in full",
    }[case]
    if case == "float64":
        arguments = drawn(draw_step(SMALL, (2, 2), LAYOUTS["padding"]), torch.float64)
    elif case == "a wide state":
        arguments["qk_state"] = arguments["qk_state"].double()
    elif case == "float64 weights":
        arguments["grouped_weight"] = arguments["grouped_weight"].double()
    elif case == "half of the rows told":
        arguments["rows"].continues = None
    with torch.autocast(DEVICE, torch.bfloat16, enabled=case == "autocast"):
        got, messages = said(arguments)
        want = reference.cca_step(**arguments)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert len(messages) == 1
    assert why in messages[0]


@pytest.mark.parametrize("case", ["nine tokens", "a gradient", "no rows", "asked for the definition"])
def test_what_is_no_step_is_not_spoken_of(case: str) -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), (2, 9 if case == "nine tokens" else 1)), torch.float32)
    if case == "a gradient":
        arguments["grouped_bias"].requires_grad_()
    if case == "no rows":
        for name in ("raw", "value_current", "value_delayed", "qk_state", "value_state"):
            arguments[name] = arguments[name][:0]
    how = "reference" if case == "asked for the definition" else "triton"
    with torch.enable_grad(), selection.use("reference", cca_step=how):
        got, messages = said(arguments)
        want = reference.cca_step(**arguments)
        assert got[0].requires_grad == (case == "a gradient")
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not messages


# ---------------------------------------------------------------------------------------------------- torch's operators
@pytest.mark.parametrize("layout", [(2, 1), "padding"], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_operators_are_what_they_say(in_place: bool, layout: Any) -> None:
    segments = LAYOUTS[layout] if isinstance(layout, str) else layout
    arguments = drawn(draw_step((2, 1, 16), (2, 2), segments), torch.bfloat16)
    rows = arguments.pop("rows")
    told = (None,) * 6 if rows is None else rows.tensors()
    names = [argument.name for argument in operators.step._schema.arguments]
    given = [arguments.get(name, False) for name in names[: len(names) - 6]]
    torch.library.opcheck(operators.step_in_place if in_place else operators.step, (*given, *told))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_weights_may_be_wider(dtype: torch.dtype) -> None:
    arguments = drawn(draw_step(SMALL, (2, 2), LAYOUTS["documents"]), torch.float32)
    for name in ("raw", "value_current", "value_delayed", "qk_state", "value_state"):
        arguments[name] = arguments[name].to(dtype)
    with torch.autocast(DEVICE, dtype):
        want = reference.cca_step(**arguments)
        got = check(arguments)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert_near(g, w)


# ------------------------------------------------------------------------------------------------------------ the model
def build(**changes: Any) -> ZayaForCausalLM:
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return redraw(ZayaForCausalLM(tiny_config(**few, **changes))).to(DEVICE)


def decoded(model: ZayaForCausalLM, cache: Any, sizes: tuple[int, ...], **masks: Any) -> Tensor:
    """Logits of a prompt and of the chunks behind it."""
    ids, at, logits = random_ids(3, sum(sizes)).to(DEVICE), 0, []
    for size in sizes:
        told = {name: mask[:, : at + size] for name, mask in masks.items()}
        logits.append(model(ids[:, at : at + size], cache=cache, **told).logits)
        at += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("kind", "padding"),
    [
        ("growing", "none"),
        ("growing", "right"),
        ("static", "left"),
        ("static", "right"),
        ("recording", "left"),
        ("static, recording", "none"),
    ],
)
def test_decoding_is_that_of_the_definition(kind: str, padding: str) -> None:
    """A prompt, single tokens and chunks; then, where the past was recorded, a crop and other tokens."""
    model = build(attention_bias=True, layer_types=["hybrid", "hybrid_sliding"], sliding_window=4)
    sizes = (5, 1, 3, 9, 1)
    mask = torch.ones(3, sum(sizes), dtype=torch.long, device=DEVICE)
    if padding == "left":
        mask[1, :3] = 0
    elif padding == "right":
        mask[1, 7:9] = mask[2, 8:9] = 0
    results = []
    for how in ("reference", "triton"):
        make = StaticCache if kind.startswith("static") else DynamicCache
        room = {"max_cache_len": sum(sizes) + 4} if kind.startswith("static") else {}
        cache = make(config=model.config, **room)
        if "recording" in kind:
            cache.activate_past_recording()
        with selection.use("reference", cca_step=how), Launched() as launched:
            logits = [decoded(model, cache, sizes, **({} if padding == "none" else {"attention_mask": mask}))]
            if "recording" in kind:
                cache.crop(-2)
                logits.append(model(random_ids(3, 2, seed=7).to(DEVICE), cache=cache).logits)
        assert launched.count == (0 if how == "reference" else 2 * (3 + ("recording" in kind)))
        real = mask.bool() if padding != "none" else torch.ones_like(mask).bool()
        results.append(torch.cat([logits[0][real], *(more.flatten(0, 1) for more in logits[1:])]))
    assert_near(results[1], results[0].double())


def test_a_static_cache_is_written_in_place() -> None:
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(random_ids(2, 5).to(DEVICE), cache=cache)
    states = [layer.conv_states[index] for layer in cache.layers for index in (0, 1)]
    before = [state.clone() for state in states]
    model(random_ids(2, 1).to(DEVICE), cache=cache)
    after = [layer.conv_states[index] for layer in cache.layers for index in (0, 1)]
    assert all(one is other for one, other in zip(states, after, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(states, before, strict=True))


def test_a_compiled_step_holds_the_operator() -> None:
    """One graph for all steps, with the states written over; no value is read on the way."""
    torch.compiler.reset()
    model = build(layer_types=["hybrid", "hybrid_sliding"], sliding_window=5)
    ids = random_ids(2, 12).to(DEVICE)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    cache = StaticCache(config=model.config, max_cache_len=12)
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    model(ids[:, :6], cache=cache)
    got = torch.cat([step(ids[:, at : at + 1], cache=cache).logits for at in range(6, 9)], dim=1)
    with selection.use("reference"):
        want = model(ids, use_cache=False).logits[:, 6:9]
    assert_near(got, want.double())
    assert len(graphs) == 1
    assert str(graphs[0].graph).count("zaya_hf.cca_step_") == 2
