"""`adopt` makes a cache that a caller or ``generate`` made hold what ZAYA needs, in place.

Which is in `cache_layers` (growing) and `static_layers` (of a fixed size). transformers' own table of layer types is
left alone.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticCache,
)
from transformers.utils.import_utils import is_tracing

from .cache_layers import QK, CCALayerMixin, ZayaFullLayer, ZayaSlidingLayer
from .history import RowHistory, StaticRowHistory
from .ops import selection
from .static_layers import ZayaStaticFullLayer, ZayaStaticSlidingLayer

WHAT_TO_PASS = (
    "Pass DynamicCache(config=model.config) or StaticCache(config=model.config, max_cache_len=...), or no cache and "
    "cache_implementation=None, 'offloaded', 'static' or 'offloaded_static'."
)


#: library layer class -> ours, by kind of cache and layer type of the config
KNOWN_LAYERS: dict[type[Cache], dict[str, tuple[Any, Any]]] = {
    DynamicCache: {
        "hybrid": (LinearAttentionAndFullAttentionLayer, ZayaFullLayer),
        "hybrid_sliding": (LinearAttentionAndSlidingWindowAttentionLayer, ZayaSlidingLayer),
    },
    StaticCache: {
        "hybrid": (LinearAttentionAndStaticFullAttentionLayer, ZayaStaticFullLayer),
        "hybrid_sliding": (LinearAttentionAndStaticSlidingWindowAttentionLayer, ZayaStaticSlidingLayer),
    },
}


def adopt(cache: Cache, config) -> RowHistory:
    """Make `cache` hold what ZAYA needs, in place, and return its row history. Cheap when already done.

    Args:
        cache: a `DynamicCache` or a `StaticCache`, made with this model's config (or transformers' own `ZayaConfig`); a
            `DynamicCache` may also be bare.
        config: the model's `ZayaConfig`.

    Raises:
        TypeError: for another kind of cache; it says what to pass instead.
        ValueError: for a cache that another model's config built or filled.
        RuntimeError: for a cache that a call left half-filled when it failed.
    """
    kind = next((known for known in KNOWN_LAYERS if isinstance(cache, known)), None)
    if kind is None:
        raise TypeError(
            f"ZAYA cannot use a cache of type {type(cache).__name__}: its layers do not hold convolution states. "
            + WHAT_TO_PASS
        )
    if cache.layers and isinstance(cache.layers[0], CCALayerMixin):
        if not is_tracing():
            _check_adopted(cache, _shape_of(config))
        return cache.layers[0].history
    shape, layer_types = _shape_of(config), config.layer_types
    if not cache.layers:
        cache.layers = [_new_layer(config, layer_type) for layer_type in layer_types]
        cache.layer_class_to_replicate = None
    _check_adoptable(cache, config, KNOWN_LAYERS[kind])
    history = RowHistory() if kind is DynamicCache else StaticRowHistory(_capacity(cache, config))
    for index, (layer, layer_type) in enumerate(zip(cache.layers, layer_types, strict=True)):
        ours: Any = object.__new__(KNOWN_LAYERS[kind][layer_type][1])
        ours.__dict__.update(layer.__dict__)
        ours.bind(history, owns_history=index == 0, model_shape=shape)
        cache.layers[index] = ours
    return history


def _shape_of(config) -> tuple[Any, ...]:
    """What two models must share for a cache of one to fit the other. Read anew in every call: a config can change."""
    look_back = config.cca_time0 + config.cca_time1 - 2
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return (look_back, config.sliding_window, *heads, tuple(config.layer_types))


def _capacity(cache: Cache, config) -> int:
    """Tokens that a static cache can hold. A sliding layer knows no more than its window; of a cache with no others,
    the model's context length is taken."""
    pairs = zip(config.layer_types, cache.layers, strict=True)
    sizes = {layer_type: cast(Any, layer).max_cache_len for layer_type, layer in pairs}
    if "hybrid" in sizes:
        return sizes["hybrid"]
    known = sizes["hybrid_sliding"] < config.sliding_window
    return sizes["hybrid_sliding"] if known else config.max_position_embeddings


