"""`zaya quickstart` and `zaya report` from end to end, with few steps, few items and two of the five models."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig

import zaya_cli
import zaya_hf
from zaya_hf.hub.card import check_card
from zaya_hf.quickstart import collect, corpus, items, jobs, pipeline, pool, progress, publish, search, summary
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.recipe import Recipe

STEPS = 6
SRC = Path(__file__).resolve().parent.parent / "src"


@pytest.fixture(scope="module")
def few_items() -> Iterator[None]:
    """Less text and fewer questions than the command has: what is tested does not depend on how many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_BUDGETS", {"train": 250_000, "validation": 30_000, "held_out": 60_000})
        # Every run would read it anew, for seconds; `test_corpus.py` shows that it stays the same.
        once = functools.cache(corpus.load_corpus)
        patch.setattr(corpus, "load_corpus", once)
        patch.setattr(pipeline, "load_corpus", once)
        patch.setattr(items, "_PAIRS", 8)
        patch.setattr(items, "_PIECES_PER_KIND", 3)
        patch.setattr(items, "_FEWEST", 1)
        # Registration is off: neither the command nor its processes may depend on it.
        patch.setenv("ZAYA_HF_NO_REGISTER", "1")
        yield


class Printed:
    """What commands of this module printed, in order."""

    def __init__(self) -> None:
        self.texts: list[str] = []


