"""Next-token loss, normalised by the number of targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .ops.numerics import promote


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Cross-entropy of token t + 1 given logits t, in fp32 or wider.

    Args:
        logits: ``[B, S, vocab_size]``.
        labels: ``[B, S]`` int64, not shifted; positions with `ignore_index` are no targets.
        num_items_in_batch: number of targets to divide by (over all micro-batches and ranks, say); None: those of this
            call.
        shift_labels: ``[B, S]`` labels that are shifted already; they take precedence.

    Returns:
        scalar; exactly 0, with zero gradients, when there is no target.

    Raises:
        ValueError: without labels, and for labels that are not one whole number per row and column of `logits`.
    """
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if given is None:
        raise ValueError("causal_lm_loss needs labels or shift_labels.")
    if given.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name} have shape {list(given.shape)}, but there are logits for {list(logits.shape[:-1])}; they need the "
            "same rows and tokens, so leave logits_to_keep out when there are labels."
        )
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"{name} have dtype {given.dtype}; expected int64 or int32.")
    targets = F.pad(given, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else given
    targets = targets.reshape(-1).to(logits.device, torch.long)
    total = F.cross_entropy(
        promote(logits).reshape(-1, vocab_size), targets, ignore_index=ignore_index, reduction="sum"
    )
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    if not isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = torch.tensor(num_items_in_batch)
    return total / num_items_in_batch.to(total.device).clamp_min(1)
