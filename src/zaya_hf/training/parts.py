"""What a run is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from .balancing import BiasBalancer
from .guard import Guard
from .stopping import Stopper

__all__ = ["Average", "Checkpoints", "Data", "Evaluator", "Progress", "Recorder", "Run", "StepSettings"]


class Data(Protocol):
    """Rows by number, see `zaya_hf.training.data`."""

    def micro_batches(
        self, first_sample: int, count: int, rank: int = 0, world_size: int = 1, micro_rows: int = 1
    ) -> Sequence[Mapping[str, Tensor]]:
        """Those of one process, on the CPU, as many in each; arguments of the model's forward.

        Ids without a target have the label -100, and so has padding: `shift_labels` are used as they are, `labels`
        alone are those of the ids themselves.
        """


class Checkpoints(Protocol):
    """Where the state of a run is kept. Both are called in all processes at once."""

    def save(self, run: Run) -> None:
        """Keep the state of `run`."""

    def restore(self, run: Run, at_most: int | None = None) -> bool:
        """Put `run` back to its newest good state (of at most so many steps), and remove what is newer.

        Returns:
            False, with nothing changed, if there is none.
        """


class Recorder(Protocol):
    """Called in all processes; what it shows, it shows in one."""

    def step(self, record: dict[str, Any]) -> None:
        """One step, see `records.step_record`."""

    def event(self, kind: str, step: int, **details: Any) -> None:
        """What happened after so many steps."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """What an evaluator returned."""

    def rewind(self, step: int, evaluated: int | None = None) -> None:
        """Forget what came after so many steps, and evaluations after `evaluated`: they will come again."""

    def sync(self) -> None:
        """Have what was recorded on the disk: a checkpoint is about to be written that goes on from here."""


class Evaluator(Protocol):
    """Measures the model between two steps, in all processes at once."""

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Numbers of `model` after so many steps; collective. Leaves values, mode and random generators alone."""


class Average(Protocol):
    """A moving average of the weights, such as `ema.ExponentialMovingAverage`."""

    def update(self) -> None:
        """Follow the weights, after an optimizer step."""

    def state_dict(self) -> dict[str, Tensor]:
        """The model's whole state with the averages in the place of what is averaged."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the averages over from what `state_dict` gave."""


@dataclass(frozen=True)
class StepSettings:
    """The numbers that the loop itself reads.

    Attributes:
        steps: optimizer steps of the whole run.
        rows: of a step, over all processes.
        micro_rows: of one forward pass of one process.
        gradient_clip: largest norm of all gradients together; math.inf: as it is.
        z_loss: see `zaya_hf.losses.causal_lm_loss`.
        checkpoint_every: steps between two checkpoints; 0: only when stopping and at the end. Decides no number.
        router_panel_every: steps between two records of what the routers do; 0: none. Decides no number.
    """

    steps: int
    rows: int
    micro_rows: int = 1
    gradient_clip: float = math.inf
    z_loss: float = 0.0
    checkpoint_every: int = 0
    router_panel_every: int = 0


@dataclass
class Progress:
    """How far a run has come; JSON values, for its checkpoints.

    Attributes:
        step: steps done, skipped ones too.
        tokens: in them, over all processes, padding left out.
        seconds: spent in them; evaluations and saves are not in it, nor what was undone.
        saved: `step` of the newest checkpoint; -1: there is none.
        evaluated: `step` of the last evaluation.
        skipped_windows: data windows [first, last) that no step is made of, in order. Window w holds the samples
            [w rows, (w + 1) rows); step s is made of the s-th window that is in none of these.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    saved: int = -1
    evaluated: int = 0
    skipped_windows: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.skipped_windows = [(first, last) for first, last in self.skipped_windows]  # JSON has lists

    @property
    def window(self) -> int:
        """Number of the data window that the next step is made of."""
        number = self.step
        for first, last in self.skipped_windows:
            if number < first:
                break
            number += last - first
        return number

    def skip(self, windows: Iterable[int]) -> None:
        """Make no step of `windows` from now on."""
        left_out = {window for first, last in self.skipped_windows for window in range(first, last)} | set(windows)
        merged: list[tuple[int, int]] = []
        for window in sorted(left_out):
            if merged and merged[-1][1] == window:
                merged[-1] = (merged[-1][0], window + 1)
            else:
                merged.append((window, window + 1))
        self.skipped_windows = merged


@dataclass
class Run:
    """A model and everything that trains it.

    Attributes:
        accelerator: see `distributed.make_accelerator`.
        model, optimizer: prepared by it. What the optimizer's groups have as their learning rates now are the peaks.
        schedule: the factor of the peaks for a step, counted from 0.
        data: rows by number.
        settings: numbers of the loop.
        guard: judges each step, with `GuardConfig`'s defaults if none is given.
        stopper: says when to stop early; by default at SIGTERM, SIGINT and SIGUSR1.
        balancer: moves the routers' biases; None: they stay.
        ema: follows the weights; None: no average is kept.
        checkpoints: where the run is saved and goes back to; None: nowhere, so that a run that diverges ends.
        recorder: is told of steps, events and evaluations; None: nobody is.
        evaluations: evaluators, each with the steps between two runs of it (0: only at the end).
        progress: of an earlier run, if `checkpoints.restore` put it there.
        peaks: learning rates of the groups at factor 1.
        inner: the model without what distribution wraps around it; its forward is autocast all the same.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    schedule: Callable[[int], float]
    data: Data
    settings: StepSettings
    guard: Guard = field(default_factory=Guard)
    stopper: Stopper = field(default_factory=Stopper)
    balancer: BiasBalancer | None = None
    ema: Average | None = None
    checkpoints: Checkpoints | None = None
    recorder: Recorder | None = None
    evaluations: Sequence[tuple[int, Evaluator]] = ()
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.peaks: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.inner: nn.Module = self.accelerator.unwrap_model(self.model)
