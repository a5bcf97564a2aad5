"""Follows the rows of a batch while `generate` makes them: their text, where each one ends, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from .text_stream import StopStrings, TextStream


class Row:
    """One text in the making.

    Args:
        limit: tokens at most.
        ends: ids that end a text.
        skip: ids that are not shown.
        stop: strings that end a text; they and what follows are not part of it.
        on_text: is called with every new piece of text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        ends: Collection[int],
        skip: Collection[int] = (),
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ):
        self._limit, self._ends, self._on_text = limit, frozenset(ends), on_text
        self._stream, self._stop = TextStream(tokenizer, {*skip, *ends}), StopStrings(stop)
        self.tokens: list[int] = []
        self.text = ""
        #: "eos", "stop", "length", "interrupted"; None while the text is being made
        self.finish_reason: str | None = None

    def push(self, token: int) -> None:
        if self.finish_reason is not None:
            return
        self.tokens.append(token)
        self._add(self._stop.push(self._stream.push(token)))
        if self._stop.found:
            self.finish("stop")
        elif token in self._ends:
            self.finish("eos")
        elif len(self.tokens) >= self._limit:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the text, unless it has ended."""
        if self.finish_reason is None:
            self._add(self._stop.push(self._stream.end()) + self._stop.end())
            self.finish_reason = "stop" if self._stop.found else reason

    def _add(self, text: str) -> None:
        self.text += text
        if text and self._on_text is not None:
            self._on_text(text)


class RowWatch(StoppingCriteria):
    """Stops every row of a batch when its `Row` has ended.

    Args:
        rows: one for each row of the batch.
        interrupted: is asked after every token; when it says yes, all rows end.
    """

    def __init__(self, rows: Sequence[Row], interrupted: Callable[[], bool] = lambda: False):
        self._rows, self._interrupted = rows, interrupted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """``[B, S]`` int64 ids, of which the last column is new, to ``[B]`` bool."""
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.push(token)
        if self._interrupted():
            for row in self._rows:
                row.finish("interrupted")
        ended = [row.finish_reason is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)
