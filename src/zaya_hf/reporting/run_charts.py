"""Charts of training runs: one line per run, or more of one run where there is only one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from zaya_hf.reporting.charts import Line, Reference, line_chart
from zaya_hf.reporting.formats import short_count
from zaya_hf.reporting.heat_map import heat_map
from zaya_hf.reporting.run_files import Column, TrainingRecord, mapping, number

Chart = dict[str, Any]
_POINTS = 240  # of a line: more than a chart shows
_COLUMNS = 72  # of a heat map
_WINDOWS = 60  # of a whole run: over one of them a line is a mean
_CLIPPED = 0.1  # of the steps: the loss axis shows what comes after them, unless a run is short
_CLIPPED_FROM = 100  # steps
_MOST_MARKS = 200
FAIR_ENTROPY = 0.99


def charts(runs: Sequence[TrainingRecord]) -> list[tuple[str, str, list[Chart]]]:
    """Sections of the page with their charts: id, title and charts. What no run has is left out."""
    several = len(runs) > 1
    learning = [
        _loss(runs),
        _held_out(runs, "loss", "Held-out loss", "Nats per target; lower is better"),
        _held_out(runs, "bits_per_byte", "Held-out bits per byte", "Of whole documents; lower is better"),
        _steps(
            runs,
            "grad_norm",
            "Gradient norm",
            "Of all gradients together, before clipping",
            "gradient norm",
            clip=True,
            marks=True,
        ),
        _learning_rate(runs),
    ]
    speed = [
        _steps(runs, "tokens_per_second", "Tokens per second", "Over all devices", "tokens/s", clip=True),
        _steps(runs, "mfu", "MFU", "The model's FLOPs as a share of the device's peak", "MFU", clip=True),
    ]
    entropy = Reference(FAIR_ENTROPY, f"{FAIR_ENTROPY:g}, the papers' line")
    routers = [
        _routers(runs, "load_entropy", "Load entropy", "H(p) / ln E; 1 is perfect balance", entropy, low=True),
        _routers(runs, "max_violation", "Busiest expert", "MaxVio: load over a fair one, minus 1", high=True),
        _routers(runs, "skip_rate", "Skipped experts", "Share of the tokens that no expert sees", low=True, high=True),
        _routers(runs, "dead_experts", "Experts without a token", "Of a layer, in one step", high=True),
        _biases(runs),
        *(_map(run, index, several) for index, run in enumerate(runs)),
    ]
    sections = [
        ("learning", "Learning", learning),
        ("scores", "lm-eval scores", _scores(runs)),
        ("routers", "Routers", routers),
        ("speed", "Speed", speed),
    ]
    found = [(name, title, [chart for chart in drawn if chart]) for name, title, drawn in sections]
    return [section for section in found if section[2]]


def thinned(x: Column, y: Column, window: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """At most `_POINTS` places of a column with the mean, least and greatest of the `window` values around each.

    Values that are not finite are left out; nothing is left where none is.
    """
    real = np.isfinite(y)
    x, y = x[real], y[real]
    if not len(x):
        return [], [], [], []
    places = np.unique(np.linspace(0, len(x) - 1, min(_POINTS, len(x))).round().astype(int))
    half = max(window, math.ceil(len(x) / _POINTS)) / 2
    first = np.maximum(0, np.ceil(places - half + 0.5).astype(int))
    last = np.minimum(len(x), np.floor(places + half + 0.5).astype(int))
    last = np.maximum(last, first + 1)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    mean = (sums[last] - sums[first]) / (last - first)
    low = [float(y[a:b].min()) for a, b in zip(first, last, strict=True)]
    high = [float(y[a:b].max()) for a, b in zip(first, last, strict=True)]
    return x[places].tolist(), mean.tolist(), low, high


def _line(label: str, slot: int, x: Column, y: Column, *, smooth: bool = True, band: bool = True) -> Line | None:
    window = max(1, int(np.isfinite(y).sum()) // _WINDOWS) if smooth else 1
    places, mean, low, high = thinned(x, y, window)
    if not places:
        return None
    return Line(label, places, mean, slot, low if band and window > 1 else None, high if band and window > 1 else None)


def _loss(runs: Sequence[TrainingRecord]) -> Chart | None:
    several = len(runs) > 1
    lines = []
    for index, run in enumerate(runs):
        steps, loss = run.columns["step"], np.where(run.skipped, math.nan, run.columns["loss"])
        lines.append(_line(run.name if several else "training", index, steps, loss, band=not several))
        x, y = _evaluated(run, "loss")
        if not several and len(x):
            lines.append(Line("held out", x, y, 1))
    question = "Nats per target, smoothed; lower is better"
    banded = any(line is not None and line.low is not None for line in lines)
    caption = "The shaded band is the range of single steps." if banded else ""
    return _chart("loss", "Training loss", question, lines, "loss (nats)", caption, clip=True)


def _held_out(runs: Sequence[TrainingRecord], key: str, title: str, question: str) -> Chart | None:
    several, lines = len(runs) > 1, []
    for index, run in enumerate(runs):
        found = [(run.name if several else "all", _evaluated(run, key))]
        if not several:
            names = {name: None for record in run.evaluations for name in mapping(record.get("sources"))}
            found += [(name, _evaluated(run, key, "sources", name)) for name in names] if len(names) > 1 else []
            found.append(("averaged", _evaluated(run, key, "ema")))
        lines += [Line(name, x, y, index + place) for place, (name, (x, y)) in enumerate(found) if x]
    return _chart(f"held-{key.replace('_', '-')}", title, question, lines, key.replace("_", " "), clip=True)


def _evaluated(run: TrainingRecord, key: str, *inside: str) -> tuple[list[float], list[float]]:
    """Steps and values of one number of the held-out evaluations."""
    points = []
    for record in run.evaluations:
        entry: Any = record if record.get("kind") == "held_out" else {}
        for name in inside:
            entry = entry.get(name) if isinstance(entry, dict) else None
        step, value = number(record.get("step")), number(entry.get(key) if isinstance(entry, dict) else None)
        if math.isfinite(step) and math.isfinite(value):
            points.append((step, value))
    return [step for step, _ in points], [value for _, value in points]


def _steps(
    runs: Sequence[TrainingRecord],
    key: str,
    title: str,
    question: str,
    y_label: str,
    *,
    smooth: bool = True,
    clip: bool = False,
    marks: bool = False,
) -> Chart | None:
    several, lines = len(runs) > 1, []
    for index, run in enumerate(runs):
        x, y = run.columns["step"], run.columns[key]
        if marks:
            y = np.where(run.skipped, math.nan, y)
        lines.append(_line(run.name if several else y_label, index, x, y, smooth=smooth, band=not several))
    marked = sorted({float(step) for run in runs for step in run.columns["step"][run.skipped]}) if marks else []
    shown = marked[:: math.ceil(len(marked) / _MOST_MARKS)] if marked else []
    caption = "Marks at the upper edge are steps that were skipped." if marked else ""
    return _chart(key.replace("_", "-"), title, question, lines, y_label, caption, clip=clip, marked=shown)


def _learning_rate(runs: Sequence[TrainingRecord]) -> Chart | None:
    several, lines = len(runs) > 1, []
    rates = [run.columns["lr"] for run in runs]
    peak = max((float(np.nanmax(rate)) for rate in rates if np.isfinite(rate).any()), default=0.0)
    power = math.floor(math.log10(peak)) if peak > 0 else 0  # so that the axis has short numbers
    for index, run in enumerate(runs):
        label = run.name if several else "learning rate"
        lines.append(_line(label, index, run.columns["step"], run.columns["lr"] / 10.0**power, smooth=False))
    unit = f"times 1e{power}" if power else ""
    return _chart("lr", "Learning rate", "Of the first group of parameters", lines, f"learning rate {unit}".strip())


def _routers(
    runs: Sequence[TrainingRecord],
    key: str,
    title: str,
    question: str,
    reference: Reference | None = None,
    *,
    low: bool = False,
    high: bool = False,
) -> Chart | None:
    """Mean over the layers; of one run also the least and the greatest of them."""
    several, lines = len(runs) > 1, []
    for index, run in enumerate(runs):
        values = run.router[key]
        if not len(values) or not np.isfinite(values).any():
            continue
        known = np.isfinite(values).any(axis=1)
        wanted: list[tuple[str, int, Callable[..., Any]]] = [(run.name if several else "mean", index, np.nanmean)]
        if not several:
            wanted += [("least layer", 1, np.nanmin)] if low else []
            wanted += [("greatest layer", 2, np.nanmax)] if high else []
        for label, slot, reduce in wanted:
            lines.append(_line(label, slot, run.router_steps[known], reduce(values[known], axis=1), band=False))
    caption = "Mean over the layers." if several else ""
    return _chart(key.replace("_", "-"), title, question, lines, key.replace("_", " "), caption, reference=reference)


def _biases(runs: Sequence[TrainingRecord]) -> Chart | None:
    several, lines = len(runs) > 1, []
    for index, run in enumerate(runs):
        if not len(run.router_steps):
            continue
        for label, slot, values in (
            (f"{run.name} max" if several else "greatest", index, run.router["bias_max"].max(axis=1)),
            (f"{run.name} min" if several else "least", index if several else 1, run.router["bias_min"].min(axis=1)),
        ):
            lines.append(_line(label, slot, run.router_steps, values, smooth=False))
    return _chart("biases", "Balancing biases", "Greatest and least over all layers", lines, "bias (probability)")


def _map(run: TrainingRecord, index: int, several: bool) -> Chart | None:
    values = run.router["load_entropy"]
    if len(values) < 2 or values.shape[1] < 2:
        return None
    parts: list[NDArray[Any]] = np.array_split(np.arange(len(values)), min(_COLUMNS, len(values)))
    rows = np.stack([values[part].mean(axis=0) for part in parts], axis=1)
    edges = [float(run.router_steps[part[0]]) for part in parts] + [float(run.router_steps[-1]) + 1]
    # The first steps are far out of balance and would leave no shades for the rest.
    later = rows[:, math.ceil(_CLIPPED * rows.shape[1]) :]
    least = float(np.nanmin(later)) if np.isfinite(later).any() else 0.0
    title = "Load entropy of each layer" + (f": {run.name}" if several else "")
    means = [float(np.nanmean(row)) if np.isfinite(row).any() else math.inf for row in rows]
    worst = int(np.argmin(means))
    described = (
        f"{title} over {values.shape[1]} layers. The least after the first steps is {least:.3f}; layer {worst} has the "
        "least mean."
    )
    svg = heat_map(
        f"chart-map-{index}",
        edges,
        rows.tolist(),
        limits=(1.0, least),
        x_label="training step",
        y_label="layer",
        description=described,
        slot=index if several else 0,
    )
    caption = f"The stronger the colour, the less balanced. Layer {worst} has the least mean."
    return {
        "title": title,
        "question": "H(p) / ln E; no colour is perfect balance",
        "caption": caption,
        "svg": Markup(svg),
    }


def _scores(runs: Sequence[TrainingRecord]) -> list[Chart | None]:
    """A chart for each lm-eval task."""
    found: dict[str, list[tuple[int, float, dict[str, Any]]]] = {}
    for index, run in enumerate(runs):
        for record in run.evaluations:
            for name, score in mapping(record.get("tasks")).items():
                if isinstance(score, dict) and math.isfinite(number(record.get("step"))):
                    found.setdefault(str(name), []).append((index, number(record["step"]), score))
    drawn = []
    for place, (name, scores) in enumerate(sorted(found.items())):
        choice = scores[0][2].get("kind") == "choice"
        key = "accuracy" if choice else "bits_per_byte"
        lines = []
        for index, run in enumerate(runs):
            own = [(step, score) for number_of, step, score in scores if number_of == index]
            own = [(step, score) for step, score in own if math.isfinite(number(score.get(key)))]
            if own:
                ends = [_ends(score, key) for _, score in own]
                lines.append(
                    Line(
                        run.name if len(runs) > 1 else key.replace("_", " "),
                        [step for step, _ in own],
                        [score[key] for _, score in own],
                        index,
                        [low for low, _ in ends],
                        [high for _, high in ends],
                    )
                )
        chance = number(scores[0][2].get("chance"))
        reference = Reference(chance, f"chance {chance:.2f}") if choice and math.isfinite(chance) else None
        words = "higher is better" if choice else "lower is better"
        items = scores[0][2].get("items")
        question = f"{key.replace('_', ' ').capitalize()} over {items} items; {words}"
        if any(len(line.x) > 1 for line in lines):
            caption = "The shaded band is the 95 % interval over the items."
        else:
            caption = "95 % interval over the items: " + ", ".join(
                f"{line.label if len(lines) > 1 else ''} {low:.3f} to {high:.3f}".strip()
                for line in lines
                for low, high in zip(line.low or (), line.high or (), strict=True)
            )
            caption += "."
        drawn.append(
            _chart(f"task-{place}", name, question, lines, key.replace("_", " "), caption, reference=reference)
        )
    return drawn


def _ends(score: dict[str, Any], key: str) -> tuple[float, float]:
    """The interval of a score; its value alone where there is none."""
    found = score.get("interval_95")
    ends = [number(end) for end in found] if isinstance(found, list) else []
    value = number(score[key])
    return (ends[0], ends[1]) if len(ends) == 2 and all(map(math.isfinite, ends)) else (value, value)


def _chart(
    name: str,
    title: str,
    question: str,
    lines: Sequence[Line | None],
    y_label: str,
    caption: str = "",
    *,
    clip: bool = False,
    marked: Sequence[float] = (),
    reference: Reference | None = None,
) -> Chart | None:
    drawn = [line for line in lines if line is not None and line.x]
    if not drawn:
        return None
    limits = _limits(drawn) if clip else None
    if limits is not None:
        caption = f"{caption} What lies outside is cut off.".strip()
    elif reference is None:
        limits = _flat_limits(drawn)
    last = ", ".join(f"{line.label} {short_count(line.y[-1])}" for line in drawn)
    svg = line_chart(
        f"chart-{name}",
        drawn,
        x_label="training step",
        y_label=y_label,
        description=f"{title}. {question}. At step {drawn[0].x[-1]:,.0f}: {last}.",
        y_limits=limits,
        reference=reference,
        marked=marked,
    )
    return {"title": title, "question": question, "caption": caption, "svg": Markup(svg)}


def _flat_limits(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Of lines that hardly move: an axis that does not show rounding errors as mountains."""
    values = [value for line in lines for values in (line.y, line.low or (), line.high or ()) for value in values]
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if low == high == 0:
        return 0.0, 1.0  # a share or a number of something, of which there is none
    return (low - 0.02 * largest, high + 0.02 * largest) if 0 <= high - low < 0.01 * largest else None


def _limits(lines: Sequence[Line]) -> tuple[float, float] | None:
    """What the y axis shows of long runs: everything but the first steps, and bands without their extremes."""
    end = max(line.x[-1] for line in lines)
    if end < _CLIPPED_FROM:
        return None
    later = [(line, [i for i, x in enumerate(line.x) if x > _CLIPPED * end]) for line in lines]
    values = [line.y[i] for line, places in later for i in places]
    if not values:
        return None
    # A spike of one step must not flatten everything else.
    for line, places in later:
        for ends, share in ((line.low, 0.02), (line.high, 0.98)):
            if ends is not None and places:
                values.append(float(np.quantile([ends[i] for i in places], share)))
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.1
    shown = (low - margin, high + margin)
    everything = [value for line in lines for values in (line.y, line.low or (), line.high or ()) for value in values]
    return shown if min(everything) < shown[0] or max(everything) > shown[1] else None
