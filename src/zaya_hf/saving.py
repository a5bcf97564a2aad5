"""Saving a model so that the folder never mixes two saves: written aside, then moved into place, then tidied."""

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME


def save_aside(folder: Path, variant: str | None, save: Callable[[Path], None]) -> None:
    """Run `save(temporary folder)`, move what it wrote into `folder` and remove the weight files of earlier saves.

    Without the last step an older `model.safetensors` would win over the shards of a newer save. If `save` fails, the
    folder is as it was. A process that writes nothing (not the main one) changes nothing.

    Raises: NotADirectoryError if `folder` is a file; whatever `save` raises.
    """
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; give a folder to save into")
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the target: moving a file within one file system is a rename.
    aside = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        save(aside)
        written = {path.name for path in aside.iterdir()}
        for name in written:
            _replace(aside / name, folder / name)
        if written:
            _remove_stale(folder, variant, written)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def _replace(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    source.replace(target)


def _remove_stale(folder: Path, variant: str | None, written: set[str]) -> None:
    stem, index = "model", SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        stem, index = f"model.{variant}", index.replace(".json", f".{variant}.json")
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(index)}")
    for path in folder.iterdir():
        if path.name not in written and ours.fullmatch(path.name) and path.is_file():
            path.unlink()


__all__ = ["save_aside"]
