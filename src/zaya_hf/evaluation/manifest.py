"""The folder of an evaluation: its manifest, which says what was run and which runs are shown side by side.

    DIR/manifest.json                    command, suite, models, versions, hardware, and the runs that are compared
    DIR/runs/<model>--<task>--<key>/     key.json, result.json (last: the run is complete), samples.jsonl
    DIR/report.html, DIR/report.md

Runs stay in the folder when something has changed since; the manifest then names the new ones only.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zaya_hf import __version__, owned_folders
from zaya_hf.atomic import write_json
from zaya_hf.evaluation.run_key import device_kind, digest

__all__ = ["FORMAT", "JOURNAL", "KEY", "RESULT", "SAMPLES", "Folder", "hardware", "now", "versions"]

FORMAT = 1
MANIFEST, RUNS = "manifest.json", "runs"
KEY, RESULT, SAMPLES, JOURNAL = "key.json", "result.json", "samples.jsonl", "journal"
_MARK = ".zaya-eval"
_MADE_BY = "zaya eval"
_PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "datasets", "numpy", "scipy")


class Folder:
    """An evaluation's folder, as it is on disk.

    Args:
        path: need not exist.

    Raises:
        ValueError: its manifest cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest: dict[str, Any] = self._read()

    @classmethod
    def owned(cls, path: Path) -> AbstractContextManager[None]:
        """Hold `path`, making it if need be, against other processes.

        Raises:
            ValueError: it is not empty and no evaluation's, or another process evaluates in it.
        """
        return owned_folders.owned(
            path,
            _MARK,
            signs=[MANIFEST],
            foreign=f"{path} exists and is not the folder of an earlier evaluation: choose another --out",
            busy=f"another process evaluates in {path}: wait for it, or choose another --out",
        )

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.path / RUNS / name

    def is_done(self, name: str) -> bool:
        """Whether the run is complete."""
        return (self.run(name) / RESULT).is_file()

    def result(self, name: str) -> dict[str, Any]:
        """What a complete run found.

        Raises:
            ValueError: its file cannot be read.
        """
        return self._part(name, RESULT, ("model", "task", "items", "metrics", "counts", "settings", "warnings"))

    def key(self, name: str) -> dict[str, Any]:
        """`sha256` and `parts` of a run's key.

        Raises:
            ValueError: its file cannot be read.
        """
        return self._part(name, KEY, ("sha256", "parts"))

    def _part(self, name: str, file: str, needed: Sequence[str]) -> dict[str, Any]:
        place = self.run(name)
        try:
            found = _json(place / file)
            missing = [key for key in needed if key not in found]
            if missing:
                raise ValueError(f"{place / file} has no {', '.join(missing)}")
        except ValueError as error:
            raise ValueError(f"{error}; delete the folder {place}, and the same command does the run again") from None
        return found

    def begin(
        self,
        *,
        command: Sequence[str],
        suite: Mapping[str, Any],
        models: Mapping[str, dict[str, Any]],
        tasks: Mapping[str, dict[str, Any]],
        runs: Mapping[str, Mapping[str, str]],
        limit: int | None,
        about: Mapping[str, Any],
    ) -> int:
        """Take up an evaluation: runs of earlier ones stay named as far as they can be compared with it.

        Args:
            suite: `name`, `title`, `description`, `entries`; entries of earlier suites come after these.
            models, tasks: the parts of the keys, by name.
            runs: names of the runs that belong to it, by model and task; those that are complete are named.
            about: further items of the manifest.

        Returns:
            how many earlier runs are no longer named.
        """
        before = self.manifest
        kept: dict[str, dict[str, str]] = {}
        dropped = 0
        for model, named in before.get("runs", {}).items():
            for task, name in named.items():
                if model in runs and task in runs[model]:
                    dropped += name != runs[model][task]
                elif self._fits(name, models.get(model), tasks.get(task), limit):
                    kept.setdefault(model, {})[task] = name
                else:
                    dropped += 1
        suite = _merged(suite, before.get("suite") if kept else None)
        for model, named in runs.items():
            for task, name in named.items():
                if self.is_done(name):
                    kept.setdefault(model, {})[task] = name
        known = before.get("models", {})
        # Those that are asked about stand first, in their order; without facts until they are loaded.
        facts = {
            name: known[name] if known.get(name, {}).get("key") == digest(part) else {} for name, part in models.items()
        }
        facts |= {name: known[name] for name in known if name in kept and name not in models}
        self.manifest = {
            "made_by": _MADE_BY,
            "format": FORMAT,
            "command": list(command),
            "created": before.get("created", now()),
            "updated": now(),
            "suite": suite,
            "limit": limit,
            **about,
            "versions": versions(),
            "models": facts,
            "runs": kept,
        }
        return dropped

    def facts(self, model: str) -> dict[str, Any]:
        """What the manifest tells about a model; empty until it was loaded as it is now."""
        found: dict[str, Any] = self.manifest["models"].get(model, {})
        return found

    def describe(self, model: str, part: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Tell about a model that was loaded; `part` is its part of the keys."""
        self.manifest["models"][model] = {**facts, "key": digest(part)}

    def add(self, model: str, task: str, name: str) -> None:
        """Name a run, which is complete, in the manifest, and write it."""
        self.manifest["runs"].setdefault(model, {})[task] = name
        self.write()

    def put_aside(self, name: str) -> None:
        """Give the folder of a run, if there is one, another name, so that the run can be done again."""
        place = self.run(name)
        if not place.exists():
            return
        aside = (place.with_name(f"{name}--earlier-{number}") for number in itertools.count(1))
        place.rename(next(path for path in aside if not path.exists()))

    def write(self) -> None:
        """Write the manifest, whole."""
        self.manifest["updated"] = now()
        told = {name: facts for name, facts in self.manifest["models"].items() if facts}
        write_json(self.path / MANIFEST, self.manifest | {"models": told})

    def _fits(
        self, name: str, model: Mapping[str, Any] | None, task: Mapping[str, Any] | None, limit: int | None
    ) -> bool:
        """Whether an earlier run is of the model and the task as they are now; those that are not asked about now
        count as unchanged."""
        if not self.is_done(name):
            return False
        parts = self.key(name)["parts"]
        return (
            self.result(name)["settings"]["limit"] == limit
            and (model is None or parts["model"] == model)
            and (task is None or parts["task"] == task)
        )

    def _read(self) -> dict[str, Any]:
        file = self.path / MANIFEST
        if not file.exists():
            return {}
        found = _json(file)
        if found.get("made_by") != _MADE_BY or found.get("format") != FORMAT:
            raise ValueError(f"{file} is not of this version of zaya eval: choose another --out")
        if not all(isinstance(found.get(part), dict) for part in ("models", "runs", "suite")):
            raise ValueError(f"{file} has no models, runs or suite: delete it, and the same command writes it anew")
        return found


def now() -> str:
    """The time, to the second, with its offset from UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """Of Python, zaya_hf and what computes and judges."""
    found = {"python": platform.python_version(), "zaya_hf": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: str | None, processes: int) -> dict[str, Any]:
    """What it runs on. No names of machines or users."""
    return {
        "device": device_kind(device),
        "processes": processes,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _merged(suite: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The suite and, after it, entries of an earlier one."""
    tasks = {entry["task"] for entry in suite["entries"]}
    further = [entry for entry in (before or {}).get("entries", []) if entry["task"] not in tasks]
    if before is None or not further:
        return dict(suite)
    names = [suite["name"], *(name for name in before["name"].split(" + ") if name != suite["name"])]
    titles = [suite["title"], *(title for title in before["title"].split(" + ") if title != suite["title"])]
    return {
        "name": " + ".join(names),
        "title": " + ".join(titles),
        "description": " ".join(dict.fromkeys([suite["description"], before["description"]])),
        "entries": [*suite["entries"], *further],
    }


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found
