"""Settings of a run: YAML files, `key=value` overrides, and one line for everything that is wrong with them.

    config = load("train/cpu-small.yaml", ["optimizer.lr=1e-3", "data.sources.0.weight=2", "guard.spike_z=null"])

A file may start from another: ``extends: pretrain-4k.yaml`` (relative to the file that says so). Sections are merged
key by key, also the mappings `model.config` and `model.overrides`; lists and everything else are replaced.

Paths in the settings themselves (`out`, sources, checkpoints) are relative to the working directory, as on any command
line: a recipe is no part of the data that it trains on.
"""

from __future__ import annotations

import copy
import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_hf.resources import resource

from .config import TrainingConfig
from .settings_errors import check, takes_text
from .settings_yaml import Key, Settings, dotted, read, read_value, write

__all__ = ["dump", "find", "load"]

COMMAND_LINE = "command line"
_MOST_DIGITS = 9  # of the number of an entry in a list


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a settings file, apply overrides, check everything.

    Args:
        path: a YAML file, or the bare name of a recipe that comes with zaya_hf, such as ``cpu-small``.
        overrides: ``key=value`` each, with dotted keys and values in YAML. Entries of lists have numbers (the next free
            one appends), and sections that are null or absent are created: ``model.lora.r=8``. Where text is expected,
            the value is taken as it is.

    Raises:
        ValueError: one line: the file and the line in it, the dotted key, what is wrong and what would be right; for
            unknown keys the nearest known one. Up to three errors at once, separated by "; ".
    """
    settings = _with_bases(find(path), ())
    for override in overrides:
        _apply(settings, override)
    return check(settings)


def dump(config: TrainingConfig) -> str:
    """The whole config as YAML, defaults included; `load` of it gives an equal one."""
    return write(config.model_dump(mode="json"))


def find(path: str | Path) -> Path:
    """The file that `path` names: itself, or a recipe of zaya_hf if it is a bare name and no such file is here.

    Raises:
        ValueError: there is neither.
    """
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give a settings file, for a run's folder {file / 'config.yaml'}")
    recipes = {found.stem: found for found in sorted(resource("train").glob("*.yaml"))}
    if str(path) in recipes:
        return recipes[str(path)]
    near = difflib.get_close_matches(file.stem, recipes, n=1)
    hint = f"; did you mean the recipe {near[0]}?" if near else f"; recipes of zaya_hf: {', '.join(recipes)}"
    raise ValueError(f"no such file: {file}{hint}")


def _with_bases(file: Path, below: tuple[Path, ...]) -> Settings:
    """The settings of a file over those of the file that it extends."""
    if file.resolve() in below:
        raise ValueError(f"{file} extends itself, by way of {', '.join(path.name for path in below)}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no settings file: it is not UTF-8 text (byte {error.start})") from None
    own = read(text, str(file))
    base = own.values.pop("extends", None)
    if base is None:
        return own
    where = own.origins[("extends",)]
    if not isinstance(base, str):
        raise ValueError(f"{where}: extends is {base!r}; expected the name of a settings file")
    found = file.parent / base
    if not found.is_file():
        raise ValueError(f"{where}: extends {base}, but there is no file {found}")
    settings = _with_bases(found, (*below, file.resolve()))
    _merge(settings.values, own.values)
    settings.origins.update(own.origins)
    return settings


def _merge(base: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _merge(base[name], value)
        else:
            base[name] = copy.deepcopy(value)  # a YAML alias is one object in two places


def _apply(settings: Settings, override: str) -> None:
    """Set one value, in place."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{COMMAND_LINE}: {override!r} is no setting; expected key=value, e.g. optimizer.lr=1e-3")
    parts = name.strip().split(".")
    if long := [part for part in parts if part.isdecimal() and len(part) > _MOST_DIGITS]:
        raise ValueError(f"{COMMAND_LINE}: {long[0][:20]}... has {len(long[0]):,} digits and is no number of an entry")
    key: Key = tuple(int(part) if part.isdecimal() else part for part in parts)
    if "" in key or isinstance(key[0], int):
        raise ValueError(f"{COMMAND_LINE}: {name!r} is no dotted key; expected e.g. data.sources.0.path")
    if not text.strip():
        raise ValueError(f"{COMMAND_LINE}: {dotted(key)} has no value; write {dotted(key)}=null for none")
    container: Any = settings.values
    for depth, (part, following) in enumerate(itertools.pairwise(key)):
        container = _entry(container, part, key[:depth], [] if isinstance(following, int) else {})
    value = text if takes_text(key, text) else read_value(text, f"{COMMAND_LINE}: {dotted(key)}")
    _entry(container, key[-1], key[:-1], value, replace=True)
    for inside in [known for known in settings.origins if known[: len(key)] == key]:
        del settings.origins[inside]
    for depth in range(1, len(key)):
        settings.origins.setdefault(key[:depth], COMMAND_LINE)
    settings.origins[key] = COMMAND_LINE


def _entry(container: Any, part: str | int, where: Key, value: Any, *, replace: bool = False) -> Any:
    """The entry of a section or list; `value` where there is none, or in its place."""
    if isinstance(container, list):
        if not isinstance(part, int) or part > len(container):
            wanted = f"a number from 0 to {len(container)}"
            raise ValueError(f"{COMMAND_LINE}: {dotted(where)} is a list: {part!r} is not {wanted}")
        if part == len(container):
            container.append(value)
        elif replace or container[part] is None:
            container[part] = value
        return container[part]
    if not isinstance(container, dict):
        raise ValueError(f"{COMMAND_LINE}: {dotted(where)} is {container!r}, which has no {part!r} inside")
    part = str(part)
    if replace or container.get(part) is None:
        container[part] = value
    return container[part]
