"""Residual scaling and RMSNorm: the formulas, fp32 inside, one rounding, and where the merges stand in the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.modeling_zaya import ZayaDecoderLayer, ZayaResidualScaling, ZayaRMSNorm
from zaya_hf.testing import random_ids, redraw, tiny_config


def draw(*shape: int, seed: int = 0, scale: float = 1.0, around: float = 0.0) -> Tensor:
    return around + scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vectors(width: int) -> tuple[Tensor, ...]:
    """output scale, output bias, residual scale, residual bias."""
    return tuple(draw(width, seed=10 + i, scale=0.3, around=1 - i % 2) for i in range(4))


# -------------------------------------------------------------------------------------------------------------- merge
def test_merge_is_the_form_of_the_released_weights() -> None:
    """(o + b) s + (r + b') s': the bias comes before the scale, on either side."""
    output, residual, (s, b, rs, rb) = draw(2, 3, 8), draw(2, 3, 8, seed=1), vectors(8)
    merged = ops.residual_merge(output, residual, s, b, rs, rb)
    torch.testing.assert_close(merged, output * s + b * s + residual * rs + rb * rs)
    assert not torch.allclose(merged, output * s + b + residual * rs + rb)
    torch.testing.assert_close(ops.residual_merge(output, None, s, b), output * s + b * s)


def test_merge_gradients() -> None:
    leaves = [draw(2, 3, 8).requires_grad_(), draw(2, 3, 8, seed=1).requires_grad_()]
    leaves += [v.requires_grad_() for v in vectors(8)]
    assert torch.autograd.gradcheck(ops.residual_merge, leaves)
    assert torch.autograd.gradcheck(lambda o, s, b: ops.residual_merge(o, None, s, b), [leaves[0], *leaves[2:4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stream", [torch.float32, None], ids=["fp32-stream", "narrow-stream"])
def test_merge_does_not_round_in_between(dtype: torch.dtype, stream: torch.dtype | None) -> None:
    """Narrow inputs and weights give the exact result to fp32: nothing is rounded to the narrow dtype on the way."""
    output, residual = draw(4, 64).to(dtype), draw(4, 64, seed=1).to(stream or dtype)
    weights = [v.to(dtype) for v in vectors(64)]
    merged = ops.residual_merge(output, residual, *weights)
    assert merged.dtype == torch.float32
    s, b, rs, rb = (w.double() for w in weights)
    exact = (output.double() + b) * s + (residual.double() + rb) * rs
    torch.testing.assert_close(merged.double(), exact, rtol=0, atol=2e-6)
    rounded = ((output + weights[1]) * weights[0]).double() + ((residual + weights[3]) * weights[2]).double()
    assert (rounded - exact).abs().max() > 1e-3  # the other way would show
    embedded = ops.residual_merge(output, None, *weights[:2])
    assert embedded.dtype == torch.float32
    torch.testing.assert_close(embedded.double(), (output.double() + b) * s, rtol=0, atol=2e-6)


def test_fresh_merge_is_a_plain_residual() -> None:
    output, residual = draw(2, 3, 8).float(), draw(2, 3, 8, seed=1).float()
    assert torch.equal(ZayaResidualScaling(8)(output, residual), output + residual)


# ------------------------------------------------------------------------------------------------------------ RMSNorm
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_rms_norm_is_the_formula(eps: float) -> None:
    x, weight = draw(2, 3, 8), draw(8, seed=1, around=1.0)
    want = torch.stack([row / (row.pow(2).sum() / 8 + eps).sqrt() * weight for row in x.flatten(0, 1)]).view(2, 3, 8)
    torch.testing.assert_close(ops.rms_norm(x, weight, eps), want)
    assert torch.autograd.gradcheck(lambda a, w: ops.rms_norm(a, w, eps), [x.requires_grad_(), weight.requires_grad_()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stream", [torch.float32, None], ids=["fp32-stream", "narrow-stream"])
def test_rms_norm_rounds_once_to_the_dtype_of_its_weight(dtype: torch.dtype, stream: torch.dtype | None) -> None:
    x, weight = draw(4, 64, scale=50.0).to(stream or dtype), draw(64, seed=1, around=1.0).to(dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.001 + 1e-6).all()
    assert ops.rms_norm(x, weight, 1e-5, torch.float32).dtype == torch.float32


def test_rms_norm_of_an_fp16_stream_beyond_fp16() -> None:
    """Squares of numbers above 256 overflow fp16; a stream in fp32 may exceed it altogether."""
    weight = torch.ones(64, dtype=torch.float16)
    for x in (torch.full((1, 64), 6e4, dtype=torch.float16), torch.full((1, 64), 1e9)):
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), torch.ones(1, 64, dtype=torch.float16))


def test_rms_norm_of_zeros_is_zero_with_finite_gradients() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = ops.rms_norm(x, torch.ones(8), 1e-5)
    assert not out.any()
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_rms_norm_module_uses_its_own_eps_and_weight() -> None:
    norm = ZayaRMSNorm(8, 0.5)
    with torch.no_grad():
        norm.weight.copy_(draw(8, around=1.0))
    x = draw(3, 8).float()
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight)


# --------------------------------------------------------------------------------------------------- in the model
def test_the_merges_stand_after_attention_and_after_the_experts() -> None:
    """Re-assemble a layer from what its parts saw and returned."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))
    seen: dict[str, tuple] = {}

    def keep(name: str):
        def hook(module: torch.nn.Module, args: tuple, output: object) -> None:
            seen[name] = (args, output)

        return hook

    layer: ZayaDecoderLayer = model.model.layers[1]
    for name, part in layer.named_children():
        part.register_forward_hook(keep(name))
    layer.register_forward_hook(keep("layer"))
    model(random_ids(2, 5))

    stream = seen["layer"][0][0]
    assert seen["input_layernorm"][0][0] is stream
    assert seen["self_attn"][0][0] is seen["input_layernorm"][1]
    attended = seen["self_attn"][1][0]
    first = layer.post_attention_residual_scale
    middle = (attended + first.hidden_states_bias) * first.hidden_states_scale
    middle = middle + (stream + first.residual_bias) * first.residual_scale
    torch.testing.assert_close(seen["post_attention_layernorm"][0][0], middle)
    assert seen["mlp"][0][0] is seen["post_attention_layernorm"][1]
    mixed = seen["mlp"][1][0]
    second = layer.post_mlp_residual_scale
    end = (mixed + second.hidden_states_bias) * second.hidden_states_scale
    end = end + (middle + second.residual_bias) * second.residual_scale
    torch.testing.assert_close(seen["layer"][1][0], end)


def test_the_embedding_has_the_output_half_only() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 5)
    first = model(ids, output_hidden_states=True).hidden_states[0]
    embedded = model.model.embed_tokens(ids)
    want = (embedded + model.model.input_hidden_states_bias) * model.model.input_hidden_states_scale
    torch.testing.assert_close(first, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_stream_is_fp32_unless_switched_off(dtype: torch.dtype) -> None:
    ids = random_ids(2, 5)
    for in_fp32, expected in ((True, torch.float32), (False, dtype)):
        model = redraw(ZayaForCausalLM(tiny_config(residual_in_fp32=in_fp32))).to(dtype)
        output = model(ids, output_hidden_states=True)
        assert {h.dtype for h in output.hidden_states[:-1]} == {expected}
        assert output.hidden_states[-1].dtype == output.logits.dtype == dtype


def test_a_rounded_stream_loses_what_an_fp32_stream_keeps() -> None:
    """A large stream swallows small outputs in bf16: with the switch on, the logits are closer to those of fp32."""
    ids = random_ids(2, 8)
    errors = {}
    for in_fp32 in (True, False):
        model = redraw(ZayaForCausalLM(tiny_config(residual_in_fp32=in_fp32, num_experts=1))).to(torch.bfloat16)
        with torch.no_grad():
            model.model.input_hidden_states_scale.mul_(200)
            for layer in model.model.layers:
                layer.mlp.gate.balancing_biases.copy_(torch.tensor([5.0, 0.0]))  # routing cannot flip
            exact = redraw(ZayaForCausalLM(tiny_config(num_experts=1)))
            exact.load_state_dict(model.state_dict())
            errors[in_fp32] = (model(ids).logits.float() - exact(ids).logits).norm()
    assert errors[True] < 0.7 * errors[False]
