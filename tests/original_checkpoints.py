"""Tiny checkpoints in the original layout, written from a model of ours. Helpers for the loading tests.

Tensors get their original names by the inverse of the map under test. `test_original_layout.py` holds that map against
a table written out by hand, so a fault in the map cannot hide in the fixture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.checkpoints.layouts import combined_key_to_original

BLOCK_OF = {"A": "zaya_block", "B": "zaya_block", "C": "smoe_block"}


def original_tensors(model: ZayaForCausalLM, dialect: str = "B") -> dict[str, torch.Tensor]:
    """The model's tensors under their original names, one per expert; no LM head if it is tied."""
    config = model.config
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        names = combined_key_to_original(name, config.num_hidden_layers, config.num_experts, BLOCK_OF[dialect])
        assert names is not None, name
        parts = value if ".mlp.experts." in name else value[None]
        tensors |= {old: part.clone() for old, part in zip(names, parts, strict=True)}
    return tensors


def original_config(config: ZayaConfig, dialect: str = "B", **changes: Any) -> dict[str, Any]:
    """A config dict in dialect A, B or C that describes the same model, stale and meaningless fields included."""
    depth, heads = 2 * config.num_hidden_layers, config.num_attention_heads
    rope = config.rope_parameters["hybrid"]
    windows = [
        entry
        for layer_type in config.layer_types
        for entry in (config.sliding_window - 1 if layer_type == "hybrid_sliding" else 0, 0)
    ]
    values: dict[str, Any] = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "transformers_version": "4.57.1",
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_key_value_heads": config.num_key_value_heads,
        "cca": True,
        "cca_time0": config.cca_time0,
        "cca_time1": config.cca_time1,
        "clamp_temp": config.clamp_temp,
        "residual_in_fp32": config.residual_in_fp32,
        "zaya_high_prec": config.fp32_logits,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
        "scale_residual_merge": True,
        "norm_epsilon": config.rms_norm_eps,
        "moe_router_topk": 1,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": False,
        "activation_func": "swiglu",
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_bias": config.attention_bias,
        "lm_head_bias": config.lm_head_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": None,
        "fused_add_norm": False,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }
    if any(windows):
        values |= {
            "swa_layers": windows,
            "swa_rotary_base": config.rope_parameters["hybrid_sliding"]["rope_theta"],
        }
    if dialect == "B":
        values |= {
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "head_dim": config.head_dim,
            "kv_channels": config.head_dim,
            "num_query_groups": config.num_key_value_heads,
            "num_experts": config.num_experts,
            "ffn_hidden_size": 2 * config.moe_intermediate_size,
            "zaya_mlp_expansion": config.router_hidden_size,
            "mamba_cache_dtype": "float32",
        }
        return values | changes
    blocks = config.num_hidden_layers
    values |= {
        "zaya_layers": ["a", config.num_experts] * blocks,
        "num_hidden_layers": 3 * blocks,  # stale, as in the published files
        "num_attention_heads": config.hidden_size // config.head_dim,  # defines the head width only
        "cca_num_q_heads": [heads, 0] * blocks,
        "num_query_groups_list": [config.num_key_value_heads, 0] * blocks,
        "ffn_hidden_size_list": [0, 2 * config.moe_intermediate_size] * blocks,
        "zaya_mlp_expansion": [0, config.router_hidden_size] * blocks,
    }
    if dialect == "C":
        values = {name.replace("zaya_", "smoe_"): value for name, value in values.items()}
        values |= {"model_type": "smoe", "architectures": ["SMoEForCausalLM"], "rotary_base": values.pop("rope_theta")}
        # A published config has one field padded beyond the depth of the model.
        values["ffn_hidden_size_list"] = values["ffn_hidden_size_list"] * 2
    return values | changes


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1, generation: Any = None
) -> Path:
    """Write tensors, whole or in `shards` shards with an index, and a config (and a generation config) beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    index_file = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return folder
