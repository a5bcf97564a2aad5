"""Steps that are not taken: numbers that are none, spikes, the way back, and the data that is left out from then on."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_runs import Records, make_run, memory, random_rows, tiny_model, values
from zaya_hf.training.checkpoint import CheckpointStore
from zaya_hf.training.config import GuardConfig
from zaya_hf.training.guard import Diverged, Guard, Verdict
from zaya_hf.training.loop import train
from zaya_hf.training.parts import Progress, Run
from zaya_hf.training.state import RunCheckpoints
from zaya_hf.training.stopping import Stopper

TAKE, SKIP, ROLL_BACK = Verdict.TAKE, Verdict.SKIP, Verdict.ROLL_BACK


def guard_after(losses: list[float], **config: Any) -> Guard:
    guard = Guard(GuardConfig(**{"minimum": 8, "window": 16, **config}))
    for step, loss in enumerate(losses):
        assert guard.judge(loss, 1.0, step=step, window=step).verdict is TAKE
    return guard


def verdict(guard: Guard, loss: float, norm: float = 1.0) -> Verdict:
    return guard.judge(loss, norm, step=100, window=100).verdict


#: median 3, median absolute deviation 0.1
STEADY = [2.8, 2.9, 3.0, 3.1, 3.2] * 3


class TestJudge:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_none(self, bad: float) -> None:
        guard = guard_after([])
        judged = guard.judge(bad, 1.0, step=0, window=0)
        assert (judged.verdict, judged.reason) == (SKIP, f"the loss is {bad}")
        judged = guard.judge(3.0, bad, step=1, window=1)
        assert (judged.verdict, judged.reason) == (SKIP, f"the gradient's norm is {bad}")

    def test_a_spike_is_told_by_its_robust_z_score(self) -> None:
        limit = 3 + 8 * 1.4826 * 0.1
        assert verdict(guard_after(STEADY), limit - 1e-3) is TAKE
        guard = guard_after(STEADY)
        judged = guard.judge(limit + 1e-3, 1.0, step=15, window=15)
        assert judged.verdict is SKIP
        assert judged.reason == "the loss is 4.18708, 8.01 deviations above 3"
        assert verdict(guard_after(STEADY, spike_z=20.0), limit + 1e-3) is TAKE

    def test_so_is_one_of_the_gradient(self) -> None:
        guard = Guard(GuardConfig(minimum=8, window=16))
        for step, norm in enumerate(STEADY):
            guard.judge(3.0, norm, step=step, window=step)
        assert verdict(guard, 3.0, 4.19) is SKIP

    def test_a_fall_is_none(self) -> None:
        assert verdict(guard_after(STEADY), 0.1) is TAKE

    def test_one_outlier_in_the_window_does_not_hide_the_next(self) -> None:
        assert verdict(guard_after([*STEADY, -900.0]), 4.19) is SKIP

    def test_equal_numbers_have_no_deviation(self) -> None:
        """A thousandth of the median stands in for it."""
        assert verdict(guard_after([2.0] * 10), 2.0 + 8 * 0.002 - 1e-6) is TAKE
        assert verdict(guard_after([2.0] * 10), 2.0 + 8 * 0.002 + 1e-6) is SKIP
        assert verdict(guard_after([0.0] * 10), 0.0) is TAKE

    def test_only_once_there_is_something_to_compare_with(self) -> None:
        assert verdict(guard_after([3.0] * 7), 1e9) is TAKE
        assert verdict(guard_after([3.0] * 8), 1e9) is SKIP

    def test_none_are_told_without_a_limit(self) -> None:
        assert verdict(guard_after(STEADY, spike_z=None), 1e9) is TAKE
        assert verdict(guard_after(STEADY, spike_z=None), math.nan) is SKIP

    def test_the_window_moves_on(self) -> None:
        assert verdict(guard_after([*STEADY, *[2.0 + 0.1 * k for k in range(16)]]), 7.4) is TAKE
        assert verdict(guard_after([*STEADY, *[2.0 + 0.1 * k for k in range(16)]]), 7.6) is SKIP

    def test_bad_steps_are_not_compared_with(self) -> None:
        guard = guard_after(STEADY, roll_back_after=99)
        assert [verdict(guard, 50.0) for _ in range(20)] == [SKIP] * 20

    def test_too_many_in_a_row(self) -> None:
        guard = guard_after(STEADY, roll_back_after=3)
        assert [verdict(guard, x) for x in (50.0, math.nan, 3.0)] == [SKIP, SKIP, TAKE]
        assert [verdict(guard, x) for x in (50.0, math.nan, 60.0)] == [SKIP, SKIP, ROLL_BACK]

    @pytest.mark.parametrize("window", [16, 9])
    def test_the_state_goes_through_json(self, window: int) -> None:
        guard = guard_after(STEADY)
        verdict(guard, math.nan)
        guard.roll_backs = 2
        again = Guard(GuardConfig(minimum=8, window=window))
        again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        assert again.roll_backs == 2
        assert again.streak == guard.streak == [(100, 100)]
        if window == 16:
            assert again.state_dict() == guard.state_dict()
        assert [verdict(again, x) for x in (4.19, 50.0)] == [SKIP, ROLL_BACK]


class TestWindows:
    @pytest.mark.parametrize(
        ("skipped", "windows"),
        [
            ([], [0, 1, 2, 3, 4, 5]),
            ([(2, 4)], [0, 1, 4, 5, 6, 7]),
            ([(0, 1)], [1, 2, 3, 4, 5, 6]),
            ([(1, 2), (3, 5)], [0, 2, 5, 6, 7, 8]),
        ],
    )
    def test_steps_are_made_of_those_that_are_left(self, skipped: list[Any], windows: list[int]) -> None:
        assert [Progress(step=step, skipped_windows=skipped).window for step in range(6)] == windows

    def test_they_are_merged(self) -> None:
        progress = Progress(skipped_windows=[[4, 6]])  # type: ignore[list-item]  # as JSON has it
        progress.skip([9, 6, 3])
        assert progress.skipped_windows == [(3, 7), (9, 10)]
        progress.skip([7, 8])
        assert progress.skipped_windows == [(3, 10)]


# ---------------------------------------------------------------------------------------------------------------- runs
POISON = 127  # an id; a row that begins with it has a loss that is NaN
GUARD = {"roll_back_after": 3, "max_roll_backs": 2}


def rows_of(windows: list[int], poisoned: tuple[int, ...] = ()) -> list[dict[str, Tensor]]:
    """Two rows for each window; a window's second row may be poisoned."""
    rows = []
    for window in windows:
        first, second = random_rows(2, seed=window)
        second["input_ids"][0] = POISON if window in poisoned else 5
        rows += [first, second]
    return rows


