"""Feeding, cropping, moving rows and forking in any order: the cache stays what its rows say."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cached_runs import KINDS, as_traced, assert_close, assert_crop_refused, cache_for, model_of, uncached
from zaya_hf.testing import random_ids, record_run


@dataclass
class Rows:
    """What a cache should stand for: ids, mask and positions of all its tokens, ``[B, L]`` each."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor

    def __getitem__(self, index) -> Rows:
        return Rows(self.ids[index], self.mask[index], self.positions[index])

    def extended(self, new: Rows) -> Rows:
        pairs = zip((self.ids, self.mask, self.positions), (new.ids, new.mask, new.positions), strict=True)
        return Rows(*(torch.cat(pair, dim=1) for pair in pairs))


def draw_tokens(data, rows: Rows, seed: int) -> Rows:
    """One to five new tokens per row: documents may start anywhere, rows may begin and pieces may end with padding."""
    batch, size = rows.ids.shape[0], data.draw(st.integers(1, 5))
    ids, mask, positions = random_ids(batch, size, seed=seed), torch.ones(batch, size), torch.zeros(batch, size)
    for row in range(batch):
        first = data.draw(st.integers(0, size)) if not rows.mask[row].any() else 0
        last = size - data.draw(st.sampled_from([0, 0, 0, 1, 2])) if size > 2 else size
        mask[row, :first] = mask[row, last:] = 0
        cached = rows.positions[row][rows.mask[row].bool()]
        position = int(cached[-1]) if len(cached) else -1
        for column in range(first, last):
            starts = position > 0 and data.draw(st.integers(0, 3)) == 0
            position = 0 if starts else position + 1
            positions[row, column] = position
    return Rows(ids, mask.long(), positions.long())


def padding_behind_tokens(rows: Rows) -> bool:
    return bool(((rows.mask == 0) & (rows.mask.cumsum(1) > 0)).any())


@pytest.mark.parametrize("kind", ["dynamic", "static", "static, some calls traced"])
@given(data=st.data())
def test_any_order_of_feeding_cropping_and_moving_rows(kind, data):
    model = model_of(data.draw(st.sampled_from(sorted(KINDS))), torch.float64)
    batch = data.draw(st.integers(1, 3))
    empty = torch.zeros(batch, 0, dtype=torch.long)
    recording = data.draw(st.booleans())
    rows, cache = Rows(empty, empty, empty), cache_for(model, recording, kind.split(",")[0], room=60)
    cropped_to = 0  # nothing before the last crop can be cropped again
    operations = ["feed", "feed", "feed", "reorder", "repeat", "select", "fork", *(["crop", "crop"] * recording)]
    with torch.no_grad():
        for step in range(data.draw(st.integers(2, 10))):
            operation = data.draw(st.sampled_from(operations)) if step else "feed"
            batch, length = rows.ids.shape
            if operation == "feed":
                new = draw_tokens(data, rows, seed=step)
                rows = rows.extended(new)
                mask = rows.mask if data.draw(st.booleans()) else new.mask
                traced = kind.endswith("traced") and data.draw(st.booleans())
                with as_traced() if traced else nullcontext():
                    got = record_run(model, new.ids, attention_mask=mask, position_ids=new.positions, cache=cache)
                for row in range(batch):  # alone, without padding and in one call
                    real, count = rows.mask[row].bool(), int(new.mask[row].sum())
                    alone = rows[row : row + 1, real]
                    want = uncached(model, alone.ids, position_ids=alone.positions)
                    at = new.mask[row].nonzero()[:, 0]
                    first = int(at[0]) if count else 0
                    assert_close(got[row, first : first + count], want[:, real.sum() - count :])
            elif operation == "crop" and padding_behind_tokens(rows):
                if length > cropped_to:
                    assert_crop_refused(cache, -1, "padding behind real tokens")
            elif operation == "crop":
                remove = data.draw(st.integers(0, length - cropped_to))
                cache.crop(-remove)
                cropped_to = length - remove
                rows = rows[:, :cropped_to]
            elif operation == "reorder":
                order = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)))
                cache.reorder_cache(order)
                rows = rows[order]
            elif operation == "repeat" and batch < 4:
                cache.batch_repeat_interleave(2)
                rows = rows[torch.arange(batch).repeat_interleave(2)]
            elif operation == "select":
                chosen = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch)))
                cache.batch_select_indices(chosen)
                rows = rows[chosen]
            elif operation == "fork":
                cache = copy.deepcopy(cache)
            assert cache.get_seq_length() == rows.ids.shape[1]
