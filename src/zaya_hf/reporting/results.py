"""The results.json of a quickstart: reading it, checking it, and the few sums that reports and cards need of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MADE_BY = "zaya quickstart"
FORMAT = 2
FILE = "results.json"
# What one seed is worth. The one figure in reports and cards that is of no run of theirs.
TRIAL = "In an earlier trial, one task set gave 0.375, 0.45 and 0.75 over three seeds of one model"


@dataclass(frozen=True)
class _Optional:
    what: Any


_NUMBER = "finite number"
_MEASURE = "finite number from 0 up"
_COUNT = "whole number from 0 up"
_LARGEST = 1e300
_LOADED = {"class": str, "max_logit_difference": _MEASURE, "limit": _MEASURE}
# What a report needs. A list holds the description of each of its entries, a dict those of keys that must be there.
_RESULTS: dict[str, Any] = {
    "command": str,
    "created": str,
    "settings": {"steps": _COUNT},
    "versions": {},
    "hardware": {},
    "corpus": {
        "origin": str,
        "sha256": str,
        "train_bytes": _COUNT,
        "validation_bytes": _COUNT,
        "held_out_bytes": _COUNT,
    },
    "arithmetic": {"train": _COUNT, "held_out": _COUNT},
    "tokenizer": {"entries": _COUNT, "bytes_per_token": _MEASURE},
    "unigram_bits_per_byte": _MEASURE,
    "tasks": [
        {
            "name": str,
            "title": str,
            "kind": str,
            "items": _COUNT,
            "version": _NUMBER,
            "description": str,
            "note": str,
        }
    ],
    "models": [
        {
            "name": str,
            "title": str,
            "class": str,
            "parameters": _COUNT,
            "active_parameters": _COUNT,
            "learning_rate": _MEASURE,
            "adamw_learning_rate": _NUMBER,
            "shape": {},
            "runs": [
                {
                    "seed": _COUNT,
                    "losses": [_NUMBER],
                    "tokens": _COUNT,
                    "seconds": _MEASURE,
                    "tokens_per_second": _MEASURE,
                    "router_load": _Optional([_NUMBER]),
                    "evaluation": {"tasks": {}},
                }
            ],
        }
    ],
    "published": _Optional(
        {
            "model": str,
            "seed": _COUNT,
            "folder": str,
            "loaded": {"stock": _LOADED, "zaya_hf": _LOADED},
            "samples": [{"prompt": str, "text": str}],
        }
    ),
    "search": _Optional({"steps": _COUNT, "factors": [_NUMBER], "validation_loss": {}, "chosen": {}}),
}
_SCORES: dict[str, dict[str, Any]] = {
    "choice": {
        "items": _COUNT,
        "correct": _COUNT,
        "accuracy": _NUMBER,
        "chance": _NUMBER,
        "interval_95": [_NUMBER],
        "above_chance": bool,
    },
    "bits_per_byte": {"items": _COUNT, "bytes": _COUNT, "bits_per_byte": _NUMBER, "interval_95": [_NUMBER]},
}
_TASKS: dict[str, dict[str, Any]] = {"choice": {"choices": _COUNT, "chance": _NUMBER}, "bits_per_byte": {}}
_MAY_BE_EMPTY = ("published.samples",)


@dataclass(frozen=True)
class Spread:
    """Mean, least and greatest of the values of several seeds."""

    mean: float
    low: float
    high: float
    count: int


def spread(values: list[float]) -> Spread:
    """The `Spread` of at least one value."""
    return Spread(math.fsum(values) / len(values), min(values), max(values), len(values))


def score_value(score: Mapping[str, Any]) -> float:
    """The one number of a score: the accuracy, or the bits per byte."""
    return float(score["accuracy" if score["kind"] == "choice" else "bits_per_byte"])


def scores(model: Mapping[str, Any], task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The scores of a model for one task, one per run."""
    return [run["evaluation"]["tasks"][task["name"]] for run in model["runs"]]


