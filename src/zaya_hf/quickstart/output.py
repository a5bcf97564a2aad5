"""The quickstart's output folder: whose it is, one run at a time, and results that replace older ones whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zaya_hf.reporting.results import FILE, MADE_BY

_MARK = ".zaya-quickstart"  # in every output folder from its first moment on; also the lock
# What a finished folder shows beside its results.
REPORT, HUB, RUNS = "report.html", "hub", "runs"
ITEMS, TASKS = "evaluation/items", "evaluation/tasks"  # all that lm-eval needs to score any model on the same
# Hidden, and gone at the end: tokenizer and token streams, and what is about to take the place of `hub`.
PREPARED, NEW_HUB = ".prepared", ".hub.new"
_BEFORE_FIVE_MODELS = "model"  # what the quickstart of version 0.1 wrote beside results.json


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Hold `out`, making it if need be, against other quickstarts.

    Raises:
        ValueError: `out` is not empty and no quickstart's, or another quickstart is writing to it now.
    """
    if out.exists() and not _is_ours(out):
        raise ValueError(f"{out} exists and is not the output of an earlier quickstart: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with (out / _MARK).open("a") as mark:
        try:
            _lock(mark.fileno())
        except BlockingIOError:
            raise ValueError(f"another quickstart is writing to {out}: wait for it, or give another --out") from None
        try:
            yield
        finally:
            for name in (PREPARED, NEW_HUB):
                shutil.rmtree(out / name, ignore_errors=True)


def replace_hub(out: Path) -> None:
    """Put the prepared hub folder in the place of the old one. Without a new one the old one stays, with its own card.

    Older results and report go first: whatever stops the rest, none of them stands beside a model that is not theirs.
    """
    for name in (FILE, REPORT):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / _BEFORE_FIVE_MODELS, ignore_errors=True)
    if (out / NEW_HUB).exists():
        shutil.rmtree(out / HUB, ignore_errors=True)
        (out / NEW_HUB).rename(out / HUB)


def _is_ours(out: Path) -> bool:
    if not out.is_dir():
        return False
    if (out / _MARK).is_file() or not any(out.iterdir()):
        return True
    try:
        made_by: str = json.loads((out / FILE).read_text(encoding="utf-8"))["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return made_by == MADE_BY


def _lock(descriptor: int) -> None:
    """Take the lock or raise BlockingIOError; the system frees it when the process ends, however it ends."""
    if os.name != "posix":
        return  # no such lock there
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks: two runs at once cannot be told there
