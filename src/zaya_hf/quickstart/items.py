"""The quickstart's evaluation items, made from what no model trains on and written as JSON lines.

Minimal pairs as in BLiMP (Warstadt et al., 2020): the true text against copies of it in which two words have changed
places, so that length, words and frequencies are all the same and only their order tells.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from keyword import iskeyword
from pathlib import Path
from typing import Any

from zaya_hf.quickstart import arithmetic
from zaya_hf.quickstart.corpus import Corpus, Document, Kind, unit_hash

_PIECES_PER_KIND = 60
_PIECE_BYTES = 1000
_SHORTEST_PIECE = 600  # bytes
_PAIRS = 200
_FEWEST = 30  # items; fewer say nothing
# Characters. Even at one token for 1.3 of them an item fits into 128 tokens.
_SENTENCE_LENGTHS = range(60, 161)
_LINE_LENGTHS = range(20, 121)

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_PUNCTUATED_WORD = re.compile(rf"{_WORD.pattern}[,;:]?")
_TWICE = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)

Span = tuple[int, int]  # where a word begins and ends
Item = dict[str, Any]


def write_items(folder: Path, corpus: Corpus) -> dict[str, int]:
    """Write the five sets and the solved sums for prompts to `folder`; the number of items of each set.

    `bits.jsonl` has {"text"}; `prose.jsonl`, `code.jsonl`, `arithmetic_far.jsonl` and `arithmetic_near.jsonl` have
    {"choices", "answer"}, the latter two and `arithmetic_examples.jsonl` also {"question"}. `answer` is the index of
    the right choice.

    Raises:
        RuntimeError: the held-out files give too few items.
    """
    sets = {
        "bits": [*_pieces(corpus, "prose"), *_pieces(corpus, "code")],
        "prose": _pairs(corpus, "prose"),
        "code": _pairs(corpus, "code"),
        "arithmetic_far": [_sum(item, arithmetic.far_answers(item)) for item in arithmetic.HELD_OUT],
        "arithmetic_near": [_sum(item, arithmetic.near_answers(item)) for item in arithmetic.HELD_OUT],
    }
    for name, found in sets.items():
        if len(found) < _FEWEST:
            raise RuntimeError(
                f"too little held-out text for the evaluation: {len(found)} items for {name}.jsonl from the "
                f"{len(corpus.held_out)} held-out documents of {corpus.origin}, but {_FEWEST} are needed"
            )
    folder.mkdir(parents=True, exist_ok=True)
    examples = [_sum(item, []) for item in arithmetic.TRAINING]
    for name, found in (sets | {"arithmetic_examples": examples}).items():
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in found]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
    return {name: len(found) for name, found in sets.items()}


def _spread(parts: Iterable[list[Any]]) -> Iterator[Any]:
    """The first of every list, then the second of every list, and so on: evenly from all while they last."""
    for row in itertools.zip_longest(*parts):
        yield from (found for found in row if found is not None)


def _pieces(corpus: Corpus, kind: Kind) -> list[Item]:
    """Held-out documents in pieces that end where lines end, without those that training text has most of."""
    documents = [
        sorted(_cut(document.text), key=lambda piece: unit_hash(f"piece:{piece}"))
        for document in corpus.held_out
        if document.kind == kind
    ]
    unseen = (piece for piece in _spread(documents) if not _mostly_seen(corpus, piece))
    return [{"text": piece} for piece in itertools.islice(unseen, _PIECES_PER_KIND)]


def _cut(text: str) -> list[str]:
    pieces, piece, size = [], [], 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line.encode())
        if size >= _PIECE_BYTES:
            pieces.append("".join(piece))
            piece, size = [], 0
    if size >= _SHORTEST_PIECE:
        pieces.append("".join(piece))
    return [piece for piece in pieces if len(piece.encode()) < 2 * _PIECE_BYTES]  # not: a line that is a data table


def _mostly_seen(corpus: Corpus, piece: str) -> bool:
    """Whether training text has more than half of `piece`, by characters of lines long enough to be telling."""
    lines = [line.strip() for line in piece.splitlines()]
    seen = sum(len(line) for line in lines if len(line) >= 20 and corpus.trains_on(line))
    return 2 * seen > sum(map(len, lines))


def _pairs(corpus: Corpus, kind: Kind) -> list[Item]:
    """True texts of held-out documents with copies, each text once, none of which training text has."""
    documents = [_candidates(document) for document in corpus.held_out if document.kind == kind]
    items: dict[str, Item] = {}
    for text, words in _spread(documents):
        if text in items or corpus.trains_on(text):
            continue
        copies = list(itertools.islice((copy for copy in _swapped(text, words) if not corpus.trains_on(copy)), 3))
        if len(copies) == 3:
            items[text] = _shuffled(text, copies)
            if len(items) == _PAIRS:
                break
    return list(items.values())


def _candidates(document: Document) -> list[tuple[str, list[Span]]]:
    found = _sentences(document.text) if document.kind == "prose" else _code_lines(document.text)
    return sorted(found, key=lambda item: unit_hash(f"pair:{item[0]}"))


def _sentences(text: str) -> Iterator[tuple[str, list[Span]]]:
    """Sentences of plain words on one line each, with the words that may change places: all but first and last."""
    for paragraph in re.split(r"\n\s*\n", text):
        for part in _SENTENCE_END.split(paragraph):
            sentence = " ".join(part.split())
            words = sentence.removesuffix(".").split(" ")
            plain = sentence.endswith(".") and all(_PUNCTUATED_WORD.fullmatch(word) for word in words)
            if plain and sentence[0].isupper() and len(words) >= 8 and len(sentence) in _SENTENCE_LENGTHS:
                yield sentence, [match.span() for match in _WORD.finditer(sentence)][1:-1]


def _code_lines(source: str) -> Iterator[tuple[str, list[Span]]]:
    """Lines without strings and comments that have four or more names, of which two are no keywords."""
    names: dict[int, list[Span]] = {}
    passed_over: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (first, start), (last, end) = token.start, token.end
        if token.type == tokenize.NAME:
            names.setdefault(first, []).append((start, end))
        elif token.type not in (tokenize.OP, tokenize.NUMBER, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT):
            passed_over.update(range(first, last + 1))
    for number, line in enumerate(source.split("\n"), 1):
        text, words = line.strip(), names.get(number, [])
        if number in passed_over or len(words) < 4 or len(text) not in _LINE_LENGTHS or not text.isascii():
            continue
        if sum(not iskeyword(line[start:end]) for start, end in words) >= 2:
            indent = len(line) - len(line.lstrip())
            yield text, [(start - indent, end - indent) for start, end in words]


def _swapped(text: str, words: list[Span]) -> list[str]:
    """All different copies of `text` in which two of its `words` have changed places, in an order that looks random.

    None has a word twice in a row, which would tell it from the true text without a thought of the rest.
    """
    copies = set()
    for (start, end), (later, last) in itertools.combinations(words, 2):
        one, other = text[start:end], text[later:last]
        if one.lower() != other.lower():
            copies.add(text[:start] + other + text[end:later] + one + text[last:])
    return sorted((copy for copy in copies if not _TWICE.search(copy)), key=lambda copy: unit_hash(f"copy:{copy}"))


def _shuffled(right: str, wrong: list[str], question: str = "") -> Item:
    """The right choice at a place that its text decides: always first, it would win every tie."""
    choices = sorted([right, *wrong], key=lambda choice: unit_hash(f"{question}:{right}:{choice}"))
    return {"choices": choices, "answer": choices.index(right)}


def _sum(item: arithmetic.Sum, wrong: list[str]) -> Item:
    return {"question": item.question} | _shuffled(str(item.value), wrong, item.question)
