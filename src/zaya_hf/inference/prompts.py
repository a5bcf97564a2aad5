"""The prompts of `zaya generate`: from options, files, lists of prompts and standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .chat_template import Message

STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class Prompt:
    """One prompt: text, or the messages of a chat.

    Attributes:
        origin: where it came from, for messages about it.
        extra: what else its line of a JSON Lines file holds; it goes into the result as it is.
    """

    origin: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def decoded(data: bytes, origin: str) -> str:
    """UTF-8 text, without a byte order mark.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin} is not UTF-8 text (byte {error.start})") from None


def _read(path: Path) -> tuple[str, str]:
    """The text of a file or of standard input, and its name."""
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise ValueError("standard input is closed")
        return decoded(sys.stdin.buffer.read(), "standard input"), "standard input"
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    return decoded(path.read_bytes(), str(path)), str(path)


def _plain(text: str, origin: str) -> Prompt:
    if not text.strip():
        raise ValueError(f"the prompt from {origin} is empty")
    return Prompt(origin, text=text)


def given_prompts(texts: Sequence[str]) -> list[Prompt]:
    """The prompts of the option `--prompt`.

    Raises:
        ValueError: one is empty or only white space.
    """
    return [_plain(text, "--prompt" if len(texts) == 1 else f"--prompt {n}") for n, text in enumerate(texts, start=1)]


def whole_file(path: Path) -> Prompt:
    """A file, or standard input, as one prompt. Editors and `echo` end a text with a newline that nobody typed for the
    model: the last one is left out.

    Raises:
        ValueError: it is empty or only white space, not there, or not UTF-8.
    """
    text, origin = _read(path)
    return _plain(text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text, origin)


def list_of_prompts(path: Path, json_lines: bool) -> list[Prompt]:
    """A file, or standard input, with one prompt on each line.

    Args:
        json_lines: each line is a JSON string, or an object with "prompt" or "messages" (and anything else).

    Raises:
        ValueError: naming file and line.
    """
    text, origin = _read(path)
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise ValueError(f"there are no prompts in {origin}")
    read: Callable[[str, str], Prompt] = _json_prompt if json_lines else _plain
    return [read(line.removesuffix("\r"), f"{origin}, line {n}") for n, line in enumerate(lines, start=1)]


def _json_prompt(line: str, origin: str) -> Prompt:
    if not line.strip():
        raise ValueError(f"{origin}: the line is empty")
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{origin}: not JSON: {error.msg} (column {error.colno})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError(f'{origin}: expected a string, or an object with either "prompt" or "messages"')
    extra = {name: content for name, content in value.items() if name not in ("prompt", "messages")}
    if "messages" in value:
        messages = checked_messages(value["messages"], origin)
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{origin}: the last message is the assistant's; there is nothing to answer")
        return Prompt(origin, messages=tuple(messages), extra=extra)
    prompt = value["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'{origin}: "prompt" must be text that is not empty')
    return Prompt(origin, text=prompt, extra=extra)


def checked_messages(value: Any, origin: str) -> list[Message]:
    """The messages of a chat as chat templates take them: objects with the texts "role" and "content".

    Raises:
        ValueError: naming the message.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{origin}: expected a list of messages that is not empty")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"{origin}: message {number} is not an object")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f'{origin}: message {number} has no text "{name}"')
    return value
