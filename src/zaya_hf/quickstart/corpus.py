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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Left out: tests and generated data (repetitive), and packages that are not part of the library itself.
_SKIPPED_PARTS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3"})
# Big pure-Python dependencies of zaya_hf, in the order in which they are tried.
_FALLBACK_PACKAGES = ("transformers", "torch", "numpy")
_TOPICS = "pydoc_data/topics.py"  # the language reference, as one dict literal of texts
_BYTES_PER_KIND = 2_500_000
_ENOUGH = 200_000  # less than this of either kind is no corpus
_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Documents for training and for evaluation. No file gives text to both."""

    train: list[str]
    held_out: list[str]
    origin: str  # "standard library" or the names of packages
    sha256: str  # of all names and texts, in order

    @property
    def train_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.train)

    @property
    def held_out_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.held_out)


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone: the same file has the same place on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _python_files(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """(name relative to its root, path) of all source files under `roots`, in an order that mixes subjects."""
    found = [
        (path.relative_to(root).as_posix(), path)
        for root in roots
        for path in root.rglob("*.py")
        if not _SKIPPED_PARTS.intersection(path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda item: (_unit_hash(item[0]), item[0]))


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
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


def _documents(files: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, str, str]]:
    """(kind, name, text) of the prose and the code in `files`, each kind up to its budget."""
    left = {"prose": _BYTES_PER_KIND, "code": _BYTES_PER_KIND}
    for name, path in files:
        if max(left.values()) <= 0:
            return
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another project's invalid escapes are not our news
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue  # unreadable, not UTF-8, or a template that is no Python
        is_topics = name == _TOPICS
        texts = {"prose": "\n\n".join(_topics(tree) if is_topics else _docstrings(tree)), "code": source}
        for kind, text in texts.items():
            if left[kind] > 0 and text and not (is_topics and kind == "code"):
                left[kind] -= len(text.encode())
                yield kind, name, text


def _build(roots: list[Path], origin: str) -> Corpus | None:
    """The corpus under `roots`, or None where there is too little text."""
    digest = hashlib.sha256()
    train: list[str] = []
    held_out: list[str] = []
    size = {"prose": 0, "code": 0}
    for kind, name, text in _documents(_python_files(roots)):
        data = text.encode()
        digest.update(f"{kind}:{name}:{len(data)}\n".encode() + data)
        size[kind] += len(data)
        held_back = _unit_hash(f"split:{name}") < _HELD_OUT_SHARE
        (held_out if held_back else train).append(text)
    if min(size.values()) < _ENOUGH or not held_out:
        return None
    return Corpus(train, held_out, origin, digest.hexdigest())


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
