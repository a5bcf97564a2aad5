"""The scatter chart: a value of each model over its size in decades, with its interval and its name beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.ticker import FixedLocator, MaxNLocator

from zaya_hf.reporting.charts import (
    MARKER_SIZES,
    MARKERS,
    Point,
    format_ticks,
    logarithmic_ticks,
    require_positive,
    set_logarithmic,
)
from zaya_hf.reporting.svg import (
    GRID,
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

LABEL_WIDTH = 150
_LINE = 13.0  # px, the height of a label
_HALF_MARKER = 6.0  # px
_BESIDE = 10.0  # px between models of one size
_MARGIN = 1.6  # factor around the sizes
_Box = tuple[float, float, float, float]  # left, bottom, right, top in px


@dataclass(frozen=True)
class Dot:
    """A model at its size; `point` is the value up, with its interval."""

    label: str
    size: float
    point: Point
    slot: int = 1


def scatter_chart(
    chart_id: str,
    dots: Sequence[Dot],
    *,
    x_label: str,
    y_label: str,
    description: str,
    y_limits: tuple[float, float] | None = None,
    size: tuple[float, float] = (400, 320),
) -> str:
    """Sizes across in decades, values up. Models of (nearly) one size are drawn side by side, a marker's width apart.

    Args:
        chart_id: unique on the page; letters, digits, '-' and '_'.
        x_label, y_label: what the axes show, with the unit.
        description: what a screen reader says in place of the chart.
        y_limits: what of the y axis is shown; by default all values and intervals.

    Raises:
        ValueError: no dot, a size that is not above 0, an id with other characters.
    """
    if not dots:
        raise ValueError(f"chart {chart_id!r} has no dot to draw")
    for dot in dots:
        require_positive(chart_id, dot.label, [dot.size])
    with drawing(chart_id, size, (40, 28, 14, 40)) as chart:
        axes = chart.axes
        set_logarithmic(axes, "x")
        axes.set_xlim(min(dot.size for dot in dots) / _MARGIN, max(dot.size for dot in dots) * _MARGIN)
        axes.set_ylim(y_limits or _limits(dots))
        dots = _beside(chart, dots)
        for dot in dots:
            colour, shape = series_colour(dot.slot), dot.slot % SLOTS
            low, high = dot.point.low, dot.point.high
            if low is not None and high is not None:
                axes.plot([dot.size, dot.size], [low, high], color=colour, linewidth=2)
            (marker,) = axes.plot(dot.size, dot.point.value, marker=MARKERS[shape], color=colour, zorder=4)
            marker.set(markersize=8 * MARKER_SIZES[shape], markeredgecolor=SURFACE, markeredgewidth=1, clip_on=False)
        axes.xaxis.set_major_locator(FixedLocator(logarithmic_ticks(*axes.get_xlim())))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            format_ticks(axis)
        axes.grid(True, color=GRID, linewidth=1)
        axes.set_xlabel(x_label, color=MUTED, fontsize=11, labelpad=6)
        chart.write(-chart.left, chart.plot_height + 18, y_label, MUTED)
        _label(chart, dots)
        return chart.finish(description)


def _limits(dots: Sequence[Dot]) -> tuple[float, float]:
    found = [dot.point for dot in dots]
    values = [value for point in found for value in (point.value, point.low, point.high) if value is not None]
    margin = 0.08 * (max(values) - min(values)) or 0.05
    return min(values) - margin, max(values) + margin


def _beside(chart: Drawing, dots: Sequence[Dot]) -> list[Dot]:
    """The dots with sizes that keep their markers apart."""
    wanted = [chart.place(dot.size, dot.point.value)[0] for dot in dots]
    places = spread_labels(wanted, _BESIDE, 0, chart.plot_width)
    low, high = chart.axes.get_xlim()
    return [
        replace(dot, size=dot.size * (high / low) ** ((place - x) / chart.plot_width))
        for dot, x, place in zip(dots, wanted, places, strict=True)
    ]


def _label(chart: Drawing, dots: Sequence[Dot]) -> None:
    """Each name beside its marker, on the side where it covers least of the other names, markers and intervals."""
    places = [chart.place(dot.size, dot.point.value) for dot in dots]
    taken: list[_Box] = []
    for dot, (x, y) in zip(dots, places, strict=True):
        taken.append((x - _HALF_MARKER, y - _HALF_MARKER, x + _HALF_MARKER, y + _HALF_MARKER))
        if dot.point.low is not None and dot.point.high is not None:
            ends = [chart.place(dot.size, value)[1] for value in (dot.point.low, dot.point.high)]
            taken.append((x - 2, ends[0], x + 2, ends[1]))
    outside = 1e4
    for dot, (x, y) in zip(dots, places, strict=True):
        name = shorten(dot.label, LABEL_WIDTH)
        width = text_width(name, bold=dot.slot == 0)
        best: tuple[float, _Box] | None = None
        for shift in (step * _LINE for step in (0, 1, -1, 2, -2, 3, -3, 4, -4)):
            for left in (x + _HALF_MARKER + 3, x - _HALF_MARKER - 3 - width):
                box = (left, y + shift - _LINE / 2, left + width, y + shift + _LINE / 2)
                cost = sum(_overlap(box, other) for other in taken) + abs(shift) / 16
                cost += outside * (box[0] < 0 or box[2] > chart.plot_width + 12 or y + shift < 0)
                if best is None or cost < best[0]:
                    best = cost, box
        assert best is not None
        taken.append(best[1])
        chart.write(best[1][0], (best[1][1] + best[1][3]) / 2, name, series_colour(dot.slot), bold=dot.slot == 0)


def _overlap(one: _Box, other: _Box) -> float:
    """Area in px that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, across) * max(0.0, up)
