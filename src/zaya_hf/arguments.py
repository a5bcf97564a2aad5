"""Checks of what callers hand to the model's forward pass."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from .history import PADDING
from .visibility import is_free_to_read

#: Names under which documents and padding go elsewhere, and what they are called here. Left unread, they would let
#: tokens see what they must not see.
OTHER_NAMES = {
    "attention_masks": "attention_mask",
    "attn_mask": "attention_mask",
    "key_padding_mask": "attention_mask (with 1 for real tokens)",
    "padding_mask": "attention_mask",
    "cu_seqlens": "cu_seq_lens_q",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "cu_seq_lens": "cu_seq_lens_q",
    "document_ids": "seq_idx",
    "segment_ids": "seq_idx",
    "sequence_ids": "seq_idx",
}


def check_names(arguments: Iterable[str]) -> None:
    """Refuse names of arguments that nobody reads although they speak of documents or padding.

    Raises:
        TypeError: naming the right argument.
    """
    for name in arguments:
        if name in OTHER_NAMES:
            raise TypeError(f"forward() does not know {name!r}; pass it as {OTHER_NAMES[name]}.")


def one_cu_seq_lens(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """The cumulative lengths, given for queries, keys or both.

    Raises:
        ValueError: when both are given and differ: queries and keys of one call are the same tokens.
    """
    if queries is None or keys is None or queries is keys:
        return keys if queries is None else queries
    same = queries.shape == keys.shape
    if same and is_free_to_read(queries):
        same = bool((queries == keys).all())
    if not same:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k describe different documents; they must be equal.")
    return queries


def check_ids(input_ids: Tensor | None, vocab_size: int) -> None:
    """Refuse ids that are not rows of whole numbers or lie outside the vocabulary.

    Reading their values would stall an accelerator: there that is done only with ZAYA_DEBUG=1.

    Raises:
        ValueError: naming the shape, the dtype or the id.
    """
    if input_ids is not None and input_ids.ndim != 2:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)}; expected [rows, tokens].")
    if input_ids is not None and (input_ids.is_floating_point() or input_ids.dtype == torch.bool):
        raise ValueError(f"input_ids have dtype {input_ids.dtype}; expected int64 or int32.")
    if input_ids is None or is_tracing(input_ids) or input_ids.numel() == 0:
        return
    if input_ids.device.type != "cpu" and os.environ.get("ZAYA_DEBUG") != "1":
        return
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids contain {wrong}; ids must lie in 0 ... {vocab_size - 1}.")


def without_boundary_targets(labels: Tensor, segments: Tensor | None, ignore_index: int = -100) -> Tensor:
    """Labels without those that a token would have to predict across a border: the first token of a document, whose
    predecessor belongs to another one or is padding, and padding itself.

    Args:
        labels: ``[B, S]`` int64, not shifted.
        segments: ``[B, S]`` document of each token, -1 for padding; None: each row is one document.

    Returns:
        ``[B, S]``.
    """
    if segments is None or segments.shape != labels.shape:
        return labels
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return labels.masked_fill((first | (segments == PADDING)).to(labels.device), ignore_index)
