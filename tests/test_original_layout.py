"""Checkpoints in the original layout (alternating half-layers), in all three config dialects."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from original_checkpoints import original_config, original_tensors, write_checkpoint
from zaya_hf import ZayaConfig, ZayaForCausalLM, ZayaModel
from zaya_hf.checkpoints.layouts import (
    CombinedName,
    combined_key_to_original,
    detect_layout,
    original_key_to_combined,
    plan_from_original,
)
from zaya_hf.testing import random_ids, redraw, tiny_config

# What the published configs say, and the model that they mean.
BASE = {
    "model_type": "zaya",
    "architectures": ["ZayaForCausalLM"],
    "zaya_layers": ["a", 16] * 40,
    "num_hidden_layers": 120,
    "cca_num_q_heads": [8, 0] * 40,
    "num_query_groups_list": [2, 0] * 40,
    "ffn_hidden_size_list": [0, 4096] * 40,
    "zaya_mlp_expansion": [0, 256] * 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "vocab_size": 262272,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "rope_scaling": False,
    "norm_epsilon": 1e-5,
    "moe_router_topk": 1,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "zaya_high_prec": True,
    "scale_residual_merge": True,
    "residual_in_fp32": False,
    "activation_func": "swiglu",
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LEGACY_8B = {
    "model_type": "zaya",
    "num_hidden_layers": 80,
    "num_attention_heads": 8,
    "head_dim": 128,
    "kv_channels": 128,
    "num_query_groups": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "ffn_hidden_size": 4096,
    "zaya_mlp_expansion": 256,
    "moe_router_topk": 1,
    "norm_epsilon": 1e-5,
    "rope_theta": 5000000,
    "rope_scaling": False,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "vocab_size": 262272,
    "hidden_size": 2048,
    "residual_in_fp32": True,
    "scale_residual_merge": True,
    "mamba_cache_dtype": "float32",
    "sliding_window": None,
    "swa_layers": None,
    "swa_rotary_base": None,
    "cca_time0": 2,
    "cca_time1": 2,
    "clamp_temp": False,
    "zaya_use_eda": True,
    "zaya_use_mod": True,
    "dtype": "bfloat16",
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 106,
}
SMOE_74B = {
    "model_type": "smoe",
    "smoe_layers": ["a", 24] * 60,
    "cca_num_q_heads": [16, 0] * 60,
    "num_query_groups_list": [2, 0] * 60,
    "ffn_hidden_size_list": [0, 8192] * 80,  # longer than the model is deep
    "smoe_mlp_expansion": [0, 256] * 60,
    "swa_layers": [4096, 0, 0, 0] * 30,
    "swa_rotary_base": 10000,
    "rotary_base": 5000000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 262272,
    "moe_router_topk": 1,
    "norm_epsilon": 1e-5,
    "smoe_use_mod": True,
    "smoe_use_eda": True,
    "smoe_inhibitory": False,
    "smoe_p_switch": 0.0,
    "use_rope_scaling": False,
    "ignore_mod_in_smoe_block": False,
    "residual_in_fp32": True,
    "eos_token_id": 1,
}


# --- configs ----------------------------------------------------------------------------------------------------------


def test_config_dialect_a():
    config = ZayaConfig.from_dict(BASE)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (40, 8, 2)
    assert (config.head_dim, config.num_experts, config.moe_intermediate_size) == (128, 16, 2048)
    assert (config.router_hidden_size, config.max_position_embeddings, config.eos_token_id) == (256, 32768, 1)
    assert config.rope_parameters["hybrid"] == {
        "rope_type": "default",
        "rope_theta": 1000000,
        "partial_rotary_factor": 0.5,
    }
    # Its own code reads an epsilon that the files do not have, and then uses 1e-6 in the router.
    assert (config.rms_norm_eps, config.router_norm_eps) == (1e-5, 1e-6)
    assert (config.residual_in_fp32, config.fp32_logits, config.skip_expert) == (False, True, "identity")
    assert config.tie_word_embeddings is True
    assert config.layer_types == ["hybrid"] * 40
    assert config.sliding_window is None


def test_config_dialect_b_and_its_earlier_revision():
    config = ZayaConfig.from_dict(LEGACY_8B)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (40, 8, 128)
    assert config.rope_parameters["hybrid"]["rope_theta"] == 5000000
    assert (config.residual_in_fp32, config.fp32_logits, config.skip_expert) == (True, True, "identity")
    assert (config.router_norm_eps, config.eos_token_id, config.dtype) == (None, 106, torch.bfloat16)
    # 16 counts the heads before compression there; 128 = 2048 / 16 is their width.
    earlier = {name: value for name, value in LEGACY_8B.items() if name not in ("head_dim", "kv_channels")}
    earlier |= {"num_attention_heads": 16, "cca_num_q_heads": 8}
    assert ZayaConfig.from_dict(earlier).to_dict() == config.to_dict()


def test_config_dialect_c():
    config = ZayaConfig.from_dict(SMOE_74B)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (60, 16, 2)
    assert (config.head_dim, config.num_experts, config.moe_intermediate_size) == (128, 24, 4096)
    assert config.layer_types == ["hybrid_sliding", "hybrid"] * 30
    # 4096 tokens before the current one; the combined layout counts that one too.
    assert config.sliding_window == 4097
    assert config.rope_parameters["hybrid"]["rope_theta"] == 5000000
    assert config.rope_parameters["hybrid_sliding"]["rope_theta"] == 10000
    assert config.to_dict()["model_type"] == "zaya"


def test_window_list_per_block():
    per_block = ZayaConfig.from_dict(SMOE_74B | {"swa_layers": [4096, 0] * 30})
    assert per_block.to_dict() == ZayaConfig.from_dict(SMOE_74B).to_dict()


def test_saved_config_has_one_layout(tmp_path):
    for original in (BASE, LEGACY_8B, SMOE_74B):
        config = ZayaConfig.from_dict(original)
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        leftovers = [name for name in written if name.startswith(("_", "zaya_", "smoe_", "swa_"))]
        assert leftovers == []
        assert not {"ffn_hidden_size", "norm_epsilon", "moe_router_topk", "cca_num_q_heads"} & set(written)
        assert ZayaConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("original", "change", "named"),
    [
        (LEGACY_8B, {"zaya_use_mod": False}, "zaya_use_mod=False"),
        (LEGACY_8B, {"zaya_use_eda": False}, "zaya_use_eda=False"),
        (LEGACY_8B, {"scale_residual_merge": False}, "scale_residual_merge=False"),
        (LEGACY_8B, {"add_bias_linear": True}, "add_bias_linear=True"),
        (LEGACY_8B, {"gated_linear_unit": False}, "gated_linear_unit=False"),
        (LEGACY_8B, {"activation_func": "gelu"}, "activation_func='gelu'"),
        (LEGACY_8B, {"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        (LEGACY_8B, {"moe_router_topk": 2}, "moe_router_topk=2"),
        (LEGACY_8B, {"cca": False}, "cca=False"),
        (LEGACY_8B, {"num_hidden_layers": 81}, "num_hidden_layers=81"),
        (LEGACY_8B, {"ffn_hidden_size": 4095}, "ffn_hidden_size=4095"),
        (LEGACY_8B, {"num_query_groups": 4}, "num_query_groups=4"),
        (LEGACY_8B, {"num_experts": None}, "num_experts=None"),
        (LEGACY_8B, {"head_dim": None, "kv_channels": None}, "head_dim=None"),
        (LEGACY_8B, {"rope_theta": None}, "rope_theta=None"),
        (LEGACY_8B, {"rope_scaling": True}, "rope_scaling=True"),
        (LEGACY_8B, {"sliding_window": 4096}, "sliding_window=4096"),
        (LEGACY_8B, {"swa_layers": [1] * 7}, "swa_layers='7 entries'"),
        (BASE, {"zaya_layers": ["a", 16] * 39 + ["a", 8]}, r"zaya_layers=\[8, 16\]"),
        (BASE, {"zaya_layers": ["a", 16, 16, "a"]}, r"zaya_layers\[2\]=16"),
        (BASE, {"cca_num_q_heads": [8, 0] * 39 + [16, 0]}, r"cca_num_q_heads=\[8, 16\]"),
        (BASE, {"num_query_groups_list": [2, 0] * 39 + [4, 0]}, r"num_query_groups_list=\[2, 4\]"),
        (BASE, {"ffn_hidden_size_list": [0, 4096] * 39 + [0, 2048]}, r"ffn_hidden_size_list=\[2048, 4096\]"),
        (BASE, {"ffn_hidden_size_list": [0, 4096] * 39}, "ffn_hidden_size_list='78 entries'"),
        (BASE, {"zaya_mlp_expansion": [0, 256] * 39 + [0, 128]}, r"zaya_mlp_expansion=\[128, 256\]"),
        (SMOE_74B, {"smoe_use_mod": False}, "smoe_use_mod=False"),
        (SMOE_74B, {"swa_layers": [4096, 0, 1024, 0] * 30}, r"swa_layers=\[1024, 4096\]"),
        (SMOE_74B, {"smoe_p_switch": 0.5}, "smoe_p_switch=0.5"),
    ],
)
def test_inexpressible_config_is_one_line_naming_the_field(original, change, named):
    with pytest.raises(ValueError, match=named) as caught:
        ZayaConfig.from_dict(original | change)
    assert "\n" not in str(caught.value)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "combined"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.input_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.layers.0.res_scale.hidden_states_scale", "model.input_hidden_states_scale"),
        ("model.layers.0.res_scale.hidden_states_bias", "model.input_hidden_states_bias"),
        ("model.layers.6.self_attn.qkv.linear_q.weight", "model.layers.3.self_attn.qkv_proj.q_proj.weight"),
        ("model.layers.6.self_attn.qkv.linear_k.weight", "model.layers.3.self_attn.qkv_proj.k_proj.weight"),
        ("model.layers.6.self_attn.qkv.val_proj1.weight", "model.layers.3.self_attn.qkv_proj.v_proj_current.weight"),
        ("model.layers.6.self_attn.qkv.val_proj2.weight", "model.layers.3.self_attn.qkv_proj.v_proj_delayed.weight"),
        (
            "model.layers.6.self_attn.qkv.conv_qk.0.weight",
            "model.layers.3.self_attn.qkv_proj.conv_qk_depthwise.weight",
        ),
        ("model.layers.6.self_attn.qkv.conv_qk.1.bias", "model.layers.3.self_attn.qkv_proj.conv_qk_grouped.bias"),
        ("model.layers.6.self_attn.qkv.temp", "model.layers.3.self_attn.qk_norm.temp"),
        ("model.layers.6.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("model.layers.6.res_scale.residual_bias", "model.layers.2.post_mlp_residual_scale.residual_bias"),
        ("model.layers.7.res_scale.residual_scale", "model.layers.3.post_attention_residual_scale.residual_scale"),
        ("model.layers.7.input_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("model.layers.7.zaya_block.router.down_proj.bias", "model.layers.3.mlp.gate.down_proj.bias"),
        ("model.layers.7.zaya_block.router.rmsnorm_eda.weight", "model.layers.3.mlp.gate.router_mlp.norm.weight"),
        ("model.layers.7.zaya_block.router.router_states_scale", "model.layers.3.mlp.gate.router_states_scale"),
        ("model.layers.7.zaya_block.router.router_mlp.0.bias", "model.layers.3.mlp.gate.router_mlp.fc1.bias"),
        ("model.layers.7.smoe_block.router.router_mlp.2.weight", "model.layers.3.mlp.gate.router_mlp.fc2.weight"),
        ("model.layers.7.zaya_block.router.router_mlp.4.weight", "model.layers.3.mlp.gate.router_mlp.out_proj.weight"),
        ("model.layers.7.zaya_block.router.balancing_biases", "model.layers.3.mlp.gate.balancing_biases"),
        ("model.res_scale.hidden_states_scale", "model.layers.3.post_mlp_residual_scale.hidden_states_scale"),
        ("model.final_norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_against_a_table_written_by_hand(original, combined):
    assert original_key_to_combined(original, 4) == CombinedName(combined)
    block = "smoe_block" if "smoe_block" in original else "zaya_block"
    assert combined_key_to_original(combined, 4, 3, block) == [original]


def test_expert_names():
    first = original_key_to_combined("model.layers.7.zaya_block.experts.local_experts.2.linear_fc1.weight", 4)
    second = original_key_to_combined("model.layers.7.smoe_block.experts.local_experts.0.linear_fc2.weight", 4)
    assert first == CombinedName("model.layers.3.mlp.experts.gate_up_proj", 2)
    assert second == CombinedName("model.layers.3.mlp.experts.down_proj", 0)
    assert combined_key_to_original("model.layers.3.mlp.experts.down_proj", 4, 2) == [
        "model.layers.7.zaya_block.experts.local_experts.0.linear_fc2.weight",
        "model.layers.7.zaya_block.experts.local_experts.1.linear_fc2.weight",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.res_scale.residual_scale",  # nothing precedes the first half-layer
        "model.layers.8.input_norm.weight",  # beyond the depth
        "model.layers.1.self_attn.o_proj.weight",  # attention on a MoE half-layer
        "model.layers.0.zaya_block.router.down_proj.weight",
        "model.layers.7.zaya_block.router.down_proj.weight_scale",
        "model.layers.6.self_attn.qkv.temp.weight",
        "model.layers.6.self_attn.qkv.linear_q",
        "model.layers.7.other_block.router.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_unknown_names_are_not_guessed(key):
    assert original_key_to_combined(key, 4) is None


@pytest.mark.parametrize(("config", "originals", "combined"), [(LEGACY_8B, 2483, 1283), (SMOE_74B, 4683, 1923)])
def test_map_is_a_bijection_on_the_published_models(config, originals, combined):
    """Counts are those of the published files."""
    config = ZayaConfig.from_dict(config)
    with torch.device("meta"):
        model = ZayaForCausalLM(config)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert len(wanted) == combined
    names = [
        original
        for name in wanted
        for original in combined_key_to_original(name, config.num_hidden_layers, config.num_experts)
    ]
    assert len(names) == len(set(names)) == originals
    assert detect_layout(names) == "original"
    assert detect_layout(wanted) == "combined"
    plan = plan_from_original(reversed(names), config.num_hidden_layers, config.num_experts)
    assert (plan.unknown, plan.missing_experts) == ([], [])
    assert set(plan.sources) == set(wanted)
    stacked = [name for name, sources in plan.sources.items() if len(sources) > 1]
    assert sorted(stacked) == sorted(name for name in wanted if ".mlp.experts." in name)
    for name in stacked:
        assert [int(source.split("local_experts.")[1].split(".")[0]) for source in plan.sources[name]] == list(
            range(config.num_experts)
        )


# --- loading ----------------------------------------------------------------------------------------------------------

SLIDING = {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": 4}


def tiny_original_model(**changes):
    """A redrawn model with the switches of an original checkpoint; every tensor differs from every other."""
    return redraw(ZayaForCausalLM(tiny_config(skip_expert="identity", **changes)), seed=3)


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_every_tensor_and_the_logits_come_back(tmp_path, dialect, shards):
    changes = {"router_norm_eps": 1e-6} if dialect == "A" else {}
    model = tiny_original_model(residual_in_fp32=dialect != "A", fp32_logits=True, **SLIDING, **changes)
    folder = write_checkpoint(
        tmp_path, original_tensors(model, dialect), original_config(model.config, dialect), shards
    )
    loaded, info = ZayaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = model.state_dict()
    assert set(loaded.state_dict()) == set(ours)
    assert [name for name, value in loaded.state_dict().items() if not torch.equal(value, ours[name])] == []
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not loaded.training
    ids = random_ids(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    kept = ("residual_in_fp32", "router_norm_eps", "fp32_logits", "skip_expert", "layer_types", "sliding_window")
    assert {name: getattr(loaded.config, name) for name in kept} == {name: getattr(model.config, name) for name in kept}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.2.self_attn.qkv.val_proj1.weight", "model.layers.2.self_attn.qkv.val_proj2.weight"),
        ("model.layers.4.res_scale.hidden_states_bias", "model.res_scale.hidden_states_bias"),
        ("model.layers.1.input_norm.weight", "model.layers.2.input_norm.weight"),
        (
            "model.layers.3.zaya_block.experts.local_experts.0.linear_fc1.weight",
            "model.layers.3.zaya_block.experts.local_experts.1.linear_fc1.weight",
        ),
    ],
)
def test_a_mix_up_of_two_tensors_would_be_seen(tmp_path, one, other):
    """The comparison above can fail: a checkpoint with two tensors swapped loads, and differs."""
    model = tiny_original_model()
    tensors = original_tensors(model)
    tensors[one], tensors[other] = tensors[other], tensors[one]
    loaded = ZayaForCausalLM.from_pretrained(write_checkpoint(tmp_path, tensors, original_config(model.config)))
    ours = model.state_dict()
    assert [name for name, value in loaded.state_dict().items() if not torch.equal(value, ours[name])]
    ids = random_ids(2, 12)
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() > 1e-2


def test_skip_class_is_identity(tmp_path):
    """The original code hands a skipped token its input times its weight; zero would be another model."""
    model = tiny_original_model()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 2.0  # every token skips
    folder = write_checkpoint(tmp_path, original_tensors(model), original_config(model.config))
    loaded = ZayaForCausalLM.from_pretrained(folder)
    zero = ZayaForCausalLM.from_pretrained(folder, skip_expert="zero")
    ids = random_ids(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
        assert (zero(ids).logits - model(ids).logits).abs().max() > 1e-2


def test_dtypes(tmp_path):
    """Published files are bf16 throughout; balancing biases are kept in fp32, without a change of value."""
    model = tiny_original_model().to(torch.bfloat16)
    tensors = {name: value.to(torch.bfloat16) for name, value in original_tensors(model).items()}
    config = original_config(model.config)
    del config["torch_dtype"]
    folder = write_checkpoint(tmp_path, tensors, config, shards=3)
    for dtype, expected in ((None, torch.bfloat16), ("auto", torch.bfloat16), (torch.float32, torch.float32)):
        loaded = ZayaForCausalLM.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
        assert {value.dtype for value in loaded.parameters()} == {expected}
        assert {value.dtype for value in loaded.buffers()} == {torch.float32}
        back = original_tensors(loaded)
        assert [name for name in tensors if not torch.equal(back[name].float(), tensors[name].float())] == []


def test_fp32_biases_in_a_bf16_file_keep_every_bit(tmp_path):
    model = tiny_original_model()
    tensors = {
        name: value if name.endswith("balancing_biases") else value.to(torch.bfloat16)
        for name, value in original_tensors(model).items()
    }
    biases = torch.tensor([8.0, 8.003, 8.006, 8.009, 0.0])
    tensors["model.layers.3.zaya_block.router.balancing_biases"] = biases
    folder = write_checkpoint(tmp_path, tensors, original_config(model.config))
    loaded = ZayaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(loaded.model.layers[1].mlp.gate.balancing_biases, biases)


def test_device_map(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_original_model()
    folder = write_checkpoint(tmp_path, original_tensors(model), original_config(model.config), shards=2)
    for device_map in ("cpu", "auto", {"": "cpu"}):
        loaded = ZayaForCausalLM.from_pretrained(folder, device_map=device_map)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_base_class_and_untied_head(tmp_path):
    model = tiny_original_model(tie_word_embeddings=False)
    folder = write_checkpoint(tmp_path, original_tensors(model), original_config(model.config))
    loaded = ZayaForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    base, info = ZayaModel.from_pretrained(folder, output_loading_info=True)
    assert set(info["unexpected_keys"]) == {"lm_head.weight"}
    ours = model.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in base.state_dict().items())


def test_name_generation_config_and_saving(tmp_path):
    model = tiny_original_model()
    folder = write_checkpoint(
        tmp_path / "original",
        original_tensors(model),
        original_config(model.config),
        generation={"temperature": 0.7, "do_sample": True, "eos_token_id": [1, 5]},
    )
    loaded = ZayaForCausalLM.from_pretrained(folder)
    assert loaded.name_or_path == loaded.config.name_or_path == str(folder)
    assert (loaded.generation_config.temperature, loaded.generation_config.eos_token_id) == (0.7, [1, 5])
    with pytest.warns(UserWarning, match="skip_expert"):
        loaded.save_pretrained(tmp_path / "combined")
    assert detect_layout(_names(tmp_path / "combined")) == "combined"
    assert "lm_head.weight" not in _names(tmp_path / "combined")
    again = ZayaForCausalLM.from_pretrained(tmp_path / "combined")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    ignored = ("_name_or_path", "transformers_version")
    one, other = again.config.to_dict(), loaded.config.to_dict()
    assert {k: v for k, v in one.items() if k not in ignored} == {k: v for k, v in other.items() if k not in ignored}


def _names(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_nothing_is_registered_globally(tmp_path):
    from transformers import conversion_mapping

    def registered():
        return {
            name: len(value)
            for name, value in vars(conversion_mapping).items()
            if isinstance(value, dict) and not name.startswith("__")
        }

    before = registered()
    model = tiny_original_model()
    ZayaForCausalLM.from_pretrained(write_checkpoint(tmp_path, original_tensors(model), original_config(model.config)))
    assert registered() == before


@pytest.mark.parametrize("dialect", ["A", "B"])
def test_auto_class_and_arguments(tmp_path, dialect):
    model = tiny_original_model()
    folder = write_checkpoint(tmp_path, original_tensors(model, dialect), original_config(model.config, dialect))
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="batched_mm", skip_expert="zero"
    )
    assert type(loaded) is ZayaForCausalLM
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    config = loaded.config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "batched_mm")
    assert (config.skip_expert, config.name_or_path) == ("zero", str(folder))


def test_state_dict_in_original_names():
    model = tiny_original_model()
    loaded = ZayaForCausalLM.from_pretrained(None, config=model.config, state_dict=original_tensors(model))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


# --- faults in the files ----------------------------------------------------------------------------------------------

EXPERT = "model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight"


@pytest.mark.parametrize(
    ("remove", "named"),
    [
        (["model.layers.2.self_attn.qkv.temp"], r"missing: model\.layers\.2\.self_attn\.qkv\.temp$"),
        ([EXPERT], rf"missing: {EXPERT}$".replace(".", r"\.")),
        (["model.res_scale.residual_bias"], r"missing: model\.res_scale\.residual_bias$"),
        (["model.final_norm.weight", "model.layers.0.input_norm.weight"], r"final_norm.*|input_norm"),
    ],
)
def test_missing_tensor_is_named_as_in_the_file(tmp_path, remove, named):
    model = tiny_original_model()
    tensors = {name: value for name, value in original_tensors(model).items() if name not in remove}
    folder = write_checkpoint(tmp_path, tensors, original_config(model.config))
    with pytest.raises(ValueError, match=named) as caught:
        ZayaForCausalLM.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_a_block_of_missing_tensors_is_counted(tmp_path):
    model = tiny_original_model()
    tensors = {name: value for name, value in original_tensors(model).items() if "layers.3.zaya_block" not in name}
    folder = write_checkpoint(tmp_path, tensors, original_config(model.config))
    # 10 tensors of the router and 2 for each of the 4 experts
    with pytest.raises(ValueError, match=r"layers\.3\.zaya_block.*18 in all"):
        ZayaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("add", "named"),
    [
        ("model.layers.3.zaya_block.router.extra", r"unexpected: model\.layers\.3\.zaya_block\.router\.extra"),
        ("model.layers.9.input_norm.weight", r"unexpected: model\.layers\.9\.input_norm\.weight"),
        (EXPERT.replace("experts.2", "experts.4"), r"unexpected: .*local_experts\.4\."),
        (EXPERT.removeprefix("model."), r"unexpected: (model\.)?layers\.3.*local_experts\.2\."),
    ],
)
def test_unexpected_tensor_is_named(tmp_path, add, named):
    model = tiny_original_model()
    tensors = original_tensors(model) | {add: torch.zeros(3)}
    folder = write_checkpoint(tmp_path, tensors, original_config(model.config))
    with pytest.raises(ValueError, match=named):
        ZayaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", [EXPERT, "model.layers.2.self_attn.qkv.linear_k.weight"])
def test_wrong_shape_is_named(tmp_path, name):
    model = tiny_original_model()
    tensors = original_tensors(model)
    tensors[name] = torch.zeros(7, 5)
    folder = write_checkpoint(tmp_path, tensors, original_config(model.config))
    with pytest.raises(ValueError, match=rf"{name} \[7, 5\] where \[(64|32), 64\] is expected".replace(".", r"\.")):
        ZayaForCausalLM.from_pretrained(folder)


def test_config_that_disagrees_with_the_depth_of_the_files(tmp_path):
    """Six blocks by the config (as from a stale field), four in the files: an error, not two blocks of noise."""
    model = tiny_original_model()
    config = original_config(model.config, num_hidden_layers=12)
    folder = write_checkpoint(tmp_path, original_tensors(model), config)
    with pytest.raises(ValueError, match=r"missing: .*layers\.8\."):
        ZayaForCausalLM.from_pretrained(folder)
