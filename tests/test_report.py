"""The page of a quickstart: made of results.json alone, whatever was trained, and safe whatever the results say."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quickstart_results import TITLES, choice_score, make_results
from zaya_hf.quickstart.report import build_report, rebuild, write_report
from zaya_hf.reporting import formats
from zaya_hf.reporting.results import check_results

_VOID = {"meta", "wbr", "br", "link", "img", "input", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x1b[31m\ud800\u202e{{ 1 }}&amp;'\"😀"


class Page(HTMLParser):
    """Elements, attributes and text of a page, and whether every element that was opened was closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.balanced = True
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.balanced &= bool(self.open) and self.open[-1] == tag
        if self.open:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def text(self) -> str:
        words = " ".join(data for tag, data in self.texts if tag not in ("script", "style"))
        return " ".join(words.split())


def lead(html: str) -> str:
    found = re.search(r'<p class="lead">(.*?)</p>', html, re.DOTALL)
    assert found
    return " ".join(found[1].split())


def rows(html: str) -> list[list[str]]:
    """Values of the comparison table, one list per row."""
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    return [
        [
            " ".join(re.sub(r"<[^>]+>", " ", cell).split())
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        ]
        for row in table.split("<tr")[1:]
    ]


@pytest.fixture(scope="module")
def five() -> str:
    return build_report(make_results())


VARIANTS: dict[str, dict[str, Any]] = {
    "five": {},
    "three seeds": {"seeds": (0, 1, 2), "steps": 60},
    "fifteen seeds": {"models": ("zaya", "llama"), "seeds": tuple(range(15)), "steps": 5},
    "zaya alone": {"models": ("zaya",), "steps": 40},
    "one other": {"models": ("olmoe",), "steps": 12},
    "no zaya": {"models": ("qwen3", "llama"), "steps": 20},
    "one step": {"models": ("llama", "zaya"), "steps": 1},
    "not published": {"models": ("zaya",), "steps": 3, "published": False},
}


