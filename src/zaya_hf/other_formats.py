"""What a folder holds that is no checkpoint of ours, and the way out. Looks at names only and opens no weights."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

_TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHOWN = 3


def other_format(folder: Path) -> str | None:
    """What a local folder holds instead of a config or of safetensors weights, and what to do; None: nothing known.

    The words go on from the name of the folder: "holds GGUF files only; ...".
    """
    if not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if not names:
        return "is empty"
    if any(name.endswith(".gguf") for name in names):
        return "holds GGUF files only; load the safetensors checkpoint that they were made from"
    if ADAPTER_CONFIG_NAME in names:
        return (
            "holds a PEFT adapter and no model; where the package peft is installed, it is loaded together with the "
            f"base model that its {ADAPTER_CONFIG_NAME} names"
        )
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return (
            f"holds a distributed checkpoint of torch; merge it with `accelerate merge-weights {folder} OUT`, then put "
            f"the model's {CONFIG_NAME} beside the merged weights"
        )
    if "zero_to_fp32.py" in names or ("latest" in names and any(name.startswith("global_step") for name in names)):
        return "holds a DeepSpeed checkpoint; run `python zero_to_fp32.py . OUT --safe_serialization` in it, load OUT"
    if "latest_checkpointed_iteration.txt" in names or any(re.fullmatch(r"(iter_\d+|mp_rank_\d+.*)", n) for n in names):
        return (
            "holds a Megatron checkpoint; export it as a Hugging Face checkpoint with the code that it was trained by"
        )
    if any(name.endswith(".onnx") for name in names):
        return "holds an ONNX model, which onnxruntime runs; load the safetensors checkpoint that it was made from"
    pickles = sorted(name for name in names if name.endswith(_PICKLES) and name != "training_args.bin")
    if pickles and not any(name.endswith(".safetensors") for name in names):
        target = SAFE_WEIGHTS_NAME if len(pickles) == 1 else f"{Path(pickles[0]).stem}.safetensors"
        return (
            "holds pickled weights only; save each file as safetensors first: safetensors.torch.save_file("
            f"torch.load({pickles[0]!r}, weights_only=True), {target!r})"
        )
    if CONFIG_NAME in names or any(name.endswith(".safetensors") for name in names):
        return None
    models = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
    if models:
        more = ", ..." if len(models) > _SHOWN else ""
        return f"holds no model itself; folders in it do: {', '.join(models[:_SHOWN])}{more}; give one of them"
    if names & _TOKENIZER_FILES:
        return f"holds a tokenizer but no model: neither {CONFIG_NAME} nor {SAFE_WEIGHTS_NAME}"
    return None


__all__ = ["other_format"]
