"""Losses of the task heads: transformers' values, with labels that are checked and a config that is left alone.

transformers writes the guessed `problem_type` into the config, so that the first batch decides what is saved; here it
is guessed anew each time. A call without any label has the loss 0, as everywhere in this package.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .json_checks import PROBLEM_TYPES
from .ops.numerics import promote
from .visibility import is_free_to_read

_IGNORED = -100


def row_loss(
    logits: Tensor,
    labels: Tensor,
    config: Any,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Loss of one label, several labels or numbers per row, in fp32 or wider.

    Args:
        logits: ``[B, num_labels]``.
        labels: see `ZayaForSequenceClassification.forward`.
        config: for `problem_type` and `num_labels`.
        num_items_in_batch: labels to divide by, for micro-batches; None: those of this call.

    Raises:
        ValueError: naming shapes, or the label that is out of range; TypeError for labels that are no tensor.
    """
    rows, width = logits.shape
    kind = config.problem_type or _kind_of(labels, width)
    if kind not in PROBLEM_TYPES:
        raise ValueError(f"config.problem_type is {kind!r}; expected {', '.join(PROBLEM_TYPES)} or None.")
    if kind == "single_label_classification":
        several = "; floats or bools for several labels at once" if config.problem_type is None else ""
        _check_shape("labels", labels, ((rows,), (rows, 1)), several)
    elif kind == "regression" and width == 1:
        _check_shape("labels", labels, ((rows,), (rows, 1)))
    else:
        _check_shape("labels", labels, ((rows, width),))
    labels, logits = labels.to(logits.device), promote(logits)
    if kind == "single_label_classification":
        return _cross_entropy("labels", logits, labels.reshape(rows), num_items_in_batch)
    targets = labels.reshape(logits.shape).to(logits.dtype)
    if kind == "regression":
        total = F.mse_loss(logits, targets, reduction="sum")
    else:
        if is_free_to_read(targets):
            wrong = targets[~((targets >= 0) & (targets <= 1))]
            if wrong.numel():
                raise ValueError(f"labels contain {float(wrong[0]):g}; expected 0 ... 1, for each label of the row.")
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return total / _divisor(targets.numel(), num_items_in_batch, logits)


def token_loss(
    logits: Tensor, labels: Tensor, config: Any, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
) -> Tensor:
    """Cross-entropy of every token's own label, in fp32 or wider.

    Args:
        logits: ``[B, S, num_labels]``.
        labels: ``[B, S]`` int64; -100 marks tokens without a label.

    Raises:
        ValueError: naming shapes, or the label that is out of range; TypeError for labels that are no tensor.
    """
    _check_shape("labels", labels, (tuple(logits.shape[:-1]),))
    flat = labels.to(logits.device).flatten()
    return _cross_entropy("labels", promote(logits).flatten(0, 1), flat, num_items_in_batch)


def answer_loss(
    start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor, **kwargs: Any
) -> Tensor:
    """Mean of the cross-entropies of the first and the last column of the answers, ``[B]`` each.

    Raises:
        ValueError: naming shapes; TypeError for positions that are no tensor.
    """
    rows, length = start_logits.shape
    losses = []
    for name, logits, given in (
        ("start_positions", start_logits, start_positions),
        ("end_positions", end_logits, end_positions),
    ):
        _check_shape(name, given, ((rows,), (rows, 1)))
        columns = given.reshape(rows).to(logits.device)
        inside = (columns >= 0) & (columns < length)
        losses.append(_cross_entropy(name, promote(logits), columns.masked_fill(~inside, _IGNORED), None))
    return (losses[0] + losses[1]) / 2


def _kind_of(labels: Tensor, num_labels: int) -> str:
    if num_labels == 1:
        return "regression"
    several = isinstance(labels, Tensor) and (labels.is_floating_point() or labels.dtype == torch.bool)
    return "multi_label_classification" if several else "single_label_classification"


def _check_shape(name: str, given: Tensor, right: tuple[tuple[int, ...], ...], hint: str = "") -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} are a {type(given).__name__}; expected a tensor.")
    if tuple(given.shape) not in right:
        shapes = " or ".join(str(list(shape)) for shape in right)
        raise ValueError(f"{name} have shape {list(given.shape)}; expected {shapes}{hint}.")


def _cross_entropy(name: str, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Of ``[N, classes]`` and ``[N]``; 0 without any label. Errors speak of `name`."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} have dtype {labels.dtype}; expected int64 or int32.")
    given = labels != _IGNORED
    if is_free_to_read(labels):
        wrong = labels[given & ((labels < 0) | (labels >= logits.shape[-1]))]
        if wrong.numel():
            right = f"expected 0 ... {logits.shape[-1] - 1}, or -100 for none"
            raise ValueError(f"{name} contain {int(wrong[0])}; {right} (num_labels is the head's width).")
    total = F.cross_entropy(logits, labels.long(), ignore_index=_IGNORED, reduction="sum")
    return total / _divisor(given.sum(), num_items_in_batch, logits)


def _divisor(found: Tensor | int, num_items_in_batch: Tensor | int | None, logits: Tensor) -> Tensor:
    count = found if num_items_in_batch is None else num_items_in_batch
    return torch.as_tensor(count, device=logits.device).clamp_min(1)


__all__ = ["answer_loss", "row_loss", "token_loss"]
