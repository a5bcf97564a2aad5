"""The quickstart: its text, tokenizer, schedule and measure by themselves, and the command with a few steps."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import zaya_cli
import zaya_hf
from zaya_hf.quickstart import bpe, corpus, run, train
from zaya_hf.testing import tiny_config

# One worker trains for all tests here.
pytestmark = pytest.mark.xdist_group("quickstart")
SRC = Path(__file__).resolve().parent.parent / "src"
STEPS = 12


def write_library(root: Path, files: int = 60, size: int = 6000) -> Path:
    """A made-up standard library: every file has prose and code of about `size` bytes each."""
    for index in range(files):
        path = root / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{f"Text of module {index}. " * (size // 20)}"""\nx = {index}\n', encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load_corpus()


class TestCorpus:
    def test_this_python_has_enough_text(self, text: corpus.Corpus) -> None:
        assert text.train_bytes > 1_000_000
        assert text.held_out_bytes > 50_000
        assert text == corpus.load_corpus()

    def test_no_file_is_on_both_sides(self, tmp_path: Path) -> None:
        text = corpus.load_corpus(write_library(tmp_path))
        modules = {
            side: {doc.split("module ")[1].split(".")[0] for doc in documents}
            for side, documents in (("train", text.train), ("held_out", text.held_out))
        }
        assert modules["train"] | modules["held_out"] == {str(i) for i in range(60)}
        assert modules["held_out"]
        assert not modules["train"] & modules["held_out"]

    def test_the_hash_is_of_every_name_and_text(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root).sha256
        file = root / "package3" / "module3.py"
        source = file.read_text()
        file.write_text(source + "y = 1\n")
        changed = corpus.load_corpus(root).sha256
        file.rename(file.with_name("renamed.py"))
        (root / "package3" / "renamed.py").write_text(source)
        renamed = corpus.load_corpus(root).sha256
        assert len({before, changed, renamed}) == 3

    def test_tests_and_installed_packages_are_left_out(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root)
        for part in ("test", "site-packages/numpy", "json/tests", "__pycache__"):
            write_library(root / part, files=3)
        assert corpus.load_corpus(root) == before

    def test_unreadable_files_are_passed_over(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root)
        (root / "template.py").write_text("def {{ name }}(: pass")
        (root / "latin.py").write_bytes(b"x = '\xe9'\n")
        (root / "null.py").write_bytes(b"x = 1\0\n")
        assert corpus.load_corpus(root) == before

    def test_language_reference_topics_are_prose(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        (root / "pydoc_data").mkdir()
        topics = "topics = {'if': 'The if statement', 'del': 'The del statement'}"
        (root / "pydoc_data" / "topics.py").write_text(topics)
        text = corpus.load_corpus(root)
        found = [doc for doc in text.train + text.held_out if "statement" in doc]
        assert found == ["The if statement\n\nThe del statement"]

    def test_dependencies_serve_where_the_library_has_no_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = write_library(tmp_path / "installed")
        (package / "__init__.py").write_text("")

        def find_spec(name: str) -> ModuleSpec | None:
            return ModuleSpec(name, None, origin=str(package / "__init__.py")) if name == "torch" else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        text = corpus.load_corpus(tmp_path / "empty")
        assert text.origin == "torch"
        assert text.train

    def test_no_text_at_all_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match="no text to train on"):
            corpus.load_corpus(tmp_path / "empty")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=400)


