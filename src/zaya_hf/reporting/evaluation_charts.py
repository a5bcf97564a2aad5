"""Charts of an evaluation: paired differences, scores over sizes, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from zaya_hf.reporting.charts import Bar, Point, Reference, Row, bar_chart, interval_chart
from zaya_hf.reporting.evaluation_tables import (
    UNITS,
    Comparison,
    difference_text,
    interval_text,
    others,
    scaled,
    tasks_by_id,
    titles,
    unit,
    value_text,
)
from zaya_hf.reporting.formats import duration, short_count
from zaya_hf.reporting.scatter import LABEL_WIDTH, Dot, scatter_chart
from zaya_hf.reporting.svg import SLOTS, shorten_alike

Chart = dict[str, Any]
_NAME_WIDTH = 150  # px that the name of a task or a model may take
_LEAST_MARGIN = 0.06


def slots(comparison: Comparison) -> dict[str, int]:
    """Each model's slot of the series: 0 is the baseline's; the others share the rest in turn."""
    found = {comparison["baseline"]: 0}
    for place, model in enumerate(others(comparison)):
        found[model] = 1 + place % (SLOTS - 1)
    return found


def forests(comparison: Comparison) -> list[Chart]:
    """A forest plot of paired differences for each model and unit; those of a unit have the same axis."""
    tasks, names, slot = tasks_by_id(comparison), titles(comparison), slots(comparison)
    by_unit: dict[str, list[Mapping[str, Any]]] = {}
    for pair in comparison["pairs"]:
        by_unit.setdefault(unit(tasks[pair["task"]]), []).append(pair)
    baseline = names[comparison["baseline"]]
    found = []
    for kind, pairs in by_unit.items():
        for place, model in enumerate(others(comparison)):
            shown = [pair for pair in pairs if pair["model"] == model]
            if not shown:
                continue
            of_rows = [tasks[pair["task"]]["title"] or pair["task"] for pair in shown]
            labels = shorten_alike(of_rows, _NAME_WIDTH)
            rows = [_row(label, pair, kind, slot[model]) for label, pair in zip(labels, shown, strict=True)]
            said = [
                f"{title} {row.text}"
                + (f" ({interval_text(pair['interval'], kind, signed=True)})" if pair["interval"] else "")
                + f", {pair['verdict']}"
                for title, row, pair in zip(of_rows, rows, shown, strict=True)
            ]
            lower = kind in ("bits_per_byte", "perplexity")
            figure_unit = UNITS[kind] or "score"
            found.append(
                {
                    "title": f"{names[model]} minus {baseline}" + (f", {UNITS[kind]}" if kind != "percent" else ""),
                    "question": f"{'Left' if lower else 'Right'} of the line, {names[model]} is ahead.",
                    "svg": Markup(
                        interval_chart(
                            f"forest-{place}-{(kind or 'other').replace('_', '-')}",
                            rows,
                            x_label=f"difference ({figure_unit})",
                            description=f"Differences of {names[model]} to {baseline} in {figure_unit}: "
                            + "; ".join(said),
                            reference=Reference(0.0, "no difference"),
                            limits=_common_limits(pairs, kind),
                            label_width=_NAME_WIDTH,
                        )
                    ),
                    "caption": "",
                }
            )
    return found


def _row(label: str, pair: Mapping[str, Any], kind: str, slot: int) -> Row:
    low, high = [None, None] if pair["interval"] is None else [scaled(end, kind) for end in pair["interval"]]
    point = Point(scaled(pair["difference"], kind), low, high)
    text = difference_text(pair["difference"], kind)
    return Row(label, [point], slot, text, hollow=pair["verdict"] not in ("better", "worse"))


def _common_limits(pairs: Sequence[Mapping[str, Any]], kind: str) -> tuple[float, float]:
    """Of the axis that all plots of a unit share; 0 is on it."""
    ends = [0.0]
    for pair in pairs:
        ends += [scaled(value, kind) for value in (pair["difference"], *(pair["interval"] or ()))]
    low, high = min(ends), max(ends)
    margin = _LEAST_MARGIN * (high - low) or 1.0
    return low - margin, high + margin


def over_sizes(comparison: Comparison, mean: Mapping[str, Any]) -> list[Chart]:
    """The models' mean scores over their active and over their total parameters, as far as these are known."""
    names, slot = titles(comparison), slots(comparison)
    scored = [model for model in comparison["models"] if _value(mean, model["name"]) is not None]
    limits = _size_limits(mean, [model["name"] for model in scored])
    found = []
    for key, title in (("parameters_active", "Active parameters"), ("parameters", "Total parameters")):
        known = [model for model in scored if model.get(key)]
        if not known:
            continue
        dots = []
        labels = shorten_alike([names[model["name"]] for model in known], LABEL_WIDTH)
        for model, label in zip(known, labels, strict=True):
            score = mean["scores"][model["name"]]
            low, high = score["interval"] or (None, None)
            point = Point(
                100 * score["value"], None if low is None else 100 * low, None if high is None else 100 * high
            )
            dots.append(Dot(label, model[key], point, slot[model["name"]]))
        said = "; ".join(
            f"{names[model['name']]} {short_count(dot.size)}, {value_text(dot.point.value / 100, 'percent')} %"
            for model, dot in zip(known, dots, strict=True)
        )
        unknown = [names[model["name"]] for model in scored if model not in known]
        found.append(
            {
                "title": title,
                "question": f"{mean['title']}, with 95 % intervals over the items",
                "svg": Markup(
                    scatter_chart(
                        f"size-{mean['id']}-{key.replace('_', '-')}",
                        dots,
                        x_label=title.lower(),
                        y_label="mean score (%)",
                        description=f"{mean['title']} over {title.lower()}: {said}",
                        y_limits=limits,
                    )
                ),
                "caption": f"Not known of {', '.join(unknown)}." if unknown else "",
            }
        )
    return found


