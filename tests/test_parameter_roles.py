"""Which parameters of which families are trained by Muon, and which by AdamW."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zaya_hf
from zaya_hf.testing import TINY, tiny_config
from zaya_hf.training.optim import build_optimizer
from zaya_hf.training.roles import parameter_roles

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def peer(name: str, **changes: Any) -> nn.Module:
    config = {
        "Qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "Gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16}),
        "Llama": (transformers.LlamaConfig, {}),
        "Olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    }[name]
    return getattr(transformers, f"{name}ForCausalLM")(config[0](**{**SMALL, **config[1], **changes}))


def by_kind(roles: dict[str, str]) -> dict[str, str]:
    """Layers alike are one entry."""
    kinds: dict[str, str] = {}
    for name, role in roles.items():
        kind = re.sub(r"^model\.layers\.\d+\.", "", name)
        assert kinds.setdefault(kind, role) == role
    return kinds


ATTENTION = dict.fromkeys((f"self_attn.{n}_proj.weight" for n in "qkvo"), "matrix")
MLP = dict.fromkeys((f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")), "matrix")
EXPERTS = {"mlp.experts.gate_up_proj": "gate_up_experts", "mlp.experts.down_proj": "experts"}
EMBEDDING = {"model.embed_tokens.weight": "adamw"}
NORMS = dict.fromkeys(
    ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"), "adamw_no_decay"
)
QK_NORMS = dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), "adamw_no_decay")
HEAD = {"lm_head.weight": "adamw"}

ZAYA_ROLES = {
    **EMBEDDING,
    **NORMS,
    "model.input_hidden_states_scale": "adamw_no_decay",
    "model.input_hidden_states_bias": "adamw_no_decay",
    "self_attn.qkv_proj.q_proj.weight": "matrix",
    "self_attn.qkv_proj.k_proj.weight": "matrix",
    "self_attn.qkv_proj.v_proj_current.weight": "matrix",
    "self_attn.qkv_proj.v_proj_delayed.weight": "matrix",
    "self_attn.qkv_proj.conv_qk_depthwise.weight": "adamw",
    "self_attn.qkv_proj.conv_qk_depthwise.bias": "adamw_no_decay",
    "self_attn.qkv_proj.conv_qk_grouped.weight": "adamw",
    "self_attn.qkv_proj.conv_qk_grouped.bias": "adamw_no_decay",
    "self_attn.qk_norm.temp": "adamw_no_decay",
    "self_attn.o_proj.weight": "matrix",
    **dict.fromkeys(
        (
            f"post_{block}_residual_scale.{stream}_{kind}"
            for block in ("attention", "mlp")
            for stream in ("hidden_states", "residual")
            for kind in ("scale", "bias")
        ),
        "adamw_no_decay",
    ),
    "mlp.gate.down_proj.weight": "matrix",
    "mlp.gate.down_proj.bias": "adamw_no_decay",
    "mlp.gate.router_states_scale": "adamw_no_decay",
    "mlp.gate.router_mlp.norm.weight": "adamw_no_decay",
    "mlp.gate.router_mlp.fc1.weight": "matrix",
    "mlp.gate.router_mlp.fc1.bias": "adamw_no_decay",
    "mlp.gate.router_mlp.fc2.weight": "matrix",
    "mlp.gate.router_mlp.fc2.bias": "adamw_no_decay",
    "mlp.gate.router_mlp.out_proj.weight": "adamw",
    **EXPERTS,
}
GEMMA_NORMS = dict.fromkeys(("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), "adamw_no_decay")
FAMILIES: list[tuple[str, Callable[[], nn.Module], dict[str, str]]] = [
    ("zaya", lambda: zaya_hf.ZayaForCausalLM(tiny_config()), ZAYA_ROLES),
    (
        "zaya with biases and its own head",
        lambda: zaya_hf.ZayaForCausalLM(tiny_config(attention_bias=True, lm_head_bias=True, tie_word_embeddings=False)),
        {
            **ZAYA_ROLES,
            **HEAD,
            "lm_head.bias": "adamw_no_decay",
            "self_attn.o_proj.bias": "adamw_no_decay",
            **dict.fromkeys(
                (f"self_attn.qkv_proj.{n}.bias" for n in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")),
                "adamw_no_decay",
            ),
        },
    ),
    ("stock zaya", lambda: transformers.ZayaForCausalLM(transformers.ZayaConfig(**TINY)), ZAYA_ROLES),
    ("qwen3", lambda: peer("Qwen3"), {**EMBEDDING, **ATTENTION, **QK_NORMS, **MLP, **NORMS, **HEAD}),
    ("gemma3", lambda: peer("Gemma3"), {**EMBEDDING, **ATTENTION, **QK_NORMS, **MLP, **NORMS, **GEMMA_NORMS}),
    ("llama", lambda: peer("Llama"), {**EMBEDDING, **ATTENTION, **MLP, **NORMS, **HEAD}),
    ("tied llama", lambda: peer("Llama", tie_word_embeddings=True), {**EMBEDDING, **ATTENTION, **MLP, **NORMS}),
    (
        "olmoe",
        lambda: peer("Olmoe"),
        {**EMBEDDING, **ATTENTION, **QK_NORMS, **EXPERTS, **NORMS, **HEAD, "mlp.gate.weight": "adamw"},
    ),
]


@pytest.mark.parametrize(("make", "expected"), [f[1:] for f in FAMILIES], ids=[f[0] for f in FAMILIES])
def test_roles_of_a_family(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    model = make()
    roles = parameter_roles(model)
    assert by_kind(dict(roles)) == expected
    assert roles.keys() == dict(model.named_parameters()).keys()
    optimizer = build_optimizer(model)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted({id(p) for p in model.parameters()})  # each once
    for group in optimizer.param_groups:
        assert [roles[name] for name in group["param_names"]] == [group["role"]] * len(group["params"])
        assert all(model.get_parameter(n) is p for n, p in zip(group["param_names"], group["params"], strict=True))
        if group["role"] == "adamw_no_decay":
            assert group["weight_decay"] == 0


class TestRolesInGeneral:
    def test_frozen_parameters_are_left_out(self) -> None:
        model = peer("Llama")
        model.get_submodule("model.layers.0").requires_grad_(False)
        roles = parameter_roles(model)
        assert not any(name.startswith("model.layers.0.") for name in roles)
        assert any(name.startswith("model.layers.1.") for name in roles)
        build_optimizer(model)

    def test_nothing_to_train(self) -> None:
        with pytest.raises(ValueError, match="no trainable parameter"):
            build_optimizer(peer("Llama").requires_grad_(False))

    def test_gpt2(self) -> None:
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=128, bos_token_id=1, eos_token_id=1)
        roles = parameter_roles(transformers.GPT2LMHeadModel(config))
        assert {name for name, role in roles.items() if role == "matrix"} == {
            f"transformer.h.0.{n}.weight" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        }
        assert {name for name, role in roles.items() if role == "adamw"} == {
            "transformer.wte.weight",
            "transformer.wpe.weight",
        }

    def test_a_matrix_shared_with_the_embedding_in_any_order(self) -> None:
        for order in ((nn.Embedding(8, 4), nn.Linear(4, 8)), (nn.Linear(4, 8), nn.Embedding(8, 4))):
            model = nn.Sequential(*order)
            order[0].weight = order[1].weight
            assert {n: r for n, r in parameter_roles(model).items() if n.endswith("weight")} == {"0.weight": "adamw"}

    def test_a_linear_layer_to_one_number_is_a_vector(self) -> None:
        assert parameter_roles(nn.Linear(8, 1, bias=False)) == {"weight": "adamw"}
        assert parameter_roles(nn.Linear(8, 2, bias=False)) == {"weight": "matrix"}

    def test_transposed_experts_are_refused_not_cut_wrongly(self) -> None:
        experts = nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 96))
        experts.down_proj = nn.Parameter(torch.zeros(4, 48, 32))
        model = nn.ModuleDict({"experts": experts})
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj has shape \(4, 32, 96\)"):
            parameter_roles(model)

    def test_a_plain_3d_parameter_is_no_expert(self) -> None:
        table = nn.Module()
        table.positions = nn.Parameter(torch.zeros(1, 16, 8))
        assert parameter_roles(table) == {"positions": "adamw"}
