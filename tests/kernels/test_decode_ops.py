"""benchmarks/decode_ops.py: a decoding step asks for few operations, each operator of ours as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.interpreter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import decode_ops

        return decode_ops
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_a_layer_takes_no_more_than_its_target(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "EXPERTS", ("grouped_mm",))
    output = tmp_path / "ops.json"
    assert script.main(["--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == found
    ours, stock = found["zaya_hf"], found["transformers"]["grouped_mm"]
    assert ours["per_layer"] == sum(ours["operations_of_a_layer"].values()) <= 12
    assert ours["operations_of_a_layer"]["zaya_hf.cca_step_"] == 1
    assert ours["kernels_of_our_operators_in_a_layer"]["step_kernel"] == 1
    assert stock["per_layer"] > 100


def test_views_and_memory_are_no_work(script: Any) -> None:
    x = torch.ones(3, 4)
    with script.Operations() as counted:
        x.view(12).unflatten(0, (3, 4)).transpose(0, 1).split(2)
        torch.empty_like(x).copy_(x).add_(1)
    assert counted.names == ["aten.copy_", "aten.add_"]


def test_wrong_arguments_are_one_line(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--rows", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip() == "decode_ops.py: --rows takes a number from 1 up"