def _value(mean: Mapping[str, Any], model: str) -> float | None:
    value: float | None = (mean["scores"].get(model) or {}).get("value")
    return value


def _size_limits(mean: Mapping[str, Any], models: Sequence[str]) -> tuple[float, float] | None:
    """Of the axis of scores that the charts share, in percent."""
    ends = []
    for model in models:
        score = mean["scores"][model]
        ends += [100 * value for value in (score["value"], *(score["interval"] or ()))]
    if not ends:
        return None
    margin = 0.08 * (max(ends) - min(ends)) or 5.0
    return min(ends) - margin, max(ends) + margin


def costs(comparison: Comparison) -> list[Chart]:
    """Bars of each model's time, tokens and tokens per second."""
    names, slot = titles(comparison), slots(comparison)
    models = [model for model in comparison["models"] if model["cost"]["runs"]]
    labels = dict(
        zip(
            [model["name"] for model in models],
            shorten_alike([names[model["name"]] for model in models], _NAME_WIDTH),
            strict=True,
        )
    )
    found = []
    for key, title, axis, text in (
        ("seconds", "Time", "seconds", duration),
        ("tokens_computed", "Tokens", "tokens computed", short_count),
        ("tokens_per_second", "Tokens per second", "tokens per second", short_count),
    ):
        bars, said = [], []
        for model in models:
            cost, name = model["cost"], model["name"]
            value = cost[key]
            if value is not None:
                bars.append(Bar(labels[name], value, text(value), slot[name]))
                said.append(f"{names[name]} {text(value)}")
        if not bars:
            continue
        drawn = bar_chart(
            f"cost-{key.replace('_', '-')}",
            bars,
            x_label=axis,
            description=f"{title}: {'; '.join(said)}",
            width=400,
            label_width=_NAME_WIDTH,
        )
        found.append({"title": title, "question": "", "caption": "", "svg": Markup(drawn)})
    return found
