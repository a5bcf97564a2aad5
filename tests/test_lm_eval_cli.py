"""`zaya lm-eval`: lm-eval's own command line, what it knows through us, and its file of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval.__main__
import lm_eval.loggers
import lm_eval.tasks
import numpy as np
import pytest
import torch
from lm_eval._cli.run import Run
from lm_eval.api.registry import get_model

import zaya_cli
from commands import error_line, zaya
from zaya_hf.evaluation import code_execution, forwarding
from zaya_hf.evaluation.scorer import Scorer


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's log would go on to the captured stream of the first of these tests, which is closed after it."""
    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)


@pytest.fixture
def lm_eval_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What lm-eval would have run."""
    found: list[Any] = []
    monkeypatch.setattr(Run, "_execute", staticmethod(lambda args: found.append((args, list(sys.argv)))))
    return found


def test_arguments_reach_lm_eval_as_they_are(capsys: pytest.CaptureFixture[str], lm_eval_runs: list[Any]) -> None:
    before = list(sys.argv)
    words = ["--model", "zaya", "--model_args", "pretrained=x", "--tasks", "zaya_last_word", "--limit", "2", "--debug"]
    code, _, err = zaya(capsys, "lm-eval", *words)
    assert code == 2  # of `--debug` lm-eval knows nothing, and we took nothing out
    assert "unrecognized arguments: --debug" in err
    assert zaya(capsys, "lm-eval", *words[:-1])[0] == 0
    ((args, argv),) = lm_eval_runs
    assert argv == ["lm-eval", "run", *words[:-1]]
    assert (args.model, args.tasks, args.limit) == ("zaya", ["zaya_last_word"], 2)
    assert sys.argv == before


def test_help_is_lm_evals(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = zaya(capsys, "lm-eval", "--help")
    assert code == 0
    assert out.startswith("usage: lm-eval")
    code, out, _ = zaya(capsys, "lm-eval", "run", "--help")
    assert "--model_args" in out


def test_both_models_are_known() -> None:
    """lm-eval registers its own in its import: registering ours first would lose them."""
    assert get_model("zaya") is Scorer
    assert get_model("hf") in Scorer.__mro__


def test_our_tasks_are_known_and_the_users_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\ndataset_path: json\n", encoding="utf-8")
    manager = forwarding._TaskManager(include_path=str(tmp_path), include_defaults=False)
    assert {"mine", "zaya_last_word", "zaya_humaneval"} <= set(manager.all_subtasks)


def test_errors_of_lm_eval_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> None:
        raise ValueError("no\nsuch")

    monkeypatch.setattr(Run, "_execute", staticmethod(broken))
    assert "error: no such" in error_line(capsys, "lm-eval", "--model", "zaya", "--tasks", "x")


def test_consent_to_run_code(
    capsys: pytest.CaptureFixture[str], lm_eval_runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(code_execution, "allow", lambda: asked.append(True))
    zaya(capsys, "lm-eval", "--tasks", "x", "--model", "zaya")
    assert asked == []
    zaya(capsys, "lm-eval", "--tasks", "x", "--model", "zaya", "--confirm_run_unsafe_code")
    assert asked == [True]


class TestOutputPath:
    """A file that is asked for is that very file, is JSON, and does not replace another."""

    @pytest.fixture
    def written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = {"results": {"t": {"a": np.float32(0.5), "b": float("nan"), "c": torch.tensor(1.5).bfloat16()}}}

        def execute(args: Any) -> None:
            tracker = lm_eval.loggers.EvaluationTracker(output_path=args.output_path)
            tracker.save_results_aggregated(results=results, samples=None)

        monkeypatch.setattr(Run, "_execute", staticmethod(execute))

    @pytest.mark.parametrize("words", [["--output_path", "{}"], ["--output_path={}"], ["-o", "{}"]])
    def test_a_file(self, capsys: pytest.CaptureFixture[str], written: None, tmp_path: Path, words: list[str]) -> None:
        file = tmp_path / "new" / "out.json"
        arguments = ("lm-eval", "--model", "zaya", "--tasks", "x", *(word.format(file) for word in words))
        assert zaya(capsys, *arguments)[0] == 0
        assert [path.name for path in file.parent.iterdir()] == ["out.json"]
        content = file.read_text(encoding="utf-8")
        assert "NaN" not in content
        found = json.loads(content)["results"]["t"]
        assert (found["a"], found["b"]) == (0.5, None)
        assert f"--output_path {file} exists" in error_line(capsys, *arguments)
        assert file.read_text(encoding="utf-8") == content

    def test_a_folder_is_lm_evals_own_way(
        self, capsys: pytest.CaptureFixture[str], written: None, tmp_path: Path
    ) -> None:
        for _ in range(2):
            assert zaya(capsys, "lm-eval", "--model", "zaya", "--tasks", "x", "--output_path", tmp_path / "o")[0] == 0
        assert len(list((tmp_path / "o").rglob("results_*.json"))) == 2

    def test_what_cannot_be_written_is_an_error(
        self, capsys: pytest.CaptureFixture[str], written: None, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        line = error_line(
            capsys, "lm-eval", "--model", "zaya", "--tasks", "x", "--output_path", tmp_path / "file" / "out.json"
        )
        assert "could not be written" in line


def test_the_parser_gives_everything_behind_the_command() -> None:
    words = ["--model", "zaya", "-x", "--", "--version", "a=b"]
    args = zaya_cli.build_parser().parse_args(["lm-eval", *words])
    assert (args.command, args.arguments) == ("lm-eval", words)
