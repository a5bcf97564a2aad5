"""Where a run runs: versions, hardware, command. No environment variables and no names of machines or users."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .. import __version__
from .recorder import now

__all__ = ["describe", "device_name"]

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "triton", "numpy")


def describe(accelerator: Accelerator, model: nn.Module, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What environment.json holds, as plain values.

    Args:
        model: that is trained, wrapped or not.
        facts: further ones about the model, such as its active parameters.
    """
    inner = accelerator.unwrap_model(model)
    parameters = list(inner.parameters())
    return {
        "started": now(),
        "command": shlex.join(["python", "-m", "zaya_hf.training", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "zaya_hf": __version__, **_versions()},
        "hardware": {
            "device": device_name(accelerator.device),
            "processes": accelerator.num_processes,
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "model": {
            "class": type(inner).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            **(facts or {}),
        },
    }


def device_name(device: torch.device) -> str:
    """The GPU's own name; "CPU" and its kind for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} ({platform.processor() or platform.machine()})"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
