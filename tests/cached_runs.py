"""Tiny models of every kind of layer, runs of them in pieces through a cache, and what a cache holds.

The reference is always the model's own run without a cache over the whole sequence (`uncached`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache

from zaya_hf import ZayaForCausalLM, attention, attention_masks, history, prepared_masks, static_layers, visibility
from zaya_hf import cache as cache_module
from zaya_hf.testing import RecordedRun, assert_equal_logits, random_ids, record_run, redraw, tiny_config

KINDS = {
    "full": {},
    "sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4},
    "sliding first": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": 3},
    "window 1": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": 1},
    "widths 1 1": {"cca_time0": 1, "cca_time1": 1},
    "widths 3 4": {"cca_time0": 3, "cca_time1": 4},
    "bias": {"attention_bias": True},
    "bias, sliding, widths 3 2": {
        "attention_bias": True,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "sliding_window": 4,
        "cca_time0": 3,
    },
}


@functools.cache
def model_of(kind: str, dtype: torch.dtype = torch.float32) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**KINDS[kind]))).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return model


def assert_close(got, want, **kwargs) -> None:
    """Equal up to rounding: beside float64, the float32 logits of these models are up to 1e-5 off, in any case."""
    logits = got if isinstance(got, torch.Tensor) else got.logits
    assert_equal_logits(got, want, atol=1e-9 if logits.dtype == torch.float64 else 3e-5, **kwargs)


def cache_for(model: ZayaForCausalLM, recording: bool = False, kind: str = "dynamic", room: int = 40) -> Cache:
    """A new cache of the kind "dynamic" or "static", the latter for `room` tokens."""
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=room)
    if recording:
        cache.activate_past_recording()
    return cache


def uncached(model: ZayaForCausalLM, ids: torch.Tensor, **kwargs) -> RecordedRun:
    return record_run(model, ids, use_cache=False, **kwargs)


def feed(
    model, cache, ids: torch.Tensor, sizes: list[int], mask=None, mask_form: str = "grown", **kwargs
) -> RecordedRun:
    """Feed `ids` in pieces of the given sizes; the mask of all columns, or of the piece alone."""
    runs, start = [], 0
    assert sum(sizes) == ids.shape[1]
    for size in sizes:
        piece = slice(start, start + size)
        given_mask = None if mask is None else mask[:, : piece.stop] if mask_form == "grown" else mask[:, piece]
        runs.append(record_run(model, ids[:, piece], attention_mask=given_mask, cache=cache, use_cache=True, **kwargs))
        start += size
    return RecordedRun.join(runs)


def left_padded(*lengths: int, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids of the given lengths, padded on the left, and their mask."""
    width = width or max(lengths)
    ids = random_ids(len(lengths), width, seed=3)
    mask = torch.arange(width) >= torch.tensor([[width - length] for length in lengths])
    return ids.masked_fill(~mask, 0), mask.long()


@contextmanager
def as_traced() -> Iterator[None]:
    """Let the package take the ways of a compiled call, without a compiler: no number may be read from the cache."""
    modules = (attention, attention_masks, cache_module, history, prepared_masks, static_layers, visibility)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "is_tracing", return_value=True))
        yield


def contents(cache: Cache) -> list:
    """Everything a cache holds, copied."""
    layers = []
    for layer in cache.layers:
        tensors = [layer.keys, layer.values, *layer.conv_states.values(), *(layer.recorded or [])]
        layers.append([None if t is None else t.clone() for t in tensors])
    history = cache.layers[0].history
    rows = [None if t is None else t.clone() for t in (history.segments, history.positions)]
    return [layers, history.length, rows, [layer.get_seq_length() for layer in cache.layers]]


def assert_same_contents(cache: Cache, before: list) -> None:
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def assert_crop_refused(cache: Cache, tokens: int, match: str) -> None:
    """`crop` raises, and nothing has changed."""
    before = contents(cache)
    with pytest.raises(RuntimeError, match=match):
        cache.crop(tokens)
    assert_same_contents(cache, before)