@cache
def built(variant: str) -> str:
    return build_report(make_results(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryReport:
    def test_is_one_sound_file_that_loads_nothing(self, variant: str) -> None:
        html = built(variant)
        page = Page(html)
        assert page.balanced
        assert not page.open
        for tag, attributes in page.elements:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
            for name in ("src", "href", "srcset", "action", "data"):
                assert (attributes.get(name) or "#").startswith("#")
            assert not any(name.startswith("on") for name in attributes)
        assert set(re.findall(r"url\(([^)]{0,2})", html)) <= {"#c"}
        assert "@import" not in html
        assert set(re.findall(r"\w+://[^\s\"'<]*", html)) == {"http://www.w3.org/2000/svg"}

    def test_has_no_id_twice_and_every_chart(self, variant: str) -> None:
        results = make_results(**VARIANTS[variant])
        page = Page(built(variant))
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert page.count("svg") == 1 + len(results["tasks"]) + 3

    def test_table_has_the_numbers_of_the_results(self, variant: str) -> None:
        results = make_results(**VARIANTS[variant])
        table = rows(built(variant))
        assert [row[0] for row in table] == [model["title"] for model in results["models"]] + ["Reference"]
        for row, model in zip(table, results["models"], strict=False):
            for cell, task in zip(row[1:], results["tasks"], strict=True):
                found = [run["evaluation"]["tasks"][task["name"]] for run in model["runs"]]
                key, digits = ("accuracy", 3) if task["kind"] == "choice" else ("bits_per_byte", 2)
                values = [score[key] for score in found]
                ends = found[0]["interval_95"] if len(values) == 1 else [min(values), max(values)]
                mean, low, high = (f"{v:.{digits}f}" for v in (math.fsum(values) / len(values), *ends))
                clear = [score["above_chance"] for score in found] if task["kind"] == "choice" else []
                expected = f"{low}\u2013{high}"
                if all(clear) and clear:
                    expected = f"clearly above chance {expected}"
                elif any(clear):
                    expected = f"clearly above chance from {sum(clear)} of {len(clear)} seeds {expected}"
                elif clear:
                    expected = f"not clearly above chance {expected}"
                assert cell == f"{mean} {expected}"
        assert table[-1][1:] == ["3.55 token frequencies", *["0.250 chance"] * 4]

    def test_says_what_the_number_of_seeds_allows(self, variant: str) -> None:
        text = Page(built(variant)).text
        assert "0.375, 0.45 and 0.75 over three seeds" in text
        if len(VARIANTS[variant].get("seeds", [0])) == 1:
            assert "includes seed noise" in text
            assert "zaya quickstart --seeds 3" in text
            assert "none of them is called resolved" in text
        else:
            assert "least and the greatest of the seeds" in text
            assert "no proof" in text

    def test_is_the_same_every_time(self, variant: str) -> None:
        results = make_results(**VARIANTS[variant])
        before = copy.deepcopy(results)
        assert build_report(results) == built(variant)
        assert results == before


class TestPage:
    def test_sections_are_in_order(self, five: str) -> None:
        titles = re.findall(r"<h2>(.*?)</h2>", five)
        assert titles == [
            "Results",
            "Size and speed",
            "What one seed can tell",
            "How it was measured",
            "The saved model",
            "Settings, versions, hardware",
        ]

    def test_policy_allows_its_own_script_and_no_other(self, five: str) -> None:
        (script,) = re.findall(r"<script>(.*?)</script>", five, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in five
        assert "default-src 'none'" in five

    def test_colours_of_both_themes_define_all_that_is_used(self, five: str) -> None:
        used = set(re.findall(r"var\((--[\w-]+)\)", five))
        for selector in (
            ":root",
            ':root:not([data-theme="light"])',
            ':root[data-theme="dark"]',
            ":root, :root[data-theme]",
        ):
            block = re.search(re.escape(selector) + r" \{([^}]*)\}", five)
            assert block, selector
            assert used <= set(re.findall(r"(--[\w-]+):", block[1])), selector

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_text_and_series_stand_out_from_the_ground(self, five: str, theme: str) -> None:
        selector = ":root" if theme == "light" else ':root[data-theme="dark"]'
        found = re.search(r"^" + re.escape(selector) + r" \{([^}]*)\}", five, re.MULTILINE)
        assert found
        colours = dict(re.findall(r"(--[\w-]+): (#\w{6})", found[1]))

        def luminance(colour: str) -> float:
            parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for name, colour in colours.items():
            if name in ("--surface", "--raised", "--grid"):
                continue
            for ground in ("--surface", "--raised"):
                light, dark = sorted([luminance(colour), luminance(colours[ground])], reverse=True)
                # WCAG 2.1: 4.5 for text, and the names in the charts are text in the series' colour
                assert (light + 0.05) / (dark + 0.05) >= 4.5 - 0.3 * (ground == "--raised"), (name, ground)

    def test_shows_how_it_was_made(self, five: str) -> None:
        results, page = make_results(), Page(five)
        for value in (
            results["command"],
            results["corpus"]["sha256"],
            results["versions"]["torch"],
            results["hardware"]["cpu"],
            "newton schulz dtype",
            "2,034,696",
            "486,408",
            "lm-eval 0.4.13",
            "zaya_quickstart_prose",
        ):
            assert value in page.text.replace("_ ", "_"), value

    def test_shows_the_search_for_learning_rates_of_the_models_there(self) -> None:
        table = build_report(make_results(models=("zaya", "llama"))).split("Table of the learning-rate search")[1]
        table = table[: table.index("</table>")]
        found = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table)
        times = "\N{MULTIPLICATION SIGN}"
        assert found == [
            *("Learning rates", f"{times} 0.5", f"{times} 1", "Chosen"),
            *("ZAYA1", "2.312", "2.275", f"{times} 1"),
            *("Llama", "2.363", "2.325", f"{times} 1"),
        ]
        without = make_results(models=("zaya",)) | {"search": None}
        assert "learning-rate search" not in build_report(without)

    def test_says_how_evenly_the_routers_spread_the_tokens(self) -> None:
        html = " ".join(build_report(make_results()).split())
        assert "the busiest expert of a layer of ZAYA1 took 2.1 times its fair share of the tokens in the mean" in html
        assert "2.8 times in the most uneven layer" in html
        assert "fair share" not in build_report(make_results(models=("llama",)))

    def test_model_that_is_not_equal_in_transformers_is_not_called_so(self) -> None:
        results = make_results(("zaya",), steps=2)
        assert build_report(results).count("<td>yes</td>") == 2
        results["published"]["loaded"]["stock"]["max_logit_difference"] = 0.5
        html = build_report(results)
        assert html.count("<td>yes</td>") == 1
        assert html.count("<td>no</td>") == 1

    def test_prompt_is_set_apart_from_what_the_model_wrote(self, five: str) -> None:
        assert '<pre class="sample" tabindex="0"><b>12 + 7 = </b>19\n33 - 4 = 29\n</pre>' in five
        results = make_results(("zaya",), steps=2)
        results["published"]["samples"] = [{"prompt": "a", "text": "continued"}]
        assert "<b>a</b>continued</pre>" in build_report(results)

    def test_without_a_published_model_there_is_no_section_for_it(self) -> None:
        html = build_report(make_results(("zaya",), steps=2, published=False))
        assert "The saved model" not in html
        assert "from_pretrained" not in html


class TestSummary:
    def test_names_all_and_says_where_zaya_is_above_chance(self) -> None:
        results = make_results()
        for task, correct in (("prose", 174), ("code", 60), ("arithmetic_far", 136), ("arithmetic_near", 41)):
            scores = results["models"][0]["runs"][0]["evaluation"]["tasks"]
            items = scores[f"zaya_quickstart_{task}"]["items"]
            scores[f"zaya_quickstart_{task}"] = choice_score(correct, items, 0.25)
        text = lead(build_report(results)).replace("\u00a0", " ")
        assert "ZAYA1 and four other small models (Qwen3, Gemma 3, Llama and OLMoE)" in text
        assert "800 steps, 819 k tokens each" in text
        assert "2.03 M parameters, of which 486 k work on any one token" in text
        assert (
            "It is clearly above chance (0.250) in “Prose: words in order” (0.870) and “Sums: far answers” (0.850). "
            "It is not clearly above chance (0.250) in “Code: words in order” (0.300) and “Sums: near answers” (0.256)."
        ) in text
        assert "differences between models include seed noise and none is resolved" in text

    def test_several_seeds_that_disagree_are_told(self) -> None:
        results = make_results(("zaya", "llama"), (0, 1), 60)
        name = "zaya_quickstart_code"
        for run, correct in zip(results["models"][0]["runs"], (50, 150), strict=True):
            run["evaluation"]["tasks"][name] = choice_score(correct, 200, 0.25)
        html = build_report(results)
        assert "From some seeds only, it is clearly above chance (0.250) in “Code: words in order” (0.500)" in lead(
            html
        )
        assert rows(html)[0][3] == "0.500 clearly above chance from 1 of 2 seeds 0.250\u20130.750"
        assert "The widest spread is that of ZAYA1 in “Code: words in order”: from 0.250 to 0.750." in html

    def test_unequal_chances_are_each_named(self) -> None:
        results = make_results(("zaya",), steps=3)
        results["tasks"][1]["chance"] = 0.5
        assert "chance 0.500)" in lead(build_report(results))
        assert "chance 0.250)" in lead(build_report(results))

    @pytest.mark.parametrize(
        ("models", "title"),
        [
            (tuple(TITLES), "A tiny ZAYA1 beside four others, trained from scratch"),
            (("zaya", "llama"), "A tiny ZAYA1 beside one other, trained from scratch"),
            (("zaya",), "A tiny ZAYA1, trained from scratch"),
            (("olmoe",), "A tiny OLMoE, trained from scratch"),
            (("qwen3", "gemma3", "llama"), "Three tiny models, trained from scratch"),
        ],
    )
    def test_title_is_about_what_was_trained(self, models: Sequence[str], title: str) -> None:
        assert f"<h1>{title}</h1>" in build_report(make_results(models, steps=2))

    def test_a_short_run_is_called_one(self) -> None:
        words = "its scores say next to nothing"
        assert words in lead(build_report(make_results(("llama",), steps=40)))
        assert words not in lead(build_report(make_results(("llama",), steps=800)))


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str):
        yield path
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(inner, (*path, key))


def replaced(results: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    changed = copy.deepcopy(results)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = change(at[path[-1]])
    return changed


def refusal(results: Any) -> str | None:
    try:
        check_results(results, "runs/results.json")
    except ValueError as error:
        return str(error)
    return None


# Texts that mean something: names by which parts of the results refer to each other, kinds, and the format.
_FIXED = {"made_by", "kind", "name", "model"}
SMALL = make_results(("zaya", "llama"), (0, 1), 3)


class TestHostileResults:
    def test_no_text_becomes_markup(self) -> None:
        results = copy.deepcopy(SMALL)
        for path in strings(SMALL):
            if path[-1] not in _FIXED:
                results = replaced(results, path, lambda text: text + HOSTILE)
        results["settings"][HOSTILE] = {HOSTILE: [HOSTILE, None, True, 0.1]}
        results["versions"][HOSTILE] = HOSTILE
        results["hardware"][HOSTILE] = HOSTILE
        html, usual = build_report(results), Page(build_report(SMALL))
        html.encode("utf-8")
        page = Page(html)
        assert page.balanced
        assert page.count("script") == 1
        assert page.count("img") == 0
        assert page.count("svg") == usual.count("svg")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202e]", html)
        assert "␀␛[31m" in html  # shown, not dropped
        assert "⟨U+202E⟩{{ 1 }}" in html
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)

    def test_long_texts_stay_in_the_page(self) -> None:
        results = make_results(("zaya",), steps=2)
        results["command"] = "zaya quickstart " + "--out " + "x" * 5000
        results["models"][0]["title"] = "ZAYA" * 50
        html = build_report(results)
        assert results["command"] in html
        assert re.search(r"<text [^>]*>ZAYA[ZAY]*…</text>", html)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def test_whatever_is_missing_or_of_another_type_is_a_one_line_error(self, data: st.DataObject) -> None:
        """Or does no harm: then the page can be made."""
        results = copy.deepcopy(SMALL)
        at: Any = results
        while True:
            key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
            if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.integers(0, 3)) == 0:
                break
            at = at[key]
        if data.draw(st.booleans()):
            del at[key]
        else:
            at[key] = data.draw(
                st.sampled_from([None, True, -1, 1.5, math.nan, math.inf, "x", [], {}, [None], 10**400])
            )
        message = refusal(results)
        if message is None:
            build_report(results)
        else:
            assert "\n" not in message
            assert message.startswith("runs/results.json: ")

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("made_by",), "another tool", r'not the results of zaya quickstart \(they have "made_by"'),
            (("format",), 1, "format 1, but this version of zaya_hf reads format 2"),
            (("models",), [], "models is empty"),
            (("models", 1, "name"), "zaya", "two models have the same name"),
            (("tasks", 0, "kind"), "other", r"tasks\[0\].kind is 'other', not one of choice, bits_per_byte"),
            (("tasks", 1, "chance"), "x", r'tasks\[1\].chance has to be a finite number, not "x"'),
            (("models", 0, "runs", 1, "losses", 2), math.nan, r"models\[0\].runs\[1\].losses\[2\] has to be a finite"),
            (("models", 0, "parameters"), 1.5, r"models\[0\].parameters has to be a whole number from 0 up, not 1.5"),
            (("models", 0, "runs", 0, "evaluation", "tasks"), {}, r"tasks.zaya_quickstart_bits is missing"),
            (("published", "seed"), 7, "published names a model and seed that are not among the runs"),
            (("published", "samples"), None, "published.samples has to be a list, not null"),
            (("hardware",), "x" * 99, "hardware has to be an object, not a str"),
        ],
    )
    def test_error_says_where(self, path: Sequence[Any], value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build_report(replaced(SMALL, path, lambda _: value))

    @pytest.mark.parametrize("results", [None, [], "x", {}, {"made_by": "zaya quickstart"}])
    def test_what_is_no_results_at_all_is_refused(self, results: Any) -> None:
        with pytest.raises(ValueError, match=r"not the results of|format None"):
            build_report(results)


class TestRebuild:
    def test_from_the_folder_and_from_the_file(self, tmp_path: Path) -> None:
        results = make_results(("zaya",), steps=2)
        (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
        assert rebuild(tmp_path) == tmp_path / "report.html"
        first = (tmp_path / "report.html").read_bytes()
        (tmp_path / "report.html").unlink()
        assert rebuild(tmp_path / "results.json") == tmp_path / "report.html"
        assert (tmp_path / "report.html").read_bytes() == first
        assert first.decode("utf-8") == build_report(results)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no such file: .*results.json; zaya report reads"),
            (b"{", "is not JSON"),
            (b"\xff\xfe", "is not JSON"),
            (b"[" * 100_000, "is not JSON"),
            (b'{"made_by": "x"}', "results.json: not the results of zaya quickstart"),
        ],
    )
    def test_what_is_not_ours_is_refused_and_the_old_page_stays(
        self, tmp_path: Path, content: bytes | None, message: str
    ) -> None:
        (tmp_path / "report.html").write_text("old")
        if content is not None:
            (tmp_path / "results.json").write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            rebuild(tmp_path)
        assert "\n" not in str(caught.value)
        assert (tmp_path / "report.html").read_text() == "old"

    def test_writing_makes_the_folder(self, tmp_path: Path) -> None:
        write_report(make_results(("llama",), steps=2), tmp_path / "a" / "b.html")
        assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


