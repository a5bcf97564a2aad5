"""What transformers' own `zaya` class would compute differently from a model of ours, read from the model itself."""

from typing import Any

import torch

# The value to which transformers' initialisation sets the bias of the skip class, in loaded checkpoints too.
STOCK_SKIP_BIAS = -1.0


def stock_differences(model: Any) -> list[tuple[str, str]]:
    """Pairs (switch, why) for everything that makes transformers' own `zaya` give other results for this model.

    Empty when a folder saved from `model` gives the same logits there (to rounding). Biases that are not in memory
    (meta device) are not looked at.
    """
    config = model.config
    found: list[tuple[str, str]] = []
    if config.clamp_temp:
        found.append(("clamp_temp", "it scales keys by temp, not by exp(clamp(temp, 1e-7, 2))"))
    if not config.residual_in_fp32:
        found.append(("residual_in_fp32=False", "it keeps the residual stream in fp32"))
    if config.router_norm_eps is not None and config.router_norm_eps != config.rms_norm_eps:
        found.append(
            (f"router_norm_eps={config.router_norm_eps}", f"its router norm uses rms_norm_eps={config.rms_norm_eps}")
        )
    if config.fp32_logits:
        found.append(("fp32_logits", "it multiplies by the LM head in the dtype of the weights"))
    if config.skip_expert == "identity":
        found.append(('skip_expert="identity"', "a token that picks the skip class gets zero there"))
    if config.attention_bias:
        found.append(("attention_bias", "with left padding its pads reach the first real tokens through the biases"))
    if config.sliding_window == 1 and "hybrid_sliding" in config.layer_types:
        found.append(("sliding_window=1", "its cache keeps every earlier token instead of none, so decoding is wrong"))
    if not getattr(model, "stock_has_class", True):
        found.append((type(model).__name__, "it has no such class: only the backbone can be read there"))
    layers = _layers_with_another_skip_bias(model)
    if layers:
        shown = ", ".join(map(str, layers[:4])) + (", ..." if len(layers) > 4 else "")
        why = f"in {len(layers)} layers (layers {shown}); it sets the skip bias back to {STOCK_SKIP_BIAS} on load"
        found.append(("balancing_biases[-1]", why))
    return found


def _layers_with_another_skip_bias(model: Any) -> list[int]:
    different = []
    for index, layer in enumerate(model.base_model.layers):
        biases: torch.Tensor = layer.mlp.gate.balancing_biases
        if biases.device.type != "meta" and float(biases[-1]) != STOCK_SKIP_BIAS:
            different.append(index)
    return different
