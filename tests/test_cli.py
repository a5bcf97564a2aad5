"""The `zaya` command: doctor and generate on a tiny model, and what a user's mistakes lead to."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import zaya_cli
import zaya_hf
from commands import error_line, generated, zaya
from original_checkpoints import original_config, original_tensors, write_checkpoint
from zaya_hf import doctor, generation_cli, ops
from zaya_hf.inference import prompts
from zaya_hf.quickstart import bpe
from zaya_hf.testing import redraw, tiny_config

SRC = Path(__file__).resolve().parent.parent / "src"
PROMPT = "def add(a, b):"
POSITIONS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with a tokenizer that was trained on this file."""
    where = tmp_path_factory.mktemp("model")
    tokenizer = bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=320)
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, num_hidden_layers=2)
    model = zaya_hf.ZayaForCausalLM(config)
    redraw(model, seed=3)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1  # as published: a folder that stock transformers reads alike
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


class TestUsage:
    def test_help_and_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = zaya(capsys, "--help")
        assert code == 0
        assert all(command in out for command in zaya_cli.COMMANDS)
        code, out, _ = zaya(capsys, "--version")
        assert (code, out) == (0, f"zaya_hf {zaya_cli.version()}\n")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "COMMAND"),
            (["dcotor"], "dcotor"),
            (["generate"], "PATH"),
            (["generate", "x", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
            (["generate", "x", "--prompt", "a", "--max-new-tokens", "0"], "'0' is not a whole number from 1 up"),
            (["generate", "x", "--prompt", "a", "--max-new-tokens", "1.5"], "'1.5' is not a whole number"),
            (["generate", "x", "--prompt", "a", "--temperature", "-1"], "'-1' is not a number from 0 up"),
            (["generate", "x", "--prompt", "a", "--temperature=nan"], "'nan' is not a number"),
            (["generate", "x", "--prompt", "a", "--top-p", "0"], "'0' is not a number above 0"),
            (["generate", "x", "--prompt", "a", "--top-k", "zero"], "'zero' is not a whole number"),
            (["generate", "x", "--prompt", "a", "--dtype", "int8"], "int8"),
            (["quickstart", "--seed", "-1"], "'-1' is not a whole number from 0 up"),
        ],
    )
    def test_wrong_usage_is_exit_code_2(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        code, out, err = zaya(capsys, *arguments)
        assert (code, out) == (2, "")
        assert said in err

    def test_a_prompt_is_asked_for_when_standard_input_is_a_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        code, _, err = zaya(capsys, "generate", "x")
        assert code == 2
        assert "no prompt" in err

    def test_the_package_can_be_run(self, tmp_path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(SRC)}
        command = [sys.executable, "-m", "zaya_hf", "generate", "/no/such", "--prompt", "x"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("zaya generate: error: no such folder: /no/such")

    def test_commands_stay_offline_where_the_hub_is_imported_already(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(doctor, "run", lambda args: int(not huggingface_hub.is_offline_mode()))
        assert zaya_cli.main(["doctor"]) == 0

    def test_every_command_can_be_imported(self) -> None:
        for module in zaya_cli.COMMANDS.values():
            assert callable(zaya_cli.importlib.import_module(module).run)


class TestErrors:
    def test_a_traceback_is_shown_only_on_request(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "Traceback" not in error_line(capsys, "generate", "/no/such", "--prompt", "x")
        with pytest.raises(ValueError, match="no such folder"):
            zaya_cli.main(["generate", "/no/such", "--prompt", "x", "--debug"])
        monkeypatch.setenv("ZAYA_DEBUG", "1")
        with pytest.raises(ValueError, match="no such folder"):
            zaya_cli.main(["generate", "/no/such", "--prompt", "x"])

    def test_an_unexpected_error_names_its_type_on_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(args: object) -> int:
            raise KeyError("first\nsecond")

        monkeypatch.setattr(doctor, "run", broken)
        assert "KeyError: 'first\\nsecond'" in error_line(capsys, "doctor")

    def test_ctrl_c_is_130_and_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(args: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(generation_cli, "run", interrupted)
        assert zaya(capsys, "generate", "x", "--prompt", "y") == (130, "", "\nzaya generate: interrupted\n")

    def test_sigterm_is_143_and_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cleaned = []

        def terminated(args: object) -> int:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # a second one does not cut this short
                cleaned.append(True)
            return 0

        monkeypatch.setattr(generation_cli, "run", terminated)
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            assert zaya(capsys, "generate", "x", "--prompt", "y") == (143, "", "zaya generate: terminated\n")
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        finally:
            signal.signal(signal.SIGTERM, before)
        assert cleaned

    def test_another_handler_of_sigterm_stays(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        received: list[int] = []

        def run(args: object) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

        monkeypatch.setattr(generation_cli, "run", run)
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        try:
            assert zaya(capsys, "generate", "x", "--prompt", "y") == (0, "", "")
        finally:
            signal.signal(signal.SIGTERM, before)
        assert received == [signal.SIGTERM]

    def test_a_warning_is_one_line(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def run(args: object) -> int:
            warnings.warn("look\nout", stacklevel=1)
            return 0

        monkeypatch.setattr(doctor, "run", run)
        with warnings.catch_warnings():
            # As Python shows it where nothing collects warnings, as pytest does.
            monkeypatch.setattr(
                warnings, "showwarning", lambda *w, **_: sys.stderr.write(warnings.formatwarning(*w[:4]))
            )
            warnings.simplefilter("always")
            assert zaya(capsys, "doctor") == (0, "", "zaya doctor: warning: look out\n")

    def test_what_standard_output_cannot_encode_is_shown_as_an_escape(self) -> None:
        code = (
            "import sys, types, zaya_cli\n"
            "sys.modules['zaya_hf.doctor'] = types.SimpleNamespace(run=lambda args: print('\u00e9\ufffd') or 0)\n"
            "sys.exit(zaya_cli.main(['doctor']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(SRC), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "\\xe9\\ufffd\n"

    def test_a_closed_standard_output_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "run", lambda args: 0)
        monkeypatch.setattr(sys, "stdout", None)
        assert zaya_cli.main(["doctor"]) == 0

    def test_a_reader_that_goes_away_is_no_error(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(SRC)}
        read_end, write_end = os.pipe()
        os.close(read_end)
        with os.fdopen(write_end, "w") as output:
            done = subprocess.run(
                [sys.executable, "-m", "zaya_cli", "doctor"], env=environment, stdout=output, stderr=subprocess.PIPE
            )
        assert done.returncode == 141
        assert done.stderr == b""


class TestDoctor:
    def test_json_says_what_is_here(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = zaya(capsys, "doctor", "--json")
        report = json.loads(out)
        assert (code, err, report["ok"]) == (0, "", True)
        assert report["zaya_hf"] == zaya_hf.__version__
        assert report["packages"]["torch"] == metadata.version("torch")
        assert set(report["packages"]) >= {"transformers", "triton", "accelerate", "lm_eval", "datasets"}
        assert bool(report["devices"]) == torch.cuda.is_available()
        assert {name: (o["backend"], o["why"]) for name, o in report["operators"].items()} == ops.backends()
        cpu = report["core"]["checks"]["cpu"]
        assert cpu["error"] is None
        assert cpu["attention"] in report["attention_available"]
        assert report["auto_classes"]["model"] == "zaya_hf.modeling_zaya.ZayaForCausalLM"

    def test_text_says_the_same(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = zaya(capsys, "doctor")
        assert (code, err) == (0, "")
        assert f"torch {metadata.version('torch')}" in out
        assert all(name in out for name in ops.OPERATORS)
        assert "zaya_hf's class" in out
        assert out.rstrip().endswith("the core works")

    def test_the_owner_of_model_type_zaya_is_looked_up(self) -> None:
        zaya_hf.unregister()
        try:
            report = doctor.collect()
        finally:
            zaya_hf.register()
        assert report["auto_classes"]["model"] == "transformers.models.zaya.modeling_zaya.ZayaForCausalLM"
        assert "transformers' own class" in doctor.describe(report)

    def test_a_core_that_fails_is_exit_code_1(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: object, *args: object, **kwargs: object) -> None:
            raise RuntimeError("no kernel\nfor this device")

        monkeypatch.setattr(zaya_hf.ZayaForCausalLM, "forward", broken)
        code, out, _ = zaya(capsys, "doctor")
        assert code == 1
        assert "on cpu       FAILS: RuntimeError: no kernel for this device" in out
        assert "does NOT work" in out

    def test_missing_packages_are_named_with_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requirements = ["torch>=99", "numpy", 'datasets>=5.2; extra == "train"', 'numpy; extra == "eval"']
        monkeypatch.setattr(metadata, "requires", lambda name: requirements)
        versions = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}

        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(doctor, "_checkout", lambda: None)  # where these tests run may have been made by make
        report = doctor.collect()
        assert report["ok"] is False
        assert report["core"]["missing"] == ["torch>=99 (2.13.0+cpu is installed)"]
        assert report["extras"]["train"]["missing"] == ["datasets>=5.2 (not installed)"]
        assert report["extras"]["eval"]["missing"] == []
        text = doctor.describe(report)
        assert "optional extra train" in text
        assert 'lacks datasets>=5.2 (not installed): pip install "datasets>=5.2"' in text
        assert report["extras"]["eval"]["install"] is None
        assert "generate: lacks torch>=99 (2.13.0+cpu is installed)" in text

    @pytest.mark.parametrize("kind", ["made by make", "made by make elsewhere", "other environment", "from an index"])
    def test_an_extra_is_installed_the_way_zaya_hf_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        checkout = tmp_path / "check out"
        venv = tmp_path / "venv" if kind == "made by make elsewhere" else checkout / ".venv"
        venv.mkdir(parents=True)
        checkout.mkdir(exist_ok=True)
        (checkout / "Makefile").touch()
        if kind != "other environment":
            (venv / ".installed-dev").touch()
        origin = json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})
        about = SimpleNamespace(version="0", read_text=lambda name: None if kind == "from an index" else origin)
        monkeypatch.setattr(metadata, "distribution", lambda name: about)
        monkeypatch.setattr(metadata, "requires", lambda name: ['no_such_package>=5.2; extra == "train"'])
        monkeypatch.setattr(sys, "prefix", str(venv))
        _, extras = doctor._requirements()
        assert (
            extras["train"]["install"]
            == {
                "made by make": "make install EXTRAS=dev,train",
                "made by make elsewhere": f"make install EXTRAS=dev,train VENV={venv}",
                "other environment": 'pip install "no-such-package>=5.2"',
                "from an index": 'pip install "no-such-package>=5.2"',
            }[kind]
        )

    def test_the_makefile_takes_several_extras(self) -> None:
        for extras in ("dev,train", "dev, train", "dev train"):
            command = ["make", "-n", "install", f"EXTRAS={extras}", "VENV=/no/such", "PYTHON=python3"]
            plan = subprocess.run(command, cwd=SRC.parent, capture_output=True, text=True, check=True).stdout
            assert '--editable ".[dev,train]"' in plan
            assert "touch /no/such/.installed-dev,train\n" in plan

    @pytest.mark.parametrize("version", ["2.13.0+rocm7.0", "2.14.0.dev20260101+cpu"])
    def test_local_and_nightly_builds_meet_the_bound(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.11,<3"])
        monkeypatch.setattr(metadata, "version", lambda name: version)
        assert doctor.collect()["core"]["missing"] == []


class TestGenerate:
    def test_greedy_text_is_what_the_model_generates(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        report = generated(capsys, folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        expected = zaya_hf.ZayaForCausalLM.from_pretrained(folder).generate(
            **inputs, max_new_tokens=12, do_sample=False
        )[0, inputs["input_ids"].shape[1] :]
        assert report["new_tokens"] == expected.tolist()
        assert report["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert report["prompt_tokens"] == inputs["input_ids"].shape[1]
        assert (report["device"], report["dtype"]) == ("cpu", "float32")

    def test_streamed_text_is_the_same_text(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 0)
        report = generated(capsys, *arguments)
        assert zaya(capsys, "generate", *arguments) == (0, report["text"] + "\n", "")

    def test_text_is_streamed_before_the_end(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        chunks: list[str] = []
        monkeypatch.setattr(generation_cli, "write", chunks.append)
        code, out, _ = zaya(capsys, "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 0)
        assert (code, out) == (0, "")
        assert sum(bool(chunk) for chunk in chunks) > 2  # one of them ends the line

    def test_the_seed_decides_what_is_sampled(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 16, "--temperature", 1.0, "--top-k", 50, "--seed")
        first, again, other = (generated(capsys, *arguments, seed)["new_tokens"] for seed in (1, 1, 2))
        assert first == again
        assert first != other

    def test_top_k_of_one_is_greedy(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 8)
        greedy = generated(capsys, *arguments, "--temperature", 0)
        assert generated(capsys, *arguments, "--top-k", 1)["new_tokens"] == greedy["new_tokens"]
        assert generated(capsys, *arguments, "--top-p", 1e-6)["new_tokens"] == greedy["new_tokens"]

    def test_beams_find_a_likelier_text_and_print_it_at_the_end(
        self, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--temperature", 0)
        beam = generated(capsys, *arguments, "--num-beams", 4)
        model = zaya_hf.ZayaForCausalLM.from_pretrained(folder)
        inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
        expected = model.generate(**inputs, max_new_tokens=8, num_beams=4, do_sample=False)
        assert beam["new_tokens"] == expected[0, inputs["input_ids"].shape[1] :].tolist()
        assert zaya(capsys, "generate", *arguments, "--num-beams", 4) == (0, beam["text"] + "\n", "")

    def test_the_prompt_comes_from_a_file_or_standard_input(
        self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ("--max-new-tokens", 6, "--temperature", 0)
        prompt = "naïve\n  x = 1\n"
        expected = generated(capsys, folder, "--prompt", prompt, *options)
        assert expected["rendered_prompt"] is None
        file = tmp_path / "prompt.txt"
        for end in ("\n", "\r\n"):  # the last line's end, which is not the prompt's
            data = (prompt + end).encode()
            file.write_bytes(data)
            from_file = generated(capsys, folder, "--prompt-file", file, *options)
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            from_stdin = generated(capsys, folder, *options)
            for report in (from_file, from_stdin):
                assert (report["prompt"], report["new_tokens"]) == (prompt, expected["new_tokens"])
        file.write_bytes(b"x = 1\r")
        assert prompts.whole_file(file).text == "x = 1\r"

    def test_registration_does_not_matter(
        self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
    ) -> None:
        arguments = (folder, "--prompt", PROMPT, "--max-new-tokens", 6, "--temperature", 0)
        expected = generated(capsys, *arguments)
        # In the original layout, which transformers' own class cannot read at all.
        model = zaya_hf.ZayaForCausalLM.from_pretrained(folder)
        original = write_checkpoint(tmp_path / "original", original_tensors(model), original_config(model.config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, original)
        zaya_hf.unregister()
        try:
            report = generated(capsys, *arguments)
            on_original = generated(capsys, original, *arguments[1:])
        finally:
            zaya_hf.register()
        assert report["new_tokens"] == expected["new_tokens"]
        assert len(on_original["new_tokens"]) == 6

    def test_chat_puts_the_prompt_into_the_template(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(copied)
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        tokenizer.save_pretrained(copied)
        options = ("--max-new-tokens", 6, "--temperature", 0)
        chat = generated(capsys, copied, "--prompt", "hi", "--chat", *options)
        written_out = generated(capsys, copied, "--prompt", "<user>hi<assistant>", *options)
        assert chat["new_tokens"] == written_out["new_tokens"]
        assert chat["prompt_tokens"] == written_out["prompt_tokens"]
        assert (chat["prompt"], chat["rendered_prompt"]) == ("hi", "<user>hi<assistant>")

    def test_the_end_token_ends_the_text(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        options = ("--prompt", PROMPT, "--max-new-tokens", 10, "--temperature", 0)
        report = generated(capsys, copied, *options)
        assert report["finish_reason"] == "length"
        config = json.loads((copied / "generation_config.json").read_text())
        config["eos_token_id"] = [1, report["new_tokens"][3]]
        (copied / "generation_config.json").write_text(json.dumps(config))
        stopped = generated(capsys, copied, *options)
        assert stopped["finish_reason"] == "eos"
        first = report["new_tokens"].index(report["new_tokens"][3])
        assert stopped["new_tokens"] == report["new_tokens"][: first + 1]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_dtype(self, capsys: pytest.CaptureFixture[str], folder: Path, dtype: str) -> None:
        report = generated(capsys, folder, "--prompt", PROMPT, "--max-new-tokens", 2, "--dtype", dtype)
        assert report["dtype"] == dtype

    def test_the_default_length_is_what_fits(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        report = generated(capsys, folder, "--prompt", "1" * 60, "--top-k", 1)
        assert len(report["new_tokens"]) == POSITIONS - 60 or report["finish_reason"] == "eos"

    def test_a_prompt_may_fill_all_positions_but_one(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        prompt = "1" * (POSITIONS - 1)  # a token each
        report = generated(capsys, folder, "--prompt", prompt, "--max-new-tokens", 1, "--temperature", 0)
        assert (report["prompt_tokens"], len(report["new_tokens"])) == (POSITIONS - 1, 1)


class TestGenerateErrors:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--prompt", ""], "the prompt from --prompt is empty"),
            (["--prompt", " \n"], "the prompt from --prompt is empty"),
            (["--prompt-file", "/no/such/file"], "no such file: /no/such/file"),
            (["--prompt", "x", "--chat"], "has no chat template"),
            (["--prompt", "x", "--device", "tpu"], "no device 'tpu' here; available: cpu"),
            (["--prompt", "x", "--temperature", "0", "--top-k", "3"], "--temperature 0 is greedy"),
            (["--prompt", "1" * POSITIONS], f"the prompt has {POSITIONS} tokens"),
            (["--prompt", "1" * 60, "--max-new-tokens", "5"], "--max-new-tokens can be at most 4"),
        ],
    )
    def test_options(self, capsys: pytest.CaptureFixture[str], folder: Path, options: list[str], said: str) -> None:
        assert said in error_line(capsys, "generate", folder, *options)

    def test_a_file_that_is_not_text(self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "prompt"
        file.write_bytes(b"ab\xff")
        assert "is not UTF-8 text (byte 2)" in error_line(capsys, "generate", folder, "--prompt-file", file)

    def test_no_folder(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        assert "no such folder: some/model" in error_line(capsys, "generate", "some/model", "--prompt", "x")
        file = folder / "config.json"
        assert "it is a file" in error_line(capsys, "generate", file, "--prompt", "x")

    def test_no_config(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        (copied / "config.json").unlink()
        assert "no config.json in" in error_line(capsys, "generate", copied, "--prompt", "x")

    def test_no_tokenizer(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        (copied / "tokenizer.json").unlink()
        (copied / "tokenizer_config.json").unlink()
        assert "no tokenizer in" in error_line(capsys, "generate", copied, "--prompt", "x")

    def test_no_weights(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        (copied / "model.safetensors").unlink()
        assert str(copied) in error_line(capsys, "generate", copied, "--prompt", "x")

    def test_another_kind_of_model(self, capsys: pytest.CaptureFixture[str], copied: Path) -> None:
        config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        LlamaForCausalLM(config).save_pretrained(copied)
        error = error_line(capsys, "generate", copied, "--prompt", "x")
        assert f"{copied}/config.json: ZayaConfig: model_type='llama' is wrong: only 'zaya'" in error


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(r"\n\n", "\n\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), (r"\x", r"\x"), ("\n", "\n"), ("end.", "end.")],
)
def test_stop_strings_can_hold_line_ends(typed: str, meant: str) -> None:
    arguments = zaya_cli.build_parser().parse_args(["generate", "path", "--prompt", "x", "--stop", typed])
    assert arguments.stop == [meant]