def quickstart(capfd: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    """Standard output of a run that must succeed and say nothing else."""
    capfd.readouterr()
    code = zaya_cli.main(["quickstart", "--steps", str(STEPS), "--out", str(out), *map(str, arguments)])
    captured = capfd.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def printed() -> Printed:
    return Printed()


@pytest.fixture
def out(runs: Path, printed: Printed, few_items: None, capfd: pytest.CaptureFixture[str]) -> Path:
    """The folder of a finished run of ZAYA and Llama with seed 5."""
    folder = runs / "quickstart"
    if not printed.texts:
        printed.texts.append(quickstart(capfd, folder, "--seed", 5, "--only", "zaya,llama"))
    return folder


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return found


class TestFolder:
    def test_it_is_complete_and_alone(self, out: Path) -> None:
        assert {path.name for path in out.iterdir()} == {
            *("report.html", "results.json", "hub", "runs", "evaluation", ".zaya-quickstart")
        }
        assert {path.name for path in (out / "hub").iterdir()} == {"zaya"}
        assert {path.name for path in (out / "hub" / "zaya").iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
            "README.md",
        }
        assert {path.name for path in (out / "runs").iterdir()} == {"zaya-seed5", "llama-seed5"}
        assert [path.name for path in out.parent.iterdir()] == [out.name]

    def test_the_losses_fall_and_there_is_one_for_every_step(self, out: Path) -> None:
        models = read(out)["models"]
        assert [model["name"] for model in models] == ["zaya", "llama"]
        for model in models:
            (run,) = model["runs"]
            assert len(run["losses"]) == STEPS
            assert run["losses"][-1] < run["losses"][0] - 0.2
            assert run["tokens"] == STEPS * 8 * 128
            assert run["seed"] == 5

    def test_every_task_is_scored_and_described(self, out: Path) -> None:
        found = read(out)
        assert [task["name"] for task in found["tasks"]] == list(jobs.TASKS)
        for model in found["models"]:
            scores = model["runs"][0]["evaluation"]["tasks"]
            assert list(scores) == list(jobs.TASKS)
            assert not any("outcomes" in score for score in scores.values())
        kept = json.loads((out / "runs" / "zaya-seed5" / "run.json").read_text(encoding="utf-8"))
        score = kept["evaluation"]["tasks"]["zaya_quickstart_prose"]
        assert sum(score["outcomes"]) == score["correct"]

    def test_settings_versions_and_text_are_recorded(self, out: Path) -> None:
        found = read(out)
        assert found["settings"]["seeds"] == [5]
        assert found["settings"]["threads"] == 1
        assert found["settings"]["newton_schulz_dtype"] in ("bfloat16", "float32")
        assert found["versions"]["torch"] == torch.__version__
        assert found["versions"]["zaya_hf"] == zaya_hf.__version__
        assert found["corpus"]["sha256"] == corpus.load_corpus().sha256
        assert found["command"] == f"zaya quickstart --steps {STEPS} --seed 5 --seeds 1 --only zaya,llama"
        assert found["search"]["chosen"].keys() == FAMILIES.keys()
        factor = found["search"]["chosen"]["llama"]
        assert found["models"][1]["learning_rate"] == pytest.approx(0.02 * factor)


class TestPublished:
    def test_both_classes_gave_the_logits_of_the_trained_model(self, out: Path) -> None:
        loaded = read(out)["published"]["loaded"]
        assert loaded["stock"]["class"] == "transformers.models.zaya.modeling_zaya.ZayaForCausalLM"
        assert loaded["zaya_hf"]["class"] == "zaya_hf.modeling_zaya.ZayaForCausalLM"
        assert all(0 <= report["max_logit_difference"] <= report["limit"] for report in loaded.values())

    def test_the_folder_holds_the_trained_weights_tokenizer_and_generation_config(self, out: Path) -> None:
        folder = out / "hub" / "zaya"
        model = zaya_hf.ZayaForCausalLM.from_pretrained(folder)
        trained = zaya_hf.ZayaForCausalLM.from_pretrained(out / "runs" / "zaya-seed5" / "model")
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained.parameters(), strict=True))
        assert not model.stock_differences()
        biases = torch.stack([layer.mlp.gate.balancing_biases for layer in model.model.layers])
        assert biases[:, :-1].any()  # balanced in training
        assert (biases[:, -1] == -1).all()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id

    def test_the_numbers_of_the_card_are_those_of_the_results(self, out: Path) -> None:
        card = (out / "hub" / "zaya" / "README.md").read_text(encoding="utf-8")
        assert check_card(card, read(out)) == []

    def test_the_cards_command_names_what_is_in_the_output_folder(self, out: Path) -> None:
        words = shlex.split(read(out)["evaluation_command"])
        model = dict(part.split("=") for part in words[words.index("--model_args") + 1].split(","))
        assert (out / model["pretrained"] / "model.safetensors").is_file()
        tasks = out / words[words.index("--include_path") + 1]
        group = words[words.index("--tasks") + 1]
        assert f"group: {group}" in (tasks / "group.yaml").read_text(encoding="utf-8")
        items = Path(json.loads(words[words.index("--metadata") + 1])["items"])
        assert not items.is_absolute()
        assert (out / items / "prose.jsonl").is_file()

    def test_logits_that_differ_are_an_error(self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def run_probe(arguments: list[str]) -> dict[str, Any]:
            save_file({"logits": torch.zeros(1)}, arguments[2])
            return {"class": "x"}

        monkeypatch.setattr(publish, "_run_probe", run_probe)
        run = out / "runs" / "zaya-seed5"
        with pytest.raises(
            RuntimeError, match="transformers without zaya_hf loads the saved model, but its logits are"
        ):
            publish.publish(run / "model", run / "logits.safetensors", tmp_path / "hub", threads=1, seed=0)
        assert not list((tmp_path / "hub").glob(".*"))

    def test_a_probe_that_fails_says_why(self) -> None:
        with pytest.raises(RuntimeError, match=r"fresh process failed \(stock\): .*No such file"):
            publish._run_probe(["/no/model", "/no/ids", "/no/out", "stock"])


class TestPrinted:
    def test_it_says_first_what_it_does_and_how_long_it_takes(self, out: Path, printed: Printed) -> None:
        lines = printed.texts[0].splitlines()
        assert lines[0].startswith("quickstart ZAYA1, Llama-3: 0.01 M tokens of training, evaluation, report")
        assert "training   2 runs of 6 steps, on two idle cores about 1 minute with evaluation" in lines

    def test_the_table_has_the_scores(self, out: Path, printed: Printed) -> None:
        table = summary.table(read(out))
        assert "\n".join(table) in printed.texts[0]
        (run,) = read(out)["models"][0]["runs"]
        row = next(line for line in table if line.startswith("ZAYA1"))
        for score in run["evaluation"]["tasks"].values():
            shown = f"{score['accuracy']:.3f}" if score["kind"] == "choice" else f"{score['bits_per_byte']:.2f}"
            assert shown in row

    def test_progress_is_lines_where_there_is_no_terminal(self, out: Path, printed: Printed) -> None:
        for model in ("zaya", "llama"):
            told = [line for line in printed.texts[0].splitlines() if line.startswith(f"{model}-seed5")]
            assert [re.search(r"(\d) of 6", line) is not None for line in told] == [True, True, True, False, False]
            assert told[-2].endswith("evaluating")
            assert "bits per byte held out" in told[-1]

    def test_samples_and_the_seed_caveat(self, out: Path, printed: Printed) -> None:
        samples = read(out)["published"]["samples"]
        assert [sample["prompt"] for sample in samples] == list(publish.PROMPTS)
        for sample in samples:
            assert sample["text"].startswith(sample["prompt"])
            assert sample["text"].strip() in printed.texts[0]
        assert "one seed: differences between models include seed noise, which --seeds 3 measures" in printed.texts[0]

    def test_the_next_command_works(self, out: Path, printed: Printed) -> None:
        (command,) = (line[11:] for line in printed.texts[0].splitlines() if line.startswith("next"))
        assert command.endswith(f'generate {out}/hub/zaya --prompt "def "')
        path = {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            f"{command} --max-new-tokens 3", shell=True, env=os.environ | path, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


class TestReport:
    def test_it_is_of_these_results_and_built_again_alike(
        self, out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        page = (out / "report.html").read_text(encoding="utf-8")
        assert "ZAYA1" in page
        assert f"{read(out)['models'][0]['active_parameters']:,}" in page.replace("\u202f", ",").replace("\u00a0", ",")
        copy = tmp_path / "elsewhere"
        copy.mkdir()
        shutil.copy(out / "results.json", copy)
        capfd.readouterr()
        assert zaya_cli.main(["report", str(copy)]) == 0
        assert capfd.readouterr().out == f"{copy / 'report.html'}\n"
        assert (copy / "report.html").read_text(encoding="utf-8") == page

    def test_what_is_no_result_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for content in (None, "{", "[]", '{"made_by": "zaya quickstart"}'):
            if content is not None:
                (tmp_path / "results.json").write_text(content)
            assert zaya_cli.main(["report", str(tmp_path)]) == 1
            error = capsys.readouterr().err
            assert error.startswith("zaya report: error: ")
            assert error.count("\n") == 1
            assert not (tmp_path / "report.html").exists()


class TestAgain:
    """In order: each run uses what the one before has left."""

    def test_what_is_done_is_not_repeated_and_seeds_are_added(
        self, out: Path, few_items: None, capfd: pytest.CaptureFixture[str]
    ) -> None:
        before = read(out)
        weights = (out / "hub" / "zaya" / "model.safetensors").read_bytes()
        text = quickstart(capfd, out, "--seed", 5, "--seeds", 2, "--only", "zaya")
        assert "zaya-seed5 done before" in text
        assert "zaya-seed6 3 of 6 steps" in text
        after = read(out)
        assert [model["name"] for model in after["models"]] == ["zaya"]
        first, second = after["models"][0]["runs"]
        assert first == before["models"][0]["runs"][0]
        assert second["losses"] != first["losses"]
        assert second["seed"] == 6
        assert after["published"]["seed"] == 5
        assert (out / "hub" / "zaya" / "model.safetensors").read_bytes() == weights
        assert "means over 2 seeds" in text

    def test_without_zaya_the_published_folder_stays_and_the_others_are_named(
        self, out: Path, few_items: None, capfd: pytest.CaptureFixture[str]
    ) -> None:
        text = quickstart(capfd, out, "--seed", 5, "--only", "llama")
        assert "llama-seed5 done before" in text
        assert "steps" not in text.split("tokenizer")[1]
        assert read(out)["published"] is None
        assert (out / "hub" / "zaya" / "model.safetensors").is_file()
        assert "results and report are now of llama alone; zaya stay in" in text
        assert "Llama-3" in (out / "report.html").read_text(encoding="utf-8")

    def test_same_seed_same_numbers_in_another_folder(
        self, out: Path, runs: Path, few_items: None, capfd: pytest.CaptureFixture[str]
    ) -> None:
        elsewhere = runs / "elsewhere"
        quickstart(capfd, elsewhere, "--seed", 5, "--only", "llama")
        first, second = read(out), read(elsewhere)
        shutil.rmtree(elsewhere)

        def numbers(found: dict[str, Any]) -> Any:
            (run,) = next(model["runs"] for model in found["models"] if model["name"] == "llama")
            return run["losses"], run["evaluation"]["tasks"], found["corpus"], found["evaluation_items"]

        assert numbers(first) == numbers(second)


class TestStopped:
    def test_ctrl_c_is_one_line_and_leaves_what_the_next_run_needs(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        process = subprocess.Popen(
            [sys.executable, "-m", "zaya_cli", "quickstart", "--steps", "80", "--only", "llama", "--out", str(out)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "20 of 80 steps" in line:
                break
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        rest, error = process.communicate(timeout=120)
        assert process.returncode == zaya_cli.INTERRUPTED
        assert error.strip() == "zaya quickstart: interrupted"
        assert "stopped    the same command goes on where it was" in rest
        assert {path.name for path in out.iterdir()} == {"runs", "evaluation", ".zaya-quickstart"}
        (state,) = (out / "runs" / "llama-seed0").glob("checkpoint/step-*/manifest.json")
        step = int(state.parent.name.removeprefix("step-"))
        assert 20 <= step < 50  # the checkpoint of the interruption: the first of the others is of 50
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert [other for other in alive if other.status() != psutil.STATUS_ZOMBIE] == []

    @pytest.mark.parametrize("missing", ["lm_eval", "accelerate", "matplotlib"])
    def test_a_missing_package_is_named_with_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
    ) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == missing else real(name))
        assert zaya_cli.main(["quickstart", "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert error.rstrip().endswith(f"pip install {missing.replace('_', '-')}")
        assert list(tmp_path.iterdir()) == []

    def test_a_foreign_folder_is_not_touched(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert zaya_cli.main(["quickstart", "--steps", "1", "--out", str(tmp_path)]) == 1
        assert "is not the output of an earlier quickstart" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize(
        ("only", "said"), [("zaya,qwen2", "'qwen2' is none of"), ("llama,llama", "names a model twice"), ("", "''")]
    )
    def test_unknown_models_are_refused(self, only: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            zaya_cli.main(["quickstart", "--only", only])
        assert said in capsys.readouterr().err


class TestTerminal:
    @pytest.mark.parametrize(("size", "bar"), [((24, 80), True), ((0, 0), False), ((24, 0), False), (None, False)])
    def test_bars_are_for_terminals_that_have_a_size(
        self, tmp_path: Path, size: tuple[int, int] | None, bar: bool
    ) -> None:
        if size is None:
            with (tmp_path / "log").open("w") as stream:
                assert progress.draws_bars(stream) is bar
            return
        master, terminal = os.openpty()
        with os.fdopen(master, "wb"), os.fdopen(terminal, "w") as stream:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            assert progress.draws_bars(stream) is bar

    def test_a_job_that_goes_on_says_where(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        job = jobs.Job("zaya", 0, 1.0, Recipe(steps=40), tmp_path, tmp_path, tmp_path, "fingerprint")
        for begun in (17, 1):
            lines = progress.Lines([job])
            for steps in range(begun, 20):
                lines.step(0, steps, 3.0)
        assert capsys.readouterr().out.splitlines() == [
            "zaya-seed0 goes on after step 16",
            "zaya-seed0 10 of 40 steps, loss 3.000",
        ]

    def test_a_terminal_sees_a_bar_for_each_model_and_a_spinner(self, tmp_path: Path) -> None:
        todo = [
            jobs.Job(name, 0, 1.0, Recipe(steps=40), tmp_path, tmp_path, tmp_path, "fingerprint")
            for name in ("zaya", "llama")
        ]
        result = {"losses": [2.0, 1.5], "tokens_per_second": 9876.5}
        master, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        with os.fdopen(master, "rb", buffering=0) as shown, os.fdopen(terminal, "w") as stream:
            with progress.waiting("reading text", stream):
                pass
            with progress.watching(todo, stream) as watcher:
                watcher.stage(0, "training")
                watcher.step(0, 20, 3.25)
                watcher.step(0, 21, 3.125)
                watcher.stage(1, "evaluating")
                watcher.done(1, result)
            stream.flush()
            os.set_blocking(shown.fileno(), False)
            text = b"".join(iter(lambda: shown.read(65536) or b"", b"")).decode()
        assert "reading text" in text
        assert "zaya-seed0" in text
        assert "21/40 loss 3.125, 0:0" in text
        assert "40/40 loss 1.750, 9,876 tokens/s" in text

    def test_the_command_is_the_one_beside_this_python(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        monkeypatch.setattr(sys, "executable", str(python))
        assert summary.zaya_command() == f"{python} -m zaya_hf"
        monkeypatch.chdir(tmp_path)
        assert summary.zaya_command() == ".venv/bin/python -m zaya_hf"
        python.with_name("zaya").touch()
        assert summary.zaya_command() == ".venv/bin/zaya"


class TestSearch:
    def test_the_committed_choice_follows_from_the_committed_figures(self) -> None:
        found = json.loads(collect.SEARCH.read_text(encoding="utf-8"))
        assert found["steps"] == Recipe().steps
        losses = {
            name: {float(f): loss for f, loss in tried.items()} for name, tried in found["validation_loss"].items()
        }
        assert losses.keys() == FAMILIES.keys()
        assert search.untried(losses) == []  # no best factor is at the end of those tried
        assert collect.learning_rate_factors() == {name: search.best(tried) for name, tried in losses.items()}

    def test_all_models_are_searched_alike_until_the_best_lies_inside(
        self, tmp_path: Path, few_items: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        best = {"zaya": 1.0, "qwen3": 4.0, "gemma3": 0.25, "llama": 2.0, "olmoe": 1.0}
        tried: list[tuple[str, float]] = []

        def run_jobs(todo: list[jobs.Job], processes: int, watcher: Any) -> list[dict[str, Any]]:
            assert not any(job.evaluate for job in todo)
            tried.extend((job.name, job.rate) for job in todo)
            return [{"validation_loss": abs(math.log2(job.rate / best[job.name]))} for job in todo]

        monkeypatch.setattr(pool, "run_jobs", run_jobs)
        found = search.search(tmp_path)
        assert found["chosen"] == best
        assert found["factors"] == [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
        assert list(found["validation_loss"]["qwen3"]) == ["0.5", "1.0", "2.0", "4.0", "8.0"]
        assert list(found["validation_loss"]["olmoe"]) == ["0.5", "1.0", "2.0"]
        assert len(set(tried)) == len(tried) == 15 + 2 + 2 + 1
