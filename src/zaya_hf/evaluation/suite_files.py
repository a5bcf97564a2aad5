"""Suites: which tasks an evaluation consists of, and how each is asked; `eval/suites/*.yaml` and files of one's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from zaya_hf.hints import near_hint
from zaya_hf.installed import require
from zaya_hf.resources import resource

__all__ = ["ABILITIES", "Entry", "Suite", "read_suite", "suite_names", "task_folders"]

ABILITIES = ("reasoning", "knowledge", "math", "code", "language")

_METRIC = re.compile(r"[\w@.:/+-]+,[\w@.:/+-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Entry:
    """One task of a suite.

    Attributes:
        task: its name in lm-eval or in an own folder; a group or tag stands for all its members.
        title: for people.
        ability: one of `ABILITIES`.
        metric: key of the metric that counts, "NAME,FILTER" as lm-eval writes it.
        items: how many it has, over all members of a group.
        prompt_tokens, answer_tokens: of a typical prompt with its examples and of one answer, for estimates.
        answers: per item: choices that are scored, or texts that are generated.
        also: keys of further metrics to report.
        num_fewshot: solved examples in a prompt; None is what the task's file says, and 0 where it says nothing.
        gen_kwargs: of generated answers, over those of the task's file.
        limit: only so many items, the first ones; of a group so many of each member.
        private_items: whether texts of items must stay out of everything that is written.
        unsafe_code: whether answers are run as programs.
        cluster_by: what items hang together by: "task" (the members of a group), a field of the documents, or nothing.
        chance: the score of one who guesses.
        note: what to keep in mind when reading the score.
        group: its own name where it has members; found in the definitions, not in the file.
    """

    task: str
    title: str
    ability: str
    metric: str
    items: int
    prompt_tokens: int
    answer_tokens: int
    answers: int = 1
    also: tuple[str, ...] = ()
    num_fewshot: int | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    private_items: bool = False
    unsafe_code: bool = False
    cluster_by: str | None = None
    chance: float | None = None
    note: str = ""
    group: str | None = None


@dataclass(frozen=True)
class Suite:
    """Tasks that are evaluated together.

    Attributes:
        name, title, description: of the suite.
        entries: its tasks, in the order of a report.
        folders: with task files of the suite's own, beside those that come with zaya_hf.
    """

    name: str
    title: str
    description: str
    entries: tuple[Entry, ...]
    folders: tuple[Path, ...] = ()


def suite_names() -> list[str]:
    """Names of the suites that come with zaya_hf."""
    return sorted(file.stem for file in resource("eval", "suites").glob("*.yaml"))


def task_folders(suite: Suite) -> list[Path]:
    """Folders with task files: those that come with zaya_hf, then the suite's own, which win."""
    return [resource("eval", "tasks"), *suite.folders]


