"""Checkpoints of a run that stand whole or not at all, whatever kills the process or the machine, and when.

    checkpoints/step-200.tmp/         a save that is being written, or was killed; the next save removes it
    checkpoints/step-200/             a whole checkpoint: the folder came by one rename, after everything was on disk
        trainer.json                  what the caller wants to know again
        manifest.json                 written last: size and SHA-256 of every other file
        ...                           files of the caller
    checkpoints/step-200.replaced-1/  an older checkpoint of the same step, until its successor stands

Where several processes train together, all call the same functions at the same time, and `folder` is one that all of
them see. What fails in one of them is raised in all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from zaya_hf import atomic
from zaya_hf.json_checks import read_json_object

from .ranks import is_main, on_main, together

__all__ = ["Checkpoint", "CheckpointStore", "complete_saves", "newest_model"]

FORMAT = 1
MANIFEST, DESCRIPTION = "manifest.json", "trainer.json"
MODEL = "model"
_NAME = re.compile(r"step-(0|[1-9]\d*)(?:\.replaced-([1-9]\d*))?")
_HASHERS = 8  # threads; hashlib lets them run side by side
# How files that cannot be written show: torch and safetensors have errors of their own.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, CheckpointException)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        description: what `save` was given.
    """

    path: Path
    step: int
    description: dict[str, Any]

    @property
    def model(self) -> Path:
        """The folder that `from_pretrained` loads."""
        return self.path / MODEL