class TestTokenizer:
    def test_size_and_special_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert len(tokenizer) == 400
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 1)

    def test_every_digit_is_a_token(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert [token for token in tokenizer.tokenize("x=2024 + 10") if token.isdigit()] == list("202410")
        entries = tokenizer.get_vocab()
        assert [entry for entry in entries if len(entry) > 1 and any(c.isdigit() for c in entry)] == []

    @given(text=st.text())
    def test_any_text_comes_back_and_its_bytes_are_counted(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        text = text.replace("<pad>", "").replace("<eos>", "")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert int(bpe.bytes_per_entry(tokenizer)[torch.tensor(ids, dtype=torch.int64)].sum()) == len(text.encode())

    def test_documents_end_with_eos(self, tokenizer: PreTrainedTokenizerFast) -> None:
        stream = bpe.encode_documents(tokenizer, ["ab", "", "c"])
        expected = [*tokenizer("ab")["input_ids"], 1, 1, *tokenizer("c")["input_ids"], 1]
        assert stream.tolist() == expected

    def test_training_it_again_gives_the_same(self, tokenizer: PreTrainedTokenizerFast) -> None:
        again = bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=400)
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


class FixedModel(torch.nn.Module):
    """Gives every token the same logits, whatever it is asked."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


class TestMeasure:
    def test_bits_per_byte_by_hand(self) -> None:
        # Probabilities 1/2, 1/4, 1/8, 1/8; the entries stand for 0, 1, 2 and 5 bytes. The first of a window is given.
        model = FixedModel(torch.tensor([0.5, 0.25, 0.125, 0.125]).log())
        windows = torch.tensor([[3, 0, 1, 2], [0, 1, 1, 3]])
        bits = (1 + 2 + 3) + (2 + 2 + 3)
        size = (0 + 1 + 2) + (1 + 1 + 5)
        measured = train.bits_per_byte(model, windows, torch.tensor([0, 1, 2, 5]))  # type: ignore[arg-type]
        assert measured == pytest.approx(bits / size, rel=1e-6)

    def test_batches_do_not_change_it(self) -> None:
        model = zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=1)).eval()
        windows = torch.randint(3, 128, (70, 9))
        sizes = torch.randint(1, 5, (128,))
        with torch.no_grad():
            log_probs = model(windows).logits.log_softmax(-1)[:, :-1].gather(2, windows[:, 1:, None])
        expected = -log_probs.sum().item() / math.log(2) / sizes[windows[:, 1:]].sum().item()
        assert train.bits_per_byte(model, windows, sizes) == pytest.approx(expected, rel=1e-5)

    def test_unigram_by_hand(self) -> None:
        stream = torch.tensor([0, 0, 0, 1, 2, 2])  # with one more each: 4, 2, 3, 1 of 10
        windows = torch.tensor([[1, 0, 3, 2]])
        bits = -math.log2(0.4) - math.log2(0.1) - math.log2(0.3)
        measured = train.unigram_bits_per_byte(stream, windows, torch.tensor([1, 1, 2, 3]))
        assert measured == pytest.approx(bits / (1 + 3 + 2), rel=1e-6)

    def test_windows_are_whole_apart_and_spread(self) -> None:
        stream = torch.arange(105)
        assert train.held_out_windows(stream, 10, 99).tolist() == stream[:100].view(10, 10).tolist()
        assert train.held_out_windows(stream, 10, 3)[:, 0].tolist() == [0, 30, 60]


class TestTraining:
    @pytest.mark.parametrize("steps", [1, 2, 9, 40, 600])
    def test_the_schedule_rises_holds_and_falls(self, steps: int) -> None:
        factors = [train.learning_rate_factor(step, steps, 40) for step in range(steps)]
        assert all(0 < factor <= 1 for factor in factors)
        assert max(factors) == 1
        peak = factors.index(1)
        assert factors[: peak + 1] == sorted(factors[: peak + 1])
        assert factors[peak:] == sorted(factors[peak:], reverse=True)
        assert factors[-1] <= 2 / steps or steps == 1

    def test_same_seed_same_numbers_other_seed_other_numbers(self) -> None:
        stream = torch.randint(3, 128, (2000,))

        def losses(seed: int) -> list[float]:
            torch.manual_seed(0)
            model = zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=2))
            settings = train.Settings(steps=4, seed=seed, sequence_length=16, batch_size=2)
            return train.train(model, stream, settings, show_progress=False).losses

        assert losses(0) == losses(0)
        assert losses(0) != losses(1)

    def test_steps_and_mean_loss_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train, "REPORT_EVERY", 2)
        model = zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=1))
        settings = train.Settings(steps=5, sequence_length=16, batch_size=2)
        reported: list[tuple[int, float]] = []
        losses = train.train(
            model, torch.randint(3, 128, (500,)), settings, False, lambda *report: reported.append(report)
        ).losses
        assert reported == [(2, sum(losses[:2]) / 2), (4, sum(losses[2:4]) / 2)]

    def test_a_loss_that_is_not_finite_stops_the_run(self) -> None:
        model = zaya_hf.ZayaForCausalLM(tiny_config(num_hidden_layers=1))
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        settings = train.Settings(steps=4, sequence_length=16, batch_size=2)
        with pytest.raises(RuntimeError, match="the loss is nan at step 1"):
            train.train(model, torch.randint(3, 128, (500,)), settings, show_progress=False)


@dataclass(frozen=True)
class FewWindows(train.Settings):
    held_out_windows: int = 8


def quickstart(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zaya_cli", "quickstart", *(str(argument) for argument in arguments)]
    return subprocess.run(command, env=environment() | variables, capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(output folder, standard output) of a run of a few steps, which replaced an earlier output."""
    out = tmp_path_factory.mktemp("runs") / "quickstart"
    out.mkdir()
    (out / "results.json").write_text(json.dumps({"made_by": "zaya quickstart"}))
    (out / "old").write_text("from the run before")
    # Registration is off: neither the command nor its fresh process with zaya_hf may depend on it.
    done = quickstart("--steps", STEPS, "--seed", 5, "--out", out, ZAYA_HF_NO_REGISTER="1")
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def leave_behind(parent: Path, name: str, files: tuple[str, ...] = ("results.json",)) -> Path:
    """A folder of that name with the files of an earlier run."""
    folder = parent / name
    folder.mkdir()
    for file in files:
        (folder / file).write_text(json.dumps({"made_by": "zaya quickstart"}))
    return folder


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class TestCommand:
    def results(self, out: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
        return found

    def test_the_folder_is_complete_and_alone(self, finished: tuple[Path, str]) -> None:
        out, _ = finished
        assert {path.name for path in out.iterdir()} == {"model", "results.json"}
        assert {path.name for path in (out / "model").iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        }
        assert [path.name for path in out.parent.iterdir()] == ["quickstart"]

    def test_the_loss_falls_and_the_figures_are_of_this_run(self, finished: tuple[Path, str]) -> None:
        results = self.results(finished[0])
        losses, bits = results["training"]["losses"], results["bits_per_byte"]
        assert len(losses) == STEPS
        assert losses[0] == pytest.approx(math.log(1024), abs=0.1)
        assert losses[-1] < losses[0] - 0.2
        assert bits["after"] < bits["before"]
        ten_bits_a_token = 10 * 127 * 320 / bits["bytes"]  # an untrained model takes 1,024 entries for equally likely
        assert bits["before"] == pytest.approx(ten_bits_a_token, rel=0.02)
        assert results["settings"]["seed"] == 5
        assert results["training"]["tokens"] == STEPS * 8 * 128

    def test_settings_versions_and_text_are_recorded(self, finished: tuple[Path, str], text: corpus.Corpus) -> None:
        results = self.results(finished[0])
        assert results["corpus"]["sha256"] == text.sha256
        assert len(text.sha256) == len(hashlib.sha256().hexdigest())
        assert results["versions"]["zaya_hf"] == zaya_hf.__version__
        assert results["versions"]["torch"] == torch.__version__
        assert results["settings"]["threads"] == 1

    def test_both_classes_gave_the_logits_of_the_trained_model(self, finished: tuple[Path, str]) -> None:
        loaded = self.results(finished[0])["loaded"]
        assert loaded["stock"]["class"] == "transformers.models.zaya.modeling_zaya.ZayaForCausalLM"
        assert loaded["zaya_hf"]["class"] == "zaya_hf.modeling_zaya.ZayaForCausalLM"
        assert all(0 <= report["max_logit_difference"] <= report["limit"] for report in loaded.values())

    def test_the_saved_model_has_the_measured_loss(self, finished: tuple[Path, str], text: corpus.Corpus) -> None:
        out, _ = finished
        model = zaya_hf.ZayaForCausalLM.from_pretrained(out / "model").eval()
        tokenizer = AutoTokenizer.from_pretrained(out / "model")
        stream = bpe.encode_documents(tokenizer, text.held_out)
        measured = train.bits_per_byte(
            model, train.held_out_windows(stream, 128, train.Settings.held_out_windows), bpe.bytes_per_entry(tokenizer)
        )
        assert measured == pytest.approx(self.results(out)["bits_per_byte"]["after"], rel=1e-5)
        assert not model.stock_differences()
        assert GenerationConfig.from_pretrained(out / "model").eos_token_id == tokenizer.eos_token_id

    def test_the_summary_shows_the_figures_and_the_sample(self, finished: tuple[Path, str]) -> None:
        out, printed = finished
        results = self.results(out)
        assert f"{results['bits_per_byte']['after']:.3f} after" in printed
        assert results["sample"].startswith("def ")
        assert 'sample     continues the prompt "def "; nonsense is expected' in printed
        assert f"\n\n{results['sample']}\n\nnext  " in printed

    def test_it_says_first_what_it_does_and_before_training_how_much(self, finished: tuple[Path, str]) -> None:
        lines = finished[1].splitlines()
        assert lines[0].startswith(f"quickstart trains a tiny ZAYA model for {STEPS} steps")
        assert "one to two minutes on one CPU core" in lines[1]
        assert f"training   {STEPS} steps of 1,024 tokens" in lines

    def test_the_next_commands_work(self, finished: tuple[Path, str]) -> None:
        out, printed = finished
        generate, doctor = (line[11:] for line in printed.splitlines()[-2:])
        assert generate.endswith(f'generate {out}/model --prompt "def "')
        assert doctor.endswith("doctor")
        done = subprocess.run(f"{generate} --max-new-tokens 3", shell=True, env=environment(), capture_output=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout

    def test_the_command_is_the_one_beside_this_python(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        monkeypatch.setattr(sys, "executable", str(python))
        assert run._zaya_command() == f"{python} -m zaya_hf"
        monkeypatch.chdir(tmp_path)
        assert run._zaya_command() == ".venv/bin/python -m zaya_hf"
        python.with_name("zaya").touch()
        assert run._zaya_command() == ".venv/bin/zaya"

    @pytest.mark.parametrize(("size", "bar"), [((24, 80), True), ((0, 0), False), ((24, 0), False), (None, False)])
    def test_bars_are_for_terminals_that_have_a_size(
        self, tmp_path: Path, size: tuple[int, int] | None, bar: bool
    ) -> None:
        if size is None:
            with (tmp_path / "log").open("w") as stream:
                assert run._draws_bars(stream) is bar
            return
        master, terminal = os.openpty()
        with os.fdopen(master, "wb"), os.fdopen(terminal, "w") as stream:
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
            assert run._draws_bars(stream) is bar

    def test_what_killed_runs_left_is_removed(self, tmp_path: Path, gone: int) -> None:
        removed = [
            leave_behind(tmp_path, f".out.{gone}", ("model", "ids.safetensors")),
            leave_behind(tmp_path, f".out.{os.getpid()}", ()),
            leave_behind(tmp_path, f".out.{gone}.old", ("results.json", "of the user")),
        ]
        kept = [
            leave_behind(tmp_path, "out"),
            leave_behind(tmp_path, f".out.{os.getppid()}"),  # a run that goes on
            leave_behind(tmp_path, f".other.{gone}"),
            leave_behind(tmp_path, f".out.{gone}.backup"),
            leave_behind(tmp_path, f".out.0{gone}", ("thesis.tex",)),
        ]
        (tmp_path / f".out.00{gone}").write_text("a file")
        run._sweep(tmp_path / "out")
        assert not any(path.exists() for path in removed)
        assert all(path.exists() for path in kept)
        assert (tmp_path / f".out.00{gone}").exists()

    def test_an_output_that_a_killed_run_had_moved_aside_comes_back(self, tmp_path: Path, gone: int) -> None:
        leave_behind(tmp_path, f".out.{gone}.old")
        run._sweep(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert run._is_our_output(tmp_path / "out")

    def test_an_interrupted_replacement_leaves_the_old_output(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rename(self: Path, target: Path) -> Path:
            if self == new:
                raise KeyboardInterrupt
            return real(self, target)

        out, new, real = leave_behind(tmp_path, "out"), leave_behind(tmp_path, ".out.1", ()), Path.rename
        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            run._replace(out, new)
        assert run._is_our_output(out)
        assert not (tmp_path / ".out.1.old").exists()

    def test_sigterm_leaves_nothing(
        self, tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def make(folder: Path, *_: object, **__: object) -> None:
            (folder / "model").mkdir()
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # the start has swept
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

        leave_behind(tmp_path, f".out.{gone}", ("model",))
        monkeypatch.setattr(run, "_make", make)
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            assert zaya_cli.main(["quickstart", "--out", str(tmp_path / "out")]) == zaya_cli.TERMINATED == 143
        finally:
            signal.signal(signal.SIGTERM, before)
        assert capsys.readouterr().err == "zaya quickstart: terminated\n"
        assert list(tmp_path.iterdir()) == []

    def test_a_foreign_folder_is_not_touched(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert zaya_cli.main(["quickstart", "--steps", "1", "--out", str(tmp_path)]) == 1
        assert "is not the output of an earlier quickstart" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_logits_that_differ_fail_the_run_and_leave_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def save_another(model: Any, tokenizer: Any, folder: Path) -> None:
            with torch.no_grad():
                model.model.norm.weight.mul_(1.001)
            save(model, tokenizer, folder)
            with torch.no_grad():
                model.model.norm.weight.div_(1.001)

        save = run._save
        monkeypatch.setattr(run, "_save", save_another)
        monkeypatch.setattr(run, "Settings", FewWindows)
        out = tmp_path / "out"
        assert zaya_cli.main(["quickstart", "--steps", "1", "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert "transformers without zaya_hf loads the saved model, but its logits are up to" in error
        assert list(tmp_path.iterdir()) == []

    def test_a_probe_that_fails_says_why(self) -> None:
        with pytest.raises(RuntimeError, match=r"fresh process failed \(stock\): .*No such file"):
            run._run_probe(["/no/model", "/no/ids", "/no/out", "stock"])

    def test_ctrl_c_is_one_line_and_leaves_nothing(self, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "zaya_cli", "quickstart", "--steps", "100000", "--out", str(tmp_path / "out")],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("model"):
                break
        time.sleep(0.5)
        assert any(tmp_path.iterdir())  # work in progress
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == zaya_cli.INTERRUPTED
        assert error.strip() == "zaya quickstart: interrupted"
        assert list(tmp_path.iterdir()) == []
