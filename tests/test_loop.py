"""The loop in one process: what a step comes to, and what happens between steps."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from small_runs import Records, Saves, biases, make_run, memory, random_rows, row_of, tiny_model, values
from test_simple import make_olmoe
from zaya_hf.testing import random_ids
from zaya_hf.training.guard import Diverged
from zaya_hf.training.loop import train
from zaya_hf.training.parts import Run
from zaya_hf.training.stopping import Stopper


def records(run: Run) -> Records:
    assert isinstance(run.recorder, Records)
    return run.recorder


def gradients(run: Run) -> list[dict[str, Tensor]]:
    return run.gradients  # type: ignore[attr-defined,no-any-return]


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * b[name].norm().clamp_min(1.0), name


class Evaluations:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        self.steps.append(step)
        return {"step": step, "parameters": sum(p.numel() for p in model.parameters())}


class Average:
    updates = 0

    def update(self) -> None:
        self.updates += 1


# -------------------------------------------------------------------------------------------------------------- a step
def test_accumulation_changes_nothing() -> None:
    """Rows of different numbers of targets, in one micro-batch or in four."""
    rows = [row_of(ids, targets=targets) for ids, targets in zip(random_ids(16, 12), range(16), strict=True)]
    runs = []
    for micro_rows in (8, 2):
        run = make_run(rows, model=tiny_model().double(), steps=2, rows=8, micro_rows=micro_rows)
        train(run)
        runs.append(run)
    whole, accumulated = runs
    assert records(accumulated).of("loss") == pytest.approx(records(whole).of("loss"), rel=1e-9)
    assert records(accumulated).of("grad_norm") == pytest.approx(records(whole).of("grad_norm"), rel=1e-6)
    assert torch.equal(biases(accumulated), biases(whole))
    for ours, theirs in zip(gradients(accumulated), gradients(whole), strict=True):
        assert_close(ours, theirs, 1e-6)


def test_recomputation_changes_nothing() -> None:
    runs = []
    for recompute in (False, True):
        model = tiny_model()
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        runs.append(make_run(random_rows(4), model=model, micro_rows=2, router_panel_every=1))
        train(runs[-1])
    plain, recomputed = runs
    assert records(recomputed).of("loss") == records(plain).of("loss")
    assert records(recomputed).of("router") == records(plain).of("router")
    assert torch.equal(biases(recomputed), biases(plain))
    assert_close(gradients(recomputed)[0], gradients(plain)[0], 1e-6)


def test_the_loss_and_the_norm_are_those_of_the_whole_step() -> None:
    rows = random_rows(4)
    run = make_run(rows, micro_rows=1, gradient_clip=1.0)
    reference = tiny_model().train()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    loss = reference(**batch).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm().item()
    train(run)
    (record,) = records(run).steps
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1
    clipped = torch.stack([gradient.norm() for gradient in gradients(run)[0].values()]).norm()
    assert clipped.item() == pytest.approx(1.0, rel=1e-5)


def test_z_loss_reaches_the_model() -> None:
    rows = random_rows(2)
    with_it, without = make_run(rows, z_loss=0.1), make_run(rows)
    train(with_it)
    train(without)
    model = tiny_model()
    logits = model(torch.stack([row["input_ids"] for row in rows])).logits[:, :-1]
    expected = 0.1 * torch.logsumexp(logits, -1).square().mean().item()
    difference = records(with_it).of("loss")[0] - records(without).of("loss")[0]
    assert difference == pytest.approx(expected, rel=1e-5)


def test_an_auxiliary_loss_is_the_mean_of_the_micro_batches() -> None:
    """A model that adds one to its loss, which is no sum over targets."""
    rows = [row_of(ids) for ids in random_ids(2, 12, high=32)]
    for row in rows:
        row["labels"] = row["shift_labels"]
    run = make_run(rows, model=make_olmoe(), micro_rows=1)
    train(run)
    model = make_olmoe().train()
    ids = [row["input_ids"][None] for row in rows]
    outputs = [model(one, attention_mask=torch.ones_like(one), labels=one, output_router_logits=True) for one in ids]
    auxiliary = [0.5 * output.aux_loss for output in outputs]
    language = [output.loss - extra for output, extra in zip(outputs, auxiliary, strict=True)]
    (sum(language) / 2 + sum(auxiliary) / 2).backward()
    assert records(run).of("loss") == pytest.approx([sum(part.item() for part in language) / 2], rel=1e-6)
    assert_close(gradients(run)[0], {name: p.grad for name, p in model.named_parameters()}, 1e-6)


def test_a_step_without_targets_changes_nothing_and_counts() -> None:
    empty = [row_of(ids, targets=0) for ids in random_ids(2, 12, seed=3)]
    run = make_run([*random_rows(2), *empty, *random_rows(2, seed=1)], steps=3, rows=2, lr=0.01)
    average = run.ema = Average()
    seen: list[Any] = []
    assert run.balancer is not None
    records(run).after_step = lambda record: seen.append((values(run), memory(run), str(run.balancer.state_dict())))  # type: ignore[union-attr]
    train(run)
    first, second = seen[:2]
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert first[2] == second[2]
    assert records(run).of("loss")[1] == 0
    assert records(run).of("targets") == [22, 0, 22]
    assert records(run).of("tokens") == [24, 48, 72]
    assert records(run).of("skipped") == [None, "there are no targets", None]
    assert run.guard.streak == []
    assert average.updates == 2


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    """Also after one that was skipped."""
    empty = [row_of(ids, targets=0) for ids in random_ids(1, 12)]
    rows = [*random_rows(1), *empty, *random_rows(2, seed=1)]
    run = make_run(rows, steps=4, rows=1, lr=0.01, schedule=lambda step: 1 / (1 + step))
    train(run)
    assert records(run).of("lr") == pytest.approx([0.01, 0.005, 0.01 / 3, 0.0025])
    assert records(run).of("adamw_lr") == records(run).of("lr")
    still = make_run(rows, steps=4, rows=1, schedule=lambda step: 0.0)
    before = values(still)
    train(still)
    after = values(still)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"model.layers.{layer}.mlp.gate.balancing_biases" for layer in range(4)
    }


def test_a_record_is_complete() -> None:
    run = make_run(random_rows(8), steps=4, rows=2, router_panel_every=2)
    train(run)
    assert [("router" in record) for record in records(run).steps] == [False, True, False, True]
    record = records(run).steps[-1]
    assert record.keys() == {
        "step", "tokens", "targets", "loss", "grad_norm", "lr", "adamw_lr", "seconds", "data_seconds", "memory_bytes",
        "router",
    }  # fmt: skip
    assert record["router"].keys() >= {"load_entropy", "max_violation", "skip_rate", "dead_experts"}
    assert record["memory_bytes"] > 1e7
    assert 0 < record["data_seconds"] < record["seconds"]
    assert run.progress.seconds == pytest.approx(sum(records(run).of("seconds")))


def test_batches_without_labels_are_refused() -> None:
    rows = random_rows(2)
    for row in rows:
        del row["shift_labels"]
    with pytest.raises(ValueError, match="the batch has no labels"):
        train(make_run(rows, micro_rows=2))


def test_a_model_that_makes_no_loss_of_shifted_labels_alone_is_refused() -> None:
    rows = [row_of(ids) for ids in random_ids(1, 12, high=32)]
    with pytest.raises(ValueError, match="OlmoeForCausalLM computes no loss from shift_labels alone"):
        train(make_run(rows, model=make_olmoe()))


# ------------------------------------------------------------------------------------------------------- between steps
def test_what_is_due_when() -> None:
    run = make_run(random_rows(2), steps=7, checkpoint_every=3)
    saves, often, last = Saves(), Evaluations(), Evaluations()
    run.checkpoints, run.evaluations = saves, [(2, often), (0, last)]
    outcome = train(run)
    assert (outcome.steps, outcome.stopped) == (7, None)
    assert saves.steps == [3, 6, 7]
    assert often.steps == [2, 4, 6, 7]
    assert last.steps == [7]
    assert [record["step"] for record in records(run).evaluations] == [2, 4, 6, 7, 7]
    assert train(run) == outcome  # nothing is left to do, and nothing is done twice
    assert (saves.steps, often.steps) == ([3, 6, 7], [2, 4, 6, 7])


def test_a_run_that_may_go_back_has_a_checkpoint_from_the_start() -> None:
    run = make_run(random_rows(2), steps=1, guard={"max_roll_backs": 1})
    saves = run.checkpoints = Saves()
    train(run)
    assert saves.steps == [0, 1]


def test_a_signal_stops_after_a_save_and_the_evaluation_comes_when_the_run_goes_on() -> None:
    run = make_run(random_rows(2), steps=5, stopper=Stopper())
    saves, evaluations = Saves(), Evaluations()
    run.checkpoints, run.evaluations = saves, [(2, evaluations)]
    records(run).after_step = lambda record: os.kill(os.getpid(), signal.SIGTERM) if record["step"] == 1 else None
    outcome = train(run)
    assert (outcome.steps, outcome.stopped) == (2, "SIGTERM")
    assert saves.steps == [2]
    assert evaluations.steps == []
    assert records(run).kinds() == [("checkpoint", 2), ("stop", 2)]
    run.stopper, records(run).after_step = Stopper(), None
    assert train(run).stopped is None
    assert evaluations.steps == [2, 4, 5]
    assert saves.steps == [2, 5]


def test_a_save_that_fails_is_not_taken_for_one() -> None:
    run = make_run(random_rows(2), steps=2)

    class Full(Saves):
        def save(self, run: Run) -> None:
            raise OSError("no space left")

    run.checkpoints = Full()
    with pytest.raises(OSError, match="no space left"):
        train(run)
    assert run.progress.saved == -1
    assert all(p.grad is None for p in run.inner.parameters())


def test_a_run_that_diverges_says_where() -> None:
    run = make_run(random_rows(2), steps=4, guard={"roll_back_after": 1})
    run.inner.get_output_embeddings().weight.data[0, 0] = math.nan
    with pytest.raises(Diverged, match=r"the loss is nan at step 1 of 4: training diverged\.$"):
        train(run)
