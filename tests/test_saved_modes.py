"""Saved files: who may read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import tiny_config


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX systems")
@pytest.mark.parametrize("shard_size", ["1GB", "200KB"])
def test_every_file_has_the_mode_that_the_umask_implies(tmp_path: Path, umask: int, shard_size: str) -> None:
    model = ZayaForCausalLM(tiny_config(num_hidden_layers=2))
    for _ in range(2):  # an earlier save's files are replaced
        model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "model").iterdir()}
    weights = [name for name in modes if name.endswith(".safetensors")]
    assert (len(weights) > 1) is (shard_size == "200KB")
    assert "config.json" in modes
    assert set(modes.values()) == {oct(0o666 & ~umask)}
    assert not any(name.startswith(".") for name in modes)
