"""Next-token loss, normalised by the number of targets: of logits, or of what the head would make logits of."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import slice_logits_to_keep

from . import ops
from .fusing import is_only_its_weights
from .ops.linear_cross_entropy import loss_of_logits


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    **kwargs: object,
) -> Tensor:
    """Cross-entropy of token t + 1 given logits t, in fp32 or wider.

    The model's forward pass hands its further arguments on, so ``model(ids, labels=ids, z_loss=1e-4)`` sets one for a
    call, and ``model.loss_function = functools.partial(causal_lm_loss, z_loss=1e-4)`` for a trainer that calls the
    model itself.

    Args:
        logits: ``[B, S, vocab_size]``.
        labels: ``[B, S]`` int64, not shifted; positions with `ignore_index` are no targets.
        num_items_in_batch: number of targets to divide by (over all micro-batches and ranks, say); None: those of this
            call.
        shift_labels: ``[B, S]`` labels that are shifted already; they take precedence.
        z_loss: adds so many times the square of each target's ``logsumexp(logits)``, which keeps it near 0; summed and
            divided like the loss.
        logit_softcap: the loss is that of ``c * tanh(logits / c)`` with this c; None: of the logits as they are. The
            logits that the model returns are not changed. (Attention functions take a `softcap` of their own.)

    Returns:
        scalar; exactly 0, with zero gradients, when there is no target.

    Raises:
        ValueError: without labels, for labels that are not one whole number per row and column of `logits`, for a
            `z_loss` that is no finite number of at least 0, and a `logit_softcap` that is not above 0.
    """
    targets = _targets(logits, labels, shift_labels, ignore_index)
    total = loss_of_logits(logits.reshape(-1, vocab_size), targets, ignore_index, z_loss, logit_softcap)
    return total / _divisor(targets, num_items_in_batch, ignore_index)


def causal_lm_loss_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    wide_logits: bool = False,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    **kwargs: object,
) -> Tensor:
    """`causal_lm_loss` of ``hidden @ weight.T + bias``, which are never held for all tokens.

    Args:
        hidden: ``[B, S, D]``.
        weight, bias: ``[V, D]`` and ``[V]`` of the head.
        wide_logits: compute logits in fp32 or wider.

    The others, what is returned, and the errors are those of `causal_lm_loss`.
    """
    targets = _targets(hidden, labels, shift_labels, ignore_index)
    return ops.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets,
        divisor=_divisor(targets, num_items_in_batch, ignore_index),
        ignore_index=ignore_index,
        wide_logits=wide_logits,
        z_loss=z_loss,
        softcap=logit_softcap,
    )


def logits_and_loss(
    model: Any,
    hidden: Tensor,
    labels: Tensor | None,
    *,
    skip: bool,
    without: bool,
    logits_to_keep: int | Tensor,
    head_weight: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """What a causal model returns for its hidden states.

    Args:
        model: with `lm_head`, `loss_function` and `vocab_size`.
        hidden: ``[B, S, D]``.
        labels: ``[B, S]``; or `shift_labels` among `kwargs`, which go to the loss function.
        skip, without: what `skips_logits` says.
        logits_to_keep: the last n positions only (0: all), or an index tensor.
        head_weight: if given, stands for the head's own weight in a loss without logits, see `tied_embedding`.

    Returns:
        logits ``[B, kept, V]`` or None, and the loss or None.
    """
    with_loss = labels is not None or kwargs.get("shift_labels") is not None
    head = model.lm_head
    if without:
        weight = head.weight if head_weight is None else head_weight
        options = {**_options_of(model.loss_function), **kwargs, "wide_logits": head.config.fp32_logits}
        return None, causal_lm_loss_of_hidden(hidden, weight, head.bias, labels, **options)
    logits = head(slice_logits_to_keep(hidden, logits_to_keep))
    loss = model.loss_function(logits, labels, model.vocab_size, **kwargs) if with_loss else None
    return None if skip else logits, loss


def skips_logits(
    model: Any, with_loss: bool, logits_to_keep: int | Tensor, skip_logits: bool | None, head_is_plain: bool
) -> tuple[bool, bool]:
    """Whether no logits are returned, and whether the loss can do without them.

    Args:
        model, logits_to_keep: as for `logits_and_loss`.
        skip_logits: return no logits; None: only in training, with labels, for all positions, and with our own loss.
        head_is_plain: whether `lm_head` is of the class that multiplies and does no more.

    Raises:
        ValueError: for skip_logits=True where the logits are all that is asked for, or are needed by the loss function.
    """
    everything = isinstance(logits_to_keep, int) and logits_to_keep == 0
    ours = _is_ours(model.loss_function)
    if skip_logits is None and with_loss:
        skip_logits = model.skip_logits  # a default of the user's own
    if skip_logits is None:
        skip_logits = model.training and with_loss and ours and everything
    elif skip_logits and not with_loss:
        raise ValueError("skip_logits=True leaves nothing to return: give labels or shift_labels.")
    elif skip_logits and not ours:
        raise ValueError("skip_logits=True, but the model's loss_function is not causal_lm_loss and needs logits.")
    without = skip_logits and everything and head_is_plain and is_only_its_weights(model.lm_head)
    return skip_logits, without


def _is_ours(function: Any) -> bool:
    """Whether it is `causal_lm_loss`, with options of its own perhaps."""
    if isinstance(function, functools.partial):
        return function.func is causal_lm_loss and not function.args
    return function is causal_lm_loss


def _options_of(function: Any) -> dict[str, Any]:
    return dict(function.keywords) if isinstance(function, functools.partial) else {}


def _targets(of: Tensor, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """``[B S]`` int64: for each row and column of ``of[B, S, ...]`` the id of the next token, on its device."""
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if given is None:
        raise ValueError("causal_lm_loss needs labels or shift_labels.")
    if given.shape != of.shape[:-1]:
        raise ValueError(
            f"{name} have shape {list(given.shape)}, but there are logits for {list(of.shape[:-1])}; they need the "
            "same rows and tokens, so leave logits_to_keep out when there are labels."
        )
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"{name} have dtype {given.dtype}; expected int64 or int32.")
    targets = F.pad(given, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else given
    return targets.reshape(-1).to(of.device, torch.long)


def _divisor(targets: Tensor, num_items_in_batch: Tensor | int | None, ignore_index: int) -> Tensor:
    """By what the sum over `targets` is divided; on their device."""
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    if not isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = torch.tensor(num_items_in_batch)
    return num_items_in_batch.to(targets.device).clamp_min(1)
