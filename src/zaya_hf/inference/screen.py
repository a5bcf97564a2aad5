"""Where a conversation is shown: a terminal, or a pipe or file that gets the answers and nothing else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from .text_stream import printable

_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()  # None where the shell has closed it


def write(text: str, from_model: bool = True) -> None:
    """Put text on standard output at once: as it is into files and pipes, harmless on a terminal."""
    print(printable(text) if from_model and is_terminal() else text, end="", flush=True)


class Screen:
    """Prints answers as they come.

    Args:
        interactive: whether somebody sits there; else notes go to standard error.
        show_thinking: print the model's thinking too; else a terminal says that there is some.
    """

    def __init__(self, interactive: bool, show_thinking: bool):
        self.interactive, self.show_thinking = interactive, show_thinking
        self._colours = is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._thinking = False

    def piece(self, thinking: bool, text: str) -> None:
        """A piece of an answer."""
        if thinking != self._thinking:
            self._switch(thinking)
        if not thinking or self.show_thinking:
            write(text)

    def end(self) -> None:
        """The answer is over, in whatever state."""
        if self._thinking:
            self._switch(False)
        write("\n")

    def _switch(self, thinking: bool) -> None:
        self._thinking = thinking
        if self.show_thinking:
            # On one stream nothing but the markers would tell thinking from answer where there are no colours.
            dim, plain = (_DIM, _PLAIN) if self._colours else ("<think>\n", "\n</think>")
            write(dim if thinking else f"{plain}\n\n", from_model=False)
        elif self.interactive and self._colours:
            write(f"{_DIM}(thinking ...){_PLAIN}" if thinking else _CLEAR_LINE, from_model=False)
        elif self.interactive and thinking:
            write("(thinking ...)\n")

    def note(self, text: str) -> None:
        """Something about the conversation that the model did not say."""
        text = printable(text)
        if not self.interactive:
            print(f"zaya chat: {text}", file=sys.stderr)
        else:
            print(f"{_DIM}({text}){_PLAIN}" if self._colours else f"({text})", flush=True)


def read_message(read_line: Callable[[bool], str | None]) -> str | None:
    """A message of one line or several: a line that ends with a backslash goes on in the next one, and what stands
    between two times three double quotes is one message.

    Args:
        read_line: gives a line without its end, None when there are no more; is told whether it begins a message.

    Returns:
        None when there is nothing more.
    """
    line = read_line(True)
    if line is None:
        return None
    lines = []
    if line.lstrip().startswith('"""'):
        line = line.lstrip()[3:]
        while not line.rstrip().endswith('"""'):
            lines.append(line)
            more = read_line(False)
            if more is None:
                return "\n".join(lines).strip("\n")
            line = more
        return "\n".join([*lines, line.rstrip()[:-3]]).strip("\n")
    while line.endswith("\\"):
        lines.append(line[:-1])
        more = read_line(False)
        if more is None:
            return "\n".join(lines)
        line = more
    return "\n".join([*lines, line])


def lines_of_terminal() -> Callable[[bool], str | None]:
    """Lines that somebody types, with line editing where Python has it."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # importing it is what gives input() its editing

    def read_line(first: bool) -> str | None:
        try:
            return input("> " if first else ". ")
        except EOFError:
            return None

    return read_line


def lines_of_standard_input() -> Callable[[bool], str | None]:
    """Lines of a pipe or a file.

    The function raises ValueError for one that is not UTF-8.
    """
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    numbered = enumerate(sys.stdin.buffer, start=1)

    def read_line(first: bool) -> str | None:
        number, line = next(numbered, (0, b""))
        if not number:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input, line {number} is not UTF-8 text (byte {error.start})") from None

    return read_line


@contextmanager
def ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is only noted, for the returned function to tell; the second interrupts as usual."""
    pressed: list[bool] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: Python delivers no signals here
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
