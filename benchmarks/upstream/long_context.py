"""Long contexts on a small model: seconds of a decoding step and of a prefill chunk, and the bytes of the cache."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from zaya_hf.testing import RecordedRun, record_run

from . import checks
from .pair import DTYPES, SIDES, Pair, Shapes, make_config
from .timing import Times, Work, alternate, sample

_KINDS = ("chunk", "decode", "cache")
_LAYERS = 2
_NOT_COMPARED = "not compared: the stock class is not run at this length"
_TIMED_CHUNKS = 4  # the last ones before a context is reached


class LongContext:
    """Several rows out of one pass over the longest context. Stock is beside ours at the shortest context only."""

    def __init__(self, shapes: Shapes, dtype: str, seed: int) -> None:
        self.contexts, self.chunk = shapes.long_contexts, shapes.long_chunk
        self.dtype, self.seed = dtype, seed

    def names(self) -> list[str]:
        at = [
            name for n in self.contexts for name in (f"long-chunk-at-{n}", f"long-decode-at-{n}", f"long-cache-at-{n}")
        ]
        return [*at, "long-growth"]

    def measure(self, selected: Callable[[str], bool], seconds: float) -> list[dict[str, Any]]:
        """The rows that are selected; `long-growth` needs all contexts."""
        growth = selected("long-growth")
        wanted = [n for n in self.contexts if growth or any(selected(f"long-{k}-at-{n}") for k in _KINDS)]
        if not wanted:
            return []
        pair = Pair("quickstart", self.dtype, make_config("quickstart", layers=_LAYERS), self.seed)
        pair.for_inference()
        caches = {side: DynamicCache(config=pair.side(side).config) for side in SIDES}
        found: list[dict[str, Any]] = []
        done = 0
        for context in wanted:
            if context > self.contexts[0]:
                caches.pop("stock", None)
            timed: dict[str, list[float]] = {side: [] for side in caches}
            while done < context:
                part = pair.ids(1, self.chunk, more=100 + done)
                for side, cache in caches.items():
                    timed[side].append(sample(_forward(pair.side(side), part, cache)))
                done += self.chunk
            times = {side: Times(values[-_TIMED_CHUNKS:]) for side, values in timed.items()}
            found += [self._chunk_row(pair, context, times), self._decode_row(pair, context, caches, seconds)]
            found.append(self._cache_row(pair, context, caches["ours"]))
        if growth:
            found.append(self._growth_row(found))
        return [row for row in found if selected(row["name"])]

    def _chunk_row(self, pair: Pair, context: int, times: dict[str, Times]) -> dict[str, Any]:
        return {
            "name": f"long-chunk-at-{context}",
            "what": f"prefill of the last chunk of {self.chunk} before {context} tokens, {_LAYERS} layers",
            "times": times,
            "check": checks.verdict(lambda: self._compare(pair, context)) if "stock" in times else _NOT_COMPARED,
        }

    def _compare(self, pair: Pair, context: int) -> str:
        """Logits of all chunks, each after those before it."""

        def recorded(model: Any) -> RecordedRun:
            cache = DynamicCache(config=model.config)
            parts = [pair.ids(1, self.chunk, more=100 + done) for done in range(0, context, self.chunk)]
            return RecordedRun.join([record_run(model, part, cache=cache, use_cache=True) for part in parts], dim=1)

        ours, stock = recorded(pair.ours), recorded(pair.stock)
        where = checks.everywhere(ours)
        if self.dtype == "fp32":
            return checks.compare_fp32(ours, stock, where)
        return checks.compare_bf16(ours, stock, recorded(pair.wide), where)

    def _decode_row(self, pair: Pair, context: int, filled: dict[str, DynamicCache], seconds: float) -> dict[str, Any]:
        token = pair.ids(1, 1, more=99)
        caches = {side: copy.deepcopy(cache) for side, cache in filled.items()}
        check = _NOT_COMPARED
        if "stock" in caches:
            logits = {side: _forward(pair.side(side), token, cache).run().logits for side, cache in caches.items()}
            check = checks.verdict(lambda: _compare_step(logits, pair.dtype))
        return {
            "name": f"long-decode-at-{context}",
            "what": f"one decoding step of one row after {context} tokens, {_LAYERS} layers",
            "times": alternate(
                {side: _forward(pair.side(side), token, cache) for side, cache in caches.items()}, seconds
            ),
            "check": check,
        }

    def _cache_row(self, pair: Pair, context: int, cache: DynamicCache) -> dict[str, Any]:
        """Bytes per token of keys and values, as shapes say and as allocated, and of the states, which do not grow."""
        config, size = pair.config, DTYPES[self.dtype].itemsize
        formula = 2 * config.num_key_value_heads * config.head_dim * size * _LAYERS
        layers: list[Any] = list(cache.layers)
        growing = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        states = [state for layer in layers for state in layer.conv_states.values() if state is not None]
        shown = sum(tensor.nbytes for tensor in growing) / context
        stored = sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in growing)}.values()) / context
        held = sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in states)}.values())
        right = shown == formula
        return {
            "name": f"long-cache-at-{context}",
            "what": f"bytes of the cache after {context} tokens, {_LAYERS} layers: keys, values, and states",
            "times": {},
            "bytes_per_token": shown,
            "bytes_per_token_allocated": round(stored, 2),
            "bytes_per_token_formula": formula,
            "state_bytes": sum(state.nbytes for state in states),
            "state_bytes_allocated": held,
            "check": "ok: equals the formula"
            if right
            else f"failed: {shown} bytes per token, {formula} by the formula",
        }

    def _growth_row(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        exponents = {}
        for kind in ("chunk", "decode"):
            times = [
                next(row for row in found if row["name"] == f"long-{kind}-at-{n}")["times"]["ours"].median
                for n in self.contexts
            ]
            exponents[kind] = {
                "all": round(_slope(list(self.contexts), times), 3),
                "last_two": round(_slope(list(self.contexts[-2:]), times[-2:]), 3),
            }
        return {
            "name": "long-growth",
            "what": "x in time ~ context ** x, over all contexts and over the two longest; attention's share is linear",
            "times": {},
            "exponents": exponents,
            "check": "ok: see the rows",
        }


def _forward(model: Any, ids: torch.Tensor, cache: DynamicCache) -> Work:
    return Work(lambda: model(ids, cache=cache, use_cache=True, logits_to_keep=1))


def _compare_step(logits: dict[str, torch.Tensor], dtype: str) -> str:
    scale = logits["stock"].abs().max().item()
    error = (logits["ours"].float() - logits["stock"].float()).abs().max().item() / max(scale, 1e-30)
    largest = 1e-4 if dtype == "fp32" else 0.5  # bf16: a router may choose differently; the chunks compare distances
    seen = f"largest error {error:.1e} of the largest logit"
    if not error <= largest:
        raise checks.Failed(seen)
    return "ok: " + seen


def _slope(x: list[int], y: list[float]) -> float:
    """Least squares in logarithms."""
    pairs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return sum((a - mean_x) * (b - mean_y) for a, b in pairs) / sum((a - mean_x) ** 2 for a, _ in pairs)
