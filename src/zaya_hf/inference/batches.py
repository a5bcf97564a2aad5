"""Texts for many prompts: left-padded batches of prompts of like length, each text as if it were made alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from zaya_hf.modeling_zaya import ZayaForCausalLM

from .model_folder import end_tokens
from .row_watch import Row, RowWatch
from .sampling import RowSampler, greedy_settings, seed_of


@dataclass(frozen=True)
class Request:
    """A text to be made.

    Attributes:
        index, sample: which prompt, and which of its texts, both from 0. With the seed they decide what is drawn.
        ids: the prompt's tokens.
        limit: new tokens at most.
        skip: ids that are not shown.
    """

    index: int
    sample: int
    ids: Sequence[int]
    limit: int
    skip: frozenset[int]


@dataclass(frozen=True)
class Completion:
    """The text of a request.

    Attributes:
        tokens: the new ones, an end-of-text token included.
        finish_reason: "eos", "stop" (a stop string) or "length".
    """

    text: str
    tokens: list[int]
    finish_reason: str


class BatchGenerator:
    """Makes texts with one model.

    Args:
        overrides: what the folder's generation config is overridden with.
        seed: for sampling.
        stop: strings that end a text.
        beams: of beam search; 1 is none.
    """

    def __init__(
        self,
        model: ZayaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        overrides: dict[str, Any],
        seed: int,
        stop: Sequence[str] = (),
        beams: int = 1,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.seed, self.stop, self.beams = seed, tuple(stop), beams
        self.config = GenerationConfig.from_dict(model.generation_config.to_dict())
        self.config.update(**overrides)
        self._ends = end_tokens(model)
        pad = tokenizer.pad_token_id
        self._pad = min(self._ends, default=0) if pad is None else pad

    def batches(self, requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
        """Requests in batches of like length, the longest first: what does not fit into memory fails at once."""
        # A beam search ends by the batch's limit and not row by row, so one batch has one limit.
        key: Callable[[Request], tuple[int, ...]] = lambda r: (r.limit if self.beams > 1 else 0, len(r.ids))  # noqa: E731
        batch: list[Request] = []
        for request in sorted(requests, key=key, reverse=True):
            if batch and (len(batch) == size or key(batch[0])[0] != key(request)[0]):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def run(self, batch: Sequence[Request], on_text: Callable[[str], None] | None = None) -> list[Completion]:
        """The texts of the requests of one batch.

        Args:
            on_text: for a batch of one: is called with every piece of text when it is there.
        """
        width = max(len(request.ids) for request in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, width - len(request.ids) :] = 1
        inputs: dict[str, Any] = {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
        if self.beams > 1:
            return self._beams(batch, inputs)
        rows = [
            Row(
                self.tokenizer, request.limit, self._ends, request.skip, self.stop, on_text if len(batch) == 1 else None
            )
            for request in batch
        ]
        processors = LogitsProcessorList()
        if self.config.do_sample:
            seeds = [seed_of(self.seed, request.index, request.sample) for request in batch]
            generators = [torch.Generator(self.model.device).manual_seed(seed) for seed in seeds]
            processors.append(RowSampler(self.config, generators))
        self.model.generate(
            **inputs,
            **self._lengths(batch),
            **greedy_settings(),
            num_beams=1,
            num_return_sequences=1,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([RowWatch(rows)]),
        )
        return [Completion(row.text, row.tokens, row.finish_reason or "length") for row in rows]

    def _beams(self, batch: Sequence[Request], inputs: dict[str, Any]) -> list[Completion]:
        settings = {"do_sample": True} if self.config.do_sample else greedy_settings()
        torch.manual_seed(seed_of(self.seed, batch[0].index))
        sampling = {name: getattr(self.config, name) for name in ("temperature", "top_k", "top_p")}
        output = self.model.generate(
            **inputs,
            **self._lengths(batch),
            **(sampling | settings),
            num_beams=self.beams,
            num_return_sequences=1,
        )
        completions = []
        for request, sequence in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            row = Row(self.tokenizer, request.limit, self._ends, request.skip, self.stop)
            for token in sequence:
                row.push(token)
            row.finish("length")
            completions.append(Completion(row.text, row.tokens, row.finish_reason or "length"))
        return completions

    def _lengths(self, batch: Sequence[Request]) -> dict[str, Any]:
        longest = max(request.limit for request in batch)
        # The tokenizer is for stop strings that the folder's generation config may have.
        return {"max_new_tokens": longest, "pad_token_id": self._pad, "tokenizer": self.tokenizer}