def read_results(path: Path) -> tuple[dict[str, Any], Path]:
    """The results in `path`, a folder with results.json or the file itself, and the file that they are from.

    Raises:
        ValueError: the file is not there or is not the results of a quickstart; one line says why.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"no such file: {file}; zaya report reads a quickstart's {FILE}, and folders of zaya train and zaya eval"
        )
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {' '.join(str(error).split())}") from None
    check_results(results, str(file))
    return results, file


def check_results(results: Any, where: str = "results") -> None:
    """Refuse what no report can be made of.

    Args:
        where: what the message begins with, such as the name of the file.

    Raises:
        ValueError: another maker or format, a key missing, a value of another type, a number that is not finite, a
            task without a score. One line says which.
    """
    if not isinstance(results, dict) or results.get("made_by") != MADE_BY:
        raise ValueError(f'{where}: not the results of {MADE_BY} (they have "made_by": "{MADE_BY}")')
    if results.get("format") != FORMAT:
        raise ValueError(
            f"{where}: format {results.get('format')!r}, but this version of zaya_hf reads format {FORMAT}: "
            f"run {MADE_BY} again"
        )
    _check(results, _RESULTS, where, "")
    for kind, plural in (("tasks", "tasks"), ("models", "models")):
        names = [entry["name"] for entry in results[kind]]
        if len(set(names)) < len(names):
            raise ValueError(f"{where}: two {plural} have the same name")
    for index, task in enumerate(results["tasks"]):
        if task["kind"] not in _TASKS:
            raise ValueError(f"{where}: tasks[{index}].kind is {task['kind']!r}, not one of {', '.join(_TASKS)}")
        _check(task, _TASKS[task["kind"]], where, f"tasks[{index}]")
    for index, model in enumerate(results["models"]):
        for place, run in enumerate(model["runs"]):
            path = f"models[{index}].runs[{place}].evaluation.tasks"
            _check(run["evaluation"]["tasks"], {task["name"]: {"kind": str} for task in results["tasks"]}, where, path)
            for task in results["tasks"]:
                score = run["evaluation"]["tasks"][task["name"]]
                if score["kind"] != task["kind"]:
                    raise ValueError(f"{where}: {path}.{task['name']}.kind is {score['kind']!r}, not {task['kind']!r}")
                _check(score, _SCORES[task["kind"]], where, f"{path}.{task['name']}")
                if len(score["interval_95"]) != 2:
                    raise ValueError(f"{where}: {path}.{task['name']}.interval_95 has to be two numbers")
    published = results["published"]
    if published is not None and published_run(results) is None:
        raise ValueError(f"{where}: published names a model and seed that are not among the runs")


def published_run(results: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The model and the run that were published, or None if there is none."""
    published = results["published"]
    if published is None:
        return None
    for model in results["models"]:
        for run in model["runs"]:
            if (model["name"], run["seed"]) == (published["model"], published["seed"]):
                return model, run
    return None


def _check(value: Any, wanted: Any, where: str, path: str) -> None:
    if isinstance(wanted, _Optional):
        if value is not None:
            _check(value, wanted.what, where, path)
        return
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {path} has to be an object, not {_kind(value)}")
        for key, inner in wanted.items():
            below = f"{path}.{key}" if path else key
            if key not in value:
                raise ValueError(f"{where}: {below} is missing")
            _check(value[key], inner, where, below)
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: {path} has to be a list, not {_kind(value)}")
        if not value and path not in _MAY_BE_EMPTY:
            raise ValueError(f"{where}: {path} is empty")
        for index, entry in enumerate(value):
            _check(entry, wanted[0], where, f"{path}[{index}]")
    elif wanted is str or wanted is bool:
        if not isinstance(value, wanted):
            kind = "text" if wanted is str else "true or false"
            raise ValueError(f"{where}: {path} has to be {kind}, not {_kind(value)}")
    else:
        _check_number(value, wanted, where, path)


def _check_number(value: Any, wanted: str, where: str, path: str) -> None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A comparison, as math.isfinite refuses integers that no float can hold. It is false for NaN.
    right = right and -_LARGEST < value < _LARGEST
    right = right and (wanted is _NUMBER or value >= 0)
    if not right or (wanted is _COUNT and not isinstance(value, int)):
        raise ValueError(f"{where}: {path} has to be a {wanted}, not {_kind(value)}")


def _kind(value: Any) -> str:
    """A value in a message: short ones as JSON, others by their type."""
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"
