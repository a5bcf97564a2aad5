"""Checkpoints that several processes write together, and go on from with other numbers of processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import zaya_hf
from rank_processes import run_ranks
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.training import rng
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.checkpoint import CheckpointStore
from zaya_hf.training.config import BalancingConfig
from zaya_hf.training.distributed import make_accelerator
from zaya_hf.training.ema import ExponentialMovingAverage
from zaya_hf.training.optim import build_optimizer
from zaya_hf.training.parts import Run, StepSettings
from zaya_hf.training.ranks import on_main, rank, together, world_size
from zaya_hf.training.state import RunCheckpoints


def make_run(seed: int) -> Run:
    accelerator = make_accelerator()
    model = redraw(zaya_hf.ZayaForCausalLM(tiny_config(hidden_size=32, num_hidden_layers=2, head_dim=8)), seed)
    optimizer = build_optimizer(model, muon_lr=1e-2, adamw_lr=1e-2, newton_schulz_dtype=torch.float32)
    balancer, ema = BiasBalancer.for_model(model, BalancingConfig(lr=1e-2)), ExponentialMovingAverage(model, 0.9)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    settings = StepSettings(steps=9, rows=2)
    return Run(accelerator, prepared, optimizer, lambda step: 1.0, None, settings, balancer=balancer, ema=ema)  # type: ignore[arg-type]


def advance(run: Run, steps: int) -> list[float]:
    """The loss over all rows of each step; every process has its share of the rows."""
    losses = []
    run.model.train()
    for _ in range(steps):
        ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(run.progress.step))
        mine = ids[rank() :: world_size()]
        output = run.model(input_ids=mine, labels=mine, output_router_logits=True)
        assert run.balancer is not None
        assert run.ema is not None
        run.balancer.observe(output.tokens_per_slot)
        run.accelerator.backward(output.loss)
        run.balancer.step(lambda counts: run.accelerator.reduce(counts, "sum"))  # type: ignore[arg-type,return-value]
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.ema.update()
        losses.append(float(run.accelerator.reduce(output.loss.detach(), "mean")))  # type: ignore[arg-type]
        run.progress.step += 1
    return losses


def kept(folder: Path, **options: Any) -> RunCheckpoints:
    return RunCheckpoints(CheckpointStore(folder / "checkpoints", keep=9), **options)


def fails_in_the_second(folder: Path) -> None:
    if rank() == 1:
        raise OSError(28, "No space left on device")


def in_each_process(folder: Path) -> None:
    run = make_run(0)
    rng.seed_all(1, rank())
    advance(run, 2)
    kept(folder).save(run)
    expected = advance(run, 2), random.random()

    # ------------------------------------------------------------------------------ and back, in the same processes
    run = make_run(1)
    assert kept(folder).restore(run)
    assert (advance(run, 2), random.random()) == expected
    if rank() == 0:
        (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")

    # --------------------------------------------------------------------------- an error of one is an error of all
    store = CheckpointStore(folder / "other")
    with pytest.raises(OSError, match=r"other/step-1 could not be written \(.*No space left on device\)") as caught:
        store.save(1, fails_in_the_second, {})
    assert ("process 1 of 2: OSError" in str(caught.value)) == (rank() == 0)
    assert on_main(lambda: list((folder / "other").iterdir())) == []
    store.save(2, lambda path: (path / f"of-{rank()}").touch(), {"a": 1})
    found = store.newest()
    assert found is not None
    assert (found.step, found.description) == (2, {"a": 1})
    together(lambda: (found.path / "of-1").write_text("damaged") if rank() == 1 else None)
    said: list[str] = []
    assert store.newest(said.append) is None
    assert len(said) == (1 if rank() == 0 else 0)
    with pytest.raises(ValueError if rank() == 0 else OSError, match="only there"):
        on_main(lambda: int("only there"))
    assert on_main(rank) == 0


def test_two_processes_save_and_one_goes_on(tmp_path: Path) -> None:
    run_ranks(in_each_process, tmp_path)
    folder = tmp_path / "checkpoints" / "step-2"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"rng-0.pt", "rng-1.pt", "optimizer/__0_0.distcp", "optimizer/__1_0.distcp"} <= names

    losses, first = json.loads((tmp_path / "expected.json").read_text(encoding="utf-8"))
    run = make_run(2)
    assert kept(tmp_path).restore(run)
    assert advance(run, 2) == pytest.approx(losses, abs=1e-5)
    assert kept(tmp_path).restore(run)
    assert random.random() == first
