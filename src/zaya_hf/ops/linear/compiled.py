"""The product as one operator inside a compiled graph, where torch's compiler would otherwise choose torch's own.

The operator has no gradient, so it is used without grad mode only, and never in an exported program, which has to run
where this package is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.library import LIBRARY
from . import onednn, packed
from .packed import PackedWeight

LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias, str packed) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def is_possible(weight: Tensor) -> bool:
    """Whether a graph on the CPU is being compiled that may hold operators of this package."""
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and weight.device.type == "cpu"
    )


def covers(weight: Tensor, packed_weight: PackedWeight | None) -> bool:
    """Whether the product belongs here. The number of rows has no say: a graph must not depend on it."""
    return (
        is_possible(weight)
        and onednn.is_available()
        and weight.numel() >= onednn.FEWEST_MULTIPLICATIONS
        and (weight.dtype == torch.float32 or packed_weight is not None)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed_weight: PackedWeight | None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., K]`` -> ``[..., N]``, for what `covers`."""
    return torch.ops.zaya_hf.linear(x, weight, bias, "" if packed_weight is None else packed_weight.handle)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, handle: str) -> Tensor:
    from .op import linear as run

    return run(x, weight, bias, packed.by_handle(handle))


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, handle: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.impl("linear", _run, "CPU")
torch.library.register_fake("zaya_hf::linear", _fake, lib=LIBRARY)
