"""Rotary tables of decoding steps come from a block of positions: the same numbers, and fit for every mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from zaya_hf.rotary import BLOCK, RotaryTables
from zaya_hf.testing import tiny_config

SLIDING = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4}
POSITIONS = [0, 1, BLOCK - 1, BLOCK, 5, 12 * BLOCK + 7, 131_071, 1_000_003]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_one_position_has_exactly_the_numbers_of_a_direct_computation(dtype: torch.dtype) -> None:
    """With grad mode on, and for two positions at once, tables are computed directly."""
    rotary = RotaryTables(tiny_config(**SLIDING))
    for position in POSITIONS:
        one = torch.tensor([[position]])
        want = rotary(one, dtype)
        both = rotary(torch.tensor([[position, position]]), dtype)
        with torch.no_grad():
            got = rotary(one, dtype)
        assert got.keys() == want.keys() == {"hybrid", "hybrid_sliding"}
        for layer_type, pair in got.items():
            for table, direct, twice in zip(pair, want[layer_type], both[layer_type], strict=True):
                assert table.dtype == direct.dtype
                assert torch.equal(table, direct)
                assert torch.equal(table, twice[:, 1:])


def test_steps_of_a_block_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, computed = RotaryTables(tiny_config()), []
    direct = rotary._computed
    monkeypatch.setattr(rotary, "_computed", lambda *args: computed.append(args) or direct(*args))
    with torch.no_grad():
        for position in range(2 * BLOCK):
            rotary(torch.tensor([[position]]), torch.float32)
    assert len(computed) == 2


def test_tables_of_inference_mode_do_not_reach_a_graph() -> None:
    rotary, one = RotaryTables(tiny_config()), torch.tensor([[3]])
    rotary(torch.arange(4)[None], torch.float32)  # frequencies that are no inference tensors
    with torch.inference_mode():
        rotary(one, torch.float32)
    cos, _ = rotary(one, torch.float32)["hybrid"]
    weight = torch.ones_like(cos, requires_grad=True)
    (weight * cos).sum().backward()
    assert torch.equal(weight.grad, cos)


def test_copies_bring_no_tables() -> None:
    rotary, one = RotaryTables(tiny_config()), torch.tensor([[3]])
    with torch.no_grad():
        want = rotary(one, torch.float32)["hybrid"]
        for copied in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
            assert copied._block is None
            assert torch.equal(copied(one, torch.float32)["hybrid"][0], want[0])
