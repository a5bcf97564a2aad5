"""How to tell whether a file is still the one that it was."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from zaya_hf import atomic

__all__ = ["FileHashes", "of_values", "sampled"]

_BLOCK = 1 << 18  # bytes
_BLOCKS = 256  # read of a large file; a file of up to 64 MiB is read whole


def of_values(*values: Any) -> str:
    """SHA-256 of values that JSON has."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sampled(path: Path) -> str:
    """SHA-256 of a file's size and of 256 blocks of 256 KiB of it, evenly spaced, the first and the last among them.

    That is all of a file of up to 64 MiB, and a tenth of a second for one of terabytes. Of a larger file it misses a
    change that keeps the size and lies between the blocks.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}:".encode())
    with path.open("rb") as file:
        if size <= _BLOCK * _BLOCKS:
            while block := file.read(_BLOCK):
                digest.update(block)
        else:
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


class FileHashes:
    """SHA-256 of whole files, remembered for large ones.

    A file of up to 64 MiB is read every time. A larger one is taken for unchanged if its size, its time of change and
    its `sampled` digest are as they were; a touched or copied one is read again.

    Args:
        folder: where what is known is kept, in ``file-hashes.json``; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / "file-hashes.json"
        self._known: dict[str, list[Any]] = {}
        if self._file is not None and self._file.is_file():
            with suppress(ValueError):  # only a memory: what it does not tell is computed
                self._known = json.loads(self._file.read_text(encoding="utf-8"))

    def sha256(self, path: Path) -> str:
        """Of the content alone. Raises OSError from the disk."""
        status = path.stat()
        if self._file is None or status.st_size <= _BLOCK * _BLOCKS:
            return whole(path)
        state = [status.st_size, status.st_mtime_ns, sampled(path)]
        key = os.path.realpath(path)
        known = self._known.get(key)
        if isinstance(known, list) and known[:3] == state and len(known) == 4:
            return str(known[3])
        found = whole(path)
        self._known[key] = [*state, found]
        atomic.write_json(self._file, self._known)
        return found


def whole(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError from the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
