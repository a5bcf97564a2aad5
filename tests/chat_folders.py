"""Folders of small chat models: random weights, a tokenizer with turn and thinking tokens, and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from zaya_hf import ZayaForCausalLM
from zaya_hf.quickstart.bpe import train_tokenizer
from zaya_hf.testing import redraw, tiny_config

POSITIONS = 512
# As published chat models have it: thinking is switched by a variable, and a prompt without thinking opens and closes
# it at once; earlier answers are shown without their thinking and without white space around them.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role not in ["system", "user", "assistant"] -%}{{ raise_exception("unknown role " ~ m.role) }}{%- endif -%}
{%- if m.role == "system" and not loop.first -%}{{ raise_exception("system comes first") }}{%- endif -%}
{{- "<|im_start|>" ~ m.role ~ "\n" ~ (m.content | trim) ~ "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\n" -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- "<think>\n\n</think>\n\n" -}}
{%- else -%}{{- "<think>\n" -}}{%- endif -%}
{%- endif -%}
"""
# The same without thinking; it keeps answers as they are.
PLAIN_TEMPLATE = """\
{%- for m in messages -%}{{- "<|im_start|>" ~ m.role ~ "\n" ~ m.content ~ "<|im_end|>\n" -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE, with turn tokens that are special and markers of thinking that are not."""
    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")] * 2, vocab_size=320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def chat_model(tokenizer: PreTrainedTokenizerFast, seed: int = 3, **changes: Any) -> ZayaForCausalLM:
    """A model for that tokenizer whose text ends with the end of a turn."""
    sizes = {"max_position_embeddings": POSITIONS, "num_hidden_layers": 2} | changes
    model = redraw(ZayaForCausalLM(tiny_config(vocab_size=len(tokenizer), **sizes)), seed).eval()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1  # as published: a folder that stock transformers reads alike
    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    # Random weights say one word for ever, with which nothing could be told from anything else.
    model.generation_config.no_repeat_ngram_size = 2
    return model


def save_chat_folder(where: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write model and tokenizer into a folder."""
    tokenizer = chat_tokenizer(template)
    chat_model(tokenizer, **changes).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where
