"""Layers of a static cache: keys, values and convolution states in memory that is claimed once and written in place.

Shapes then never change, so that a decoding step can be compiled or exported once. Tensors that a compiled program
reads keep their address through calls, crops, resets and moves of rows, as long as the number of rows stays.

A layer with full attention has a slot for every token. A sliding layer has ``window`` slots, used in turn (a ring),
until something needs older tokens: recording, which `crop` asks for, and padding behind real tokens, which must not
use the window up. From then on it too has a slot for every token.

Gradients flow into the call that wrote a key or value, not into earlier calls: what the memory holds is detached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
)
from transformers.utils.import_utils import is_tracing

from .cache_layers import QK, VALUE, CCALayerMixin
from .history import RowHistory, StaticRowHistory, in_place, marked, writable

if TYPE_CHECKING:
    from .visibility import Visibility


class StaticLayerMixin(CCALayerMixin):
    """What both static layers share."""

    history: StaticRowHistory
    is_initialized: bool
    #: tokens that the layer has seen; None where a compiled call has not told
    seen: int | None

    def bind(self, history: RowHistory, owns_history: bool, model_shape: tuple[Any, ...]) -> None:
        super().bind(history, owns_history, model_shape)
        self.seen = 0

    @property
    def cumulative_length(self) -> Tensor:
        """``[]`` int64, one for all layers: the library keeps one per layer."""
        return self.history.filled

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("a static cache has no rows before its first call")
        return self.keys.shape[0]

    # ------------------------------------------------------------------------------------------- reading and writing
    def states(self) -> tuple[Tensor, Tensor] | None:
        states = super().states()
        if states is None or not torch.is_grad_enabled() or is_tracing():
            return states
        return states[0].clone(), states[1].clone()  # a graph may save them, and `store` writes over what is kept

    def states_to_write(self) -> tuple[Tensor, Tensor] | None:
        """The memory of the states, for an operator that writes the next ones over them. None where there are none, and
        where those before are wanted longer: by a graph, or by what is recorded."""
        if torch.is_grad_enabled() or self.record_past or self.recorded is not None:
            return None
        if self.has_previous_state[QK]:
            for index in (QK, VALUE):
                self.conv_states[index] = writable(self.conv_states[index])
        return super().states()

    def store(self, qk: Tensor, value: Tensor, before: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor]) -> None:
        """As in a growing cache, but what is recorded holds no graph, as nothing here does."""
        super().store(qk, value, (before[0].detach(), before[1].detach()), (tokens[0].detach(), tokens[1].detach()))

    def get_seq_length(self) -> Any:
        """Tokens cached so far; in a compiled or exported call a tensor."""
        return self.history.filled if is_tracing() else self.history.length

    def is_in_step(self) -> bool:
        return self.seen is None or self.seen == self.history.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.key_range(query_length, fixed=True)

    def _keep_state(self, index: int, state: Tensor) -> None:
        self.conv_states[index] = in_place(self.conv_states[index], state)

    def _claim(self, keys: Tensor, values: Tensor) -> None:
        """Have memory for the rows of a call."""
        if self.is_initialized and self.keys.shape[:2] == keys.shape[:2] and self.keys.device == keys.device:
            if self.keys.dtype != keys.dtype:  # autocast came or went
                wide = torch.promote_types(self.keys.dtype, keys.dtype)
                self.keys, self.values = self.keys.to(wide), self.values.to(wide)
            return
        self.keys, self.values = self._new_memory(keys), self._new_memory(values)
        self.is_initialized = True

    def _new_memory(self, like: Tensor) -> Tensor:
        """Zeros, since what a mask hides is multiplied by 0, which must not meet a NaN."""
        return marked(like.new_zeros((*like.shape[:2], self._slots(), like.shape[-1])))

    def _slots(self) -> int:
        raise NotImplementedError

    def _put(self, keys: Tensor, values: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """Write the tokens of a call into slots of their own; gives all slots, for attention to read."""
        in_graph = _wanted(keys, values)
        self.keys, all_keys = written(self.keys, slots, keys, in_graph)
        self.values, all_values = written(self.values, slots, values, in_graph)
        self._note_seen()
        return all_keys, all_values

    def _note_seen(self) -> None:
        self.seen = None if is_tracing() else self.history.length

    # --------------------------------------------------------------------------------------------------- operations
    def __copy__(self) -> StaticLayerMixin:
        """A layer with memory of its own."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.conv_states = {index: None if s is None else s.clone() for index, s in self.conv_states.items()}
        if self.is_initialized:
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
        return copied

    def reset(self) -> None:
        """Forget everything. Memory stays, for prompts of the same number of rows; others get new memory."""
        if self.owns_history:
            self.history.clear()
        self.recorded, self.seen = None, 0
        for index in (QK, VALUE):
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = False
        if self.is_initialized:
            self._replace_attention(torch.zeros_like)

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        if not self.has_previous_state[QK]:  # nothing is cached; memory left by earlier prompts has no rows to move
            return
        super()._map_rows(fn)

    def _replace_attention(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values = in_place(self.keys, fn(self.keys)), in_place(self.values, fn(self.values))

    def _crop_attention(self, remove: int) -> None:
        """Slots behind the end are written again before a mask shows them."""
        if self.seen is not None:  # counted, not taken from the history: a layer that a failed call left out stays so
            self.seen -= remove


class ZayaStaticFullLayer(StaticLayerMixin, LinearAttentionAndStaticFullAttentionLayer):  # type: ignore[override, misc]
    """States, keys and values of a layer with full attention, a slot for every token."""

    layer_type = "hybrid"

    def _slots(self) -> int:
        return self.max_cache_len

    def key_range(self, length: int, fixed: bool) -> tuple[int, Any]:
        return (self.max_cache_len if fixed else self.history.length + length), 0

    def update(self, key_states: Tensor, value_states: Tensor, visible: Visibility, *args, **kwargs):
        """``[B, G, S, D]`` keys and values in; all slots out, or the filled ones, as the mask of this call covers."""
        self._claim(key_states, value_states)
        num_keys = visible.key_lengths[self.layer_type]
        keys, values = self._put(key_states, value_states, visible.slots)
        if num_keys == self.max_cache_len:
            return keys, values
        return keys[:, :, :num_keys], values[:, :, :num_keys]


class ZayaStaticSlidingLayer(StaticLayerMixin, LinearAttentionAndStaticSlidingWindowAttentionLayer):  # type: ignore[override, misc]
    """States, keys and values of a layer with sliding-window attention."""

    layer_type = "hybrid_sliding"
    sliding_window: int
    #: whether the slots are used in turn, else every token has its own
    is_ring: bool

    def bind(self, history: RowHistory, owns_history: bool, model_shape: tuple[Any, ...]) -> None:
        super().bind(history, owns_history, model_shape)
        self.sliding_window = model_shape[1]  # the library's layer knows it only where it is less than the capacity
        self.is_ring = not self._keeps_all()
        self.history.is_used_in_turn = self.history.is_used_in_turn or self.is_ring

    def _keeps_all(self) -> bool:
        """Whether every token must have a slot of its own from now on."""
        return self.record_past or self.history.has_had_holes or self.history.capacity <= self.sliding_window

    def _slots(self) -> int:
        return self.sliding_window if self.is_ring else self.history.capacity

    def key_range(self, length: int, fixed: bool) -> tuple[int, Any]:
        kept = self.sliding_window - 1
        if not self.is_ring:
            if fixed:
                return self.history.capacity, 0
            kept = min(self.history.slots_for(kept), self.history.length)
            return kept + length, self.history.length - kept
        if is_tracing():
            return kept + length, self.history.filled - kept  # what lies before the first token is hidden by the mask
        kept = kept if fixed else min(kept, self.history.length)
        return kept + length, self.history.length - kept

    def update(self, key_states: Tensor, value_states: Tensor, visible: Visibility, *args, **kwargs):
        """``[B, G, S, D]`` keys and values in; the last ones, which the mask of this call covers, out."""
        self._claim(key_states, value_states)
        num_keys, slots, length = visible.key_lengths[self.layer_type], visible.slots, key_states.shape[-2]
        assert slots is not None
        if not self.is_ring:
            keys, values = self._put(key_states, value_states, slots)
            if num_keys == self.history.capacity:
                return keys, values
            end = self.history.length
            return keys[:, :, end - num_keys : end], values[:, :, end - num_keys : end]
        size, before = self.sliding_window, num_keys - length
        if length:
            in_turn = (slots[:1] - before + torch.arange(before, device=slots.device)) % size
            old_keys, old_values = self.keys.index_select(2, in_turn), self.values.index_select(2, in_turn)
        else:
            old_keys, old_values = self.keys[:, :, :num_keys], self.values[:, :, :num_keys]
        keys = torch.cat([old_keys, key_states.to(old_keys.dtype)], dim=2)
        values = torch.cat([old_values, value_states.to(old_values.dtype)], dim=2)
        if self._keeps_all():
            self._spread(slots)
        if self.is_ring:
            slots = slots[-size:] % size
            key_states, value_states = key_states[:, :, -size:], value_states[:, :, -size:]
        self.keys, _ = written(self.keys, slots, key_states)
        self.values, _ = written(self.values, slots, value_states)
        self._note_seen()
        return keys, values

    def _spread(self, slots: Tensor) -> None:
        """Give every token in the ring the slot of its own number; `slots` are those of the call that follows."""
        self.is_ring = False
        past = slots[:1] if slots.numel() else self.history.filled[None]
        numbers = past - torch.arange(1, self.sliding_window + 1, device=slots.device)
        held = numbers >= 0
        for name in ("keys", "values"):
            ring = getattr(self, name)
            memory = self._new_memory(ring)
            in_ring = ring.index_select(2, numbers % self.sliding_window)
            memory.index_add_(2, numbers.clamp_min(0), torch.where(held[:, None], in_ring, 0))
            setattr(self, name, memory)

    def _crop_attention(self, remove: int) -> None:
        assert not self.is_ring or not remove, "what is recorded has slots of its own"
        super()._crop_attention(remove)


def written(memory: Tensor, slots: Tensor | None, new: Tensor, in_graph: bool = False) -> tuple[Tensor, Tensor]:
    """Put `new` ``[B, G, S, D]`` into `slots` ``[S]`` of `memory` ``[B, G, N, D]``, in place.

    Args:
        in_graph: whether a graph may save what attention reads, which later calls must then not write over.

    Returns:
        the memory, and what attention shall read: the memory, or for a graph a copy with `new` in it.
    """
    assert slots is not None
    memory, new = writable(memory), new.to(memory.dtype)
    read = memory.index_copy(2, slots, new) if in_graph else memory
    memory.index_copy_(2, slots, new.detach())
    return memory, read


def _wanted(*tensors: Tensor) -> bool:
    """Whether some gradient is wanted. One of a key alone saves the values too, and the other way round."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
