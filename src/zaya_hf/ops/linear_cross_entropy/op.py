"""Which implementation of the loss runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
from . import chunked, compiled, options, reference


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | None = None,
    ignore_index: int = -100,
    wide_logits: bool = False,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Sum of ``-log softmax(hidden[n] @ weight.T + bias)[targets[n]]`` over the rows that have a target.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``, and `bias` ``[V]``.
        targets: ``[N]`` int64; rows with `ignore_index` have none, and get gradients of exactly 0.
        divisor: scalar to divide the sum by, a constant; None: 1. Gradients are rounded once if it is given here.
        wide_logits: compute the logits in fp32 or wider; else in the dtype of `hidden`. Under autocast, in its dtype.
        z_loss: adds so many times the square of ``logsumexp(logits[n])`` to the sum, for the same rows.
        softcap: logits are ``softcap * tanh(logits / softcap)``, in fp32 or wider; None: as they are.

    Returns:
        scalar, fp32 or wider.

    Raises:
        IndexError: on a CPU, for a target that is no row of `weight`. On a GPU torch stops the program, and with the
            kernel loss and gradients are NaN.
        ValueError: for a `z_loss` or a `softcap` that makes no sense.
    """
    options.check(z_loss, softcap)
    chosen: Any = reference
    if not selection.reference_only("linear_cross_entropy"):
        why_not = _declines() or chunked.declines(hidden, weight, bias, targets, wide_logits)
        if why_not is None:
            chosen = compiled if torch.compiler.is_compiling() else chunked
        elif selection.wants_triton("linear_cross_entropy", hidden.device):
            selection.say_once("linear_cross_entropy", why_not)
    loss: Tensor = chosen.linear_cross_entropy(
        hidden,
        weight,
        bias,
        targets,
        divisor=divisor,
        ignore_index=ignore_index,
        wide_logits=wide_logits,
        z_loss=z_loss,
        softcap=softcap,
    )
    return loss


def loss_of_logits(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0, softcap: float | None = None
) -> Tensor:
    """The sum of `linear_cross_entropy` where the logits are there.

    Args:
        logits: ``[N, V]``.
        targets, ignore_index, z_loss, softcap: as there.

    Returns:
        scalar, fp32 or wider.

    Raises:
        ValueError: for a `z_loss` or a `softcap` that makes no sense.
    """
    options.check(z_loss, softcap)
    return reference.of_logits(logits, targets, ignore_index, z_loss, softcap)


def _declines() -> str | None:
    """Why neither a function whose gradient is written out nor an operator can be used now."""
    if torch.compiler.is_compiling():
        return compiled.declines()
    return None if selection.is_eager() else "a trace or a transform of torch.func is on"


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    return selection.outcome(
        "linear_cross_entropy",
        device,
        ("chunked", "all but exports, transforms of torch.func and tensor subclasses"),
        declined=None if facts is None else chunked.kernels_decline(facts.dtype),
    )
