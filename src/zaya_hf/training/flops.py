"""Parameters of a model, FLOPs per token of training it, and what devices could do at most."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..configuration_zaya import ZayaConfig
from ..modeling_zaya import ZayaForCausalLM

__all__ = ["FlopCount", "ParameterCount", "count_parameters", "flops_per_token", "peak_tflops"]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. A tied embedding is one table: it is in `embedding`, and `head` is 0.

    Attributes:
        total: of the whole model.
        embedding: rows of the vocabulary at the input.
        head: the output layer's own, with its bias.
        experts: of all experts of all layers.
        one_expert: of one expert in every layer, which is what a token passes through.
    """

    total: int
    embedding: int
    head: int
    experts: int
    one_expert: int

    @property
    def active(self) -> int:
        """What a token passes through that does not skip the experts, the whole embedding table included."""
        return self.total - self.experts + self.one_expert

    @property
    def total_without_embedding(self) -> int:
        """Without the tables at the input and the output."""
        return self.total - self.embedding - self.head

    @property
    def active_without_embedding(self) -> int:
        """`active` without the tables at the input and the output: the number that papers on ZAYA1 give."""
        return self.active - self.embedding - self.head


def count_parameters(config: ZayaConfig) -> ParameterCount:
    """The numbers for a model of `config`: counted on the model itself, built without memory for its weights."""
    return _count(config.to_json_string(use_diff=False))


@lru_cache(maxsize=8)
def _count(config_json: str) -> ParameterCount:
    config = ZayaConfig.from_dict(json.loads(config_json))
    with torch.device("meta"):
        model: Any = ZayaForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}  # a tied one once
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return ParameterCount(
        total=sum(sizes.values()),
        embedding=model.get_input_embeddings().weight.numel(),
        head=sum(size for name, size in sizes.items() if name.startswith("lm_head.")),
        experts=experts,
        one_expert=experts // config.num_experts,
    )


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one token in a training step, forward and backward: a multiplication and an addition are two.

    Convention of the field (PaLM, arXiv 2204.02311, appendix B): 6 for every active parameter (2 forward, 4 backward),
    the head counts as a matrix whether tied or not, the lookup in the embedding is free, attention is counted as if
    every token saw the whole row (or its window), and recomputation, the optimizer and padding do not count. LoRA and
    frozen weights are counted like trained ones.

    Attributes:
        body: everything in the layers but experts and attention's products.
        experts: of a token that reaches an expert.
        head: the output layer.
        attention: the products of queries with keys and of weights with values.
        causal_attention: those of them that the mask leaves.
        skip_rate: share of the tokens that skip the experts, in `total`.
        formula: of `total` without skips, with its numbers.
    """

    body: float
    experts: float
    head: float
    attention: float
    causal_attention: float
    skip_rate: float
    formula: str

    def at(self, skip_rate: float) -> float:
        """The sum if so many of the tokens skip the experts; 0 gives the number that papers quote."""
        return self.body + self.experts * (1 - skip_rate) + self.head + self.attention

    @property
    def total(self) -> float:
        """The sum at this object's `skip_rate`."""
        return self.at(self.skip_rate)

    @property
    def causal(self) -> float:
        """`total` with attention's masked half left out."""
        return self.total - self.attention + self.causal_attention

    @property
    def recomputed(self) -> float:
        """`total` and one more forward pass through the layers: what a device does under activation checkpointing."""
        return self.total + (self.total - self.head) / 3


def flops_per_token(config: ZayaConfig, sequence_length: int, *, skip_rate: float = 0.0) -> FlopCount:
    """FLOPs per token of training at rows of `sequence_length` tokens.

    Args:
        config: of the model; sliding windows of its layers are in the attention's part.
        skip_rate: share of the tokens, mean over layers, that skip the experts; their FLOPs are left out.

    Raises:
        ValueError: for a rate outside 0 ... 1 and a length below 1.
    """
    if not 0 <= skip_rate <= 1:
        raise ValueError(f"skip_rate is {skip_rate}; expected 0 to 1.")
    if sequence_length < 1:
        raise ValueError(f"sequence_length is {sequence_length}; expected at least 1.")
    count = count_parameters(config)
    width = config.num_attention_heads * config.head_dim
    windows = [
        min(
            sequence_length, (config.sliding_window or sequence_length) if kind == "hybrid_sliding" else sequence_length
        )
        for kind in config.layer_types or []
    ]
    head = count.head or config.vocab_size * config.hidden_size
    body = count.active_without_embedding - count.one_expert
    seen = [window * (1 - (window - 1) / (2 * sequence_length)) for window in windows]  # by a token, on average
    spans = f"{len(windows)} x {width} x {sequence_length}"
    if set(windows) != {sequence_length}:
        spans = f"{width} x {sum(windows)} (tokens in reach, summed over layers)"
    return FlopCount(
        body=6.0 * body,
        experts=6.0 * count.one_expert,
        head=6.0 * head,
        attention=12.0 * width * sum(windows),
        causal_attention=12.0 * width * sum(seen),
        skip_rate=skip_rate,
        formula=f"6 x {count.active_without_embedding:,} active parameters without embedding "
        f"+ 6 x {head:,} of the head + 12 x {spans} of attention (12 x layers x query width x row)",
    )


# Dense peaks without sparsity from the makers' data sheets, TFLOP/s: bf16 matrices, and fp32 as torch multiplies it
# unless told to use TF32. The first pattern that fits the device's name counts. MI250X: of one of its two dies, which
# is what torch calls a device.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"MI355X", 2516.6, 157.3),
    (r"MI350X", 2300.0, 144.2),
    (r"MI300X|MI325X", 1307.4, 163.4),
    (r"MI300A", 980.6, 122.6),
    (r"MI250X", 191.5, 47.9),
    (r"MI210", 181.0, 45.3),
    (r"B200", 2250.0, 80.0),
    (r"H[12]00 NVL", 835.5, 60.0),
    (r"H100 PCIe", 756.0, 51.2),
    (r"H[12]00|H800", 989.4, 66.9),
    (r"A100|A800", 312.0, 19.5),
    (r"L40S", 362.1, 91.6),
    (r"A10\b", 125.0, 31.2),
    (r"L4\b", 121.0, 30.3),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 3090", 71.0, 35.6),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense TFLOP/s that the maker states for one device; None where it is not in the table, as for every CPU.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        precision: "bfloat16" or "float32", of matrix products.

    Raises:
        ValueError: for another precision.
    """
    if precision not in ("bfloat16", "float32"):
        raise ValueError(f"precision is {precision!r}; expected bfloat16 or float32.")
    for pattern, narrow, wide in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return narrow if precision == "bfloat16" else wide
    return None
