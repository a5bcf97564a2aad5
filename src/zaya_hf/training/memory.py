"""Memory that one device needs to train a model, by formula: the tensors that stay, and an estimate of the others.

Every process has the whole model, its gradients and the optimizer's state (data parallelism without sharding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..configuration_zaya import ZayaConfig
from ..modeling_zaya import ZayaForCausalLM
from .config import LoraConfig, TrainingConfig
from .lora import lora_targets
from .muon import BATCH_ELEMENTS
from .roles import MUON_ROLES, parameter_roles

__all__ = ["MemoryItem", "activation_bytes", "estimate_memory", "peak_bytes"]

FP32 = 4


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind of tensor on one device.

    Attributes:
        when: "always", or in which half of a step: "forward and backward", "optimizer".
        estimate: whether the number is one; the others are exact up to what an allocator adds.
    """

    name: str
    bytes: int
    formula: str
    when: str = "always"
    estimate: bool = False


def estimate_memory(config: TrainingConfig, model_config: ZayaConfig) -> list[MemoryItem]:
    """What each device holds, which is the same for any number of them; the most at any time is `peak_bytes` of it."""
    with torch.device("meta"):
        model = ZayaForCausalLM(model_config)
    total = sum(parameter.numel() for parameter in model.parameters())
    width = getattr(torch, config.model.dtype).itemsize
    lora = config.model.lora
    items = [MemoryItem("weights", total * width, f"{total:,} x {width} bytes ({config.model.dtype})")]
    if lora is None:
        roles = parameter_roles(model)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name in roles}
        matrices = [size for name, size in sizes.items() if roles[name] in MUON_ROLES]
        trained = total
    else:
        trained = _adapter_parameters(model_config, lora)
        matrices, width = [], FP32  # AdamW's, see `roles`
        items.append(MemoryItem("adapters", trained * FP32, f"{trained:,} x {FP32} bytes"))
    items.append(MemoryItem("gradients", trained * width, f"{trained:,} x {width} bytes, as the trained weights"))
    muon = sum(matrices) if config.optimizer.name == "hybrid_muon" else 0
    moments = trained - muon
    state = f"Muon {muon:,} x 1 + AdamW {moments:,} x 2, x {width} bytes"
    items.append(MemoryItem("optimizer state", (muon + 2 * moments) * width, state))
    if config.ema_decay is not None:
        items.append(MemoryItem("average of the weights", trained * FP32, f"{trained:,} x {FP32} bytes"))
    items += _in_forward_and_backward(config, model_config, total)
    if muon:
        batch = min(max(BATCH_ELEMENTS, max(matrices)), muon)
        iteration = 4 if config.optimizer.ns_dtype == "float32" else 2
        updates = max(matrices) if config.optimizer.nesterov else 0  # of one parameter at a time
        items.append(
            MemoryItem(
                "Muon's updates",
                updates * width + 4 * batch * iteration,
                f"{updates:,} x {width} bytes + 4 x {batch:,} x {iteration} bytes in Newton-Schulz",
                "optimizer",
                estimate=True,
            )
        )
    return items


def peak_bytes(items: list[MemoryItem]) -> int:
    """What stays, and the larger of what the two halves of a step need besides."""
    halves = {"always": 0, "forward and backward": 0, "optimizer": 0}
    for item in items:
        halves[item.when] += item.bytes
    always = halves.pop("always")
    return always + max(halves.values())


def activation_bytes(config: ZayaConfig, precision: str) -> int:
    """Bytes per token and layer that the forward pass keeps for the backward pass; fitted to what torch keeps on a CPU.
    Fused kernels keep less."""
    sizes, factors = _sizes(config), _ACTIVATIONS[precision]
    return sum(factor * sizes[name] for name, factor in factors.items())


# Bytes per token and layer for each unit of: D, the model's width; C, channels of the convolutions; Q and K, widths of
# queries and of keys; I, width inside an expert; R, of the router.
_ACTIVATIONS = {
    "bfloat16": {"D": 36, "C": 16, "Q": 8, "K": 12, "I": 8, "R": 14},
    "float32": {"D": 40, "C": 20, "Q": 8, "K": 8, "I": 16, "R": 24},
}


def _sizes(config: ZayaConfig) -> dict[str, int]:
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inner = {"I": config.moe_intermediate_size, "R": config.router_hidden_size}
    return {"D": config.hidden_size, "C": queries + keys, "Q": queries, "K": keys, **inner}


def _in_forward_and_backward(config: TrainingConfig, model_config: ZayaConfig, total: int) -> list[MemoryItem]:
    layers = model_config.num_hidden_layers
    tokens = config.batch.micro_rows * config.data.sequence_length
    per_layer = activation_bytes(model_config, config.precision)
    terms = " + ".join(f"{factor} {name}" for name, factor in _ACTIVATIONS[config.precision].items())
    formula = f"{tokens:,} tokens x ({terms}) bytes"
    if config.activation_checkpointing:
        # Between layers the stream and the router's state; three more streams before the first and behind the last.
        ends = (layers + 3) * model_config.hidden_size + layers * model_config.router_hidden_size
        size = tokens * (FP32 * ends + per_layer)
        formula = f"{formula} of one layer at a time + {tokens:,} tokens x 4 ({layers + 3} D + {layers} R) bytes"
    else:
        size = tokens * layers * per_layer
        formula = f"{formula} x {layers} layers"
    formula += f" for {', '.join(f'{name} = {size:,}' for name, size in _sizes(model_config).items())}"
    items = [_passing("activations", size, formula)]
    if config.precision == "bfloat16" and config.model.dtype == "float32":
        items.append(_passing("weights in bf16", 2 * total, f"{total:,} x 2 bytes, autocast's copies"))
    if config.model.lora is None:
        table = model_config.vocab_size * model_config.hidden_size
        width = getattr(torch, config.model.dtype).itemsize
        formula = f"{table:,} x {width} bytes, until it is added to the others"
        items.append(_passing("gradient of the head", table * width, formula))
    return items


def _passing(name: str, size: int, formula: str) -> MemoryItem:
    return MemoryItem(name, size, formula, "forward and backward", estimate=True)


def _adapter_parameters(config: ZayaConfig, lora: LoraConfig) -> int:
    """Parameters of LoRA's adapters: rank x (inputs + outputs) for a matrix, and so for every expert."""
    with torch.device("meta"):
        layer = ZayaForCausalLM(ZayaConfig.from_dict(config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}))
    count = config.num_hidden_layers if lora.layers is None else len(set(lora.layers))
    targets = lora_targets(config, attention=lora.attention, experts=lora.experts)
    names = tuple(targets["target_modules"]) + tuple(targets["target_parameters"])
    total = 0
    for name, parameter in layer.named_parameters():
        if name.removesuffix(".weight").endswith(names) and parameter.ndim >= 2:
            experts = parameter.shape[0] if parameter.ndim == 3 else 1
            total += count * experts * lora.r * (parameter.shape[-1] + parameter.shape[-2])
    return total
