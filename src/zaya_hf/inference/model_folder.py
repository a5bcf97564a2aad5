"""The model and the tokenizer of a folder, for the commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.other_formats import other_format

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def check_folder(folder: Path) -> None:
    """Refuse what is no folder of a saved model with a tokenizer.

    Raises:
        ValueError: it says what is missing.
    """
    if not folder.is_dir():
        hint = "it is a file" if folder.exists() else "a model of the Hub has to be downloaded first"
        raise ValueError(f"no such folder: {folder} ({hint})")
    if not (folder / "config.json").is_file():
        found = other_format(folder)
        raise ValueError(
            f"{folder} {found}" if found else f"no config.json in {folder}: it is not the folder of a saved model"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"no tokenizer in {folder}: put the model's tokenizer.json and tokenizer_config.json there")


def read_config(folder: Path) -> ZayaConfig:
    """The config of the folder, whichever class the Auto classes have for it.

    Raises:
        ValueError: it is of another kind of model, or wrong.
    """
    try:
        config: ZayaConfig = ZayaConfig.from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    return config


def read_tokenizer(folder: Path, config: ZayaConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the folder."""
    # With the config: the tokenizer must not look for one through classes that need not be registered.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, config=config)
    return tokenizer


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or without a name the first GPU if there is one, else the CPU.

    Raises:
        ValueError: no device of that name is here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    present = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if name not in present:
        raise ValueError(f"no device {name!r} here; available: {', '.join(present)}")
    return torch.device(name)


def load_model(args: argparse.Namespace, device: torch.device) -> ZayaForCausalLM:
    """The model of the folder `args.path`, ready for inference as `--dtype`, `--pack-weights` and `--compile` say.

    Raises:
        ValueError, OSError: it cannot be loaded, or not in this way.
    """
    if sys.stderr.isatty():
        print(f"loading {args.path} on {device} ...", file=sys.stderr)
    else:
        transformers_logging.disable_progress_bar()
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    loaded: Any = ZayaForCausalLM.from_pretrained(args.path, dtype=dtype)
    model: ZayaForCausalLM = loaded.to(device).eval()
    model.fuse_for_inference(pack_weights=args.pack_weights)
    if args.compile:
        model.compile_decoding()
    return model


def end_tokens(model: ZayaForCausalLM) -> set[int]:
    """Ids that end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list) else {ends}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the folder's generation config is overridden with: only what was given on the command line.

    Raises:
        ValueError: the options contradict one another.
    """
    options: dict[str, Any] = {}
    if args.temperature == 0:
        if args.top_p is not None or args.top_k is not None:
            raise ValueError("--temperature 0 is greedy and has no use for --top-p and --top-k: leave them out")
        options["do_sample"] = False
    elif args.temperature is not None or args.top_p is not None or args.top_k is not None:
        options["do_sample"] = True
        given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        options |= {name: value for name, value in given.items() if value is not None}
    return options
