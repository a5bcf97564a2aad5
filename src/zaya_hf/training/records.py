"""What the loop tells of a step."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .guard import Judgement, Verdict
from .parts import Run

__all__ = ["memory_bytes", "step_record"]


def step_record(
    run: Run, judgement: Judgement, measured: dict[str, Any], seconds: float, data_seconds: float
) -> dict[str, Any]:
    """The record of a step that is done.

    Args:
        measured: over all processes: `targets`, `loss` (nats per target, with the z-loss if there is one) and
            `grad_norm` (before clipping).
        seconds: of the step.
        data_seconds: of them, waiting for its rows.

    Returns:
        these, and `step` (1 for the first), `tokens` (so far, over all processes, padding left out), `lr` and
        `adamw_lr` (of the optimizer's first and last group), `memory_bytes`, `skipped` (why, if it was) and `router`
        (the balancer's panel, when it is due).
    """
    groups, every = run.optimizer.param_groups, run.settings.router_panel_every
    record: dict[str, Any] = {
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        **measured,
        "lr": groups[0]["lr"],
        "adamw_lr": groups[-1]["lr"],
        "seconds": seconds,
        "data_seconds": data_seconds,
        "memory_bytes": memory_bytes(run.accelerator.device),
    }
    if judgement.verdict is not Verdict.TAKE:
        record["skipped"] = judgement.reason
    elif run.balancer is not None and every > 0 and run.progress.step % every == 0:
        record["router"] = run.balancer.panel()
    return record


def memory_bytes(device: torch.device) -> int | None:
    """The most that this process has held: of the GPU's memory, or else of the machine's. None where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
