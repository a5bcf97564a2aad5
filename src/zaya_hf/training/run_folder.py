"""The folder of a run: whose it is, and one run at a time in it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from .. import owned_folders

__all__ = ["CHECKPOINTS", "CONFIG", "DATA", "EMA_MODEL", "ITEMS", "MODEL", "owned"]

_MARK = ".zaya-training"  # in every folder of a run from its first moment on; also the lock
CONFIG, CHECKPOINTS, DATA, MODEL, EMA_MODEL = "config.yaml", "checkpoints", "data", "model", "model-ema"
ITEMS = "items"  # in DATA


def owned(out: Path) -> AbstractContextManager[None]:
    """Hold `out`, making it if need be, against other runs.

    Raises:
        ValueError: `out` is not empty and no run's, or another process trains in it.
        OSError: it cannot be made.
    """
    return owned_folders.owned(
        out,
        _MARK,
        foreign=f"{out} exists and is not the folder of an earlier run: choose another out.",
        busy=f"another process trains in {out}: wait for it, or choose another out.",
    )
