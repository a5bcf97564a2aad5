"""CCA's mixing step on rows of which a cache knows what they saw before, and has to know what they saw then."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from . import ops
from .cache import layer_of
from .static_layers import StaticLayerMixin
from .visibility import Visibility


def mix(
    cache: Cache | None,
    layer_idx: int,
    visible: Visibility,
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    *,
    look_back: int,
    value_of_nothing: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer; see `ops.cca_mix`. The convolution states of the cache move on.

    Args:
        cache: adopted, or None.
        raw, value_current, value_delayed: the projections of this call.
        look_back: tokens that the convolutions look back.
        value_of_nothing, arguments: of `ops.cca_mix`.
    """
    projected, arguments = (raw, value_current, value_delayed), {"value_of_nothing": value_of_nothing, **arguments}
    if visible.ghosts is not None:
        return _mix_forest(visible.ghosts, *projected, **arguments)
    if cache is None:
        return ops.cca_mix(*projected, reach=visible.reach, **arguments)
    layer = layer_of(cache, layer_idx)
    memory = layer.states_to_write() if isinstance(layer, StaticLayerMixin) else None
    before = layer.states() if memory is None else memory
    if before is None:
        query, key, value = ops.cca_mix(*projected, reach=visible.reach, **arguments)
        before = ops.initial_states(raw, value_delayed, look_back, value_of_nothing)
        qk, delayed = ops.next_states(
            raw, value_delayed, before, reach=visible.reach, last=visible.last, has_real=visible.has_real
        )
    else:
        query, key, value, qk, delayed = ops.cca_step(
            *projected, *before, rows=_rows(visible), in_place=memory is not None, **arguments
        )
    if memory is None or qk is not memory[0]:
        layer.store(qk, delayed, before, (raw, value_delayed))
    return query, key, value


def _mix_forest(
    ghosts: Any, raw: Tensor, value_current: Tensor, value_delayed: Tensor, cos: Tensor, sin: Tensor, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a forest of texts: one row ``[1, T, ...]``, with copies of the tokens that a segment goes on from
    before it, which then go again."""
    if ghosts.taken is not None:
        ghosts.taken.states.append((raw, value_delayed))
    given = (tensor.index_select(1, ghosts.source) for tensor in (raw, value_current, value_delayed, cos, sin))
    *projected, cos, sin = given
    mixed = ops.cca_mix(*projected, reach=ghosts.reach, cos=cos, sin=sin, **arguments)
    query, key, value = (tensor.index_select(2, ghosts.kept) for tensor in mixed)
    return query, key, value


def _rows(visible: Visibility) -> ops.StepRows | None:
    if visible.reach is None:
        return None
    return ops.StepRows(
        visible.reach,
        visible.continues,
        visible.entry_index,
        visible.entry_valid,
        visible.last,
        visible.has_real,
    )