class CheckpointStore:
    """The checkpoints of one run in `folder`, which is made if need be.

    Args:
        folder: for nothing else.
        keep: how many of the newest ones stay.

    Raises:
        OSError: the folder cannot be made.
        ValueError: `keep` is less than 1.
    """

    def __init__(self, folder: Path, keep: int = 1):
        if keep < 1:
            raise ValueError(f"keep is {keep}; expected at least 1 checkpoint.")
        self.folder, self.keep = folder, keep
        self._damaged: set[Path] = set()
        on_main(lambda: folder.mkdir(parents=True, exist_ok=True))

    def save(
        self, step: int, write: Callable[[Path], None], description: dict[str, Any], spare: int | None = None
    ) -> Path:
        """Write the checkpoint of `step`; older ones go only when it stands, and so do those of later steps.

        Later steps are those of a run that has gone back to an earlier checkpoint: they are no longer on its way.

        Args:
            write: fills the empty folder that it is given; in every process.
            description: JSON values to be had back.
            spare: keep the newest checkpoint of at most so many steps too, for a way back.

        Returns:
            the folder of the checkpoint.

        Raises:
            OSError: it cannot be written, in one line that says what is still good. Nothing else has changed.
        """
        target = self.folder / f"step-{step}"
        partial = target.with_name(f"{target.name}.tmp")
        try:
            on_main(lambda: self._begin(partial))
            together(lambda: write(partial))
            on_main(lambda: _seal(partial, step, description))
            on_main(lambda: self._publish(partial, target))
        except _WRITE_ERRORS as error:
            if is_main():
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full of it
            others = [path.name for path, _ in self._found() if path != target]
            still = f"{others[0]} stays as it is" if others else "there is no earlier one"
            raise OSError(f"the checkpoint {target} could not be written ({one_line(error)}); {still}") from error
        on_main(lambda: self._prune(target, step, spare))
        return target

    def newest(
        self,
        say: Callable[[str], None] | None = None,
        accepts: Callable[[dict[str, Any]], bool] | None = None,
        at_most: int | None = None,
    ) -> Checkpoint | None:
        """The newest whole checkpoint; None if there is none. Every file of it has been read and compared.

        Args:
            say: is told of each newer one that is incomplete or damaged, and why; in the main process only.
            accepts: of whole ones, says by their description whether they count; None: all do.
            at_most: pass over those of more steps.

        Raises:
            OSError: one cannot be read, which says nothing about whether it is whole.
            ValueError: one was written by a later version of this package.
        """
        found = on_main(lambda: self._newest(say, accepts, at_most))
        return None if found is None else Checkpoint(*found)

    def names(self) -> list[str]:
        """Of the folders of complete saves, whole or damaged, the newest first."""
        return on_main(lambda: [path.name for path, _ in self._found()])

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints of more steps than `step`: the run has gone back and will not come by them again."""
        on_main(lambda: self._remove_if(lambda path, other: other > step))

    def remove(self) -> None:
        """Delete all checkpoints, and the folder if nothing else is in it. Nothing there is no error."""
        on_main(self._remove)

    def _remove(self) -> None:
        for path in _entries(self.folder):
            if _NAME.fullmatch(path.name.removesuffix(".tmp")):
                shutil.rmtree(path, ignore_errors=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _found(self) -> list[tuple[Path, int]]:
        return complete_saves(self.folder)

    def _newest(
        self,
        say: Callable[[str], None] | None,
        accepts: Callable[[dict[str, Any]], bool] | None,
        at_most: int | None,
    ) -> tuple[Path, int, dict[str, Any]] | None:
        for path, step in self._found():
            if at_most is not None and step > at_most:
                continue
            problem = damage(path, step)
            if problem is not None:
                self._damaged.add(path)
                if say is not None:
                    say(f"checkpoint {path} is passed over: {problem}")
                continue
            description = read_json_object(path / DESCRIPTION, "a checkpoint's description")
            if accepts is None or accepts(description):
                return path, step, description
        return None

    def _begin(self, partial: Path) -> None:
        """Make `partial`, empty. What earlier saves and removals left half done goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in _entries(self.folder):
            if path.name.startswith("step-") and path.name.endswith(".tmp"):
                shutil.rmtree(path)
        partial.mkdir()

    def _publish(self, partial: Path, target: Path) -> None:
        """The moment from which on `partial` is the checkpoint. At any other moment the one before is."""
        if target.exists():
            number = 1
            while (aside := target.with_name(f"{target.name}.replaced-{number}")).exists():
                number += 1
            target.replace(aside)
        partial.replace(target)
        _sync_folder(self.folder)

    def _prune(self, current: Path, step: int, spare: int | None) -> None:
        """Remove what is damaged, of later steps or replaced, and all but the newest `keep` and the one to spare."""
        obsolete = {path for path, other in self._found() if other >= step and path != current} | self._damaged
        good = [(path, other) for path, other in self._found() if path not in obsolete or path == current]
        way_back = [path for path, other in good if spare is not None and other <= spare]
        stay = {*(path for path, _ in good[: self.keep]), *way_back[:1]}
        self._remove_if(lambda path, _: path not in stay)
        self._damaged.clear()

    def _remove_if(self, goes: Callable[[Path, int], bool]) -> None:
        for path, step in self._found():
            if goes(path, step):
                # First out of the way as a whole: what is half removed must not look like a damaged checkpoint.
                removed = path.with_name(f"{path.name}.tmp")
                path.replace(removed)
                shutil.rmtree(removed, ignore_errors=True)


def complete_saves(folder: Path) -> list[tuple[Path, int]]:
    """Of a run's checkpoints in `folder`, those whose save was completed, whole or damaged since, with their steps; the
    newest first. In this process alone.

    Raises:
        OSError: `folder` cannot be read. If it is not there, there are none.
    """
    found = []
    for path in _entries(folder):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            # One that was replaced is older than what took its name.
            found.append(((int(match[1]), match[2] is None, int(match[2] or 0)), path))
    return [(path, step) for (step, _, _), path in sorted(found, reverse=True)]


