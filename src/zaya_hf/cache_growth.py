"""Keys and values that grow in place: there is room behind a layer's tokens, so that a step copies only its own.

What a layer holds as `keys` is a view of the filled part. Whoever replaces it, by rows selected or moved to another
device, need not know: a view that does not lie in the layer's own memory is copied by the next call, into new memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

#: room for at least so many tokens behind those that a new allocation holds, and for a quarter of them
SMALLEST_ROOM, SHARE_OF_ROOM = 32, 4


def with_room(tokens: int) -> int:
    """Tokens to allocate for `tokens` of them: growing by a constant factor, a token is copied a few times in all."""
    return tokens + max(SMALLEST_ROOM, tokens // SHARE_OF_ROOM)


def appended(held: Tensor, new: Tensor, whole: Tensor | None, capacity: int) -> tuple[Tensor, Tensor | None]:
    """`held` and `new` one behind the other, written into the room behind `held` where that is allowed.

    In place only without grad mode: a graph that saved an earlier view would find its memory changed. A traced program
    must not keep memory of its trace. An inference tensor can be written in inference mode only.

    Args:
        held: ``[B, G, L, D]``, or any tensor without elements.
        new: ``[B, G, S, D]``.
        whole: the layer's own memory, ``[B, G, at least L, D]``, in which `held` may lie; None: there is none.
        capacity: tokens that a new allocation takes, at least L + S.

    Returns:
        ``[B, G, L + S, D]``, and the memory that it lies in; None if that is just its own.
    """
    length = held.shape[-2] if held.ndim == 4 else 0
    total = length + new.shape[-2]
    if torch.is_grad_enabled() or is_tracing(new) or not new.numel() or (length and not _alike(held, new)):
        return torch.cat([held, new], dim=-2), None
    first = _place(held, whole) if whole is not None and length else None
    if first is None or whole is None or first + total > whole.shape[-2]:
        first, whole = 0, new.new_empty((*new.shape[:2], capacity, new.shape[-1]))
        if length:
            whole[:, :, :length] = held
    whole[:, :, first + length : first + total] = new
    return whole[:, :, first : first + total], whole


def _alike(held: Tensor, new: Tensor) -> bool:
    """Whether `held` can be continued by `new` without a change of dtype, device or rows."""
    same_rows = held.shape[:2] == new.shape[:2] and held.shape[-1] == new.shape[-1]
    return same_rows and held.dtype == new.dtype and held.device == new.device


def _place(held: Tensor, whole: Tensor) -> int | None:
    """The token of `whole` at which `held` starts; None if it lies elsewhere, or must not be written now."""
    if whole.is_inference() and not torch.is_inference_mode_enabled():
        return None
    if held.stride() != whole.stride() or held.shape[:2] != whole.shape[:2] or held.dtype != whole.dtype:
        return None
    if held.device != whole.device:
        return None
    start, rest = divmod(held.data_ptr() - whole.data_ptr(), whole.stride(-2) * whole.element_size())
    return start if not rest and 0 <= start <= whole.shape[-2] - held.shape[-2] else None
