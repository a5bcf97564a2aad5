"""How much of a suite's items stands in a training corpus: shared n-grams of words or characters.

The method is that of GPT-3's appendix C (Brown et al., 2020, arXiv 2005.14165): 13 words in a row that an item and the
corpus share, after case, punctuation and spacing are taken away. It finds copies. It does not find translations or
paraphrases, and a shared quotation is not a leaked answer: read the passages.

The n-grams of the items are indexed and the corpus streams by, so memory depends on the suite alone. Hashes only choose
what to compare: every hit is compared as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .corpus_texts import Piece, corpus_files, pieces
from .statistics import wilson_interval

if TYPE_CHECKING:
    from .suites import LoadedTask

FORMAT = 1
WORST = 5  # items of a task that are shown
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_WORD = re.compile(r"[^\W_]+")
_INVISIBLE = dict.fromkeys((0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))  # soft hyphen, joiners, byte order mark
# N-grams of this many items of a task are the frame of its prompts ("Your code should pass these tests"), not items.
_FRAME_SHARE, _FRAME_ITEMS = 0.1, 5

_Ids = NDArray[np.int64]
_Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Item:
    """An item of a task: `text` is its question with its answer. `private` ones are never quoted."""

    task: str
    doc_id: int
    text: str
    doc_hash: str | None = None
    private: bool = False


@dataclass(frozen=True)
class Size:
    """Of an n-gram: `n` "words" or "characters" in a row."""

    n: int
    unit: str = "words"

    @classmethod
    def read(cls, text: str) -> Size:
        """`13` is 13 words, `50c` 50 characters.

        Raises:
            ValueError: it is neither.
        """
        match = re.fullmatch(r"(\d{1,4})(c?)", text.strip())
        if match is None or int(match[1]) < 2:
            raise ValueError(
                f"the n-gram {text!r} is neither words, as 13, nor characters, as 50c, and at least 2 of them"
            )
        return cls(int(match[1]), "characters" if match[2] else "words")


def probe(
    corpus: Sequence[Path], tasks: Sequence[LoadedTask], *, size: Size | None = None, field: str = "text"
) -> dict[str, Any]:
    """Look for the items of tasks in a corpus: question and right answer, without examples in front or templates.

    Args:
        corpus: files or folders; see `corpus_texts.pieces`.
        tasks: of `suites.load_tasks`; the items within each one's `limit` are looked for.
        size, field: as `overlap`.

    Returns:
        As `overlap`.

    Raises:
        ValueError: as `overlap`.
    """
    return overlap(corpus, _items_of(tasks), size=size, field=field)


def overlap(
    corpus: Sequence[Path], items: Sequence[Item], *, size: Size | None = None, field: str = "text"
) -> dict[str, Any]:
    """Look for the n-grams of items in a corpus.

    Args:
        corpus: files or folders; see `corpus_texts.pieces`.
        items: of one or more tasks.
        size: of the n-grams; 13 words if not given. An item that has fewer is looked for as a whole.
        field: of a record in JSON lines or Parquet: its text.

    Returns:
        What `contamination_report.markdown` shows, as JSON types: `unit`, `n`, `corpus` (`paths`, `files`, `skipped`,
        `documents`, `units`), and per task in `tasks`: `items`; `untested` (doc_ids of items without words, or without
        n-grams of their own); `tested`, the others; `short` (doc_ids of the tested that were looked for as a whole) and
        `short_overlapping`, how many of them were found; `overlapping`; `share` of the tested that overlap at all, with
        its 95 % Wilson `interval`; `mean_found`, the mean over the tested of the share of an item's n-grams that were
        found; `mean_overlap`, the same of its words (characters) inside those; `overlaps` {doc_id: share of words} and
        `hashes` {doc_id: doc_hash}; `worst` with `doc_id`, `overlap`, the longest `passage` (None if private) and its
        `length`, `file` and `document` (counted from 1) where it was found first.

    Raises:
        ValueError: there are no items, or the corpus is not there, has no text, or cannot be read.
    """
    size = size or Size(13)
    if not items:
        raise ValueError("there are no items to look for")
    files, skipped = corpus_files(corpus)
    index = _Index(items, size)
    documents = 0
    for number, file in enumerate(tqdm(files, desc="reading the corpus", unit="file", disable=None)):
        parts = tqdm(pieces(file, field), desc=file.name, unit="part", leave=False, disable=None)
        documents += index.read(parts, number)
    if index.seen == 0:
        raise ValueError(f"the corpus has no {size.unit} in it: {', '.join(map(str, corpus))}")
    return {
        "format": FORMAT,
        "unit": size.unit,
        "n": size.n,
        "corpus": {
            "paths": [str(path) for path in corpus],
            "files": len(files),
            "skipped": [str(path) for path in skipped],
            "documents": documents,
            "units": index.seen,
        },
        "tasks": index.report([str(file) for file in files]),
    }


def task_items(name: str, task: Any, *, limit: int | None = None, private: bool = False) -> list[Item]:
    """The items of one of lm-eval's tasks, the first `limit`."""
    from lm_eval.utils import handle_non_serializable, hash_string

    items = []
    for doc_id, doc in task.doc_iterator(rank=0, limit=limit, world_size=1):
        written = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        items.append(Item(name, doc_id, _item_text(task, doc), hash_string(written), private))
    return items