def _entries(folder: Path) -> list[Path]:
    """What is in `folder`. (`Path.glob` would take one that cannot be read for an empty one.)"""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def stand_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill `folder` anew by `write`, which is given an empty one: what is there stays until all is on disk.

    For a moment between two renames there is neither; a process that is killed just then leaves the old folder under
    the name ``folder.replaced`` beside it.

    Raises:
        OSError: it cannot be written; `folder` is as it was.
    """
    partial, aside = (folder.with_name(f"{folder.name}.{ending}") for ending in ("tmp", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        sync_tree(partial)
    except _WRITE_ERRORS as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{folder} could not be written ({one_line(error)})") from error
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.replace(aside)
    partial.replace(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def newest_model(folder: Path, say: Callable[[str], None] | None = None) -> Path:
    """The model that an earlier run left: of a run that ended its final one, else that of its newest checkpoint.

    Args:
        folder: of a run, or of one of its checkpoints.
        say: as of `CheckpointStore.newest`.

    Returns:
        a folder that `from_pretrained` loads, or one with an adapter.

    Raises:
        FileNotFoundError: there is no model in it.
        ValueError: it is a checkpoint, and damaged; or a later version of this package wrote it.
    """
    if (folder / MANIFEST).is_file():
        problem = on_main(lambda: damage(folder))
        if problem is not None:
            raise ValueError(f"checkpoint {folder} is damaged: {problem}")
        return folder / MODEL
    if _holds_model(folder / MODEL):
        return folder / MODEL
    found = CheckpointStore(folder / "checkpoints").newest(say) if (folder / "checkpoints").is_dir() else None
    if found is None:
        raise FileNotFoundError(
            f"{folder} has no model to start from: neither model/ nor a whole checkpoint in checkpoints/"
        )
    return found.model


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def damage(path: Path, step: int | None = None) -> str | None:
    """What is wrong with the checkpoint in `path`, in words that name the file; None if it is whole.

    Args:
        step: that it should be of; None: any.

    Raises:
        OSError: it cannot be read: of that nobody can tell whether it is whole.
        ValueError: a later version of this package wrote it: likewise.
    """
    try:
        manifest = read_json_object(path / MANIFEST, "a checkpoint's manifest")
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        return one_line(error)
    if isinstance(found := manifest.get("format"), int) and found > FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {found}, this version reads {FORMAT}: go on with the version that wrote it, "
            "or move it away"
        )
    try:
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']!r}; this version reads {FORMAT}"
        if step is not None and manifest["step"] != step:
            return f"{MANIFEST} is of step {manifest['step']!r}"
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        if DESCRIPTION not in files:
            return f"{MANIFEST} does not list {DESCRIPTION}"
        for name, (size, _) in files.items():  # quick to see, so before anything is read
            actual = _size(path / name)
            if actual is None:
                return f"{name} is missing"
            if actual != size:
                return f"{name} has {actual} bytes; {MANIFEST} says {size}"
        for name, digest in _digests(path, files).items():
            if digest != files[name][1]:
                return f"the SHA-256 of {name} is {digest[:12]}...; {MANIFEST} says {files[name][1][:12]}..."
    except OSError as error:
        raise _unreadable(path, error) from error
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"{MANIFEST} is not one that this package wrote"
    return None


def _unreadable(path: Path, error: OSError) -> OSError:
    return OSError(f"checkpoint {path} cannot be read ({one_line(error)}): see to that, or move it away")


def _size(path: Path) -> int | None:
    """Bytes of a file; None if there is none. (From Python 3.14 on, `Path.is_file` is False for all that fails.)"""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _seal(folder: Path, step: int, description: dict[str, Any]) -> None:
    """Describe what is in `folder`, last of all by its manifest, and have the machine write all of it to disk now."""
    atomic.write_json(folder / DESCRIPTION, description)
    sync_tree(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    digests = _digests(folder, names)
    entries = {name: {"size": (folder / name).stat().st_size, "sha256": digests[name]} for name in names}
    atomic.write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": entries})
    _sync_folder(folder)


def sync_tree(folder: Path) -> None:
    """Have the machine write everything in `folder` to disk now: files, then the names in each folder."""
    paths = sorted(folder.rglob("*"))
    for path in paths:
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    for path in (*(path for path in paths if path.is_dir()), folder):
        _sync_folder(path)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each file."""
    names = list(names)
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """Make the names in a folder last. Windows has no such call, and does without."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something; its type where it has none."""
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))  # an error and its trace
        return one_line(failure[0])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
