"""The loss inside compiled graphs: one operator, and no tensor of all logits; the reference where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from loss_cases import DTYPES, IGNORED, Case, assert_as_exact, assert_same
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.ops.linear_cross_entropy import chunked, reference
from zaya_hf.testing import random_ids, redraw, tiny_config


class Graphs:
    """A backend of torch.compile that keeps what AOT autograd makes."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_autograd(fw_compiler=self.keep)(module, inputs)

    def keep(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(module)
        return make_boxed_func(module.forward)

    def largest(self) -> int:
        """Elements of the largest tensor in any of them."""
        values = [node.meta.get("val") for graph in self.graphs for node in graph.graph.nodes]
        return max(t.numel() for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor))

    def operators(self) -> list[str]:
        names = [str(node.target) for graph in self.graphs for node in graph.graph.nodes]
        return [name for name in names if name.startswith("zaya_hf.linear_cross_entropy")]


@pytest.fixture
def graphs() -> Graphs:
    torch.compiler.reset()
    return Graphs()


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compiled_graph(dtype: torch.dtype, options: dict[str, Any], graphs: Graphs) -> None:
    """One operator forward (and one backward in fp16, whose loss scale comes late), and never all logits."""
    case = Case(20, 40, 31, 8, bias=True)
    leaves = case.leaves(dtype)
    compiled = torch.compile(ops.linear_cross_entropy, backend=graphs, fullgraph=True)
    got = case.run(compiled, leaves, 0.3, divisor=case.number, **options)
    plain = case.run(reference.linear_cross_entropy, leaves, 0.3, divisor=case.number, **options)
    exact = case.exact(leaves, 0.3, divisor=case.number, **options)
    assert_as_exact(got, plain, exact, dtype, terms=0.3 / float(case.number))
    assert len(graphs.graphs) == 2
    assert len(graphs.operators()) == (2 if dtype == torch.float16 else 1)
    assert graphs.largest() == 40 * 8  # the logits would have 40 * 31


def test_a_compiled_graph_without_gradients(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    real = chunked.compute
    monkeypatch.setattr(chunked, "compute", lambda *given: wanted.append(given[5]) or real(*given))
    case = Case(21, 12, 31, 8, bias=False)
    leaves = case.leaves(torch.float32)
    compiled = torch.compile(ops.linear_cross_entropy, backend=graphs, fullgraph=True)
    want = reference.linear_cross_entropy(leaves["hidden"], leaves["weight"], None, case.targets)
    with torch.no_grad():
        torch.testing.assert_close(compiled(leaves["hidden"], leaves["weight"], None, case.targets), want)
    compiled(leaves["hidden"].detach(), leaves["weight"], None, case.targets).backward()
    assert leaves["hidden"].grad is None
    assert leaves["weight"].grad is not None
    assert [tuple(each) for each in wanted] == [(False, False, False), (False, True, False)]


@pytest.mark.parametrize("wide_logits", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_a_compiled_graph_under_autocast(
    narrow: torch.dtype, stored: torch.dtype, wide_logits: bool, graphs: Graphs
) -> None:
    case = Case(22, 20, 31, 8, bias=True)
    leaves = case.leaves(stored)
    compiled = torch.compile(ops.linear_cross_entropy, backend=graphs, fullgraph=True)
    exact = case.exact(leaves)
    with torch.autocast("cpu", narrow):
        got = case.run(compiled, leaves, wide_logits=wide_logits)
        plain = case.run(reference.linear_cross_entropy, leaves, wide_logits=wide_logits)
    assert_as_exact(got, plain, exact, torch.bfloat16)
    assert graphs.operators()


def test_graphs_for_other_numbers_of_rows_and_other_options(graphs: Graphs) -> None:
    compiled = torch.compile(ops.linear_cross_entropy, backend=graphs, fullgraph=True)
    for number, z_loss in ((7, 0.0), (9, 0.1), (12, 0.2), (30, 0.3)):
        case = Case(23, number, 31, 8, bias=True)
        leaves = case.leaves(torch.float64)
        got, want = (case.run(f, leaves, z_loss=z_loss) for f in (compiled, reference.linear_cross_entropy))
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name])


def test_what_cannot_hold_the_operator_has_the_reference(graphs: Graphs) -> None:
    case = Case(24, 6, 9, 4, bias=False, where="all")
    hidden, weight = (leaf.detach() for leaf in case.leaves(torch.float32).values())

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, None, case.targets, z_loss=0.1)

    want = torch.func.grad(loss)(hidden, weight)
    got = torch.compile(lambda h, w: torch.func.grad(loss)(h, w), backend=graphs, fullgraph=True)(hidden, weight)
    torch.testing.assert_close(got, want)
    assert not graphs.operators()

    class Loss(nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
            return loss(hidden, weight)

    for strict in (False, True):
        program = torch.export.export(Loss(), (hidden, weight), strict=strict)
        assert "zaya_hf" not in str(program.graph)
        torch.testing.assert_close(program.module()(hidden, weight), loss(hidden, weight))
    torch.testing.assert_close(torch.jit.trace(loss, (hidden, weight))(hidden, weight), loss(hidden, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_operators_keep_torchs_rules(dtype: torch.dtype, bias: bool) -> None:
    case = Case(25, 7, 31, 8, bias=bias)
    leaves = case.leaves(dtype)
    ahead = dtype != torch.float16
    divisor = torch.tensor(5.0, dtype=torch.promote_types(dtype, torch.float32))
    tensors = (leaves["hidden"], leaves["weight"], leaves.get("bias"), case.targets, divisor)
    others = (dtype, IGNORED, 0.1, 4.0)
    forward = torch.ops.zaya_hf.linear_cross_entropy.default
    torch.library.opcheck(forward, (*tensors, *others, [ahead, ahead, ahead and bias]))
    values = [None if tensor is None else tensor.detach() for tensor in tensors]
    backward = torch.ops.zaya_hf.linear_cross_entropy_backward.default
    torch.library.opcheck(backward, (divisor, *values, *others, [True, False, bias]))


def test_gradients_that_were_not_asked_for_come_later() -> None:
    """An operator that was called without them can still be differentiated."""
    case = Case(26, 7, 31, 8, bias=True)
    leaves = case.leaves(torch.float64)
    others = (None, torch.float64, IGNORED, 0.0, None, [True, False, False])
    total = torch.ops.zaya_hf.linear_cross_entropy(*leaves.values(), case.targets, *others)[0]
    want = case.exact(leaves)
    for name, got in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
        torch.testing.assert_close(got, want[name])


def test_an_operator_multiplies_in_the_dtype_it_is_told() -> None:
    """Under an autocast that began after the graph was made, too."""
    case = Case(27, 7, 31, 8, bias=True)
    leaves = case.leaves(torch.float32)
    given = (*leaves.values(), case.targets, None, torch.float32, IGNORED, 0.0, None, [True, True, True])
    want = torch.ops.zaya_hf.linear_cross_entropy(*given)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.ops.zaya_hf.linear_cross_entropy(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_compiled_training_step(graphs: Graphs) -> None:
    """The model's own graph has no tensor of all logits either, with a tied head."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1, vocab_size=2000))).train()
    ids = random_ids(2, 40)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = []
    for run in (compiled, model):
        model.zero_grad()
        output = run(ids, labels=ids, use_cache=False, z_loss=0.01)
        output.loss.backward()
        assert output.logits is None
        found.append({"loss": output.loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    assert_same(*found)
    assert len(graphs.operators()) == 1
    assert graphs.largest() == model.lm_head.weight.numel() < 80 * 2000