def poison(run: Run) -> None:
    def spoil(module: Any, inputs: Any, options: dict[str, Any], output: Any) -> None:
        if (options["input_ids"][:, 0] == POISON).any():
            output.loss = output.loss * math.nan

    run.inner.register_forward_hook(spoil, with_kwargs=True)


def guarded(
    rows: list[dict[str, Tensor]], folder: Path | None = None, *, keep: int = 2, **options: Any
) -> tuple[Run, Records]:
    """A run with dropout, so that random numbers matter, and with checkpoints every second step."""
    model = tiny_model(num_hidden_layers=1, attention_dropout=0.2)
    model.model.layers[0].mlp.gate.balancing_biases[-1] = -1.0
    torch.manual_seed(0)
    settings = {"steps": 8, "rows": 2, "checkpoint_every": 2, "guard": GUARD}
    run = make_run(rows, model=model, **{**settings, **options})
    poison(run)
    if folder is not None:
        run.checkpoints = RunCheckpoints(CheckpointStore(folder, keep))
        run.checkpoints.restore(run)
    assert isinstance(run.recorder, Records)
    return run, run.recorder


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def clean() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values of a run that never saw windows 3 ... 5."""
    run, records = guarded(rows_of([0, 1, 2, 6, 7, 8, 9, 10]))
    train(run)
    return records.of("loss"), values(run)


WINDOWS = list(range(12))


def test_one_bad_micro_batch_skips_the_step() -> None:
    run, records = guarded(rows_of(WINDOWS, (1,)), steps=3, micro_rows=1)
    seen = [(values(run), memory(run), run.balancer.state_dict())]  # type: ignore[union-attr]
    records.after_step = lambda record: seen.append((values(run), memory(run), run.balancer.state_dict()))  # type: ignore[union-attr,func-returns-value]
    train(run)
    assert records.of("skipped") == [None, "the loss is nan", None]
    assert records.kinds() == [("skip", 2)]
    assert_equal(seen[1][0], seen[2][0])
    assert all(torch.equal(a, b) for a, b in zip(seen[1][1], seen[2][1], strict=True))
    assert str(seen[1][2]) == str(seen[2][2])
    assert not torch.equal(seen[0][0]["lm_head.weight"], seen[1][0]["lm_head.weight"])
    assert not torch.equal(seen[2][0]["lm_head.weight"], seen[3][0]["lm_head.weight"])
    assert all(p.grad is None for p in run.inner.parameters())


def test_a_run_goes_back_and_leaves_the_bad_data_out(tmp_path: Path, clean: Any) -> None:
    run, records = guarded(rows_of(WINDOWS, (3, 4, 5)), tmp_path)
    assert train(run).stopped is None
    assert records.of("loss") == clean[0]
    assert_equal(values(run), clean[1])
    assert run.progress.skipped_windows == [(3, 6)]
    assert run.data.asked == [2 * w for w in (0, 1, 2, 3, 4, 5, 2, 6, 7, 8, 9, 10)]  # type: ignore[attr-defined]
    assert records.of("step") == list(range(1, 9))
    happened = [(kind, step) for kind, step in records.kinds() if kind != "checkpoint"]
    assert happened == [("skip", 4), ("skip", 5), ("roll_back", 2)]
    (details,) = (facts for kind, _, facts in records.events if kind == "roll_back")
    assert details == {"bad_step": 6, "reason": "the loss is nan", "left_out": [3, 4, 5]}
    assert [step for kind, step in records.kinds() if kind == "checkpoint"] == [0, 2, 4, 6, 8]


class Killed(Exception):
    pass


@pytest.mark.parametrize("step", [3, 5, 6])
def test_killed_before_within_and_after_the_bad_steps(step: int, tmp_path: Path, clean: Any) -> None:
    rows = rows_of(WINDOWS, (3, 4, 5))
    run, records = guarded(rows, tmp_path)
    before = []

    def kill(record: dict[str, Any]) -> None:
        before.append(record["step"])
        if record["step"] == step and (step != 3 or run.guard.roll_backs == 1):
            raise Killed

    records.after_step = kill
    with pytest.raises(Killed):
        train(run)
    assert before[-1] == step
    run, records = guarded(rows, tmp_path)
    assert train(run).stopped is None
    assert records.of("loss") == clean[0][-len(records.steps) :]
    assert_equal(values(run), clean[1])
    assert run.guard.roll_backs == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_stopped_and_saved_within_the_bad_steps(keep: int, tmp_path: Path, clean: Any) -> None:
    """What is saved then is not what the run goes back to: that is from before them."""
    rows = rows_of(WINDOWS, (3, 4, 5))
    run, records = guarded(rows, tmp_path, keep=keep, stopper=Stopper())
    records.after_step = lambda record: os.kill(os.getpid(), signal.SIGUSR1) if record["step"] == 3 else None
    outcome = train(run)
    assert (outcome.stopped, outcome.steps, outcome.exit_code) == ("SIGUSR1", 4, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4"]
    run, records = guarded(rows, tmp_path, keep=keep)
    assert run.progress.step == 4
    train(run)
    assert ("roll_back", 2) in records.kinds()
    assert_equal(values(run), clean[1])


def test_checkpoints_do_not_push_out_the_one_to_go_back_to(tmp_path: Path, clean: Any) -> None:
    run, records = guarded(rows_of(WINDOWS, (3, 4, 5)), tmp_path, keep=1, checkpoint_every=1)
    train(run)
    assert_equal(values(run), clean[1])
    assert [step for kind, step in records.kinds() if kind == "checkpoint"] == list(range(9))


def test_bad_from_the_first_step(tmp_path: Path) -> None:
    run, _ = guarded(rows_of(WINDOWS, (0, 1, 2)), tmp_path, checkpoint_every=0)
    train(run)
    other, _ = guarded(rows_of(WINDOWS[3:]))
    train(other)
    assert_equal(values(run), values(other))


def test_twice_and_then_no_more(tmp_path: Path) -> None:
    bad = (3, 4, 5, 7, 8, 9)
    run, _ = guarded(rows_of(list(range(20)), (*bad, 11, 12, 13)), tmp_path, checkpoint_every=0)  # always to step 0
    with pytest.raises(Diverged, match=r"the loss is nan at step 8 of 8: training diverged, after 2 roll-backs\."):
        train(run)
    assert run.guard.roll_backs == 2
    assert run.progress.skipped_windows == [(3, 6), (7, 10)]
    assert all(p.grad is None for p in run.inner.parameters())


def test_without_checkpoints_there_is_no_way_back() -> None:
    run, _ = guarded(rows_of(WINDOWS, (3, 4, 5)))
    with pytest.raises(
        Diverged, match="at step 6 of 8: training diverged, and there is no checkpoint of at most 3 steps"
    ):
        train(run)


def test_a_spike_in_a_run() -> None:
    """The gradient of one step is ten thousand times the others."""
    run, records = guarded(rows_of(WINDOWS), steps=12, lr=1e-4, guard=GUARD | {"minimum": 8, "window": 8})
    run.inner.get_input_embeddings().weight.register_hook(lambda g: g * 1e4 if run.progress.step == 10 else g)
    train(run)
    assert [step for step, why in enumerate(records.of("skipped")) if why] == [10]
    assert "the gradient's norm is" in records.of("skipped")[10]
