"""The benchmark of the operators: what it prints and refuses, that a wrong operator is found out, what it counts.

No time is asserted: everything runs at narrow widths on few tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_scripts import benchmark_script
from zaya_hf import ops
from zaya_hf.ops import selection

SMALL = ["--device", "cpu", "--small", "--no-compile", "--seconds", "0", "--tokens", "40", "--rows", "3"]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with benchmark_script("ops") as module:
        yield module


@pytest.fixture(autouse=True)
def _quick(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rates are not measured: that takes longer than everything else."""
    monkeypatch.setattr(benchmark, "_rates", lambda *_: {"bytes": 1e10, "fp32": 1e11, "bf16": 2e11, "fp16": 2e11})
    monkeypatch.setattr(benchmark, "machine", lambda quick: {"cpu": "a", "versions": {}})


def run(benchmark: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, standard error."""
    status = benchmark.main([*SMALL, *arguments])
    output = capsys.readouterr()
    return status, json.loads(output.out), output.err


def assert_bytes_and_operations_are_by_formula(rows: list[dict[str, Any]]) -> None:
    norm = {row["pass"]: row for row in rows if row["operator"] == "residual_norm" and row["size"] == "40 tokens"}
    vector, stream = 512 * 4, 40 * 512 * 4
    forward = 2 * stream + 5 * vector + 2 * stream
    assert norm["forward"]["bytes"] == forward
    gradients = 2 * stream + 5 * vector
    assert norm["forward and backward"]["bytes"] == forward + (2 * stream + 5 * vector) + 2 * stream + gradients
    experts = {row["pass"]: row for row in rows if row["operator"] == "experts" and row["size"] == "3 tokens"}
    assert experts["forward"]["flops"] == 2 * 3 * 512 * 512 * 3
    assert experts["forward and backward"]["flops"] == 3 * experts["forward"]["flops"]


@pytest.mark.slow
def test_every_operator_is_checked_and_timed(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "made" / "result.json"
    before = selection.description()
    status, result, table = run(benchmark, capsys, "--dtype", "fp32", "--output", str(file))
    assert status == 0, table
    assert selection.description() == before
    assert result == json.loads(file.read_text(encoding="utf-8"))
    assert (result["gpu"], result["triton_kernels_timed"]) == (None, False)
    assert "Triton kernels have not been timed" in result["note"]
    assert "Triton kernels have not been timed" in table
    rows = result["rows"]
    assert {row["operator"] for row in rows} == set(ops.OPERATORS) - {"linear"}
    for row in rows:
        assert row["check"].startswith("ok: ")
        assert row["ours_us"] > 0 < row["eager_us"]
        assert row["ratio_to_eager"] == pytest.approx(row["eager_us"] / row["ours_us"], rel=1e-2)
        assert row["floor_us"] == pytest.approx(max(row["bytes"] / 1e10, row["flops"] / 1e11) * 1e6, rel=1e-3)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ours_us"] / 1e3, rel=1e-2)
        assert row["backend"] == ops.backends()[row["operator"]][0] != "triton"
    assert all("grouped_mm_us" in row or "grouped_mm_error" in row for row in rows if row["operator"] == "experts")
    passes = [row["pass"] for row in rows if row["operator"] == "cca_mix"]
    assert passes == ["forward", "forward and backward"]
    assert_bytes_and_operations_are_by_formula(rows)


def test_narrow_dtypes_are_held_to_their_tolerance(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--dtype", "bf16", "--operator", "residual_norm", "--operator", "cca_step"]
    status, result, _ = run(benchmark, capsys, *chosen)
    assert status == 0
    assert {row["dtype"] for row in result["rows"]} == {"bf16"}


@pytest.mark.parametrize("part", ["result 0", "gradient of weight"])
def test_an_operator_that_is_wrong_is_not_timed(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    right = ops.residual_merge_norm

    def wrong(**given: Any) -> Any:
        stream, normed = right(**given)
        if part == "result 0":
            return stream * 1.001, normed
        return stream, normed.detach() + (normed - normed.detach()) * 1.001

    monkeypatch.setattr(ops, "residual_merge_norm", wrong)
    status, result, table = run(benchmark, capsys, "--dtype", "fp32", "--operator", "residual_norm")
    assert status == 1
    for row in result["rows"]:
        assert row["check"].startswith("failed: ")
        assert not any(key.endswith("_us") for key in row)
    assert part in result["rows"][0]["check"] or part.startswith("gradient")
    assert "off float64, allowed 1.0e-05" in table


def test_an_operator_that_raises_is_a_result(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**given: Any) -> Any:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(ops, "cca_step", broken)
    status, result, _ = run(benchmark, capsys, "--dtype", "fp32", "--operator", "cca_step", "--operator", "router")
    assert status == 1
    failed = [row for row in result["rows"] if row["operator"] == "cca_step"]
    assert {row["check"] for row in failed} == {"failed: RuntimeError: no such kernel"}
    assert all(row["check"].startswith("ok") for row in result["rows"] if row["operator"] == "router")


def test_a_side_that_cannot_run_is_named_and_the_others_go_on(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("nothing to compile with")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuses)
    arguments = [argument for argument in SMALL if argument != "--no-compile"]
    status = benchmark.main([*arguments, "--dtype", "fp32", "--operator", "cca_step"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert status == 0
    assert {row["compiled_error"] for row in rows} == {"RuntimeError: nothing to compile with"}
    assert all(row["ours_us"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "torch has no device 'meta' here"),
        (["--operator", "attention"], "invalid choice: 'attention'"),
        (["--tokens", "1"], "1 is not a number from 32 up"),
    ],
)
def test_wrong_usage_is_one_line(
    benchmark: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("ops.py: ")
    assert error.count("\n") == 1
    assert message in error
