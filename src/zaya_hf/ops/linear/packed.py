"""Weights in the blocked form that oneDNN multiplies from: a second copy, for inference on a CPU.

A product with few rows is bound by reading its weight, and from the plain form oneDNN and torch reach about half of the
memory's bandwidth (benchmarks/NOTES.md); from the blocked form nearly all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import onednn

#: dtypes that oneDNN packs, the narrow ones where the processor has instructions for them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedWeight` takes this weight here."""
    if not onednn.is_available() or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_HANDLES: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()


def by_handle(handle: str) -> Any:
    """The packed weight, or weights, that has this handle; None if it is no more."""
    return _HANDLES.get(handle)


class Transient:
    """Made from weights and never part of them: a copied or unpickled module comes without."""

    def new_handle(self) -> str:
        """A name under which a compiled graph, which can hold no such object, finds this one."""
        handle = str(next(_numbers))
        _HANDLES[handle] = self
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class PackedWeight(Transient):
    """A weight ``[N, K]`` in oneDNN's form. It answers for that weight only as long as nobody writes to it, as far as
    torch counts writes: those through ``.data`` and in inference mode are not counted.

    Args:
        weight: what is packed.
        parts: parameters of which each holds some of the weight's memory, but counts what is written to it by itself.
    """

    def __init__(self, weight: Tensor, parts: Sequence[Tensor] = ()):
        self.key, self.handle = _key(weight), self.new_handle()
        # Held weakly, a storage is freed and yet nothing else gets its identity.
        self.storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (weight, *parts)]
        self.parts = parts
        self.part_keys = [_key(part) for part in parts]
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def stands_for(self, weight: Tensor) -> bool:
        """Whether `weight` is the one that was packed, unchanged."""
        return self.key == _key(weight) and self.part_keys == [_key(part) for part in self.parts]


def _key(weight: Tensor) -> tuple[Any, ...]:
    # Tensors made in inference mode count no versions.
    version = None if weight.is_inference() else weight._version
    return weight.untyped_storage()._cdata, weight.data_ptr(), weight.shape, weight.dtype, version


def covers(x: Tensor, weight: Tensor, packed: PackedWeight | None) -> bool:
    """Whether the product should come here: packed, large enough to gain from it, and outside the graph."""
    return (
        packed is not None
        and not torch.is_grad_enabled()
        and x.numel() * weight.shape[0] >= onednn.FEWEST_MULTIPLICATIONS
        and x.dtype == weight.dtype
        and onednn.is_unwatched(x, weight)
        and packed.stands_for(weight)
    )


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., K]`` -> ``[..., N]``."""
    rows = x.reshape(-1, x.shape[-1])
    return onednn.multiply(rows, packed.tensor, bias).view(*x.shape[:-1], packed.key[2][0])
