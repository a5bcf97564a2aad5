"""`zaya chat`: through a pipe, its commands and files, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import zaya_cli
from chat_folders import PLAIN_TEMPLATE, POSITIONS, TEMPLATE, chat_model, chat_tokenizer, save_chat_folder
from talks import Talk
from zaya_hf import ZayaForCausalLM
from zaya_hf.chat_cli import Session
from zaya_hf.inference.conversation import Answer, Conversation
from zaya_hf.inference.messages import read_conversation, write_conversation
from zaya_hf.inference.screen import Screen, ctrl_c_noted, read_message

SRC = Path(__file__).resolve().parent.parent / "src"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> ZayaForCausalLM:
    return chat_model(tokenizer)


@pytest.fixture
def plain(model: ZayaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Talk:
    return Talk(model, tokenizer, PLAIN_TEMPLATE, "so")


# ------------------------------------------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("chat") / "model", PLAIN_TEMPLATE)


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("chat") / "model", TEMPLATE)


class Command:
    """Runs `zaya chat` on lines of standard input."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, folder: Path, lines: str | bytes, *options: object) -> tuple[int, str, str]:
        data = lines if isinstance(lines, bytes) else lines.encode()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        arguments = ["chat", folder, "--max-new-tokens", 12, "--temperature", 0, *options]
        code = zaya_cli.main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def answers(self, folder: Path, lines: str, *options: object) -> list[dict[str, Any]]:
        code, out, err = self(folder, lines, "--json", *options)
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]

    def error(self, folder: Path, lines: str | bytes, *options: object) -> str:
        code, _, err = self(folder, lines, *options)
        assert code == 1
        (line,) = [line for line in err.splitlines() if "error: " in line]
        return line


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


