"""What lm-eval's task files say of a task, without its data: own folders first, and of lm-eval's only those needed.

lm-eval's index of all its 14,000 files takes 20 seconds to build; the few folders that a suite needs take milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind

from zaya_hf.hints import near_hint

from .quiet import quiet

__all__ = ["LM_EVAL_TASKS", "Leaf", "leaves", "manager"]

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).resolve().parent

_NAMED = re.compile(rb"^[\"']?(?:task|group)[\"']?\s*:\s*[\"']?([\w.:+/-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Leaf:
    """One task as its file defines it.

    Attributes:
        name: in lm-eval.
        config: the keys of the file and of those it includes; functions are still their names.
        file: where it is defined; None for one that is written out inside a group.
    """

    name: str
    config: Mapping[str, Any]
    file: Path | None


def manager(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """lm-eval's task manager for `names` and all that they consist of.

    Args:
        names: of tasks, groups or tags.
        folders: with own task files, which come before lm-eval's; of two folders the later one.

    Raises:
        ValueError: a name is in none of the folders, nor one of lm-eval's.
    """
    own = [str(folder) for folder in folders]
    places: list[str] = []
    with quiet():
        found = TaskManager(include_path=own, include_defaults=False)
        while missing := _missing(found, names):
            nearer = [place for name in missing for place in _places().get(name, ()) if place not in places]
            if not nearer:  # a tag, or a member that is named in a way of its own
                break
            places += dict.fromkeys(nearer)
            found = TaskManager(include_path=[*places, *own], include_defaults=False)
        if missing:
            unknown = [name for name in missing if not _mentioned(name)]
            if not unknown:
                found = TaskManager(include_path=own, include_defaults=True)
                unknown = _missing(found, names)
            if unknown:
                where = "" if unknown[0] in names else " (a member of a group)"
                own_names = TaskManager(include_path=own, include_defaults=False).all_tasks
                hint = near_hint(unknown[0], own_names) or near_hint(unknown[0], _places())
                raise ValueError(
                    f"there is no task {unknown[0]}{where}, neither in {', '.join(own) or 'a folder'} nor in lm-eval"
                    f"{hint}"
                )
    return found


def leaves(tasks: TaskManager, name: str) -> list[Leaf]:
    """The tasks that `name` consists of, in lm-eval's order: itself, or the members of a group or a tag."""
    return list(_leaves(tasks, name, {}, []))


def _missing(tasks: TaskManager, names: Sequence[str]) -> list[str]:
    missing: list[str] = []
    for name in names:
        for _ in _leaves(tasks, name, {}, missing):
            pass
    return list(dict.fromkeys(missing))


def _leaves(tasks: TaskManager, name: str, overrides: dict[str, Any], missing: list[str]) -> Iterator[Leaf]:
    """As lm-eval builds them, with what groups override; names that are not known go to `missing`."""
    entry = tasks.task_index.get(name)
    if entry is None:
        missing.append(name)
    elif entry.kind is Kind.GROUP:
        yield from _members(tasks, name, entry.cfg or {}, overrides, missing)
    elif entry.kind is Kind.TAG:
        for member in sorted(entry.tags):
            yield from _leaves(tasks, member, overrides, missing)
    else:
        config = {**(entry.cfg or {}), **overrides}
        config["task"] = name
        yield Leaf(name, config, Path(entry.yaml_path) if entry.yaml_path else None)


def _members(
    tasks: TaskManager, group: str, config: Mapping[str, Any], overrides: dict[str, Any], missing: list[str]
) -> Iterator[Leaf]:
    structural = {"group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "include"}
    overrides = {**{key: value for key, value in config.items() if key not in structural}, **overrides}
    members = config.get("task") or []
    for member in [members] if isinstance(members, str) else members:
        if isinstance(member, str):
            yield from _leaves(tasks, member, overrides, missing)
        elif "group" in member:
            if member["group"] in tasks.task_index:
                inner = {key: value for key, value in member.items() if key != "group"}
                yield from _leaves(tasks, member["group"], {**overrides, **inner}, missing)
            else:
                yield from _members(tasks, f"{group}::{member['group']}", member, overrides, missing)
        elif member["task"] in tasks.task_index:
            yield from _leaves(tasks, member["task"], {**overrides, **member}, missing)
        elif {"dataset_path", "custom_dataset", "class"} & {*member, *overrides}:  # defined inside the group
            name = f"{group}::{member['task']}"
            yield Leaf(name, {**overrides, **member, "task": name}, None)
        else:
            missing.append(member["task"])


@cache
def _places() -> dict[str, tuple[str, ...]]:
    """Folders of lm-eval's that define a task or group, by its name."""
    found: dict[str, dict[str, None]] = {}
    for file in sorted(LM_EVAL_TASKS.rglob("*.yaml")):
        for name in _NAMED.findall(file.read_bytes()):
            found.setdefault(name.decode(), {})[str(file.parent)] = None
    return {name: tuple(folders) for name, folders in found.items()}


def _mentioned(name: str) -> bool:
    """Whether any of lm-eval's files has the name in it, such as of a tag."""
    word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
    return any(word.search(file.read_bytes()) for file in LM_EVAL_TASKS.rglob("*") if _is_definition(file))


def _is_definition(file: Path) -> bool:
    return file.is_file() and (file.suffix == ".yaml" or file.name.endswith("_yaml"))
