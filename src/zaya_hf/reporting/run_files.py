"""The records of a training run as columns of numbers, read from its folder and from nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

METRICS, EVALUATIONS, EVENTS = "metrics.jsonl", "evaluations.jsonl", "events.jsonl"
CONFIG, ENVIRONMENT = "config.yaml", "environment.json"

Column = NDArray[np.float64]

_SCALARS = (
    "step", "tokens", "targets", "loss", "grad_norm", "lr", "adamw_lr", "seconds", "data_seconds", "tokens_per_second",
    "tflops", "mfu", "memory_bytes",
)  # fmt: skip
_ROUTER = ("load_entropy", "max_violation", "skip_rate", "dead_experts", "bias_min", "bias_max")


@dataclass(frozen=True)
class TrainingRecord:
    """What a run's files say.

    Attributes:
        name: of its folder.
        config, environment: as they are in the folder; empty if they are not.
        columns: one number per step under the names of metrics.jsonl, NaN where a step has none.
        skipped: per step, whether it was.
        router_steps: [panels] the steps that have router numbers.
        router: [panels, layers] each.
        evaluations, events: records in the order in which they were written.
        changed: when metrics.jsonl was last written, UTC.
    """

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    columns: dict[str, Column]
    skipped: NDArray[np.bool_]
    router_steps: Column
    router: dict[str, Column]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    changed: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, timezone.utc))

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.columns["step"][-1])

    def counted(self, kind: str) -> int:
        """How many events of that kind there are."""
        return sum(event.get("event") == kind for event in self.events)


def is_run(folder: Path) -> bool:
    """Whether `folder` is one of `zaya train`."""
    return (folder / METRICS).is_file() or all((folder / name).is_file() for name in (CONFIG, ENVIRONMENT))


def read_run(folder: Path) -> TrainingRecord:
    """Read a run's folder, also while the run goes on: a last line that is not whole is left out.

    Raises:
        ValueError: it is no folder of a run, has no step yet, or has a line that is no record.
        OSError: a file cannot be read.
    """
    if not is_run(folder):
        raise ValueError(f"{folder} is no folder of a training run: it has no {METRICS}")
    columns: dict[str, list[float]] = {name: [] for name in _SCALARS}
    skipped: list[bool] = []
    router_steps: list[float] = []
    router: dict[str, list[list[float]]] = {name: [] for name in _ROUTER}
    for record in _records(folder / METRICS):
        for name in _SCALARS:
            columns[name].append(number(record.get(name)))
        skipped.append(bool(record.get("skipped")))
        panel = record.get("router")
        if isinstance(panel, dict) and isinstance(panel.get("load_entropy"), list) and panel["load_entropy"]:
            router_steps.append(columns["step"][-1])
            for name in _ROUTER:
                values, layers = panel.get(name), len(panel["load_entropy"])
                if not isinstance(values, list) or len(values) != layers:
                    values = [None] * layers
                router[name].append([number(value) for value in values])
    if not skipped:
        raise ValueError(f"{folder} has no step yet: there is nothing to report")
    if not all(math.isfinite(step) for step in columns["step"]):
        raise ValueError(f"{folder / METRICS} has a line without a step")
    if len({len(row) for row in router["load_entropy"]}) > 1:
        raise ValueError(f"{folder / METRICS} has router numbers of different numbers of layers")
    return TrainingRecord(
        name=folder.resolve().name,
        config=_mapping(folder / CONFIG, yaml.safe_load),
        environment=_mapping(folder / ENVIRONMENT, json.loads),
        columns={name: np.array(values) for name, values in columns.items()},
        skipped=np.array(skipped),
        router_steps=np.array(router_steps),
        router={name: np.array(values) for name, values in router.items()},
        evaluations=list(_records(folder / EVALUATIONS)),
        events=list(_records(folder / EVENTS)),
        changed=datetime.fromtimestamp((folder / METRICS).stat().st_mtime, timezone.utc),
    )


def number(value: Any) -> float:
    """A finite number of a record; NaN for everything else, also for a whole number that no float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def mapping(value: Any) -> dict[str, Any]:
    """A part of a record that has names; empty for what has none."""
    return value if isinstance(value, dict) else {}


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested config with dotted keys; places in lists of sections are numbers, other lists stay."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return  # it is being written, or its writer was killed
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise ValueError(f"{file}, line {place}: no record of a run")
            yield record


def _mapping(file: Path, parse: Any) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} cannot be read: it is nested too deep") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} cannot be read: expected keys with values")
    return found
