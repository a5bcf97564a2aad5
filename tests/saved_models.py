"""Small models with random weights, and what their saved folders are compared by. Helpers for loading and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import redraw, tiny_config


def tiny_model(seed: int = 1, **changes: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**changes)), seed)


def differing(one: Any, other: Any) -> list[str]:
    """Names of the tensors that are not bitwise equal in two models or state dicts."""
    one, other = ({} | (m.state_dict() if isinstance(m, nn.Module) else m) for m in (one, other))
    assert set(one) == set(other)
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def edit_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


def files(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
