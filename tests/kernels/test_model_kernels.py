"""The whole model on the kernels: logits, gradients and generated tokens are those of the definitions."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_checks import DEVICE, assert_near
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zaya_hf import ZayaForCausalLM
from zaya_hf.ops import selection
from zaya_hf.testing import random_ids, redraw, tiny_config

loss_kernels = pytest.importorskip("zaya_hf.ops.linear_cross_entropy.triton")
pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

ROWS, LENGTH = 2, 11


class OurOperators(TorchDispatchMode):
    """Counts the operators of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "zaya_hf":
            self.seen[func._schema.name.removeprefix("zaya_hf::")] += 1
        return func(*args, **(kwargs or {}))


def make_model(seed: int = 0, **changes: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**{"num_hidden_layers": 2} | changes)), seed).to(DEVICE)


def masks() -> dict[str, dict[str, Tensor]]:
    """Plain rows, padding on either side, and packed documents."""
    left, right = torch.ones(ROWS, LENGTH, dtype=torch.long), torch.ones(ROWS, LENGTH, dtype=torch.long)
    left[1, :4] = 0
    right[0, 7:] = 0
    packed = torch.cat([torch.arange(1), torch.arange(6), torch.arange(4)]).expand(ROWS, -1)
    return {
        "plain": {},
        "left padding": {"attention_mask": left.to(DEVICE)},
        "right padding": {"attention_mask": right.to(DEVICE)},
        "packed": {"position_ids": packed.to(DEVICE)},
    }


def loss_and_gradients(
    model: ZayaForCausalLM, ids: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    labels = ids.clone()
    labels[0, 3] = -100
    loss = model(ids, labels=labels, skip_logits=True, **arguments).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return model(ids, **arguments).logits, loss.detach(), gradients


@pytest.mark.parametrize("how", list(masks()))
def test_logits_loss_and_gradients(how: str) -> None:
    model, ids, arguments = make_model(), random_ids(ROWS, LENGTH, seed=1).to(DEVICE), masks()[how]
    with selection.use("reference"):
        logits, loss, gradients = loss_and_gradients(model, ids, **arguments)
    rows = mock.patch.object(loss_kernels, "differentiate", wraps=loss_kernels.differentiate)
    with selection.use("triton"), OurOperators() as ours, rows as loss_rows:
        found_logits, found_loss, found = loss_and_gradients(model, ids, **arguments)
    assert loss_rows.call_count == 1
    # forward and backward of every operator that a training step has
    for part in ("cca_mix", "experts", "residual", "route"):
        names = [name for name in ours.seen if part in name]
        assert any("backward" in name for name in names), (part, dict(ours.seen))
        assert any("backward" not in name for name in names), (part, dict(ours.seen))
    real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
    assert_near(found_logits[real], logits[real], "logits", 1e-5)
    assert_near(found_loss, loss, "loss", 1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_near(found[name], gradient, name, 2e-5)


@pytest.mark.parametrize(
    "changes", [{"residual_in_fp32": False}, {"clamp_temp": True}, {"skip_expert": "identity"}], ids=str
)
def test_switches(changes: dict[str, Any]) -> None:
    model, ids = make_model(2, **changes), random_ids(ROWS, LENGTH, seed=3).to(DEVICE)
    with torch.no_grad():
        with selection.use("reference"):
            want = model(ids).logits
        with selection.use("triton"):
            got = model(ids).logits
    assert_near(got, want, str(changes), 1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens(cache: str) -> None:
    """Left-padded rows, so that prompts, states and steps all take part."""
    model, ids = make_model().eval(), random_ids(ROWS, 6, seed=5).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask, "pad_token_id": 0}
    if cache == "static":
        asked |= {"cache_implementation": "static", "disable_compile": True}
    with selection.use("reference"):
        want = model.generate(ids, **asked)
    with selection.use("triton"), OurOperators() as ours:
        got = model.generate(ids, **asked)
    assert torch.equal(got, want)
    step = "cca_step_" if cache == "static" else "cca_step"  # in the cache's own memory, or beside it
    assert ours.seen[step] == 5 * model.config.num_hidden_layers, dict(ours.seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """A rounding may send a token to another expert, so tokens that were sent elsewhere are not compared."""
    model, ids = make_model(num_hidden_layers=1).to(dtype), random_ids(ROWS, LENGTH, seed=1).to(DEVICE)
    wide = make_model(num_hidden_layers=1).double()
    wide.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    with torch.no_grad():
        with selection.use("reference"):
            want = wide(ids, output_router_logits=True)
        with selection.use("triton"):
            got = model(ids, output_router_logits=True)
    assert got.logits.dtype == dtype
    assert_near(got.router_logits[0], want.router_logits[0].to(dtype), "router logits", 2e-2)
    same = got.router_slots[0] == want.router_slots[0]
    assert same.float().mean() > 0.8
    assert_near(got.logits[same], want.logits[same].to(dtype), "logits", 2e-2)


def test_two_runs_are_bit_equal() -> None:
    model, ids = make_model(), random_ids(1, 5, seed=1).to(DEVICE)
    with selection.use("triton"):
        first, second = (loss_and_gradients(model, ids) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(gradient, second[2][name]) for name, gradient in first[2].items())


def test_the_report_says_triton() -> None:
    model = make_model()
    with selection.use("triton"):
        report = model.ops_report()
    assert {name for name, (backend, _) in report.items() if backend != "triton"} == {"linear"}, report
    model.set_experts_implementation("zaya_triton")
    assert model.ops_report()["experts"] == ("triton", "experts_implementation='zaya_triton'")
    with selection.use("auto", experts="reference"):
        assert model.ops_report()["experts"][0] == "reference"


def test_compiled_in_one_graph() -> None:
    """Training, too: the kernels are operators that a graph can hold."""
    model, ids = make_model(), random_ids(ROWS, LENGTH, seed=1).to(DEVICE)
    with selection.use("triton"):
        want = loss_and_gradients(model, ids)
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        got = loss_and_gradients(model, ids)
    assert_near(got[0], want[0], "logits", 1e-5)
    for name, gradient in want[2].items():
        assert_near(got[2][name], gradient, name, 1e-5)


def test_threads_do_not_disturb_each_other() -> None:
    """Triton's interpreter replaces functions for all threads while it runs a kernel."""
    model, ids = make_model(), random_ids(1, 4, seed=7).to(DEVICE)
    with torch.no_grad(), selection.use("reference"):
        want = model(ids).logits

    def run(_: int) -> Tensor:
        with torch.no_grad():  # of a thread
            return model(ids).logits

    with selection.use("triton"), ThreadPoolExecutor(2) as pool:
        for got in pool.map(run, range(4)):
            assert_near(got, want, "logits", 1e-5)