def _items_of(tasks: Iterable[LoadedTask]) -> list[Item]:
    found = []
    for loaded in tasks:
        private = loaded.entry.private_items
        found += task_items(loaded.leaf_name, loaded.task_object, limit=loaded.limit, private=private)
    return found


def run(args: Any) -> int:
    """`zaya eval contamination`: prints the table; with `args.out` also writes it, as JSON and Markdown.

    Args:
        args: `suite`, `corpus` (paths), `ngram` ("13", "50c"), `field`, `limit`, `evaluation` (a folder whose scores
            are split, or None), `out` (a folder for JSON and Markdown, or None).

    Raises:
        ValueError: as `probe`, `suites.load_suite`, `suites.load_tasks` and `contamination_report.split_scores`.
    """
    from .contamination_report import check_folder, markdown, split_scores, write
    from .finished_runs import read_manifest

    # What is wrong is said before lm-eval is imported, and before a corpus is read that may take hours.
    size = Size.read(str(args.ngram))
    corpus_files(args.corpus)
    if args.evaluation is not None:
        read_manifest(args.evaluation)
    if args.out is not None:
        check_folder(args.out)
    from .suites import load_suite, load_tasks

    tasks = load_tasks(load_suite(args.suite), limit=args.limit)
    report = probe(args.corpus, tasks, size=size, field=args.field or "text")
    try:
        if args.evaluation is not None:
            report["scores"] = split_scores(report, args.evaluation)
    finally:  # an evaluation that does not fit does not cost what was found
        if args.out is not None:
            write(report, args.out)
        print(markdown(report))
    return 0


def words(text: str) -> list[str]:
    """A text's words: composed, case folded, without punctuation, underscores and invisible characters."""
    folded = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).casefold()
    return _WORD.findall(unicodedata.normalize("NFKC", folded))


