"""Checkpoints of a run that stand whole or not at all.

accelerate writes the states (model, optimizer, schedule, registered objects, random generators), but it neither marks a
folder as complete nor replaces one safely. Here a state is written to `step-N.tmp`, described last by `progress.json`
with the hash of every file, and renamed to `step-N`; older ones go only then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

PROGRESS = "progress.json"
FORMAT = 1


def save(accelerator: Accelerator, folder: Path, step: int, identity: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write the state after `step` steps into `folder`, and remove older ones.

    Args:
        accelerator: what it has prepared is written.
        identity: JSON values that decide whether a later run may go on from here.
        progress: JSON values to be had back.
    """
    target = folder / f"step-{step}"
    partial = target.with_name(target.name + ".tmp")
    for path in (partial, target):
        shutil.rmtree(path, ignore_errors=True)
    # Not as safetensors: of tied weights accelerate would store one, and warn about the other at every checkpoint.
    accelerator.save_state(str(partial), safe_serialization=False)
    files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
    description = {"format": FORMAT, "step": step, "identity": identity, "progress": progress, "files": files}
    (partial / PROGRESS).write_text(json.dumps(description), encoding="utf-8")
    for path in partial.iterdir():
        _sync(path)
    partial.replace(target)
    for path in folder.glob("step-*"):
        if path != target:
            shutil.rmtree(path, ignore_errors=True)


def load(accelerator: Accelerator, folder: Path, identity: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Restore the latest complete state of the same `identity` from `folder`, into what `accelerator` has prepared.

    What is incomplete, damaged, or of another run is left alone; nothing is restored from it, not even in part.

    Returns:
        the steps done and the progress; None without such a state.
    """
    found = [(int(path.name[5:]), path) for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    for step, path in sorted(found, reverse=True):
        progress = _progress_of(path, step, identity)
        if progress is not None:
            accelerator.load_state(str(path))
            return step, progress
    return None


def remove_checkpoint(folder: Path) -> None:
    """Delete the checkpoints in `folder`, and `folder` itself if nothing else is in it. Nothing there is no error."""
    for path in folder.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _progress_of(path: Path, step: int, identity: dict[str, Any]) -> dict[str, Any] | None:
    try:
        description = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        same = (description["format"], description["step"]) == (FORMAT, step)
        # As JSON: a tuple of the settings comes back as a list.
        same = same and description["identity"] == json.loads(json.dumps(identity))
        if same and all(_sha256(path / name) == digest for name, digest in description["files"].items()):
            progress: dict[str, Any] = description["progress"]
            return progress
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not one of ours, or damaged
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Make the machine write the file now, so that a rename cannot survive a power cut that its content does not."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
