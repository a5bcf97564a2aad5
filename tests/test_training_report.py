"""The page of training runs: made of their files alone, whatever state they are in, and safe whatever they say."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickstart_results import make_results
from zaya_hf import report_cli
from zaya_hf.reporting.heat_map import heat_map
from zaya_hf.reporting.run_charts import thinned
from zaya_hf.reporting.run_files import flat, read_run
from zaya_hf.reporting.training_run import build_report
from zaya_hf.training import settings_yaml

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e{{ 1 }}&amp;'\""
LAYERS = 3
CONFIG = """
out: runs/x
steps: {steps}
optimizer: {{lr: {lr}, betas: [0.9, 0.95]}}
data: {{sequence_length: 64, sources: [{{path: a.txt}}]}}
"""
Runs = Callable[..., Path]


def step_record(step: int, steps: int, full: bool) -> dict[str, Any]:
    """`full`: with all that a chart is made of. Drawing takes most of the time of these tests."""
    record: dict[str, Any] = {"step": step, "tokens": 1000 * step, "loss": 4.0 - step / steps, "seconds": 0.5}
    if full:
        record |= {"targets": 990, "grad_norm": 1.0, "lr": 1e-3 * (1 - step / (2 * steps))}
        record |= {"tokens_per_second": 2000.0, "mfu": None}
    if full and step % 2 == 0:
        record["router"] = {
            "load_entropy": [0.9 + 0.03 * layer for layer in range(LAYERS)],
            "max_violation": [0.5, 0.2, 0.1],
            "skip_rate": [0.0, 0.1, 0.05],
            "dead_experts": [0, 1, 0],
            "bias_min": [-0.1, -0.2, 0.0],
            "bias_max": [0.1, 0.2, 0.3],
        }
    return record


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Makes a run's folder."""

    def make(
        name: str = "one",
        steps: int = 12,
        done: int | None = None,
        lr: float = 1e-3,
        full: bool = False,
        **changes: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG.format(steps=steps, lr=lr))
        (folder / "environment.json").write_text(
            json.dumps(
                {
                    "versions": {"torch": "2.13.0"},
                    "hardware": {"device": "CPU (x86_64)", "processes": 2},
                    "model": {"class": "ZayaForCausalLM", "parameters": 1234567, "active_parameters": 234567},
                }
            )
        )
        metrics = [step_record(step, steps, full) for step in range(1, (steps if done is None else done) + 1)]
        for step, change in changes.pop("steps_changed", {}).items():
            metrics[step - 1] |= change
        write_lines(folder / "metrics.jsonl", metrics)
        held_out = [
            {
                "kind": "held_out",
                "step": step,
                "loss": 5.0 - step / 10,
                "bits_per_byte": 1.5,
                "sources": {},
                "seconds": 1,
            }
            for step in range(4, len(metrics) + 1, 4)
        ]
        write_lines(folder / "evaluations.jsonl", changes.pop("evaluations", held_out))
        write_lines(folder / "events.jsonl", changes.pop("events", [event("start", 0)]))
        assert not changes
        return folder

    return make


def event(kind: str, step: int, **details: Any) -> dict[str, Any]:
    return {"time": "2026-12-02T08:00:00+00:00", "event": kind, "step": step, **details}


