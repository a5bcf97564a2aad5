"""Names and shapes of parameters and buffers, written out: adapters, optimisers and weight sync go by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.zaya import ZayaForCausalLM as StockZaya

from zaya_hf import (
    ZayaConfig,
    ZayaForCausalLM,
    ZayaForSequenceClassification,
    ZayaForTokenClassification,
    ZayaModel,
)
from zaya_hf.testing import TINY, redraw, tiny_config

LAYERS = 4
#: of each layer; D = 64, 4 query heads and 2 key/value heads of 16, 4 experts of width 32, a router of width 16
OF_A_LAYER = {
    "input_layernorm.weight": (64,),
    "self_attn.qkv_proj.q_proj.weight": (64, 64),
    "self_attn.qkv_proj.k_proj.weight": (32, 64),
    "self_attn.qkv_proj.v_proj_current.weight": (16, 64),
    "self_attn.qkv_proj.v_proj_delayed.weight": (16, 64),
    "self_attn.qkv_proj.conv_qk_depthwise.weight": (96, 1, 2),
    "self_attn.qkv_proj.conv_qk_depthwise.bias": (96,),
    "self_attn.qkv_proj.conv_qk_grouped.weight": (96, 16, 2),
    "self_attn.qkv_proj.conv_qk_grouped.bias": (96,),
    "self_attn.qk_norm.temp": (2,),
    "self_attn.o_proj.weight": (64, 64),
    "post_attention_residual_scale.hidden_states_scale": (64,),
    "post_attention_residual_scale.hidden_states_bias": (64,),
    "post_attention_residual_scale.residual_scale": (64,),
    "post_attention_residual_scale.residual_bias": (64,),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate.router_states_scale": (16,),  # of all but the first
    "mlp.gate.down_proj.weight": (16, 64),
    "mlp.gate.down_proj.bias": (16,),
    "mlp.gate.router_mlp.norm.weight": (16,),
    "mlp.gate.router_mlp.fc1.weight": (16, 16),
    "mlp.gate.router_mlp.fc1.bias": (16,),
    "mlp.gate.router_mlp.fc2.weight": (16, 16),
    "mlp.gate.router_mlp.fc2.bias": (16,),
    "mlp.gate.router_mlp.out_proj.weight": (5, 16),
    "mlp.experts.gate_up_proj": (4, 64, 64),
    "mlp.experts.down_proj": (4, 64, 32),
    "post_mlp_residual_scale.hidden_states_scale": (64,),
    "post_mlp_residual_scale.hidden_states_bias": (64,),
    "post_mlp_residual_scale.residual_scale": (64,),
    "post_mlp_residual_scale.residual_bias": (64,),
}
#: of `ZayaModel`, in their order
PARAMETERS = {
    "input_hidden_states_scale": (64,),
    "input_hidden_states_bias": (64,),
    "embed_tokens.weight": (128, 64),
    **{
        f"layers.{index}.{name}": shape
        for index in range(LAYERS)
        for name, shape in OF_A_LAYER.items()
        if index or name != "mlp.gate.router_states_scale"
    },
    "norm.weight": (64,),
}
BUFFERS = {f"layers.{index}.mlp.gate.balancing_biases": (5,) for index in range(LAYERS)}
HEAD = {"lm_head.weight": (128, 64)}
#: with `attention_bias`
BIASES = {
    f"layers.{index}.self_attn.{name}.bias": (width,)
    for index in range(LAYERS)
    for name, width in {
        "qkv_proj.q_proj": 64,
        "qkv_proj.k_proj": 32,
        "qkv_proj.v_proj_current": 16,
        "qkv_proj.v_proj_delayed": 16,
        "o_proj": 64,
    }.items()
}


def below(prefix: str, names: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in names.items()}


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in dict(tensors).items()}


def assert_names(model: Any) -> None:
    """Those of a causal model with a tied head."""
    assert shapes(model.named_parameters()) == below("model.", PARAMETERS)
    assert shapes(model.named_buffers()) == below("model.", BUFFERS)
    assert shapes(model.state_dict()) == below("model.", PARAMETERS | BUFFERS) | HEAD


def test_causal_model() -> None:
    assert_names(ZayaForCausalLM(tiny_config()))


def test_transformers_own_class_has_the_same() -> None:
    stock = StockZaya(ZayaConfig(**TINY))
    assert shapes(stock.named_parameters()) == below("model.", PARAMETERS)
    assert shapes(stock.state_dict()) == below("model.", PARAMETERS | BUFFERS) | HEAD


def test_model_without_a_head() -> None:
    model = ZayaModel(tiny_config())
    assert shapes(model.named_parameters()) == PARAMETERS
    assert shapes(model.named_buffers()) == BUFFERS
    assert shapes(model.state_dict()) == PARAMETERS | BUFFERS


def test_untied_head_and_biases() -> None:
    model = ZayaForCausalLM(tiny_config(tie_word_embeddings=False, attention_bias=True, lm_head_bias=True))
    expected = below("model.", PARAMETERS | BIASES) | HEAD | {"lm_head.bias": (128,)}
    assert shapes(model.named_parameters()) == expected
    assert shapes(model.state_dict()) == expected | below("model.", BUFFERS)


def test_order() -> None:
    """Optimisers keep their state by position."""
    assert [name for name, _ in ZayaModel(tiny_config()).named_parameters()] == list(PARAMETERS)


@pytest.mark.parametrize(
    ("head", "shape"), [(ZayaForSequenceClassification, (3, 64)), (ZayaForTokenClassification, (3, 64))]
)
def test_task_heads(head: Any, shape: tuple[int, ...]) -> None:
    parameters = shapes(head(tiny_config(num_labels=3)).named_parameters())
    assert {n: s for n, s in parameters.items() if n.startswith("model.")} == below("model.", PARAMETERS)
    assert parameters["score.weight"] == shape


def test_fusing_packing_and_compiling_show_nowhere() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.fuse_for_inference(pack_weights=True)  # type: ignore[operator]
    model.compile_decoding(backend="eager")  # type: ignore[operator]
    assert_names(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.unfuse()  # type: ignore[operator]
    assert_names(model)


def test_every_parameter_has_a_role_of_the_optimizer() -> None:
    from zaya_hf.training.roles import parameter_roles

    roles = parameter_roles(ZayaForCausalLM(tiny_config()))
    assert roles.keys() == below("model.", PARAMETERS).keys()
    muon = {name.split(".", 3)[-1] for name, role in roles.items() if role in ("matrix", "experts", "gate_up_experts")}
    assert muon == {
        *(name for name, shape in OF_A_LAYER.items() if len(shape) == 2 and not name.endswith("out_proj.weight")),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
