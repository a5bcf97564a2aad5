"""What whoever watches a run sees."""

from __future__ import annotations

import io
from typing import Any

import pytest

from zaya_hf.training import console as module
from zaya_hf.training.console import Console


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 4.0 - step / 100, "lr": 1e-3, "tokens_per_second": 1000.0, "mfu": 0.25, **changes}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def shown(console: Console, stream: io.StringIO, steps: range, clock: list[float]) -> list[str]:
    for step in steps:
        clock[0] += 2.0
        console.step(record(step))
    return stream.getvalue().splitlines()


class TestLines:
    def test_one_for_every_two_percent(self, clock: list[float]) -> None:
        stream = io.StringIO()
        found = shown(Console(1000, stream=stream), stream, range(1, 1001), clock)
        assert len(found) == 51
        assert [line.split()[1] for line in found[:3]] == ["1/1000", "20/1000", "40/1000"]
        assert found[-1].startswith("step 1000/1000")

    def test_as_often_as_asked(self, clock: list[float]) -> None:
        stream = io.StringIO()
        found = shown(Console(1000, every=5, stream=stream), stream, range(1, 12), clock)
        assert [line.split()[1] for line in found] == ["1/1000", "5/1000", "10/1000"]

    def test_the_loss_is_the_mean_since_the_last_line(self, clock: list[float]) -> None:
        stream = io.StringIO()
        console = Console(100, every=4, stream=stream)
        for step, loss in enumerate([9.0, 1.0, 2.0, 3.0], start=1):
            console.step(record(step, loss=loss))
        assert "loss 9.0000" in stream.getvalue().splitlines()[0]
        assert "loss 2.0000" in stream.getvalue().splitlines()[1]

    def test_what_a_line_says(self, clock: list[float]) -> None:
        stream = io.StringIO()
        found = shown(Console(60, every=30, stream=stream), stream, range(1, 31), clock)
        assert found[-1] == "step 30/60  loss 3.8400  lr 1.00e-03  1.00 k tokens/s  MFU 25.0 %  1 min left"

    def test_what_is_not_known_is_not_shown(self, clock: list[float]) -> None:
        stream = io.StringIO()
        Console(60, stream=stream).step(record(1, mfu=None, tokens_per_second=None))
        assert stream.getvalue() == "step 1/60  loss 3.9900  lr 1.00e-03\n"

    def test_skipped_steps_have_no_loss(self, clock: list[float]) -> None:
        stream = io.StringIO()
        console = Console(10, every=2, stream=stream)
        console.step(record(1, loss="nan", skipped="the loss is nan"))
        console.step(record(2, loss=2.5))
        first, second = stream.getvalue().splitlines()
        assert "loss \u2013  skipped" in first
        assert "loss 2.5000" in second

    def test_speed_is_that_of_all_the_time(self, clock: list[float]) -> None:
        """Two steps of 1,000 tokens, at 1,000 and 250 tokens/s, take 5 s."""
        stream = io.StringIO()
        console = Console(10, every=2, stream=stream)
        console.step(record(1, tokens_per_second=1000.0))
        console.step(record(2, tokens_per_second=250.0))
        assert "400 tokens/s" in stream.getvalue().splitlines()[1]


def test_the_time_left_has_the_evaluations_in_it(clock: list[float]) -> None:
    console = Console(20, stream=io.StringIO())
    assert console.seconds_left() is None
    for step in range(1, 11):
        clock[0] += 1.0 + (5.0 if step == 6 else 0.0)  # an evaluation before step 6
        console.step(record(step))
    assert console.seconds_left() == pytest.approx(14 / 9 * 10)


def test_after_a_rewind_the_time_left_is_told_anew(clock: list[float]) -> None:
    console = Console(20, stream=io.StringIO())
    shown(console, io.StringIO(), range(1, 11), clock)
    console.rewind(4)
    assert console.seconds_left() is None
    shown(console, io.StringIO(), range(5, 7), clock)
    assert console.seconds_left() == pytest.approx(2.0 * 14)


def test_evaluations_and_events_are_one_line_each() -> None:
    stream = io.StringIO()
    console = Console(10, stream=stream)
    console.evaluation({"step": 5, "loss": 2.0, "bits_per_byte": 1.25, "ema": {"loss": 1.9}})
    console.evaluation({"step": 5, "tasks": {"lines": {"accuracy": 0.5, "chance": 0.25}, "bits": {"bits_per_byte": 2}}})
    console.event("roll_back", 7, {"reason": "the loss is nan", "windows": None})
    assert stream.getvalue().splitlines() == [
        "step 5: held-out loss 2.0000, 1.2500 bits per byte, averaged weights 1.9000",
        "step 5: lines 0.500 (chance 0.250), bits 2.0000 bits per byte",
        "step 7: roll back (reason the loss is nan)",
    ]


class TestTerminal:
    def test_one_line_that_is_drawn_again_and_messages_above_it(self, clock: list[float]) -> None:
        stream = io.StringIO()
        console = Console(50, stream=stream, live=True)
        shown(console, stream, range(1, 26), clock)
        console.say("step 25: [checkpoint]")
        shown(console, stream, range(26, 51), clock)
        console.close()
        text = stream.getvalue()
        assert "step 25: [checkpoint]\n" in text  # brackets are no markup
        assert "50/50" in text
        assert "\x1b[2K" in text
        assert text.count("step ") == 1

    def test_it_is_not_drawn_more_often_than_the_eye_sees(self, clock: list[float]) -> None:
        stream = io.StringIO()
        console = Console(10_000, stream=stream, live=True)
        for step in range(1, 1001):
            clock[0] += 0.001
            console.step(record(step))
        assert stream.getvalue().count("/10000") <= 13
        console.close()

    def test_a_stream_that_is_no_terminal(self) -> None:
        assert not module.is_terminal(io.StringIO())