class Page(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = ""
        self._words: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self._words.append(data)

    def described(self) -> dict[str, str]:
        """Chart id -> what a screen reader says of it."""
        return {str(attributes["id"]): str(attributes["aria-label"]) for tag, attributes in self.tags if tag == "svg"}


class TestOneRun:
    def test_what_it_says(self, runs: Runs) -> None:
        happened = [
            event("start", 0),
            event("skip", 5, reason="the loss is nan"),
            event("roll_back", 4, reason="the loss is 9", left_out=[4, 5]),
            event("checkpoint", 8),
            event("resume", 8),
            event("finish", 12),
        ]
        changed = {5: {"skipped": "the loss is nan", "loss": "nan"}}
        page = Page(build_report([runs(events=happened, full=True, steps_changed=changed)]))
        assert (
            "Step 12 of 12, finished. The training loss is 3.000 nats per target, the held-out loss 3.800" in page.text
        )
        assert "(1.50 bits per byte). It was resumed once and rolled back once. One step was skipped." in page.text
        for words in ("Tokens 12.0 k", "Parameters 1.23 M", "Device 2 \u00d7 CPU (x86_64)", "Speed 2.00 k tokens/s"):
            assert words in page.text.replace("\u00a0", " ")
        assert "2026-12-02 08:00:00 4 rolled back the loss is 9, data windows left out: 4, 5" in page.text
        assert "optimizer. lr 0.001" in page.text  # a line may break after the dot
        assert "torch 2.13.0" in page.text

        # Its charts.
        found = page.described()
        assert sorted(found) == sorted(
            f"chart-{name}"
            for name in (
                "loss", "held-loss", "held-bits-per-byte", "grad-norm", "lr", "load-entropy", "max-violation",
                "skip-rate", "dead-experts", "biases", "map-0", "tokens-per-second",
            )
        )  # fmt: skip
        assert "Marks at the upper edge are steps that were skipped" in page.text
        assert "At step 12: training 3, held out 3.80" in found["chart-loss"]
        assert "mean 0.930, least layer 0.900" in found["chart-load-entropy"]
        assert "mean 0.267, greatest layer 0.500" in found["chart-max-violation"]
        assert "greatest 0.300, least -0.200" in found["chart-biases"]
        assert "layer 0 has the least mean" in found["chart-map-0"]

    def test_the_loss_of_a_skipped_step_is_in_no_line(self, runs: Runs) -> None:
        html = build_report([runs(steps_changed={3: {"skipped": "a spike", "loss": 500.0}})])
        axis = [float(text) for text in re.findall(r">([0-9.]+)</text>", html)]
        assert 3.0 < max(axis) <= 12

    def test_scores_of_lm_eval(self, runs: Runs) -> None:
        tasks = {
            "lines": {"kind": "choice", "items": 40, "accuracy": 0.5, "chance": 0.25, "interval_95": [0.4, 0.6]},
            "bits": {"kind": "bits_per_byte", "items": 9, "bits_per_byte": 1.25, "interval_95": [1.2, 1.3]},
        }
        records = [{"kind": "lm_eval", "step": step, "tasks": tasks} for step in (4, 8)]
        page = Page(build_report([runs(evaluations=records)]))
        assert "Accuracy over 40 items; higher is better" in page.text
        assert "chance 0.25" in page.text
        assert page.described()["chart-task-0"].startswith(
            "bits. Bits per byte over 9 items; lower is better. At step 8"
        )
        assert "chart-held-loss" not in page.described()

    def test_sources_and_averaged_weights_have_lines_of_their_own(self, runs: Runs) -> None:
        records = [
            {"kind": "held_out", "step": step, "loss": 3.0, "sources": {"a": {"loss": 2.0}, "b": {"loss": 3.5}},
             "ema": {"loss": 2.9}}
            for step in (4, 8)
        ]  # fmt: skip
        found = Page(build_report([runs(evaluations=records)])).described()
        assert "all 3, a 2, b 3.50, averaged 2.90" in found["chart-held-loss"]


class TestStatus:
    @pytest.mark.parametrize(
        ("done", "events", "words"),
        [
            (12, [], "Step 12 of 12, finished."),
            (7, [event("start", 0)], "Step 7 of 12, running, or killed."),
            (7, [event("stop", 7, reason="SIGTERM")], "Step 7 of 12, stopped: SIGTERM."),
            (7, [event("stop", 7, reason="SIGTERM"), event("checkpoint", 7)], "Step 7 of 12, stopped: SIGTERM."),
            (7, [event("stop", 5, reason="SIGTERM"), event("resume", 5)], "Step 7 of 12, running, or killed."),
        ],
    )
    def test_how_it_ended(self, runs: Runs, done: int, events: list[dict[str, Any]], words: str) -> None:
        assert words in Page(build_report([runs(done=done, events=events)])).text

    def test_a_torn_last_line_is_left_out(self, runs: Runs) -> None:
        folder = runs(done=7)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "loss": 1')
        with (folder / "events.jsonl").open("a") as file:
            file.write('{"time')
        assert "Step 7 of 12" in Page(build_report([folder])).text

    def test_of_one_step_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
        page = Page(build_report([tmp_path]))
        assert "Step 1, running, or killed. The training loss is 2.500 nats per target." in page.text
        assert list(page.described()) == ["chart-loss"]

    def test_a_run_whose_every_loss_is_nan(self, runs: Runs) -> None:
        changed = {step: {"loss": "nan", "grad_norm": "inf", "skipped": "the loss is nan"} for step in range(1, 13)}
        page = Page(build_report([runs(steps_changed=changed, evaluations=[])]))
        assert "12 steps were skipped" in page.text
        assert "chart-loss" not in page.described()


@pytest.mark.filterwarnings("error")
class TestOddRecords:
    def test_the_page_has_what_can_be_read(self, runs: Runs) -> None:
        panel = {"load_entropy": [None, None], "max_violation": [None, None]}
        changed: dict[int, Any] = {
            1: {"router": {"load_entropy": []}, "grad_norm": 10**400, "tokens": math.inf, "seconds": math.inf},
            2: {"router": panel},
            3: {"router": {"load_entropy": [None, 0.5]}},
            4: {"router": {"load_entropy": [None, 0.25]}},
        }
        score = {"kind": "choice", "accuracy": 0.5, "items": 3, "interval_95": "wide"}
        evaluations: list[dict[str, Any]] = [
            {"kind": "held_out", "step": 4, "loss": 3.0, "sources": [["a"]]},
            {"kind": "lm_eval", "step": 4, "tasks": ["a"]},
            {"kind": "lm_eval", "step": 4, "tasks": {"b": score}},
        ]
        folder = runs(steps_changed=changed, evaluations=evaluations)
        (folder / "environment.json").write_text(
            json.dumps({"hardware": ["CPU"], "model": {"parameters": "many", "active_parameters": 10**400}})
        )
        page = Page(build_report([folder]))
        assert "Step 12 of 12, finished." in page.text
        assert f"{10**400:,}" in page.text
        assert {"chart-load-entropy", "chart-map-0", "chart-task-0"} <= set(page.described())
        assert "layer 1 has the least mean" in page.described()["chart-map-0"]

    def test_settings_are_read_as_they_were_written(self, runs: Runs) -> None:
        folder = runs()
        (folder / "config.yaml").write_text(
            settings_yaml.write({"steps": 12, "data": {"split": "no", "subset": "1:30"}})
        )
        assert read_run(folder).config["data"] == {"split": "no", "subset": "1:30"}


class TestSeveral:
    def test_side_by_side(self, runs: Runs) -> None:
        page = Page(build_report([runs("one", full=True), runs("two", steps=20, lr=2e-3, full=True)]))
        assert "Two training runs" in page.text
        assert "one and two, side by side. two has the least held-out loss, 3.000 nats per target." in page.text
        assert "one 3, two 3" in page.described()["chart-loss"]
        assert {"chart-map-0", "chart-map-1"} <= set(page.described())
        assert "one finished 12 12.0 k 3.000 3.800 1.50" in page.text.replace("\u00a0", " ")

    @pytest.mark.parametrize(
        ("one", "two", "words"),
        [
            ({"targets": 10}, {"targets": 10}, "two has the least held-out loss, 2.000 nats per target."),
            (
                {"targets": 10},
                {"targets": 12},
                "losses per target do not compare; one needs least, 1.20 bits per byte.",
            ),
            (
                {"targets": 10, "bytes": 40},
                {"targets": 10, "bytes": 41},
                "neither their losses nor their bits per byte",
            ),
            ({"sources": {"a": {}}}, {"sources": {"b": {}}}, "neither their losses nor their bits per byte compare."),
        ],
    )
    def test_only_what_compares_is_compared(
        self, runs: Runs, one: dict[str, Any], two: dict[str, Any], words: str
    ) -> None:
        record = {"kind": "held_out", "step": 4, "loss": 3.0, "bits_per_byte": 1.2, "bytes": 40}
        first = runs("one", evaluations=[record | one])
        second = runs("two", evaluations=[record | {"loss": 2.0, "bits_per_byte": 1.3} | two])
        assert words in Page(build_report([first, second])).text

    def test_settings_in_which_they_differ(self, runs: Runs) -> None:
        page = Page(build_report([runs("one"), runs("two", steps=20, lr=2e-3)]))
        part = page.text[page.text.index("What they differ in") : page.text.index("Learning")]
        assert part.endswith("Setting one two steps 12 20 optimizer.lr 0.001 0.002 ")
        assert "Their settings are the same" in Page(build_report([runs("three"), runs("four")])).text

    def test_two_folders_of_one_name(self, runs: Runs, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        assert "one and one (2), side by side" in Page(build_report([runs("one"), runs("a/one")])).text


class TestRefused:
    def test_no_folder(self) -> None:
        with pytest.raises(ValueError, match="there is nothing to report"):
            build_report([])

    def test_what_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"is no folder of a training run: it has no metrics\.jsonl"):
            build_report([tmp_path])

    def test_no_step_yet(self, runs: Runs) -> None:
        folder = runs()
        (folder / "metrics.jsonl").unlink()
        with pytest.raises(ValueError, match="one has no step yet: there is nothing to report"):
            build_report([folder])

    @pytest.mark.parametrize(
        ("file", "content", "said"),
        [
            ("metrics.jsonl", '{"step": 1}\nnot json\n{"step": 2}\n', r"metrics\.jsonl, line 2: no record of a run"),
            ("metrics.jsonl", '{"loss": 1}\n', r"metrics\.jsonl has a line without a step"),
            ("events.jsonl", "[1]\n", r"events\.jsonl, line 1: no record of a run"),
            ("config.yaml", "a: [1\n", r"config\.yaml cannot be read: "),
            ("config.yaml", "5\n", r"config\.yaml cannot be read: expected keys with values"),
            ("config.yaml", "[" * 3000, r"config\.yaml cannot be read: it is nested too deep"),
            ("environment.json", "{", r"environment\.json cannot be read: "),
        ],
    )
    def test_a_broken_file_is_named_in_one_line(self, runs: Runs, file: str, content: str, said: str) -> None:
        folder = runs()
        (folder / file).write_text(content)
        with pytest.raises(ValueError, match=said) as caught:
            build_report([folder])
        assert "\n" not in str(caught.value)


def test_nothing_in_the_files_becomes_markup(runs: Runs) -> None:
    folder = runs(
        events=[event("stop", 3, reason=HOSTILE), event(HOSTILE, 4)],
        evaluations=[
            {"kind": "held_out", "step": 4, "loss": 3.0, "sources": {HOSTILE: {"loss": 2.0}, "b": {"loss": 1.0}}},
            {"kind": "lm_eval", "step": 4, "tasks": {HOSTILE: {"kind": "choice", "accuracy": 0.5, "items": HOSTILE}}},
        ],
    )
    (folder / "environment.json").write_text(json.dumps({"hardware": {HOSTILE: HOSTILE, "device": HOSTILE}}))
    (folder / "config.yaml").write_text(json.dumps({"steps": 12, "x": {HOSTILE: "y"}, "z": HOSTILE}))
    html = build_report([folder])
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert "{{ 1 }}" in page.text
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


class TestLongRuns:
    def test_a_page_stays_small(self, runs: Runs) -> None:
        assert len(build_report([runs(steps=3000, full=True)])) < 500_000

    def test_a_thinned_line_has_the_mean_and_the_range_of_what_it_stands_for(self) -> None:
        x, y = np.arange(1.0, 10_001.0), np.zeros(10_000)
        y[4999] = 1000.0
        places, mean, low, high = thinned(x, y, 100)
        assert len(places) == 240
        assert (places[0], places[-1]) == (1.0, 10_000.0)
        assert max(high) == 1000.0
        assert max(low) == 0.0
        assert max(mean) == pytest.approx(10.0, rel=0.02)

    def test_a_short_line_is_as_it_is(self) -> None:
        x, y = np.arange(1.0, 5.0), np.array([4.0, math.nan, 2.0, 1.0])
        assert thinned(x, y, 1) == ([1.0, 3.0, 4.0], [4.0, 2.0, 1.0], [4.0, 2.0, 1.0], [4.0, 2.0, 1.0])
        assert thinned(x, np.full(4, math.nan), 1) == ([], [], [], [])


class TestHeatMap:
    def draw(self, rows: list[list[float]], edges: list[float]) -> str:
        return heat_map("map", edges, rows, limits=(1.0, 0.0), x_label="x", y_label="y", description="d")

    def test_equal_neighbours_are_one_shape(self) -> None:
        key = self.draw([[1.0, 1.0, 1.0]], [0, 1, 2, 3]).count("var(--series-1)")
        assert self.draw([[0.0, 0.0, 0.0]], [0, 1, 2, 3]).count("var(--series-1)") == key + 1
        assert self.draw([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], [0, 1, 2, 3]).count("var(--series-1)") == key + 4

    def test_what_is_no_number_has_no_colour(self) -> None:
        nothing = self.draw([[1.0, 1.0]], [0, 1, 2])
        assert self.draw([[math.nan, math.nan]], [0, 1, 2]) == nothing

    def test_rows_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match="3 edges do not fit 1 rows"):
            self.draw([[1.0]], [0, 1, 2])


