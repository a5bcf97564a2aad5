"""A tokenizer's chat template, and what it does about thinking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .text_stream import ThinkingSplitter

Message = dict[str, Any]

#: the variable of the template that switches thinking on and off
THINKING_VARIABLE = "enable_thinking"


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        thinking: whether the model is to think first; None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no chat template, or one that cannot switch thinking as asked.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: Path, thinking: bool | None = None):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer in {folder} has no chat template: it is not of a chat model. Continue plain text with "
                f"`zaya generate {folder} --prompt ...`, or put the model's chat_template.jinja into the folder"
            )
        self._tokenizer = tokenizer
        self.switches_thinking = THINKING_VARIABLE in tokenizer.get_chat_template()
        self.thinking: bool | None = None
        self.set_thinking(thinking)

    def set_thinking(self, thinking: bool | None) -> None:
        """Switch thinking on or off from here on.

        Raises:
            ValueError: the template has no such switch.
        """
        if thinking is not None and not self.switches_thinking:
            raise ValueError(f"the chat template has no {THINKING_VARIABLE}: thinking cannot be switched on or off")
        self.thinking = thinking

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """The text that the model is given for the messages.

        Raises:
            ValueError: the template refuses them; the message has its reason.
        """
        return str(self._apply(messages, add_generation_prompt=generation_prompt, tokenize=False))

    def encode(self, messages: Sequence[Message], generation_prompt: bool = True) -> list[int]:
        """The ids that the model is given for the messages. What is in a message is text: the name of a control token
        that somebody writes there does not end a turn.

        Raises:
            ValueError: as `render`.
        """
        encoded = self._apply(
            messages,
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=True,
            sanitize_control_tokens=True,
        )
        return list(encoded["input_ids"])

    def opens_thinking(self, messages: Sequence[Message]) -> bool:
        """Whether the template itself writes the beginning of the thinking, which the model then goes on with."""
        before, after = self.render(messages, generation_prompt=False), self.render(messages)
        added = after[len(before) :] if after.startswith(before) else after
        return added.rfind(ThinkingSplitter.OPEN) > added.rfind(ThinkingSplitter.CLOSE)

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        if self.thinking is not None:
            options[THINKING_VARIABLE] = self.thinking
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError, KeyError) as error:  # what templates raise for messages they do not know
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses this conversation: {reason}") from error


def hidden_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of special tokens that are no text of an answer: all but the markers around thinking."""
    markers = {tokenizer.convert_tokens_to_ids(m) for m in (ThinkingSplitter.OPEN, ThinkingSplitter.CLOSE)}
    return set(tokenizer.all_special_ids) - markers
