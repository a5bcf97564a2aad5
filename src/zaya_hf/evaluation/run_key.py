"""What decides a result, and its hash: two runs share an answer only if nothing that moves a number differs.

The key has three parts. The *model* part names the weights by the hash of their files (or the commit on the Hub), never
by their path: a folder may be moved. The *task* part names the items, the prompts and the settings of generation. The
*software* part names the versions and the kind of device.

Not in it, because results depend on them by rounding alone: how many tokens go into one forward pass (the token budget)
and how many processes share the work. They are recorded with each result, and a run that ran out of memory may be
finished with a smaller budget.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from zaya_hf import __version__
from zaya_hf.evaluation.run_results import jsonable

if TYPE_CHECKING:
    from zaya_hf.evaluation.models import ModelSpec
    from zaya_hf.evaluation.suites import LoadedTask

__all__ = ["Key", "Seeds", "device_kind", "digest", "model_part", "run_key", "software_part", "task_part"]

FORMAT = 1
PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "datasets")
_NAME_LENGTH = 60  # of a model and of a task in the name of a folder


@dataclass(frozen=True)
class Seeds:
    """Of Python's, numpy's and torch's generators and of the choice of few-shot examples; by default lm-eval's."""

    python: int = 0
    numpy: int = 1234
    torch: int = 1234
    fewshot: int = 1234

    @classmethod
    def all(cls, seed: int | None) -> Seeds:
        """All four alike; None: the defaults."""
        return cls() if seed is None else cls(seed, seed, seed, seed)


@dataclass(frozen=True)
class Key:
    """`sha256` over `parts` ({"format", "model", "task", "software"}), and the name of the run's folder."""

    sha256: str
    folder: str
    parts: dict[str, Any]


def run_key(model: dict[str, Any], task: dict[str, Any], software: dict[str, Any]) -> Key:
    """The key of one task of one model.

    Args:
        model, task, software: as `model_part`, `task_part` and `software_part` return them.
    """
    parts = {"format": FORMAT, "model": model, "task": task, "software": software}
    sha256 = digest(parts)
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", part["name"])[:_NAME_LENGTH] for part in (model, task)]
    return Key(sha256, f"{names[0]}--{names[1]}--{sha256[:12]}", parts)


def model_part(spec: ModelSpec, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model moves a number: the files or the commit, dtype, BOS, longest input, chat template and thinking.

    The chat template's text is one of the files. The name is in it as well, so that two models of equal files do not
    share a folder.

    Args:
        fingerprint: of `zaya_hf.evaluation.fingerprints.fingerprint`.
    """
    return {
        "name": spec.name,
        "weights": fingerprint["sha256"],
        "revision": fingerprint.get("commit") or spec.revision,
        "settings": spec.settings(),
    }


def task_part(task: LoadedTask, seeds: Seeds) -> dict[str, Any]:
    """What of a task moves a number: its definition, items, shots, settings of generation, and how many items."""
    config = task.task_object.config
    return {
        "name": task.leaf_name,
        "definition": task.task_hash,
        "data": task.data_hash,
        "num_fewshot": config.num_fewshot or 0,
        "gen_kwargs": jsonable(config.generation_kwargs),
        "limit": task.limit,
        "seeds": asdict(seeds),
        # No number, but what is stored beside it: which items belong together, and whether their texts may be written.
        "cluster_by": task.entry.cluster_by,
        "private_items": task.entry.private_items,
    }


def software_part(device: str | None) -> dict[str, Any]:
    """Versions of what computes, and the kind of device.

    Args:
        device: as for `device_kind`.
    """
    return {
        "zaya_hf": __version__,
        **{name: metadata.version(name) for name in PACKAGES},
        "device": device_kind(device),
    }


def device_kind(device: str | None) -> str:
    """ "cpu", or the name of the GPU, whose kernels round in their own way.

    Args:
        device: such as "cpu" or "cuda:1"; None: a GPU if there is one.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type


def digest(value: Any) -> str:
    """SHA-256, in hex, of a JSON value, whatever the order of its keys.

    Raises:
        ValueError, TypeError: it is none, or has NaN in it.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
