"""Texts and conversations out of files, one after the other, in constant memory."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from .digests import FileHashes, of_values
from .source_files import RAW_KINDS, Located, locate, source_name

if TYPE_CHECKING:
    from zaya_hf.training.config import SourceConfig

__all__ = ["Record", "TextSource"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_ROWS = 256  # of a column read at once; a text may have megabytes


@dataclass(frozen=True)
class Record:
    """One document before it is tokenised.

    Attributes:
        text: None of a conversation.
        messages: of a conversation: objects with "role" and "content".
        size: bytes of UTF-8 of the text; 0 of a conversation.
        origin: file and line or row, for messages.
    """

    origin: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    size: int = 0


class TextSource:
    """The documents of a source of kind text, jsonl, parquet, arrow or hub.

    Empty documents are left out and counted in `dropped`, as are files of a folder that are not UTF-8.

    Args:
        source: where they are.
        chat: whether `source.field` holds lists of messages rather than texts.

    Raises:
        ValueError: nothing is there, or its kind is another.
    """

    def __init__(self, source: SourceConfig, chat: bool = False, located: Located | None = None) -> None:
        self.source, self.chat = source, chat
        self.name = source_name(source)
        self.located = located if located is not None else locate(source)
        if self.located.kind not in RAW_KINDS:
            raise ValueError(f"{source.path} holds token ids (kind {self.located.kind}), no text")
        if chat and self.located.kind == "text":
            raise ValueError(f"{source.path} holds plain text; conversations need jsonl, parquet, arrow or hub")
        self.dropped: Counter[str] = Counter()
        self._dataset = _load_from_hub(source) if self.located.kind == "hub" else None

    @property
    def files(self) -> tuple[tuple[str, Path], ...]:
        """(name, path) of all files that are read."""
        if self._dataset is None:
            return self.located.files
        paths = [Path(file["filename"]) for file in self._dataset.cache_files]
        return tuple((f"{self.source.path}/{path.name}", path) for path in paths)

    def digests(self, hashes: FileHashes) -> list[dict[str, Any]]:
        """path, size and sha256 of every file, in order.

        Raises:
            ValueError: a file cannot be read.
        """
        try:
            return [
                {"path": name, "size": path.stat().st_size, "sha256": hashes.sha256(path)} for name, path in self.files
            ]
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error

    def key(self) -> str:
        """Digest of how the files are read; with their contents it decides the documents."""
        source = self.source
        if self.located.kind != "hub":
            return of_values(self.located.kind, source.field if self.located.kind != "text" else None, self.chat)
        return of_values("hub", source.field, self.chat, source.path, source.subset, source.split, source.revision)

    def records(self, files: tuple[tuple[str, Path], ...] | None = None) -> Iterator[Record]:
        """All documents, in the order of the files.

        Args:
            files: some of `files`; None: all. A hub dataset is always read as a whole.

        Raises:
            ValueError: a file is damaged, a record lacks the field, or has something else in it; with file and line.
        """
        if self._dataset is not None:
            yield from self._of_hub()
            return
        read: dict[str, Callable[[str, Path], Iterator[tuple[str, Any]]]] = {
            "text": self._of_text,
            "jsonl": self._of_lines,
            "parquet": self._of_parquet,
            "arrow": self._of_arrow,
        }
        for name, path in self.located.files if files is None else files:
            shown = str(path) if len(self.located.files) == 1 else name
            try:
                for origin, value in read[self.located.kind](shown, path):
                    yield from self._record(origin, value)
            except OSError as error:
                raise ValueError(f"{shown}: {error.strerror or error}") from error

    def _record(self, origin: str, value: Any) -> Iterator[Record]:
        if self.chat:
            if isinstance(value, list) and not value:
                self.dropped["empty"] += 1
                return
            yield Record(origin, messages=_messages(f"{origin}, {self.source.field}", value))
            return
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise ValueError(f"{origin}: the field {self.source.field!r} is no text but {kind}")
        if not value:
            self.dropped["empty"] += 1
            return
        try:
            size = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"{origin}: character {error.start} of the text is half of a surrogate pair") from None
        yield Record(origin, text=value, size=size)

    def _of_text(self, shown: str, path: Path) -> Iterator[tuple[str, Any]]:
        with _opened(shown, path) as file:
            data = file.read()
        try:
            yield shown, data.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            self.dropped["not UTF-8"] += 1

    def _of_lines(self, shown: str, path: Path) -> Iterator[tuple[str, Any]]:
        with _opened(shown, path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    origin = f"{shown}, line {number}"
                    yield origin, self._field(origin, _parsed(origin, line.rstrip(b"\r\n")))

    def _field(self, origin: str, record: Any) -> Any:
        if not isinstance(record, dict):
            raise ValueError(f"{origin}: expected one JSON object, found {type(record).__name__}")
        if self.source.field not in record:
            there = ", ".join(map(str, record)) or "none"
            raise ValueError(f"{origin}: no field {self.source.field!r}; there is {there}")
        return record[self.source.field]

    def _of_parquet(self, shown: str, path: Path) -> Iterator[tuple[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                self._check_column(shown, file.schema_arrow)
                batches = file.iter_batches(_ROWS, columns=[self.source.field])
                yield from self._of_batches(shown, batches)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{shown} is no whole Parquet file: {_first_line(error)}") from error

    def _of_arrow(self, shown: str, path: Path) -> Iterator[tuple[str, Any]]:
        import pyarrow as pa

        try:
            with pa.memory_map(str(path)) as file:
                try:
                    reader = pa.ipc.open_file(file)
                    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
                except pa.ArrowInvalid:  # datasets writes streams
                    _check_stream_end(shown, file)
                    file.seek(0)
                    reader = pa.ipc.open_stream(file)
                    batches = iter(reader)
                self._check_column(shown, reader.schema)
                yield from self._of_batches(shown, batches)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{shown} is no whole Arrow file: {_first_line(error)}") from error

    def _check_column(self, shown: str, schema: Any) -> None:
        if self.source.field not in schema.names:
            raise ValueError(f"{shown}: no column {self.source.field!r}; there is {', '.join(schema.names) or 'none'}")
        if (there := schema.names.count(self.source.field)) > 1:
            raise ValueError(f"{shown}: the column {self.source.field!r} is there {there} times; keep one")

    def _of_batches(self, shown: str, batches: Iterator[Any]) -> Iterator[tuple[str, Any]]:
        row = 0
        for batch in batches:
            column = batch.column(self.source.field)
            for first in range(0, len(column), _ROWS):
                try:
                    values = column.slice(first, _ROWS).to_pylist()
                except UnicodeDecodeError:  # in one of them: those before it are read, that one is named
                    values = _decoded(shown, row, column.slice(first, _ROWS))
                for value in values:
                    row += 1
                    yield f"{shown}, row {row}", value

    def _of_hub(self) -> Iterator[Record]:
        assert self._dataset is not None
        dataset, field = self._dataset, self.source.field
        self._check_column(self.source.path, dataset.features.arrow_schema)
        row = 0
        for batch in dataset.select_columns([field]).iter(_ROWS):
            for value in batch[field]:
                row += 1
                yield from self._record(f"{self.source.path}, row {row}", value)


def _decoded(shown: str, row: int, column: Any) -> Iterator[Any]:
    """Values of a column, one by one; `row` are before them.

    Raises:
        ValueError: for the first that is not UTF-8.
    """
    for number, value in enumerate(column, start=row + 1):
        try:
            found = value.as_py()
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown}, row {number}: not UTF-8 (byte {error.start})") from None
        yield found


def _check_stream_end(shown: str, file: Any) -> None:
    """Refuse an Arrow stream without the mark of its end: one cut between two batches looks whole to its reader.

    Raises:
        ValueError: there is none.
        pyarrow.ArrowException: the file is no stream.
    """
    import pyarrow as pa

    file.seek(0)
    place = 0
    while True:
        try:
            pa.ipc.read_message(file)  # mapped: the content of a batch is not read
        except EOFError:  # at the mark, and where the file ends without one
            break
        place = file.tell()
    if place == file.size():
        raise ValueError(f"{shown} is no whole Arrow file: it ends between two batches, without the mark of its end")


def _messages(origin: str, value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation. Columns have a null for what a message does not have; it is left out."""
    if not isinstance(value, list):
        raise ValueError(f"{origin}: expected a list of messages, found {type(value).__name__}")
    found = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"{origin}: message {number} is not an object")
        there = {name: content for name, content in message.items() if content is not None}
        if not isinstance(there.get("role"), str) or not isinstance(there.get("content", ""), str):
            raise ValueError(f'{origin}: message {number} has no text "role", or a "content" that is no text')
        if not _is_unicode(there):
            raise ValueError(f"{origin}: message {number} has half of a surrogate pair in it")
        found.append(there)
    return found