class _Index:
    """The n-grams of all items one behind the other, the short items whole, and where each was found first."""

    def __init__(self, items: Sequence[Item], size: Size) -> None:
        self.items = items
        self.n = size.n
        self.characters = size.unit == "characters"
        self.seen = 0  # words or characters of the corpus
        self._vocabulary: dict[str, int] = {}
        units = [self._units(item.text) for item in items]
        for unit in dict.fromkeys(unit for one in units for unit in one):
            self._vocabulary[unit] = len(self._vocabulary) + 1  # 0 is everything else, which matches nothing
        self._ids = [self._numbers(one) for one in units]
        self._values = _random_values(len(self._vocabulary) + 1)
        # Per item the hashes of what is looked for, and their places: of a short one a single hash of the whole.
        self._lengths = np.array([min(self.n, len(ids)) for ids in self._ids])
        none = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
        grams = [
            next(self._hashes(ids, {int(length)}))[1:] if length else none
            for ids, length in zip(self._ids, self._lengths, strict=True)
        ]
        frames = self._frames([found for found, _ in grams])
        kept = [~np.isin(found, frame) for (found, _), frame in zip(grams, frames, strict=True)]
        self._item = np.repeat(np.arange(len(items)), [int(mask.sum()) for mask in kept])
        self._place = np.concatenate([places[mask] for (_, places), mask in zip(grams, kept, strict=True)])
        flat = np.concatenate([found[mask] for (found, _), mask in zip(grams, kept, strict=True)])
        self._tables: dict[int, tuple[_Hashes, _Ids]] = {}  # by length: sorted hashes, and whose they are
        lengths = self._lengths[self._item]
        for length in np.unique(lengths):
            entries = np.flatnonzero(lengths == length)
            entries = entries[np.argsort(flat[entries], kind="stable")]
            self._tables[int(length)] = flat[entries], entries
        self._file = np.full(len(flat), -1, dtype=np.int64)
        self._document = np.zeros(len(flat), dtype=np.int64)

    def read(self, parts: Iterable[Piece], file: int) -> int:
        """Note what of a file's documents is shared with items; returns how many documents there were."""
        documents = 0
        before: _Ids = np.zeros(0, dtype=np.int64)
        for piece in parts:
            units = self._units(piece.text)
            self.seen += len(units)
            documents = piece.document
            ids = self._numbers(units)
            if not piece.starts:
                space = [self._vocabulary.get(" ", 0)] if self.characters and len(before) and len(ids) else []
                ids = np.concatenate([before, np.array(space, dtype=np.int64), ids])
            before = ids[-(self.n - 1) :]
            self._match(ids, file, piece.document)
        return documents

    def report(self, files: Sequence[str]) -> list[dict[str, Any]]:
        """The entries of `probe`'s `tasks`."""
        found = np.flatnonzero(self._file >= 0)
        shared: dict[int, list[int]] = defaultdict(list)
        for entry in found:
            shared[int(self._item[entry])].append(int(entry))
        own = np.bincount(self._item, minlength=len(self.items))
        by_task: dict[str, list[int]] = defaultdict(list)
        for number, item in enumerate(self.items):
            by_task[item.task].append(number)
        return [self._task(name, numbers, shared, own, files) for name, numbers in by_task.items()]

    def _task(
        self,
        name: str,
        numbers: Sequence[int],
        shared: Mapping[int, Sequence[int]],
        own: _Ids,
        files: Sequence[str],
    ) -> dict[str, Any]:
        tested = [number for number in numbers if own[number]]
        short = [number for number in tested if self._lengths[number] < self.n]
        overlaps = {number: self._overlap(number, shared.get(number, ())) for number in tested}
        overlapping = sorted((number for number in tested if overlaps[number]), key=lambda number: -overlaps[number])
        found = [len(shared.get(number, ())) / int(own[number]) for number in tested]
        return {
            "task": name,
            "items": len(numbers),
            "untested": [self.items[number].doc_id for number in numbers if not own[number]],
            "tested": len(tested),
            "short": [self.items[number].doc_id for number in short],
            "short_overlapping": sum(overlaps[number] > 0 for number in short),
            "overlapping": len(overlapping),
            "share": len(overlapping) / len(tested) if tested else None,
            "interval": list(wilson_interval(len(overlapping), len(tested))) if tested else None,
            "mean_found": sum(found) / len(tested) if tested else None,
            "mean_overlap": sum(overlaps.values()) / len(tested) if tested else None,
            "overlaps": {str(self.items[number].doc_id): overlaps[number] for number in tested},
            "hashes": {str(self.items[number].doc_id): self.items[number].doc_hash for number in tested},
            "worst": [
                {
                    "doc_id": self.items[number].doc_id,
                    "overlap": overlaps[number],
                    **self._longest(shared[number], files),
                }
                for number in overlapping[:WORST]
            ],
        }

    def _overlap(self, number: int, entries: Sequence[int]) -> float:
        covered = np.zeros(len(self._ids[number]), dtype=bool)
        for entry in entries:
            covered[self._place[entry] : self._place[entry] + self._lengths[number]] = True
        return float(covered.mean())

    def _longest(self, entries: Sequence[int], files: Sequence[str]) -> dict[str, Any]:
        """The longest run of shared n-grams, one place after the other, from one document."""
        best: tuple[int, int] = (0, 0)
        begin = 0
        for place in range(len(entries)):
            if place and not self._follows(entries[place - 1], entries[place]):
                begin = place
            best = max(best, (place - begin + 1, -begin))
        count, first = best[0], entries[-best[1]]
        item = self.items[self._item[first]]
        place = int(self._place[first])
        units = self._units(item.text)[place : place + count + int(self._lengths[self._item[first]]) - 1]
        passage = "".join(units) if self.characters else " ".join(units)
        return {
            "passage": None if item.private else passage,
            "length": len(units),
            "file": files[self._file[first]],
            "document": int(self._document[first]),
        }

    def _follows(self, first: int, second: int) -> bool:
        return bool(
            self._place[second] == self._place[first] + 1
            and self._file[second] == self._file[first]
            and self._document[second] == self._document[first]
        )

    def _match(self, ids: _Ids, file: int, document: int) -> None:
        for length, hashes, starts in self._hashes(ids, self._tables):
            known, entries = self._tables[length]
            hit = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
            if not hit.any():
                continue
            found, where = np.unique(hashes[hit], return_index=True)
            ends = np.searchsorted(known, found, side="right")
            for begin, end, start in zip(np.searchsorted(known, found), ends, starts[hit][where], strict=True):
                window = ids[start : start + length]
                for entry in entries[begin:end]:
                    if self._file[entry] < 0:
                        place = self._place[entry]
                        if np.array_equal(self._ids[self._item[entry]][place : place + length], window):
                            self._file[entry], self._document[entry] = file, document

    def _frames(self, hashes: Sequence[_Hashes]) -> Iterator[_Hashes]:
        """For each item the hashes that do not count, as too many items of its task share them."""
        by_task: dict[str, list[_Hashes]] = defaultdict(list)
        for item, length, found in zip(self.items, self._lengths, hashes, strict=True):
            by_task[item.task].append(np.unique(found) if length == self.n else found[:0])
        frames = {}
        for task, lists in by_task.items():
            values, counts = np.unique(np.concatenate(lists), return_counts=True)
            frames[task] = values[counts > max(_FRAME_ITEMS, _FRAME_SHARE * len(lists))]
        return (frames[item.task] for item in self.items)

    def _units(self, text: str) -> Sequence[str]:
        found = words(text)
        return " ".join(found) if self.characters else found

    def _numbers(self, units: Iterable[str]) -> _Ids:
        get = self._vocabulary.get
        return np.array([get(unit, 0) for unit in units], dtype=np.int64)

    def _hashes(self, ids: _Ids, lengths: Container[int]) -> Iterator[tuple[int, _Hashes, _Ids]]:
        """For each of `lengths`, from the shortest on, hashes of all n-grams of known words, and where they start."""
        starts = np.arange(len(ids))
        found = np.zeros(len(ids), dtype=np.uint64)
        for done in range(min(self.n, len(ids))):
            # Every hash goes on by a word; those whose next word is unknown or past the end are given up.
            inside = starts[: np.searchsorted(starts, len(ids) - done)]
            following = ids[inside + done]
            goes_on = following > 0
            starts = inside[goes_on]
            found = found[: len(inside)][goes_on] * _MULTIPLIER + self._values[following[goes_on]]
            if not len(starts):
                return
            if done + 1 in lengths:
                yield done + 1, found, starts


def _random_values(count: int) -> _Hashes:
    seed = int.from_bytes(hashlib.sha256(b"n-grams").digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 1 << 64, size=count, dtype=np.uint64, endpoint=False)


def _item_text(task: Any, doc: Mapping[str, Any]) -> str:
    """Question and right answer; of a task that puts choices into its question's place, the right whole."""
    question, answer = task.doc_to_text(doc), task.doc_to_target(doc)
    choices = task.doc_to_choice(doc) if task.OUTPUT_TYPE == "multiple_choice" else None
    if choices is not None:
        if isinstance(question, int):  # the contexts are the choices, and the target is what follows all of them
            question = choices[question]
        elif isinstance(answer, int):
            answer = choices[answer]
        elif isinstance(answer, list):  # several right ones
            answer = "\n".join(choices[one] if isinstance(one, int) else str(one) for one in answer)
    if isinstance(answer, list):
        answer = "\n".join(map(str, answer))
    return f"{question}\n{answer}"
