"""Text that every Python installation has: documentation and source code of the standard library, read as files.

Where the standard library ships no sources (some embedded Pythons hold it as bytecode), the sources of installed
dependencies serve. Nothing is imported or executed, and nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

# Left out: tests and generated data (repetitive), and packages that are not part of the library itself.
_SKIPPED_PARTS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"})
# Big pure-Python dependencies of zaya_hf, in the order in which they are tried.
_FALLBACK_PACKAGES = ("transformers", "torch", "numpy")
_HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_TOPICS = "pydoc_data/topics.py"  # the language reference, as one dict literal of texts
# Bytes of each kind; a file that crosses the line is taken as a whole.
_BUDGETS = {"train": 2_250_000, "validation": 120_000, "held_out": 300_000}
_HELD_OUT_SHARE = 0.1  # of the files
_VALIDATION_SHARE = 0.05
_ENOUGH = 200_000  # bytes; less than this of either kind is no corpus

Kind = Literal["prose", "code"]


@dataclass(frozen=True)
class Document:
    """The prose (docstrings, topics of the language reference) or the code of one file."""

    kind: Kind
    name: str  # of the file, relative to its root
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents for training, for choosing learning rates, and for evaluation. No file gives text to two of them.

    `train` is in an order that mixes kinds and subjects, so that any stretch of it is a sample.
    """

    train: list[Document]
    validation: list[Document]
    held_out: list[Document]
    origin: str  # "standard library" or the names of packages
    sha256: str  # of all kinds, names and texts

    def trains_on(self, text: str) -> bool:
        """Whether `text` occurs in a training document, whatever its line breaks and indentation.

        Files copy from each other (licence headers, docstrings of sister functions), so that text of a held-out file
        need not be unseen.
        """
        return " ".join(text.split()) in self._train_words

    @cached_property
    def _train_words(self) -> str:
        return "\n".join(" ".join(document.text.split()) for document in self.train)


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone: the same file has the same place on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _split(name: str) -> str:
    """The one split that gets the text of the file `name`."""
    place = unit_hash(f"split:{name}")
    if place < _HELD_OUT_SHARE:
        return "held_out"
    return "validation" if place >= 1 - _VALIDATION_SHARE else "train"


def _python_files(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """(name relative to its root, path) of all source files under `roots`, in an order that mixes subjects."""
    found = [
        (path.relative_to(root).as_posix(), path)
        for root in roots
        for path in root.rglob("*.py")
        if not _SKIPPED_PARTS.intersection(path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda item: (unit_hash(item[0]), item[0]))


def _docstrings(tree: ast.AST) -> Iterator[str]:
    """Those of 40 characters and more, outer ones first. Expressions, most of a tree, have none in them."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLD_STATEMENTS))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 40:
                yield text


def _topics(tree: ast.Module) -> Iterator[str]:
    """The strings of the dict that the topics file assigns."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for value in node.value.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _documents(files: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Document]]:
    """(split, document) of the prose and the code in `files`; each split takes of each kind up to its budget."""
    kinds: tuple[Kind, ...] = ("prose", "code")
    left = {(split, kind): size for split, size in _BUDGETS.items() for kind in kinds}
    for name, path in files:
        split = _split(name)
        if all(left[split, kind] <= 0 for kind in kinds):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another project's invalid escapes are not our news
                tree = ast.parse(source)
            is_topics = name == _TOPICS
            texts = {"prose": "\n\n".join(_topics(tree) if is_topics else _docstrings(tree)), "code": source}
            sizes = {kind: len(texts[kind].encode()) for kind in kinds}  # fails where a docstring is no valid Unicode
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # unreadable, not UTF-8, a template that is no Python, or nested beyond what the parser takes
        for kind in kinds:
            if left[split, kind] > 0 and texts[kind] and not (is_topics and kind == "code"):
                left[split, kind] -= sizes[kind]
                yield split, Document(kind, name, texts[kind])


def _build(roots: list[Path], origin: str) -> Corpus | None:
    """The corpus under `roots`, or None where there is too little text."""
    digest = hashlib.sha256()
    splits: dict[str, list[Document]] = {split: [] for split in _BUDGETS}
    size: dict[Kind, int] = {"prose": 0, "code": 0}
    for split, document in _documents(_python_files(roots)):
        data = document.text.encode()
        digest.update(f"{document.kind}:{document.name}:{len(data)}\n".encode() + data)
        size[document.kind] += len(data)
        splits[split].append(document)
    if min(size.values()) < _ENOUGH or not all(splits.values()):
        return None
    splits["train"].sort(key=lambda document: unit_hash(f"order:{document.kind}:{document.name}"))
    return Corpus(**splits, origin=origin, sha256=digest.hexdigest())


def _package_roots(names: Iterable[str]) -> dict[str, Path]:
    """Folders of installed packages, found without importing them."""
    specs = {name: importlib.util.find_spec(name) for name in names}
    return {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}


def load_corpus(standard_library: Path | None = None) -> Corpus:
    """Text for the quickstart, the same on every machine with the same Python.

    Args:
        standard_library: where the standard library's files are; the running Python's by default.

    Raises:
        RuntimeError: neither the standard library nor the dependencies have source files here.
    """
    root = standard_library if standard_library is not None else Path(sysconfig.get_path("stdlib"))
    corpus = _build([root], "standard library")
    if corpus is None:
        packages = _package_roots(_FALLBACK_PACKAGES)
        corpus = _build(list(packages.values()), ", ".join(packages))
    if corpus is None:
        raise RuntimeError(
            f"no text to train on: neither {root} nor the packages {', '.join(_FALLBACK_PACKAGES)} have source files"
        )
    return corpus