def _is_unicode(value: Any) -> bool:
    """Whether UTF-8 has every text in a value of JSON."""
    if isinstance(value, dict):
        return all(_is_unicode(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_is_unicode, value))
    return not isinstance(value, str) or value.isascii() or not _SURROGATE.search(value)


def _parsed(origin: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin}: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        hint = "; the file is to have one object on each line" if line.lstrip()[:1] in (b"[", b"{") else ""
        raise ValueError(f"{origin}: not JSON: {error.msg} (column {error.colno}){hint}") from None
    except RecursionError:
        raise ValueError(f"{origin}: JSON that is nested too deep") from None
    except ValueError:  # of int: Python takes no more digits
        raise ValueError(f"{origin}: a number with thousands of digits") from None


def _opened(shown: str, path: Path) -> IO[bytes]:
    """A file's content, unpacked where its name says that it is packed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], io.BufferedReader(_Unpacked(shown, path, gzip.open(path)), 1 << 20))
    if suffix == ".zst":
        return cast(IO[bytes], io.BufferedReader(_Unpacked(shown, path, None), 1 << 20))
    return path.open("rb", buffering=1 << 20)


class _Unpacked(io.RawIOBase):
    """Bytes of a packed file, whose faults name it. A Zstandard file that ends early is one: its reader is silent."""

    def __init__(self, shown: str, path: Path, file: Any) -> None:
        self._shown = shown
        self._file = file
        self._chunks = None if file is not None else _zstandard_chunks(path)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            if not self._left:
                self._left = self._file.read(1 << 20) if self._chunks is None else next(self._chunks, b"")
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise ValueError(f"{self._shown} cannot be unpacked: {_first_line(error)}") from error
        taken = min(len(buffer), len(self._left))
        buffer[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        return taken

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _zstandard_chunks(path: Path) -> Iterator[bytes]:
    """Raises ValueError where the file is damaged, or zstandard is not installed."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("it is packed with Zstandard: pip install zstandard") from None
    unpacker, begun = zstandard.ZstdDecompressor(), False
    frame = unpacker.decompressobj()
    try:
        with path.open("rb") as file:
            while data := file.read(1 << 17):
                while data:
                    begun = True
                    if found := frame.decompress(data):
                        yield found
                    data = b""
                    if frame.eof:
                        data, begun = frame.unused_data, False
                        frame = unpacker.decompressobj()
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if begun:
        raise ValueError("it ends before its content does")


def _load_from_hub(source: SourceConfig) -> Any:
    """The dataset, from the hub or from the hub's cache.

    Raises:
        ValueError: it cannot be loaded.
    """
    import datasets

    try:
        return datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"{source.path} cannot be loaded from the hub: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
