"""One micro-batch through the model: what it counts, and what of its loss is minimised and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .data.rows import NO_TARGET
from .parts import Run

__all__ = ["forward", "targets_and_tokens"]


def targets_and_tokens(batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """``[2]`` int64: how many ids of `batches` are targets, and how many are no padding.

    Raises:
        ValueError: for a batch without labels.
    """
    targets = tokens = torch.zeros((), dtype=torch.int64)
    for batch in batches:
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif "labels" in batch:
            labels = batch["labels"][:, 1:]
        else:
            raise ValueError("the batch has no labels, so there is no loss to train on.")
        targets = targets + (labels != NO_TARGET).sum().cpu()
        mask = batch.get("attention_mask")
        tokens = tokens + (batch["input_ids"].numel() if mask is None else mask.sum().cpu())
    return torch.stack([targets, tokens])


def forward(run: Run, batch: Mapping[str, Tensor], targets: Tensor, share: float) -> tuple[Tensor, Tensor, Any]:
    """Run the model on one micro-batch.

    Args:
        targets: number to divide the sum of the losses by, those of the whole step.
        share: of this micro-batch in losses that are means over one: 1 / the number of micro-batches of the step.

    Returns:
        what is minimised; the language-model loss, detached, z-loss included; and the model's output. Both losses are
        this micro-batch's part of a sum over the step.

    Raises:
        ValueError: the model returns no loss, or adds an auxiliary one of unknown weight to it.
    """
    inner = run.inner
    options: dict[str, Any] = {"use_cache": False, "num_items_in_batch": targets}
    if hasattr(inner.config, "output_router_logits"):  # counts of ZAYA's routers, auxiliary losses of others
        options["output_router_logits"] = True
    if run.settings.z_loss:
        options["z_loss"] = run.settings.z_loss
    output = run.model(**batch, **options)
    if output.loss is None:
        raise ValueError(f"{type(inner).__name__} computes no loss from shift_labels alone: give labels beside them.")
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return output.loss, output.loss.detach(), output
    weight = getattr(inner, "router_aux_loss_coef", None)
    if weight is None:
        raise ValueError(
            f"{type(inner).__name__} adds an auxiliary loss of unknown weight to its loss: expected an attribute "
            "router_aux_loss_coef, as of transformers' other mixtures of experts."
        )
    auxiliary = weight * auxiliary.to(output.loss)
    minimised = output.loss if share == 1 else output.loss - (1 - share) * auxiliary
    return minimised, (output.loss - auxiliary).detach(), output
