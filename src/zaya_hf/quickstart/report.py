"""The page of a quickstart, made of its results.json and of nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from zaya_hf.atomic import write_text
from zaya_hf.quickstart import report_words
from zaya_hf.quickstart.output import REPORT
from zaya_hf.reporting.charts import (
    Bar,
    Line,
    Point,
    Reference,
    Row,
    bar_chart,
    interval_chart,
    interval_chart_height,
    line_chart,
    smooth,
)
from zaya_hf.reporting.formats import count, date, duration, interval, number_word, score, short_count
from zaya_hf.reporting.page import render
from zaya_hf.reporting.results import check_results, read_results, score_value, scores, spread

# Each family keeps its colour, dash and marker, whichever of them were trained.
_SLOTS = {"zaya": 0, "qwen3": 1, "gemma3": 2, "llama": 3, "olmoe": 4}
_OTHER_SLOT = 5
_MOST_POINTS = 400  # of a loss curve; more than the chart has px
_CLIPPED_FROM = 100  # steps; shorter curves are shown whole
_CLIPPED = 0.1  # of the steps: the loss axis begins at their end, as before the loss falls steeply from ln(vocabulary)


def build_report(results: dict[str, Any]) -> str:
    """The page as HTML text, one self-contained file.

    Raises:
        ValueError: `results` is not what a quickstart writes (see `reporting.results.check_results`).
    """
    check_results(results)
    several = len(report_words.seeds(results)) > 1
    return render(
        "quickstart_report.html.jinja",
        results=results,
        headline=report_words.headline(results),
        summary=report_words.summary(results),
        caveat=report_words.seed_caveat(results),
        facts=_facts(results),
        table=_table(results),
        charts=[_loss_chart(results), *(_task_chart(results, index) for index in range(len(results["tasks"])))],
        costs=_cost_charts(results),
        several=several,
        own=report_words.OWN,
        created=date(results["created"]),
        seeds=report_words.seeds(results),
        samples=_samples(results),
        search=_search(results),
        loads=report_words.loads(results),
        snippet_folder=None if results["published"] is None else json.dumps(results["published"]["folder"]),
    )


def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the page to the file `path`: all of it or nothing.

    Raises:
        ValueError: as of `build_report`.
        OSError: the file cannot be written.
    """
    write_text(path, build_report(results))


def rebuild(path: Path, out: Path | None = None) -> Path:
    """Make the page again from `path`, a folder with results.json or that file, and return where it is: `out`, or
    beside it.

    Raises:
        ValueError: the file is not there, or is not the results of a quickstart.
        OSError: the page cannot be written.
    """
    results, file = read_results(path)
    page = file.with_name(REPORT) if out is None else out
    write_report(results, page)
    return page


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    runs = [run for model in results["models"] for run in model["runs"]]
    found = report_words.seeds(results)
    tokens = spread([run["tokens"] for run in runs])
    shown = ", ".join(map(str, found)) if len(found) <= 4 else f"{len(found)}"
    return [
        ("Models", str(len(results["models"]))),
        ("Seed" if len(found) == 1 else "Seeds", shown),
        ("Steps", count(results["settings"]["steps"])),
        ("Tokens per model", short_count(tokens.high)),
        (
            "Training time, summed" if len(runs) > 1 else "Training time",
            duration(math.fsum(run["seconds"] for run in runs)),
        ),
    ]


