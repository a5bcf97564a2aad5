"""A small pretrained model in GGUF form made into a folder that transformers loads like any other."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from zaya_hf.installed import require

__all__ = ["NEEDS", "check_packages", "convert"]

NEEDS = "gguf"


def check_packages() -> None:
    """Raises ValueError, with the command to install it, where the reader of the format is missing."""
    require("converting a model from GGUF", NEEDS)


def convert(weights: Path, folder: Path) -> None:
    """Write a Llama-architecture model with its tokenizer, chat template and settings for generation.

    Args:
        weights: a GGUF file; its weights are expanded from 4 bits and stored in bfloat16.
        folder: to write; must not exist.

    Raises:
        ValueError: a package is missing, or weights are not finite.
    """
    check_packages()
    # Here and not above: naming a data set must not wait for them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # The bar over a file's tensors has no switch.
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        packed = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
        settings = packed.config.to_dict()
        # A model that knows that it came from packed weights refuses to be saved, hence the second one.
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**settings | {"dtype": "bfloat16"}))
        state = {name: tensor.to(torch.bfloat16) for name, tensor in packed.state_dict().items()}
        broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
        if broken:
            raise ValueError(f"{weights.name} has weights that are not finite: {broken[0]}")
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        model.generation_config = packed.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
