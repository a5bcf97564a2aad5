"""Which implementation of the loss runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.facts import Facts
from . import chunked, reference


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | None = None,
    ignore_index: int = -100,
    wide_logits: bool = False,
) -> Tensor:
    """Sum of ``-log softmax(hidden[n] @ weight.T + bias)[targets[n]]`` over the rows that have a target.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``, and `bias` ``[V]``.
        targets: ``[N]`` int64; rows with `ignore_index` have none, and get gradients of exactly 0.
        divisor: scalar to divide the sum by, a constant; None: 1. Gradients are rounded once if it is given here.
        wide_logits: compute the logits in fp32 or wider; else in the dtype of `hidden`. Under autocast, in its dtype.

    Returns:
        scalar, fp32 or wider.

    Raises:
        IndexError: on a CPU, for a target that is no row of `weight`.
    """
    covered = chunked.covers(hidden, weight, bias, targets, wide_logits) and not selection.reference_only(
        "linear_cross_entropy"
    )
    chosen = chunked if covered else reference
    return chosen.linear_cross_entropy(
        hidden, weight, bias, targets, divisor=divisor, ignore_index=ignore_index, wide_logits=wide_logits
    )


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    return selection.outcome(
        "linear_cross_entropy", device, ("chunked", "all but traces, transforms of torch.func and tensor subclasses")
    )
