"""Fixtures for tests of ZAYA models, here and elsewhere.

The default initialisation hides faults: scales of 1 and biases of 0 make half of the arithmetic invisible. `redraw` draws every
parameter and buffer, so that a change of any of them changes the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from .configuration_zaya import ZayaConfig

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "router_hidden_size": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def tiny_config(**changes: Any) -> ZayaConfig:
    """A config of 179,000 parameters (4 layers, width 64), with `changes` applied."""
    return ZayaConfig(**{**TINY, **changes})


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw every parameter and persistent buffer anew, in place, reproducibly, and switch to eval mode.

    Matrices: normal x 0.3; vectors: normal x 0.2; norms and scales: 1 + 0.2 normal; temperatures: uniform in [0.7, 1.1];
    balancing biases: 0.05 normal, the skip slot included. Names decide, so the same seed gives the same model in our class
    and in transformers' own.

    Args:
        model: any ZAYA model, on any device, in any floating dtype.
        seed: of the generator.

    Returns:
        `model`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point() or name == "lm_head.weight" and _is_tied(model):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(".temp"):
            value = 0.7 + 0.4 * torch.rand(tensor.shape, generator=generator)
        elif name.endswith("balancing_biases"):
            value = 0.05 * noise
        elif "norm.weight" in name or name.endswith("_scale"):
            value = 1 + 0.2 * noise
        else:
            value = noise * (0.2 if tensor.ndim == 1 else 0.3)
        tensor.copy_(value)
    return model.eval()


def _is_tied(model: torch.nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def random_ids(*shape: int, seed: int = 0, low: int = 3, high: int = 128) -> torch.Tensor:
    """Random token ids in [low, high), int64."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
