"""The folder of a run: whose it is, and one run at a time in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["CHECKPOINTS", "CONFIG", "DATA", "EMA_MODEL", "ITEMS", "MODEL", "owned"]

_MARK = ".zaya-training"  # in every folder of a run from its first moment on; also the lock
CONFIG, CHECKPOINTS, DATA, MODEL, EMA_MODEL = "config.yaml", "checkpoints", "data", "model", "model-ema"
ITEMS = "items"  # in DATA


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Hold `out`, making it if need be, against other runs.

    Raises:
        ValueError: `out` is not empty and no run's, or another process trains in it.
        OSError: it cannot be made.
    """
    if out.exists() and not (out.is_dir() and ((out / _MARK).is_file() or not any(out.iterdir()))):
        raise ValueError(f"{out} exists and is not the folder of an earlier run: choose another out.")
    out.mkdir(parents=True, exist_ok=True)
    with (out / _MARK).open("a") as mark:
        _lock(mark, out)
        yield


def _lock(mark: IO[str], out: Path) -> None:
    """Held until the file is closed, or the process ends in any way."""
    with contextlib.suppress(ImportError):  # fcntl: not on Windows, where nothing is locked
        import fcntl

        try:
            # Not flock, which processes that this one forks hold too, for seconds after it was killed.
            fcntl.lockf(mark.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process trains in {out}: wait for it, or choose another out.") from None
