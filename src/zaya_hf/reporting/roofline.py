"""The roofline chart: what a GPU's memory and matrix units allow, over operations per byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import FixedLocator

from zaya_hf.reporting.charts import (
    MARKER_SIZES,
    MARKERS,
    format_ticks,
    logarithmic_ticks,
    require_positive,
    set_logarithmic,
)
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

_LEGEND_ROW = 18.0
_LABEL_WIDTH = 130
_MARGIN = 0.35  # decades around what is drawn


@dataclass(frozen=True)
class Roof:
    """What products of one kind reach, in TFLOP/s."""

    label: str
    rate: float


@dataclass(frozen=True)
class Mark:
    """A kernel: operations per byte, and TFLOP/s. Marks of one label share a slot and have one entry in the legend."""

    label: str
    intensity: float
    rate: float
    slot: int = 1
    hollow: bool = False


def roofline_chart(
    chart_id: str,
    roofs: Sequence[Roof],
    marks: Sequence[Mark],
    *,
    terabytes_per_second: float,
    description: str,
    size: tuple[float, float] = (400, 300),
) -> str:
    """Operations per byte across, TFLOP/s up, both in decades: the slope that memory allows, a level for each roof, and
    a mark for each kernel.

    Args:
        chart_id: unique on the page; letters, digits, '-' and '_'.
        terabytes_per_second: of the memory.
        description: what a screen reader says in place of the chart.

    Raises:
        ValueError: no roof, a number that is not above 0, an id with other characters.
    """
    if not roofs:
        raise ValueError(f"chart {chart_id!r} has no roof to draw")
    require_positive(chart_id, "memory", [terabytes_per_second])
    for roof in roofs:
        require_positive(chart_id, roof.label, [roof.rate])
    for mark in marks:
        require_positive(chart_id, mark.label, [mark.intensity, mark.rate])
    ridges = [roof.rate / terabytes_per_second for roof in roofs]
    widest, least = 10**_MARGIN, min([*ridges, *(mark.intensity for mark in marks)])
    low, high = least / widest / 2, max([*ridges, *(mark.intensity for mark in marks)]) * widest
    bottom = min([low * terabytes_per_second, *(mark.rate for mark in marks)]) / 1.2
    names = [shorten(f"{_rate(roof.rate)} {roof.label}", _LABEL_WIDTH) for roof in roofs]
    right = max(text_width(name, bold=True) for name in names) + 20
    entries = _legend_places(marks, size[0])
    top = 30 + _LEGEND_ROW * (entries[-1][2] + 1 if entries else 0)
    with drawing(chart_id, size, (44, top, right, 40)) as chart:
        axes = chart.axes
        set_logarithmic(axes, "xy")
        axes.set_xlim(low, high)
        axes.set_ylim(bottom, max(roof.rate for roof in roofs) * 1.8)
        highest = max(ridges)
        axes.plot(
            [low, highest], [low * terabytes_per_second, highest * terabytes_per_second], color=INK, linewidth=1.6
        )
        for roof, ridge in zip(roofs, ridges, strict=True):
            axes.plot([ridge, high], [roof.rate, roof.rate], color=INK, linewidth=1.6)
        for mark in marks:
            colour, shape = series_colour(mark.slot), mark.slot % SLOTS
            (drawn,) = axes.plot(mark.intensity, mark.rate, marker=MARKERS[shape], color=colour, zorder=4)
            _style(drawn, shape, mark.hollow, colour)
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            axis.set_major_locator(FixedLocator(logarithmic_ticks(*ends)))
            format_ticks(axis)
        axes.grid(True, color=GRID, linewidth=1)
        axes.set_xlabel("operations per byte of memory traffic", color=MUTED, fontsize=11, labelpad=6)
        chart.write(-chart.left, chart.plot_height + 14, "TFLOP/s", MUTED)
        _label_roofs(chart, roofs, names, high)
        _label_memory(chart, low, highest, terabytes_per_second)
        _legend(chart, entries)
        return chart.finish(description)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _style(drawn: object, shape: int, hollow: bool, colour: str) -> None:
    drawn.set(  # type: ignore[attr-defined]
        markersize=7.5 * MARKER_SIZES[shape],
        markerfacecolor=SURFACE if hollow else colour,
        markeredgecolor=colour if hollow else SURFACE,
        markeredgewidth=1.6 if hollow else 1,
        clip_on=False,
    )


def _label_roofs(chart: Drawing, roofs: Sequence[Roof], names: Sequence[str], high: float) -> None:
    wanted = [chart.place(high, roof.rate)[1] for roof in roofs]
    for name, place in zip(names, spread_labels(wanted, 14, 0, chart.plot_height), strict=True):
        chart.write(chart.plot_width + 8, place, name)


def _label_memory(chart: Drawing, low: float, highest: float, rate: float) -> None:
    """Along the slope, a third of the way up, on its left."""
    x = low ** (2 / 3) * highest ** (1 / 3)
    across, up = chart.place(x, x * rate)
    chart.write(across - 8, up + 8, f"{rate:.3g} TB/s", align="right")


def _legend_places(marks: Sequence[Mark], width: float) -> list[tuple[Mark, float, int]]:
    """A mark of each label, where its entry begins, and in which row."""
    found: list[tuple[Mark, float, int]] = []
    x, row = 0.0, 0
    first: dict[str, Mark] = {}
    for mark in marks:
        first.setdefault(mark.label, mark)
    for mark in first.values():
        wide = text_width(mark.label) + 34
        if found and x + wide > width:
            x, row = 0.0, row + 1
        found.append((mark, x, row))
        x += wide
    return found


def _legend(chart: Drawing, entries: list[tuple[Mark, float, int]]) -> None:
    for mark, x, row in entries:
        y = chart.plot_height + 14 + _LEGEND_ROW * (entries[-1][2] - row + 1)
        colour, shape = series_colour(mark.slot), mark.slot % SLOTS
        (drawn,) = chart.axes.plot(
            x - chart.left + 5, y, marker=MARKERS[shape], color=colour, transform=chart.pixels, linestyle=""
        )
        _style(drawn, shape, False, colour)
        chart.write(x - chart.left + 15, y, mark.label)
