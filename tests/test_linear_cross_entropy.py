"""The loss without the logits: values, every gradient, memory, and the model that trains with it."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from loss_cases import DTYPES, IGNORED, Case, assert_as_exact, assert_same, error, split, step, which
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.losses import causal_lm_loss
from zaya_hf.ops.linear_cross_entropy import chunked, reference, rows, sums
from zaya_hf.testing import random_ids, redraw, tiny_config


# ------------------------------------------------------------------------------------------------ values and gradients
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_problems(dtype: torch.dtype, test_seed: int, fuzzing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(test_seed, test_seed + (200 if fuzzing else 25)):
        draw = random.Random(seed)
        case = Case(
            seed,
            rows=draw.choice([0, 1, 2, 3, 7, 16, 33]),
            words=draw.choice([1, 2, 5, 64, 131]),
            width=draw.choice([1, 3, 8, 32]),
            bias=draw.random() < 0.5,
            where=draw.choice(["all", "some", "some", "none"]),
        )
        split(monkeypatch, draw.choice([1, 2, 5, 16, 64]))
        monkeypatch.setitem(rows.BLOCK_ELEMENTS, "cpu", draw.choice([1, 100, 2**20]))
        monkeypatch.setitem(sums.SLICE_ELEMENTS, "cpu", draw.choice([1, 100, 2**22]))
        options: dict[str, Any] = {"wide_logits": draw.random() < 0.3}
        if draw.random() < 0.5:
            options["divisor"] = torch.tensor(draw.choice([3, 7.5]))
        if draw.random() < 0.4:
            options["z_loss"] = draw.choice([0.01, 0.3])
        if draw.random() < 0.4:
            options["softcap"] = draw.choice([0.5, 4.0, 50.0])
        factor = draw.choice([1.0, 0.3])
        leaves = case.leaves(dtype)
        got = case.run(chunked.linear_cross_entropy, leaves, factor, **options)
        plain = case.run(reference.linear_cross_entropy, leaves, factor, **options)
        lse = case.largest_logsumexp() if "z_loss" in options else 0.0
        terms = factor / float(options.get("divisor", 1)) * (1 + 2 * options.get("z_loss", 0.0) * lse)
        assert_as_exact(got, plain, case.exact(leaves, factor, **options), dtype, terms)
        with torch.no_grad():
            values = [leaves["hidden"], leaves["weight"], leaves.get("bias"), case.targets]
            torch.testing.assert_close(chunked.linear_cross_entropy(*values, **options), got["loss"])


@pytest.mark.parametrize("number", [15, 16, 17, 31, 32, 33])
def test_edges_of_chunks_in_float64(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 16)
    case = Case(0, number, 37, 12, bias=True, where="all")
    leaves = case.leaves(torch.float64)
    got, want = case.run(chunked.linear_cross_entropy, leaves), case.exact(leaves)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"softcap": 2.0}, {"z_loss": 0.1, "softcap": 2.0}], ids=str)
def test_gradients_by_differences(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, 2)
    case = Case(1, 5, 7, 3, bias=True)
    leaves = list(case.leaves(torch.float64).values())

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return chunked.linear_cross_entropy(hidden, weight, bias, case.targets, divisor=case.number, **options)

    assert torch.autograd.gradcheck(loss, leaves)


def test_what_z_loss_and_softcap_are() -> None:
    """By the formulas, for one row; rows without a target count nothing."""
    hidden, weight = torch.tensor([[1.0, 2.0], [9.0, 9.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    targets = torch.tensor([1, IGNORED])
    logits = torch.tensor([3.0, 2.0, 1.0])
    for module in (chunked, reference):

        def loss(run: Any = module.linear_cross_entropy, **options: Any) -> Tensor:
            return run(hidden, weight, None, targets, **options)

        lse = logits.exp().sum().log()
        torch.testing.assert_close(loss(), lse - 2)
        torch.testing.assert_close(loss(z_loss=0.5), lse - 2 + 0.5 * lse**2)
        torch.testing.assert_close(loss(z_loss=0.5, divisor=torch.tensor(4)), (lse - 2 + 0.5 * lse**2) / 4)
        capped = 2 * (logits / 2).tanh()
        lse = capped.exp().sum().log()
        torch.testing.assert_close(loss(softcap=2), lse - capped[1])
        torch.testing.assert_close(loss(softcap=2.0, z_loss=0.5), lse - capped[1] + 0.5 * lse**2)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), None, True, "1", torch.tensor(0.1)], ids=str)
def test_a_z_loss_that_makes_no_sense(wrong: Any) -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    for call in (
        lambda: ops.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), None, torch.tensor([1, 2]), z_loss=wrong),
        lambda: causal_lm_loss(torch.ones(1, 3, 4), ids, 4, z_loss=wrong),
    ):
        with pytest.raises(ValueError, match=r"z_loss is .*; expected a finite number of at least 0\."):
            call()


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), False, "30"], ids=str)
def test_a_softcap_that_makes_no_sense(wrong: Any) -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    for call in (
        lambda: ops.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), None, torch.tensor([1, 2]), softcap=wrong),
        lambda: causal_lm_loss(torch.ones(1, 3, 4), ids, 4, logit_softcap=wrong),
    ):
        with pytest.raises(ValueError, match=r"softcap of the logits is .*; expected None or a finite number above 0"):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_chunks_are_as_exact_as_one_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up in bf16, the gradient of the weight would be off by several times the reference's own error."""
    case = Case(2, 2048, 50, 16, bias=True, where="all")
    leaves = case.leaves(dtype)
    plain, exact = case.run(reference.linear_cross_entropy, leaves), case.exact(leaves)
    split(monkeypatch, 16)
    got = case.run(chunked.linear_cross_entropy, leaves)
    assert_as_exact(got, plain, exact, dtype)
    assert error(got["weight"], exact["weight"]) <= 1.5 * error(plain["weight"], exact["weight"])


