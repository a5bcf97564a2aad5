"""What an attention layer's convolution and delayed value saw before a call, and what the next call has to know."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from . import ops
from .cache import layer_of
from .visibility import Visibility


def states_before(
    cache: Cache | None, layer_idx: int, visible: Visibility, nothing: Tensor | None
) -> ops.SegmentStates | None:
    """What the rows saw before this call; a row whose cached document has ended starts from nothing.

    Args:
        nothing: ``[width]``, the delayed value before the first token; None: zeros.
    """
    kept = None if cache is None else layer_of(cache, layer_idx).states()
    if kept is None:
        return None
    qk, value = kept
    if visible.continues is not None:
        qk = torch.where(visible.continues[:, None, None], qk, 0)
        fresh = torch.zeros_like(value[0]) if nothing is None else nothing.to(value.dtype)
        value = torch.where(visible.continues[:, None], value, fresh)
    return ops.SegmentStates(qk, value, visible.entry_index, visible.entry_valid)


def keep_states(
    cache: Cache,
    layer_idx: int,
    visible: Visibility,
    states: ops.SegmentStates | None,
    raw: Tensor,
    value_delayed: Tensor,
    *,
    look_back: int,
    nothing: Tensor | None,
) -> None:
    """Put the states of the rows after this call into the cache.

    Args:
        states: what `states_before` gave.
        raw, value_delayed: ``[B, S, channels]`` and ``[B, S, width]``, what was projected in this call.
        look_back: tokens that the convolutions look back.
    """
    layer = layer_of(cache, layer_idx)
    before = layer.states() or ops.initial_states(raw, value_delayed, look_back, nothing)
    qk, value = ops.next_states(
        raw, value_delayed, before, reach=visible.reach, states=states, last=visible.last, has_real=visible.has_real
    )
    layer.store(qk, value, before, (raw, value_delayed))
