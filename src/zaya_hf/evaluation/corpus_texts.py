"""Texts of a training corpus, streamed: plain files, JSON lines (also .gz, .zst) and Parquet, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zaya_hf.installed import require

PIECE = 1 << 22  # characters of a document at a time
_PACKED = (".gz", ".zst")
_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Piece:
    """Part of a document: `document` counts from 1 in its file, `starts` says that nothing of it came before."""

    document: int
    text: str
    starts: bool


def corpus_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The files of a corpus in order of their names, and those in its folders that are passed over: hidden ones are not
    mentioned, files that hold bytes other than text (and are neither packed nor Parquet) are, and .json files that are
    one JSON document instead of JSON lines.

    Raises:
        ValueError: a path is not there, or nothing is left.
    """
    found: list[Path] = []
    skipped: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"there is no file or folder {path}")
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                (found if _is_readable(file) else skipped).append(file)
    if not found:
        more = f" (passed over, as they hold no text, JSON lines or Parquet: {len(skipped)})" if skipped else ""
        raise ValueError(f"the corpus has no files: {', '.join(map(str, paths))}{more}")
    return list(dict.fromkeys(found)), skipped


def pieces(file: Path, field: str) -> Iterator[Piece]:
    """A file's documents, in pieces that end at white space. A plain file is one document.

    Args:
        file: its name says what it is: .jsonl, .ndjson and .json (lines too), .parquet, anything else is text; .gz or
            .zst behind it.
        field: of a JSON record or a Parquet row: its text, or a list of messages with `content`.

    Raises:
        ValueError: a record is no JSON object or lacks the field, a packed file is damaged, or a package is missing.
    """
    suffix = _suffix(file)
    if suffix == ".parquet":
        texts = _parquet_texts(file, field)
    elif suffix in _LINES:
        texts = _json_texts(file, field)
    else:
        yield from _text_pieces(file)
        return
    for document, text in enumerate(texts, 1):
        starts = True
        for part in _parts(text):
            yield Piece(document, part, starts)
            starts = False


def _suffix(file: Path) -> str:
    inner = file.with_suffix("") if file.suffix.lower() in _PACKED else file
    return inner.suffix.lower()


def _is_readable(file: Path) -> bool:
    if file.suffix.lower() in (*_PACKED, ".parquet"):
        return True
    with file.open("rb") as opened:
        if file.suffix.lower() != ".json":
            return b"\0" not in opened.read(1 << 13)
        first = next((line for line in opened if line.strip()), b"")
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(first), dict)
    return False


def _text_pieces(file: Path) -> Iterator[Piece]:
    starts, left = True, ""
    with _opened(file) as opened, io.TextIOWrapper(opened, encoding="utf-8", errors="replace") as text:
        while block := text.read(PIECE):
            *whole, left = _cut(left + block)
            for part in whole:
                yield Piece(1, part, starts)
                starts = False
    if left:
        yield Piece(1, left, starts)


def _parts(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > PIECE:
        first = _cut(text[begin : begin + PIECE])[0]
        yield first
        begin += len(first)
    yield text[begin:]


def _cut(text: str) -> list[str]:
    """`text` before and from its last white space: a word must not be cut in two. One without any stays whole, until it
    is longer than several pieces."""
    end = max(text.rfind(" "), text.rfind("\n"), text.rfind("\t"))
    if end > 0:
        return [text[:end], text[end:]]
    return [text, ""] if len(text) > 4 * PIECE else [text]


def _json_texts(file: Path, field: str) -> Iterator[str]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, line {number} is not JSON: {str(error).splitlines()[0]}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{file}, line {number} is no JSON object")
            if field not in record:
                raise ValueError(f"{file}, line {number} has no field {field!r}, but {_names(record)}")
            yield _text_of(record[field], f"{file}, line {number}: {field}")


def _parquet_texts(file: Path, field: str) -> Iterator[str]:
    require("a corpus in Parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if field not in names:
                raise ValueError(f"{file} has no column {field!r}, but {_names(names)}")
            number = 0
            for batch in opened.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield _text_of(value.as_py(), f"{file}, row {number}: {field}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


def _text_of(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        contents = [message.get("content") if isinstance(message, dict) else message for message in value]
        if all(content is None or isinstance(content, str) for content in contents):
            return "\n".join(filter(None, contents))
    raise ValueError(f"{where} is {type(value).__name__}; expected text, or a list of messages with `content`")


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "none at all"


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """A file's content, unpacked where its name says that it is packed; a damaged one is a ValueError that names it."""
    suffix = file.suffix.lower()
    broken: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        if suffix == ".gz":
            with gzip.open(file) as opened:
                yield opened  # type: ignore[misc]
        elif suffix == ".zst":
            require("a corpus packed with Zstandard", "zstandard")
            import zstandard

            broken = (*broken, zstandard.ZstdError)
            with file.open("rb") as packed, io.BufferedReader(_Frames(packed), 1 << 20) as unpacked:
                yield unpacked
        else:
            with file.open("rb") as opened:
                yield opened
    except broken as error:
        raise ValueError(f"{file} cannot be unpacked: {error}") from None


class _Frames(io.RawIOBase):
    """Zstandard's frames, unpacked. Its own reader is silent about a file that ends early."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed = packed
        self._frame: Any = None
        self._given = self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._left:
            self._given = self._given or self._packed.read(1 << 17)
            if not self._given:
                if self._frame is not None:
                    raise EOFError("it ends early")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._left, self._given = self._frame.decompress(self._given), b""
            if self._frame.eof:
                self._given, self._frame = self._frame.unused_data, None
        taken = min(len(buffer), len(self._left))
        buffer[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        return taken
