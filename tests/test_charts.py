"""Charts as inline SVG: what is drawn where, and that a page can hold several in both of its themes."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    logarithmic_ticks,
    smooth,
)
from zaya_hf.reporting.roofline import Mark, Roof, roofline_chart
from zaya_hf.reporting.svg import spread_labels, text_width

SRC = Path(__file__).resolve().parent.parent / "src"
SVG = "{http://www.w3.org/2000/svg}"


def lines(chart_id: str = "loss") -> str:
    drawn = [
        Line("ZAYA1", [1, 2, 3], [3, 2, 1], 0, [2.9, 1.9, 0.9], [3.1, 2.1, 1.1]),
        Line("Qwen3", [1, 2, 3], [3, 2, 1.01], 1),
        Line("Gemma 3", [1, 2, 3], [3, 2, 1.02], 2),
    ]
    return line_chart(chart_id, drawn, x_label="step", y_label="loss (nats)", description="Loss of three models")


def intervals(chart_id: str = "prose") -> str:
    rows = [
        Row("ZAYA1", [Point(0.5, 0.375, 0.625)], 0, "0.500"),
        Row("Llama", [Point(0.25, 0.125, 0.375)], 3, "0.250"),
    ]
    return interval_chart(
        chart_id,
        rows,
        x_label="accuracy",
        description="Accuracy of two models",
        reference=Reference(0.25, "chance 0.250"),
        limits=(0, 1),
    )


def bars(chart_id: str = "size") -> str:
    return bar_chart(
        chart_id,
        [Bar("ZAYA1", 2e6, "two", 0, inner=5e5), Bar("Llama", 1e6, "one", 3, single=[0.5e6, 1.5e6])],
        x_label="parameters",
        description="Parameters of two models",
    )


def roofline(chart_id: str = "roof") -> str:
    return roofline_chart(
        chart_id,
        [Roof("bf16", 708), Roof("fp32", 100)],
        [Mark("ZAYA1", 5, 21, 0), Mark("ZAYA1", 500, 708, 0), Mark("Llama", 50, 100, 3, hollow=True)],
        terabytes_per_second=4.2,
        description="Roofline of two models",
    )


CHARTS: list[Callable[[str], str]] = [lines, intervals, bars, roofline]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> dict[str, tuple[float, float]]:
    """Every text of the drawing and where it is, in px from the upper left corner."""
    return {
        "".join(element.itertext()): (float(element.attrib["x"]), float(element.attrib["y"]))
        for element in parsed(svg).iter(f"{SVG}text")
    }


def ticks_across(svg: str) -> dict[str, float]:
    """Numbers below the x axis and where they are; a number at the y axis may be the same."""
    found = [
        ("".join(e.itertext()), float(e.attrib["x"]), float(e.attrib["y"])) for e in parsed(svg).iter(f"{SVG}text")
    ]
    numbers = [entry for entry in found if re.fullmatch(r"[\d.,]+", entry[0])]
    lowest = max(y for *_, y in numbers)
    return {text: x for text, x, y in numbers if y == lowest}


def strokes(svg: str, variable: str) -> list[list[tuple[float, float]]]:
    """Corners of every line of that colour; a marker, and the line to a single point, are none."""
    found = []
    for element in parsed(svg).iter(f"{SVG}path"):
        if f"stroke: var({variable})" in element.attrib.get("style", ""):
            numbers = re.findall(r"[ML] (\S+) (\S+)", element.attrib["d"])
            found.append([(float(x), float(y)) for x, y in numbers])
    return [stroke for stroke in found if len(stroke) > 1]


@pytest.mark.parametrize("chart", CHARTS)
class TestEveryChart:
    def test_is_one_scalable_image_with_a_description(self, chart: Callable[[str], str]) -> None:
        root = parsed(chart("a"))
        assert root.tag == f"{SVG}svg"
        assert root.attrib["role"] == "img"
        assert "models" in root.attrib["aria-label"]
        assert not {"width", "height"} & set(root.attrib)
        assert root.attrib["viewBox"].startswith("0 0 ")

    def test_is_the_same_every_time(self, chart: Callable[[str], str]) -> None:
        assert chart("a") == chart("a")

    def test_has_no_colour_but_those_of_the_page(self, chart: Callable[[str], str]) -> None:
        svg = chart("a")
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b", re.sub(r'(href="|url\()#[^")]+', "", svg))
        assert "rgb" not in svg
        assert {"var(--series-0)", "var(--muted)", "var(--grid)"} <= set(re.findall(r"var\(--[\w-]+\)", svg))

    def test_brings_no_style_sheet_and_no_font(self, chart: Callable[[str], str]) -> None:
        svg = chart("a")
        assert "<style" not in svg
        assert "font-family" not in svg
        assert "DejaVu" not in svg

    def test_text_is_at_least_nine_px_high_on_a_phone(self, chart: Callable[[str], str]) -> None:
        svg = chart("a")
        width = float(parsed(svg).attrib["viewBox"].split()[2])
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert sizes
        assert min(sizes) * (360 - 2 * 16) / width >= 9

    def test_two_of_them_share_no_id_and_each_reference_has_its_target(self, chart: Callable[[str], str]) -> None:
        ids = []
        for svg in (chart("a"), chart("b")):
            own = re.findall(r'\sid="([^"]+)"', svg)
            referred = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
            assert referred
            assert set(referred) <= set(own)
            ids += own
        assert len(ids) == len(set(ids))

    def test_refuses_an_id_that_is_none(self, chart: Callable[[str], str]) -> None:
        with pytest.raises(ValueError, match="cannot be a chart's id"):
            chart('a"b')

    def test_a_users_matplotlib_settings_count_for_nothing_and_stay(self, chart: Callable[[str], str]) -> None:
        before = chart("a")
        with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "lines.color": "red", "svg.fonttype": "path"}):
            assert chart("a") == before
            assert matplotlib.rcParams["font.size"] == 30
            assert matplotlib.rcParams["svg.fonttype"] == "path"


class TestLineChart:
    def test_names_at_the_ends_are_in_order_and_apart(self) -> None:
        found = texts(lines())
        heights = [found[name][1] for name in ("Gemma 3", "Qwen3", "ZAYA1")]
        assert heights == sorted(heights)
        assert min(b - a for a, b in pairwise(heights)) >= 13
        assert len({found[name][0] for name in ("Gemma 3", "Qwen3", "ZAYA1")}) == 1

    def test_series_differ_by_more_than_colour(self) -> None:
        styles = [
            re.sub(r"var\(--series-\d\)", "", element.attrib["style"])
            for element in parsed(lines()).iter(f"{SVG}path")
            if len(re.findall("[ML]", element.attrib["d"])) == 3 and "--series" in element.attrib.get("style", "")
        ]
        assert len(styles) == 3
        assert len(set(styles)) == 3

    def test_points_lie_where_the_axis_says(self) -> None:
        svg = line_chart(
            "a", [Line("a", [0, 5, 10], [0, 5, 10])], x_label="x", y_label="y", description="", y_limits=(0, 10)
        )
        line = max(strokes(svg, "--series-1"), key=lambda stroke: stroke[-1][0] - stroke[0][0])
        across = [float(e.attrib["x"]) for e in parsed(svg).iter(f"{SVG}text") if e.text in ("0", "10")]
        assert [line[0][0], line[-1][0]] == pytest.approx(across[:2], abs=0.01)
        grid = strokes(svg, "--grid")
        assert [line[0][1], line[-1][1]] == pytest.approx([grid[0][0][1], grid[-1][0][1]], abs=0.01)

    def test_one_step_is_a_marker(self) -> None:
        svg = line_chart("a", [Line("ZAYA1", [1], [6.9], 0)], x_label="step", y_label="loss", description="")
        assert re.search(r'<use href="#a-[^"]+" x="[\d.]+" y="[\d.]+" style="fill: var\(--series-0\)', svg)
        assert "1" in texts(svg)

    def test_names_are_text_and_never_markup(self) -> None:
        name = "<b>&$x_1$"
        svg = line_chart("a", [Line(name, [1, 2], [1, 2])], x_label="#000001", y_label="\x00\ud800", description='"<')
        assert {name, "#000001", "␀\ufffd"} <= set(texts(svg))
        assert parsed(svg).attrib["aria-label"] == '"<'

    def test_a_long_name_is_shortened(self) -> None:
        svg = line_chart("a", [Line("W" * 200, [1, 2], [1, 2])], x_label="x", y_label="y", description="")
        (shown,) = [text for text in texts(svg) if text.startswith("W")]
        assert shown.endswith("…")
        assert len(shown) < 20

    @pytest.mark.parametrize(
        ("drawn", "message"),
        [([], "no line"), ([Line("a", [], [])], "0 x values"), ([Line("a", [1, 2], [1])], "2 x values for 1 y")],
    )
    def test_refuses_what_cannot_be_drawn(self, drawn: list[Line], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            line_chart("a", drawn, x_label="x", y_label="y", description="")


class TestLogarithmicAxes:
    def drawn(self, logarithmic: str) -> str:
        line = Line("a", [1, 10, 1000], [0.01, 1, 100])
        return line_chart("a", [line], x_label="x", y_label="y", description="", logarithmic=logarithmic)

    @pytest.mark.parametrize(
        ("logarithmic", "across", "up"),
        [("x", 1 / 3, 0.99 / 99.99), ("y", 9 / 999, 0.5), ("xy", 1 / 3, 0.5), ("", 9 / 999, 0.99 / 99.99)],
    )
    def test_points_lie_where_the_axes_say(self, logarithmic: str, across: float, up: float) -> None:
        (first, middle, last), *_ = [
            stroke for stroke in strokes(self.drawn(logarithmic), "--series-1") if len(stroke) == 3
        ]
        assert (middle[0] - first[0]) / (last[0] - first[0]) == pytest.approx(across, abs=1e-3)
        assert (middle[1] - first[1]) / (last[1] - first[1]) == pytest.approx(up, abs=1e-3)

    def test_ticks_are_powers_of_ten_where_they_lie(self) -> None:
        svg = self.drawn("xy")
        found = ticks_across(svg)
        (line,) = [stroke for stroke in strokes(svg, "--series-1") if len(stroke) == 3]
        assert [found["1"], found["10"], found["1000"]] == pytest.approx([x for x, _ in line], abs=0.01)
        assert found["100"] - found["10"] == pytest.approx(found["1000"] - found["100"], abs=0.01)

    @pytest.mark.parametrize(("y", "value"), [([1.0, 0.0], "0.0"), ([-1.0, 1.0], "-1.0"), ([1.0, math.inf], "inf")])
    def test_what_has_no_place_is_refused(self, y: list[float], value: str) -> None:
        with pytest.raises(ValueError, match=f"chart 'a', line: {value} has no place"):
            line_chart("a", [Line("line", [1, 2], y)], x_label="x", y_label="y", description="", logarithmic="y")
        line_chart("a", [Line("line", [1, 2], [1, 2])], x_label="x", y_label="y", description="", logarithmic="y")

    def test_a_band_has_to_be_positive_too(self) -> None:
        line = Line("line", [1, 2], [1, 2], low=[0, 1], high=[2, 3])
        with pytest.raises(ValueError, match="0 has no place"):
            line_chart("a", [line], x_label="x", y_label="y", description="", logarithmic="y")

    def test_one_step_has_its_tick(self) -> None:
        line = Line("line", [7], [3])
        assert "7" in texts(line_chart("a", [line], x_label="x", y_label="y", description="", logarithmic="xy"))

    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [
            (1, 1000, [1, 3, 10, 30, 100, 300, 1000][::2]),
            (1, 10, [1, 2, 5, 10]),
            (2, 400, [3, 10, 30, 100, 300]),
            (1e-3, 1e12, [1e-3, 1, 1e3, 1e6, 1e9, 1e12]),
            (6, 9, [6, 9]),
            (1, 1e8, [1, 1e2, 1e4, 1e6, 1e8]),
        ],
    )
    def test_which_ticks(self, low: float, high: float, ticks: list[float]) -> None:
        assert logarithmic_ticks(low, high) == pytest.approx(ticks)

    @given(st.floats(1e-12, 1e12), st.floats(1.01, 1e20))
    def test_there_are_some_ticks_and_not_too_many(self, low: float, factor: float) -> None:
        found = logarithmic_ticks(low, low * factor)
        assert 1 <= len(found) <= 7
        assert found == sorted(found)
        assert all(low * (1 - 1e-6) <= value <= low * factor * (1 + 1e-6) for value in found)

    @pytest.mark.parametrize("ends", [(0, 1), (2, 1), (1, math.inf), (-1, 1)])
    def test_ends_have_to_be_in_order(self, ends: tuple[float, float]) -> None:
        with pytest.raises(ValueError, match="cannot go from"):
            logarithmic_ticks(*ends)


class TestRoofline:
    def test_memory_meets_each_roof_at_its_ridge(self) -> None:
        svg = roofline()
        drawn = [stroke for stroke in strokes(svg, "--ink") if len(stroke) == 2]
        (slope,) = [stroke for stroke in drawn if stroke[0][1] != stroke[1][1]]
        fp32, bf16 = sorted((stroke for stroke in drawn if stroke is not slope), key=lambda stroke: stroke[0][0])
        found = ticks_across(svg)
        decade = found["100"] - found["10"]
        assert (bf16[0][0] - found["100"]) / decade == pytest.approx(math.log10(708 / 4.2 / 100), abs=0.01)
        assert (fp32[0][0] - found["10"]) / decade == pytest.approx(math.log10(100 / 4.2 / 10), abs=0.01)
        assert slope[1] == pytest.approx(bf16[0], abs=0.01)
        steep = (slope[0][1] - slope[1][1]) / (slope[1][0] - slope[0][0])
        assert fp32[0][1] == pytest.approx(slope[1][1] + steep * (slope[1][0] - fp32[0][0]), abs=0.05)

    def test_each_mark_is_there_and_each_label_once(self) -> None:
        svg = roofline()
        assert len(re.findall(r"<use [^>]*(?:fill|stroke): var\(--series-0\)", svg)) == 2 + 1
        assert len(re.findall(r"<use [^>]*stroke: var\(--series-3\)", svg)) == 1  # hollow
        assert {"ZAYA1", "Llama", "708 bf16", "100 fp32", "4.2 TB/s", "TFLOP/s"} <= set(texts(svg))

    def test_without_marks_it_is_the_roofs(self) -> None:
        svg = roofline_chart("a", [Roof("bf16", 2500)], [], terabytes_per_second=8, description="")
        assert "2,500 bf16" in texts(svg)

    def test_many_labels_take_several_rows(self) -> None:
        marks = [Mark(f"linear_cross_entropy {number}", 1 + number, 1, number) for number in range(7)]
        svg = roofline_chart("a", [Roof("bf16", 708)], marks, terabytes_per_second=4.2, description="")
        rows = {texts(svg)[mark.label][1] for mark in marks}
        assert len(rows) > 1
        assert all(x + text_width(name) <= 440 for name, (x, _) in texts(svg).items() if name.startswith("linear"))

    @pytest.mark.parametrize(
        ("roofs", "marks", "message"),
        [
            ([], [], "no roof"),
            ([Roof("bf16", 0)], [], "0 has no place"),
            ([Roof("bf16", 1)], [Mark("k", 0, 1)], "chart 'a', k: 0 has no place"),
        ],
    )
    def test_refuses_what_cannot_be_drawn(self, roofs: list[Roof], marks: list[Mark], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            roofline_chart("a", roofs, marks, terabytes_per_second=1, description="")


class TestIntervalChart:
    def test_intervals_and_chance_lie_where_the_axis_says(self) -> None:
        svg = intervals()
        ticks = texts(svg)
        zero, one = ticks["0"][0], ticks["1"][0]
        ((left, right),) = strokes(svg, "--series-0")
        assert left[1] == right[1]
        assert [(x - zero) / (one - zero) for x, _ in (left, right)] == pytest.approx([0.375, 0.625], abs=1e-4)
        (chance,) = strokes(svg, "--ink")
        assert [(x - zero) / (one - zero) for x, _ in chance] == pytest.approx([0.25, 0.25], abs=1e-4)
        assert ticks["ZAYA1"][1] == pytest.approx(left[1], abs=5)
        assert ticks["ZAYA1"][1] == ticks["0.500"][1] < ticks["Llama"][1]

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_a_marker_at_the_end_of_the_axis_is_whole(self, value: float) -> None:
        svg = interval_chart("a", [Row("ZAYA1", [Point(value)], 0)], x_label="x", description="", limits=(0, 1))
        tree = parsed(svg)
        (mark,) = (
            group
            for group in tree.iter()
            if any(child.tag.endswith("use") and "series-0" in child.get("style", "") for child in group)
        )
        assert not any("clip-path" in element.attrib for element in (mark, *mark))

    def test_a_label_of_the_reference_stays_inside(self) -> None:
        for value in (0.0, 1.0):
            svg = interval_chart(
                "a",
                [Row("ZAYA1", [Point(0.5)])],
                x_label="x",
                description="",
                reference=Reference(value, "the frequencies of single tokens"),
                limits=(0, 1),
            )
            middle, width = (
                texts(svg)["the frequencies of single tokens"][0],
                text_width("the frequencies of single tokens"),
            )
            assert width / 2 - 0.01 <= middle <= 400 - width / 2 + 0.01

    @pytest.mark.parametrize("seeds", [2, 3, 15])
    def test_every_seed_has_a_mark_and_all_have_a_mean(self, seeds: int) -> None:
        values = [0.2 + 0.5 * index / seeds for index in range(seeds)]
        rows = [Row("ZAYA1", [Point(value, value - 0.05, value + 0.05) for value in values], 0)]
        svg = interval_chart("a", rows, x_label="accuracy", description="", limits=(0, 1))
        assert len(re.findall(r"<use [^>]*fill: var\(--series-0\)", svg)) == seeds
        zero, one = texts(svg)["0"][0], texts(svg)["1"][0]
        drawn = [stroke for stroke in strokes(svg, "--series-0") if len(stroke) == 2]
        upright = [stroke for stroke in drawn if stroke[0][0] == stroke[1][0]]
        flat = [stroke for stroke in drawn if stroke[0][1] == stroke[1][1]]
        assert [(stroke[0][0] - zero) / (one - zero) for stroke in upright] == pytest.approx(
            [math.fsum(values) / seeds], abs=1e-4
        )
        assert len({stroke[0][1] for stroke in flat}) == seeds
        assert float(parsed(svg).attrib["viewBox"].split()[3]) == pytest.approx(
            interval_chart_height(1, seeds), abs=0.51
        )

    def test_limits_hold_everything(self) -> None:
        svg = interval_chart(
            "a", [Row("a", [Point(2, 1, 3)])], x_label="x", description="", reference=Reference(9, "r")
        )
        width = float(parsed(svg).attrib["viewBox"].split()[2])
        for stroke in strokes(svg, "--series-1") + strokes(svg, "--ink"):
            assert all(0 < x < width for x, _ in stroke)

    @pytest.mark.parametrize("rows", [[], [Row("a", [])]])
    def test_refuses_what_cannot_be_drawn(self, rows: list[Row]) -> None:
        with pytest.raises(ValueError, match=r"has (no row|a row without)"):
            interval_chart("a", rows, x_label="x", description="")


class TestBarChart:
    def test_lengths_are_as_the_values(self) -> None:
        svg = bars()
        zero, million = texts(svg)["0"][0], texts(svg)["1\u00a0M"][0]
        ends = {}
        for element in parsed(svg).iter(f"{SVG}path"):
            style = element.attrib.get("style", "")
            if "fill: var(--series" in style or "stroke: var(--series" in style:
                xs = [float(x) for x in re.findall(r"[ML] (\S+) ", element.attrib["d"])]
                ends["outline" if "fill: none" in style else style[:21]] = (max(xs) - zero) / (million - zero)
        assert ends == pytest.approx({"fill: var(--series-0)": 0.5, "fill: var(--series-3)": 1, "outline": 2}, abs=1e-3)

    def test_numbers_stand_behind_the_longest_measurement(self) -> None:
        found = texts(bars())
        assert found["two"][0] > found["one"][0] > found["1\u00a0M"][0]

    @pytest.mark.parametrize("drawn", [[], [Bar("a", -1, "")]])
    def test_refuses_what_cannot_be_drawn(self, drawn: list[Bar]) -> None:
        with pytest.raises(ValueError, match=r"has (no bar|a negative)"):
            bar_chart("a", drawn, x_label="x", description="")

    def test_all_zero_can_be_drawn(self) -> None:
        assert "nothing" in texts(bar_chart("a", [Bar("a", 0, "nothing")], x_label="x", description=""))


@given(
    values=st.lists(st.floats(-100, 100), max_size=60),
    window=st.integers(1, 70),
)
def test_smoothing_is_the_mean_over_the_window(values: list[float], window: int) -> None:
    found = smooth(values, window)
    assert len(found) == len(values)
    for index, value in enumerate(found):
        near = [v for place, v in enumerate(values) if -((window - 1) // 2) <= place - index <= window // 2]
        assert value == pytest.approx(sum(near) / len(near), abs=1e-9)


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0"):
        smooth([1.0], 0)


@given(wanted=st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_are_spread_without_leaving_the_axes(wanted: list[float]) -> None:
    places = spread_labels(wanted, 14, 0, 120)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    sorted_places = [places[index] for index in order]
    assert all(b - a >= 14 - 1e-6 for a, b in pairwise(sorted_places))
    assert min(places) >= -1e-9
    assert max(places) <= 120 + 1e-9
    # None moves that did not have to.
    if all(b - a >= 14 for a, b in pairwise(sorted(wanted))):
        assert places == pytest.approx(wanted)


def test_neither_the_package_nor_a_chart_loads_what_it_need_not() -> None:
    code = (
        "import sys, zaya_hf; print('matplotlib' in sys.modules);"
        "import zaya_hf.reporting.charts; print('matplotlib.pyplot' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert done.split() == ["False", "False"]