def test_a_word_that_is_next_to_impossible_has_a_finite_loss() -> None:
    """Its share is 0 in fp32; its loss is a difference of logits."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [500.0]])
    assert chunked.linear_cross_entropy(hidden, weight, None, torch.tensor([0])).item() == 500


def test_a_gradient_close_to_0_is_not_rounded_away() -> None:
    """Share - 1 of a target that is nearly certain is computed before it is rounded to bf16."""
    hidden = torch.tensor([[7.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    chunked.linear_cross_entropy(hidden, weight, None, torch.tensor([0])).backward()
    share = torch.tensor([7.0, 0.0]).softmax(0)[1]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.stack([-share, share]) * 7, rtol=2**-7, atol=0)


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("weight", "bias"), ("hidden", "weight")], ids=str)
def test_only_what_is_needed_is_computed(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, ...]] = []
    real = chunked.product
    for module in (chunked, sums):
        monkeypatch.setattr(module, "product", lambda a, b: products.append((*a.shape, b.shape[0])) or real(a, b))
    case = Case(3, 9, 11, 5, bias=True, where="all")
    leaves = case.leaves(torch.float64, frozen)
    got, want = case.run(chunked.linear_cross_entropy, leaves), case.exact(leaves)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name])
    assert products == [shape for name, shape in (("hidden", (9, 11, 5)), ("weight", (11, 9, 5))) if name not in frozen]


def test_rows_without_a_target_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []
    real = chunked.linear
    monkeypatch.setattr(chunked, "linear", lambda x, *head: multiplied.append(x.shape[0]) or real(x, *head))
    case = Case(4, 40, 11, 5, bias=False)
    got = case.run(chunked.linear_cross_entropy, case.leaves(torch.float64))
    assert sum(multiplied) == case.number < 40
    assert not got["hidden"][case.targets == IGNORED].any()


def test_where_looking_at_targets_costs_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator all rows are multiplied, and those without a target count nothing."""
    case = Case(5, 20, 11, 5, bias=False)
    counted = case.targets != IGNORED
    x, weight = case.tensors["hidden"], case.tensors["weight"]
    logits, losses = x @ weight.t(), x.new_full((20,), torch.nan)
    rows.differentiate(logits, case.targets.masked_fill(~counted, 0), counted, losses, torch.tensor(0.25))
    want = case.exact(case.leaves(torch.float64), 0.25)
    torch.testing.assert_close(losses.sum(), want["loss"])
    torch.testing.assert_close(logits @ weight, want["hidden"])
    torch.testing.assert_close(logits.t() @ x, want["weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_graph_can_be_used_again(dtype: torch.dtype) -> None:
    """The first backward pass gives its tensors away; the second one must not see what became of them."""
    case = Case(6, 9, 11, 5, bias=True)
    leaves = case.leaves(dtype)
    loss = chunked.linear_cross_entropy(*leaves.values(), case.targets, divisor=case.number)
    inputs = list(leaves.values())
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    second = torch.autograd.grad(loss * 3, inputs)
    for got, want in zip(second, kept, strict=True):
        torch.testing.assert_close(got, want * 3, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("frozen", [(), ("hidden",), ("weight",)], ids=["all", "head only", "hidden only"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 2.0}], ids=str)
def test_second_derivatives(frozen: tuple[str, ...], options: dict[str, Any]) -> None:
    """A penalty on gradients, say. What the forward pass computed ahead would leave its terms out without a word."""
    case = Case(7, 4, 5, 3, bias=True)
    leaves = case.leaves(torch.float64, frozen)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    found = []
    for module in (chunked, reference):
        loss = module.linear_cross_entropy(*leaves.values(), case.targets, divisor=case.number, **options)
        gradients = torch.autograd.grad(loss, wanted, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append([*gradients, *torch.autograd.grad(penalty, wanted)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_fp16_takes_a_loss_scale() -> None:
    """Of 4096 words each has a share that fp16 cannot hold once it is divided; the loss scale comes with `backward`."""
    case = Case(8, 512, 4096, 4, bias=False, where="all")
    case.tensors["weight"] *= 0.01
    leaves = case.leaves(torch.float16)
    scale = 2.0**12
    options = {"divisor": case.number}
    got = case.run(chunked.linear_cross_entropy, leaves, scale, **options)
    plain = case.run(reference.linear_cross_entropy, leaves, scale, **options)
    assert_as_exact(got, plain, case.exact(leaves, scale, **options), torch.float16)


@pytest.mark.parametrize("target", [-1, 11, 200])
def test_a_target_that_is_no_word(target: int) -> None:
    """As torch's own loss says it."""
    case = Case(9, 4, 11, 3, bias=False)
    case.targets[1] = target
    leaves = case.leaves(torch.float32)
    for function in (chunked.linear_cross_entropy, reference.linear_cross_entropy):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            case.run(function, leaves)


# ---------------------------------------------------------------------------------------- autocast, and what is covered
@pytest.mark.parametrize("wide_logits", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [3, 64])
def test_autocast(rows: int, stored: torch.dtype, wide_logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, rows)
    case = Case(10, 20, 31, 8, bias=True)
    leaves = case.leaves(stored)
    exact = case.exact(leaves, wide_logits=wide_logits)
    with torch.autocast("cpu", torch.bfloat16):
        got = case.run(chunked.linear_cross_entropy, leaves, wide_logits=wide_logits)
        plain = case.run(reference.linear_cross_entropy, leaves, wide_logits=wide_logits)
    torch.testing.assert_close(got["loss"], plain["loss"])
    computed = torch.float64 if stored == torch.float64 else torch.bfloat16
    assert_as_exact(got, plain, exact, computed)


def test_which_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called = which(monkeypatch)
    case = Case(11, 6, 9, 4, bias=False)
    leaves = case.leaves(torch.float32)
    hidden, weight, targets = leaves["hidden"], leaves["weight"], case.targets

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, None, targets)

    want = loss(hidden, weight)
    with ops.selection.use("reference"):
        torch.testing.assert_close(loss(hidden, weight), want)
    (gradient,) = torch.autograd.grad(want, hidden)
    torch.testing.assert_close(torch.func.grad(loss)(hidden.detach(), weight.detach()), gradient)
    _, slope = torch.func.jvp(lambda h: loss(h, weight.detach()), (hidden.detach(),), (torch.ones_like(hidden),))
    torch.testing.assert_close(slope, gradient.sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(hidden.detach(), torch.ones_like(hidden))
        slope = torch.autograd.forward_ad.unpack_dual(loss(dual, weight.detach())).tangent
    torch.testing.assert_close(slope, gradient.sum())
    assert ops.linear_cross_entropy(hidden.to("meta"), weight.to("meta"), None, targets.to("meta")).shape == ()
    with pytest.raises(RuntimeError, match="dtype"):
        loss(hidden, weight.double())
    assert called == ["chunked", *["reference"] * 6]


# --------------------------------------------------------------------------------------------------------------- memory
class Largest(TorchDispatchMode):
    """Records the largest tensor that any operator returns, other than `allowed` elements."""

    def __init__(self, allowed: set[int]):
        super().__init__()
        self.allowed, self.elements = allowed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() not in self.allowed:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_holds_the_logits_of_all_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    number, words, width = 512, 1000, 16
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 32 * words * dtype.itemsize)
    case = Case(12, number, words, width, bias=True, where="all")
    leaves = case.leaves(dtype)
    seen = {}
    for module in (chunked, reference):
        with Largest({words * width}) as largest:  # the weight and its gradient
            case.run(module.linear_cross_entropy, leaves)
        seen[module] = largest.elements
    assert seen[reference] == number * words
    assert seen[chunked] == 32 * words


def test_chunks_are_equal_and_as_large_as_allowed() -> None:
    weight = torch.empty(262_272, 2048, dtype=torch.bfloat16, device="meta")
    assert chunked._chunk_size(2048, weight, torch.float32) == 256
    assert chunked._chunk_size(2048, weight, torch.bfloat16) == 512
    assert chunked._chunk_size(513, weight, torch.bfloat16) == 257
    assert chunked._chunk_size(1000, torch.empty(1024, 96, device="meta"), torch.float32) == 1000
    assert chunked._chunk_size(0, weight, torch.bfloat16) >= 1
    assert chunked._chunk_size(10**4, torch.empty(10**8, 1, device="meta"), torch.float32) == 32


def test_chunks_and_slices_on_a_gpu() -> None:
    """Of the head of ZAYA1-8B: a chunk as large as the weight in bf16, and slices of whole tiles."""
    with FakeTensorMode():
        weight = torch.empty(262_272, 2048, dtype=torch.bfloat16, device="cuda")
        assert chunked._chunk_size(16_384, weight, torch.bfloat16) == 2048
        assert chunked._chunk_size(16_384, weight, torch.float32) == 1024
        narrow = torch.empty(262_272, 64, device="cuda")
        assert chunked._chunk_size(10_000, narrow, torch.float32) == 1000
    assert sums.slice_rows(262_272, 2048, "cuda") == 87_552 == 342 * 256
    assert sums.slice_rows(1000, 64, "cuda") == 1000
    assert sums.slice_rows(0, 64, "cuda") == 0
    assert sums.slice_rows(262_272, 2048, "cpu") == 2048


# ------------------------------------------------------------------------------------------------------------ the model
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": torch.tensor([[1] * 12, [0] * 5 + [1] * 7])},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(7)], [0, *range(11)]])},
    "shift_labels": {"labels": None, "shift_labels": random_ids(2, 12, seed=5)},
    "number": {"num_items_in_batch": torch.tensor(50)},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"logit_softcap": 5.0, "z_loss": 0.01, "num_items_in_batch": 30},
    "another ignore_index": {"labels": random_ids(2, 12, seed=9, high=8), "ignore_index": 5},
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["once", "checkpointing"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step(kind: str, tied: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = which(monkeypatch)
    split(monkeypatch, 5)
    config = tiny_config(tie_word_embeddings=tied, lm_head_bias=not tied, num_hidden_layers=2)
    model = redraw(ZayaForCausalLM(config)).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    got = step(model, **KINDS[kind])
    assert called == ["chunked"]
    want = step(model, skip_logits=False, **KINDS[kind])
    assert called == ["chunked"]
    assert_same(got, want)


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype, fp32_logits: bool) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(fp32_logits=fp32_logits, num_hidden_layers=2)).to(dtype)).train()
    got, want = step(model), step(model, skip_logits=False)
    assert got["loss"].dtype == torch.promote_types(dtype, torch.float32)
    if fp32_logits:  # bf16 logits would be off by 1e-3
        torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0)
    # bf16: gradients of logits and all that follows are rounded; both ways, but not to the same numbers
    assert_same(got, want, 1e-10 if dtype == torch.float64 else 2**-6)


def test_a_training_step_under_autocast() -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = step(model), step(model, skip_logits=False)
    torch.testing.assert_close(got["loss"], want["loss"])
    assert_same(got, want, 2**-6)


def test_accumulated_steps() -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()
    ids = random_ids(4, 12)
    found = []
    for skip_logits in (None, False):
        model.zero_grad()
        for row in ids.split(1):
            (model(row, labels=row, skip_logits=skip_logits).loss / 4).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_same(*found)


def test_when_logits_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    called = which(monkeypatch)
    model, ids = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))), random_ids(2, 6)
    want = model(ids, labels=ids)
    assert want.logits.shape == (2, 6, 128)
    assert not called
    skipped = model(ids, labels=ids, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, want.loss)
    assert called == ["chunked"]
    model.train()
    assert model(ids).logits is not None
    assert model(ids, labels=ids, logits_to_keep=6).logits is not None
    assert model(ids, labels=ids, skip_logits=False).logits is not None
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    assert model(ids, labels=ids).logits is not None
    assert called == ["chunked"]


