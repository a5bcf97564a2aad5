"""What quantising while loading needs from a ZAYA model, and what it leaves as it is.

transformers' quantisers replace linear layers. The experts, nine tenths of a model, are one 3-D parameter per layer and
projection, which most methods pass over without a word.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

from .configuration_zaya import ZayaConfig
from .experts_dispatch import OURS


def check_quantiser(quantization_config: Any, device_map: Any) -> None:
    """Raise what transformers' quantiser raises where it cannot run here, which it else would after the copy."""
    quantiser: Any = AutoHfQuantizer.from_config(copy.deepcopy(quantization_config), pre_quantized=False)
    quantiser.validate_environment(device_map=device_map, weights_only=True)


def make_linears_plain(model: nn.Module) -> None:
    """Turn the linear layers that compute by `ops.linear` into torch's own, in place.

    Some quantisers (bitsandbytes, fine-grained FP8) replace nothing but layers whose class is exactly `nn.Linear`, and
    weights that became another kind of tensor must be multiplied as their own package does it.
    """
    from .modeling_zaya import ZayaLinear

    for module in model.modules():
        if type(module) is ZayaLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def plain_weights(model: nn.Module, sizes: Mapping[str, int]) -> set[str]:
    """Names among `sizes` whose weights are still plain floating tensors in `model`."""
    return {
        name
        for name, tensor in model.named_parameters()
        if name in sizes
        and type(tensor) is nn.Parameter
        and type(tensor.data) is torch.Tensor
        and tensor.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and tensor.numel() == sizes[name]
    }


def settle_quantised(model: Any, cls: Any, model_args: tuple[Any, ...], source: str) -> None:
    """Look over a model that was quantised while loading: warn if its experts were not, else let them run."""
    stored = getattr(model.config, "quantization_config", None)
    if stored is None:
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    method = str(getattr(method, "value", method))
    replaced = any(not hasattr(layer.mlp.experts, "packed_experts") for layer in model.base_model.layers)
    if replaced and model.config._experts_implementation == OURS:
        # Their own class runs them, which does not know our choice among implementations.
        model.config._experts_implementation = "eager"
    sizes = _sizes(cls, model.config, model_args)
    plain = plain_weights(model, sizes)
    experts = {name for name in plain if ".mlp.experts." in name}
    if not experts:
        return
    total = sum(sizes.values())
    left, of_experts = (sum(sizes[name] for name in names) / total for names in (plain, experts))
    warnings.warn(
        f"{source}: {method} has quantised {1 - left:.0%} of the weights. {left:.0%} are as they were, {of_experts:.0%}"
        " in the experts, which are one 3-D parameter per projection, where it replaces linear layers only",
        stacklevel=3,
    )


def _sizes(cls: Any, config: ZayaConfig, model_args: tuple[Any, ...]) -> dict[str, int]:
    """Values in each parameter of the unquantised model, tied ones once."""
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        probe = cls(config, *model_args)
    return {name: parameter.numel() for name, parameter in probe.named_parameters()}


__all__ = ["check_quantiser", "make_linears_plain", "plain_weights", "settle_quantised"]
