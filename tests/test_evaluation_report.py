"""The report on an evaluation: its numbers are the comparison's, its page is sound, and hostile texts do nothing."""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import evaluation_folders
from evaluation_comparisons import (
    MANIFEST,
    NOTES,
    PROSE,
    STORIES,
    comparison,
    item,
    pair,
    score,
    task,
)
from zaya_hf import report_cli
from zaya_hf.evaluation.comparison import compare
from zaya_hf.evaluation.report import build_report, write_report
from zaya_hf.reporting.charts import Point, Row, interval_chart
from zaya_hf.reporting.evaluation_charts import forests, over_sizes
from zaya_hf.reporting.evaluation_files import is_evaluation
from zaya_hf.reporting.evaluation_markdown import escape, markdown
from zaya_hf.reporting.evaluation_page import page
from zaya_hf.reporting.evaluation_tables import (
    about_task,
    difference_text,
    headline,
    interval_text,
    p_text,
    titles,
    value_text,
    verdict,
)
from zaya_hf.reporting.scatter import Dot, scatter_chart
from zaya_hf.reporting.svg import shorten_alike, text_width

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e{{ 1 }}&amp;'\""
VOID = {"meta", "br", "wbr", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """What a browser makes of the page: its elements, which must be nested rightly, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[int] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += f" {data.strip()}"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def row(self, begins: str) -> list[str]:
        """Cells of the only row whose first cell begins so."""
        (found,) = [cells for cells in self.cells if cells and cells[0].strip().startswith(begins)]
        return [" ".join(cell.split()) for cell in found]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def drawn(found: dict[str, Any]) -> Page:
    return Page(page(found, MANIFEST))


@pytest.fixture(scope="module")
def plain() -> Page:
    """The page of a flawless comparison, which several tests read."""
    return drawn(comparison())


class TestNumbers:
    def test_scores_and_intervals_stand_under_their_model(self, plain: Page) -> None:
        cells = plain.row("Ends of stories acc")
        assert cells[0] == "Ends of stories acc_norm · 5-shot · n = 200 · chance 25.0"
        assert cells[1:] == ["55.7 49.7\u201361.7", "62.0 56.0\u201368.0", "68.2 62.2\u201374.2"]
        assert plain.row("Prose bits_per_byte")[1] == "0.682 0.622\u20130.742"

    def test_differences_stand_with_all_that_was_tested(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["pairs"] = [pair("qwen", "stories", -0.1375, "worse", p=0.0002, p_holm=0.0006, n10=3, n01=25)]
        rows = [cells for cells in drawn(found).cells if len(cells) == 9]
        assert [" ".join(cell.split()) for cell in rows[1]] == [
            "Ends of stories",
            "200",
            "\u221213.8 \u221217.8 to \u22129.8",
            "3",
            "25",
            "< 0.001 McNemar",
            "0.001",
            "9.8",
            "worse",
        ]

    def test_zero_and_one(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["scores"]["zaya"]["stories"] = score(0.0, interval=[0.0, 0.0188], above_chance=False)
        found["scores"]["qwen"]["stories"] = score(1.0, interval=[0.9812, 1.0], above_chance=True)
        cells = drawn(found).row("Ends of stories acc")
        assert cells[1:] == ["0.0 0.0\u20131.9 not above chance", "100.0 98.1\u2013100.0"]

    def test_what_papers_report_has_its_own_column(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        before = drawn(copy.deepcopy(found))
        found["reported"]["qwen"] = {"stories": {"value": 0.9137, "metric": "10-shot", "source": "A paper, table 2"}}
        after = drawn(found)
        assert after.row("Ends of stories acc") == [*before.row("Ends of stories acc"), "91.4 10-shot"]
        assert ["Task", "zaya baseline", "qwen", "qwen reported"] in [
            [" ".join(cell.split()) for cell in cells] for cells in after.cells
        ]
        assert "qwen: A paper, table 2" in after.text
        assert after.text.count("91.4") == 1

    def test_the_headline_and_verdicts_are_in_words(self, plain: Page) -> None:
        assert "zaya beside qwen and olmoe" in plain.text
        assert "qwen is better on Sums, is worse on Ends of stories and cannot be told apart on Prose." in plain.text
        assert (
            "Its mean over two tasks is +2.0 points to zaya's (\u22121.0 to +5.0): cannot be told apart." in plain.text
        )
        assert "Of 6 comparisons with zaya, 4 show a difference" in plain.text

    def test_a_mean_of_one_task_is_not_shown_beside_its_row(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        assert found["means"][0]["tasks"] == ["stories"]
        assert "Its mean" not in drawn(found).text
        assert [chart["title"] for chart in over_sizes(found, found["means"][0])] == [
            "Active parameters",
            "Total parameters",
        ]

    def test_costs(self, plain: Page) -> None:
        (cells,) = [cells for cells in plain.cells if len(cells) == 8 and cells[0].strip() == "qwen"]
        assert [cell.strip() for cell in cells[1:]] == [
            "3", "400", "120,000", "30,000", "2,000", "2\u00a0min\u00a05\u00a0s", "256",
        ]  # fmt: skip

    def test_a_group_is_one_row_and_its_tasks_are_folded(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        leaves = [f"mmlu_{place}" for place in range(57)]
        group = ("mmlu", "MMLU", "knowledge", "acc", "binary")
        found["tasks"].append(task(*group, kind="group", leaves=leaves, items=14_042))
        found["tasks"] += [task(leaf, f"Subject {leaf}", *group[2:], parent="mmlu") for leaf in leaves]
        for name in ("zaya", "qwen"):
            found["scores"][name] |= {leaf: score(0.5) for leaf in leaves} | {"mmlu": score(0.625)}
        html = page(found, MANIFEST)
        read = Page(html)
        assert read.row("MMLU acc") == [
            "MMLU acc · 5-shot · n = 14,042 · 57 tasks · chance 25.0", "62.5 56.5\u201368.5", "62.5 56.5\u201368.5",
        ]  # fmt: skip
        assert "MMLU: 57 tasks one by one" in read.text
        folded = html[html.index("MMLU: 57 tasks") : html.index("</details>", html.index("MMLU: 57 tasks"))]
        assert folded.count("Subject mmlu_") == html.count("Subject mmlu_") == 57


class TestWords:
    @pytest.mark.parametrize(
        ("value", "kind", "text"),
        [
            (0.6124, "percent", "61.2"), (0.0, "percent", "0.0"), (1.0, "percent", "100.0"),
            (None, "percent", "\u2013"), (float("nan"), "percent", "\u2013"), (0.87449, "bits_per_byte", "0.874"),
            (12.3456, "perplexity", "12.35"), (1234.5, "perplexity", "1,234.50"),
        ],
    )  # fmt: skip
    def test_values(self, value: float | None, kind: str, text: str) -> None:
        assert value_text(value, kind) == text

    @pytest.mark.parametrize(
        ("value", "text"), [(0.031, "+3.1"), (-0.031, "\u22123.1"), (0.0, "0.0"), (-0.0004, "0.0"), (0.0004, "0.0")]
    )
    def test_a_difference_has_a_sign_unless_it_is_none(self, value: float, text: str) -> None:
        assert difference_text(value, "percent") == text

    def test_intervals(self) -> None:
        assert interval_text([-0.01, 0.03], "percent", signed=True) == "\u22121.0 to +3.0"
        assert interval_text([0.5, 0.61], "percent") == "50.0\u201361.0"
        assert interval_text(None, "percent") == ""

    def test_small_probabilities_are_not_shown_as_zero(self) -> None:
        assert [p_text(p) for p in (0.0, 0.0004, 0.0006, 1.0, None)] == [
            "<\u00a00.001", "<\u00a00.001", "0.001", "1.000", "\u2013",
        ]  # fmt: skip

    def test_a_title_that_two_models_share_has_the_name(self) -> None:
        found = comparison(("zaya-1", "zaya-2", "qwen"))
        for model in found["models"][:2]:
            model["title"] = "ZAYA1"
        assert titles(found) == {"zaya-1": "ZAYA1 (zaya-1)", "zaya-2": "ZAYA1 (zaya-2)", "qwen": "qwen"}

    def test_names_that_differ_in_their_end_stay_apart(self) -> None:
        names = ["a-rather-long-name-of-a-model-seed-0", "a-rather-long-name-of-a-model-seed-1", "short"]
        short = shorten_alike(names, 150)
        assert len(set(short)) == 3
        assert short[2] == "short"
        assert short[0].endswith("seed-0")
        assert max(text_width(name, bold=True) for name in short) <= 150

    def test_the_headline_counts_many_models(self) -> None:
        assert headline(comparison(("zaya", "a", "b", "c", "d"))) == "zaya beside four other models"
        assert headline(comparison(("zaya",), [STORIES])) == "zaya on Ends of stories"
        assert headline(comparison(("zaya",))) == "zaya on three tasks"

    def test_a_task_says_how_it_is_measured(self) -> None:
        assert about_task(task(*PROSE)) == "bits_per_byte, lower is better · 5-shot · n\u00a0=\u00a0200"
        code = task("code", "Code", "code", "pass@1", "mean", filter="run_tests", shots=None, items=None)
        assert about_task(code) == "pass@1 (run_tests)"

    def test_a_model_without_a_common_task(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["pairs"] = []
        assert verdict(found, "qwen") == "qwen has no task in common with zaya that is finished."


class TestIncomplete:
    def test_one_model_is_not_compared(self) -> None:
        read = drawn(comparison(("zaya",), [STORIES]))
        assert "zaya on Ends of stories" in read.text
        assert "There is one model, and so nothing to compare." in read.text
        assert "Verdicts" not in read.text
        assert "Differences to" not in read.text

    def test_what_is_missing_is_said_at_the_top(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES, PROSE])
        del found["scores"]["qwen"]["prose"]
        found["pairs"] = [entry for entry in found["pairs"] if entry["task"] != "prose"]
        read = drawn(found)
        assert "Not finished: qwen has no score on Prose." in read.text
        assert read.text.index("Not finished") < read.text.index("Scores")
        assert read.row("Prose bits")[2] == "\u2013 no finished run"
        assert "qwen has no finished run of Prose" in markdown(found)

    def test_a_group_with_missing_tasks_has_no_score(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["scores"]["qwen"]["stories"] = score(None, missing=["a", "b"], run=None)
        found["pairs"] = []
        assert drawn(found).row("Ends of stories acc")[2] == "\u2013 2 missing"

    def test_items_without_a_number_leave_no_score(self) -> None:
        found = comparison(("zaya",), [STORIES])
        found["scores"]["zaya"]["stories"] = score(None, unscored=3)
        assert drawn(found).row("Ends of stories acc")[1] == "\u2013 3 items without a score"

    def test_nothing_is_known_of_the_models_but_their_scores(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        for model in found["models"]:
            model |= {"parameters": None, "parameters_active": None, "dtype": None, "path": None}
            model["cost"] |= {"tokens_per_second": None, "runs": 0}
        found |= {"code_execution": None, "created": None, "updated": None, "discordant": []}
        read = Page(page(found, {"made_by": "zaya eval"}))
        assert "Scores over sizes" not in read.text
        assert "None" not in read.text.replace("None: every prompt", "")

    def test_a_model_of_unknown_active_size_is_named_below_the_chart(self) -> None:
        found = comparison()
        found["models"][1]["parameters_active"] = None
        active, total = over_sizes(found, found["means"][0])
        assert active["caption"] == "Not known of qwen."
        assert ("qwen" in active["svg"], "qwen" in total["svg"]) == (False, True)


class TestLoud:
    def test_cut_texts_are_loud_and_beside_their_score(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["scores"]["qwen"]["stories"]["counts"] |= {"truncated_answers": 12, "empty_answers": 1}
        said = "12 of 200 answers were cut"
        found["warnings"] = [
            {"level": "loud", "model": "qwen", "task": "stories", "text": said},
            {"level": "note", "model": None, "task": None, "text": "only a remark"},
        ]
        html = page(found, MANIFEST)
        read = Page(html)
        assert read.row("Ends of stories acc")[2] == "49.5 43.5\u201355.5 ⚠ 12 answers cut ⚠ 1 empty answer"
        box = html[html.index('<section class="warning"') : html.index("</section>", html.index('class="warning"'))]
        assert said in box
        assert "only a remark" not in box
        assert "only a remark" in read.text
        assert "⚠ 12 answers cut and 1 empty answer" in read.text
        assert f"qwen, stories: {said}" in markdown(found)

    def test_without_flaws_there_is_no_box(self, plain: Page) -> None:
        assert "Read this first" not in plain.text
        assert "None: every prompt fitted, and no answer was cut off or empty." in plain.text

    def test_many_warnings_are_folded(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["warnings"] = [
            {"level": "loud", "model": "qwen", "task": None, "text": f"flaw {place}."} for place in range(40)
        ]
        text = drawn(found).text
        assert "28 more warnings" in text
        assert all(f"flaw {place}." in text for place in range(40))

    def test_other_prompts_and_refusals_are_said(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["pairs"][0] |= {"prompts_differ": True, "notes": ["other settings"]}
        found["refused"] = [{"model": "qwen", "baseline": "zaya", "task": "stories", "reason": "items differ"}]
        text = drawn(found).text
        assert "the two were given different prompts" in text
        assert "qwen on Ends of stories: items differ" in text


class TestItems:
    def test_both_answers_are_there_to_read(self, plain: Page) -> None:
        assert "Sums, item 7: qwen right, zaya wrong" in plain.text
        for text in ("What is 2 + 2?", "It is 4.", "It is 5."):
            assert text in plain.text

    def test_hostile_texts_are_shown_and_do_nothing(self) -> None:
        found = comparison(("zaya", HOSTILE), [STORIES])
        texts = dict.fromkeys(("prompt", "target", "model_answer", "baseline_answer"), HOSTILE)
        found["discordant"][0]["items"] = [item("stories", choices=[HOSTILE], **texts)]
        found["tasks"][0]["title"] = HOSTILE
        found["suite"]["description"] = HOSTILE
        found["notes"] = [HOSTILE]
        found["warnings"] = [{"level": "loud", "model": HOSTILE, "task": "stories", "text": HOSTILE}]
        html = page(found, MANIFEST | {"command": ["zaya", HOSTILE], "versions": {HOSTILE: HOSTILE}})
        read = Page(html)
        assert len(read.attributes("script")) == 1
        assert read.attributes("img") == []
        assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
        assert "alert(1)" in read.text
        assert "\x1b" not in html
        assert "\u202e" not in html
        tables = markdown(found)
        assert "<script" not in tables
        assert "<img" not in tables
        assert "\u202e" not in tables

    def test_private_items_have_no_text(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        nothing = dict.fromkeys(("prompt", "target", "choices", "model_answer", "baseline_answer"))
        found["discordant"][0]["items"] = [item("stories", hidden=True, **nothing)]
        text = drawn(found).text
        assert "The authors of these items ask that their text is not published." in text
        assert "Prompt" not in text

    def test_hidden_items_are_never_shown_even_where_texts_came_along(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        found["discordant"][0]["items"] = [item("stories", hidden=True, prompt="a secret", target="another secret")]
        assert "secret" not in page(found, MANIFEST)


class TestPage:
    def test_headings_are_in_order(self, plain: Page) -> None:
        assert plain.headings[0] == 1
        assert plain.headings.count(1) == 1
        steps = [after - before for before, after in zip(plain.headings, plain.headings[1:], strict=False)]
        assert max(steps) == 1

    def test_tables_can_be_read_out(self, plain: Page) -> None:
        tags = [tag for tag, _ in plain.elements]
        assert tags.count("table") == tags.count("caption") > 5
        assert all(attributes.get("scope") for attributes in plain.attributes("th"))
        assert tags.count("details") == tags.count("summary") > 2

    def test_charts_say_what_they_show(self, plain: Page) -> None:
        charts = plain.attributes("svg")
        assert len(charts) > 6
        assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
        (label,) = [chart["aria-label"] for chart in charts if chart["id"] == "forest-0-percent"]
        assert label == (
            "Differences of qwen to zaya in points: Sums +6.2 (+2.2 to +10.2), better; "
            "Ends of stories \u221213.8 (\u221217.8 to \u22129.8), worse"
        )

    def test_ids_are_unique(self, plain: Page) -> None:
        ids = [attributes["id"] for _, attributes in plain.elements if attributes.get("id")]
        assert len(ids) == len(set(ids))

    def test_nothing_is_loaded(self) -> None:
        html = page(comparison(), MANIFEST)
        read = Page(html)
        assert "default-src 'none'" in html
        assert not {"link", "iframe", "object", "embed", "audio", "video"} & {tag for tag, _ in read.elements}
        loads = [
            value
            for _, attributes in read.elements
            for name, value in attributes.items()
            if name in ("src", "href", "srcset", "data", "poster") or name.endswith(":href")
        ]
        assert [value for value in loads if not (value or "").startswith("#")] == []
        assert "url(http" not in html
        assert "@import" not in html
        assert "NaN" not in html
        assert "nan" not in read.text.split()

    def test_the_manifest_is_there(self, plain: Page) -> None:
        assert "zaya eval --suite small --out 'my folder'" in plain.text
        for text in ("2.13.0", "CPU (x86_64)", "ab" * 32, "0123abcd", "bfloat16", "org/qwen", NOTES[0]):
            assert text in plain.text

    def test_a_verdict_is_not_told_by_colour_alone(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES])
        svgs = []
        for said in ("better", "cannot be told apart"):
            found["pairs"] = [pair("qwen", "stories", 0.1, said)]
            svgs.append(str(forests(found)[0]["svg"]))
        assert svgs[0].count("fill: var(--surface)") < svgs[1].count("fill: var(--surface)")

    def test_plots_of_a_unit_share_their_axis(self) -> None:
        found = comparison(("zaya", "a", "b"), [STORIES])
        found["pairs"] = [pair("a", "stories", 0.01, "better"), pair("b", "stories", -0.3, "worse")]
        ticks = [re.findall(r">(\W?\d+)</text>", chart["svg"]) for chart in forests(found)]
        assert ticks == [["\u221230", "\u221220", "\u221210", "0"]] * 2

    def test_the_better_side_of_bits_per_byte_is_the_left(self) -> None:
        found = comparison(("zaya", "qwen"), [STORIES, PROSE])
        assert [chart["question"] for chart in forests(found)] == [
            "Right of the line, qwen is ahead.",
            "Left of the line, qwen is ahead.",
        ]


class TestScatter:
    def draw(self, *dots: Dot) -> str:
        return scatter_chart("s", dots, x_label="parameters", y_label="score", description="d")

    def places(self, svg: str, *labels: str) -> list[tuple[float, float]]:
        """Where the names of models are written, in px from the upper left corner."""
        found = []
        for label in labels:
            (text,) = re.findall(rf"<text [^>]*>{re.escape(label)}</text>", svg)
            (place,) = re.findall(r'(?:x="|translate\()([\d.]+)(?:" y="| )([\d.]+)', text)
            found.append((float(place[0]), float(place[1])))
        return found

    def test_names_of_neighbours_are_not_written_over_each_other(self) -> None:
        names = [f"model {letter}" for letter in "abcdefg"]
        svg = self.draw(*(Dot(name, 1e9, Point(50.0, 45.0, 55.0), slot) for slot, name in enumerate(names)))
        places = self.places(svg, *names)
        width = text_width("model a", bold=True)
        for place, (x, y) in enumerate(places):
            for other_x, other_y in places[:place]:
                assert abs(y - other_y) > 12 or abs(x - other_x) >= width - 4

    def test_models_of_one_size_stand_side_by_side(self) -> None:
        svg = self.draw(Dot("a", 1e9, Point(50.0), 1), Dot("b", 1e9, Point(50.0), 2), Dot("c", 1e11, Point(50.0), 3))
        assert len(set(re.findall(r'<use [^>]*x="([\d.]+)"', svg))) == 3

    def test_a_size_has_to_be_one(self) -> None:
        with pytest.raises(ValueError, match="a: 0 has no place on a logarithmic axis"):
            self.draw(Dot("a", 0, Point(50.0)))
        with pytest.raises(ValueError, match="no dot"):
            self.draw()


def test_names_in_charts_take_the_room_that_they_are_given() -> None:
    name = "a task with a name of some length"
    rows = [Row(name, [Point(0.0)])]
    narrow, wide = (interval_chart("c", rows, x_label="x", description="d", label_width=width) for width in (100, 300))
    assert (f">{name}<" in narrow, f">{name}<" in wide) == (False, True)


class TestMarkdown:
    def test_tables_have_the_same_numbers(self) -> None:
        found = comparison()
        tables = markdown(found)
        assert "| Reasoning: Ends of stories | acc\\_norm · 5-shot" in tables
        assert "| 55.7 (49.7\u201361.7) | 62.0 (56.0\u201368.0) | 68.2 (62.2\u201374.2) |" in tables
        assert "| Sums | 200 | +6.2 | +2.2 to +10.2 | points | 31 | 17 | 0.043 | 0.130 | 9.8 | better |" in tables
        assert f"- {NOTES[0]}" in tables

    def test_every_row_has_the_cells_of_its_header(self) -> None:
        found = comparison(("zaya", "q|w"), [STORIES])
        found["tasks"][0]["title"] = "a | b\nc"
        for table in re.findall(r"(?:^\|.*\n?)+", markdown(found), re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().split("\n")}
            assert len(widths) == 1

    def test_text_is_escaped(self) -> None:
        assert escape("a|b*c_d`e\n[f](g) <h>&\\") == "a\\|b\\*c\\_d\\`e \\[f\\](g) &lt;h&gt;&amp;\\\\"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A realistic evaluation's folder."""
    return evaluation_folders.realistic(tmp_path_factory.mktemp("evaluation"), items=20)


Command = Callable[..., int]


class TestFolder:
    @pytest.fixture
    def report(self) -> Command:
        def run(path: Path, out: Path | None = None) -> int:
            return report_cli.run(argparse.Namespace(paths=[path], out=out))

        return run

    def test_the_command_writes_both_files(
        self, folder: Path, report: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert is_evaluation(folder)
        assert report(folder) == 0
        assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
        html, tables = build_report(folder)
        assert (folder / "report.html").read_text(encoding="utf-8") == html
        assert (folder / "report.md").read_text(encoding="utf-8") == tables
        found = compare(folder)
        read = Page(html)
        for entry in found["tasks"]:
            if not entry["parent"] and entry["in_suite_mean"]:
                cells = read.row(f"{entry['title']} {entry['metric']}")
                for model, cell in zip(found["models"], cells[1:], strict=False):
                    value = found["scores"][model["name"]][entry["id"]]["value"]
                    assert cell.startswith(f"{100 * value:.1f} ")

    def test_out_of_the_way(self, folder: Path, report: Command, tmp_path: Path) -> None:
        assert report(folder, tmp_path / "a" / "page.html") == 0
        assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["page.html", "page.md"]

    def test_a_page_cannot_have_the_name_of_the_tables(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"cannot end in \.md"):
            write_report(folder, tmp_path / "page.md")
        assert not (tmp_path / "page.md").exists()

    def test_other_folders_are_none_of_an_evaluation(self, tmp_path: Path) -> None:
        assert not is_evaluation(tmp_path)
        with pytest.raises(ValueError, match=r"has no manifest\.json"):
            build_report(tmp_path)
        (tmp_path / "manifest.json").write_text("{")
        assert not is_evaluation(tmp_path)
        with pytest.raises(ValueError, match="cannot be read"):
            build_report(tmp_path)
        (tmp_path / "manifest.json").write_text(json.dumps({"made_by": "others"}))
        assert not is_evaluation(tmp_path)
