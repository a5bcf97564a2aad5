"""Conversations with a small model that begins every answer in a given way. Helpers for the tests of chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from zaya_hf import ZayaForCausalLM
from zaya_hf.inference.chat_template import ChatTemplate
from zaya_hf.inference.conversation import Answer, Conversation

GREEDY = {"do_sample": False}
#: of answers, in tokens
LENGTH = 18


class Script(LogitsProcessor):
    """Makes the model say given tokens first, in every answer; then it goes on by itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.left: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.left:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.left.pop(0)]), 0.0)


class Talk:
    """Conversations with one model and template, and what they say first in every answer."""

    def __init__(self, model: ZayaForCausalLM, tokenizer: PreTrainedTokenizerFast, template: str, opening: str):
        tokenizer.chat_template = template
        self.model, self.tokenizer, self.script = model, tokenizer, Script()
        self.opening = tokenizer(opening, add_special_tokens=False)["input_ids"]
        self.template = ChatTemplate(tokenizer, Path("folder"))

    def conversation(self, **options: Any) -> Conversation:
        options = {"overrides": GREEDY, "max_new_tokens": LENGTH, "processors": [self.script]} | options
        return Conversation(self.model, self.tokenizer, self.template, **options)

    def ask(self, conversation: Conversation, text: str, **options: Any) -> Answer:
        self.script.left = list(self.opening)
        return conversation.ask(text, **options)

    def fresh(self, conversation: Conversation, text: str) -> Answer:
        """The answer of a conversation that has computed nothing yet."""
        return self.ask(self.conversation(messages=conversation.messages), text)
