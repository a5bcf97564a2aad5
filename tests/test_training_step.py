"""One training step: how the loss is normalised, recomputation, copies of a model, and that every parameter learns."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.losses import causal_lm_loss
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config

IMPLEMENTATIONS = ("zaya", "eager", "batched_mm", "grouped_mm")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Equal up to a share of each gradient's norm."""
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        assert (gradient - want[name]).norm() <= tolerance * want[name].norm().clamp_min(1.0), name


def targets() -> tuple[Tensor, Tensor]:
    """ids (2, 12), and labels with 11 + 2 = 13 targets: row 1 has none from column 3 on."""
    ids = random_ids(2, 12, seed=11)
    labels = ids.clone()
    labels[1, 3:] = -100
    return ids, labels


# ----------------------------------------------------------------------------------------------------------------- loss
def test_loss_is_the_mean_over_targets() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids, labels = targets()
    output = model(ids, labels=labels)
    shares = torch.log_softmax(output.logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    counted = torch.cat([shares[0], shares[1, :2]])
    assert counted.numel() == 13
    torch.testing.assert_close(output.loss, -counted.mean())
    means = torch.stack([-shares[0].mean(), -shares[1, :2].mean()]).mean()
    assert (output.loss - means).abs() > 0.05  # a mean of means would be another number


@pytest.mark.parametrize("as_tensor", [True, False])
def test_micro_batches_add_up_to_the_whole_batch(as_tensor: bool) -> None:
    """With the number of targets of the whole batch, losses and gradients of the rows add up to those of the batch."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids, labels = targets()
    whole = model(ids, labels=labels)
    whole.loss.backward()
    want = gradients(model)
    number = torch.tensor(13) if as_tensor else 13
    parts = [model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=number).loss for row in (0, 1)]
    for loss in parts:
        loss.backward()
    torch.testing.assert_close(sum(parts), whole.loss)
    assert_same(gradients(model), want, 1e-5)


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [None, 13])
def test_a_micro_batch_without_targets_adds_exactly_0(number: int | None, experts: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation=experts)))
    ids, labels = targets()
    model(ids, labels=labels, num_items_in_batch=number).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=number).loss
    assert loss.item() == 0
    loss.backward()  # adds to what is there
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name
    model.zero_grad()
    model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=number).loss.backward()
    assert all(not g.any() for g in gradients(model).values())  # zeros, not None and not NaN


def test_one_token_has_no_target() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(3, 1)
    output = model(ids, labels=ids)
    assert output.loss.item() == 0
    output.loss.backward()
    assert all(not g.any() for g in gradients(model).values())


def test_the_loss_function_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 7, generator=generator)
    labels = torch.tensor([[1, 2, -100, 3], [4, 5, 6, -100]])
    per_token = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(causal_lm_loss(logits, labels, 7), per_token.sum() / 4)
    torch.testing.assert_close(causal_lm_loss(logits, labels, 7, num_items_in_batch=10), per_token.sum() / 10)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(causal_lm_loss(logits, None, 7, shift_labels=shifted), per_token.sum() / 4)
    torch.testing.assert_close(causal_lm_loss(logits, labels * 0, 7, shift_labels=shifted), per_token.sum() / 4)
    other = labels.masked_fill(labels == -100, 0)
    torch.testing.assert_close(causal_lm_loss(logits, other, 7, ignore_index=0), per_token.sum() / 4)
    assert causal_lm_loss(logits.bfloat16(), labels, 7).dtype == torch.float32
    assert causal_lm_loss(logits.double(), labels, 7).dtype == torch.float64
    with pytest.raises(ValueError, match="labels or shift_labels"):
        causal_lm_loss(logits, None, 7)


def test_labels_that_are_shifted_already() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids, labels = targets()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, model(ids, labels=labels).loss)


def test_another_loss_function_can_be_set() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 0 + vocab_size + len(kwargs)
    ids = random_ids(1, 4)
    assert model(ids, labels=ids, num_items_in_batch=4).loss.item() == 129


# -------------------------------------------------------------------------------------------------------- recomputation
def checkpointed(model: ZayaForCausalLM, reentrant: bool | None) -> ZayaForCausalLM:
    model.train()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


def step(model: ZayaForCausalLM, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    ids, labels = targets()
    output = model(ids, labels=labels, output_router_logits=True, **given)
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_gradient_checkpointing_changes_nothing(kind: str, experts: str, reentrant: bool) -> None:
    config = tiny_config(experts_implementation=experts, layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=3)
    given: dict[str, Any] = {}
    if kind == "padded":
        given["attention_mask"] = torch.ones(2, 12, dtype=torch.int64)
        given["attention_mask"][1, :5] = 0
    if kind == "packed":
        given["position_ids"] = torch.tensor([[*range(5), *range(7)], [0, *range(11)]])
    given.update(output_hidden_states=True, skip_logits=False)
    want, right = step(checkpointed(redraw(ZayaForCausalLM(config)), None), **given)
    model = checkpointed(redraw(ZayaForCausalLM(config)), reentrant)
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=index: ran.append(i))
    got, found = step(model, **given)
    assert sorted(ran) == sorted([*range(4)] * 2)  # every layer ran a second time: there was recomputation
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, want.logits)
    for name, gradient in found.items():
        assert torch.equal(gradient, right[name]), name
    # the records are those of the first pass, once
    assert got.cache is None
    assert len(got.router_logits) == len(got.router_slots) == 4
    assert len(got.hidden_states) == 5
    assert torch.equal(got.tokens_per_slot, want.tokens_per_slot)
    for mine, theirs in zip(
        got.router_logits + got.hidden_states, want.router_logits + want.hidden_states, strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_gradient_checkpointing_sees_the_router_logits_that_a_loss_uses(reentrant: bool) -> None:
    """A loss on the recorded logits reaches the routers through recomputed layers, too."""
    found: list[dict[str, Tensor]] = []
    for mode in (None, reentrant):
        model = checkpointed(redraw(ZayaForCausalLM(tiny_config())), mode)
        logits = model(random_ids(2, 6), output_router_logits=True).router_logits
        sum((i + 1) * layer.square().sum() for i, layer in enumerate(logits)).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert_same({name: found[1][name] for name in found[0]}, found[0], 1e-6)
    assert not any(g.any() for name, g in found[1].items() if name not in found[0])
    assert found[0]["model.layers.3.mlp.gate.router_mlp.out_proj.weight"].any()


def test_checkpointing_leaves_biases_alone_and_can_be_switched_off() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    before = {name: b.clone() for name, b in model.named_buffers()}
    checkpointed(model, True)
    step(model)
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert model(random_ids(1, 4)).cache is not None


# --------------------------------------------------------------------------------------------------- copies and names
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch-save"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after-a-step"])
def test_copies_compute_the_same_and_are_apart(used: bool, way: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=3)))
    if used:
        step(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.loss_function is causal_lm_loss
    output, found = step(model)
    copied, same = step(other)
    assert torch.equal(copied.logits, output.logits)
    assert torch.equal(copied.loss, output.loss)
    assert all(torch.equal(same[name], g) for name, g in found.items())
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    assert torch.equal(model(targets()[0]).logits, output.logits)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "lm_head_bias": True}, {"attention_bias": True}, {"num_hidden_layers": 1}],
    ids=["plain", "untied-with-bias", "attention-bias", "one-layer"],
)
def test_names_and_shapes_are_stocks(changes: dict[str, Any]) -> None:
    ours, stock = ZayaForCausalLM(tiny_config(**changes)), StockForCausalLM(StockConfig(**{**TINY, **changes}))

    def shapes(model: nn.Module) -> dict[str, tuple]:
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    assert shapes(ours) == shapes(stock)
    assert {k: tuple(v.shape) for k, v in ours.state_dict().items()} == {
        k: tuple(v.shape) for k, v in stock.state_dict().items()
    }
    if not changes:
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in stock.parameters())


# ------------------------------------------------------------------------------------------------------ every parameter
@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("routing", ["free", "all-skip", "one-expert", "first-layer-skips", "last-layer-skips"])
def test_every_parameter_gets_a_gradient(routing: str, experts: str) -> None:
    """Never None, whatever the routing: a distributed reduction waits for every parameter on every rank."""
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation=experts, attention_bias=True))).train()
    for index, layer in enumerate(model.model.layers):
        skips = routing == "all-skip" or (routing, index) in (("first-layer-skips", 0), ("last-layer-skips", 3))
        if skips or routing == "one-expert":
            layer.mlp.gate.balancing_biases[-1 if skips else 2] += 5.0
    ids = random_ids(2, 12)
    output = model(ids, labels=ids, output_router_logits=True)
    output.loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all(), name
        layer = int(name.split(".")[2]) if name.startswith("model.layers") else None
        if ".mlp.experts." in name:
            counts = output.tokens_per_slot[layer, :4]
            assert [bool(g.any()) for g in gradient] == [bool(c) for c in counts], name
        elif routing == "free":
            assert gradient.any(), name


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 2)], ids=["1x1", "1x2", "5x2"])
def test_short_rows_train(shape: tuple[int, int]) -> None:
    """Rows shorter than the convolutions' look-back."""
    model = redraw(ZayaForCausalLM(tiny_config(cca_time0=3, cca_time1=4))).train()
    ids = random_ids(*shape)
    model(ids, labels=ids).loss.backward()
    assert all(g.isfinite().all() for g in gradients(model).values())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_dropout_is_for_training_only(implementation: str) -> None:
    plain = redraw(ZayaForCausalLM(tiny_config(attn_implementation=implementation)))
    model = redraw(ZayaForCausalLM(tiny_config(attn_implementation=implementation, attention_dropout=0.5)))
    ids = random_ids(2, 8)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    model.train()
    first, second = model(ids).logits, model(ids).logits
    assert not torch.allclose(first, second)
    torch.manual_seed(3)
    first = model(ids).logits
    torch.manual_seed(3)
    assert torch.equal(model(ids).logits, first)


def test_training_after_inference_mode() -> None:
    """What a first pass keeps for later passes (rotary frequencies) may not be a tensor that autograd refuses."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 6)
    with torch.inference_mode():
        want = model(ids).logits.clone()
    output = model.train()(ids, labels=ids, skip_logits=False)
    output.loss.backward()
    assert torch.equal(output.logits, want)


def test_an_optimiser_step_lowers_the_loss() -> None:
    model = ZayaForCausalLM(tiny_config()).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = random_ids(4, 16)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0] - 1.0
    assert [layer.mlp.gate.balancing_biases[-1].item() for layer in model.model.layers] == [-1.0] * 4


def test_labels_that_do_not_fit_are_named() -> None:
    """Labels of another shape but the right number would give a wrong loss without a word."""
    model, ids = redraw(ZayaForCausalLM(tiny_config())), random_ids(2, 6)
    for wrong in (ids.reshape(1, 12), ids.reshape(6, 2), ids[:, :5], ids.flatten()):
        with pytest.raises(ValueError, match="labels have shape"):
            model(ids, labels=wrong)
    with pytest.raises(ValueError, match=r"labels have shape.*leave logits_to_keep out"):
        model(ids, labels=ids, logits_to_keep=2)
    with pytest.raises(ValueError, match="shift_labels have shape"):
        model(ids, shift_labels=ids[:, 1:])
    with pytest.raises(ValueError, match=r"labels have dtype torch.float32"):
        model(ids, labels=ids.float())
    assert torch.equal(model(ids, labels=ids.int()).loss, model(ids, labels=ids).loss)
