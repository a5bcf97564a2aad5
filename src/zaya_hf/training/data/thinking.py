"""AP-trimming: conversations that are too long lose thinking, never an answer (arXiv 2605.05365, section III-A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ..config import ChatConfig

__all__ = ["REASONING_FIELDS", "trimmed"]

Message = dict[str, Any]

#: names under which a message may have its thinking beside its content, in the order in which templates look
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PROBES = 8  # of lengths guessed from the surplus, before the search turns to halving


class Renderer(Protocol):
    """What has to be known of the chat template."""

    def length(self, messages: Sequence[Message]) -> int:
        """Ids of the whole conversation."""

    def opens_thinking(self, messages: Sequence[Message]) -> bool:
        """Whether the request for an answer to `messages` begins its thinking."""


@dataclass(frozen=True)
class _Block:
    """One block of thinking: ``messages[message][field][start:stop]``, without markers and white space around it."""

    message: int
    field: str
    start: int
    stop: int
    end: int  # where what follows it begins, with the closing marker and white space left out

    def cut(self, messages: Sequence[Message], head: int) -> list[Message]:
        """The conversation with only the first `head` characters of the block."""
        text = messages[self.message][self.field]
        return self._with(messages, text[: self.start + head] + text[self.stop :])

    def left_out(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation without the block and its markers."""
        return self._with(messages, messages[self.message][self.field][self.end :])

    def _with(self, messages: Sequence[Message], text: str) -> list[Message]:
        changed = [dict(message) for message in messages]
        changed[self.message][self.field] = text
        return changed


def trimmed(
    messages: Sequence[Message],
    chat: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    max_length: int,
) -> list[Message] | None:
    """A conversation that is too long, made to fit by the rules that `encode_conversation` states.

    Returns:
        the conversation with the longest head of its last block with which it has at most `max_length` ids; None if no
        rule makes it fit.

    Raises:
        ValueError: a tokenizer that does not say where in the text its ids are.
    """
    blocks = list(_blocks(messages, chat, renderer))
    if not blocks:
        return None
    shorter = _cut(messages, blocks[-1], tokenizer, renderer, max_length)
    if shorter is not None or len(blocks) == 1:
        return shorter
    kept = list(messages)
    for block in blocks[:-1]:
        kept = block.left_out(kept)
    if renderer.length(kept) <= max_length:
        return kept
    return _cut(kept, blocks[-1], tokenizer, renderer, max_length)


def _blocks(messages: Sequence[Message], chat: ChatConfig, renderer: Renderer) -> Iterator[_Block]:
    """The blocks in order, at most one per message. In a content, it is what the content begins with: markers later on
    are something that an answer talks about."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        field = next((name for name in REASONING_FIELDS if isinstance(message.get(name), str)), None)
        if field is not None:
            yield from _block(number, field, message[field], 0, len(message[field]), len(message[field]))
            continue
        text = message.get("content")
        if not isinstance(text, str) or chat.think_end not in text:
            continue
        stop = text.index(chat.think_end)
        opening = text.find(chat.think_start)
        if 0 <= opening < stop:
            begins = not text[:opening].strip()
            start = opening + len(chat.think_start)
        else:
            begins, start = number > 0 and renderer.opens_thinking(messages[:number]), 0
        if begins:
            yield from _block(number, "content", text, start, stop, stop + len(chat.think_end))


def _block(message: int, field: str, text: str, start: int, stop: int, end: int) -> Iterator[_Block]:
    inner = text[start:stop]
    if inner.strip():
        stop -= len(inner) - len(inner.rstrip())
        start += len(inner) - len(inner.lstrip())
        end += len(text[end:]) - len(text[end:].lstrip())
        yield _Block(message, field, start, stop, end)


def _cut(
    messages: Sequence[Message],
    block: _Block,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    max_length: int,
) -> list[Message] | None:
    """The conversation with the longest head of `block` that fits, of one id at least and not all; None: none does.

    What is cut is text and the whole is rendered and tokenised again, so that the ids are those of the shorter text,
    also where they join over the cut. For that reason lengths are tried, not worked out.
    """
    if not tokenizer.is_fast:
        raise ValueError("AP-trimming needs a fast tokenizer (one that knows where in the text its tokens are).")
    thinking = messages[block.message][block.field]
    offsets = tokenizer(thinking[block.start : block.stop], add_special_tokens=False, return_offsets_mapping=True)
    heads = sorted({stop for _, stop in offsets["offset_mapping"] if 0 < stop < block.stop - block.start})

    def surplus(number: int) -> int:
        return renderer.length(block.cut(messages, heads[number])) - max_length

    if not heads or surplus(0) > 0:
        return None
    fits, too_long = 0, len(heads)
    probe = len(heads) - max(1, renderer.length(messages) - max_length)
    probes = 0
    while too_long - fits > 1:
        probes += 1
        if probes > _PROBES:
            probe = (fits + too_long) // 2
        probe = min(max(probe, fits + 1), too_long - 1)
        more = surplus(probe)
        if more <= 0:
            fits, probe = probe, probe + max(1, -more)
        else:
            too_long, probe = probe, probe - more
    return block.cut(messages, heads[fits])