def _check_adopted(cache: Cache, shape: tuple[Any, ...]) -> None:
    first, last = layer_of(cache, 0), layer_of(cache, -1)
    if first.model_shape != shape:
        raise ValueError(f"the cache was made for another ZAYA model, whose layers have other shapes. {WHAT_TO_PASS}")
    if not last.is_in_step():
        raise RuntimeError("a call that failed left the cache half-filled; reset() it and feed its tokens again.")


NO_PREFIX = (
    "it gives keys and values to go on from, and no convolution states that would belong to them; use LoRA "
    "(zaya_hf.training.lora_targets) or prompt tuning."
)


def _check_adoptable(cache: Cache, config, known_layers: dict[str, tuple[Any, Any]]) -> None:
    first: Any = cache.layers[0]
    if not hasattr(first, "conv_states") and first.is_initialized and first.get_seq_length():
        raise ValueError(
            "the cache holds keys and values without convolution states: another kind of model filled it, or prefix "
            f"tuning. {WHAT_TO_PASS} As for prefix tuning, {NO_PREFIX}"
        )
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, the model {config.num_hidden_layers}: it was made for another "
            f"model. {WHAT_TO_PASS}"
        )
    for index, layer_type in enumerate(config.layer_types):
        layer: Any = cache.layers[index]
        known, _ = known_layers[layer_type]
        if type(layer) is not known:
            raise ValueError(
                f"layer {index} of the cache is a {type(layer).__name__}, but the model has a {layer_type!r} layer "
                f"there: the cache was made for another model. {WHAT_TO_PASS}"
            )
        if any(layer.is_conv_states_initialized.values()) or (layer.is_initialized and layer.get_seq_length()):
            raise ValueError(
                f"the cache was filled by another model class; its states cannot be taken over. {WHAT_TO_PASS}"
            )
        if layer_type == "hybrid_sliding":
            # a static layer knows the smaller one of its window and the length of the cache
            window = layer.max_cache_len if isinstance(cache, StaticCache) else layer.sliding_window
            wanted = config.sliding_window
            if isinstance(cache, StaticCache):
                wanted = min(wanted, _capacity(cache, config))
            if window != wanted:
                raise ValueError(
                    f"layer {index} of the cache has a window of {window}, the model {config.sliding_window}. "
                    f"{WHAT_TO_PASS}"
                )


def _new_layer(config, layer_type: str):
    library_class, _ = KNOWN_LAYERS[DynamicCache][layer_type]
    window = {"sliding_window": config.sliding_window} if layer_type == "hybrid_sliding" else {}
    return library_class(number_of_states=2, **window)


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache, under whichever of its two names it came. Raises ValueError for two different ones."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError(
            "cache and past_key_values are two names of one argument, but two caches were given; where one is PEFT's, "
            f"of prefix tuning: {NO_PREFIX}"
        )
    return past_key_values if cache is None else cache


def layer_of(cache: Cache, index: int) -> CCALayerMixin:
    """Layer `index` of an adopted cache."""
    return cast(CCALayerMixin, cache.layers[index])


def check_call(cache: Cache, x: Tensor) -> None:
    """Refuse a call that does not fit an adopted cache, before anything changes.

    Args:
        x: ``[B, S, hidden_size]`` of the call.

    Raises:
        ValueError: naming both batch sizes; and for more tokens than a static cache has slots for (which a compiled or
            exported call cannot see); for an offloaded cache of a model on the CPU; and for exporting a call that a
            static cache begins with: the program would begin with the states of then in every call.
    """
    batch_size, tokens = x.shape[:2]
    if cache.offloading and x.device.type == "cpu":
        raise ValueError("the cache offloads keys and values to the CPU, but the model is on the CPU; leave that out.")
    history = layer_of(cache, 0).history
    if isinstance(history, StaticRowHistory) and not is_tracing() and history.length + tokens > history.capacity:
        raise ValueError(
            f"the static cache holds {history.length} of at most {history.capacity} tokens, and the call has {tokens}; "
            "make one with a larger max_cache_len, or reset() it."
        )
    states = layer_of(cache, 0).states()
    if states is None and isinstance(history, StaticRowHistory) and selection.is_exporting():
        raise ValueError("an empty static cache cannot be exported; export a zaya_hf.exporting.ExportableDecoder.")
    rows = batch_size if states is None else states[QK].shape[0]
    if rows != batch_size:
        raise ValueError(
            f"the call has {batch_size} rows, the cache {rows}; reset() it, or select or repeat its rows first."
        )
