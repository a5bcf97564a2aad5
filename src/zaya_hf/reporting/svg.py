"""One drawing for a page: matplotlib axes with px around them, and the SVG text that they become.

What leaves here has no width and height, so that the page scales it; its text stays text; its colours are the CSS
variables of the page (``--series-0`` and so on), so that one drawing serves light and dark; its ids begin with the
drawing's own id. The same calls give the same text, on every machine: measures come from the font that matplotlib
brings along, and a user's matplotlibrc has no say.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.transforms import Affine2D

from zaya_hf.reporting.formats import visible

#: slots of a series: 0 is the emphasised one
SLOTS = 7
#: size of all text, px
FONT = 11.0
# Placeholders, one per CSS variable. matplotlib writes them as they are, only in style attributes.
INK, MUTED, GRID, SURFACE = "#000001", "#000002", "#000003", "#000004"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface"} | {
    f"#0000{16 + slot:02x}": f"--series-{slot}" for slot in range(SLOTS)
}


class Drawing:
    """Axes of a figure whose margins are given in px; `axes` is matplotlib's. Text may be placed in px too."""

    def __init__(self, chart_id: str, size: tuple[float, float], margins: tuple[float, float, float, float]) -> None:
        """`size` is width and height, `margins` are left, top, right and bottom, all in px."""
        self.chart_id = chart_id
        (self.width, self.height), (self.left, top, right, bottom) = size, margins
        self.plot_width, self.plot_height = self.width - self.left - right, self.height - top - bottom
        # matplotlib writes SVG with 72 px an inch, so that points are px.
        self.figure = Figure(figsize=(self.width / 72, self.height / 72), facecolor="none")
        FigureCanvasSVG(self.figure)
        box = (self.left / self.width, bottom / self.height, self.plot_width / self.width)
        self.axes = self.figure.add_axes((*box, self.plot_height / self.height), facecolor="none")
        for spine in self.axes.spines.values():
            spine.set_visible(False)
        self.axes.set_axisbelow(True)
        self.axes.tick_params(which="both", length=0, pad=5, labelsize=FONT, labelcolor=MUTED)
        #: px from the lower left corner of the axes
        self.pixels = Affine2D().translate(self.left, bottom).scale(1 / 72) + self.figure.dpi_scale_trans

    def write(self, x: float, y: float, text: str, colour: str = INK, bold: bool = False, align: str = "left") -> None:
        """Text at `x`, `y` px from the lower left corner of the axes, centred on `y`."""
        weight = "bold" if bold else "normal"
        options: dict[str, Any] = {"ha": align, "va": "center", "fontsize": FONT, "fontweight": weight}
        self.axes.text(x, y, visible(text), color=colour, transform=self.pixels, **options)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where the axes show the point `x`, `y`, in px from their lower left corner."""
        across, up = (self.axes.transScale + self.axes.transLimits).transform((x, y))
        return float(across) * self.plot_width, float(up) * self.plot_height

    def finish(self, description: str) -> str:
        """The ``<svg>`` element; `description` is what a screen reader says in its place."""
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(buffer, format="svg", metadata=nothing)
        text = buffer.getvalue()
        text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
        # matplotlib's own style sheet would apply to the whole page, which has the same rule for charts alone.
        text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL).replace("xlink:href=", "href=")
        text = re.sub(r'style="([^"]*)"', lambda match: f'style="{_style(match[1])}"', text)
        used = set(re.findall(r'(?<=href="#)[^"]+|(?<=url\(#)[^)]+', text))
        text = re.sub(r' id="([^"]+)"', lambda m: f' id="{self.chart_id}-{m[1]}"' if m[1] in used else "", text)
        text = re.sub(r'(href="|url\()#', rf"\g<1>#{self.chart_id}-", text)
        text = re.sub(r"\s*\n\s*", "\n", re.sub(r"<defs>\s*</defs>", "", text)).strip()
        label = escape(visible(description))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'id="{self.chart_id}" class="chart" role="img" aria-label="{label}">\n{text}\n</svg>'
        )


@contextmanager
def drawing(chart_id: str, size: tuple[float, float], margins: tuple[float, float, float, float]) -> Iterator[Drawing]:
    """A `Drawing` of that size and with those margins (left, top, right, bottom), all px; matplotlib's settings are its
    own defaults meanwhile.

    Raises:
        ValueError: the id has other characters than letters, digits, '-' and '_', or does not begin with a letter.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", chart_id):
        raise ValueError(f"{chart_id!r} cannot be a chart's id: letters, digits, '-' and '_', a letter first")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": chart_id, "text.parse_math": False})
        with _without_glyph_warnings():
            yield Drawing(chart_id, size, margins)


@contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """The page is shown in other fonts than the one that measures are taken from, which need not know a character."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def series_colour(slot: int) -> str:
    """The placeholder of the slot's colour; slots beyond the last begin again."""
    return f"#0000{16 + slot % SLOTS:02x}"


def text_width(text: str, bold: bool = False) -> float:
    """Width in px, in the font that measures are taken from. It is a wide one: a page's own font needs less."""
    font = FontProperties(family="DejaVu Sans", size=FONT, weight="bold" if bold else "normal")
    with _without_glyph_warnings():
        return float(TextToPath().get_text_width_height_descent(text, font, ismath=False)[0])


def shorten(text: str, width: float) -> str:
    """The text, or as much of its beginning as is at most `width` px wide, with an ellipsis."""
    text = visible(" ".join(text.split()))
    if text_width(text[:200], bold=True) <= width and len(text) <= 200:
        return text
    fits, too_long = 0, min(len(text), 200)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if text_width(text[:middle].rstrip() + "…", bold=True) <= width:
            fits = middle
        else:
            too_long = middle
    return text[:fits].rstrip() + "…"


def shorten_alike(texts: Sequence[str], width: float) -> list[str]:
    """Each text as `shorten` leaves it, but those of which that would make equal ones keep their end as well, with the
    ellipsis in the middle."""
    short = [shorten(text, width) for text in texts]
    for place, text in enumerate(texts):
        if any(short[place] == short[other] and text != texts[other] for other in range(len(texts)) if other != place):
            text = visible(" ".join(text.split()))[-200:]
            beginning = shorten(text, width / 2)
            end = text[len(beginning) :]
            while end and text_width(beginning + end, bold=True) > width:
                end = end[1:]
            short[place] = beginning + end
    return short


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels as near as possible to the wanted ones: in the same order, at least `gap` apart, and within
    low ... high as long as that has room for them all."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Blocks of labels that touch: each lies around the mean of what its members want.
    blocks: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        blocks.append([index])
        starts.append(0.0)
        while True:
            members = blocks[-1]
            length = gap * (len(members) - 1)
            start = math.fsum(wanted[i] - gap * place for place, i in enumerate(members)) / len(members)
            starts[-1] = max(low, min(start, high - length))
            if len(blocks) == 1 or starts[-2] + gap * len(blocks[-2]) <= starts[-1] + 1e-9:
                break
            blocks[-2:] = [blocks[-2] + blocks[-1]]
            starts.pop()
    places = [0.0] * len(wanted)
    for members, start in zip(blocks, starts, strict=True):
        for place, index in enumerate(members):
            places[index] = start + gap * place
    return places


def _style(style: str) -> str:
    """A style attribute with the page's font, and with variables for the placeholders."""
    style = re.sub(r"\s*font-family:[^;]*;?", "", style)
    return re.sub(r"#0000[0-9a-f]{2}", lambda match: f"var({_VARIABLES[match[0]]})", style)
