"""The experts as one operator inside a compiled graph: which expert a token goes to decides what is multiplied, and
that is known when the graph runs. See `ops.linear.compiled` for when this is allowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from .. import selection
from ..common.library import LIBRARY
from ..linear import packed
from ..linear.compiled import is_possible
from . import grouped
from .grouped import PackedExperts

LIBRARY.define(
    "experts(Tensor x, Tensor slots, Tensor weights, Tensor gate_up_proj, Tensor down_proj, str activation, str packed)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def covers(x: Tensor) -> bool:
    """Whether the experts of tokens `x` belong here."""
    return is_possible(x) and not selection.reference_only("experts")


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: str,
    packed_experts: PackedExperts | None = None,
) -> Tensor:
    """As `reference.experts` (`x`, `slots`, `weights`, `gate_up_proj`, `down_proj`), with the name of the activation in
    transformers, and `packed_experts`, the two weights packed.
    """
    handle = "" if packed_experts is None else packed_experts.handle
    return torch.ops.zaya_hf.experts(x, slots, weights, gate_up_proj, down_proj, activation, handle)


@functools.cache
def _activation(name: str) -> Callable[[Tensor], Tensor]:
    return ACT2FN[name]


def _run(x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, name: str, handle: str) -> Tensor:
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    return grouped.experts(x, slots, weights, gate_up, down, _activation(name), packed.by_handle(handle))


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x)


LIBRARY.impl("experts", _run, "CPU")
torch.library.register_fake("zaya_hf::experts", _fake, lib=LIBRARY)
