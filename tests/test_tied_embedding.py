"""The gradient of an embedding that is also the head: the same as of two tensors, in one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

PAD = 0


def build(dtype: torch.dtype = torch.float64, **changes: object) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(tie_word_embeddings=True, num_hidden_layers=2, **changes)), seed=4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.to(dtype).train()


def gradients(model: ZayaForCausalLM, ids: Tensor, **given: object) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **given).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def ids_with_pads() -> tuple[Tensor, Tensor]:
    ids = random_ids(2, 9, seed=1)
    ids[:, 3] = ids[:, 5]  # a word twice
    mask = torch.ones_like(ids)
    mask[0, :4], ids[0, :4] = 0, PAD
    return ids, mask


class Made(TorchDispatchMode):
    """Counts the new tensors of a shape."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.shape, self.made = like.shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and not tensor.is_sparse and tensor.shape == self.shape:
                inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and not a.is_sparse}
                self.made += tensor.untyped_storage().data_ptr() not in inputs
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_with_logits(dtype: torch.dtype, checkpointing: bool) -> None:
    model = build(dtype)
    if checkpointing:
        model.activation_checkpointing_enable()
    ids, mask = ids_with_pads()
    got, want = (
        gradients(model, ids, attention_mask=mask),
        gradients(model, ids, attention_mask=mask, skip_logits=False),
    )
    limit = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1}[dtype]
    for name in want:
        assert got[name].layout == torch.strided
        assert got[name].dtype == dtype
        error = (got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-3)
        assert error <= limit, f"{name}: {error:.1e}"


def test_only_one_tensor_of_its_size_is_made() -> None:
    model = build(torch.float32)
    ids = random_ids(2, 9)
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    with Made(model.lm_head.weight) as backward:
        loss.backward()
    assert backward.made == 0  # the head's, made in the forward pass, takes the rows
    model.zero_grad()
    loss = model(ids, labels=ids, skip_logits=False).loss
    with Made(model.lm_head.weight) as usual:
        loss.backward()
    assert usual.made >= 2  # the head's and the embedding's: what the count above would see


def test_padding_words_get_the_gradient_of_the_head_only() -> None:
    model = build()
    ids, mask = ids_with_pads()
    other = copy.deepcopy(model)
    other.model.embed_tokens.padding_idx = None
    with_pad, without = (gradients(m, ids)["model.embed_tokens.weight"] for m in (model, other))
    assert mask.sum() < mask.numel()
    assert not torch.allclose(with_pad[PAD], without[PAD])
    torch.testing.assert_close(with_pad[1:], without[1:])


def test_accumulation_and_a_graph_used_twice() -> None:
    model, ids = build(), random_ids(2, 9)
    once = gradients(model, ids)["model.embed_tokens.weight"].clone()
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * once)
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, 2 * once)


def test_a_weight_that_is_used_elsewhere_too() -> None:
    model, ids = build(), random_ids(2, 9)
    once = gradients(model, ids)["model.embed_tokens.weight"].clone()
    model.zero_grad()
    (model(ids, labels=ids).loss + 3 * model.lm_head.weight.sum()).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, once + 3)


def test_a_loss_of_hidden_states_alone_has_a_dense_gradient() -> None:
    model, ids = build(), random_ids(2, 9)
    got, want = [], []
    for skip, found in ((None, got), (False, want)):
        model.zero_grad()
        output = model(ids, labels=ids, output_hidden_states=True, skip_logits=skip)
        output.hidden_states[-1].square().sum().backward()
        found.append(model.lm_head.weight.grad)
    assert got[0].layout == torch.strided
    torch.testing.assert_close(got[0], want[0])


def test_second_derivatives() -> None:
    model, ids = build(), random_ids(1, 5)
    found = []
    for skip in (None, False):
        (first,) = torch.autograd.grad(
            model(ids, labels=ids, skip_logits=skip).loss, model.model.norm.weight, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), model.lm_head.weight)[0])
    torch.testing.assert_close(found[0], found[1])


def test_hooks_of_the_embedding_run() -> None:
    """`enable_input_require_grads` and the like watch the module: then it is called."""
    model, ids = build(), random_ids(1, 5)
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    got = gradients(model, ids)
    assert len(seen) == 1
    model.model.embed_tokens._forward_hooks.clear()
    for name, grad in gradients(model, ids).items():
        torch.testing.assert_close(grad, got[name])
    assert len(seen) == 1


def test_ids_are_checked() -> None:
    model = build()
    with pytest.raises(ValueError, match="ids must lie in 0"):
        model(torch.tensor([[3, 128]]), labels=torch.tensor([[3, 4]]))
