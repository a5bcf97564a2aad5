"""Folders of tiny saved models of several families, with tokenizers, that the tests of evaluation share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
)

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import tiny_config

PAD, EOS, BOS = 0, 1, 2
ROWS = 300  # of the embeddings
# Gemma's way: the template itself begins with the BOS.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model: {% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and five special tokens: pad 0, eos 1, bos 2, <think> 3, </think> 4; put before a text as Gemma does it."""
    special = ["<pad>", "<eos>", "<bos>", "<think>", "</think>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<think>", "</think>"],
        clean_up_tokenization_spaces=False,
        model_max_length=int(1e30),
    )
    fast.chat_template = template
    if adds_bos:
        fast.add_bos_token = True
    return fast


_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
_COMMON: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    **_IDS,
}


@cache
def model(family: str) -> PreTrainedModel:
    """A fresh tiny model: zaya, qwen3, gemma3, gemma3_vision, llama, olmoe, qwen3_moe or mixtral."""
    if family == "zaya":
        return ZayaForCausalLM(tiny_config(vocab_size=ROWS, max_position_embeddings=256, **_IDS))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**_COMMON, head_dim=8))
    if family == "gemma3_vision":
        vision = SiglipVisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
        )
        text = Gemma3TextConfig(**_COMMON, head_dim=8)
        config = Gemma3Config(
            text_config=text.to_dict(),
            vision_config=vision.to_dict(),
            mm_tokens_per_image=4,
            boi_token_index=290,
            eoi_token_index=291,
            image_token_index=292,
        )
        return Gemma3ForConditionalGeneration(config)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**_COMMON))
    experts = {**_COMMON, "num_experts_per_tok": 2}
    if family == "olmoe":
        return OlmoeForCausalLM(OlmoeConfig(**experts, num_experts=8))
    if family == "qwen3_moe":
        own = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, **own))
    assert family == "mixtral"
    return MixtralForCausalLM(MixtralConfig(**experts, num_local_experts=4))


def save(folder: Path, family: str = "llama", *, template: str | None = TEMPLATE, adds_bos: bool = True) -> Path:
    """A folder with a tiny model and its tokenizer."""
    model(family).save_pretrained(folder)
    tokenizer(template, adds_bos=adds_bos).save_pretrained(folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file, which is made if need be; None removes one."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")
