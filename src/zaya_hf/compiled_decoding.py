"""`compile_decoding`: one compiled program for the decoding step, kept across requests.

The program is the model's own layers, traced with a cache that stands still: keys and values are written into memory
of a fixed size, whose unused end a mask hides, and the convolution states are tensors in and tensors out. Batch size
and memory size are symbols in it, so that one program serves all prompts, lengths and caches; a single row has one of
its own. Whatever else a call may ask for is left to the model.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import output_capturing
from transformers.utils.import_utils import is_tracing

from . import attention, fusing, merged_norms, ops
from .cache import layer_of
from .cache_growth import with_room
from .cache_layers import CCALayerMixin
from .experts_dispatch import OURS
from .history import RowHistory
from .ops import selection
from .visibility import Visibility

logger = logging.getLogger(__name__)

#: implementations of the experts that can be traced
EXPERTS = (OURS, "grouped_mm", "batched_mm")


class _Room(tuple[Tensor, Tensor]):
    """Memory of a layer's keys and of its values, ``[B, G, capacity, D]``, finite up to its end: what a mask hides is
    multiplied by 0, which must not meet a NaN."""

    #: what the layer was given of it as `keys` and `values`
    given: tuple[Tensor, Tensor]

    def give(self, layer: CCALayerMixin, length: int) -> None:
        """Make the first `length` tokens the keys and values of `layer`."""
        self.given = self[0][:, :, :length], self[1][:, :, :length]
        layer.keys, layer.values = self.given
        layer.room = self

    def serves(self, layer: CCALayerMixin) -> bool:
        """Whether the layer still holds what it was given, and one more token can be written behind."""
        keys, values = self.given
        memory = self[0]
        writable = not memory.is_inference() or torch.is_inference_mode_enabled()
        return layer.keys is keys and layer.values is values and memory.shape[2] > keys.shape[2] and writable


def _room_of(layer: CCALayerMixin) -> _Room:
    """Where the next token of a layer goes. Only memory that no other layer shares is used again."""
    room = layer.room
    if isinstance(room, _Room) and room.serves(layer):
        return room
    length = layer.keys.shape[2]
    memory = []
    for held in (layer.keys, layer.values):
        whole = held.new_zeros((*held.shape[:2], with_room(length + 1), held.shape[3]))
        whole[:, :, :length] = held
        if whole.device.type == "cuda":  # CUDA graphs write to it in place instead of giving up on it
            torch._dynamo.mark_static_address(whole, guard=False)
        memory.append(whole)
    made = _Room(memory)
    made.give(layer, length)
    return made


class _StandingLayer:
    """States of one layer during a step."""

    def __init__(self, qk: Tensor, value: Tensor):
        self.qk, self.value = qk, value

    def states(self) -> tuple[Tensor, Tensor]:
        return self.qk, self.value

    def store(self, qk: Tensor, value: Tensor, before: Any, tokens: Any) -> None:
        self.qk, self.value = qk, value


class _StandingCache:
    """What a layer sees of a cache during a step."""

    def __init__(self, position: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], states: Sequence[Any]):
        self.position, self.keys, self.values = position, keys, values
        self.layers = [_StandingLayer(qk, value) for qk, value in states]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, visible: Visibility) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx].index_copy_(2, self.position, key)
        self.values[layer_idx].index_copy_(2, self.position, value)
        return self.keys[layer_idx], self.values[layer_idx]


class CompiledDecoding(ops.Transient):
    """The compiled step of a `ZayaModel`. A copied or unpickled model comes without.

    Args:
        model: all of its layers with full attention.
        options: for `torch.compile`.
    """

    def __init__(self, model: Any, options: dict[str, Any]):
        self.model = model
        self._compiled = torch.compile(MethodType(_own_code(_traced), self), fullgraph=True, dynamic=True, **options)
        self._projections = [layer.self_attn.qkv_proj for layer in model.layers]
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._gave_up = False

    def step(
        self, x: Tensor, visible: Visibility, history: RowHistory | None, cache: Cache | None, arguments: dict[str, Any]
    ) -> Tensor | None:
        """Final hidden states ``[B, 1, hidden_size]`` of a call that `covers`; cache and history then have its token.
        None for any other, and when the compiler has given up: nothing has changed."""
        if history is None or cache is None or not self.covers(x, visible, history, cache, arguments):
            return None
        hidden_states = self(x, visible, cache)
        if hidden_states is not None:
            history.extend(visible)
        return hidden_states

    def covers(
        self, x: Tensor, visible: Visibility, history: RowHistory, cache: Cache, arguments: dict[str, Any]
    ) -> bool:
        """Whether a call is a plain decoding step.

        Args:
            x: ``[B, S, hidden_size]`` embeddings.
            history, cache: adopted.
            arguments: further ones of the call, which must not ask for anything.
        """
        config = self.model.config
        if x.shape[1] != 1 or not x.shape[0] or type(cache) is not DynamicCache or not history.length:
            return False
        if self._gave_up or self.model.training or torch.is_grad_enabled() or is_tracing(x) or type(x) is not Tensor:
            return False
        if not visible.is_plain or (visible.masks or {}).get("hybrid") is not None or visible.attention_kwargs:
            return False
        if any(value is not None and value is not False for value in arguments.values()):
            return False
        if config.output_hidden_states or config.output_attentions or not selection.is_default():
            return False
        if config._attn_implementation != "sdpa" or not attention.plans_are_possible():
            return False
        if config._experts_implementation not in EXPERTS or torch.is_autocast_enabled(x.device.type):
            return False
        if cache.offloading or self._is_hooked():
            return False
        return all(
            not layer.record_past
            and layer.recorded is None
            and layer.keys.dtype == layer.dtype == x.dtype
            and layer.keys.device == x.device
            for layer in self._layers_of(cache)
        )

    def __call__(self, x: Tensor, visible: Visibility, cache: Cache) -> Tensor | None:
        """Run what `covers`: the cache has the token afterwards, the history not yet."""
        layers = self._layers_of(cache)
        rooms = [_room_of(layer) for layer in layers]
        states: Any = [layer.states() for layer in layers]
        position = visible.position_ids[0]
        tables = self.model.rotary(visible.position_ids, x.dtype)["hybrid"]
        fused = all(
            p.fused_projections is None or p.fused_projections.holds_for(p.layers_to_fuse()) for p in self._projections
        )
        try:
            with fusing.checked_outside() if fused else nullcontext():
                hidden_states, states = self._compiled(
                    x, position, tables, [room[0] for room in rooms], [room[1] for room in rooms], states
                )
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self._gave_up = True
            logger.warning("compile_decoding: too many different steps were compiled; decoding goes on uncompiled.")
            return None
        if x.device.type == "cuda":  # what CUDA graphs give is overwritten by their next run
            hidden_states, states = hidden_states.clone(), [(qk.clone(), value.clone()) for qk, value in states]
        for layer, room, (qk, value) in zip(layers, rooms, states, strict=True):
            room.give(layer, layer.keys.shape[2] + 1)
            layer.store(qk, value, (qk, value), (qk, value))
        return hidden_states

    def _layers_of(self, cache: Cache) -> list[CCALayerMixin]:
        return [layer_of(cache, index) for index in range(len(self._projections))]

    def _is_hooked(self) -> bool:
        """Whether somebody watches the modules. What transformers leaves behind after it has recorded outputs watches
        nothing; it is taken away, and put back with the next recording."""
        if _has_any_global_hook():
            return True
        if not any(self._hooks):
            return False
        for hooks in self._hooks:
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", None) == output_capturing.__name__:
                    del hooks[key]
                    self.model._output_capturing_hooks_installed = False
        return any(self._hooks)


def _traced(
    step: CompiledDecoding,
    x: Tensor,
    position: Tensor,
    tables: tuple[Tensor, Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    states: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What is compiled.

    Args:
        x: ``[B, 1, hidden_size]``.
        position: ``[1]``, that of the token, at which `keys` and `values` are written.
        keys, values: of each layer ``[B, G, capacity, D]``.
        states: of each layer ``[B, C, k0 + k1 - 2]`` and ``[B, width]``.

    Returns:
        ``[B, 1, hidden_size]``, and the new states.
    """
    model, capacity = step.model, keys[0].shape[2]
    seen = (torch.arange(capacity, device=position.device) <= position)[None, None, None]
    visible = Visibility(x.shape[0], 1, position_ids=position[None])
    visible.masks, visible.key_lengths = {"hybrid": seen}, {"hybrid": capacity}
    cache: Any = _StandingCache(position, keys, values, states)
    (hidden_states, normed, lent), router_state = model.into_stream(x), None
    for layer, norm in zip(model.layers, lent, strict=True):
        hidden_states, router_state, _, _, normed = merged_norms.call(
            layer, normed, norm, hidden_states, router_state, tables, visible, cache=cache
        )
    last_hidden_state = model.norm(hidden_states) if normed is None else normed
    return last_hidden_state, [layer.states() for layer in cache.layers]