class TestFormats:
    @pytest.mark.parametrize(
        ("number", "text"),
        [
            (0, "0"),
            (7, "7"),
            (999, "999"),
            (1000, "1.00 k"),
            (999_600, "1.00 M"),
            (486_408, "486 k"),
            (2_034_696, "2.03 M"),
            (12.345, "12.3"),
            (0.5, "0.500"),
            (8.4e9, "8.40 B"),
            (99_960, "100 k"),
        ],
    )
    def test_short_count(self, number: float, text: str) -> None:
        assert formats.short_count(number).replace("\u00a0", " ") == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.04, "0.0 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (59.6, "1 min"),
            (101.2, "1 min 41 s"),
            (3599.6, "1 h"),
            (3600 + 29 * 60, "1 h 29 min"),
        ],
    )
    def test_duration(self, seconds: float, text: str) -> None:
        assert formats.duration(seconds).replace("\u00a0", " ") == text

    @pytest.mark.parametrize(
        ("number", "text"), [(0, "0"), (2.4e-6, "2.4e-6"), (1e-4, "1e-4"), (0.5, "5e-1"), (12.0, "1.2e1")]
    )
    def test_scientific(self, number: float, text: str) -> None:
        assert formats.scientific(number) == text

    @pytest.mark.parametrize(
        ("number", "text"), [(0, "0"), (0.25, "0.25"), (-3, "\u22123"), (5000, "5000"), (20_000, "20 k"), (2e6, "2 M")]
    )
    def test_tick(self, number: float, text: str) -> None:
        assert formats.tick(number).replace("\u00a0", " ") == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [(True, "yes"), (None, "none"), (0.1, "0.1"), ([0, 1], "0, 1"), ({"a_b": [1.0]}, "a b 1"), ("x_y", "x_y")],
    )
    def test_plain(self, value: Any, text: str) -> None:
        assert formats.plain(value) == text
