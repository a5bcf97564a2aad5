"""Saving a model so that the folder never silently mixes two saves: written aside, then moved into place, then tidied.

What a load finds while a save runs, and after one that failed or was killed at any moment:

- the old model, or the new one, whole; or
- an error that names what is missing. If a save changes config.json or another file beside the weights, config.json is
  absent from the folder for the few renames in which those files and the weights change over. A save that changes the
  weights alone (a checkpoint of a training run) has no such moment: it takes effect with one rename or one removal.

After an error (not a kill) before the weights have changed over, the files are put back as they were. The promise is
about processes, not about a machine that loses power before its disk is written, and it holds for one writer at a time.
A killed save leaves its files in a `.saving-<host>-<pid>-*` folder; the next save into the folder removes it.
"""

import filecmp
import json
import re
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .temporary_folders import make_temporary, remove_temporary


def check_target(folder: Path) -> None:
    """Raise NotADirectoryError (one line) if `folder` is no folder and cannot become one. Changes nothing."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        problem = "is a file" if place.exists() else None
        if problem is None and place.is_symlink():
            problem = f"is a link to {place.readlink()}, which does not exist"
        if problem is not None:
            inside = "" if place == folder else f" ({folder} would lie inside it)"
            raise NotADirectoryError(f"{place} {problem}; give a folder to save into{inside}")


def save_elsewhere(save: Callable[[Path], None]) -> None:
    """Run `save(temporary folder)` for a process that writes nothing, but takes part in gathering the tensors.

    The folder that is saved into is not touched: another process is working in it.
    """
    with tempfile.TemporaryDirectory(prefix="zaya-save-", ignore_cleanup_errors=True) as private:
        save(Path(private))


def save_aside(folder: Path, variant: str | None, save: Callable[[Path], None]) -> None:
    """Run `save(temporary folder)`, move what it wrote into `folder` and remove the weight files of earlier saves.

    Without the last step an older `model.safetensors` would win over the shards of a newer save. If `save` fails, the
    folder is as it was. Shards get names that no earlier save in the folder uses (`model-2-00001-of-00003.safetensors`
    where the plain name is taken). See the module for what is promised when a save does not finish.

    Raises: NotADirectoryError if `folder` cannot be a folder; whatever `save` raises; OSError from the disk.
    """
    check_target(folder)
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the target: moving a file within one file system is a rename.
    aside = make_temporary(folder, ".saving")
    try:
        save(aside)
        written = {path.name for path in aside.iterdir()}
        if written:
            _share_weights(aside, written)
            _install(aside, folder, _Names.of(variant))
    finally:
        remove_temporary(aside)
        if not existed:
            # Fails where files are in it, and where somebody else has removed it.
            with suppress(OSError):
                folder.rmdir()


def _share_weights(aside: Path, names: set[str]) -> None:
    """Give the weight files the mode of any new file: safetensors creates them for their owner alone."""
    probe = aside / ".mode"
    probe.touch()  # asks the umask without setting it, which would be seen by other threads
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for name in names:
        if name.endswith(".safetensors"):
            (aside / name).chmod(mode)


# --- moving into place -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """File names of the weights of one variant: a single file, or an index and its shards."""

    single: str
    index: str
    shard: re.Pattern[str]

    @classmethod
    def of(cls, variant: str | None) -> "_Names":
        single, index = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
        if variant is not None:
            single, index = f"model.{variant}.safetensors", index.replace(".json", f".{variant}.json")
        stem = re.escape(single.removesuffix(".safetensors"))
        return cls(single, index, re.compile(rf"({stem})(-\d+)?(-\d{{5}}-of-\d{{5}}\.safetensors)"))


class _Moves:
    """Moves into a folder that can be taken back; what they replace is kept in `kept` until then."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder, self._kept = folder, kept
        self._done: list[tuple[Path | None, Path]] = []

    def stash(self, name: str) -> None:
        """Move `name` out of the folder, if it is there."""
        target = self._folder / name
        if target.exists() or target.is_symlink():
            self._kept.mkdir(exist_ok=True)
            target.replace(self._kept / name)
            self._done.append((self._kept / name, target))

    def put(self, source: Path, name: str) -> None:
        """Move `source` into the folder as `name`."""
        self.stash(name)
        source.replace(self._folder / name)
        self._done.append((None, self._folder / name))

    def take_back(self) -> None:
        """Undo in reverse order, so that config.json, which was moved out first, is the last to come back."""
        with suppress(OSError):
            for kept, target in reversed(self._done):
                if kept is None:
                    target.unlink()
                else:
                    kept.replace(target)


def _install(aside: Path, folder: Path, names: _Names) -> None:
    """Move the files of a finished save from `aside` into `folder`, in the order that the module's promise needs."""
    written = sorted(path.name for path in aside.iterdir())
    shards = _fresh_names(aside, folder, names, [name for name in written if names.shard.fullmatch(name)])
    # The file whose arrival makes the weights the new ones, and the one of the other form, which an old save may have.
    switch, other = (names.index, names.single) if names.index in written else (names.single, names.index)
    beside = [name for name in written if name not in (switch, CONFIG_NAME, *shards)]
    changed = [name for name in beside if not _same(aside / name, folder / name)]
    config_too = bool(changed) or not _same(aside / CONFIG_NAME, folder / CONFIG_NAME)
    moves = _Moves(folder, aside / ".replaced")
    try:
        for name, fresh in shards.items():
            moves.put(aside / name, fresh)
        if config_too:
            # From here to the end a load fails with "has no config.json".
            moves.stash(CONFIG_NAME)
            moves.stash(other)
            for name in changed:
                moves.put(aside / name, name)
        if (folder / switch).is_dir():
            moves.stash(switch)
        (aside / switch).replace(folder / switch)
    except BaseException:
        moves.take_back()
        raise
    if config_too:
        (aside / CONFIG_NAME).replace(folder / CONFIG_NAME)
    # Before the old shards: an old single file is what a load still reads, and an old index would name missing ones.
    (folder / other).unlink(missing_ok=True)
    current = set(shards.values())
    for path in sorted(folder.iterdir()):
        if path.name not in current and names.shard.fullmatch(path.name) and path.is_file():
            path.unlink()


def _fresh_names(aside: Path, folder: Path, names: _Names, shards: list[str]) -> dict[str, str]:
    """For every new shard a name that no file in `folder` has and its index does not list; renamed in the new index.

    A name of an earlier save must not be filled with new tensors while the old index may still be read.
    """
    taken = {path.name for path in folder.iterdir()}
    with suppress(OSError, ValueError, AttributeError, TypeError):
        # An index that cannot be read cannot be loaded either, so what it may list does not matter.
        taken |= set(json.loads((folder / names.index).read_text(encoding="utf-8"))["weight_map"].values())
    number, fresh = 1, {name: name for name in shards}
    while taken & set(fresh.values()):
        number += 1
        fresh = {name: names.shard.sub(rf"\1-{number}\3", name) for name in shards}
    if number > 1:
        index = json.loads((aside / names.index).read_text(encoding="utf-8"))
        index["weight_map"] = {tensor: fresh[shard] for tensor, shard in index["weight_map"].items()}
        (aside / names.index).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return fresh


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


__all__ = ["check_target", "save_aside", "save_elsewhere"]
