"""Items for lm-eval out of a run's held-out documents: the same files from the same documents and tokenizer.

bits.jsonl       {"text"}: whole documents
next_line.jsonl  {"question", "choices", "answer"}: the beginning of a document, and the line that follows it among
                 three lines of other documents
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..atomic import write_text
from .data.documents import TokenDocuments, hashes

__all__ = ["write_items"]

_TEXTS = 64  # documents
_TEXT_BYTES = 200_000  # of them together
_QUESTIONS = 200
_WRONG = 3  # choices
_LINE_CHARACTERS = range(12, 121)
_LINES_BEFORE = 1  # at least


class _Line(NamedTuple):
    before: tuple[str, ...]  # the lines before it
    text: str


def write_items(
    folder: Path, documents: Sequence[TokenDocuments], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, int]:
    """Write both files to `folder`; the number of items of each.

    Args:
        documents: the held-out documents of each source.
        tokenizer: that they were tokenised with.
        max_length: tokens that a question and a choice have together at most.

    Raises:
        ValueError: the documents give no items: too few, too short, conversations, or other than text.
    """
    texts = list(_texts(documents, tokenizer))
    items = {"bits": list(_whole(texts)), "next_line": list(_questions(texts, tokenizer, max_length))}
    for name, found in items.items():
        if not found:
            raise ValueError(
                f"too little held-out text for evaluation.lm_eval: {len(texts)} documents of text give no item for "
                f"{name}.jsonl; hold out more (data.held_out_fraction, data.held_out), or name tasks with other items"
            )
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found)
        write_text(folder / f"{name}.jsonl", lines)
    return {name: len(found) for name, found in items.items()}


def _texts(sources: Sequence[TokenDocuments], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Texts in the order of their hashes, over all sources; those that are not all text are left out."""
    special = np.array(sorted(tokenizer.all_special_ids))
    order = sorted(
        (int(value), number, document)
        for number, source in enumerate(sources)
        if source.target_shards is None  # conversations
        for document, value in enumerate(hashes(source).tolist())
    )
    for _, number, document in order[: 20 * _TEXTS]:
        ids = np.asarray(sources[number].tokens(document))
        text = str(tokenizer.decode(ids[~np.isin(ids, special)].tolist(), clean_up_tokenization_spaces=False))
        if text.strip() and "\ufffd" not in text:
            yield text


def _whole(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    size, found = 0, 0
    for text in texts:
        size += len(text.encode())
        if size <= _TEXT_BYTES or not found:
            found += 1
            yield {"text": text}
        if found == _TEXTS or size >= _TEXT_BYTES:
            return


def _questions(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Iterator[dict[str, Any]]:
    """One question of each document: the line in the middle of those that can be asked for."""
    asked: list[_Line] = []
    for text in texts:
        lines = text.split("\n")
        able = [i for i in range(_LINES_BEFORE, len(lines)) if len(lines[i].strip()) in _LINE_CHARACTERS]
        if able:
            place = able[len(able) // 2]
            asked.append(_Line(tuple(lines[:place]), lines[place].rstrip()))
    found = 0
    for number, line in enumerate(asked):
        others = {other.text for other in asked} - {line.text}
        # Of like length, so that length tells little.
        nearest = sorted(others, key=lambda text: (abs(len(text) - len(line.text)), text))[:_WRONG]
        if len(nearest) < _WRONG:
            continue
        answer = number % (_WRONG + 1)
        choices = [*nearest[:answer], line.text, *nearest[answer:]]
        longest = max(len(ids) for ids in tokenizer(["\n" + choice for choice in choices]).input_ids)
        question = _fitting(line.before, tokenizer, max_length - longest)
        if question:
            yield {"question": question, "choices": choices, "answer": answer}
            found += 1
        if found == _QUESTIONS:
            return


def _fitting(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """As many of the last lines as have at most so many tokens, one to spare; "" if too few do."""
    for first in range(max(0, len(lines) - 40), len(lines) - _LINES_BEFORE + 1):
        text = "\n".join(lines[first:]).rstrip()
        if text and len(tokenizer(text).input_ids) < tokens:
            return text
    return ""
