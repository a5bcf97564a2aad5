"""A conversation with a model: its messages, and the next answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from zaya_hf.modeling_zaya import ZayaForCausalLM

from .chat_template import ChatTemplate, Message, hidden_tokens
from .model_folder import end_tokens
from .prompt_cache import PromptCache, common
from .row_watch import Row, RowWatch
from .sampling import RowSampler, greedy_settings
from .text_stream import ThinkingSplitter

#: called with every piece of an answer, and whether it is thinking
OnText = Callable[[bool, str], None]


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        content: the answer without the thinking; empty if it never came to one.
        thinking: None if there was none.
        finish_reason: "eos", "stop", "length" or "interrupted".
        kept: whether the turn is in the conversation now. One without an answer is not.
        prompt_tokens, cached_tokens: of the prompt, and how many of those needed no computing.
        new_tokens: the answer's ids.
        left_out: earlier messages that did not fit into the context and were not read.
    """

    content: str
    thinking: str | None
    finish_reason: str
    kept: bool
    prompt_tokens: int
    cached_tokens: int
    new_tokens: list[int]
    left_out: int
    seconds: float


class Conversation:
    """Messages, and a model that answers them. The messages change only when an answer is complete.

    Args:
        template: the tokenizer's chat template.
        overrides: what the folder's generation config is overridden with.
        seed: for sampling; later answers go on with the same stream of random numbers.
        max_new_tokens: of one answer, thinking included; None: to the end of the context.
        stop: strings that end an answer.
        messages: to go on with.
        processors: applied to the logits before the next token is chosen.
    """

    def __init__(
        self,
        model: ZayaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        *,
        overrides: dict[str, Any],
        seed: int = 0,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        messages: Sequence[Message] = (),
        processors: Sequence[Any] = (),
    ):
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.messages: list[Message] = list(messages)
        self.max_new_tokens, self._stop = max_new_tokens, tuple(stop)
        self.positions = model.config.max_position_embeddings
        self._cache = PromptCache(model)
        self._left_out = 0
        self._ends, self._hidden = end_tokens(model), hidden_tokens(tokenizer)
        config = GenerationConfig.from_dict(model.generation_config.to_dict())
        config.update(**overrides)
        self._processors = list(processors)
        if config.do_sample:
            self._processors.append(RowSampler(config, [torch.Generator(model.device).manual_seed(seed)]))

    # ----------------------------------------------------------------------------------------------------- messages
    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[self.system is not None :]
        self.messages = ([] if text is None else [{"role": "system", "content": text}]) + rest

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = self.messages[: self.system is not None]
        self._left_out = 0
        self._cache.clear()

    def undo(self) -> str | None:
        """Take back the last message and its answer. Returns the message; None if there is none."""
        starts = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not starts:
            return None
        text: str = self.messages[starts[-1]]["content"]
        del self.messages[starts[-1] :]
        return text

    # ------------------------------------------------------------------------------------------------------- answers
    def ask(
        self, text: str, on_text: OnText = lambda thinking, text: None, interrupted: Callable[[], bool] = lambda: False
    ) -> Answer:
        """The answer to a message.

        An answer that was interrupted or cut off is kept as far as it came; one that was still thinking is no answer,
        and its turn is not kept.

        Raises:
            ValueError: the message is too long, empty, or the template refuses it; nothing has changed.
        """
        started = time.perf_counter()
        message = {"role": "user", "content": text}
        read, ids, left_out = self._fitting(message)
        lasting = min(common(ids, self.template.encode(read, generation_prompt=False)), len(ids) - 1)
        limit = self.positions - len(ids)
        splitter = ThinkingSplitter(self.template.opens_thinking(read))
        parts: list[tuple[bool, str]] = []

        def take(new: list[tuple[bool, str]]) -> None:
            parts.extend(new)
            for part in new:
                on_text(*part)

        row = Row(
            self.tokenizer,
            limit if self.max_new_tokens is None else min(limit, self.max_new_tokens),
            self._ends,
            self._hidden,
            self._stop,
            lambda piece: take(splitter.push(piece)),
        )
        cache, cached = self._cache.prefill(ids, lasting, interrupted)
        if interrupted():
            row.finish("interrupted")
        else:
            self._generate(ids, cache, row, interrupted)
        take(splitter.end())

        thinking = "".join(part for is_thinking, part in parts if is_thinking).rstrip() or None
        content = "".join(part for is_thinking, part in parts if not is_thinking)
        answer: Message = {"role": "assistant", "content": content}
        if thinking is not None:
            answer["reasoning_content"] = thinking  # the name by which templates look for it, if they do
        kept = bool(content.strip())
        if kept:
            self.messages += [message, answer]
            self._left_out = left_out
        return Answer(
            content=content,
            thinking=thinking,
            finish_reason=row.finish_reason or "length",
            kept=kept,
            prompt_tokens=len(ids),
            cached_tokens=cached,
            new_tokens=row.tokens,
            left_out=left_out,
            seconds=time.perf_counter() - started,
        )

    def _generate(self, ids: list[int], cache: Any, row: Row, interrupted: Callable[[], bool]) -> None:
        inputs = torch.tensor([ids], device=self.model.device)
        self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            max_new_tokens=self.positions - len(ids),  # the row itself ends earlier
            pad_token_id=min(self._ends, default=0),
            num_beams=1,
            num_return_sequences=1,
            tokenizer=self.tokenizer,
            logits_processor=LogitsProcessorList(self._processors),
            stopping_criteria=StoppingCriteriaList([RowWatch([row], interrupted)]),
            **greedy_settings(),
        )
        self._cache.hold([*ids, *row.tokens], cache)

    def _fitting(self, message: Message) -> tuple[list[Message], list[int], int]:
        """The messages that the model reads, their tokens, and how many earlier ones it does not.

        When the context is full, the oldest turns are left out until it is half empty, so that the next turns can go
        on from what is cached. The system prompt stays.
        """
        head = self.messages[: self.system is not None]
        turns = self.messages[len(head) :]
        room = self.positions - min(self.max_new_tokens or self.positions // 4, self.positions // 2)
        enough = room
        left_out = min(self._left_out, len(turns))
        while True:
            read = [*head, *turns[left_out:], message]
            ids = self.template.encode(read)
            if not ids:
                raise ValueError("the chat template makes no token of this message")
            if len(ids) <= enough:
                return read, ids, left_out
            if left_out >= len(turns):
                break
            enough = self.positions // 2
            left_out += 1
            while left_out < len(turns) and turns[left_out]["role"] != "user":
                left_out += 1
        if len(ids) > room:
            raise ValueError(
                f"the message{' and the system prompt have' if head else ' has'} {len(ids)} tokens, and the model has "
                f"{self.positions} positions (max_position_embeddings): shorten it to {room} at most"
            )
        return read, ids, left_out
