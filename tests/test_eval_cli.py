"""`zaya eval`: the command line, a dry run, and tiny models from the first request to the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import zaya_cli
import zaya_hf
from commands import error_line, zaya
from evaluation_runs import Bench, bench, read, write_model, write_suite
from zaya_hf import launching
from zaya_hf.evaluation import data, runs
from zaya_hf.evaluation.code_execution import CONSENT
from zaya_hf.quickstart import bpe
from zaya_hf.testing import redraw, tiny_config

__all__ = ["bench"]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path / "suite")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real ZAYA model, with a tokenizer that was trained on this file."""
    where = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=300)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=2, **ids)
    model = zaya_hf.ZayaForCausalLM(config)
    redraw(model, seed=3)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1  # as published
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "required: --suite, --models, --out"),
            (["--suite", "offline", "--out", "x"], "required: --models"),
            (["--suite", "offline", "--dry-run"], "required: --models"),
            (["--models", "a,,b"], "'a,,b' has an empty name"),
            (["--limit", "0"], "'0' is not a whole number from 1 up"),
            (["--processes", "0"], "'0' is not a whole number from 1 up"),
            (["--dtype", "int8"], "int8"),
            (["contamination", "x"], "--suite"),
            (["contamination", "--suite", "offline"], "CORPUS"),
            (["nothing"], "nothing"),
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        code, out, err = zaya(capsys, "eval", *arguments)
        assert (code, out) == (2, "")
        assert said in err

    def test_the_command_in_the_manifest_means_the_same(self, tmp_path: Path) -> None:
        given = runs.Settings(
            suite="s.yaml",
            models=("a", "b=x"),
            out="o",
            limit=3,
            resume=False,
            dtype="float32",
            device="cpu",
            max_length=9,
            chat_template=False,
            token_budget=7,
            processes=2,
            allow_code_execution=True,
            baseline="a",
            seed=0,
        )
        args = zaya_cli.build_parser().parse_args(given.command()[1:])
        for name in (
            "suite",
            "limit",
            "resume",
            "dtype",
            "device",
            "max_length",
            "token_budget",
            "processes",
            "seed",
            "chat_template",
        ):
            assert getattr(args, name) == getattr(given, name), name
        assert (args.models, str(args.out), args.baseline) == (["a", "b=x"], "o", "a")
        assert args.allow_code_execution
        assert runs.Settings("s", ("a",), "o").command() == [
            *("zaya", "eval", "--suite", "s", "--models", "a", "--out", "o")
        ]

    def test_mistakes_are_one_line_before_anything_is_loaded(
        self, capsys: pytest.CaptureFixture[str], bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        assert "there is no suite 'ofline'" in error_line(
            capsys, "eval", "--suite", "ofline", "--models", model, "--out", out
        )
        unknown = error_line(capsys, "eval", "--suite", suite, "--models", "zaya1-bse", "--out", out)
        assert "zaya1-base" in unknown
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        foreign = error_line(capsys, "eval", "--suite", suite, "--models", model, "--out", tmp_path / "full")
        assert "choose another --out" in foreign
        assert bench.loaded == []
        assert not out.exists()

    def test_code_is_not_run_without_consent(
        self,
        capsys: pytest.CaptureFixture[str],
        bench: Bench,
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Refused before the model is loaded, rather than a score of 0 in the end."""
        monkeypatch.delenv(CONSENT, raising=False)
        line = error_line(capsys, "eval", "--suite", "code", "--models", model, "--out", tmp_path / "out")
        assert "--allow-code-execution" in line
        assert bench.loaded == []

    def test_consent_may_come_from_the_environment(
        self, capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value, refused in (("1", False), ("0", True)):
            monkeypatch.setenv(CONSENT, value)
            _, out, err = zaya(capsys, "eval", "--suite", "code", "--models", model, "--dry-run")
            assert ("consent: " in out + err) == refused

    def test_data_is_handed_on(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[Any] = []
        monkeypatch.setattr(data, "run", lambda *call: told.append(call) or 3)
        assert zaya(capsys, "eval", "data", "humaneval", "--list")[0] == 3
        assert told == [(["humaneval"], True)]


class TestRuns:
    def test_a_run_ends_with_its_report(
        self, capsys: pytest.CaptureFixture[str], bench: Bench, suite: Path, tmp_path: Path
    ) -> None:
        models = f"a={write_model(tmp_path / 'a')},b={write_model(tmp_path / 'b', 'long')}"
        code, out, err = zaya(capsys, "eval", "--suite", suite, "--models", models, "--out", tmp_path / "out")
        assert code == 0
        assert out.splitlines()[-1] == str(tmp_path / "out" / "report.html")
        assert "zaya eval: warning: b, fake_sums: 5 of 5 answers were cut at their budget" in err
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert "Choices" in page
        assert (tmp_path / "out" / "report.md").is_file()

    def test_ctrl_c_says_how_to_go_on(
        self, capsys: pytest.CaptureFixture[str], bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        bench.stop_after = 3
        code, _, err = zaya(capsys, "eval", "--suite", suite, "--models", model, "--out", tmp_path / "out")
        assert code == 130
        assert "the same command goes on from there" in err

    def test_several_processes_get_the_settings(
        self,
        capsys: pytest.CaptureFixture[str],
        bench: Bench,
        suite: Path,
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        started: list[Any] = []
        monkeypatch.setattr(launching, "launch_processes", lambda *call: started.append(call) or 143)
        monkeypatch.setattr(launching, "gpus", lambda: 0)
        options = ("--suite", suite, "--models", model, "--out", tmp_path / "out", "--processes")
        code, _, err = zaya(capsys, "eval", *options, 2)
        assert code == 143
        assert "the same command goes on" in err
        ((command, processes),) = started
        assert (command[:3], processes) == ([sys.executable, "-m", "zaya_hf.evaluation"], 2)
        told = json.loads(command[3])
        assert runs.Settings(**told | {"models": tuple(told["models"])}).models == (str(model),)
        monkeypatch.setattr(launching, "gpus", lambda: 1)
        assert "there are 1 GPUs" in error_line(capsys, "eval", *options, 2)

    @pytest.mark.parametrize("name", ["quick", "paper", "offline"])
    def test_a_dry_run_needs_no_data_and_no_weights(
        self, capsys: pytest.CaptureFixture[str], bench: Bench, name: str
    ) -> None:
        code, out, _ = zaya(capsys, "eval", "--suite", name, "--models", "zaya1-base,llama-3-8b", "--dry-run")
        assert code == 0
        assert "zaya1-base" in out
        assert "llama-3-8b" in out
        assert "Before it can run:" in out
        assert "license" in out.lower() or "licence" in out.lower() or "terms" in out.lower()
        assert bench.loaded == []

    def test_a_tiny_model(self, capsys: pytest.CaptureFixture[str], suite: Path, tiny: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        arguments = ("--suite", suite, "--models", tiny, "--out", out, "--limit", 2)
        code, _, err = zaya(capsys, "eval", *arguments)
        assert (code, err.count("cut at their budget")) == (0, 1)
        result, samples = read(out, "tiny", "fake_choice")
        assert result["counts"]["requests"] == 4
        assert 0 < result["counts"]["tokens_computed"] < result["counts"]["tokens_given"]
        assert all(value < 0 for sample in samples for value in sample["loglikelihoods"])
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        facts = manifest["models"]["tiny"]
        assert len(facts["weights_sha256"]) == 64
        assert facts["bos"]["checked_ids"]["prompt"]
        assert facts["parameters"] > facts["parameters_without_embedding"]


def _finish(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_killed_or_shared_by_processes_it_is_the_same(suite: Path, tiny: Path, tmp_path: Path) -> None:
    """SIGKILL and SIGTERM in the middle, then the same command; and two processes: every file equals the first one's,
    but for times."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zaya_cli", "eval", "--suite", str(suite), "--models", f"tiny={tiny}"]

    def found(out: Path) -> dict[str, Any]:
        results = {}
        for task in ("fake_choice", "fake_sums", "fake_prose"):
            result, samples = read(out, "tiny", task)
            results[task] = (result["metrics"], samples)
        return results

    code, said = _finish([*command, "--out", str(tmp_path / "whole")], environment)
    assert code == 0, said
    expected = found(tmp_path / "whole")
    for number in (signal.SIGKILL, signal.SIGTERM):
        out = tmp_path / number.name
        child = subprocess.Popen([*command, "--out", str(out)], env=environment, start_new_session=True)
        end = time.monotonic() + 120
        while not list(out.rglob("journal/*.jsonl")) and child.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        child.send_signal(number)
        assert child.wait() in (-signal.SIGKILL, 143, 0)
        code, said = _finish([*command, "--out", str(out)], environment)
        assert code == 0, said
        assert found(out) == expected
    code, said = _finish([*command, "--out", str(tmp_path / "two"), "--processes", "2"], environment)
    assert code == 0, said
    assert found(tmp_path / "two") == expected
