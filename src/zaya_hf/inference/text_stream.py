"""From tokens that come one by one to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are no whole character yet
_LONGEST_WINDOW = 64  # tokens that are decoded again at most, when a model writes bytes that never become text

# C0 and C1 but for newline and tab: with them a text could move the cursor, recolour, retitle or paste.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with control characters written out (``\\x1b``), so that a terminal shows them and does not obey."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\r\n", "\n"))


class TextStream:
    """Text of tokens that arrive one at a time. All parts together are what decoding all tokens at once gives.

    Args:
        skip: ids without text of their own, such as an end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: Collection[int] = ()):
        self._tokenizer, self._skip = tokenizer, frozenset(skip)
        self._ids: list[int] = []
        # Only a window is decoded: from the last but one place where the text was whole, since some tokenizers write a
        # token differently at the start of a text.
        self._start = self._whole = self._shown = 0

    def _decode(self, ids: list[int]) -> str:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        # All of it waits: a tokenizer with byte fallback shows a whole run of bytes so until the last one is there.
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._whole <= _LONGEST_WINDOW:
            return self._show(text, len(text.rstrip(_INCOMPLETE)))
        new = self._show(text, len(text))
        if new:
            self._start, self._whole = self._whole, len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        return new

    def end(self) -> str:
        """What was held back: bytes that did not become a character."""
        text = self._decode(self._ids[self._start :])
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new = text[self._shown : end]
        self._shown += len(new)
        return new


def _begun(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that one of the markers begins with."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


class StopStrings:
    """Lets text through up to the first stop string. What could be the beginning of one waits for the next text."""

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = tuple(strings), ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = _begun(text, self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        held, self._held = self._held, ""
        return held


class ThinkingSplitter:
    """Tells a model's thinking from its answer in text that comes in parts.

    A model that opens its thinking itself does so first; later on the marker is a word of the answer like any other.

    Args:
        thinking: whether the prompt has opened the thinking already, as some chat templates do.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, thinking: bool = False):
        self._state = "thinking" if thinking else "start"
        self._held, self._strip = "", thinking

    @property
    def is_thinking(self) -> bool:
        """Whether the text has stopped inside the thinking."""
        return self._state == "thinking"

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Parts of the text so far, each with whether it is thinking. Markers and the white space behind them are left
        out; what may be the beginning of a marker waits for the next text."""
        text, self._held, parts = self._held + text, "", []
        while text:
            if self._state == "start":
                body = text.lstrip()
                if body.startswith(self.OPEN):
                    self._state, self._strip, text = "thinking", True, body[len(self.OPEN) :]
                elif self.OPEN.startswith(body):
                    self._held, text = text, ""
                else:
                    self._state = "answer"
            elif self._state == "thinking" and self.CLOSE in text:
                thought, _, text = text.partition(self.CLOSE)
                parts += self._part(thought)
                self._state, self._strip = "answer", True
            else:
                held = _begun(text, [self.CLOSE]) if self._state == "thinking" else 0
                self._held = text[len(text) - held :]
                parts += self._part(text[: len(text) - held])
                text = ""
        return parts

    def end(self) -> list[tuple[bool, str]]:
        """What waited for more text."""
        held, self._held = self._held, ""
        return self._part(held)

    def _part(self, text: str) -> list[tuple[bool, str]]:
        text = text.lstrip() if self._strip else text
        self._strip = self._strip and not text
        return [(self.is_thinking, text)] if text else []


def split_thinking(text: str, thinking: bool = False) -> tuple[str | None, str]:
    """Thinking and answer of a whole text. The thinking is None where there is none; the answer is empty where the text
    ends inside the thinking: half a thought is not an answer."""
    splitter = ThinkingSplitter(thinking)
    parts = splitter.push(text) + splitter.end()
    thought = "".join(part for is_thinking, part in parts if is_thinking).rstrip()
    answer = "".join(part for is_thinking, part in parts if not is_thinking)
    return thought or None, answer
