"""The training loop. A run is a function of the model's values, the data by number, the settings and the generators."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .distributed import total
from .forward import forward, targets_and_tokens
from .guard import Diverged, Judgement, Verdict
from .parts import Run
from .records import step_record
from .stopping import EXIT_CODES, reason_of

__all__ = ["Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    """How `train` ended.

    Attributes:
        steps: done in all, also before this call.
        stopped: one of `stopping.REASONS`; None: the run is complete.
    """

    steps: int
    stopped: str | None = None

    @property
    def exit_code(self) -> int:
        """What the process is to end with."""
        return 0 if self.stopped is None else EXIT_CODES[self.stopped]


def train(run: Run) -> Outcome:
    """Train `run` from where its progress is to its last step, or until it is told to stop; collective.

    A step whose loss or gradient the guard finds bad changes no weight, no bias and no state of an optimizer; it counts
    as a step all the same, and its data is used up. After too many in a row the run goes back to the newest checkpoint
    from before them, and the data windows they were made of are left out from then on. (So that there is one, a run
    that may go back writes a checkpoint before its first step.)

    A checkpoint is written when it is due, at the end, and when the run is told to stop, which an evaluation that is
    due does not delay: it then comes first when the run goes on. None is due in the middle of a row of bad steps.

    Raises:
        Diverged: bad steps, and no way back that is left.
        ValueError: for batches without labels; for a model whose output lacks the counts that the balancer needs, or
            that adds an auxiliary loss of unknown weight.
        KeyboardInterrupt: at the second SIGINT.
    """
    run.model.train()
    try:
        with run.stopper:
            if run.progress.saved < 0 and run.guard.config.max_roll_backs > 0:
                _save(run)
            _evaluate(run)
            while run.progress.step < run.settings.steps:
                judgement, stop = _step(run)
                if judgement.verdict is Verdict.ROLL_BACK:
                    _roll_back(run, judgement.reason)
                elif stop is None:
                    _evaluate(run)
                if stop is not None or _checkpoint_is_due(run):
                    _save(run)
                if stop is not None:
                    _event(run, "stop", reason=stop)
                    return Outcome(run.progress.step, stop)
    finally:
        run.optimizer.zero_grad(set_to_none=True)
    return Outcome(run.progress.step)


def _step(run: Run) -> tuple[Judgement, str | None]:
    """One step; how it was judged, and why the run should stop after it."""
    started = time.perf_counter()
    accelerator, settings, progress, window = run.accelerator, run.settings, run.progress, run.progress.window
    rank, world_size = accelerator.process_index, accelerator.num_processes
    batches = run.data.micro_batches(window * settings.rows, settings.rows, rank, world_size, settings.micro_rows)
    data_seconds = time.perf_counter() - started
    for group, peak in zip(run.optimizer.param_groups, run.peaks, strict=True):
        group["lr"] = peak * run.schedule(progress.step)

    counts = total(accelerator, targets_and_tokens(batches).to(accelerator.device))
    losses = _backward(run, batches, targets=counts[0].clamp_min(1))
    norm = accelerator.clip_grad_norm_(run.model.parameters(), settings.gradient_clip).double()

    flags = torch.tensor(run.stopper.flags(), dtype=torch.float64, device=accelerator.device)
    own = torch.cat([losses, norm[None] / world_size, flags])
    # Here the host waits for the device. All processes then have the same numbers, and decide alike.
    numbers = torch.cat([total(accelerator, own), counts.double()]).tolist()
    (minimised, loss, grad_norm), (targets, tokens), stop = numbers[:3], numbers[-2:], reason_of(numbers[3:-2])
    if targets:
        judgement = run.guard.judge(minimised, grad_norm, step=progress.step, window=window)
    else:
        judgement = Judgement(Verdict.SKIP, "there are no targets")

    if judgement.verdict is Verdict.TAKE:
        if run.balancer is not None:
            run.balancer.step(functools.partial(total, accelerator))
        run.optimizer.step()
        if run.ema is not None:
            run.ema.update()
    elif run.balancer is not None:
        run.balancer.discard()
    run.optimizer.zero_grad(set_to_none=True)

    progress.step += 1
    progress.tokens += int(tokens)
    seconds = time.perf_counter() - started
    progress.seconds += seconds
    if run.recorder is not None and judgement.verdict is not Verdict.ROLL_BACK:  # which forgets it at once
        measured = {"targets": int(targets), "loss": loss, "grad_norm": grad_norm}
        run.recorder.step(step_record(run, judgement, measured, seconds, data_seconds))
        if judgement.verdict is Verdict.SKIP:
            _event(run, "skip", reason=judgement.reason)
    return judgement, stop


def _backward(run: Run, batches: Sequence[Mapping[str, Tensor]], targets: Tensor) -> Tensor:
    """Forward and backward over the micro-batches: the gradient of the step, the same in all processes.

    Returns:
        ``[2]`` fp64, this process's part of what is minimised and of the loss; each is a sum divided by `targets`.
    """
    accelerator, world_size = run.accelerator, run.accelerator.num_processes
    losses = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for number, batch in enumerate(batches, start=1):
        on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        with contextlib.nullcontext() if number == len(batches) else accelerator.no_sync(run.model):
            minimised, loss, output = forward(run, on_device, targets, share=1 / (len(batches) * world_size))
            accelerator.backward(minimised * world_size)  # DDP takes the mean of the processes' gradients
        losses += torch.stack([minimised.detach(), loss]).double()
        if run.balancer is not None:
            run.balancer.observe(getattr(output, "tokens_per_slot", None))
    return losses


def _roll_back(run: Run, reason: str) -> None:
    """Go back to before the bad steps, and leave their data out from now on."""
    guard, bad_at, settings = run.guard, run.progress.step, run.settings
    streak, roll_backs, left_out = guard.streak, guard.roll_backs, run.progress.skipped_windows
    where = f"{reason} at step {bad_at} of {settings.steps}: training diverged"
    if roll_backs == guard.config.max_roll_backs:
        raise Diverged(f"{where}, after {roll_backs} roll-backs." if roll_backs else f"{where}.")
    if run.checkpoints is None or not run.checkpoints.restore(run, at_most=streak[0][0]):
        raise Diverged(f"{where}, and there is no checkpoint of at most {streak[0][0]} steps to go back to.")
    run.model.train()
    guard.roll_backs, run.progress.skipped_windows = roll_backs + 1, left_out  # what a checkpoint does not know
    run.progress.skip(window for _, window in streak)
    if run.recorder is not None:
        run.recorder.rewind(run.progress.step, run.progress.evaluated)
    _event(run, "roll_back", bad_step=bad_at, reason=reason, left_out=[window for _, window in streak])


def _evaluate(run: Run) -> None:
    """Run the evaluators that are due, unless they did for this step."""
    step = run.progress.step
    if step == run.progress.evaluated:
        return
    for every, evaluator in run.evaluations:
        if step == run.settings.steps or (every > 0 and step % every == 0):
            record = evaluator.run(run.inner, step)
            if run.recorder is not None:
                run.recorder.evaluation(record)
    run.progress.evaluated = step


def _checkpoint_is_due(run: Run) -> bool:
    step, saved, every = run.progress.step, max(run.progress.saved, 0), run.settings.checkpoint_every
    if step == run.settings.steps:
        return True
    # Not in a row of bad steps: it would push out the one to go back to.
    return every > 0 and step // every > saved // every and not run.guard.streak


def _save(run: Run) -> None:
    """Write a checkpoint, unless the newest is of this step."""
    if run.checkpoints is None or run.progress.saved == run.progress.step:
        return
    started = time.perf_counter()
    before, run.progress.saved = run.progress.saved, run.progress.step
    try:
        if run.recorder is not None:
            run.recorder.sync()
        run.checkpoints.save(run)
    except BaseException:
        run.progress.saved = before
        raise
    seconds = time.perf_counter() - started
    run.stopper.saved(seconds)
    _event(run, "checkpoint", seconds=seconds)


def _event(run: Run, kind: str, **details: object) -> None:
    if run.recorder is not None:
        run.recorder.event(kind, run.progress.step, **details)