def test_a_config_is_told_by_dotted_keys() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": {}}) == {"a.b.c": 1, "a.d": [1, {"e": 2}], "f": {}}


def test_columns_have_nan_where_a_step_has_none(runs: Runs) -> None:
    found = read_run(runs(full=True, steps_changed={2: {"loss": "inf", "router": {"load_entropy": [0.5] * LAYERS}}}))
    assert math.isnan(found.columns["loss"][1])
    assert np.isnan(found.router["bias_min"][0]).all()
    assert found.router["load_entropy"].shape == (6, LAYERS)


class TestCommand:
    def run(self, *paths: Path, out: Path | None = None) -> int:
        return report_cli.run(argparse.Namespace(paths=list(paths), out=out))

    def test_a_run_has_its_page_beside_it(self, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
        folder = runs()
        assert self.run(folder) == 0
        assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
        assert (folder / "report.html").read_text(encoding="utf-8") == build_report([folder])

    def test_several_are_written_where_asked(self, runs: Runs, tmp_path: Path) -> None:
        first, second = runs("one"), runs("two")
        self.run(first, second, out=tmp_path / "pages" / "both.html")
        assert "Two training runs" in (tmp_path / "pages" / "both.html").read_text(encoding="utf-8")
        assert not (first / "report.html").exists()

    def test_a_quickstart_as_before(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(json.dumps(make_results(("zaya",), steps=2)), encoding="utf-8")
        self.run(tmp_path)
        assert "trained from scratch" in (tmp_path / "report.html").read_text(encoding="utf-8")
        self.run(tmp_path / "results.json", out=tmp_path / "other.html")
        assert (tmp_path / "other.html").read_bytes() == (tmp_path / "report.html").read_bytes()

    def test_a_quickstart_beside_a_run_is_refused(self, runs: Runs, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"is no folder of a training run; only those can be side by side"):
            self.run(runs(), tmp_path)

    def test_a_folder_of_neither(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no such file: .*; zaya report reads a quickstart's results\.json, and"):
            self.run(tmp_path)
        assert list(tmp_path.iterdir()) == []
