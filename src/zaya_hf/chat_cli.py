"""`zaya chat`: talk to the model of one folder, on a terminal or through a pipe.

Answers go to standard output as they are made. Nothing is written to disk but with `--history` and `/save`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from .generation_cli import new_seed
from .inference import messages as conversations
from .inference import model_folder
from .inference.chat_template import ChatTemplate
from .inference.conversation import Answer, Conversation
from .inference.results import to_line
from .inference.screen import (
    Screen,
    ctrl_c_noted,
    is_terminal,
    lines_of_standard_input,
    lines_of_terminal,
    read_message,
    write,
)

HELP = '''\
/help          this list
/clear         forget the conversation; the system prompt stays
/undo          take back the last message and its answer
/retry         another answer to the last message
/system TEXT   set the system prompt; without TEXT, remove it
/think         let the model think before it answers
/nothink       let it answer at once
/save FILE     write the conversation to FILE, as JSON
/exit          leave, as Ctrl-D does
A message of several lines: end each line but the last with \\, or put """ before and after it.
A message that begins with a slash: write it twice. Ctrl-C stops an answer; what there is of it stays.'''


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya chat`; `args` are the options of its parser. Returns the exit code.

    Raises:
        ValueError, OSError: the folder, a file or an option does not fit; without a terminal also a message.
    """
    model_folder.check_folder(args.path)
    overrides = model_folder.sampling_options(args)
    interactive = sys.stdin is not None and sys.stdin.isatty() and is_terminal() and not args.json
    read_line = lines_of_terminal() if interactive else lines_of_standard_input()
    earlier = []
    if args.history is not None:
        earlier = conversations.read_conversation(args.history) if args.history.exists() else []
        conversations.write_conversation(args.history, earlier)  # before the first answer: that it can be written
    device = model_folder.pick_device(args.device)
    config = model_folder.read_config(args.path)
    tokenizer = model_folder.read_tokenizer(args.path, config)
    template = ChatTemplate(tokenizer, args.path, args.thinking)
    if args.max_new_tokens is not None and args.max_new_tokens >= config.max_position_embeddings:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens} leaves no room for a message: the model has "
            f"{config.max_position_embeddings} positions (max_position_embeddings)"
        )
    model = model_folder.load_model(args, device)
    conversation = Conversation(
        model,
        tokenizer,
        template,
        overrides=overrides,
        seed=new_seed() if args.seed is None else args.seed,
        max_new_tokens=args.max_new_tokens,
        stop=[*args.stop, *(model.generation_config.stop_strings or ())],
        messages=earlier,
    )
    if args.system is not None:
        conversation.system = args.system
    screen = Screen(interactive, interactive if args.show_thinking is None else args.show_thinking)
    session = Session(conversation, screen, read_line, args.history, as_json=args.json)
    if not interactive:
        session.run()
        return 0
    dtype = str(model.dtype).removeprefix("torch.")
    screen.note(f"{args.path} on {device}, {dtype}, {conversation.positions} positions; /help lists the commands")
    if earlier:
        screen.note(f"going on with the {len(earlier)} messages of {args.history}")
    session.run_interactive()
    return 0


class Session:
    """Reads messages and commands, and carries them out.

    Args:
        history: file that the conversation is kept in; None: nowhere.
        as_json: print every answer as a line of JSON instead of its text.
    """

    def __init__(
        self,
        conversation: Conversation,
        screen: Screen,
        read_line: Callable[[bool], str | None],
        history: Path | None = None,
        as_json: bool = False,
    ):
        self.conversation, self._screen, self._read_line = conversation, screen, read_line
        self._history, self._as_json = history, as_json
        self._dropped: str | None = None  # a message that got no answer, for /retry
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "clear": self._clear,
            "undo": self._undo,
            "retry": self._retry,
            "system": self._system,
            "think": lambda rest: self._think(True),
            "nothink": lambda rest: self._think(False),
            "save": self._save,
        }

    def run(self) -> None:
        """Carry out all lines that there are.

        Raises:
            ValueError, OSError: at the first line that cannot be carried out.
        """
        while (text := read_message(self._read_line)) is not None and self._carry_out(text):
            pass

    def run_interactive(self) -> None:
        """Go on until somebody leaves. What cannot be carried out is said, and changes nothing."""
        asked_to_leave = False
        while True:
            try:
                text = read_message(self._read_line)
            except KeyboardInterrupt as error:
                if type(error) is not KeyboardInterrupt:  # SIGTERM, made to look like Ctrl-C
                    raise
                print()
                if asked_to_leave:
                    return
                asked_to_leave = True
                self._screen.note("Ctrl-C again, Ctrl-D or /exit leaves")
                continue
            if text is None:
                print()
                return
            asked_to_leave = False
            try:
                if not self._carry_out(text):
                    return
            except KeyboardInterrupt as error:
                if type(error) is not KeyboardInterrupt:
                    raise
                self._screen.note("dropped; /retry asks again")
            except (ValueError, OSError, RuntimeError, MemoryError) as error:  # out of memory is one of the last two
                self._screen.note(f"error: {' '.join(str(error).split())}")

    def _carry_out(self, text: str) -> bool:
        """One message or command. Returns whether to go on."""
        if not text.strip():
            return True
        before = list(self.conversation.messages)
        name, _, rest = text[1:].partition(" ")
        if text.startswith("/") and not text.startswith("//"):
            if name.strip() in ("exit", "quit"):
                return False
            if name.strip() not in self._commands:
                raise ValueError(f"there is no command /{name.strip()}; /help lists them, // begins a message with /")
            self._commands[name.strip()](rest.strip())
        else:
            self._ask(text[1:] if text.startswith("//") else text)
        if self._history is not None and self.conversation.messages != before:
            conversations.write_conversation(self._history, self.conversation.messages)
        return True

    # ------------------------------------------------------------------------------------------------------- answers
    def _ask(self, text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("the message is not valid text; is the terminal set to UTF-8?") from None
        self._dropped = text
        if self._as_json:
            answer = self.conversation.ask(text)
            write(to_line({"role": "assistant", **asdict(answer)}), from_model=False)
        elif self._screen.interactive:
            with ctrl_c_noted() as pressed:
                answer = self._answer(text, pressed)
        else:
            answer = self._answer(text, lambda: False)
        if answer.kept:
            self._dropped = None
        self._say(answer)

    def _answer(self, text: str, interrupted: Callable[[], bool]) -> Answer:
        printed = False

        def piece(thinking: bool, text: str) -> None:
            nonlocal printed
            printed = True
            self._screen.piece(thinking, text)

        try:
            return self.conversation.ask(text, piece, interrupted)
        finally:
            if printed or sys.exc_info()[0] is None:
                self._screen.end()

    def _say(self, answer: Answer) -> None:
        notes = []
        if answer.left_out:
            notes.append(f"the context is full: the model no longer reads the {answer.left_out} oldest messages")
        if not answer.kept:
            why = {
                "interrupted": "stopped before there was an answer",
                "length": "cut off before there was an answer: more --max-new-tokens, or /nothink",
            }
            notes.append(f"{why.get(answer.finish_reason, 'the model gave no answer')}; the message is dropped")
        elif answer.finish_reason == "interrupted":
            notes.append("stopped; what there is stays, /undo drops it")
        elif answer.finish_reason == "length":
            notes.append(f"cut off after {len(answer.new_tokens)} tokens")
        if self._screen.interactive:
            notes.append(f"{len(answer.new_tokens)} tokens, {len(answer.new_tokens) / answer.seconds:.1f} tokens/s")
        if notes and not self._as_json:  # which has it all
            self._screen.note("; ".join(notes))

    # ------------------------------------------------------------------------------------------------------ commands
    def _help(self, rest: str) -> None:
        if self._screen.interactive:
            print(HELP, flush=True)

    def _clear(self, rest: str) -> None:
        self.conversation.clear()
        self._dropped = None
        self._acknowledge("forgotten")

    def _undo(self, rest: str) -> None:
        text = self.conversation.undo()
        if text is None:
            raise ValueError("there is no message to take back")
        self._dropped = None
        self._acknowledge(f"taken back: {' '.join(text.split())[:60]}")

    def _retry(self, rest: str) -> None:
        if self._dropped is not None:
            self._ask(self._dropped)
            return
        before = list(self.conversation.messages)
        text = self.conversation.undo()
        if text is None:
            raise ValueError("there is no message to answer again")
        try:
            self._ask(text)
        finally:
            if self._dropped is not None:  # no answer has come: the one that was there stays
                self.conversation.messages, self._dropped = before, None

    def _system(self, rest: str) -> None:
        self.conversation.system = rest or None
        self._acknowledge("the system prompt is set" if rest else "there is no system prompt now")

    def _think(self, on: bool) -> None:
        self.conversation.template.set_thinking(on)
        self._acknowledge("the model thinks first" if on else "the model answers at once")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs a file: /save FILE")
        path = Path(rest).expanduser()
        conversations.check_replaceable(path)
        conversations.write_conversation(path, self.conversation.messages)
        self._acknowledge(f"{len(self.conversation.messages)} messages are in {path}")

    def _acknowledge(self, text: str) -> None:
        if self._screen.interactive:
            self._screen.note(text)
