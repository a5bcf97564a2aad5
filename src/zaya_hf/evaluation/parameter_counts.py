"""How many parameters a language model has, and how many of them one token uses, counted from its modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.evaluation.models import Shape
from zaya_hf.modeling_zaya import ZayaForCausalLM

__all__ = ["ParameterCounts", "count_parameters", "shape_of_config"]

# What families call the number of experts that a token is sent to, in their config or on the router or its parent.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "top_k")


@dataclass(frozen=True)
class ParameterCounts:
    """Counts of the part of a model that reads and writes text; a tensor that two places share counts once.

    Attributes:
        total: embedding and language-model head included.
        active: those that one token uses: of the experts of a layer those that it is sent to, everything else whole
            (of the embedding a token reads one row, but the head multiplies by all). None where a layer has experts
            and nothing says how many of them a token is sent to.
        embedding: in the embedding and the language-model head.
        outside: in parts that read no text, such as a vision tower; in none of the others.
    """

    total: int
    active: int | None
    embedding: int
    outside: int

    @property
    def without_embedding(self) -> int:
        return self.total - self.embedding

    @property
    def active_without_embedding(self) -> int | None:
        return None if self.active is None else self.active - self.embedding


def count_parameters(model: PreTrainedModel) -> ParameterCounts:
    """Count the parameters of a causal language model, perhaps on the meta device."""
    everything = _size(model.parameters())
    text: Any = model.config.get_text_config()
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    parts: list[nn.Module] = [model]
    if text is not model.config:
        parts = [model.get_decoder(), *ends]
    total = _size(parameter for part in parts for parameter in part.parameters())
    active: int | None = total
    for name, module in parts[0].named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        held = _size(module.parameters())
        number, top_k = _experts(module), _top_k(parts[0], name, text)
        if not held or number is None:
            continue
        if top_k is None:
            active = None
            break
        assert active is not None
        active -= held - held * min(top_k, number) // number
    return ParameterCounts(
        total=total,
        active=active,
        embedding=_size(parameter for end in ends for parameter in end.parameters()),
        outside=everything - total,
    )


def shape_of_config(config: PreTrainedConfig) -> Shape:
    """What the model of a config will be; it is built without memory for its weights."""
    with torch.device("meta"):
        if isinstance(config, ZayaConfig):
            model: Any = ZayaForCausalLM(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
    counts = count_parameters(model)
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        parameters=counts.total,
        parameters_active=counts.active,
        parameters_without_embedding=counts.without_embedding,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum({id(one): one.numel() for one in parameters}.values())


def _experts(module: nn.Module) -> int | None:
    """How many experts a module holds: a list of them, or tensors with all stacked on the first dimension."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    rows = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() > 1}
    if len(rows) == 1:
        return int(rows.pop())
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    return len(lists[0]) if len(lists) == 1 else getattr(module, "num_experts", None)


def _top_k(root: nn.Module, name: str, config: Any) -> int | None:
    """How many experts the router beside the module `name` sends a token to."""
    parent = root.get_submodule(name.rpartition(".")[0])
    for place in (config, parent, *(getattr(parent, router, None) for router in ("gate", "router"))):
        for key in _TOP_K:
            value = getattr(place, key, None)
            # `top_k` of a config may be a setting of generation.
            if isinstance(value, int) and not isinstance(value, bool) and not (place is config and key == "top_k"):
                return value
    return None
