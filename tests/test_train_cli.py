"""`zaya train`: what it is told, and several processes: what they find, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zaya_cli
from commands import error_line, zaya
from zaya_hf import launching
from zaya_hf.training import __main__ as process
from zaya_hf.training import launch, run
from zaya_hf.training.config import TrainingConfig

SETTINGS = """\
out: runs/x
steps: 3
model: {config: {vocab_size: 300, hidden_size: 64, num_hidden_layers: 2}}
data: {sources: [{path: x}], sequence_length: 32}
batch: {rows: 4}
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainingConfig]:
    """Configs that would have been trained, in this process."""
    found: list[TrainingConfig] = []

    def train(config: TrainingConfig) -> int:
        found.append(config)
        return 7

    monkeypatch.setattr(run, "main", train)
    return found


class TestCommand:
    def test_settings_may_stand_anywhere(
        self, capsys: pytest.CaptureFixture[str], file: Path, trained: list[TrainingConfig]
    ) -> None:
        code, out, err = zaya(capsys, "train", file, "steps=5", "--processes", 1, "seed=3", "--debug", "optimizer.lr=1")
        assert (code, out, err) == (7, "", "")
        assert (trained[0].steps, trained[0].seed, trained[0].optimizer.lr) == (5, 3, 1)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["train"], "CONFIG"),
            (["train", "x", "--nope"], "unrecognized arguments: --nope"),
            (["train", "x", "--processes", "0"], "'0' is not a whole number from 1 up"),
            (["doctor", "a=b"], "unrecognized arguments: a=b"),
            (["data"], "WHAT"),
            (["data", "build", "x", "--tokenizer", "t"], "--out"),
            (["data", "build", "x", "--out", "o", "--tokenizer", "t", "--kind", "csv"], "csv"),
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        code, out, err = zaya(capsys, *arguments)
        assert (code, out) == (2, "")
        assert said in err

    def test_mistakes_are_one_line(
        self, capsys: pytest.CaptureFixture[str], file: Path, trained: list[TrainingConfig]
    ) -> None:
        assert "command line: unknown key lr: did you mean optimizer.lr" in error_line(capsys, "train", file, "lr=1")
        assert "no such file: none.yaml" in error_line(capsys, "train", "none.yaml")
        missing = error_line(capsys, "train", file, "--accelerate-config", "none.yaml")
        assert "no such file: none.yaml" in missing
        both = error_line(capsys, "train", file, "--accelerate-config", file, "--processes", 2)
        assert "--processes is for one machine without --accelerate-config" in both
        assert trained == []

    def test_show_trains_nothing(
        self, capsys: pytest.CaptureFixture[str], file: Path, trained: list[TrainingConfig]
    ) -> None:
        code, out, err = zaya(capsys, "train", file, "--show", "steps=5", "--processes", 2)
        assert (code, err, trained) == (0, "", [])
        assert "steps: 5" in out
        assert "micro-batches of 1 row on each of 2 processes" in out

    def test_missing_packages_are_named(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import importlib.util

        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "yaml" else real(name))
        assert "training also needs pyyaml: pip install pyyaml" in error_line(capsys, "train", "cpu-small")

    def test_sources_may_be_on_the_hub(self) -> None:
        assert not {"train", "data"} & zaya_cli.OFFLINE

    def test_processes_get_the_same_command(
        self, capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[tuple[Any, ...]] = []
        monkeypatch.setattr(launch, "launch_processes", lambda *call: started.append(call) or 5)
        monkeypatch.setattr(launch, "launch_accelerate", lambda *call: started.append(call) or 6)
        monkeypatch.setattr(launch, "gpus", lambda: 0)
        code, _, _ = zaya(capsys, "train", file, "steps=5", "--processes", 2)
        command = [sys.executable, "-m", "zaya_hf.training", str(file), "steps=5"]
        assert (code, started) == (5, [(command, 2)])
        code, _, _ = zaya(capsys, "train", file, "--accelerate-config", file, "steps=5", "--debug")
        assert (code, started[1]) == (6, (str(file), [str(file), "steps=5", "--debug"]))
        monkeypatch.setattr(launch, "gpus", lambda: 2)
        assert "--processes 3: there are 2 GPUs here" in error_line(capsys, "train", file, "--processes", 3)


class TestOneProcess:
    def test_it_trains_what_it_is_told(self, file: Path, trained: list[TrainingConfig]) -> None:
        assert process.main([str(file), "steps=9"]) == 7
        assert trained[0].steps == 9

    def test_an_error_is_one_line_with_the_process(
        self, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(config: TrainingConfig) -> int:
            raise KeyError("first\nsecond")

        monkeypatch.setattr(run, "main", broken)
        assert process.main([str(file)]) == 1
        assert capsys.readouterr().err == "zaya train: error: KeyError: 'first\\nsecond'\n"
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        assert process.main([str(file), "lr=1"]) == 1
        assert capsys.readouterr().err.startswith("zaya train: error (process 1): command line: unknown key lr")
        monkeypatch.setenv("ZAYA_DEBUG", "1")
        with pytest.raises(KeyError):
            process.main([str(file)])

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            dist.DistNetworkError("Connection closed by peer"),
        ],
    )
    def test_the_end_of_another_process_is_told(
        self, error: Exception, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(config: TrainingConfig) -> int:
            raise error

        monkeypatch.setattr(run, "main", broken)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        assert process.main([str(file)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("zaya train: error (process 0): another process of the run has ended or cannot be reach")
        assert said.endswith("Connection closed by peer)\n")


def script(text: str) -> list[str]:
    return [sys.executable, "-c", "import json, os, signal, sys, time\nfrom pathlib import Path\n" + text]


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Does something as soon as a condition holds."""

    def watch() -> None:
        end = time.monotonic() + 30
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


class TestLaunch:
    def test_processes_find_each_other(self, tmp_path: Path) -> None:
        body = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor([int(os.environ["RANK"]) + 1])
dist.all_reduce(rank)
facts = {{name: os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")}}
Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(json.dumps([rank.item(), facts]))
dist.destroy_process_group()
"""
        assert launch.launch_processes(script(body), 2) == 0
        for rank in "01":
            total, facts = json.loads((tmp_path / rank).read_text())
            assert total == 3
            assert (facts["LOCAL_RANK"], facts["WORLD_SIZE"], facts["LOCAL_WORLD_SIZE"]) == (rank, "2", "2")
            assert int(facts["OMP_NUM_THREADS"]) >= 1

    @pytest.mark.parametrize(
        ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("pass", 0)]
    )
    def test_the_exit_code_is_that_of_the_first_that_failed(self, end: str, code: int) -> None:
        body = f"""
if os.environ["RANK"] == "1":
    {end}
elif {code}:
    time.sleep(60)  # SIGTERM ends it
"""
        started = time.monotonic()
        assert launch.launch_processes(script(body), 2) == code
        assert time.monotonic() - started < 30

    def test_who_does_not_stop_is_killed(self, tmp_path: Path) -> None:
        ready = tmp_path / "ready"
        body = f"""
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path({str(ready)!r}).touch()
    time.sleep(60)
while not Path({str(ready)!r}).exists():
    time.sleep(0.01)
sys.exit(4)
"""
        started = time.monotonic()
        assert launch.launch_processes(script(body), 2, grace=0.2) == 4
        assert time.monotonic() - started < 30

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
    def test_signals_are_passed_on_and_saving_takes_its_time(self, tmp_path: Path, name: str) -> None:
        """The process that stops first has the exit code of one that saved; the other one is let alone."""
        body = f"""
def stop(number, frame):
    if os.environ["RANK"] == "1":
        time.sleep(0.5)  # longer than the grace of those that hang
    Path({str(tmp_path)!r}, "saved" + os.environ["RANK"]).write_text(signal.Signals(number).name)
    sys.exit({{"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 0}}[{name!r}])
signal.signal(signal.{name}, stop)
Path({str(tmp_path)!r}, "ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""
        before = signal.getsignal(getattr(signal, name))
        thread = when(
            lambda: all((tmp_path / f"ready{rank}").exists() for rank in "01"),
            lambda: os.kill(os.getpid(), getattr(signal, name)),
        )
        code = launch.launch_processes(script(body), 2, grace=0.1)
        thread.join()
        assert code == {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 0}[name]
        assert [(tmp_path / f"saved{rank}").read_text() for rank in "01"] == [name, name]
        assert signal.getsignal(getattr(signal, name)) == before

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel of Linux")
    def test_processes_end_with_their_launcher(self, tmp_path: Path) -> None:
        # Without the package, which takes seconds.
        own = f"import runpy\nlaunch = runpy.run_path({launching.__file__!r})\n"
        child = f"""{own}
launch["end_with_launcher"]()
Path({str(tmp_path)!r}, "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""
        parent = f"{own}launch['launch_processes']({script(child)!r}, 1)"
        launcher = subprocess.Popen([sys.executable, "-c", parent])
        file = tmp_path / "pid0"
        when(lambda: file.exists() and bool(file.read_text()), launcher.kill).join()
        launcher.wait()
        pid, end = int(file.read_text()), time.monotonic() + 20
        while time.monotonic() < end:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the process outlived its launcher")

    @pytest.mark.slow
    def test_accelerate_starts_two_on_cpus(self, capfd: pytest.CaptureFixture[str]) -> None:
        from zaya_hf.resources import resource

        file = resource("train", "accelerate", "two-cpus.yaml")
        assert launch.launch_accelerate(str(file), ["no-such-recipe"]) != 0
        said = capfd.readouterr().err
        assert "zaya train: error (process 0): no such file: no-such-recipe" in said
        assert "zaya train: error (process 1): no such file: no-such-recipe" in said
