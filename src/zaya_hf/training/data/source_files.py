"""Which files a source names, and of what kind they are."""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .token_files import META, is_token_folder

if TYPE_CHECKING:
    from zaya_hf.training.config import SourceConfig

__all__ = ["RAW_KINDS", "Located", "locate", "source_name"]

STDLIB = "{stdlib}"
#: kinds that are tokenised; the others hold ids
RAW_KINDS = ("text", "jsonl", "parquet", "arrow", "hub")
_COMPRESSED = (".gz", ".zst")
_JSON = (".jsonl", ".ndjson", ".json")
_PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".html")
_CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".hip", ".rs", ".go", ".java", ".js", ".ts", ".sh")
_SUFFIXES = {
    "text": tuple(end + packed for end in (*_PROSE, *_CODE) for packed in ("", *_COMPRESSED)),
    "jsonl": tuple(end + packed for end in _JSON for packed in ("", *_COMPRESSED)),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "megatron": (".idx",),
    "flat": (".npy",),
}
# Of the standard library: tests and generated tables repeat themselves, installed packages are no part of it.
_NO_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3"})
_LONGEST_NAME = 100  # characters, as of names that are given: folders are called by them
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Located:
    """What a source's path stands for.

    Attributes:
        kind: any of SourceConfig's but auto.
        files: (name in messages and digests, path), in the order in which they are read; none of a hub id. Of
            megatron, the .bin files. Of tokens, the folder.
        hub_id: of kind hub.
    """

    kind: str
    files: tuple[tuple[str, Path], ...] = ()
    hub_id: str | None = None


def source_name(source: SourceConfig) -> str:
    """What a source is called in logs: its own name, or one made of its path."""
    if source.name is not None:
        return source.name
    if source.path.rstrip("/") == STDLIB:
        return "stdlib"
    last = source.path.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.")[:_LONGEST_NAME] or "source"


def locate(source: SourceConfig) -> Located:
    """Find the kind and the files of a source.

    Raises:
        ValueError: nothing is there, the kind cannot be told by the name, or is not the one that was given.
    """
    path = source.path.replace(STDLIB, sysconfig.get_path("stdlib"))
    if source.kind == "hub":
        return Located("hub", hub_id=source.path)
    try:
        place = Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{source.path}: the home folder of {path.split('/')[0]} is not known") from None
    try:
        return _on_disk(source, path, place)
    except OSError as error:
        raise ValueError(f"{error.filename or source.path}: {error.strerror or error}") from error


def _on_disk(source: SourceConfig, path: str, place: Path) -> Located:
    """Of a source that is no hub's for certain; `place` is where its `path` is."""
    if is_token_folder(place):
        if source.kind not in ("auto", "tokens"):
            raise ValueError(f"{source.path} is a folder of tokens ({META}), not of kind {source.kind}")
        return Located("tokens", ((place.name, place),))
    if source.kind == "tokens":
        raise ValueError(f"{source.path} is no folder that `zaya data build` wrote: there is no {META} in it")
    if place.is_dir():
        saved = _saved_dataset(source, place)
        if saved is not None:
            return saved
        return _of_names(source, _files_below(place, library=STDLIB in source.path), in_folder=True)
    if place.is_file():
        return _of_names(source, [(place.name, place)], in_folder=False)
    if glob.has_magic(path):
        root = Path(place.anchor)
        try:
            found = sorted(path for path in root.glob(str(place.relative_to(root))) if path.is_file())
        except (ValueError, IndexError, NotImplementedError) as error:
            raise ValueError(f"{source.path} is no pattern that can be looked for: {error}") from None
        if not found:
            raise ValueError(f"no file fits the pattern {source.path}")
        return _of_names(source, _named(found), in_folder=False)
    if source.kind == "megatron" and place.with_name(place.name + ".idx").is_file():  # a prefix, as Megatron has it
        return _of_names(source, [(place.name + ".idx", place.with_name(place.name + ".idx"))], in_folder=False)
    is_path = _has_known_suffix(source.path) or place.parent.is_dir()
    if source.kind == "auto" and _HUB_ID.fullmatch(source.path) and not is_path:
        return Located("hub", hub_id=source.path)
    raise ValueError(f"no such file or folder: {source.path}")


def _named(paths: list[Path]) -> list[tuple[str, Path]]:
    """Names as short as they can be while they differ: relative to the folder that holds all."""
    parents = [path.parent.parts for path in paths]
    common = 0
    while all(len(parts) > common and parts[common] == parents[0][common] for parts in parents):
        common += 1
    return [("/".join(path.parts[common:]), path) for path in paths]


