"""Layers of a cache for CCA: convolution states beside keys and values, and every operation on all of it.

A layer of ZAYA needs, besides keys and values, the last ``k0 + k1 - 2`` columns of the raw query/key projection
(``[B, C, k0 + k1 - 2]``) and the last delayed value (``[B, width, 1]``), both in the dtype of the activations. The
library's hybrid layers hold such states, but lose them in several operations (repeating or selecting rows, resetting to
another batch size, cropping, a state of width 0). The subclasses here, and for static caches those in `static_layers`,
do every operation on all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from .cache_growth import appended, with_room
from .history import RowHistory

if TYPE_CHECKING:
    from .visibility import Visibility

QK, VALUE = 0, 1  # indices of the two convolution states


# At run time the mixin stands beside each of the two library classes; type checkers are shown what those share.
_LibraryLayer: Any = LinearAttentionAndFullAttentionLayer if TYPE_CHECKING else object


class CCALayerMixin(_LibraryLayer):
    """Convolution states, and all cache operations on states, keys, values and history together.

    The history object is shared by all layers of a cache and changed by the first one (`owns_history`), which every
    loop over layers visits first.
    """

    keys: Any
    values: Any
    device: Any
    dtype: Any
    history: RowHistory
    owns_history: bool
    layer_type: ClassVar[str]
    #: what the config says about the shape of a cache, see `cache.adopt`
    model_shape: tuple[Any, ...]
    #: memory in which keys and values grow, if they do; never another layer's
    room: tuple[torch.Tensor | None, torch.Tensor | None]
    #: raw columns since recording began or the last crop, the state before them included; None while not recording
    recorded: list[torch.Tensor] | None

    def bind(self, history: RowHistory, owns_history: bool, model_shape: tuple[Any, ...]) -> None:
        self.history, self.owns_history, self.model_shape = history, owns_history, model_shape
        self.recorded = None
        self.room = (None, None)
        self.number_of_states = 2
        for states in (self.conv_states, self.recurrent_states, self.conv_kernel_size):
            states.setdefault(VALUE, None)
        for flags in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            flags.setdefault(VALUE, False)

    # ------------------------------------------------------------------------------------------- reading and writing
    def states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``[B, C, k0 + k1 - 2]`` and ``[B, width]``, or None before the first token."""
        if not self.has_previous_state[QK]:
            return None
        return self.conv_states[QK], self.conv_states[VALUE][..., 0]

    def store(
        self,
        qk: torch.Tensor,
        value: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor],
        tokens: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Take over the states after a call.

        Args:
            qk, value: new states, ``[B, C, k0 + k1 - 2]`` and ``[B, width]``.
            before: the states that the call started from, same shapes.
            tokens: raw columns of the call, ``[B, S, C]`` and ``[B, S, width]``; kept only while recording.
        """
        self.recorded, past = None, self.recorded
        if self.record_past:
            start = past or [before[QK], before[VALUE][..., None]]
            pairs = zip(start, tokens, strict=True)
            self.recorded = [torch.cat([old, new.transpose(1, 2)], dim=-1) for old, new in pairs]
        for index, state in ((QK, qk), (VALUE, value[..., None])):
            self._keep_state(index, state)
            self.conv_kernel_size[index] = state.shape[-1]
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = True
        self.device, self.dtype = qk.device, qk.dtype

    def _keep_state(self, index: int, state: torch.Tensor) -> None:
        self.conv_states[index] = state

    def stored(self) -> int:
        """Tokens whose keys and values the layer has seen."""
        return self.keys.shape[-2] if self.is_initialized and self.keys.ndim == 4 else 0

    def is_in_step(self) -> bool:
        """Whether the layer has seen the tokens of the history: not after a call that died on its way."""
        return self.stored() == self.history.length

    def key_range(self, length: int, fixed: bool) -> tuple[int, Any]:
        """How many keys `update` gives back in a call of `length` tokens, and the absolute index of the first.

        Args:
            fixed: whether the number must not depend on the tokens cached so far; static layers can do that.
        """
        return self.get_mask_sizes(length)

    def _append(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Put ``[B, G, S, D]`` behind the keys and values; see `appended`."""
        self.keys, key_room = appended(self.keys, keys, self.room[0], capacity)
        self.values, value_room = appended(self.values, values, self.room[1], capacity)
        self.room = (key_room, value_room)

    # ------------------------------------------------------------------------------------------------------- copies
    def __copy__(self) -> CCALayerMixin:
        """Both layers hold the same keys and values, so neither may grow in their memory any more."""
        self.room = (None, None)
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and `copy.deepcopy`: what is held, without the room behind it."""
        state = dict(self.__dict__)
        if any(room is not None for room in self.room):
            state.update(keys=self.keys.clone(), values=self.values.clone(), room=(None, None))
        return state

    # --------------------------------------------------------------------------------------------------- operations
    @property
    def is_croppable(self) -> bool:
        return bool(self.has_previous_state[QK])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row (transformers passes 0 or a negative number).

        Raises:
            RuntimeError: before anything changes, without `activate_past_recording()` before those tokens, beyond the
                first recorded token, or when a row has padding behind real tokens (then "the last n" differ by row).
        """
        if tokens_to_remove > 0:
            raise RuntimeError(f"crop takes 0 or a negative number of tokens to remove, not {tokens_to_remove}.")
        remove = -tokens_to_remove
        if self.recorded is None:
            if remove == 0:
                return
            raise RuntimeError(
                "crop needs activate_past_recording() on the cache before the tokens to remove were fed; a bare "
                "DynamicCache() has no layers that could record its first call, DynamicCache(config=...) has."
            )
        available = self.recorded[VALUE].shape[-1] - 1
        if remove > available:
            raise RuntimeError(f"crop({tokens_to_remove}) reaches beyond the {available} tokens that were recorded.")
        if self.owns_history and remove:
            if self.history.has_holes():
                raise RuntimeError("crop cannot remove tokens from rows that have padding behind real tokens.")
            self.history.crop(remove)
        self._crop_attention(remove)
        self._crop_states(remove)

    def _crop_states(self, remove: int) -> None:
        assert self.recorded is not None
        for index in (QK, VALUE):
            columns, width = self.recorded[index], self.conv_kernel_size[index]
            end = columns.shape[-1] - remove
            self.recorded[index] = columns[..., end - width : end]
            if remove == 0:
                continue
            state = self.recorded[index]
            run = self.history.last_run(width) if width else None
            if run is not None:  # what lies before the last document is not this document's past
                age = torch.arange(width, 0, -1, device=state.device)
                state = torch.where((age <= run[:, None])[:, None], state, 0)
            self._keep_state(index, state)

    def reset(self) -> None:
        """Forget everything; the next prompt may have another batch size."""
        if self.owns_history:
            self.history.clear()
        self.recorded = None
        self.room = (None, None)
        for index in (QK, VALUE):
            self.conv_states[index] = None
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = False
        super().reset()

    def _map_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.owns_history:
            self.history.map_rows(fn)
        for index in (QK, VALUE):
            if self.conv_states[index] is not None:
                self._keep_state(index, fn(self.conv_states[index]))
        if self.recorded is not None:
            self.recorded = [fn(columns) for columns in self.recorded]
        if self.is_initialized and self.keys is not None:
            self._replace_attention(fn)

    def _replace_attention(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `fn` to keys and values; the memory they grew in is given up with them."""
        self.keys, self.values, self.room = fn(self.keys), fn(self.values), (None, None)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        def select(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[indices.to(tensor.device) if isinstance(indices, torch.Tensor) else indices]

        self._map_rows(select)

    # The states stay where they are: they are small, and a layer reads them before `Cache.update` has waited for the
    # copy of a prefetch.
    def offload(self) -> None:
        """Move keys and values to the CPU."""
        if self.is_initialized:
            self._replace_attention(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move keys and values back to the device of the states."""
        if self.is_initialized and self.keys.device != self.device:
            self._replace_attention(lambda tensor: tensor.to(self.device, non_blocking=True))


class ZayaFullLayer(CCALayerMixin, LinearAttentionAndFullAttentionLayer):  # type: ignore[override]
    """States, keys and values of a layer with full attention."""

    layer_type = "hybrid"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """``[B, G, S, D]`` keys and values in, all of them out: views that stay as they are while tokens only come."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states, with_room(self.stored() + key_states.shape[-2]))
        return self.keys, self.values

    def _crop_attention(self, remove: int) -> None:
        DynamicLayer.crop(self, -remove)


class ZayaSlidingLayer(CCALayerMixin, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[override]
    """States, keys and values of a layer with sliding-window attention.

    The library keeps the last ``window - 1`` slots. After right padding those may be padding, so the last
    ``window - 1`` real tokens of every row are kept instead.
    """

    layer_type = "hybrid_sliding"

    def stored(self) -> int:
        return self.cumulative_length

    def _kept(self) -> int:
        return min(super().stored(), self.history.slots_for(self.sliding_window - 1))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self._kept()
        return kept + query_length, self.cumulative_length - kept

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, visible: Visibility, *args, **kwargs):
        """``[B, G, S, D]`` keys and values in; the last ones, which the mask of this call covers, out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        total = super().stored() + key_states.shape[-2]
        keep = total if self.record_past else self.history.slots_for(self.sliding_window - 1)
        # Twice what is kept: the kept tokens wander through it, and are copied to its front when they reach the end.
        self._append(key_states, value_states, with_room(total) if self.record_past else max(total, 2 * keep))
        keys, values = self.keys, self.values
        self.cumulative_length += key_states.shape[-2]
        start = max(total - keep, 0)
        self.keys, self.values = keys[:, :, start:], values[:, :, start:]
        if start > keep:  # a view would keep a long prompt's keys alive until the next call
            self._replace_attention(torch.clone)
        first = total - visible.key_lengths[self.layer_type]
        return keys[:, :, first:], values[:, :, first:]

    def _crop_attention(self, remove: int) -> None:
        end = self.keys.shape[-2] - remove
        start = max(end - self.history.slots_for(self.sliding_window - 1), 0)
        self.keys, self.values = self.keys[:, :, start:end], self.values[:, :, start:end]
        self.cumulative_length -= remove
