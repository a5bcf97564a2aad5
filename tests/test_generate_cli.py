"""`zaya generate` with several prompts: batches, lists and files of prompts, chats, results in a file."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from chat_folders import PLAIN_TEMPLATE, POSITIONS, TEMPLATE, save_chat_folder
from commands import error_line, generated, zaya
from zaya_hf import ZayaForCausalLM
from zaya_hf.inference import batches, model_folder, results
from zaya_hf.inference.sampling import RowSampler, seed_of

PROMPTS = ["def add(a, b):", "x", "import os and all that is in it, please", "class A:", "12345678901"]
GREEDY = ("--max-new-tokens", 9, "--temperature", 0)
SAMPLED = ("--max-new-tokens", 9, "--temperature", 1.2, "--seed", 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("generate") / "model", TEMPLATE)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """The prompts as a file, one a line."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


def records(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    code, out, err = zaya(capsys, "generate", *arguments, "--json")
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in found]


class TestBatches:
    @pytest.mark.parametrize(
        "options", [GREEDY, SAMPLED, (*GREEDY, "--num-beams", 3)], ids=["greedy", "sampled", "beam"]
    )
    def test_texts_do_not_depend_on_the_batch(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, options: tuple[object, ...]
    ) -> None:
        alone = records(capsys, folder, "--prompts", listed, *options)
        assert [record["prompt"] for record in alone] == PROMPTS
        assert [record["index"] for record in alone] == list(range(len(PROMPTS)))
        assert len(set(texts(alone))) > 2
        for size in (2, 5):
            together = records(capsys, folder, "--prompts", listed, *options, "--batch-size", size)
            assert together == alone

    def test_one_prompt_is_the_first_of_many(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path
    ) -> None:
        for options in (GREEDY, SAMPLED):
            single = generated(capsys, folder, "--prompt", PROMPTS[0], *options)
            assert single["text"] == records(capsys, folder, "--prompts", listed, *options)[0]["text"]

    def test_batches_are_of_like_length_and_the_longest_comes_first(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[int] = []
        lengths: list[int] = []
        run = batches.BatchGenerator.run

        def spy(self: Any, batch: Any, on_text: Any = None) -> Any:
            sizes.append(len(batch))
            lengths.extend(len(request.ids) for request in batch)
            return run(self, batch, on_text)

        monkeypatch.setattr(batches.BatchGenerator, "run", spy)
        records(capsys, folder, "--prompts", listed, *GREEDY, "--batch-size", 2)
        assert sizes == [2, 2, 1]
        assert lengths == sorted(lengths, reverse=True)

    @pytest.mark.parametrize("beams", [1, 3])
    def test_each_text_has_its_own_limit(
        self, capsys: pytest.CaptureFixture[str], folder: Path, beams: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = batches.BatchGenerator.run

        def spy(self: Any, batch: Any, on_text: Any = None) -> Any:
            assert beams == 1 or len({request.limit for request in batch}) == 1  # a search ends by one limit
            return run(self, batch, on_text)

        monkeypatch.setattr(batches.BatchGenerator, "run", spy)
        options = ("--temperature", 0, "--num-beams", beams)
        nearly_full = "1" * (POSITIONS - 3)
        found = records(capsys, folder, "--prompt", nearly_full, "--prompt", "x", *options, "--batch-size", 2)
        alone = [generated(capsys, folder, "--prompt", prompt, *options) for prompt in (nearly_full, "x")]
        assert texts(found) == texts(alone)
        assert len(alone[0]["new_tokens"]) <= 3 < len(alone[1]["new_tokens"])

    def test_several_texts_for_each_prompt(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", "x", "--prompt", "y", *SAMPLED, "--num-return-sequences", 3)
        found = records(capsys, *arguments, "--batch-size", 4)
        assert [(r["index"], r["sample"]) for r in found] == [(i, s) for i in range(2) for s in range(3)]
        assert len(set(texts(found))) == 6
        assert found == records(capsys, *arguments)

    def test_texts_of_several_are_printed_in_order(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", "x", "--prompt", "longer", *GREEDY)
        one, two = texts(records(capsys, *arguments))
        printed = zaya(capsys, "generate", *arguments, "--batch-size", 2)
        assert printed == (0, f"==> 1 <==\n{one}\n==> 2 <==\n{two}\n", "")

    def test_without_a_seed_every_run_is_another_and_can_be_repeated(
        self, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        arguments = (folder, "--prompt", "x", "--max-new-tokens", 20, "--temperature", 2.0)
        first, second = (generated(capsys, *arguments) for _ in range(2))
        assert first["text"] != second["text"]
        assert generated(capsys, *arguments, "--seed", first["seed"])["text"] == first["text"]


class TestSampling:
    CONFIG = GenerationConfig(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.95, epsilon_cutoff=1e-3)

    def test_chances_are_those_of_generate(self, folder: Path) -> None:
        model: Any = ZayaForCausalLM.from_pretrained(folder)
        ids = torch.tensor([[5, 6, 7]])
        options = {"do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        (expected,) = model.generate(ids, GenerationConfig(**self.CONFIG.to_diff_dict()), **options).scores
        raw = model(ids).logits[:, -1]
        sampler = RowSampler(self.CONFIG, [torch.Generator()])
        torch.testing.assert_close(sampler._warpers(ids, raw), expected, atol=1e-5, rtol=1e-5)
        assert 1 < int(expected.isfinite().sum()) < 20

    def test_words_come_as_often_as_their_chances_say(self) -> None:
        chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
        sampler = RowSampler(GenerationConfig(top_k=0), [torch.Generator().manual_seed(1)])
        draws = 4000
        ids = torch.zeros(1, 1, dtype=torch.long)
        drawn = Counter(int(sampler(ids, chances.log()[None]).argmax()) for _ in range(draws))
        for word, chance in enumerate(chances.tolist()):
            deviation = (draws * chance * (1 - chance)) ** 0.5
            assert abs(drawn[word] - draws * chance) < 4 * deviation

    def test_only_the_drawn_word_is_left(self) -> None:
        scores = RowSampler(GenerationConfig(), [torch.Generator(), torch.Generator()])(
            torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 9)
        )
        assert scores.isfinite().sum(1).tolist() == [1, 1]

    def test_seeds_of_places_differ(self) -> None:
        seeds = [seed_of(seed, index, sample) for seed in range(3) for index in range(3) for sample in range(3)]
        assert len(set(seeds)) == 27
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestSources:
    def test_lines_of_json(self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x\u2028y"}]
        lines = ["x", {"prompt": "a\nb", "id": 7, "text": "kept"}, {"messages": messages}]
        file.write_text("\ufeff" + "\r\n".join(json.dumps(line) for line in lines), encoding="utf-8")
        found = records(capsys, folder, "--prompts", file, *GREEDY)
        assert [record.get("prompt") for record in found] == ["x", "a\nb", None]
        assert found[1]["input"] == {"id": 7, "text": "kept"}
        assert found[2]["messages"] == messages
        assert found[2]["rendered_prompt"].startswith("<|im_start|>system\nbe brief<|im_end|>")
        assert found[0]["rendered_prompt"] is None
        assert found[1]["text"] == generated(capsys, folder, "--prompt", "a\nb", *GREEDY)["text"]

    def test_standard_input(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = records(capsys, folder, "--prompts", listed, *GREEDY)
        for data, options in (
            (listed.read_bytes(), ()),
            (listed.read_bytes().replace(b"\n", b"\r\n"), ()),
            ("\n".join(json.dumps(prompt) for prompt in PROMPTS).encode(), ("--jsonl",)),
        ):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            assert records(capsys, folder, "--prompts", "-", *GREEDY, *options) == expected
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
        single = generated(capsys, folder, "--prompt-file", "-", *GREEDY)
        assert (single["prompt"], single["text"]) == ("x", expected[1]["text"])

    def test_several_files(self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
        files = [tmp_path / name for name in ("a", "b")]
        for file, prompt in zip(files, ("x\ny\n", "class A:"), strict=True):
            file.write_text(prompt)
        found = records(capsys, folder, "--prompt-file", files[0], "--prompt-file", files[1], *GREEDY)
        assert [record["prompt"] for record in found] == ["x\ny", "class A:"]

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "there are no prompts in {file}"),
            (b'"a"\n{"prompt"\n', "{file}, line 2: not JSON: Expecting ':' delimiter (column 10)"),
            (b'"a"\n\n"b"\n', "{file}, line 2: the line is empty"),
            (b"1\n", "{file}, line 1: expected a string, or an object with either"),
            (b'{"text": "a"}\n', "{file}, line 1: expected a string, or an object with either"),
            (b'{"prompt": "a", "messages": []}\n', "{file}, line 1: expected a string, or an object with either"),
            (b'{"prompt": " "}\n', '{file}, line 1: "prompt" must be text that is not empty'),
            (b'{"prompt": ["a"]}\n', '{file}, line 1: "prompt" must be text that is not empty'),
            (b'{"messages": []}\n', "{file}, line 1: expected a list of messages that is not empty"),
            (b'{"messages": [{"role": "user"}]}\n', '{file}, line 1: message 1 has no text "content"'),
            (
                b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
                "{file}, line 1: the last message is the assistant's",
            ),
            (
                b'{"messages": [{"role": "critic", "content": "a"}]}\n',
                "{file}, line 1: the chat template refuses this conversation: unknown role critic",
            ),
            (b'"a"\n"\xff"\n', "{file} is not UTF-8 text (byte 5)"),
            (json.dumps("1" * POSITIONS).encode(), f"the prompt has {POSITIONS} tokens"),
            (b'"a"\n' + json.dumps("1" * POSITIONS).encode(), f"the prompt ({{file}}, line 2) has {POSITIONS} tokens"),
        ],
    )
    def test_a_wrong_line_is_named(
        self,
        capsys: pytest.CaptureFixture[str],
        folder: Path,
        tmp_path: Path,
        content: bytes,
        said: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(model_folder, "load_model", lambda *_: pytest.fail("the model was loaded before the check"))
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(content)
        error = error_line(capsys, "generate", folder, "--prompts", file, "--output", tmp_path / "out.jsonl")
        assert said.replace("{file}", str(file)) in error
        assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]

    def test_an_empty_line_of_text(self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("a\n \nb\n")
        assert f"the prompt from {file}, line 2 is empty" in error_line(capsys, "generate", folder, "--prompts", file)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--prompt", "x", "--prompt", ""], "the prompt from --prompt 2 is empty"),
            (["--prompts", "/no/such"], "no such file: /no/such"),
            (["--prompt", "x", "--jsonl"], "--jsonl says how to read --prompts FILE"),
            (["--prompt", "x", "--system", "s"], "--system is for chats: add --chat"),
            (["--prompt", "x", "--no-thinking"], "--thinking and --no-thinking is for chats"),
            (["--prompt", "x", "--resume"], "--resume goes on with an --output file"),
            (["--prompt", "x", "--temperature", "0", "--num-return-sequences", "2"], "needs sampling"),
            (["--prompt", "x", "--num-beams", "2", "--stop", "a"], "--stop does not go with beam search"),
            (["--prompt", "x", "--num-beams", "2", "--num-return-sequences", "2"], "does not go with beam search"),
        ],
    )
    def test_options(self, capsys: pytest.CaptureFixture[str], folder: Path, options: list[str], said: str) -> None:
        assert said in error_line(capsys, "generate", folder, *options)

    def test_an_empty_stop_string_is_wrong_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = zaya(capsys, "generate", "x", "--prompt", "a", "--stop", "")
        assert code == 2
        assert "--stop: it is empty" in err


class TestChats:
    def test_system_prompt_and_thinking(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", "hi", "--chat", *GREEDY)
        plain = generated(capsys, *arguments)
        assert plain["rendered_prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert (plain["thinking"], plain["answer"]) == (plain["text"].strip(), "")  # it never came to an answer
        other = generated(capsys, *arguments, "--no-thinking", "--system", "be brief")
        assert other["rendered_prompt"] == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n"
        )
        assert (other["thinking"], other["answer"]) == (None, other["text"])

    def test_a_template_without_the_switch(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        plain = save_chat_folder(tmp_path / "plain", PLAIN_TEMPLATE)
        arguments = ("generate", plain, "--prompt", "hi", "--chat", "--no-thinking")
        assert "the chat template has no enable_thinking" in error_line(capsys, *arguments)


class TestStop:
    def test_a_text_ends_before_the_string(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", PROMPTS[0], "--max-new-tokens", 24, "--temperature", 0)
        whole = generated(capsys, *arguments)["text"]
        stop = whole[9:12]
        before = whole[: whole.index(stop)]
        stopped = generated(capsys, *arguments, "--stop", "never there", "--stop", stop)
        assert (stopped["text"], stopped["finish_reason"]) == (before, "stop")
        assert zaya(capsys, "generate", *arguments, "--stop", stop) == (0, before + "\n", "")

    def test_stop_strings_of_the_folder_hold(
        self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
    ) -> None:
        arguments = ("--prompt", PROMPTS[0], "--max-new-tokens", 24, "--temperature", 0)
        whole = generated(capsys, folder, *arguments)["text"]
        copied = save_chat_folder(tmp_path / "copy", TEMPLATE)
        config = json.loads((copied / "generation_config.json").read_text())
        config["stop_strings"] = [whole[9:12]]
        (copied / "generation_config.json").write_text(json.dumps(config))
        stopped = generated(capsys, copied, *arguments)
        assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(whole[9:12])], "stop")


class TestOutput:
    def test_results_are_a_file_in_the_order_of_the_prompts(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, tmp_path: Path
    ) -> None:
        arguments = (folder, "--prompts", listed, *GREEDY, "--batch-size", 2)
        expected = records(capsys, *arguments)
        file = tmp_path / "new" / "out.jsonl"
        assert zaya(capsys, "generate", *arguments, "--output", file) == (0, "", "")
        assert [json.loads(line) for line in file.read_text().splitlines()] == expected
        assert list(file.parent.iterdir()) == [file]

    def test_one_prompt_goes_there_too(self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "out.jsonl"
        assert zaya(capsys, "generate", folder, "--prompt", "x", *GREEDY, "--output", file) == (0, "", "")
        assert len(file.read_text().splitlines()) == 1

    def test_an_older_file_stays_unless_it_is_to_be_replaced(
        self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "out.jsonl"
        file.write_text("precious")
        arguments = ("generate", folder, "--prompt", "x", *GREEDY, "--output")
        assert f"{file} exists already: name another file, or --force" in error_line(capsys, *arguments, file)
        assert file.read_text() == "precious"
        assert zaya(capsys, *arguments, file, "--force") == (0, "", "")
        assert json.loads(file.read_text())["prompt"] == "x"
        assert "is a folder; name a file in it" in error_line(capsys, *arguments, tmp_path)
        assert "there is no" in error_line(capsys, *arguments, tmp_path / "other", "--resume")

    def test_resuming_a_finished_run_is_no_error(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "out.jsonl"
        arguments = ("generate", folder, "--prompts", listed, *GREEDY, "--output", file)
        assert zaya(capsys, *arguments)[0] == 0
        before = file.read_bytes()
        assert zaya(capsys, *arguments, "--resume") == (0, "", f"zaya generate: {file} has all texts already\n")
        assert file.read_bytes() == before
        listed.write_text("another prompt\n")
        assert "exists already" in error_line(capsys, *arguments, "--resume")
        assert file.read_bytes() == before

    @pytest.fixture
    def interrupted(
        self,
        capsys: pytest.CaptureFixture[str],
        folder: Path,
        listed: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> tuple[Path, tuple[object, ...], list[int]]:
        """A run without a seed that Ctrl-C ends in its second batch, and the sizes of all batches that are run; the
        fourth is interrupted too."""
        file = tmp_path / "out.jsonl"
        arguments = ("generate", folder, "--prompts", listed, "--max-new-tokens", 9, "--temperature", 1.2)
        arguments += ("--batch-size", 2, "--output", file)
        run, sizes = batches.BatchGenerator.run, list[int]()

        def stopped(self: Any, batch: Any, on_text: Any = None) -> Any:
            sizes.append(len(batch))
            if len(sizes) in (2, 4):
                raise KeyboardInterrupt
            return run(self, batch, on_text)

        monkeypatch.setattr(batches.BatchGenerator, "run", stopped)
        code, out, err = zaya(capsys, *arguments)
        assert (code, out) == (130, "")
        assert f"texts so far are in {file}.part; add --resume to go on" in err
        assert not file.exists()
        return file, arguments, sizes

    def test_an_interrupted_run_goes_on(
        self, capsys: pytest.CaptureFixture[str], interrupted: tuple[Path, tuple[object, ...], list[int]]
    ) -> None:
        file, arguments, sizes = interrupted
        part = Path(f"{file}.part")
        with part.open("a") as torn:
            torn.write('{"index": 3, "sam')  # as a power cut leaves it
        assert "--resume goes on with it, --force starts again" in error_line(capsys, *arguments)
        assert zaya(capsys, *arguments, "--resume")[0] == 130  # it is interrupted again
        assert zaya(capsys, *arguments, "--resume") == (0, "", "")
        assert sizes[2:] == [2, 1, 1]
        assert not part.exists()
        found = [json.loads(line) for line in file.read_text().splitlines()]
        assert [record["prompt"] for record in found] == PROMPTS
        (seed,) = {record["seed"] for record in found}
        whole = records(capsys, *arguments[1:-2], "--seed", seed)
        assert whole == found

    def test_another_command_does_not_go_on_with_it(
        self, capsys: pytest.CaptureFixture[str], interrupted: tuple[Path, tuple[object, ...], list[int]]
    ) -> None:
        file, arguments, _ = interrupted
        part = Path(f"{file}.part")
        before = part.read_bytes()
        for other in (("--top-k", 3), ("--seed", 1), ("--stop", "x")):
            error = error_line(capsys, *arguments, "--resume", *other)
            assert "is of a run with other prompts, options or files of the model" in error
        assert part.read_bytes() == before
        part.write_text("something else\n")
        assert "is not what an interrupted run leaves" in error_line(capsys, *arguments, "--resume")
        assert zaya(capsys, *arguments, "--force", "--batch-size", 5) == (0, "", "")
        assert len(file.read_text().splitlines()) == len(PROMPTS)

    def test_results_wait_for_those_before_them(self) -> None:
        passed: list[int] = []
        ordered = results.OrderedOutput(lambda record: passed.append(record["index"]), [(0, 0), (1, 0), (2, 0)])
        for index, expected in ((2, []), (0, [0]), (1, [0, 1, 2])):
            ordered.add({"index": index, "sample": 0})
            assert passed == expected


class TestTerminal:
    def test_control_characters_of_a_text_are_written_out(
        self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches.BatchGenerator, "run", _says("a\x1b[2Jb"))
        arguments = ("generate", folder, "--prompt", "x")
        assert zaya(capsys, *arguments)[1] == "a\x1b[2Jb\n"
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert zaya(capsys, *arguments)[1] == "a\\x1b[2Jb\n"
        assert zaya(capsys, *arguments, "--prompt", "y")[1] == "==> 1 <==\na\\x1b[2Jb\n==> 2 <==\na\\x1b[2Jb\n"

    def test_progress_is_shown_on_a_terminal_only(
        self, capsys: pytest.CaptureFixture[str], folder: Path, listed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = ("generate", folder, "--prompts", listed, *GREEDY)
        assert zaya(capsys, *arguments)[2] == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        err = zaya(capsys, *arguments)[2]
        assert f"{len(PROMPTS)}/{len(PROMPTS)}" in err
        assert "tokens/s" in err


def _says(text: str) -> Any:
    def run(self: Any, batch: Any, on_text: Any = None) -> list[batches.Completion]:
        if on_text is not None:
            on_text(text)
        return [batches.Completion(text, [5], "length") for _ in batch]

    return run


class TestSpeed:
    def test_packed_weights_say_the_same(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = (folder, "--prompt", PROMPTS[0], *GREEDY)
        expected = generated(capsys, *arguments)["new_tokens"]
        assert generated(capsys, *arguments, "--pack-weights")["new_tokens"] == expected

    def test_the_model_is_fused_and_compiled_when_asked_for(
        self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[tuple[str, object]] = []
        fuse = ZayaForCausalLM.fuse_for_inference

        def fused(self: Any, pack_weights: bool = False) -> Any:
            done.append(("fuse", pack_weights))
            return fuse(self, pack_weights)

        monkeypatch.setattr(ZayaForCausalLM, "fuse_for_inference", fused)
        monkeypatch.setattr(ZayaForCausalLM, "compile_decoding", lambda self: done.append(("compile", self.is_fused)))
        generated(capsys, folder, "--prompt", "x", *GREEDY)
        generated(capsys, folder, "--prompt", "x", *GREEDY, "--pack-weights", "--compile")
        assert done == [("fuse", False), ("fuse", True), ("compile", True)]
