"""The page of `zaya report` on training runs: one, or several side by side. Made of the runs' files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from zaya_hf.reporting.formats import count, date, distinct, duration, joined, number_word, plain, score, short_count
from zaya_hf.reporting.page import render
from zaya_hf.reporting.run_charts import charts
from zaya_hf.reporting.run_files import TrainingRecord, flat, mapping, number, read_run

_MOST_EVENTS = 60  # in the table; the first and the last of more
_NONE = "\u2013"
_UNIMPORTANT = ("out",)  # keys in which runs always differ
_WORDS = {
    "start": "started",
    "resume": "resumed",
    "skip": "step skipped",
    "roll_back": "rolled back",
    "checkpoint": "checkpoint",
    "stop": "stopped",
    "finish": "finished",
}
_DETAILS = {"left_out": "data windows left out:"}


def build_report(folders: Sequence[Path]) -> str:
    """The page as HTML text, one self-contained file.

    Args:
        folders: of at least one run of `zaya train`.

    Raises:
        ValueError: there is no folder, or one is none of a run, has no step yet, or has a file that cannot be read.
        OSError: a file cannot be read.
    """
    if not folders:
        raise ValueError("no folder of a training run was given: there is nothing to report")
    runs = _distinct([read_run(folder) for folder in folders])
    several = len(runs) > 1
    return render(
        "training_run.html.jinja",
        several=several,
        headline=_headline(runs),
        summary=_summary(runs),
        facts=_facts(runs[0]),
        rows=[(run.name, _row(run)) for run in runs],
        columns=_COLUMNS,
        sections=charts(runs),
        events=[(run.name, *_events(run)) for run in runs],
        differences=_differences(runs),
        settings={key: value for key, value in flat(runs[0].config).items() if value not in (None, {})},
        environments=[(run.name, _environment(run)) for run in runs],
        names=[run.name for run in runs],
        created=date(max(run.changed for run in runs).isoformat()),
    )


def _distinct(runs: list[TrainingRecord]) -> list[TrainingRecord]:
    """Folders of one name in different places get a number."""
    names = distinct([run.name for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _total(run: TrainingRecord) -> int | None:
    """Steps that the run is to have; None if its config does not say."""
    config = run.config
    if isinstance(config.get("steps"), int):
        return int(config["steps"])
    try:
        return -(-int(config["tokens"]) // (int(config["batch"]["rows"]) * int(config["data"]["sequence_length"])))
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None


def _status(run: TrainingRecord) -> str:
    last: dict[str, Any] = next((event for event in reversed(run.events) if event.get("event") != "checkpoint"), {})
    if last.get("event") == "finish" or run.steps == _total(run):
        return "finished"
    if last.get("event") == "stop":
        return f"stopped: {last['reason']}" if last.get("reason") else "stopped"
    return "running, or killed"


def _headline(runs: Sequence[TrainingRecord]) -> str:
    if len(runs) == 1:
        return f"Training run {runs[0].name}"
    return f"{number_word(len(runs)).capitalize()} training runs"


def _summary(runs: Sequence[TrainingRecord]) -> str:
    if len(runs) > 1:
        return f"{joined([run.name for run in runs])}, side by side. {_best(runs)}".strip()
    (run,) = runs
    total, losses = _total(run), run.columns["loss"][~run.skipped]
    losses = losses[np.isfinite(losses)]
    parts = [f"Step {count(run.steps)}{f' of {count(total)}' if total else ''}, {_status(run)}."]
    if len(losses):
        recent = losses[-max(1, len(losses) // 50) :]
        parts.append(f"The training loss is {recent.mean():.3f} nats per target")
        found = _held_out(run)
        parts[-1] += f", the held-out loss {found['loss']:.3f}" if found else ""
        bits = number(found.get("bits_per_byte"))
        parts[-1] += f" ({score(bits, 'bits_per_byte')} bits per byte)." if math.isfinite(bits) else "."
    skipped = int(run.skipped.sum())
    happened = [
        *_happened("resumed", run.counted("resume")),
        *_happened("rolled back", run.counted("roll_back")),
    ]
    if happened:
        parts.append(f"It was {joined(happened)}.")
    if skipped:
        parts.append(f"{number_word(skipped).capitalize()} {'step was' if skipped == 1 else 'steps were'} skipped.")
    return " ".join(parts)


def _best(runs: Sequence[TrainingRecord]) -> str:
    """Which run is best on held-out text, if all were measured on the same."""
    measured = [(run, _held_out(run)) for run in runs]
    measured = [(run, found) for run, found in measured if found]
    if len(measured) < 2:
        return ""
    texts = {(found.get("bytes"), *sorted(map(str, mapping(found.get("sources"))))) for _, found in measured}
    if len(texts) == 1 and len({found.get("targets") for _, found in measured}) == 1:
        run, found = min(measured, key=lambda pair: number(pair[1]["loss"]))
        return f"{run.name} has the least held-out loss, {found['loss']:.3f} nats per target."
    if len(texts) == 1 and all(math.isfinite(number(found.get("bits_per_byte"))) for _, found in measured):
        run, found = min(measured, key=lambda pair: number(pair[1]["bits_per_byte"]))
        bits = score(number(found["bits_per_byte"]), "bits_per_byte")
        return (
            f"Their tokens differ, so losses per target do not compare; {run.name} needs least, {bits} bits per byte."
        )
    return "Their held-out texts differ, so neither their losses nor their bits per byte compare."


def _happened(what: str, number_of: int) -> list[str]:
    words = {1: "once", 2: "twice"}
    return [f"{what} {words.get(number_of, f'{number_word(number_of)} times')}"] if number_of else []


def _held_out(run: TrainingRecord) -> dict[str, Any]:
    """The last held-out evaluation with a finite loss; empty if there is none."""
    found = [
        record
        for record in run.evaluations
        if record.get("kind") == "held_out" and math.isfinite(number(record.get("loss")))
    ]
    return found[-1] if found else {}


def _last(run: TrainingRecord, key: str) -> float:
    """Of a column: its last finite value, NaN without one."""
    values = run.columns[key][np.isfinite(run.columns[key])]
    return float(values[-1]) if len(values) else math.nan


def _seconds(run: TrainingRecord) -> float:
    return float(np.nansum(run.columns["seconds"]))


def _speed(run: TrainingRecord, unit: str = " tokens/s") -> str:
    seconds, tokens = _seconds(run), _last(run, "tokens")
    return f"{short_count(tokens / seconds)}{unit}" if seconds > 0 and math.isfinite(tokens) else _NONE


def _facts(run: TrainingRecord) -> list[tuple[str, str]]:
    model, hardware = (mapping(run.environment.get(key)) for key in ("model", "hardware"))
    found = [("Status", _status(run)), ("Steps", count(run.steps))]
    if math.isfinite(_last(run, "tokens")):
        found.append(("Tokens", short_count(_last(run, "tokens"))))
    for key, title in (("parameters", "Parameters"), ("active_parameters", "Active")):
        if math.isfinite(parameters := number(model.get(key))):
            found.append((title, short_count(parameters)))
    processes = hardware.get("processes")
    if "device" in hardware:
        found.append(("Device", f"{processes} \u00d7 {hardware['device']}" if processes else str(hardware["device"])))
    found += [("Time in steps", duration(_seconds(run))), ("Speed", _speed(run))]
    mfu = _last(run, "mfu")
    if math.isfinite(mfu):
        found.append(("MFU", f"{100 * mfu:.1f} %"))
    return found


_COLUMNS = (
    "Status",
    "Steps",
    "Tokens",
    "Training loss",
    "Held out",
    "Bits per byte",
    "Tokens/s",
    "Time",
    "Resumed",
    "Rolled back",
    "Skipped",
)


def _row(run: TrainingRecord) -> list[str]:
    """Of the table of several runs, in the order of `_COLUMNS`."""
    losses = run.columns["loss"][~run.skipped]
    losses = losses[np.isfinite(losses)]
    found = _held_out(run)
    bits = number(found.get("bits_per_byte"))
    return [
        _status(run),
        count(run.steps),
        short_count(_last(run, "tokens")) if math.isfinite(_last(run, "tokens")) else _NONE,
        f"{losses[-max(1, len(losses) // 50) :].mean():.3f}" if len(losses) else _NONE,
        f"{found['loss']:.3f}" if found else _NONE,
        score(bits, "bits_per_byte") if math.isfinite(bits) else _NONE,
        _speed(run, ""),
        duration(_seconds(run)),
        count(run.counted("resume")),
        count(run.counted("roll_back")),
        count(int(run.skipped.sum())),
    ]


def _events(run: TrainingRecord) -> tuple[list[tuple[str, str, str, str]], int]:
    """Rows of the table (time, step, what, details) and how many were left out of its middle."""
    rows = []
    for event in run.events:
        kind = str(event.get("event"))
        details = ", ".join(
            plain(value) if key == "reason" else f"{_DETAILS.get(key, key.replace('_', ' '))} {plain(value)}"
            for key, value in event.items()
            if key not in ("time", "event", "step") and value is not None
        )
        step = number(event.get("step"))
        shown = count(step) if math.isfinite(step) else _NONE
        rows.append((_moment(str(event.get("time", ""))), shown, _WORDS.get(kind, kind), details))
    if len(rows) <= _MOST_EVENTS:
        return rows, 0
    half = _MOST_EVENTS // 2
    return rows[:half] + rows[-half:], len(rows) - _MOST_EVENTS


def _differences(runs: Sequence[TrainingRecord]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ, with each run's value."""
    settings = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for found in settings for key in found if key not in _UNIMPORTANT)
    absent = object()
    return [
        (key, [plain(found[key]) if key in found else _NONE for found in settings])
        for key in keys
        if any(found.get(key, absent) != settings[0].get(key, absent) for found in settings)
    ]


def _environment(run: TrainingRecord) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles with pairs of names and values."""
    found = []
    for key, title in (("versions", "Versions"), ("hardware", "Hardware"), ("model", "Model")):
        entries = run.environment.get(key)
        if isinstance(entries, dict) and entries:
            found.append((title, [(str(name).replace("_", " "), _value(value)) for name, value in entries.items()]))
    return found


def _value(value: Any) -> str:
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def _moment(text: str) -> str:
    """An ISO time in UTC as a table has it, to the second."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text
