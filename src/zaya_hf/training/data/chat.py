"""Conversations as token ids, with a mark on those that the model is to say itself.

What is marked is what the model would generate: in a turn of the assistant, everything after the header with which the
chat template asks for it, up to and with the token that ends the turn. A template can say so itself, with
``{% generation %}`` blocks; for others, the conversation is rendered with and without the turn and compared.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..config import ChatConfig
from .thinking import REASONING_FIELDS, trimmed

__all__ = ["encode_conversation"]

Message = dict[str, Any]
Span = tuple[int, int]

# Characters that no text has (Unicode noncharacters); they are removed from what is given.
_OPEN, _CLOSE, _STAND_IN = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat: ChatConfig, max_length: int | None = None
) -> tuple[list[int], list[bool]] | None:
    """The ids of a conversation and which of them are targets.

    The ids are those of `tokenizer.apply_chat_template`, so special tokens come from the template alone: the beginning
    token is there as often as the template writes it. In messages that are not the assistant's, the names of control
    tokens are text, as in `zaya chat`. The text is cut into ids at the borders of what is a target: as in generation,
    no id spans the header and the answer.

    A conversation of more than `max_length` ids is shortened by AP-trimming (arXiv 2605.05365, section III-A):

    1. The end of the last block of thinking is cut off, as little as is needed, so that the answer stays whole.
    2. If no token of the block could stay, the blocks before it are left out, and 1 is tried again if needed.
    3. If that is not enough, the conversation is dropped.

    Args:
        tokenizer: with a chat template.
        messages: each with `role` and `content`, or what else the template knows.
        chat: which turns are targets; what marks thinking; whether to trim. Thinking is what stands between the markers
            in messages of the assistant, or what they have as `reasoning_content`, `thinking` or `reasoning`. It comes
            first in a message; a block that never ends is not one.
        max_length: in ids; None: any.

    Returns:
        ids, and for each whether it is a target; None for a conversation that is dropped, and for one without a target.

    Raises:
        ValueError: the tokenizer has no chat template, the template refuses the messages, or it does not show where a
            turn begins and ends.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: conversations (data.chat) cannot be rendered.")
    _check(messages)
    renderer = _renderer(tokenizer, tokenizer.get_chat_template(), chat)
    encoded = renderer.encode(messages)
    if max_length is not None and len(encoded[0]) > max_length:
        if not chat.trim_thinking:
            return None
        shorter = trimmed(messages, chat, tokenizer, renderer, max_length)
        if shorter is None:
            return None
        encoded = renderer.encode(shorter)
    return encoded if any(encoded[1]) else None


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("a conversation has no messages.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} of a conversation is {message!r:.80}; expected a dict with a role.")


@functools.lru_cache(maxsize=4)  # looking through thousands of added tokens takes longer than a conversation
def _renderer(tokenizer: PreTrainedTokenizerBase, template: str, chat: ChatConfig) -> _Renderer:
    return _Renderer(tokenizer, template, chat)


