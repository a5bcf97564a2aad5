"""Folders that one process at a time writes: whose they are, and the lock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["owned"]


@contextmanager
def owned(out: Path, mark: str, *, signs: Sequence[str] = (), foreign: str, busy: str) -> Iterator[None]:
    """Hold `out`, making it if need be, against other processes.

    Args:
        mark: name of the file that says whose the folder is from its first moment on; also the lock.
        signs: further files of which any says so, too.
        foreign, busy: the messages for a folder that is not empty and has none of these files, and for one that another
            process holds.

    Raises:
        ValueError: with one of the two messages.
        OSError: it cannot be made.
    """
    if out.exists():
        ours = out.is_dir() and any((out / name).is_file() for name in (mark, *signs))
        if not ours and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(foreign)
    out.mkdir(parents=True, exist_ok=True)
    with (out / mark).open("a") as file:
        _lock(file, busy)
        yield


def _lock(file: IO[str], busy: str) -> None:
    """Held until the file is closed, or the process ends in any way."""
    with contextlib.suppress(ImportError):  # fcntl: not on Windows, where nothing is locked
        import fcntl

        try:
            # Not flock, which processes that this one forks hold too, for seconds after it was killed.
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(busy) from None
