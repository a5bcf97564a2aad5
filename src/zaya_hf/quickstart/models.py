"""The five models of the quickstart: one class of ours, four of transformers, of about equal active parameters.

Depth, width, heads, head width, vocabulary, tied embeddings, context length and rotary base are the same for all; what
makes a family is its own: the attention, the norms, the feed-forward part and its router, scaled down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.quickstart.recipe import Recipe

# Hidden width of the feed-forward parts. A CCA layer has fewer weights than plain attention of the same heads, so ZAYA
# can spend more on its expert; with these the active parameters are equal to 2 %.
_DENSE_WIDTH = 240
_ZAYA_EXPERT_WIDTH = 192
_OLMOE_EXPERT_WIDTH = 120  # two are active for a token
_OLMOE_BALANCING = 0.01  # weight of its auxiliary loss, as published
_GEMMA3_WINDOW = 64  # tokens; half of a training row, so that it matters


@dataclass(frozen=True)
class Family:
    """How one of the five is built from what they have in common."""

    title: str
    build: Callable[[Recipe, dict[str, Any]], PreTrainedModel]
    shape: dict[str, float]  # what is its own, for the report


def _zaya(recipe: Recipe, common: dict[str, Any]) -> PreTrainedModel:
    rope = _rope(recipe) | {"partial_rotary_factor": 0.5}
    return ZayaForCausalLM(
        ZayaConfig(
            **common,
            head_dim=recipe.head_dim,
            moe_intermediate_size=_ZAYA_EXPERT_WIDTH,
            num_experts=8,
            router_hidden_size=32,
            rope_parameters={"hybrid": rope, "hybrid_sliding": dict(rope)},
        )
    )


def _rope(recipe: Recipe) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": recipe.rope_theta}


def _dense(recipe: Recipe) -> dict[str, Any]:
    return {"intermediate_size": _DENSE_WIDTH, "head_dim": recipe.head_dim, "rope_parameters": _rope(recipe)}


def _qwen3(recipe: Recipe, common: dict[str, Any]) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**common, **_dense(recipe)))


def _gemma3(recipe: Recipe, common: dict[str, Any]) -> PreTrainedModel:
    # Gemma 3 looks at a window in all layers but every sixth; of four layers, here the last one sees everything.
    own = _dense(recipe) | {
        "query_pre_attn_scalar": recipe.head_dim,
        "sliding_window": _GEMMA3_WINDOW,
        "layer_types": ["sliding_attention"] * (recipe.num_hidden_layers - 1) + ["full_attention"],
        "rope_parameters": {"sliding_attention": _rope(recipe), "full_attention": _rope(recipe)},
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**common, **own))


def _llama(recipe: Recipe, common: dict[str, Any]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**common, **_dense(recipe)))


def _olmoe(recipe: Recipe, common: dict[str, Any]) -> PreTrainedModel:
    # OLMoE has no field for the width of a head: it is hidden_size / num_attention_heads.
    return OlmoeForCausalLM(
        OlmoeConfig(
            **common,
            intermediate_size=_OLMOE_EXPERT_WIDTH,
            num_experts=16,
            num_experts_per_tok=2,
            router_aux_loss_coef=_OLMOE_BALANCING,
            rope_parameters=_rope(recipe),
        )
    )


FAMILIES: dict[str, Family] = {
    "zaya": Family(
        "ZAYA1",
        _zaya,
        {"experts": 8, "experts_per_token": 1, "intermediate_size": _ZAYA_EXPERT_WIDTH, "router_hidden_size": 32},
    ),
    "qwen3": Family("Qwen3", _qwen3, {"intermediate_size": _DENSE_WIDTH}),
    "gemma3": Family("Gemma3", _gemma3, {"intermediate_size": _DENSE_WIDTH, "sliding_window": _GEMMA3_WINDOW}),
    "llama": Family("Llama-3", _llama, {"intermediate_size": _DENSE_WIDTH}),
    "olmoe": Family(
        "OLMoE",
        _olmoe,
        {
            "experts": 16,
            "experts_per_token": 2,
            "intermediate_size": _OLMOE_EXPERT_WIDTH,
            "router_aux_loss_coef": _OLMOE_BALANCING,
        },
    ),
}


def build_model(name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A fresh model of the family `name`, fp32, initialised as the family does it; `seed` decides its weights."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.num_hidden_layers,
        "num_attention_heads": recipe.num_attention_heads,
        "num_key_value_heads": recipe.num_key_value_heads,
        "max_position_embeddings": 4 * recipe.sequence_length,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return FAMILIES[name].build(recipe, common)


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """(all, active for one token) parameters, tied ones counted once: of a layer's experts, a token uses some."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    if not experts:
        return total, total
    config = model.config
    return total, total - experts + experts * config.num_experts_per_tok // config.num_experts
