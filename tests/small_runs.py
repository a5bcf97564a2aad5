"""Runs of a tiny model on rows that a test makes, in one process or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.config import BalancingConfig, GuardConfig
from zaya_hf.training.distributed import make_accelerator
from zaya_hf.training.guard import Guard
from zaya_hf.training.optim import build_optimizer
from zaya_hf.training.parts import Run, StepSettings
from zaya_hf.training.stopping import Stopper


@dataclass
class Rows:
    """Rows of one length in the order of their samples; the same again when they run out. Sample j of a step goes to
    process j mod world, and rows that are missing are padding."""

    rows: Sequence[dict[str, Tensor]]
    asked: list[int] = field(default_factory=list)

    def micro_batches(
        self, first_sample: int, count: int, rank: int = 0, world_size: int = 1, micro_rows: int = 1
    ) -> list[dict[str, Tensor]]:
        self.asked.append(first_sample)
        number = math.ceil(math.ceil(count / world_size) / micro_rows)
        own = [self.rows[(first_sample + j) % len(self.rows)] for j in range(rank, count, world_size)]
        while len(own) < number * micro_rows:
            own.append(padding(self.rows[0]))
        cut = [own[i : i + micro_rows] for i in range(0, len(own), micro_rows)]
        return [{name: torch.stack([row[name] for row in rows]) for name in rows[0]} for rows in cut]


def padding(like: dict[str, Tensor]) -> dict[str, Tensor]:
    empty = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    return empty | {"shift_labels": torch.full_like(like["shift_labels"], -100)}


def random_rows(number: int, length: int = 12, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of one document each, with a target for each id but the last."""
    return [row_of(ids) for ids in random_ids(number, length, seed=seed)]


def row_of(ids: Tensor, targets: int | None = None, **more: Tensor) -> dict[str, Tensor]:
    """A row whose first `targets` predictions count."""
    labels = F.pad(ids[1:], (0, 1), value=-100)
    if targets is not None:
        labels[targets:] = -100
    return {"input_ids": ids, "shift_labels": labels, "attention_mask": torch.ones_like(ids), **more}


@dataclass
class Records:
    """A recorder that keeps everything, and may do something after a step."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    after_step: Callable[[dict[str, Any]], None] | None = None

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)
        if self.after_step is not None:
            self.after_step(record)

    def event(self, kind: str, step: int, **details: Any) -> None:
        self.events.append((kind, step, details))

    def evaluation(self, record: dict[str, Any]) -> None:
        self.evaluations.append(record)

    def rewind(self, step: int, evaluated: int | None = None) -> None:
        evaluated = step if evaluated is None else evaluated
        self.steps = [record for record in self.steps if record["step"] <= step]
        self.evaluations = [record for record in self.evaluations if record["step"] <= evaluated]

    def sync(self) -> None:
        pass

    def of(self, name: str) -> list[Any]:
        return [record.get(name) for record in self.steps]

    def kinds(self) -> list[tuple[str, int]]:
        return [(kind, step) for kind, step, _ in self.events]


class Saves:
    """Checkpoints that keep nothing but their steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, run: Run) -> None:
        self.steps.append(run.progress.step)

    def restore(self, run: Run, at_most: int | None = None) -> bool:
        return False


def tiny_model(seed: int = 0, **changes: Any) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**changes)), seed)
    assert isinstance(model, ZayaForCausalLM)
    return model


def make_run(
    batch: Sequence[dict[str, Tensor]],
    *,
    model: nn.Module | None = None,
    precision: str = "float32",
    lr: float = 0.01,
    balancing: dict[str, Any] | None = None,
    guard: dict[str, Any] | None = None,
    stopper: Stopper | None = None,
    schedule: Callable[[int], float] = lambda step: 1.0,
    **settings: Any,
) -> Run:
    """A run on all processes that there are, with the gradients of every step that was taken in `run.gradients`.

    Args:
        batch: the rows of its data; of one step, unless `settings` say otherwise.
        settings: of `StepSettings`.
    """
    AcceleratorState._reset_state(reset_partial_state=False)  # the precision may be another one
    accelerator = make_accelerator(precision)
    model = tiny_model() if model is None else model
    optimizer = build_optimizer(model, muon_lr=lr, adamw_lr=lr, newton_schulz_dtype=torch.float32)
    gradients: list[dict[str, Tensor]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append({names[id(p)]: p.grad.clone() for p in found if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    balancer = BiasBalancer.for_model(model, BalancingConfig(**(balancing or {})))
    model, optimizer = accelerator.prepare(model, optimizer)
    run = Run(
        accelerator,
        model,
        optimizer,
        schedule,
        Rows(batch),
        StepSettings(**{"steps": 1, "rows": len(batch), **settings}),
        guard=Guard(GuardConfig(**{"max_roll_backs": 0, **(guard or {})})),
        stopper=Stopper(signals=()) if stopper is None else stopper,
        balancer=balancer,
        recorder=Records(),
    )
    run.gradients = gradients  # type: ignore[attr-defined]
    return run


def values(run: Run) -> dict[str, Tensor]:
    """Weights and biases."""
    return {name: tensor.detach().clone() for name, tensor in run.inner.state_dict().items()}


def biases(run: Run) -> Tensor:
    return torch.stack([t for name, t in values(run).items() if name.endswith("balancing_biases")])


def memory(run: Run) -> list[Tensor]:
    """What the optimizer remembers."""
    states = run.optimizer.state_dict()["state"]
    return [value.clone() for number in sorted(states) for _, value in sorted(states[number].items())]
