"""LoRA on ZAYA: what to adapt. Neither `peft` nor `accelerate` is needed to ask.

ZAYA's experts are two 3-D parameters per layer, 91 % of the 8B model, and no linear layers. PEFT's ``"all-linear"``
finds the linear layers of attention and of the router, and no expert; names taken over from other models
(``"down_proj"``) find the router alone. `lora_targets` names the attention projections and the experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: linear layers of one layer's attention
ATTENTION = (
    "self_attn.qkv_proj.q_proj",
    "self_attn.qkv_proj.k_proj",
    "self_attn.qkv_proj.v_proj_current",
    "self_attn.qkv_proj.v_proj_delayed",
    "self_attn.o_proj",
)
#: parameters of one layer's experts: ``[E, 2 I, D]`` and ``[E, D, I]``
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def lora_targets(
    model: Any, *, attention: bool = True, experts: bool = True, layers: Iterable[int] | None = None
) -> dict[str, Any]:
    """Keyword arguments for `peft.LoraConfig` that adapt attention and experts, and leave all else as it is: routers,
    convolutions, key temperatures, norms, residual scales, embedding and head.

        LoraConfig(**lora_targets(model), r=16, lora_alpha=32, task_type="CAUSAL_LM")

    PEFT gives every expert matrices of rank `r` of its own. It adds their product to the experts' weights in every call
    (gradient checkpointing keeps that to one layer at a time) and takes neither `lora_dropout` nor `use_dora` for them.

    Args:
        model: a ZAYA model, ours or transformers' own, or its config.
        attention: the four projections into attention and the one out of it.
        experts: both parameters of the experts.
        layers: numbers of the layers to adapt; None: all.

    Returns:
        `target_modules` and `target_parameters`. Either may be an empty list, which PEFT takes as "none".

    Raises:
        ValueError: for a model of another kind, for layers that the model does not have, and if nothing is left to
            adapt.
    """
    config = getattr(model, "config", model)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind != "zaya":
        raise ValueError(f"lora_targets names the parts of a ZAYA model; this one is {kind!r}.")
    count = config.num_hidden_layers
    chosen = None if layers is None else sorted(set(layers))
    if not (attention or experts) or chosen == []:
        raise ValueError("lora_targets: nothing is left to adapt; choose attention, experts or both, and some layers.")
    if chosen is not None and not 0 <= chosen[0] <= chosen[-1] < count:
        wrong = chosen[0] if chosen[0] < 0 else chosen[-1]
        raise ValueError(f"lora_targets: there is no layer {wrong}; the model has layers 0 ... {count - 1}.")

    def of_layers(names: tuple[str, ...]) -> list[str]:
        return list(names) if chosen is None else [f"layers.{index}.{name}" for index in chosen for name in names]

    return {
        "target_modules": of_layers(ATTENTION) if attention else [],
        "target_parameters": of_layers(EXPERTS) if experts else [],
    }
