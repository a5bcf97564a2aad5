"""The records of a run: every line whole, every float to the bit, and nothing from after a rewind."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from zaya_hf.testing import tiny_config
from zaya_hf.training import environment, flops
from zaya_hf.training.record_files import LineFile
from zaya_hf.training.recorder import Recorder, evaluation_scalars, scalars
from zaya_hf.training.throughput import Throughput
from zaya_hf.training.trackers import Trackers


def lines(file: Path) -> list[dict[str, Any]]:
    """Of a file in which no line may be torn and no token may be other than JSON's."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    text = file.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 100 * step, "loss": 1 / 3 + step, "seconds": 0.5, **changes}


class TestLines:
    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_a_loss_is_read_back_to_the_bit(self, tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
        file = LineFile(tmp_path_factory.mktemp("lines") / "metrics.jsonl")
        file.write({"loss": value})
        file.close()
        (found,) = lines(file.path)
        assert struct.pack("<d", float(found["loss"])) == struct.pack("<d", value)

    def test_numbers_that_json_does_not_have(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        recorder.step(record(1, loss=math.nan, grad_norm=math.inf, router={"bias_min": [-math.inf, 0.5]}))
        (found,) = lines(tmp_path / "metrics.jsonl")
        assert (found["loss"], found["grad_norm"], found["router"]) == ("nan", "inf", {"bias_min": ["-inf", 0.5]})
        assert math.isnan(float(found["loss"]))

    def test_a_line_is_there_before_the_file_is_closed(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        recorder.step(record(1))
        assert [entry["step"] for entry in lines(tmp_path / "metrics.jsonl")] == [1]

    @pytest.mark.parametrize("torn", ['{"step": 3, "lo', "x" * 200_000, '{"step": 3}'])
    def test_what_a_killed_process_left_is_cut_off(self, tmp_path: Path, torn: str) -> None:
        file = tmp_path / "metrics.jsonl"
        file.write_text(json.dumps(record(1)) + "\n" + json.dumps(record(2)) + "\n" + torn)
        recorder = Recorder(tmp_path)
        recorder.step(record(3))
        assert [entry["step"] for entry in lines(file)] == [1, 2, 3]

    def test_a_file_that_is_all_torn(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"st')
        Recorder(tmp_path).step(record(1))
        assert [entry["step"] for entry in lines(tmp_path / "metrics.jsonl")] == [1]

    def test_a_process_that_is_killed_leaves_whole_lines(self, tmp_path: Path) -> None:
        code = """
import os, signal, sys
from pathlib import Path
from zaya_hf.training.record_files import LineFile
file = LineFile(Path(sys.argv[1]))
for step in range(1, 21):
    file.write({"step": step, "text": "x" * 5000})
os.kill(os.getpid(), signal.SIGKILL)
"""
        file = tmp_path / "metrics.jsonl"
        done = subprocess.run([sys.executable, "-c", code, str(file)], env=os.environ, check=False)
        assert done.returncode == -9
        assert [entry["step"] for entry in lines(file)] == list(range(1, 21))


class TestRewind:
    def test_later_steps_and_evaluations_go_and_events_stay(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        for step in range(1, 7):
            recorder.step(record(step))
            recorder.evaluation({"kind": "held_out", "step": step, "loss": 1.0})
        recorder.event("checkpoint", 6)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "to')  # torn
        kept = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[:4]
        recorder.rewind(4)
        recorder.step(record(5, loss=9.0))
        found = lines(tmp_path / "metrics.jsonl")
        assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5]
        assert found[-1]["loss"] == 9.0
        assert (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[:4] == kept
        assert [entry["step"] for entry in lines(tmp_path / "evaluations.jsonl")] == [1, 2, 3, 4]
        (event,) = lines(tmp_path / "events.jsonl")
        assert (event["event"], event["step"]) == ("checkpoint", 6)

    def test_an_evaluation_that_comes_again_goes(self, tmp_path: Path) -> None:
        """A run that was told to stop saves step 6 before the evaluation of step 6."""
        recorder = Recorder(tmp_path)
        for step in (3, 6):
            recorder.step(record(step))
            recorder.evaluation({"kind": "held_out", "step": step, "loss": 1.0})
        recorder.rewind(6, evaluated=3)
        assert [entry["step"] for entry in lines(tmp_path / "metrics.jsonl")] == [3, 6]
        assert [entry["step"] for entry in lines(tmp_path / "evaluations.jsonl")] == [3]

    def test_before_anything_was_written(self, tmp_path: Path) -> None:
        Recorder(tmp_path).rewind(0)
        assert list(tmp_path.iterdir()) == []

    def test_to_the_beginning(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path)
        recorder.step(record(1))
        recorder.rewind(0)
        assert recorder.metrics() == []

    def test_a_rewind_that_fails_leaves_the_old_lines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(tmp_path)
        for step in (1, 2):
            recorder.step(record(step))

        def fail(descriptor: int) -> None:
            raise OSError("no space left on device")

        recorder.close()
        monkeypatch.setattr("zaya_hf.training.record_files.os.fsync", fail)
        with pytest.raises(OSError, match="no space"):
            recorder.rewind(1)
        assert [entry["step"] for entry in lines(tmp_path / "metrics.jsonl")] == [1, 2]
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, main=False)
    recorder.step(record(1))
    recorder.evaluation({"kind": "held_out", "step": 1, "loss": 1.0})
    recorder.event("start", 0)
    recorder.environment({})
    recorder.rewind(0)
    recorder.close()
    assert list(tmp_path.iterdir()) == []


class TestThroughput:
    config = tiny_config()

    def test_speed_is_of_the_tokens_since_the_last_step(self, tmp_path: Path) -> None:
        measure = Throughput(lambda skip: 1e9 * (1 - skip), devices=2, peak_tflops=0.5)
        recorder = Recorder(tmp_path, throughput=measure)
        recorder.step(record(1, tokens=1000, seconds=0.5, router={"skip_rate": [0.1, 0.3]}))
        recorder.step(record(2, tokens=1500, seconds=0.5))
        recorder.rewind(1)
        recorder.step(record(2, tokens=1600, seconds=0.5))
        first, second = recorder.metrics()
        assert first["tokens_per_second"] == 2000
        assert first["tflops"] == pytest.approx(2000 * 0.8e9 / 2 / 1e12)
        assert first["mfu"] == pytest.approx(first["tflops"] / 0.5)
        assert second["tokens_per_second"] == 1200
        assert second["tflops"] == pytest.approx(1200 * 0.8e9 / 2 / 1e12)  # with the skip rate that was last measured

    def test_of_a_model_on_a_device_that_is_not_known(self) -> None:
        facts = {"devices": 1, "device_name": "abacus", "precision": "float32"}
        measure = Throughput.of_run(self.config, 64, **facts)
        found = measure.of(4096, 2.0, 0.0)
        assert found["mfu"] is None
        assert found["tflops"] == pytest.approx(2048 * flops.flops_per_token(self.config, 64).total / 1e12)
        known = Throughput.of_run(self.config, 64, **facts, peak_tflops=found["tflops"] * 4)
        assert known.of(4096, 2.0, 0.0)["mfu"] == pytest.approx(0.25)


class TestTrackers:
    def test_names_are_grouped_and_what_is_no_number_is_left_out(self) -> None:
        found = scalars(
            record(3, loss=math.nan, grad_norm=2.0, mfu=None, skipped="spike", router={"load_entropy": [0.5, 1.0]})
        )
        assert found["train/grad_norm"] == 2.0
        assert found["train/skipped"] == 1.0
        assert (found["router/load_entropy_mean"], found["router/load_entropy_min"]) == (0.75, 0.5)
        assert not {"train/loss", "speed/mfu"} & set(found)
        assert all(name.split("/")[0] in ("train", "speed", "router") for name in found)
        held_out = {"loss": 2.0, "bits_per_byte": None, "sources": {"docs": {"loss": 1.5}}, "ema": {"loss": 1.9}}
        assert evaluation_scalars(held_out) == {"eval/loss": 2.0, "eval/docs/loss": 1.5, "eval/ema/loss": 1.9}
        assert evaluation_scalars({"tasks": {"lines": {"accuracy": 0.5}}}) == {"eval/lines/accuracy": 0.5}

    def test_tensorboard_has_the_scalars_and_hides_what_was_rewound(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        recorder = Recorder(tmp_path, trackers=Trackers(Accelerator(cpu=True), ["tensorboard"], tmp_path))
        for step in range(1, 6):
            recorder.step(record(step))
        recorder.rewind(3)
        recorder.step(record(4, loss=0.25))
        recorder.close()
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "zaya"))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("train/loss")]
        assert found[2:] == [(3, pytest.approx(3 + 1 / 3)), (4, 0.25)]

    def test_a_missing_package_is_named_before_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("zaya_hf.training.trackers.importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"asks for wandb, which is not installed: pip install wandb"):
            Trackers(Accelerator(cpu=True), ["wandb"], tmp_path)

    def test_a_tracker_that_cannot_start_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerator = Accelerator(cpu=True)

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("api_key not configured")

        monkeypatch.setattr(accelerator, "init_trackers", fail)
        with pytest.raises(ValueError, match="tensorboard cannot start: api_key not configured"):
            Trackers(accelerator, ["tensorboard"], tmp_path)

    def test_w_and_b_gets_the_settings_once_and_all_values(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Against a stand-in: the package is not a dependency."""
        accelerator, calls = Accelerator(cpu=True), []
        monkeypatch.setattr("zaya_hf.training.trackers.importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr("zaya_hf.training.trackers.filter_trackers", lambda names, folder: list(names))
        monkeypatch.setattr(accelerator, "init_trackers", lambda *args, **options: calls.append((args, options)))
        monkeypatch.setattr(accelerator, "log", lambda values, step: calls.append((values, step)))
        trackers = Trackers(accelerator, ["wandb"], tmp_path, project="lab", settings={"seed": 1})
        trackers.log({"train/loss": 1.0}, 3)
        expected = {"wandb": {"config": {"seed": 1}, "dir": str(tmp_path), "name": tmp_path.name}}
        assert calls == [(("lab",), {"init_kwargs": expected}), ({"train/loss": 1.0}, 3)]


def test_the_environment_has_versions_and_no_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad = False
    recorder = Recorder(tmp_path)
    recorder.environment(environment.describe(Accelerator(cpu=True), model, {"active_parameters": 5}))
    text = (tmp_path / "environment.json").read_text()
    found = json.loads(text)
    assert "hunter2" not in text
    assert found["versions"]["torch"] == torch.__version__
    assert found["model"] == {
        "class": "Linear", "parameters": 8, "trainable_parameters": 6, "active_parameters": 5
    }  # fmt: skip
    assert found["hardware"]["processes"] == 1