_numbers = itertools.count()


def _own_code(function: Any) -> FunctionType:
    """`function` with code of its own: the compiler counts programs by code, and one model's are not another's."""
    code = function.__code__.replace(co_name=f"decoding_step_{next(_numbers)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


class ZayaCompilingMixin:
    """`compile_decoding` of every ZAYA model class."""

    #: of a `ZayaModel`; see `compile_decoding`
    compiled_decoding: CompiledDecoding | None = None

    def compile_decoding(self, **options: Any) -> Any:
        """Compile the decoding step: the call that feeds one token per row to a cache that holds tokens.

        From then on `generate` and `forward` run such calls compiled; the first one waits for the compiler, half a
        minute for four layers and in proportion for more, and so does the first with several rows. Nothing is compiled
        anew for other prompts, other lengths or a new cache. Calls that ask for more run as before: prompts and chunks
        of several tokens, padded or packed rows, gradients, training mode, recorded hidden states, attentions or
        router logits, hooked modules, autocast, a cache that records or is offloaded, inputs of another dtype, other
        attention than "sdpa". One cache can serve both kinds of calls in any order.

        Weights may be trained, loaded, moved or cast in between. `fuse_for_inference` combines with this and should
        come first (its packed weights are used too); a change of it compiles anew. A copied or unpickled model is not
        compiled.

        Args:
            options: of `torch.compile`, such as ``backend`` or ``mode``. By default its inductor, which on a CPU needs
                a C++ compiler; on CUDA with ``mode="reduce-overhead"``, that is, CUDA graphs.

        Returns:
            the model.

        Raises:
            ValueError: for a model with sliding-window layers, one that is offloaded or on the meta device, one with
                adapters of its experts, and for ``fullgraph`` or ``dynamic``, which are not free.
        """
        model: Any = self
        taken = {"model", "fullgraph", "dynamic"} & options.keys()
        if taken:
            raise ValueError(f"compile_decoding: {', '.join(sorted(taken))} cannot be chosen.")
        decoder = _decoder_of(model)
        others = sorted(set(decoder.layer_types) - {"hybrid"})
        if others:
            raise ValueError(
                f"compile_decoding: the model has layers of type {', '.join(map(repr, others))}; only models whose "
                "layers all have full attention ('hybrid') can be compiled."
            )
        for name, module in decoder.named_modules():
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if hasattr(module, "_hf_hook") or any(tensor.is_meta for tensor in tensors):
                raise ValueError(f"compile_decoding: {name or 'the model'} is offloaded or on the meta device.")
            if fusing.is_adapted(module) and hasattr(module, "parameter_name"):
                raise ValueError(f"compile_decoding: {name} has an adapter of parameters; merge and unload it first.")
        if decoder.device.type == "cuda" and not options.keys() & {"mode", "options", "backend"}:
            options["mode"] = "reduce-overhead"
        decoder.compiled_decoding = CompiledDecoding(decoder, options)
        return model

    def uncompile_decoding(self) -> Any:
        """Undo `compile_decoding`. Caches stay as they are."""
        _decoder_of(self).compiled_decoding = None
        return self


def _decoder_of(model: Any) -> Any:
    """The `ZayaModel` in a model, or itself."""
    return getattr(model, model.base_model_prefix, model)
