"""Rows of documents and padding, and the reference for all of them: each document alone, unpadded, uncached."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, RecordedRun, assert_equal_logits, random_ids, record_run, redraw, tiny_config

# "full" is the fixture that all tests share; two layers do where the rest of the network is not the question.
SLIDING = {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 3}
KINDS = {
    "full": {"num_hidden_layers": 4},
    "sliding": SLIDING,
    "bias": {"attention_bias": True},
    "widths 1 1": {"cca_time0": 1, "cca_time1": 1},
    "widths 3 4": {"cca_time0": 3, "cca_time1": 4},
    "bias, sliding, widths 3 4": {**SLIDING, "attention_bias": True, "cca_time0": 3, "cca_time1": 4},
    "one key head": {"num_key_value_heads": 1, "num_attention_heads": 3},
    "three key heads": {"num_key_value_heads": 3, "num_attention_heads": 6},
}
PAD = 5  # a word like any other: only masks say what is padding


@functools.cache
def model_of(kind: str = "full", attention: str = "eager", dtype: torch.dtype = torch.float32) -> ZayaForCausalLM:
    """A model that tests share and must not change."""
    return new_model(kind, attention).to(dtype)


def new_model(kind: str = "full", attention: str = "eager") -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**{"num_hidden_layers": 2, **KINDS[kind]})))
    model.set_attn_implementation(attention)
    return model


@functools.cache
def stock_of(kind: str = "full", attention: str = "eager") -> StockForCausalLM:
    """transformers' own class with the weights of `model_of`."""
    model = redraw(StockForCausalLM(StockConfig(**{**TINY, "num_hidden_layers": 2, **KINDS[kind]})))
    model.set_attn_implementation(attention)
    return model


def solo(model: torch.nn.Module, document: Tensor) -> RecordedRun:
    """A document ``[S]`` alone: no padding, no other document, no cache, no position, no mask."""
    return _solo(model, tuple(document.tolist()))


@functools.lru_cache(maxsize=4096)
@torch.no_grad()
def _solo(model: torch.nn.Module, document: tuple[int, ...]) -> RecordedRun:
    return record_run(model, torch.tensor([document]), use_cache=False)


def check_equal(got: RecordedRun, want: RecordedRun, atol: float | None = None) -> None:
    """`assert_equal_logits` with the tolerance of the dtype, absolute and relative: 1e-5 in fp32, 1e-10 in float64."""
    tolerance = (1e-10 if want.logits.dtype == torch.float64 else 1e-5) if atol is None else atol
    assert_equal_logits(got, want, atol=tolerance, rtol=tolerance)


@dataclass
class Batch:
    """Rows of documents with padding around them, and where each document lies.

    Attributes:
        ids, mask, positions: ``[B, S]`` int64.
        places: row, columns and ids of each document that has tokens.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    places: list[tuple[int, slice, Tensor]] = field(default_factory=list)

    def check(self, model: torch.nn.Module, run: RecordedRun, atol: float | None = None) -> None:
        """Every document of `run` equals its own solo run: to 1e-5 in fp32, to 1e-10 in float64, where rounding leaves
        no room for a small leak. All is finite, padding too."""
        assert run.logits.isfinite().all()
        for row, columns, document in self.places:
            check_equal(run[row, columns], solo(model, document), atol)

    @property
    def cumulative(self) -> Tensor:
        """``[documents + 1]`` int32, of a batch of one row without padding."""
        assert len(self.ids) == 1
        return torch.tensor([0, *(columns.stop for _, columns, _ in self.places)], dtype=torch.int32)


def batch_of(lengths: Sequence[Sequence[int]], *, right: bool = False, seed: int = 0) -> Batch:
    """Rows of random documents of the given lengths, padded to one width on the left or on the right.

    Positions restart at 0 with every document; those of padding are 0, as in `generate`.
    """
    width = max(sum(row) for row in lengths)
    batch = Batch(*(torch.full((len(lengths), width), fill) for fill in (PAD, 0, 0)))
    for row, of_row in enumerate(lengths):
        start = 0 if right else width - sum(of_row)
        for index, length in enumerate(of_row):
            columns = slice(start, start + length)
            document = random_ids(length, seed=hash((seed, row, index)) % 2**31)
            batch.ids[row, columns], batch.mask[row, columns] = document, 1
            batch.positions[row, columns] = torch.arange(length)
            if length:
                batch.places.append((row, columns, document))
            start += length
    return batch


def feed(model: torch.nn.Module, cache, sizes: Sequence[int], ids: Tensor, **by_token: Tensor) -> RecordedRun:
    """Feed `ids` in pieces of the given sizes through `cache`; `by_token` arguments are cut alike, but a grown
    `grown_mask` goes in as ``attention_mask`` over all columns so far."""
    runs, start = [], 0
    assert sum(sizes) == ids.shape[1]
    grown = by_token.pop("grown_mask", None)
    for size in sizes:
        columns = slice(start, start + size)
        given = {name: value[:, columns] for name, value in by_token.items()}
        if grown is not None:
            given["attention_mask"] = grown[:, : columns.stop]
        runs.append(record_run(model, ids[:, columns], cache=cache, **given))
        start += size
    return RecordedRun.join(runs)