def read_suite(name_or_path: str | Path) -> Suite:
    """A suite as its file has it, checked by itself: keys, types and bounds, and that no task comes twice.

    Args:
        name_or_path: one of `suite_names()`, or a YAML file.

    Raises:
        ValueError: there is none of that name, or its file is wrong; one line with the place and what would be right.
    """
    file = _find(name_or_path)
    content = _read_yaml(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected keys and values: name, title, description, entries")
    _check_keys(content, ("name", "title", "description", "entries", "task_folders"), str(file))
    for key in ("name", "title", "description"):
        _check_text(content, key, str(file))
    if not _NAME.fullmatch(content["name"]):
        raise ValueError(f"{file}: name is {content['name']!r}; expected letters, digits, '.', '_' and '-'")
    listed = content.get("entries")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{file}: entries is {listed!r}; expected a list of tasks")
    entries = [_entry(one, f"{file}: entry {number}") for number, one in enumerate(listed, 1)]
    seen: set[str] = set()
    for entry in entries:
        if entry.task in seen:
            raise ValueError(f"{file}: {entry.task} is there twice; a task is evaluated once in a suite")
        seen.add(entry.task)
    return Suite(
        name=content["name"],
        title=content["title"],
        description=" ".join(content["description"].split()),
        entries=tuple(entries),
        folders=_own_folders(content.get("task_folders", []), file),
    )


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if _NAME.fullmatch(text) and text in suite_names():
        return resource("eval", "suites", f"{text}.yaml")
    if Path(text).is_file():
        return Path(text)
    if "/" in text or text.endswith((".yaml", ".yml")):
        raise ValueError(f"there is no suite file {text}")
    names = suite_names()
    raise ValueError(
        f"there is no suite {text!r}; there are {', '.join(names)}, and YAML files{near_hint(text, names)}"
    )


def _own_folders(listed: Any, file: Path) -> tuple[Path, ...]:
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{file}: task_folders is {listed!r}; expected a list of folders")
    found = tuple((file.parent / one).resolve() for one in listed)
    for folder in found:
        if not folder.is_dir():
            raise ValueError(f"{file}: task_folders: there is no folder {folder}")
    return found


def _read_yaml(file: Path) -> Any:
    require("reading a suite", "pyyaml")
    import yaml

    class Loader(yaml.SafeLoader):
        """Of two equal keys plain YAML takes the last without a word."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for position, key in enumerate(keys):
                if key in keys[:position]:
                    line = node.value[position][0].start_mark.line + 1
                    raise ValueError(f"{file}, line {line}: {key} is there twice")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: no YAML: {' '.join(str(error).split())}") from None


def _entry(content: Any, where: str) -> Entry:
    known = [one for one in fields(Entry) if one.name != "group"]
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}; expected keys and values: task, title, ability, metric, items, ...")
    if isinstance(content.get("task"), str):
        where += f" ({content['task']})"
    _check_keys(content, [one.name for one in known], where)
    for one in known:
        needed = one.default is MISSING and one.default_factory is MISSING
        if needed and content.get(one.name) is None:
            raise ValueError(f"{where}: {one.name} is missing")
    for key in ("task", "title", "ability", "metric", "cluster_by", "note"):
        _check_text(content, key, where)
    if content["ability"] not in ABILITIES:
        known_abilities = f"{', '.join(ABILITIES)}{near_hint(content['ability'], ABILITIES)}"
        raise ValueError(f"{where}: ability is {content['ability']!r}; expected one of {known_abilities}")
    also = content.get("also") or []
    if not isinstance(also, list):
        raise ValueError(f"{where}: also is {also!r}; expected a list of metrics")
    for metric in [content["metric"], *also]:
        if not isinstance(metric, str) or not _METRIC.fullmatch(metric):
            raise ValueError(f'{where}: metric is {metric!r}; expected "NAME,FILTER", such as "acc,none"')
    for key, least in (("items", 1), ("prompt_tokens", 0), ("answer_tokens", 1), ("answers", 1), ("limit", 1)):
        _check_whole(content, key, least, where)
    _check_whole(content, "num_fewshot", 0, where)
    for key in ("private_items", "unsafe_code"):
        if not isinstance(content.get(key, False), bool):
            raise ValueError(f"{where}: {key} is {content[key]!r}; expected true or false")
    chance = content.get("chance")
    if chance is not None and not (_is_number(chance) and 0 <= chance < 1):
        raise ValueError(f"{where}: chance is {chance!r}; expected a number from 0 to below 1, such as 0.25")
    settings = content.get("gen_kwargs") or {}
    _check_generation(settings, where)
    given = {key: value for key, value in content.items() if value is not None}
    return Entry(**{**given, "also": tuple(also), "gen_kwargs": dict(settings)})


_GENERATION: dict[str, str] = {
    "max_gen_toks": "a whole number of at least 1",
    "until": "a list of texts",
    "do_sample": "true or false",
    "temperature": "a number of at least 0",
    "top_p": "a number above 0, at most 1",
    "top_k": "a whole number of at least 1",
    "min_p": "a number from 0 to 1",
}


def _check_generation(settings: Any, where: str) -> None:
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: gen_kwargs is {settings!r}; expected keys and values")
    _check_keys(settings, list(_GENERATION), f"{where}: gen_kwargs")
    for key, value in settings.items():
        right = {
            "max_gen_toks": _is_whole(value) and value >= 1,
            "until": isinstance(value, list) and all(isinstance(text, str) and text for text in value),
            "do_sample": isinstance(value, bool),
            "temperature": _is_number(value) and value >= 0,
            "top_p": _is_number(value) and 0 < value <= 1,
            "top_k": _is_whole(value) and value >= 1,
            "min_p": _is_number(value) and 0 <= value <= 1,
        }[key]
        if not right:
            raise ValueError(f"{where}: gen_kwargs.{key} is {value!r}; expected {_GENERATION[key]}")


def _check_keys(content: Mapping[Any, Any], known: Any, where: str) -> None:
    for key in content:
        if key not in known:
            hint = near_hint(str(key), known) or f"; there are {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key}{hint}")


def _check_text(content: Mapping[str, Any], key: str, where: str) -> None:
    if key in ("name", "title", "description") and not content.get(key):
        raise ValueError(f"{where}: {key} is missing")
    if content.get(key) is not None and not isinstance(content[key], str):
        raise ValueError(f"{where}: {key} is {content[key]!r}; expected text")


def _check_whole(content: Mapping[str, Any], key: str, least: int, where: str) -> None:
    value = content.get(key)
    if value is not None and not (_is_whole(value) and value >= least):
        raise ValueError(f"{where}: {key} is {value!r}; expected a whole number of at least {least}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