def test_skipping_what_is_all_that_is_asked_for() -> None:
    model, ids = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))), random_ids(2, 6)
    with pytest.raises(ValueError, match="leaves nothing to return"):
        model(ids, skip_logits=True)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    with pytest.raises(ValueError, match="not causal_lm_loss and needs logits"):
        model(ids, labels=ids, skip_logits=True)


def test_wrong_labels_are_named_alike() -> None:
    model, ids = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))).train(), random_ids(2, 6)
    for given in (
        {"labels": ids[:, :5]},
        {"labels": ids.flatten()},
        {"labels": ids.float()},
        {"shift_labels": ids[:, 1:]},
        {"labels": ids, "logits_to_keep": 2},
    ):
        said = []
        for skip_logits in (False, None, True):
            with pytest.raises(ValueError, match=r"labels have (shape|dtype)") as caught:
                model(ids, skip_logits=skip_logits, **given)
            said.append(str(caught.value))
        assert said[0] == said[1] == said[2]


class Scaled(nn.Module):
    """A head with an adapter: its weight is not all it does."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("head") if name == "head" else getattr(self.head, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * 0.5


@pytest.mark.parametrize("how", ["wrapped", "subclass", "forward", "hook", "pre-hook", "backward-hook", "global-hook"])
def test_a_head_that_does_more_is_called(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = which(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1, tie_word_embeddings=False))).train()
    head, calls = model.lm_head, []
    handle = None
    if how == "wrapped":
        model.lm_head = Scaled(head)
    elif how == "subclass":
        real = type(head)
        head.__class__ = type("Halved", (real,), {"forward": lambda self, x: real.forward(self, x) * 0.5})
    elif how == "forward":  # as accelerate does
        real_forward = head.forward
        head.forward = lambda x: real_forward(x) * 0.5
    elif how == "hook":
        head.register_forward_hook(lambda module, args, output: output * 0.5)
    elif how == "pre-hook":
        head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    elif how == "backward-hook":
        head.register_full_backward_hook(lambda module, given, wanted: calls.append(module))
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        got, want = step(model), step(model, skip_logits=False)
    finally:
        if handle is not None:
            handle.remove()
    assert_same(got, want, 1e-7)
    assert not called
    assert calls.count(head) == (2 if how in ("backward-hook", "global-hook") else 0)


def test_a_copy_of_a_model_skips_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss_function` is compared by identity, which copies keep."""
    called = which(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))).train()
    assert_same(step(copy.deepcopy(model)), step(model), 1e-7)
    assert called == ["chunked", "chunked"]


def test_a_resized_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    called = which(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))).train()
    model.resize_token_embeddings(140, mean_resizing=False)
    assert_same(step(model), step(model, skip_logits=False))
    assert called == ["chunked"]


def test_options_of_the_loss_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a trainer that calls the model itself; what a call says comes first."""
    called = which(monkeypatch)
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1))).train()
    want, plain = step(model, z_loss=0.1, logit_softcap=4.0), step(model)
    assert abs(want["loss"] - plain["loss"]) > 0.1
    model.loss_function = functools.partial(causal_lm_loss, z_loss=0.1, logit_softcap=4.0)
    assert_same(step(model), want)
    assert_same(step(model, skip_logits=False), want)
    assert_same(step(copy.deepcopy(model)), want)
    assert_same(step(model, z_loss=0.0, logit_softcap=None), plain)
    assert called == ["chunked"] * 5
    model.loss_function = functools.partial(lambda logits, *_, **__: logits.sum())
    assert model(random_ids(1, 3), labels=random_ids(1, 3)).logits is not None
