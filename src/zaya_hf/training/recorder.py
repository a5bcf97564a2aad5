"""What a run leaves behind while it trains: records as JSON lines, trackers, and the line on the terminal.

    metrics.jsonl      one line per step that stands: loss, norms, learning rates, speed, routers
    evaluations.jsonl  held-out losses and scores of lm-eval
    events.jsonl       what happened and when: starts, skipped steps, roll-backs, checkpoints, the end
    environment.json   versions, hardware and command of the latest start

The main process alone writes; on the others every method does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..atomic import write_json
from .config import TrainingConfig
from .console import Console
from .record_files import LineFile, plain
from .throughput import Throughput
from .trackers import Trackers

METRICS, EVALUATIONS, EVENTS, ENVIRONMENT = "metrics.jsonl", "evaluations.jsonl", "events.jsonl", "environment.json"


class Recorder:
    """Writes the records of one run.

    Args:
        folder: of the run.
        main: whether this process is the one that writes.
        console: shows steps and says events; None: nothing is shown.
        trackers: TensorBoard and the like; None: none.
        throughput: adds tokens_per_second, tflops and mfu to the records; None: they stay as they come. May be
            set later.
    """

    def __init__(
        self,
        folder: Path,
        *,
        main: bool = True,
        console: Console | None = None,
        trackers: Trackers | None = None,
        throughput: Throughput | None = None,
    ) -> None:
        self.folder = folder
        self._main = main
        self._console = console if main else None
        self._trackers = trackers
        self.throughput = throughput
        self._metrics = LineFile(folder / METRICS)
        self._evaluations = LineFile(folder / EVALUATIONS)
        self._events = LineFile(folder / EVENTS)
        self._tokens = 0
        self._skip_rate = 0.0

    @classmethod
    def of_run(cls, config: TrainingConfig, accelerator: Accelerator, folder: Path) -> Recorder:
        """The recorder that a run's config asks for.

        Raises:
            ValueError: a tracker is not installed, or cannot start.
        """
        main, logging = accelerator.is_main_process, config.logging
        settings = config.model_dump(mode="json")
        return cls(
            folder,
            main=main,
            console=Console(config.total_steps, every=logging.every) if main else None,
            trackers=Trackers(accelerator, logging.trackers, folder, project=logging.project, settings=settings),
        )

    def environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json, such as `environment.describe` gives it."""
        if self._main:
            write_json(self.folder / ENVIRONMENT, plain(facts))

    def step(self, record: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl, and show it.

        Args:
            record: plain numbers, strings, lists and dicts: `step` (1-based), `tokens` (cumulative), `targets`, `loss`
                (nats per target), `grad_norm`, `lr`, `adamw_lr`, `seconds`, `data_seconds`, `memory_bytes`; `skipped`
                with the reason where the step was skipped; `router` with lists over layers (see `BiasBalancer.panel`).

        Raises:
            KeyError: without `step`; with a `Throughput` also without `tokens` and `seconds`.
        """
        if not self._main:
            return
        record = dict(record)
        step = record["step"]
        if rates := (record.get("router") or {}).get("skip_rate"):
            self._skip_rate = sum(rates) / len(rates)
        if self.throughput is not None:
            measured = self.throughput.of(record["tokens"] - self._tokens, record["seconds"], self._skip_rate)
            record = {**record, **measured}
        self._tokens = record.get("tokens", self._tokens)
        self._metrics.write(record)
        if self._trackers is not None:
            self._trackers.log(scalars(record), step)
        if self._console is not None:
            self._console.step(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Append one evaluation: `Evaluator.run`'s or `Suite.run`'s record, which has `step` and `kind`."""
        if not self._main:
            return
        self._evaluations.write({**record, "time": now()})
        if self._trackers is not None:
            self._trackers.log(evaluation_scalars(record), record["step"])
        if self._console is not None:
            self._console.evaluation(record)

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Append what happened after `step` steps, with the time.

        Args:
            kind: "start", "resume", "skip", "roll_back", "checkpoint", "stop", "finish".
            details: plain values, such as `reason=`.
        """
        if not self._main:
            return
        self._events.write({"time": now(), "event": kind, "step": step, **details})
        if self._console is not None:
            self._console.event(kind, step, details)

    def say(self, text: str) -> None:
        """A line for whoever watches."""
        if self._console is not None:
            self._console.say(text)

    def rewind(self, step: int, evaluated: int | None = None) -> None:
        """Go back to `step` steps done, as a run does that resumes or rolls back: later lines of metrics.jsonl and
        evaluations.jsonl go, and what is torn; each file is replaced in one rename. Events stay: they did happen.

        Args:
            evaluated: the step of the last evaluation before, which is earlier where a run stopped before one that was
                due; None: `step`.
        """
        if not self._main:
            return
        last = self._metrics.keep(lambda record: record.get("step", 0) <= step)
        evaluated = step if evaluated is None else evaluated
        self._evaluations.keep(lambda record: record.get("step", 0) <= evaluated)
        self._tokens = last.get("tokens", 0) if last else 0
        if self._trackers is not None:
            self._trackers.rewind(step)
        if self._console is not None:
            self._console.rewind(step)

    def sync(self) -> None:
        """Have all lines on the disk when this returns: a checkpoint must not survive a power cut that they do not."""
        for lines in (self._metrics, self._evaluations, self._events) if self._main else ():
            lines.sync()

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, as they stand; on every process that sees the folder."""
        if not self._metrics.path.exists():
            return []
        with self._metrics.path.open("rb") as lines:
            return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def close(self) -> None:
        """End trackers and the live line; the files are on disk."""
        for file in (self._metrics, self._evaluations, self._events):
            file.close()
        if self._trackers is not None:
            self._trackers.close()
        if self._console is not None:
            self._console.close()


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What trackers show of a step, by group: ``train/...``, ``speed/...``, ``router/...`` (means and extremes over the
    layers). Values that are no numbers, and not finite ones, are left out."""
    found: dict[str, float] = {}
    for name in ("loss", "grad_norm", "lr", "adamw_lr", "tokens"):
        _add(found, f"train/{name}", record.get(name))
    found["train/skipped"] = 1.0 if record.get("skipped") else 0.0
    for name in ("seconds", "data_seconds", "tokens_per_second", "tflops", "mfu", "memory_bytes"):
        _add(found, f"speed/{name}", record.get(name))
    for name, values in (record.get("router") or {}).items():
        if isinstance(values, list) and values:
            _add(found, f"router/{name}_mean", sum(values) / len(values))
            _add(found, f"router/{name}_min", min(values))
            _add(found, f"router/{name}_max", max(values))
    return found


def evaluation_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What trackers show of an evaluation: ``eval/loss``, ``eval/SOURCE/loss``, ``eval/TASK/accuracy`` and so on."""
    found: dict[str, float] = {}
    parts = {"eval": record, "eval/ema": record.get("ema") or {}}
    parts |= {f"eval/{name}": entry for name, entry in (record.get("sources") or {}).items()}
    parts |= {f"eval/{name}": entry for name, entry in (record.get("tasks") or {}).items()}
    for group, entry in parts.items():
        for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
            _add(found, f"{group}/{name}", entry.get(name))
    return found


def _add(found: dict[str, float], name: str, value: Any) -> None:
    value = plain(value)  # not finite: now a string
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found[name] = float(value)
