"""Calls of `visibility.describe` for tests, and their results with nothing left implicit."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from zaya_hf import visibility
from zaya_hf.testing import tiny_config

WINDOW = 3
WIDTHS = {(1, 1): 1, (2, 2): 2, (2, 1): 1, (3, 4): 5}
MIXED = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": WINDOW}
LOWEST = torch.finfo(torch.float32).min


def config_for(attention: str = "eager", widths: tuple[int, int] = (2, 2), **changes):
    config = tiny_config(**{**MIXED, **changes}, cca_time0=widths[0], cca_time1=widths[1])
    config._attn_implementation = attention
    return config


def describe(batch_size: int, length: int, config=None, dtype=torch.float32, **given) -> visibility.Visibility:
    return visibility.describe(
        config or config_for(),
        batch_size=batch_size,
        sequence_length=length,
        device=torch.device("cpu"),
        dtype=dtype,
        **given,
    )


def spelled_out(visible: visibility.Visibility, look_back: int) -> SimpleNamespace:
    """A `Visibility` with nothing left implicit."""
    shape = (visible.batch_size, visible.sequence_length)
    columns = torch.arange(shape[1]).expand(shape)
    return SimpleNamespace(
        segment=torch.zeros(shape, dtype=torch.long) if visible.segment is None else visible.segment,
        reach=columns.clamp_max(look_back) if visible.reach is None else visible.reach,
        positions=visible.position_ids.expand(shape),
        last=torch.full(shape[:1], shape[1] - 1) if visible.last is None else visible.last,
    )
