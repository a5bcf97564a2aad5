"""Charts as inline SVG for the pages of `zaya_hf.reporting.page`: lines, intervals and bars.

Every function returns one ``<svg>`` element as text (see `zaya_hf.reporting.svg` for what it is made of). Sizes are in
px of the drawing. A chart 400 px wide is drawn 328 px wide on a phone of 360 px, where its 11 px text is still 9 px
high. Slot 0 of the series is the emphasised one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from zaya_hf.reporting.formats import tick
from zaya_hf.reporting.svg import (
    GRID,
    INK,
    MUTED,
    SLOTS,
    SURFACE,
    Drawing,
    drawing,
    series_colour,
    shorten,
    spread_labels,
    text_width,
)

_WIDTH = 400
_LABEL_WIDTH = 100
_LABEL_GAP = 14.0  # between the middles of two labels
_X_AXIS = 40.0  # room for the tick labels and the name of an x axis
_REFERENCE_LABEL = 28.0  # room for the label above a reference line
# Colour never stands alone: each slot has its own marker and dash pattern.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKER_SIZES = (1.0, 0.9, 1.15, 0.85, 1.15, 1.1, 1.1)  # that look equally large
_DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (5, 1.5),
    (1.2, 1.2),
    (5, 1.5, 1.2, 1.5),
    (2.6, 1.4),
    (7, 1.5, 1.2, 1.5, 1.2, 1.5),
    (9, 2),
)
_STEPS = [1, 2, 2.5, 5, 10]


@dataclass(frozen=True)
class Line:
    """One series of a line chart. `x` and `y` are equally long; `low` and `high`, if given, are drawn as a band."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    slot: int = 1
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Point:
    """A measured value and, if known, the ends of its interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of an interval chart: a point per seed, and the text of its number at the right edge. Markers are
    outlines where `hollow`."""

    label: str
    points: Sequence[Point]
    slot: int = 1
    text: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart. `inner` is a part of `value` that is filled while the rest is outlined; `single` are the
    measurements of which `value` is the mean, drawn as strokes."""

    label: str
    value: float
    text: str
    slot: int = 1
    inner: float | None = None
    single: Sequence[float] = ()


@dataclass(frozen=True)
class Reference:
    """A value that all rows are read against, such as chance."""

    value: float
    label: str


def line_chart(
    chart_id: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    description: str,
    y_limits: tuple[float, float] | None = None,
    logarithmic: str = "",
    reference: Reference | None = None,
    marked: Sequence[float] = (),
    size: tuple[float, float] = (_WIDTH, 290),
) -> str:
    """Lines over a common x axis, each with its name at its right end.

    Args:
        chart_id: unique on the page; letters, digits, '-' and '_'.
        x_label, y_label: what the axes show, with the unit.
        description: what a screen reader says in place of the chart.
        y_limits: what of the y axis is shown; by default all of every line.
        logarithmic: axes of decades: "x", "y" or "xy".
        reference: a level that the lines are read against.
        marked: places on the x axis that get a mark at the upper edge.

    Raises:
        ValueError: no line, a line without points or with x and y of unequal lengths, a value that a logarithmic axis
            does not have, an id with other characters.
    """
    if not lines:
        raise ValueError(f"chart {chart_id!r} has no line to draw")
    for line in lines:
        if not line.x or len(line.x) != len(line.y):
            raise ValueError(f"chart {chart_id!r}, {line.label}: {len(line.x)} x values for {len(line.y)} y values")
        shown = {"x": [line.x], "y": [line.y, line.low or (), line.high or (), y_limits or ()]}
        for name in logarithmic:
            require_positive(chart_id, line.label, [value for values in shown[name] for value in values])
    names = [shorten(line.label, _LABEL_WIDTH) for line in lines]
    right = max(text_width(name, bold=True) for name in names) + 20
    with drawing(chart_id, size, (34, 28, right, _X_AXIS)) as chart:
        axes = chart.axes
        set_logarithmic(axes, logarithmic)
        for line in lines:
            emphasised, colour = line.slot == 0, series_colour(line.slot)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
            (drawn,) = axes.plot(line.x, line.y, color=colour, linewidth=2.4 if emphasised else 1.5)
            drawn.set_zorder(4 if emphasised else 3)
            if _DASHES[line.slot % SLOTS]:
                drawn.set_dashes(_DASHES[line.slot % SLOTS])
            if len(line.x) == 1:
                drawn.set(marker=MARKERS[line.slot % SLOTS], markersize=6)
        if reference is not None:
            axes.axhline(reference.value, color=INK, linewidth=1.1, dashes=(3, 2.5), zorder=2)
        if y_limits is not None:
            axes.set_ylim(y_limits)
        first, last = min(min(line.x) for line in lines), max(max(line.x) for line in lines)
        if first == last:
            axes.set_xlim((first / 2, first * 2) if "x" in logarithmic else (first - 1, first + 1))
            axes.xaxis.set_major_locator(FixedLocator([first]))
        else:
            axes.set_xlim(first, last)
            if "x" in logarithmic:
                axes.xaxis.set_major_locator(FixedLocator(logarithmic_ticks(first, last)))
            else:
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS, integer=True))
        if "y" in logarithmic:
            axes.yaxis.set_major_locator(FixedLocator(logarithmic_ticks(*axes.get_ylim())))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
        for axis in (axes.xaxis, axes.yaxis):
            format_ticks(axis)
        axes.grid(True, axis="y", color=GRID, linewidth=1)
        axes.set_xlabel(x_label, color=MUTED, fontsize=11, labelpad=6)
        chart.write(-chart.left, chart.plot_height + 18, y_label, MUTED)
        if reference is not None:
            side = -9 if lines[0].y[0] > reference.value else 9  # where the first line is not
            chart.write(4, chart.place(first, reference.value)[1] + side, reference.label, MUTED)
        if marked:
            (marks,) = axes.plot(marked, [1.0] * len(marked), "v", transform=axes.get_xaxis_transform())
            marks.set(color=INK, markersize=5.5, clip_on=False, zorder=5)
        _label_line_ends(chart, lines, names)
        return chart.finish(description)


def interval_chart(
    chart_id: str,
    rows: Sequence[Row],
    *,
    x_label: str,
    description: str,
    reference: Reference | None = None,
    limits: tuple[float, float] | None = None,
    width: float = _WIDTH,
    label_width: float = _LABEL_WIDTH,
) -> str:
    """One row per model: a marker with its interval, or one per seed and a wide stroke at their mean.

    Args: as of `line_chart`; `limits` of the x axis, by default what all points, intervals and the reference need;
        `label_width` is what a row's name may take, in px.

    Raises:
        ValueError: no row, a row without points, an id with other characters.
    """
    if not rows or not all(row.points for row in rows):
        raise ValueError(f"chart {chart_id!r} has {'a row without points' if rows else 'no row to draw'}")
    most = max(len(row.points) for row in rows)
    step, band = _seed_step(most), _row_height(most)
    right = max(max(text_width(row.text, bold=True) for row in rows) + 14, 14)
    margins = (_label_margin(rows, label_width), _REFERENCE_LABEL, right, _X_AXIS)
    with drawing(chart_id, (width, interval_chart_height(len(rows), most)), margins) as chart:
        axes = chart.axes
        axes.set_xlim(limits or _limits(rows, reference))
        _horizontal_rows(chart, rows, x_label, label_width=label_width)
        if reference is not None:
            axes.axvline(reference.value, color=INK, linewidth=1.1, dashes=(3, 2.5), zorder=2)
            half = text_width(reference.label) / 2
            x = min(max(chart.place(reference.value, 0)[0], half - margins[0]), chart.plot_width + right - half)
            chart.write(x, chart.plot_height + 10, reference.label, MUTED, align="center")
        for index, row in enumerate(rows):
            colour = series_colour(row.slot)
            for place, point in enumerate(row.points):
                y = index + (place - (len(row.points) - 1) / 2) * step / band
                if point.low is not None and point.high is not None:
                    axes.plot([point.low, point.high], [y, y], color=colour, linewidth=2 if most == 1 else 1.3)
                (marker,) = axes.plot(point.value, y, marker=MARKERS[row.slot % SLOTS], color=colour, zorder=4)
                size = (8.0 if row.slot == 0 else 7.5) if most == 1 else max(3.0, min(5.5, step - 1))
                marker.set(markersize=size * MARKER_SIZES[row.slot % SLOTS], clip_on=False)  # whole at the axis' ends
                marker.set(markeredgecolor=SURFACE if most == 1 else colour, markeredgewidth=1 if most == 1 else 0)
                if row.hollow:
                    marker.set(markerfacecolor=SURFACE, markeredgecolor=colour, markeredgewidth=1.4)
                    marker.set(markersize=marker.get_markersize() - 1.5)  # its edge counts
            if len(row.points) > 1:
                mean = math.fsum(point.value for point in row.points) / len(row.points)
                half = 0.5 - 3 / band
                axes.plot([mean, mean], [index - half, index + half], color=colour, linewidth=4, alpha=0.3, zorder=2)
            chart.write(
                chart.plot_width + right, _middle(chart, index, len(rows)), row.text, bold=row.slot == 0, align="right"
            )
        return chart.finish(description)


def interval_chart_height(rows: int, seeds: int) -> float:
    """Height in px of an interval chart with that many rows, and points in a row; for a neighbour of equal height."""
    return _REFERENCE_LABEL + _X_AXIS + rows * _row_height(seeds)


def bar_chart(
    chart_id: str,
    bars: Sequence[Bar],
    *,
    x_label: str,
    description: str,
    width: float = 320,
    label_width: float = _LABEL_WIDTH,
) -> str:
    """Horizontal bars from zero, each with its name on the left and its number behind it.

    Args: as of `interval_chart`.

    Raises:
        ValueError: no bar, a negative value, an id with other characters.
    """
    if not bars or min(bar.value for bar in bars) < 0:
        raise ValueError(f"chart {chart_id!r} has {'a negative value' if bars else 'no bar to draw'}")
    band, top = 30.0, 6.0
    right = max(text_width(bar.text, bold=True) for bar in bars) + 12
    margins = (_label_margin(bars, label_width), top, right, _X_AXIS)
    with drawing(chart_id, (width, top + _X_AXIS + band * len(bars)), margins) as chart:
        axes = chart.axes
        axes.set_xlim(0, max(max((bar.value, *bar.single)) for bar in bars) or 1.0)
        _horizontal_rows(chart, bars, x_label, ticks=3, label_width=label_width)
        for index, bar in enumerate(bars):
            colour = series_colour(bar.slot)
            if bar.inner is None:
                axes.barh(index, bar.value, height=0.44, color=colour, zorder=3)
            else:
                axes.barh(index, bar.inner, height=0.44, color=colour, zorder=3)
                axes.barh(index, bar.value, height=0.44, fill=False, edgecolor=colour, linewidth=1.2, zorder=3)
            if len(bar.single) > 1:
                (strokes,) = axes.plot(list(bar.single), [index] * len(bar.single), "|", color=INK, zorder=4)
                strokes.set(markersize=9, markeredgewidth=1.2, clip_on=False)
            end = chart.place(max((bar.value, *bar.single)), 0)[0] + 7
            chart.write(end, _middle(chart, index, len(bars)), bar.text, bold=bar.slot == 0)
        return chart.finish(description)


def logarithmic_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high` for an axis of decades, `most` at most: every third, second or single power of
    ten, or also 3, or 2 and 5 times one, whichever are most. If none lies there, both ends.

    Raises:
        ValueError: the ends are not positive and in order.
    """
    if not 0 < low < high < math.inf:
        raise ValueError(f"a logarithmic axis cannot go from {low} to {high}")
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for step, factors in ((3, (1,)), (2, (1,)), (1, (1,)), (1, (1, 3)), (1, (1, 2, 5))):
        powers = [power for power in range(first, last + 1) if power % step == 0]
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [value for value in ticks if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        found = ticks if len(ticks) <= most else found
    return found or [low, high]


def set_logarithmic(axes: Axes, logarithmic: str) -> None:
    """Make the axes of which `logarithmic` names one ("x", "y", "xy") ones of decades."""
    for name in logarithmic:
        axes.set(**{f"{name}scale": "log"})
        getattr(axes, f"{name}axis").set_minor_locator(NullLocator())


def require_positive(chart_id: str, label: str, values: Sequence[float]) -> None:
    """Refuse values that a logarithmic axis does not have.

    Raises:
        ValueError: one is not above 0, or not finite.
    """
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(f"chart {chart_id!r}, {label}: {value} has no place on a logarithmic axis")


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` values around each one, fewer at the ends. As long as `values`.

    Raises:
        ValueError: the window is below 1.
    """
    if window < 1:
        raise ValueError(f"a window of {window} values cannot be averaged: it has to be 1 at least")
    before, after = (window - 1) // 2, window // 2
    result = []
    for index in range(len(values)):
        near = values[max(0, index - before) : index + after + 1]
        result.append(math.fsum(near) / len(near))
    return result


def _horizontal_rows(
    chart: Drawing,
    rows: Sequence[Row] | Sequence[Bar],
    x_label: str,
    ticks: int = 5,
    label_width: float = _LABEL_WIDTH,
) -> None:
    """Rows from top to bottom at y = 0, 1, ..., with their labels on the left."""
    axes = chart.axes
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=_STEPS))
    format_ticks(axes.xaxis)
    axes.grid(True, axis="x", color=GRID, linewidth=1)
    axes.set_xlabel(x_label, color=MUTED, fontsize=11, labelpad=6)
    for index in range(len(rows)):
        name = shorten(rows[index].label, label_width)
        chart.write(-chart.left, _middle(chart, index, len(rows)), name, bold=rows[index].slot == 0)


def format_ticks(axis: Axis) -> None:
    """Numbers of an axis as short as they can be."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.set_minor_formatter(NullFormatter())


def _seed_step(seeds: int) -> float:
    return 8.5 if seeds <= 5 else 42 / seeds


def _row_height(seeds: int) -> float:
    return max(30.0, seeds * _seed_step(seeds) + 13)


def _middle(chart: Drawing, index: int, count: int) -> float:
    return (count - index - 0.5) * chart.plot_height / count


def _label_margin(rows: Sequence[Row] | Sequence[Bar], width: float = _LABEL_WIDTH) -> float:
    return max(text_width(shorten(row.label, width), bold=True) for row in rows) + 14


def _limits(rows: Sequence[Row], reference: Reference | None) -> tuple[float, float]:
    values = [] if reference is None else [reference.value]
    for point in (point for row in rows for point in row.points):
        values += [value for value in (point.value, point.low, point.high) if value is not None]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return low - margin, high + margin


def _label_line_ends(chart: Drawing, lines: Sequence[Line], names: Sequence[str]) -> None:
    ends = [chart.place(line.x[-1], line.y[-1]) for line in lines]
    wanted = [min(max(y, 0.0), chart.plot_height) for _, y in ends]
    places = spread_labels(wanted, _LABEL_GAP, 0, chart.plot_height)
    for line, name, (x, _), y, place in zip(lines, names, ends, wanted, places, strict=True):
        colour = series_colour(line.slot)
        ends_early = x < chart.plot_width - 1  # a leader across the chart must not be taken for the line
        leader = Line2D([x + 3, chart.plot_width + 13], [y, place], color=colour, linewidth=0.8, clip_on=False)
        leader.set_alpha(0.4 if ends_early else 1.0)
        leader.set_transform(chart.pixels)
        chart.axes.add_artist(leader)
        chart.write(chart.plot_width + 17, place, name, colour, bold=line.slot == 0)