class TestPiped:
    def test_each_line_is_a_message_and_only_answers_are_printed(self, chat: Command, folder: Path) -> None:
        answers = chat.answers(folder, "hello\n\nand?\n")
        assert len(answers) == 2
        assert answers[1]["cached_tokens"] > answers[0]["prompt_tokens"] - 10
        code, out, err = chat(folder, "hello\n\nand?\n")
        assert (code, out) == (0, "".join(answer["content"] + "\n" for answer in answers))
        assert err == "zaya chat: cut off after 12 tokens\n" * 2

    def test_lines_of_one_message(self, chat: Command, folder: Path, tmp_path: Path) -> None:
        lines = 'one\\\ntwo\n"""three\n\\\nfour"""\n//five\n'
        assert len(chat.answers(folder, lines, "--history", tmp_path / "h.json")) == 3
        said = [m["content"] for m in read_conversation(tmp_path / "h.json") if m["role"] == "user"]
        assert said == ["one\ntwo", "three\n\\\nfour", "/five"]

    def test_commands(self, chat: Command, folder: Path, tmp_path: Path) -> None:
        saved = tmp_path / "saved.json"
        lines = (
            f"/system be brief\nhello\nmore\n/undo\n/retry\n/help\n/save {saved}\n/clear\nhello\n/exit\nnever read\n"
        )
        answers = chat.answers(folder, lines)
        assert len(answers) == 4
        assert answers[2]["new_tokens"] == answers[0]["new_tokens"] == answers[3]["new_tokens"]
        messages = json.loads(saved.read_text())
        assert [m["role"] for m in messages] == ["system", "user", "assistant"]
        assert messages[0]["content"] == "be brief"
        assert chat.answers(folder, "hello\n", "--system", "be brief")[0]["new_tokens"] == answers[0]["new_tokens"]
        assert chat.answers(folder, "hello\n")[0]["new_tokens"] != answers[0]["new_tokens"]

    def test_thinking_is_switched_and_shown_on_request(self, chat: Command, thinking_folder: Path) -> None:
        (on, off) = chat.answers(thinking_folder, "/think\nhello\n/nothink\nhello\n")
        assert (on["kept"], on["content"]) == (False, "")
        assert on["thinking"]
        assert off["thinking"] is None
        assert off["kept"]
        assert chat.answers(thinking_folder, "hello\n", "--no-thinking")[0]["new_tokens"] == off["new_tokens"]
        assert chat.answers(thinking_folder, "hello\n", "--thinking")[0]["new_tokens"] == on["new_tokens"]
        code, out, err = chat(thinking_folder, "hello\n")
        assert (code, out) == (0, "\n")
        assert "cut off before there was an answer: more --max-new-tokens, or /nothink" in err
        _, out, _ = chat(thinking_folder, "hello\n", "--show-thinking")
        assert out.startswith("<think>\n")
        assert on["thinking"] in out

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ("/help\n/no such\n", "there is no command /no; /help lists them"),
            ("/undo\n", "no message to take back"),
            ("/retry\n", "no message to answer again"),
            ("/save\n", "/save needs a file"),
            ("/save .\n", "is a folder"),
            ("/think\n", "the chat template has no enable_thinking"),
            (b"ab\xff\n", "standard input, line 1 is not UTF-8 text (byte 2)"),
            ("0" * POSITIONS + "\n", "shorten it to"),
        ],
    )
    def test_the_first_line_that_cannot_be_carried_out_is_an_error(
        self, chat: Command, folder: Path, lines: str | bytes, said: str
    ) -> None:
        assert said in chat.error(folder, lines)

    def test_other_files_are_not_overwritten(self, chat: Command, folder: Path, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.write_text("do not touch")
        assert "is no conversation: name another file" in chat.error(folder, f"/save {precious}\n")
        assert precious.read_text() == "do not touch"

    def test_ctrl_c_ends_it(self, chat: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Conversation, "ask", interrupted)
        code, _, err = chat(folder, "hello\n")
        assert (code, err) == (130, "\nzaya chat: interrupted\n")


class TestHistory:
    def test_a_conversation_goes_on(self, chat: Command, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        first = chat.answers(folder, "hello\n", "--history", file)
        second = chat.answers(folder, "and?\n", "--history", file)
        assert [a["new_tokens"] for a in chat.answers(folder, "hello\nand?\n")] == [
            a["new_tokens"] for a in first + second
        ]
        assert [m["role"] for m in json.loads(file.read_text())] == ["user", "assistant"] * 2
        assert list(tmp_path.iterdir()) == [file]

    def test_it_is_written_after_every_turn(self, chat: Command, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        assert "/no" in chat.error(folder, "hello\n/undo\nhello\n/no\n", "--history", file)
        assert len(read_conversation(file)) == 2

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("[", "not JSON: Expecting value (line 1, column 2)"),
            ("{}", "expected a list of messages"),
            ('["a"]', "message 1 is not an object"),
            ('[{"role": "user"}]', 'message 1 has no text "content"'),
            ('[{"role": "user", "content": [1]}]', 'message 1 has no text "content"'),
            ('[{"role": "assistant", "content": "a"}]', "message 1 is of 'assistant', expected 'user'"),
            ('[{"role": "system", "content": "a"}, {"role": "tool", "content": "a"}]', "message 2 is of 'tool'"),
            ('[{"role": "user", "content": "a"}]', "the last message has no answer"),
        ],
    )
    def test_files_that_are_no_conversation(
        self, chat: Command, folder: Path, tmp_path: Path, content: str, said: str
    ) -> None:
        file = tmp_path / "talk.json"
        file.write_text(content)
        error = chat.error(folder, "hello\n", "--history", file)
        assert str(file) in error
        assert said in error
        assert file.read_text() == content

    def test_thinking_in_a_foreign_file_is_taken_out(self, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
        write_conversation(file, [{"role": "user", "content": "a"}, answer])
        assert read_conversation(file)[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


class TestRefused:
    def test_a_tokenizer_without_a_template(
        self, chat: Command, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare = save_chat_folder(tmp_path / "bare", template=None)
        error = chat.error(bare, "hello\n")
        assert "has no chat template: it is not of a chat model" in error
        assert f"zaya generate {bare} --prompt" in error

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--no-thinking"], "the chat template has no enable_thinking"),
            (["--max-new-tokens", POSITIONS], "leaves no room for a message"),
            (["--device", "tpu"], "no device 'tpu' here"),
            (["--top-k", 3], "--temperature 0 is greedy"),
            (["--history", Path(__file__) / "talk.json"], Path(__file__).name),  # in a file, as if it were a folder
        ],
    )
    def test_options(self, chat: Command, folder: Path, options: list[object], said: str) -> None:
        assert said in chat.error(folder, "hello\n", *options)

    def test_no_folder(self, chat: Command) -> None:
        assert "no such folder" in chat.error(Path("some/model"), "hello\n")


# ------------------------------------------------------------------------------------------------------- the terminal
class Lines:
    """What somebody types: lines, Ctrl-C and, at the end, Ctrl-D."""

    def __init__(self, *lines: str | type[BaseException]):
        self._lines = iter(lines)

    def __call__(self, first: bool) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line


def typed(talk: Talk, *lines: str | type[BaseException], conversation: Conversation | None = None) -> Conversation:
    """A session on a terminal without colours. Returns its conversation."""
    conversation = talk.conversation() if conversation is None else conversation
    Session(conversation, Screen(interactive=True, show_thinking=True), Lines(*lines)).run_interactive()
    return conversation


class TestSession:
    def test_ctrl_c_twice_leaves_and_once_does_not(self, plain: Talk, capsys: pytest.CaptureFixture[str]) -> None:
        typed(plain, KeyboardInterrupt, "", KeyboardInterrupt, KeyboardInterrupt, "/undo")
        out = capsys.readouterr().out
        assert out.count("Ctrl-C again") == 2
        assert "error" not in out  # /undo was never read

    def test_what_looks_like_ctrl_c_but_is_not_leaves_at_once(self, plain: Talk) -> None:
        class Terminated(KeyboardInterrupt):
            pass

        with pytest.raises(Terminated):
            typed(plain, Terminated)

    def test_mistakes_are_said_and_change_nothing(self, plain: Talk, capsys: pytest.CaptureFixture[str]) -> None:
        plain.script.left = []
        conversation = typed(plain, "/no", "0" * POSITIONS, "hello", "/think", "\udcff", "/save /dev/null/x")
        out = capsys.readouterr().out
        assert out.count("(error: ") == 5
        assert len(conversation.messages) == 2

    def test_another_answer_that_does_not_come_leaves_the_first(
        self, plain: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        conversation = typed(plain, "hello")
        before = list(conversation.messages)

        def interrupted(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(conversation, "ask", interrupted)
            typed(plain, "/retry", "/retry", "new", conversation=conversation)
        assert conversation.messages == before
        typed(plain, "/retry", conversation=conversation)
        assert len(conversation.messages) == 2
        assert capsys.readouterr().out.count("dropped; /retry asks again") == 3

    def test_a_message_without_an_answer_is_asked_again(self, plain: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        conversation = plain.conversation()
        ask, calls = conversation.ask, iter(range(9))

        def once_interrupted(*args: Any, **kwargs: Any) -> Answer:
            if next(calls) == 0:
                raise KeyboardInterrupt
            return ask(*args, **kwargs)

        monkeypatch.setattr(conversation, "ask", once_interrupted)
        typed(plain, "hello", "/retry", conversation=conversation)
        assert [m["content"] for m in conversation.messages][:1] == ["hello"]

    def test_the_first_ctrl_c_is_noted_and_the_second_interrupts(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with ctrl_c_noted() as pressed:
            assert not pressed()
            os.kill(os.getpid(), signal.SIGINT)
            assert pressed()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_without_signals_there_is_no_ctrl_c(self) -> None:
        said = []

        def elsewhere() -> None:
            with ctrl_c_noted() as pressed:
                said.append(pressed())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert said == [False]

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["a"], "a"),
            (["a\\", "b\\", "c"], "a\nb\nc"),
            (["a\\"], "a"),
            (['"""a"""'], "a"),
            (['  """', "a", "", ' b"""  '], "a\n\n b"),
            (['"""a', "b"], "a\nb"),
            ([], None),
        ],
    )
    def test_messages_of_several_lines(self, lines: list[str], message: str | None) -> None:
        assert read_message(Lines(*lines)) == message


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, show_thinking: bool, **environment: str) -> str:
    """What is on a terminal after one answer with thinking."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = Screen(interactive=True, show_thinking=show_thinking)
    for piece in [(True, "h"), (True, "m\x1b]0;title\x07"), (False, "yes\x1b[2J")]:
        screen.piece(*piece)
    screen.end()
    return terminal.getvalue()


class TestScreen:
    def test_thinking_is_dimmed_and_control_characters_are_harmless(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = shown(monkeypatch, True, TERM="xterm")
        assert text == "\x1b[2mhm\\x1b]0;title\\x07\x1b[0m\n\nyes\\x1b[2J\n"

    def test_thinking_is_collapsed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert shown(monkeypatch, False, TERM="xterm") == "\x1b[2m(thinking ...)\x1b[0m\r\x1b[Kyes\\x1b[2J\n"

    @pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1", "TERM": "xterm"}])
    def test_without_colours(self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
        assert "\x1b" not in shown(monkeypatch, True, **environment) + shown(monkeypatch, False, **environment)

    def test_dimming_ends_when_an_answer_is_broken_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        screen = Screen(interactive=True, show_thinking=True)
        screen.piece(True, "hm")
        screen.end()
        assert terminal.getvalue().rstrip("\n").endswith("\x1b[0m")


class TypedTerminal:
    """A process that has a pseudo-terminal for its own."""

    # A session leader takes the first terminal that it opens: without one, Ctrl-C would be no signal.
    CODE = (
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); import zaya_cli; "
        "sys.exit(zaya_cli.main(sys.argv[1:]))"
    )

    def __init__(self, *arguments: str):
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(SRC), "TERM": "dumb"},
        )
        os.close(theirs)
        self.output = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Read until the pattern is in what was read since the last time."""
        deadline, read = time.monotonic() + seconds, ""
        while not re.search(pattern, read):
            ready, _, _ = select.select([self._ours], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {pattern!r} in {read!r}"
            try:
                data = os.read(self._ours, 4096)
            except OSError:  # Linux says so when the other side is closed
                data = b""
            assert data, f"it ended without {pattern!r}: {read!r}"
            read += data.decode("utf-8", "replace")
        self.output += read
        return read

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[TypedTerminal]:
    """`zaya chat` with a model that never ends by itself and is fond of escape sequences."""
    endless = save_chat_folder(tmp_path / "endless", PLAIN_TEMPLATE, max_position_embeddings=100_000)
    tokenizer = chat_tokenizer()
    (escape,) = tokenizer("\x1b", add_special_tokens=False)["input_ids"]
    config = json.loads((endless / "generation_config.json").read_text())
    config["suppress_tokens"] = config["eos_token_id"]
    config["sequence_bias"] = [[[escape], 4.0]]
    (endless / "generation_config.json").write_text(json.dumps(config))
    terminal = TypedTerminal("chat", str(endless), "--history", str(tmp_path / "talk.json"), "--temperature", "1")
    yield terminal
    terminal.close()


def test_on_a_terminal(terminal: TypedTerminal, tmp_path: Path) -> None:
    """Streaming, Ctrl-C in an answer, the next message, escape sequences, and leaving."""
    terminal.wait_for(r"/help lists the commands\)\r\n> ")
    terminal.type("hello\n")
    terminal.wait_for(r"(?s)hello\r\n.{40}")  # text is there while the answer goes on
    assert terminal.process.poll() is None
    terminal.type("\x03")
    terminal.wait_for(r"stopped; what there is stays.*\)\r\n> ")
    terminal.type("and?\n")
    terminal.wait_for(r"(?s)and\?\r\n.{40}")
    terminal.type("\x03")
    terminal.wait_for(r"stopped; .*\)\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert "\\x1b" in terminal.output
    assert "\x1b" not in terminal.output
    messages = read_conversation(tmp_path / "talk.json")
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "and?"]
