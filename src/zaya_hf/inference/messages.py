"""Conversations in files: JSON lists of messages, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zaya_hf import atomic

from .chat_template import Message
from .prompts import checked_messages, decoded
from .text_stream import ThinkingSplitter, split_thinking


def read_conversation(path: Path) -> list[Message]:
    """The messages in a file: system prompt, if any, then user and assistant by turns.

    Thinking that stands in an answer between markers is taken out of it, into "reasoning_content".

    Raises:
        ValueError: it is not a conversation that could go on; the message names the place.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        value = json.loads(decoded(path.read_bytes(), str(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    if value == []:
        return []
    messages = [dict(message) for message in checked_messages(value, str(path))]
    first = int(messages[0]["role"] == "system")
    for number, message in enumerate(messages[first:]):
        wanted = ("user", "assistant")[number % 2]
        if message["role"] != wanted:
            raise ValueError(f"{path}: message {first + number + 1} is of {message['role']!r}, expected {wanted!r}")
        if wanted == "assistant" and message["content"].lstrip().startswith(ThinkingSplitter.OPEN):
            thinking, message["content"] = split_thinking(message["content"])
            message["reasoning_content"] = thinking
    if (len(messages) - first) % 2:
        raise ValueError(f"{path}: the last message has no answer; remove it, and say it in the chat")
    return messages


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Write the messages in the place of an older file, whole or not at all.

    Raises:
        OSError: it cannot be written; an older file stays as it is.
    """
    atomic.write_json(path, list(messages))


def check_replaceable(path: Path) -> None:
    """Refuse to overwrite a file that is no conversation.

    Raises:
        ValueError: it says so.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if path.exists():
        try:
            read_conversation(path)
        except ValueError:
            raise ValueError(f"{path} exists already and is no conversation: name another file") from None
