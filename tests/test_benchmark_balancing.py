"""The benchmark of the balancing controllers, on few tokens: what it reports is what happened, and the page has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmark_scripts import BENCHMARKS, benchmark_script
from zaya_hf.training.config import BalancingConfig

SMALL = ["--steps", "120", "--tokens", "1024", "--seeds", "2"]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with benchmark_script("balancing") as module:
        yield module


@pytest.fixture(scope="module")
def result(benchmark: Any) -> dict[str, Any]:
    return benchmark.run(120, 1024, 2, 0)


def test_controllers_balance_and_frozen_biases_do_not(result: dict[str, Any]) -> None:
    last = {trial["name"]: fmean(trial["max_violation_after"]) for trial in result["trials"]}
    assert last["frozen"] > 1
    assert max(last[name] for name in ("adamw 5e-3", "pid ki 0.2", "sign 5e-3")) < 0.5 * last["frozen"]
    assert 0.1 < result["noise_floor"] < 0.4  # 16 fair counts of 1024: 1.8 deviations of 0.12
    assert {trial["controller"] for trial in result["trials"]} == {"frozen", "sign", "pid", "adamw"}


def test_a_summary_is_of_its_curve(benchmark: Any, result: dict[str, Any]) -> None:
    assert result["setting"]["window"] == 50
    for trial in result["trials"]:
        curve = trial["curve"]
        assert curve["step"] == list(range(5, 120, 10))
        assert len(curve["load_entropy"]) == len(curve["max_violation"]) == 12
        assert fmean(curve["max_violation"][7:]) == pytest.approx(fmean(trial["max_violation_after"]), abs=1e-3)
        assert fmean(curve["max_violation"][1:6]) == pytest.approx(fmean(trial["max_violation_before"]), abs=1e-3)
        assert 0 < min(curve["load_entropy"]) <= max(curve["load_entropy"]) <= 1
    assert benchmark.trials()[0].config == BalancingConfig(controller="frozen")
    frozen = result["trials"][0]
    assert (frozen["bias_change_per_step"], frozen["bias_range"]) == (0, 0)


@pytest.mark.parametrize(
    ("violations", "steps"),
    [([0.1] * 5, 0), ([0.9, 0.1, 0.1, 0.3, *[0.1] * 5], 4), ([0.1] * 4, None), ([0.1, 0.1, 0.2] * 5, None)],
)
def test_settling_takes_five_steps_in_a_row(benchmark: Any, violations: list[float], steps: int | None) -> None:
    assert benchmark._again(violations) == steps


def test_counts_of_seeds_as_text(benchmark: Any) -> None:
    assert benchmark.steps_text([None, None]) == "0"
    assert benchmark.steps_text([None, 7]) == "1 (7)"
    assert benchmark.steps_text([9, 7, 8]) == "3 (7-9)"


def test_the_command(
    benchmark: Any, result: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same seed gives the same numbers, in the JSON object, the file, the table and the page."""
    file, page = tmp_path / "made" / "b.json", tmp_path / "b.html"
    assert benchmark.main([*SMALL, "--output", str(file), "--page", str(page)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text(encoding="utf-8")) == result
    html, table = page.read_text(encoding="utf-8"), benchmark.table(result)
    assert html.count("<svg") == 2
    for trial in result["trials"]:
        assert f"<th>{trial['name']}</th>" in html
        assert f"| {trial['name']} | {fmean(trial['max_violation_before']):.2f} |" in table


def test_published_results_are_of_these_trials(benchmark: Any) -> None:
    """And the default gains are the ones that they are chosen by."""
    published = json.loads((BENCHMARKS / "results" / "balancing.json").read_text(encoding="utf-8"))
    assert [trial["name"] for trial in published["trials"]] == [trial.name for trial in benchmark.trials()]
    found = {trial["name"]: trial for trial in published["trials"]}
    default = BalancingConfig()
    assert found["adamw 5e-3"]["gains"] == {"lr": default.lr, "betas": list(default.betas)}
    assert found["pid ki 0.2"]["gains"] == {k: getattr(default, k) for k in ("kp", "ki", "kd", "clamp")}
    for name in ("adamw 5e-3", "pid ki 0.2"):
        assert None not in found[name]["settled_again_after"]
        assert fmean(found[name]["max_violation_after"]) < 1.3 * published["noise_floor"]


def test_wrong_arguments_are_one_line(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--steps", "3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "balancing.py: argument --steps: 3 is not a number from 20 up\n"
