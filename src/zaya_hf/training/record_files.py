"""The lines of a run's records: JSON, one a line, whole or dropped.

A process that is killed may leave the beginning of a line at the end of a file; whoever opens the file again cuts it
off. JSON has no NaN and no infinities: they are written as the strings "nan", "inf" and "-inf", which `float` reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def plain(value: Any) -> Any:
    """`value` with its numbers that JSON does not have as strings; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


class LineFile:
    """Appends records to a file of JSON lines; each is with the system before `write` returns.

    Args:
        path: of the file; it is made at the first line. What a killed process left of a last line is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Floats are written so that they are read back to the bit.

        Raises:
            TypeError: something in it is no JSON value.
        """
        line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"
        if self._file is None:
            _cut_torn_end(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._file.write(line.encode())  # one call, so that a signal finds the line written or not

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Keep the lines whose record is `wanted`, in their order, and replace the file by them in one rename.

        Returns:
            The last record that was kept, or None.
        """
        self.close()
        if not self.path.exists():
            return None
        last = None
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with self.path.open("rb") as old, unfinished.open("wb") as new:
                for line in old:
                    record = _record(line)
                    if record is not None and wanted(record):
                        new.write(line)
                        last = record
                new.flush()
                os.fsync(new.fileno())
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        return last

    def sync(self) -> None:
        """Have all lines on the disk when this returns."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Also to the disk. The next `write` opens the file again."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _cut_torn_end(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - 65536)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)
