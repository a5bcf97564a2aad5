"""SIGKILL at any moment, then the same command again: the run ends with the numbers of one that was left alone.

The runs are real ones, of `benchmarks/kill_resume.py`: its table is made by the same code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import benchmark_script


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with benchmark_script("kill_resume") as module:
        yield module


def killed_and_equal(script: Any, folder: Path, kills: int, seed: int) -> Any:
    said: list[str] = []
    outcome = script.trial(folder, kills, seed, said.append)
    assert outcome.different == [], "\n".join(said)
    assert outcome.killed.total() == kills
    metrics = script.lines(folder / "undisturbed" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, script.STEPS + 1))
    assert len({record["loss"] for record in metrics}) == script.STEPS
    assert not any("skipped" in record for record in metrics)
    return outcome


def test_killed_three_times(script: Any, tmp_path: Path) -> None:
    """This seed aims at a removal within a save, at the training, and at the writing of a save.

    `test_training_checkpoint` has every moment of a save.
    """
    killed_and_equal(script, tmp_path, kills=3, seed=88)


@pytest.mark.slow
def test_killed_at_fifty_moments(script: Any, tmp_path: Path) -> None:
    outcome = killed_and_equal(script, tmp_path, kills=50, seed=1)
    assert sum(outcome.killed[name] > 0 for name in script.PHASES) >= 4


RECORD = {"step": 1, "loss": 0.1 + 0.2, "router": {"load_entropy": [0.5, 0.25]}}
RESULT = {"metrics": [RECORD, {"step": 2, "loss": 1.0}], "evaluations": [], "weights": {"model": "a"}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda got: got["metrics"][0].update(loss=0.3), "metrics, step 1: loss is 0.3, expected 0.30000000000000004"),
        (lambda got: got["metrics"][0]["router"]["load_entropy"].reverse(), "metrics, step 1: router is"),
        (lambda got: got["metrics"][1].pop("loss"), "metrics, step 2: loss is None"),
        (lambda got: got["metrics"].pop(), "metrics have the steps [1]"),
        (lambda got: got["metrics"].append(RECORD), "metrics have the steps [1, 2, 1]"),
        (lambda got: got["evaluations"].append({"step": 1}), "evaluations have the steps [1]"),
        (lambda got: got["weights"].update(model="b"), "the weights differ"),
    ],
)
def test_one_digit_is_a_difference(script: Any, change: Callable[[dict[str, Any]], Any], told: str) -> None:
    got = copy.deepcopy(RESULT)
    assert script.difference(got, RESULT) is None
    change(got)
    found = script.difference(got, RESULT)
    assert found is not None
    assert found.startswith(told)


def test_the_folder_tells_where_a_process_died(script: Any, tmp_path: Path) -> None:
    def write(name: str, *records: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')

    def phase() -> str:
        return str(script.phase(tmp_path, begun=True))

    checkpoints = tmp_path / "checkpoints"
    assert script.phase(tmp_path, begun=False) == "start-up"
    assert phase() == "step"
    write("metrics.jsonl", *({"step": step} for step in range(1, script.EVALUATE_EVERY + 1)))
    assert phase() == "evaluation"
    write("evaluations.jsonl", {"step": script.EVALUATE_EVERY})
    assert phase() == "step"
    (checkpoints / "step-6.tmp").mkdir(parents=True)
    assert phase() == "save: writing"
    (checkpoints / "step-6.tmp" / "manifest.json").touch()
    assert phase() == "save: written"
    (checkpoints / "step-6.tmp").rename(checkpoints / "step-6")
    assert phase() == "step"
    (checkpoints / "step-3.tmp").mkdir()
    assert phase() == "save: removing"
    (checkpoints / "step-3.tmp").rmdir()
    (checkpoints / f"step-{script.STEPS}").mkdir()
    write("metrics.jsonl", {"step": script.STEPS})
    assert phase() == "end"
