"""Checks of what JSON files hold: right JSON of a wrong type gives one line here instead of a Python error later.

`huggingface_hub.strict` checks the fields of `ZayaConfig` itself. The fields and keys that every transformers config
has are read by transformers unchecked; their kinds are listed here.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def read_json_object(file: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The object in a JSON file that should be `what` (e.g. "a model config").

    Raises: ValueError, one line naming the file, if it holds broken JSON or anything but an object; OSError if it
    cannot be read.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
        raise ValueError(f"{file} is not {what}: it is no whole JSON file ({error}); fetch or write it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not {what}: it must hold a JSON object, not {json_kind(found)}")
    return found


def json_kind(value: Any) -> str:
    """What JSON calls the type of a value, with the value itself where it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return "null" if value is None else json.dumps(value, default=repr)[:60]


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dtype(value: Any) -> bool:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    return isinstance(found, torch.dtype) and found.is_floating_point


def _names_by_id(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_id(key) and _text(name) for key, name in value.items())


def _ids_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(name) and _is_id(key) for name, key in value.items())


def _is_id(value: Any) -> bool:
    return _whole(value) or (_text(value) and value.isdecimal())


def _implementation(value: Any) -> bool:
    return _text(value) or (isinstance(value, dict) and all(_text(name) for name in value.values()))


def _rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


_FLAG = (_flag, "it must be true or false")
_DTYPE = (_dtype, 'it must be the name of a floating torch dtype, e.g. "bfloat16"')
_IMPLEMENTATION = (_implementation, 'it must be the name of an implementation, e.g. "eager"')
_RATE = (_rate, "it must be a number from 0 to 1")
_PLAN = (lambda value: isinstance(value, dict), "it must be an object or null")

# Key of any transformers config -> (test, what would be right). None (JSON null) always means "not given".
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "architectures": (
        lambda value: isinstance(value, list) and all(map(_text, value)),
        'it must be a list of class names, e.g. ["ZayaForCausalLM"]',
    ),
    "attn_implementation": _IMPLEMENTATION,
    "base_model_ep_plan": _PLAN,
    "base_model_fsdp_plan": _PLAN,
    "base_model_pp_plan": _PLAN,
    "base_model_tp_plan": _PLAN,
    "classifier_dropout": _RATE,
    "chunk_size_feed_forward": (lambda value: _whole(value) and value >= 0, "it must be a whole number of at least 0"),
    "dtype": _DTYPE,
    "experts_implementation": _IMPLEMENTATION,
    "hidden_dropout": _RATE,
    "id2label": (_names_by_id, 'it must be an object from numbers to names, e.g. {"0": "no", "1": "yes"}'),
    "is_encoder_decoder": _FLAG,
    "label2id": (_ids_by_name, 'it must be an object from names to numbers, e.g. {"no": 0, "yes": 1}'),
    "name_or_path": (lambda value: isinstance(value, str | os.PathLike), "it must be a name or a path"),
    "num_labels": (lambda value: _whole(value) and value >= 1, "it must be a whole number of at least 1"),
    "output_attentions": _FLAG,
    "output_hidden_states": _FLAG,
    "per_layer_config": (lambda value: value == {}, "not supported: all blocks have one shape"),
    "problem_type": (lambda value: value in PROBLEM_TYPES, f"it must be one of {', '.join(PROBLEM_TYPES)}"),
    "quantization_config": (
        lambda value: (isinstance(value, dict) and bool(value)) or hasattr(value, "quant_method"),
        'it must be an object with "quant_method", or be left out',
    ),
    "return_dict": _FLAG,
    "tie_last_hidden_states": _FLAG,
    "token_classification_bias": _FLAG,
    "torch_dtype": _DTYPE,
    "transformers_version": (_text, 'it must be a version, e.g. "5.13.0"'),
}


def wrong_kind(values: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The first (key, value, what would be right) of a wrong kind among the keys of any transformers config."""
    for key, value in values.items():
        if value is not None and key in _KINDS and not _KINDS[key][0](value):
            return key, value, _KINDS[key][1]
    return None


def shadowing(cls: type, values: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The first (key, value, what would be right) that would replace a method or a constant of a config class.

    Keys that a config file may carry are those in `_KINDS`, `model_type`, and properties that can be set.
    """
    for key, value in values.items():
        if key in _KINDS or key == "model_type" or key.startswith("_"):
            continue
        own = getattr(cls, key, None)
        if hasattr(cls, key) and not (isinstance(own, property) and own.fset is not None):
            return key, value, "this name is used by the config class itself; remove it"
    return None


__all__ = ["PROBLEM_TYPES", "json_kind", "read_json_object", "shadowing", "wrong_kind"]