class _Renderer:
    """Renders messages with a tokenizer's template and turns the text into ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, chat: ChatConfig):
        self._tokenizer, self._template, self._chat = tokenizer, template, chat
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
        control = [t.content for t in tokens if t.special or t.content in self._template]
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._ends_turn = re.compile(f"(?:{self._control.pattern})(\\s+)\\Z")
        self._newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)

    def length(self, messages: Sequence[Message]) -> int:
        return len(self.encode(messages)[0])

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        messages = [self._safe(message) for message in messages]
        text, spans = self._text_and_spans(messages)
        ids: list[int] = []
        mask: list[bool] = []
        place = 0
        for start, stop, is_target in [*((a, b, True) for a, b in spans), (len(text), len(text), False)]:
            for piece, target in ((text[place:start], self._chat.train_on == "all"), (text[start:stop], is_target)):
                new = self._ids(piece, at_start=not ids)
                ids += new
                mask += [target] * len(new)
            place = stop
        return ids, mask

    def opens_thinking(self, messages: Sequence[Message]) -> bool:
        """Whether the template's own request for an answer to `messages` begins its thinking."""
        return self._render([self._safe(m) for m in messages], ask=True).rstrip().endswith(self._chat.think_start)

    # --- text -------------------------------------------------------------------------------------------------------
    def _safe(self, message: Message) -> Message:
        """Control tokens between marks in what others than the assistant say; see `_ids`."""
        own = message["role"] == "assistant"

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                value = re.sub(f"[{_OPEN}-{_STAND_IN}]", "", value)
                return value if own else self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
            if isinstance(value, Mapping):
                return {name: walk(item) for name, item in value.items()}
            return [walk(item) for item in value] if isinstance(value, (list, tuple)) else value

        return {name: item if name == "role" else walk(item) for name, item in message.items() if item is not None}

    def _render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of `messages`; with `ask`, and the header that asks for an answer."""
        return self._apply(messages, add_generation_prompt=ask)[0]

    def _apply(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Span]]:
        render: Any = render_jinja_template  # its annotations are those of one of its two results
        try:
            texts, spans = render(
                conversations=[list(messages)],
                chat_template=self._template,
                **self._tokenizer.special_tokens_map,
                **options,
            )
        except (TemplateError, TypeError, KeyError) as error:  # what templates raise for messages they do not know
            raise ValueError(f"the chat template refuses a conversation: {' '.join(str(error).split())}") from error
        return texts[0], [(a, b) for a, b in spans[0]] if spans else []

    def _text_and_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The whole text, and what of it is a target, in order and apart."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._chat.train_on == "all" or not turns:
            return self._render(messages), []
        if _GENERATION.search(self._template):
            text, spans = self._apply(messages, return_assistant_tokens_mask=True)
            if self._chat.train_on == "last_assistant":
                # A turn may have several blocks; they come after everything that comes before the turn.
                before = self._render(messages[: turns[-1]]) if turns[-1] else ""
                spans = [span for span in spans if span[0] >= len(before)] if text.startswith(before) else spans[-1:]
            return text, spans
        text = self._render(messages)
        chosen = turns[-1:] if self._chat.train_on == "last_assistant" else turns
        return text, [self._turn(text, messages, i) for i in chosen]

    def _turn(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Where in `text`, all messages rendered, is what the assistant says in message `index`."""
        before = self._render(messages[:index], ask=True) if index else self._render_header(messages, index)
        until = self._render(messages[: index + 1])
        start, stop = len(before), len(until)
        if not (text.startswith(before) and text.startswith(until)):
            # The template writes a turn in another way once it is history: without thinking, say.
            stand_in = {name: item for name, item in messages[index].items() if name not in REASONING_FIELDS}
            other = [*messages[:index], {**stand_in, "content": _STAND_IN}, *messages[index + 1 :]]
            whole, part = self._render(other), self._render(other[: index + 1])
            head, found, rest = whole.partition(_STAND_IN)
            tail = part.partition(_STAND_IN)[2]
            if not (found and text.endswith(rest) and rest.startswith(tail)):
                raise ValueError(self._unclear(index))
            stop = len(text) - len(rest) + len(tail)
            if not text.startswith(before):
                if not text.startswith(head):
                    raise ValueError(self._unclear(index))
                start = len(head)
        ended = self._ends_turn.search(text[start:stop])
        if ended:  # white space after the token with which the model stops
            stop -= len(ended[1])
        if stop <= start:
            raise ValueError(self._unclear(index))
        return start, stop

    def _render_header(self, messages: Sequence[Message], index: int) -> str:
        """What precedes the content of a conversation's first message: templates need not render nothing."""
        other = [{**messages[index], "content": _STAND_IN}]
        return self._render(other).partition(_STAND_IN)[0]

    def _unclear(self, index: int) -> str:
        return (
            f"the chat template does not show where message {index} (assistant) begins and ends: give it "
            "{% generation %} blocks around what the assistant says, or use data.chat.train_on: all."
        )

    # --- ids --------------------------------------------------------------------------------------------------------
    def _ids(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of a piece of the rendered text; what is between marks is text, whatever token it names."""
        ids: list[int] = []
        for number, piece in enumerate(_MARKED.split(text)):
            if not piece:
                continue
            if number % 2 == 0:
                ids += self._piece(piece, at_start and not ids)
                continue
            plain = self._piece(piece, at_start and not ids, split_special_tokens=True)
            if self._tokenizer.convert_tokens_to_ids(piece) in plain:  # an added token that is not special
                plain = self._piece(piece[:1], at_start and not ids) + self._piece(piece[1:], False)
            ids += plain
        return ids

    def _piece(self, piece: str, at_start: bool, **options: Any) -> list[int]:
        if not at_start:
            # After a newline, which is taken off again: some tokenizers put a space before the first word of a text.
            after: list[int] = self._tokenizer.encode("\n" + piece, add_special_tokens=False, **options)
            if after[: len(self._newline)] == self._newline:
                return after[len(self._newline) :]
        ids: list[int] = self._tokenizer.encode(piece, add_special_tokens=False, **options)
        return ids
