"""Signals and the budget of time."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from zaya_hf.training.loop import Outcome
from zaya_hf.training.stopping import REASONS, Stopper, reason_of


def reason(stopper: Stopper) -> str | None:
    return reason_of(stopper.flags())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_noted_and_the_handler_of_before_comes_back(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Stopper() as stopper:
        assert reason(stopper) is None
        os.kill(os.getpid(), number)
        assert reason(stopper) == name
        assert reason(stopper) == name  # it is not forgotten
        if name != "SIGINT":
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stopper():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), Stopper():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_none_are_caught_where_none_are_named_or_in_another_thread() -> None:
    seen = []
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with Stopper():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    with Stopper(signals=()):
        seen.append(signal.getsignal(signal.SIGTERM))
    assert seen == [before, before]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_budget_has_room_for_one_more_step_and_a_save() -> None:
    clock = Clock()
    stopper = Stopper(1.0, clock=clock)
    clock.now += 5  # loading
    assert reason(stopper) is None
    stopper.saved(12.0)
    stopper.saved(2.0)
    for seconds in (10.0, 4.0, 10.0, 8.5):  # 137.5; and 10 for a step and 12 for a save are 159.5
        clock.now += seconds
        assert reason(stopper) is None
    clock.now += 1
    assert reason(stopper) == "wall clock"


def test_a_budget_that_is_none() -> None:
    with pytest.raises(ValueError, match="wall_clock_minutes is 0; expected more than 0, or None"):
        Stopper(0)


def test_reasons_of_several_processes_are_added_up() -> None:
    assert reason_of([0, 0, 0, 0]) is None
    assert reason_of([0, 2, 0, 1]) == REASONS[1]


def test_exit_codes() -> None:
    codes = {stopped: Outcome(3, stopped).exit_code for stopped in (None, *REASONS)}
    assert codes == {None: 0, "SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 0, "wall clock": 0}