def _files_below(folder: Path, library: bool) -> list[tuple[str, Path]]:
    """All files in a folder and its folders, by name; hidden ones and caches are left out."""
    left_out = {"__pycache__"} | (_NO_LIBRARY if library else set())
    found = []
    for place, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted((path.relative_to(folder).as_posix(), path) for path in found if path.is_file())


def _fail(error: OSError) -> None:
    """os.walk leaves out what it cannot read, unless it is told not to."""
    raise error


def _kind_of(name: str) -> str | None:
    lower = name.lower()
    for kind, suffixes in _SUFFIXES.items():
        if lower.endswith(suffixes):
            return kind
    return None


def _has_known_suffix(name: str) -> bool:
    return _kind_of(name) is not None or name.lower().endswith(".bin")


def _of_names(source: SourceConfig, files: list[tuple[str, Path]], in_folder: bool) -> Located:
    """The kind by the names of the files, and those files that are of it.

    Args:
        in_folder: the files were found in a folder, so that some may be of no kind; else each was named.
    """
    kinds = {name: _bin_kind(path) if name.lower().endswith(".bin") else _kind_of(name) for name, path in files}
    if source.kind == "auto":
        there = sorted({kind for kind in kinds.values() if kind is not None})
        strange = [name for name, kind in kinds.items() if kind is None]
        if len(there) > 1:
            counts = ", ".join(f"{sum(k == kind for k in kinds.values())} of {kind}" for kind in there)
            raise ValueError(f"{source.path} has files of several kinds ({counts}): say which by kind")
        if not there or (strange and not in_folder):
            example = f" ({strange[0]})" if len(files) > 1 and strange else ""
            raise ValueError(
                f"the kind of {source.path} cannot be told by its name{example}: give kind (text, jsonl, parquet, "
                "arrow, hub, tokens, megatron, flat)"
            )
        kind = there[0]
    else:
        kind = source.kind
    wanted = [(name, path) for name, path in files if not in_folder or _fits(kind, kinds[name], name)]
    if kind == "megatron":
        wanted = _megatron_files(source, wanted)
    if not wanted:
        raise ValueError(f"{source.path} has no file of kind {kind} in it")
    return Located(kind, tuple(wanted))


def _fits(kind: str, by_name: str | None, name: str) -> bool:
    """Whether a file of a folder is taken as `kind`."""
    return by_name == kind or (kind == "flat" and name.lower().endswith(".bin"))


def _bin_kind(path: Path) -> str:
    return "megatron" if path.with_suffix(".idx").is_file() else "flat"


def _megatron_files(source: SourceConfig, files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The .bin files, each once, whether .bin, .idx or both were named."""
    found = {}
    for name, path in files:
        if path.suffix.lower() not in (".bin", ".idx"):
            raise ValueError(f"{source.path}: {name} is neither .bin nor .idx, as kind megatron has them")
        for suffix in (".bin", ".idx"):
            if not path.with_suffix(suffix).is_file():
                raise ValueError(f"{source.path}: {path.with_suffix(suffix).name} is missing beside {path.name}")
        found[str(Path(name).with_suffix(".bin").as_posix())] = path.with_suffix(".bin")
    return sorted(found.items())


def _saved_dataset(source: SourceConfig, folder: Path) -> Located | None:
    """The Arrow files of a folder that `save_to_disk` of datasets wrote; None: it is none."""
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json", "splits")
        if not all(isinstance(split, str) for split in splits):
            raise ValueError(f"{folder / 'dataset_dict.json'} is damaged: splits that are no text")
        if source.split not in splits:
            raise ValueError(f"{source.path} has no split {source.split!r}; there is {', '.join(splits)}")
        folder = folder / source.split
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    if source.kind not in ("auto", "arrow"):
        raise ValueError(f"{source.path} was written by save_to_disk of datasets: its kind is arrow, not {source.kind}")
    names: list[str] = []
    for file in _described(state, "_data_files"):
        name = file.get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or name != Path(name).name:
            raise ValueError(f"{state} is damaged: _data_files without names of files")
        names.append(name)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{source.path} is damaged: {missing[0]} is missing")
    return Located("arrow", tuple((name, folder / name) for name in names))


def _described(file: Path, key: str) -> list[Any]:
    """A list in a JSON file that datasets wrote.

    Raises:
        ValueError: it is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get(key), list):
        raise ValueError(f"{file} is damaged: it has no list {key!r}")
    return list(found[key])
