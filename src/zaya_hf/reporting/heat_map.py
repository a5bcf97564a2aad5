"""A map of numbers over rows and a common x axis, as shades of one colour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator

from zaya_hf.reporting.charts import format_ticks
from zaya_hf.reporting.formats import tick
from zaya_hf.reporting.svg import GRID, MUTED, Drawing, drawing, series_colour

_LEVELS = 8  # shades; equal neighbours are one shape, which keeps the drawing small
_KEY = 14.0  # px, an entry of the key of shades


def heat_map(
    chart_id: str,
    edges: Sequence[float],
    rows: Sequence[Sequence[float]],
    *,
    limits: tuple[float, float],
    x_label: str,
    y_label: str,
    description: str,
    slot: int = 1,
    width: float = 400,
) -> str:
    """One stripe for each row, row 0 on top.

    Args:
        chart_id: unique on the page; letters, digits, '-' and '_'.
        edges: where each column begins, and where the last one ends; ascending.
        rows: a number per column, NaN where there is none.
        limits: the numbers that have no colour and all of it; the first may be the greater.
        description: what a screen reader says in place of the map.

    Raises:
        ValueError: no rows or columns, or a row of another length; an id with other characters.
    """
    if not rows or len(edges) < 2 or any(len(row) != len(edges) - 1 for row in rows):
        raise ValueError(f"chart {chart_id!r}: {len(edges)} edges do not fit {len(rows)} rows, or there is nothing")
    first, last = limits
    colour = series_colour(slot)
    height = max(4.0, min(14.0, 240 / len(rows))) * len(rows)
    with drawing(chart_id, (width, height + 76), (34, 36, 14, 40)) as chart:
        axes = chart.axes
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for index, row in enumerate(rows):
            levels = [_level(value, first, last) for value in row]
            for level in sorted({level for level in levels if level}):
                spans = _spans(levels, level, edges)
                axes.broken_barh(spans, (index - 0.5, 1.0), facecolors=colour, alpha=level / _LEVELS, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
        axes.yaxis.set_major_locator(FixedLocator(range(0, len(rows), max(1, math.ceil(len(rows) / 8)))))
        for axis in (axes.xaxis, axes.yaxis):
            format_ticks(axis)
        axes.plot([edges[0], edges[-1]], [len(rows) - 0.5] * 2, color=GRID, linewidth=1, clip_on=False)
        axes.set_xlabel(x_label, color=MUTED, fontsize=11, labelpad=6)
        chart.write(-chart.left, chart.plot_height + 16, y_label, MUTED)
        _key(chart, first, last, colour)
        return chart.finish(description)


def _key(chart: Drawing, first: float, last: float, colour: str) -> None:
    """The shades with the numbers at their ends, above the map on the right."""
    y, right = chart.plot_height + 10, chart.plot_width - 44
    left = right - _KEY * _LEVELS
    for level in range(1, _LEVELS + 1):
        box = Rectangle((left + _KEY * (level - 1), y), _KEY, 12, facecolor=colour, alpha=level / _LEVELS, linewidth=0)
        box.set(transform=chart.pixels, clip_on=False)
        chart.axes.add_patch(box)
    digits = 3 - math.floor(math.log10(abs(last - first))) if last != first else 3
    for x, value, align in ((left - 6, first, "right"), (right + 6, last, "left")):
        chart.write(x, y + 6, tick(round(value, max(0, min(digits, 6)))), MUTED, align=align)


def _level(value: float, first: float, last: float) -> int:
    """0 (no colour) to `_LEVELS`."""
    if not math.isfinite(value) or first == last:
        return 0
    return round(_LEVELS * min(1.0, max(0.0, (value - first) / (last - first))))


def _spans(levels: Sequence[int], level: int, edges: Sequence[float]) -> list[tuple[float, float]]:
    """Start and width of each stretch of columns that have this level."""
    found: list[tuple[float, float]] = []
    begin = None
    for column, other in enumerate([*levels, -1]):
        if other == level and begin is None:
            begin = column
        elif other != level and begin is not None:
            found.append((edges[begin], edges[column] - edges[begin]))
            begin = None
    return found
