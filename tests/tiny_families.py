"""A tiny random model of each of the five families that are compared."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import zaya_hf
from zaya_hf.testing import redraw, tiny_config

FAMILIES = ("zaya", "llama", "qwen3", "gemma3", "olmoe")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def build(family: str) -> PreTrainedModel:
    """A random model of some 50,000 parameters, float64: sums in another order then agree to 12 digits."""
    torch.manual_seed(0)
    width = {"intermediate_size": 48}
    if family == "zaya":
        config = tiny_config(**{k: v for k, v in SIZES.items() if k != "num_hidden_layers"}, head_dim=8)
        return redraw(zaya_hf.ZayaForCausalLM(config)).double()
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **width)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **width, head_dim=8)),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **width, head_dim=8, sliding_window=16)),
        "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, **width, num_experts=4, num_experts_per_tok=2)),
    }[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    if family == "olmoe":
        model.set_experts_implementation("eager")  # the default knows no float64
    return model.double().eval()
