"""Training in one process by a function that gives the batch of a step: `loop.train`, with what it needs made here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import loop
from .balancing import BiasBalancer
from .checkpoint import CheckpointStore
from .config import BalancingConfig, GuardConfig
from .distributed import make_accelerator
from .guard import Guard
from .muon import ADJUSTMENTS
from .optim import build_optimizer
from .parts import Run, StepSettings
from .schedule import learning_rate_factor
from .state import RunCheckpoints
from .stopping import Stopper

__all__ = ["LoopSettings", "TrainingLog", "train"]

LOAD_STEPS = 50  # the load that is reported is the mean over so many of the last steps
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoopSettings:
    """Everything that decides the numbers, beside the model and its batches.

    Attributes:
        steps: optimizer steps, one batch each.
        warmup_steps: of the learning rates, see `learning_rate_factor`.
        muon_lr, adamw_lr: peaks; for hidden matrices, and for all else.
        weight_decay: decoupled, on tensors of two or more dimensions.
        betas: AdamW's.
        momentum: Muon's.
        adjust_lr: Muon's learning rate by shape, see `HybridMuon`.
        newton_schulz_dtype: "bfloat16", "float32", or None: what is fast on the device.
        gradient_clip: largest norm of all gradients together; math.inf: as it is.
        balancing_lr: of the routers' balancing biases; 0: they stay.
        checkpoint_every: steps between two checkpoints; 0: only at an interruption and at the end. Decides no number.

    Raises:
        ValueError: for values out of range. Those of the optimizer are checked when it is built.
    """

    steps: int
    warmup_steps: int = 40
    muon_lr: float = 0.02
    adamw_lr: float = 5e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95
    adjust_lr: str = "original"
    newton_schulz_dtype: str | None = None
    gradient_clip: float = 1.0
    balancing_lr: float = 5e-3
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1.")
        for name in ("warmup_steps", "balancing_lr", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0.")
        if not self.gradient_clip > 0:
            raise ValueError(f"gradient_clip is {self.gradient_clip}; expected more than 0, or math.inf for none.")
        if self.adjust_lr not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr is {self.adjust_lr!r}; expected one of {', '.join(ADJUSTMENTS)}.")
        if self.newton_schulz_dtype not in (None, *DTYPES):
            raise ValueError(
                f"newton_schulz_dtype is {self.newton_schulz_dtype!r}; expected one of {', '.join(DTYPES)}, or None."
            )


@dataclass
class TrainingLog:
    """What a run did, from its first step on, also over interruptions.

    Attributes:
        losses: nats per target, one per step, before the step's update; the language-model loss without auxiliary ones.
        seconds: spent in steps; writing checkpoints, `on_step` and building things are not in it.
        tokens: ids in all batches, padding left out.
        load: per layer, the load of the busiest expert in units of a fair one, minus 1, averaged over the last
            `LOAD_STEPS` steps; None for a model without balancing biases.
    """

    losses: list[float]
    seconds: float
    tokens: int
    load: list[float] | None


def train(
    model: PreTrainedModel,
    batch_at: Callable[[int], Mapping[str, Tensor]],
    settings: LoopSettings,
    *,
    checkpoint: Path | None = None,
    fingerprint: str = "",
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingLog:
    """Train `model` in place. It ends in eval mode, on the device it was trained on: a GPU if there is one.

    If the caller raises KeyboardInterrupt in `on_step`, the step's checkpoint is written before the exception goes on.
    The same call then continues: on a CPU with the same threads, with the numbers of a run that was not interrupted,
    bit for bit. A run that was finished already is restored, not repeated.

    Args:
        model: any causal language model of transformers or of this package.
        batch_at: keyword arguments of the model's forward for a step, counted from 0: `input_ids` and `labels` at
            least. The same step has to give the same batch.
        checkpoint: folder for checkpoints; None: there are none.
        fingerprint: what decides the numbers beside `settings`: data, initialisation, versions. A checkpoint of another
            fingerprint, or a damaged one, is ignored and replaced.
        on_step: called after every step with the number of steps done and that step's loss.

    Raises:
        RuntimeError: a loss or a gradient is not finite. Nothing was changed by that step.
        ValueError: in a process that is one of several, for batches without labels, for a model whose routers cannot be
            balanced or whose auxiliary loss has no known weight, and for options and parameters that `HybridMuon` and
            `parameter_roles` refuse.
        OSError: `checkpoint` cannot be written.
    """
    store = None if checkpoint is None else CheckpointStore(checkpoint)
    accelerator = make_accelerator()
    if accelerator.num_processes != 1:
        raise ValueError(f"{accelerator.num_processes} processes are joined; train runs in one.")
    model.to(accelerator.device)  # first: the optimizer looks at the device
    balancing = {"lr": settings.balancing_lr} if settings.balancing_lr > 0 else {"controller": "frozen"}
    optimizer = build_optimizer(
        model,
        muon_lr=settings.muon_lr,
        adamw_lr=settings.adamw_lr,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        momentum=settings.momentum,
        adjust_lr=settings.adjust_lr,
        newton_schulz_dtype=DTYPES.get(settings.newton_schulz_dtype or ""),
    )
    try:
        prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
        run = Run(
            accelerator=accelerator,
            model=prepared_model,
            optimizer=prepared_optimizer,
            schedule=lambda step: learning_rate_factor(step, settings.steps, settings.warmup_steps),
            data=_OneBatchAStep(batch_at),
            settings=StepSettings(
                steps=settings.steps,
                rows=1,
                gradient_clip=settings.gradient_clip,
                checkpoint_every=settings.checkpoint_every,
            ),
            guard=Guard(GuardConfig(spike_z=None, roll_back_after=1, max_roll_backs=0)),
            stopper=Stopper(signals=()),
            balancer=BiasBalancer.for_model(model, BalancingConfig(**balancing)),
        )
        log = _Log(run, on_step)
        run.recorder = log
        if store is not None:
            deciding = {name: value for name, value in asdict(settings).items() if name != "checkpoint_every"}
            # As JSON, in which a tuple of the settings comes back as a list.
            identity = json.loads(json.dumps({"fingerprint": fingerprint, "settings": deciding}))
            run.checkpoints = RunCheckpoints(
                store,
                facts=lambda: {"identity": identity, "log": log.state_dict()},
                accepts=lambda description: description.get("identity") == identity,
                restored=lambda description: log.load_state_dict(description["log"]),
            )
            run.checkpoints.restore(run)
        loop.train(run)
        return TrainingLog(log.losses, run.progress.seconds, run.progress.tokens, log.load())
    finally:
        accelerator.free_memory()
        if hasattr(model, "_is_accelerate_prepared"):  # else a later run would not move the model to its device
            del model._is_accelerate_prepared
        model.zero_grad(set_to_none=True)
        model.eval()


class _OneBatchAStep:
    """The batch of a step, as the only sample of its window."""

    def __init__(self, batch_at: Callable[[int], Mapping[str, Tensor]]):
        self._batch_at = batch_at

    def micro_batches(
        self, first_sample: int, count: int, rank: int = 0, world_size: int = 1, micro_rows: int = 1
    ) -> list[Mapping[str, Tensor]]:
        return [self._batch_at(first_sample)]


class _Log:
    """Keeps the losses and loads, and tells the caller of each step."""

    def __init__(self, run: Run, on_step: Callable[[int, float], None] | None):
        self.losses: list[float] = []
        self._violations: deque[list[float]] = deque(maxlen=LOAD_STEPS)
        self._run, self._on_step = run, on_step

    def step(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        balancer, checkpoints = self._run.balancer, self._run.checkpoints
        if balancer is not None and (violation := balancer.max_violation()) is not None:
            self._violations.append(violation.tolist())
        try:
            if self._on_step is not None:
                self._on_step(record["step"], record["loss"])
        except KeyboardInterrupt:
            if checkpoints is not None:
                checkpoints.save(self._run)
            raise

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Nothing but steps is kept."""

    def evaluation(self, record: dict[str, Any]) -> None:
        """There is none."""

    def rewind(self, step: int, evaluated: int | None = None) -> None:
        """There is no way back."""

    def sync(self) -> None:
        """The records are in the checkpoint."""

    def load(self) -> list[float] | None:
        return torch.tensor(list(self._violations)).mean(dim=0).tolist() if self._violations else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "violations": list(self._violations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        self._violations = deque(state["violations"], maxlen=LOAD_STEPS)
