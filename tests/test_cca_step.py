"""`ops.cca_step` by its definition against CCA written token by token, and what the model and its caches make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from step_problems import LAYOUTS, draw_step, naive_step
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.cache import layer_of
from zaya_hf.ops import selection
from zaya_hf.ops.cca_step import configs, op
from zaya_hf.ops.cca_step import workloads as at_real_sizes
from zaya_hf.testing import random_ids, redraw, tiny_config

SHAPES = [(4, 2, 6), (3, 1, 4), (3, 3, 2)]
WIDTHS = [(1, 1), (2, 2), (3, 4), (1, 3)]
NAMES = ("query", "key", "value", "qk state", "value state")


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (2, 3), (2, 8), (1, 11), *LAYOUTS], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape: tuple[int, int, int], widths: tuple[int, int], layout: Any) -> None:
    step = draw_step(shape, widths, LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout, seed=3)
    assert_equal(ops.cca_step(**step.arguments()), naive_step(step))


def test_temperatures_are_clamped_and_nothing_is_zero() -> None:
    step = draw_step((4, 2, 6), (2, 2), LAYOUTS["documents"])
    got = ops.cca_step(**step.arguments(clamp_temperature=True, value_of_nothing=None))
    assert_equal(got, naive_step(step, clamp_temperature=True, nothing=None))


def test_states_are_new_tensors_and_those_before_stay() -> None:
    step = draw_step((4, 2, 6), (2, 2), (2, 1))
    before = step.qk_state.clone(), step.value_state.clone()
    arguments = step.arguments(in_place=True)  # which is allowed, and the definition does not do
    _, _, _, qk, value = ops.cca_step(**arguments)
    assert torch.equal(arguments["qk_state"], before[0])
    assert torch.equal(arguments["value_state"], before[1])
    assert not torch.equal(qk, before[0])
    assert not torch.equal(value, before[1])


@pytest.mark.parametrize("layout", [(2, 3), "documents"])
def test_gradients_reach_tokens_states_and_weights(layout: Any) -> None:
    step = draw_step((2, 1, 4), (2, 2), LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout)
    arguments = step.arguments()
    wanted = [t.requires_grad_() for t in arguments.values() if isinstance(t, torch.Tensor)]
    names = [name for name, t in arguments.items() if isinstance(t, torch.Tensor)]
    others = {name: value for name, value in arguments.items() if name not in names}

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.cca_step(**dict(zip(names, tensors, strict=True)), **others)

    assert torch.autograd.gradcheck(outputs, wanted)


@pytest.mark.parametrize(("rows", "length"), [(0, 1), (0, 3), (2, 0)])
def test_no_rows_and_no_tokens(rows: int, length: int) -> None:
    step = draw_step((4, 2, 6), (2, 2), (2, 3))
    arguments = step.arguments()
    for name in ("raw", "value_current", "value_delayed"):
        arguments[name] = arguments[name][:rows, :length]
    arguments["cos"], arguments["sin"] = arguments["cos"][:, :length], arguments["sin"][:, :length]
    arguments["qk_state"], arguments["value_state"] = arguments["qk_state"][:rows], arguments["value_state"][:rows]
    query, key, value, qk, delayed = ops.cca_step(**arguments)
    assert (query.shape, key.shape, value.shape) == ((rows, 4, length, 6), (rows, 2, length, 6), (rows, 2, length, 6))
    assert torch.equal(qk, arguments["qk_state"])
    assert torch.equal(delayed, arguments["value_state"])


# ------------------------------------------------------------------------------------------------------ the choice
@pytest.mark.parametrize(
    ("dtype", "sizes", "why"),
    [
        (torch.float32, {}, None),
        (torch.bfloat16, {"head_dim": 256, "widths": (4, 1)}, None),
        (torch.float64, {}, "it takes fp32, fp16 and bf16, not float64"),
        (torch.float32, {"head_dim": 512}, "heads of 2 to 256"),
        (torch.float32, {"head_dim": 15, "groups": 1}, "not 1 of 15"),
        (torch.float32, {"widths": (2, 5)}, "width 1 to 4, not 2 and 5"),
        (torch.float32, {"heads": 7}, "7 query heads are not shared by 2 others"),
    ],
)
def test_what_the_kernel_takes(dtype: torch.dtype, sizes: dict[str, Any], why: str | None) -> None:
    found = op.declines_sizes(dtype, **{"heads": 8, "groups": 2, "head_dim": 128, "widths": (2, 2), **sizes})
    assert found is None if why is None else why in str(found)


def test_one_to_eight_tokens_are_a_step() -> None:
    assert [length for length in range(12) if op.is_step(torch.empty(3, length, 8))] == list(range(1, 9))
    assert not op.is_step(torch.empty(0, 1, 8))


def test_reports_say_what_runs() -> None:
    assert ops.backends()["cca_step"] == ("reference", "cca_mix, then the next states")
    with selection.use("auto", cca_step="reference"):
        assert ops.backends()["cca_step"] == ("reference", "ZAYA_OPS=auto,cca_step=reference")


def test_every_configuration_has_a_workload() -> None:
    """A block of rows holds 16 tokens, of the smallest matrix instruction; and what is chosen is what is compiled."""
    table = {configs.ONE_TOKEN, *configs.TILES.values()}
    assert {c for w in at_real_sizes.workloads(torch.bfloat16) for c in w.configs} == table
    for tokens, chosen in configs.TILES.items():
        assert tokens * chosen["BLOCK_ROWS"] == 16
    for length in range(1, 9):
        for rows in (1, 2, 64):
            chosen = configs.choose_step(rows, length, torch.float32)
            assert chosen in table
            assert chosen["BLOCK_ROWS"] * length <= 16


def test_the_bytes_are_those_of_the_weights_and_little_else() -> None:
    """Two taps of ``[1280, 128]`` in bf16 are 655,360 bytes, which one row reads and 64 rows read once."""
    one, many = (
        next(w.bytes for w in at_real_sizes.workloads(torch.bfloat16) if w.size == size)
        for size in ("1 rows of 1", "64 rows of 1")
    )
    assert 655_360 < one < 700_000
    assert (many - one) / 63 < 20_000


# --------------------------------------------------------------------------------------------------- whose states
def build(**changes: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2, **changes)))


@torch.no_grad()
def fill(model: ZayaForCausalLM, cache: Any) -> Any:
    model(random_ids(2, 5), cache=cache)
    return layer_of(cache, 0)


def test_a_static_layer_gives_its_states_to_be_written() -> None:
    model = build()
    layer: Any = fill(model, StaticCache(config=model.config, max_cache_len=16))
    with torch.no_grad():
        qk, value = layer.states_to_write()
        assert qk.data_ptr() == layer.conv_states[0].data_ptr()
        assert value.data_ptr() == layer.conv_states[1].data_ptr()
    assert layer.states_to_write() is None, "a graph may hold them"


def test_a_layer_that_records_keeps_its_states() -> None:
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=16)
    cache.activate_past_recording()
    layer: Any = fill(model, cache)
    with torch.no_grad():
        assert layer.states_to_write() is None


def test_an_empty_static_layer_has_none() -> None:
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=16)
    layer: Any = fill(model, cache)
    cache.reset()
    with torch.no_grad():
        assert layer.states_to_write() is None


def test_states_of_inference_mode_are_copied_outside_of_it() -> None:
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode():
        layer: Any = fill(model, cache)
    made = layer.conv_states[0]
    with torch.no_grad():
        qk, _ = layer.states_to_write()
    assert qk.data_ptr() != made.data_ptr()
    assert torch.equal(qk, made)
    assert layer.conv_states[0].data_ptr() == qk.data_ptr()


@torch.no_grad()
def test_a_growing_cache_gets_new_states() -> None:
    """Those before may be another cache's, of a fork."""
    model = build()
    cache = DynamicCache(config=model.config)
    layer = fill(model, cache)
    held = layer.conv_states[0]
    before = held.clone()
    model(random_ids(2, 1), cache=cache)
    assert torch.equal(held, before)
    assert not torch.equal(layer.conv_states[0], before)
