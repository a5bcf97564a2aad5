"""Rows that are generated side by side: their keys, values and states between forward passes.

Rows stand right-aligned, as in every left-padded batch. They come from the forest in which their prompts were read,
leave when they have ended, and are joined by others; a forward pass gets a cache of transformers made from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from zaya_hf.cache import adopt, layer_of
from zaya_hf.cache_layers import ZayaSlidingLayer
from zaya_hf.history import PADDING
from zaya_hf.token_tree import TokenTree
from zaya_hf.tree_attention import Taken


@dataclass
class RowCache:
    """What B rows have seen.

    Attributes:
        keys, values: of each layer ``[B, G, L, D]``, right-aligned; of sliding layers perhaps the last columns only.
        states: for ZAYA, of each layer ``[B, C, K]`` and ``[B, W]``; else none.
        lengths: ``[B]`` int64, tokens of each row.
    """

    keys: list[Tensor]
    values: list[Tensor]
    states: list[tuple[Tensor, Tensor]]
    lengths: Tensor

    @property
    def columns(self) -> int:
        """L of the longest row."""
        return int(self.lengths.max())

    @classmethod
    def from_forest(cls, tree: TokenTree, leaves: list[int], taken: Taken, config: Any, is_zaya: bool) -> RowCache:
        """The rows whose texts end at `leaves`, of a forest that left `taken`."""
        paths = [tree.path(leaf) for leaf in leaves]
        lengths = torch.tensor([len(path) for path in paths])
        columns = int(lengths.max())
        places = np.zeros((len(paths), columns), dtype=np.int64)  # before a row anything may stand: it is masked
        for row, path in enumerate(paths):
            places[row, columns - len(path) :] = path
        device = taken.keys[0].device
        index = torch.from_numpy(places).to(device)
        keys, values = ([t[0][:, index].transpose(0, 1) for t in held] for held in (taken.keys, taken.values))
        states = []
        if is_zaya:
            width = config.cca_time0 + config.cca_time1 - 2
            states = [_states(raw, delayed, paths, width) for raw, delayed in taken.states]
        return cls(keys, values, states, lengths)

    def select(self, rows: list[int]) -> RowCache:
        """Some rows, without the columns that only others had."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        keys, values = ([_last(held, longest)[rows] for held in layers] for layers in (self.keys, self.values))
        return RowCache(keys, values, [(qk[rows], delayed[rows]) for qk, delayed in self.states], lengths)

    def join(self, other: RowCache) -> RowCache:
        """These rows, then the other ones."""
        keys, values = (
            [_joined(one, two) for one, two in zip(mine, others, strict=True)]
            for mine, others in ((self.keys, other.keys), (self.values, other.values))
        )
        states = [
            (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(self.states, other.states, strict=True)
        ]
        return RowCache(keys, values, states, torch.cat([self.lengths, other.lengths]))

    # ---------------------------------------------------------------------------------------- caches of transformers
    def to_cache(self, model: PreTrainedModel, is_zaya: bool) -> DynamicCache:
        """A cache from which `model` goes on."""
        cache = DynamicCache()  # without a config: every layer keeps all columns, and masks hide what a window hides
        if not is_zaya:
            for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
                cache.update(keys, values, index)
            return cache
        config: Any = model.config
        history = adopt(cache, config)
        history.length = self.columns
        columns = torch.arange(self.columns)
        starts = self.columns - self.lengths
        if bool((starts > 0).any()):
            positions = columns - starts[:, None]
            device = self.keys[0].device
            history.segments = torch.where(positions >= 0, 0, PADDING).to(device)
            history.positions = positions.clamp_min(0).to(device)
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            layer: Any = layer_of(cache, index)
            layer.lazy_initialization(keys, values)
            if isinstance(layer, ZayaSlidingLayer):
                layer.cumulative_length = self.columns
                keys, values = (_last(held, config.sliding_window - 1) for held in (keys, values))
            layer.keys, layer.values = keys, values
            layer.store(*self.states[index], self.states[index], ())
        return cache

    @classmethod
    def from_cache(cls, cache: DynamicCache, lengths: Tensor, is_zaya: bool) -> RowCache:
        """What a cache holds after some steps, in which every row has grown to `lengths`."""
        layers: list[Any] = list(cache.layers)
        states = [layer.states() for layer in layers] if is_zaya else []
        return cls([layer.keys for layer in layers], [layer.values for layer in layers], states, lengths)

    def mask(self) -> Tensor:
        """``[B, L]`` int64: 1 where a row has tokens."""
        columns = torch.arange(self.columns)
        return (columns >= self.columns - self.lengths[:, None]).long()


def _states(raw: Tensor, delayed: Tensor, paths: list[np.ndarray], width: int) -> tuple[Tensor, Tensor]:
    """CCA's states behind the last token of each path, from ``[1, T, C]`` and ``[1, T, W]``."""
    places = np.zeros((len(paths), width), dtype=np.int64)
    there = np.zeros((len(paths), width), dtype=bool)
    for row, path in enumerate(paths):
        last = path[len(path) - min(width, len(path)) :]
        places[row, width - len(last) :], there[row, width - len(last) :] = last, True
    columns = raw[0][torch.from_numpy(places).to(raw.device)]
    columns = torch.where(torch.from_numpy(there).to(raw.device)[..., None], columns, 0)
    ends = torch.tensor([int(path[-1]) for path in paths], device=raw.device)
    return columns.transpose(1, 2).contiguous(), delayed[0][ends]


def _last(held: Tensor, columns: int) -> Tensor:
    return held[:, :, max(held.shape[2] - columns, 0) :]


def _joined(one: Tensor, two: Tensor) -> Tensor:
    columns = max(one.shape[2], two.shape[2])
    return torch.cat([_padded(one, columns), _padded(two, columns)])


def _padded(held: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(held, (0, 0, columns - held.shape[2], 0))
