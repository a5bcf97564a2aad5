"""One training loop for every model family, on `accelerate.Accelerator`.

A run is a function of the model's values, the batches by step, the settings and the random generators. Batches come by
number, not from an iterator, so a run that goes on from a checkpoint needs no other state than the step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from . import checkpoint as checkpoints
from .balancing import BiasBalancer
from .optim import ADJUSTMENTS, build_optimizer
from .schedule import learning_rate_factor

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
        losses: nats per token, one per step, before the step's update; the language-model loss without auxiliary ones.
        seconds: spent in steps; writing checkpoints, `on_step` and building things are not in it.
        tokens: ids in all batches, padding too.
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
        checkpoint: folder for checkpoints; None: there are none. See `checkpoint.remove_checkpoint`.
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
    if checkpoint is not None:
        checkpoint.mkdir(parents=True, exist_ok=True)  # a place that cannot be written to shows before the first step
    # Without a GPU, accelerate would look for other devices, with numbers of their own.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # a number may be in the environment
    )
    if accelerator.num_processes != 1:
        raise ValueError(f"{accelerator.num_processes} processes are joined; train runs in one.")
    try:
        return _Run(accelerator, model, settings).train(batch_at, checkpoint, fingerprint, on_step)
    finally:
        accelerator.free_memory()
        if hasattr(model, "_is_accelerate_prepared"):  # else a later run would not move the model to its device
            del model._is_accelerate_prepared
        model.zero_grad(set_to_none=True)
        model.eval()


class _Run:
    """A model with all that trains it."""

    def __init__(self, accelerator: Accelerator, model: PreTrainedModel, settings: LoopSettings):
        self.accelerator, self.settings = accelerator, settings
        model.to(accelerator.device)  # first: the optimizer looks at the device
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
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps, settings.warmup_steps))
        self.balancer = BiasBalancer.for_model(model, settings.balancing_lr)
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)
        if self.balancer is not None:
            accelerator.register_for_checkpointing(self.balancer)
        self.forward_options: dict[str, Any] = {"use_cache": False}
        if hasattr(model.config, "output_router_logits"):  # counts of ZAYA's routers, auxiliary losses of others
            self.forward_options["output_router_logits"] = True

        self.losses: list[float] = []
        self.seconds = 0.0
        self.tokens = 0
        self.violations: deque[Tensor] = deque(maxlen=LOAD_STEPS)

    def train(
        self,
        batch_at: Callable[[int], Mapping[str, Tensor]],
        checkpoint: Path | None,
        fingerprint: str,
        on_step: Callable[[int, float], None] | None,
    ) -> TrainingLog:
        deciding = {name: value for name, value in asdict(self.settings).items() if name != "checkpoint_every"}
        identity = {"fingerprint": fingerprint, "settings": deciding}
        saved = self._resume(checkpoint, identity)
        steps, every = self.settings.steps, self.settings.checkpoint_every
        self.model.train()
        for step in range(saved, steps):
            started = time.perf_counter()
            self._step(step, batch_at(step))
            self.seconds += time.perf_counter() - started
            due = step + 1 == steps or (every > 0 and (step + 1) % every == 0)
            try:
                if on_step is not None:
                    on_step(step + 1, self.losses[-1])
            except KeyboardInterrupt:
                self._save(checkpoint, identity)
                raise
            if due:
                self._save(checkpoint, identity)
        load = torch.stack(list(self.violations)).mean(dim=0).tolist() if self.violations else None
        return TrainingLog(self.losses, self.seconds, self.tokens, load)

    def _step(self, step: int, batch: Mapping[str, Tensor]) -> None:
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        output = self.model(**batch, **self.forward_options)
        language_loss = self._language_loss(output)
        if self.balancer is not None:
            self._observe(output, self.balancer)
        self.accelerator.backward(output.loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        # The one point at which the host waits for the device.
        total, loss, norm = torch.stack([output.loss.detach(), language_loss, norm.to(language_loss.dtype)]).tolist()
        if not (math.isfinite(total) and math.isfinite(norm)):
            what = f"the gradient's norm is {norm}" if math.isfinite(total) else f"the loss is {total}"
            raise RuntimeError(f"{what} at step {step + 1} of {self.settings.steps}: training diverged.")
        if self.balancer is not None:
            self.balancer.step()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.balancer is not None and (violation := self.balancer.max_violation()) is not None:
            self.violations.append(violation)
        self.losses.append(loss)
        self.tokens += batch["input_ids"].numel()

    def _language_loss(self, output: Any) -> Tensor:
        """The loss without what a model adds to it for its routers."""
        if output.loss is None:
            raise ValueError("the batch has no labels, so there is no loss to train on.")
        loss: Tensor = output.loss.detach()
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is None:
            return loss
        weight = getattr(self.model, "router_aux_loss_coef", None)
        if weight is None:
            raise ValueError(
                f"{type(self.model).__name__} adds an auxiliary loss of unknown weight to its loss: expected an "
                "attribute router_aux_loss_coef, as of transformers' other mixtures of experts."
            )
        return loss - weight * auxiliary.detach().to(loss)

    def _observe(self, output: Any, balancer: BiasBalancer) -> None:
        counts = getattr(output, "tokens_per_slot", None)
        if counts is not None:
            balancer.observe(counts)
        elif self.settings.balancing_lr > 0:
            raise ValueError(
                f"{type(self.model).__module__}.{type(self.model).__name__} has balancing biases but its output has no "
                "tokens_per_slot: use zaya_hf's ZayaForCausalLM, or balancing_lr=0."
            )

    def _save(self, checkpoint: Path | None, identity: dict[str, Any]) -> None:
        if checkpoint is None:
            return
        progress = {
            "losses": self.losses,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "violations": [violation.tolist() for violation in self.violations],
        }
        checkpoints.save(self.accelerator, checkpoint, len(self.losses), identity, progress)

    def _resume(self, checkpoint: Path | None, identity: dict[str, Any]) -> int:
        """Steps done before this call."""
        found = None if checkpoint is None else checkpoints.load(self.accelerator, checkpoint, identity)
        if found is None:
            return 0
        step, progress = found
        self.losses, self.seconds, self.tokens = (progress[name] for name in ("losses", "seconds", "tokens"))
        self.violations.extend(
            torch.tensor(values, device=self.accelerator.device) for values in progress["violations"]
        )
        return step
