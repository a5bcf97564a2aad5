"""Muon's update of matrices: where a process has whole ones, and all of one shape in one batched iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .newton_schulz import orthogonalise

__all__ = ["ADJUSTMENTS", "Matrices", "is_whole", "placements", "update_all", "whole_matrices"]

ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
# Elements that one batched iteration may hold: it needs about four times as much memory as its input. A single
# parameter is never divided; 2**28 are two of ZAYA1-8B's largest.
BATCH_ELEMENTS = 2**28


@dataclass
class Matrices:
    """One parameter, its gradient and momentum, and where they take part in a batch."""

    group: dict[str, Any]
    parameter: Tensor  # [..., rows, columns], a view if gate and up are apart; so are the others
    gradient: Tensor
    momentum: Tensor  # with the gradient in it

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        return self.parameter.shape[-2], self.parameter.shape[-1]

    def update(self) -> Tensor:
        """What is to be orthogonalised. Made when its batch is, since all together are as large as the model."""
        if not self.group["nesterov"]:
            return self.momentum
        return self.gradient.lerp(self.momentum, self.group["momentum"])

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """What has to be equal for two to share a batched iteration."""
        group = self.group
        iteration = (tuple(group["ns_coefficients"]), group["ns_steps"], group["muon_eps"])
        return (*sorted(self.rows_and_columns), self.parameter.device, group["newton_schulz_dtype"], *iteration)

    def lay_flat(self, matrices: Tensor) -> Tensor:
        """A view with fewer rows than columns: torch's Muon transposes too."""
        rows, columns = self.rows_and_columns
        return matrices.mT if rows > columns else matrices


def placements(tensor: Tensor) -> tuple[Any, ...]:
    """How a DTensor is spread over the processes; nothing for a plain tensor."""
    return tuple(getattr(tensor, "placements", ()))


def is_whole(tensor: Tensor) -> bool:
    """Whether the matrices that a process has of a parameter are whole ones."""
    return all(p.is_replicate() or (tensor.ndim == 3 and p.is_shard(0)) for p in placements(tensor))


def whole_matrices(tensor: Tensor, role: str) -> Tensor:
    """The whole matrices ``[..., rows, columns]`` that this process has of a parameter, or of a tensor laid out like
    it, as a view: what is written into it is written into the tensor.

    For DTensors it is the local part, see `is_whole`. Replicas each do the same work.
    """
    local = tensor.to_local() if placements(tensor) else tensor  # type: ignore[attr-defined]
    return local.unflatten(1, (2, -1)) if role == "gate_up_experts" else local


def _divide(members: list[Matrices]) -> Iterator[list[Matrices]]:
    """`members` in order, in batches of up to `BATCH_ELEMENTS`."""
    batch: list[Matrices] = []
    size = 0
    for member in members:
        if batch and size + member.parameter.numel() > BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(member)
        size += member.parameter.numel()
    if batch:
        yield batch


def update_all(members: list[Matrices]) -> None:
    """Orthogonalise the updates of `members`, which share a `batch_key`, and apply them."""
    for batch in _divide(members):
        _update_at_once(batch)


def _update_at_once(members: list[Matrices]) -> None:
    rows, columns = sorted(members[0].rows_and_columns)
    counts = [member.parameter.numel() // (rows * columns) for member in members]
    group = members[0].group
    stack = members[0].parameter.new_empty(sum(counts), rows, columns, dtype=group["newton_schulz_dtype"])
    for member, part in zip(members, stack.split(counts), strict=True):
        update = member.lay_flat(member.update())
        part.view(update.shape).copy_(update)
    stack = orthogonalise(stack, group["ns_coefficients"], group["ns_steps"], group["muon_eps"])
    for member, part in zip(members, stack.split(counts), strict=True):
        lr = member.group["lr"]
        target = member.lay_flat(member.parameter)
        member.parameter.mul_(1 - lr * member.group["weight_decay"])
        adjusted = lr * ADJUSTMENTS[member.group["adjust_lr"]](*member.rows_and_columns)
        target.add_(part.view(target.shape), alpha=-adjusted)