def _table(results: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of models with a cell for every task; a cell has the value, a line below it, and how clear it is."""
    rows = []
    for model in results["models"]:
        cells = []
        for task in results["tasks"]:
            values, kind = scores(model, task), task["kind"]
            found = spread([score_value(value) for value in values])
            if found.count == 1:
                below = interval(values[0]["interval_95"], kind)
            else:
                below = interval((found.low, found.high), kind)
            clear = [value["above_chance"] for value in values] if kind == "choice" else []
            mark = "none" if not clear else "yes" if all(clear) else "some" if any(clear) else "no"
            words = {
                "none": "",
                "yes": "clearly above chance",
                "some": f"clearly above chance from {sum(clear)} of {len(clear)} seeds",
                "no": "not clearly above chance",
            }[mark]
            cells.append({"value": score(found.mean, kind), "below": below, "mark": mark, "words": words})
        rows.append({"title": model["title"], "own": model["name"] == report_words.OWN, "cells": cells})
    references = []
    for task in results["tasks"]:
        if task["kind"] == "choice":
            references.append({"value": score(task["chance"], "choice"), "below": "chance"})
        else:
            value = score(results["unigram_bits_per_byte"], "bits_per_byte")
            references.append({"value": value, "below": "token frequencies"})
    return {"rows": rows, "references": references}


def _slot(model: Mapping[str, Any]) -> int:
    return _SLOTS.get(model["name"], _OTHER_SLOT)


def _loss_chart(results: Mapping[str, Any]) -> dict[str, Any]:
    lines = []
    steps = max(len(run["losses"]) for model in results["models"] for run in model["runs"])
    window = max(1, steps // 40)
    for model in results["models"]:
        curves = [smooth(run["losses"], window) for run in model["runs"]]
        length = min(map(len, curves))
        stride = math.ceil(length / _MOST_POINTS)
        kept = [*range(0, length - 1, stride), length - 1]
        columns = [spread([curve[index] for curve in curves]) for index in kept]
        slot = _slot(model)
        # The band of every model would cover the others'.
        band = len(curves) > 1 and (slot == 0 or len(results["models"]) == 1)
        lines.append(
            Line(
                model["title"],
                [index + 1 for index in kept],
                [column.mean for column in columns],
                slot,
                [column.low for column in columns] if band else None,
                [column.high for column in columns] if band else None,
            )
        )
    limits = None
    after = [y for line in lines for x, y in zip(line.x, line.y, strict=True) if x > _CLIPPED * steps]
    low, high = min(after), max(after)
    margin = 0.04 * (high - low) or 0.1
    if steps >= _CLIPPED_FROM and max(max(line.y) for line in lines) > high + margin:
        limits = (low - margin, high + margin)
    several = any(len(model["runs"]) > 1 for model in results["models"])
    shown = [
        f"Each curve is a mean over {window} steps" if window > 1 else "Every step is shown",
        ", and over the seeds" if several else "",
        "; the shaded band spans the seeds" if any(line.low is not None for line in lines) else "",
        ". The steep fall of the first steps is cut off." if limits is not None else ".",
    ]
    most = max(len(model["runs"]) for model in results["models"])
    height = max(220.0, interval_chart_height(len(lines), most))
    last = ", ".join(f"{line.label} {line.y[-1]:.2f}" for line in lines)
    return {
        "title": "Training loss",
        "question": "Nats per token; lower is better",
        "caption": "".join(shown),
        "svg": Markup(
            line_chart(
                "chart-loss",
                lines,
                x_label="training step",
                y_label="loss (nats per token)",
                description=f"Training loss over {steps} steps. At the end: {last} nats per token.",
                y_limits=limits,
                size=(400, height),
            )
        ),
    }


def _task_chart(results: Mapping[str, Any], index: int) -> dict[str, Any]:
    task = results["tasks"][index]
    choice = task["kind"] == "choice"
    rows = []
    for model in results["models"]:
        values = scores(model, task)
        found = spread([score_value(value) for value in values])
        points = [Point(score_value(value), *value["interval_95"]) for value in values]
        rows.append(Row(model["title"], points, _slot(model), score(found.mean, task["kind"])))
    if choice:
        reference = Reference(task["chance"], f"chance {score(task['chance'], 'choice')}")
        question = f"Accuracy over {count(task['items'])} items of {task['choices']} choices; higher is better"
    else:
        unigram = results["unigram_bits_per_byte"]
        reference = Reference(unigram, f"token frequencies {score(unigram, 'bits_per_byte')}")
        question = f"Bits per byte over {count(task['items'])} texts; lower is better"
    described = ", ".join(f"{row.label} {row.text}" for row in rows)
    return {
        "title": task["title"],
        "question": question,
        "caption": task["note"],
        "svg": Markup(
            interval_chart(
                f"chart-task-{index}",
                rows,
                x_label="accuracy" if choice else "bits per byte",
                description=f"{task['title']}. {question}. {described}; {reference.label}.",
                reference=reference,
                limits=(0, 1) if choice else None,
            )
        ),
    }


def _cost_charts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    sizes, speeds, times = [], [], []
    for model in results["models"]:
        title, slot = model["title"], _slot(model)
        total, active = model["parameters"], model["active_parameters"]
        sizes.append(Bar(title, total, short_count(total), slot, inner=active))
        speed = [run["tokens_per_second"] for run in model["runs"]]
        speeds.append(Bar(title, spread(speed).mean, count(spread(speed).mean), slot, single=speed))
        seconds = [run["seconds"] for run in model["runs"]]
        times.append(Bar(title, spread(seconds).mean, duration(spread(seconds).mean), slot, single=seconds))
    several = any(len(model["runs"]) > 1 for model in results["models"])
    processes, runs = results["hardware"].get("processes"), sum(len(model["runs"]) for model in results["models"])
    beside = ""
    if isinstance(processes, int) and min(processes, runs) > 1:
        beside = (
            f" Up to {number_word(min(processes, runs))} trainings ran side by side, not all with the same company: "
            "read speeds and times as rough."
        )
    strokes = " Strokes are single seeds." if several else ""
    active_words = ", ".join(f"{m['title']} {short_count(m['active_parameters'])}" for m in results["models"])

    def chart(name: str, title: str, caption: str, bars: list[Bar], x_label: str, more: str = "") -> dict[str, Any]:
        described = f"{title}. {', '.join(f'{bar.label} {bar.text}' for bar in bars)}.{more}"
        svg = bar_chart(f"chart-{name}", bars, x_label=x_label, description=described)
        return {"title": title, "caption": caption, "svg": Markup(svg)}

    return [
        chart(
            "parameters",
            "Parameters",
            "Filled: what works on any one token. Outlined: all of them.",
            sizes,
            "parameters",
            f" Active for a token: {active_words}.",
        ),
        chart("speed", "Training speed", f"Evaluation not included.{strokes}", speeds, "tokens per second"),
        chart("time", "Training time", f"Of one training.{beside}{strokes}", times, "seconds"),
    ]


def _search(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the learning-rate search: validation loss for each factor that was tried, and the factor taken."""
    search = results["search"]
    rows = []
    for model in results["models"] if search else ():
        found, chosen = search["validation_loss"].get(model["name"]), search["chosen"].get(model["name"])
        if isinstance(found, Mapping) and chosen is not None:
            values = [found.get(str(factor)) for factor in search["factors"]]
            losses = [f"{value:.3f}" if isinstance(value, float) else "" for value in values]
            rows.append(
                {"title": model["title"], "own": model["name"] == report_words.OWN, "losses": losses, "chosen": chosen}
            )
    return rows


def _samples(results: Mapping[str, Any]) -> list[dict[str, str]]:
    if results["published"] is None:
        return []
    return [
        {"prompt": sample["prompt"], "rest": sample["text"].removeprefix(sample["prompt"])}
        for sample in results["published"]["samples"]
    ]
