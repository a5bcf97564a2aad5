"""Checks of what callers hand to the model's forward pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

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


def check_names(arguments: Mapping[str, Any]) -> None:
    """Refuse further arguments that nobody reads although they speak of documents or padding, and what ZAYA is not.

    Raises:
        TypeError: naming the right argument.
        ValueError: for ``is_causal=False``.
    """
    if arguments.get("is_causal") is False:
        raise ValueError("is_causal=False: ZAYA has no bidirectional form, its convolutions look backwards only.")
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
    wrong = None if input_ids is None else _outside(input_ids, 0, vocab_size - 1)
    if wrong is not None:
        raise ValueError(f"input_ids contain {wrong}; ids must lie in 0 ... {vocab_size - 1}.")


def check_embeds(inputs_embeds: Tensor, hidden_size: int) -> None:
    """Refuse embeddings that are not ``[rows, tokens, hidden_size]``.

    Raises:
        ValueError: naming the shape.
    """
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != hidden_size:
        given = tuple(inputs_embeds.shape)
        raise ValueError(f"inputs_embeds have shape {given}; expected [rows, tokens, {hidden_size}].")


def slots_per_layer(
    routed_experts: Tensor | Sequence[Tensor] | None, of: Tensor, num_layers: int, num_experts: int
) -> list[Tensor | None]:
    """The slots that each layer's router is told to take, ``[B, S]`` int64, or None.

    Args:
        routed_experts: ``[B, S, layers]`` or ``[B, S, layers, 1]`` of any integer dtype, or ``[B, S]`` for each layer.
        of: ``[B, S, ...]``, the tokens of the call.
        num_layers, num_experts: of the model.

    Raises:
        ValueError: for other shapes and dtypes; for slots outside -1 ... num_experts where `check_ids` would look.
        TypeError: for what is neither a tensor nor tensors.
    """
    if routed_experts is None:
        return [None] * num_layers
    expected = f"[{of.shape[0]}, {of.shape[1]}, {num_layers}]"
    if not isinstance(routed_experts, Tensor):
        layers = list(routed_experts) if isinstance(routed_experts, Sequence) else [routed_experts]
        if not layers or not all(isinstance(layer, Tensor) for layer in layers):
            raise TypeError(f"routed_experts have to be a tensor {expected}, or one tensor per layer.")
        if len({layer.shape for layer in layers}) > 1:
            shapes = ", ".join(str(tuple(layer.shape)) for layer in layers)
            raise ValueError(f"routed_experts have one tensor per layer, of different shapes: {shapes}.")
        routed_experts = torch.stack([layer.to(of.device) for layer in layers], dim=-1)
    shape = tuple(routed_experts.shape)
    if shape[:3] != (*of.shape[:2], num_layers) or shape[3:] not in ((), (1,)):
        raise ValueError(
            f"routed_experts have shape {shape}; expected {expected}, that is, rows, tokens of this call, layers."
        )
    if routed_experts.dtype == torch.bool or routed_experts.is_floating_point() or routed_experts.is_complex():
        raise ValueError(f"routed_experts have dtype {routed_experts.dtype}; expected int64 or another integer.")
    slots = routed_experts.view(*shape[:3]).to(of.device, torch.long)
    wrong = _outside(slots, -1, num_experts)
    if wrong is not None:
        raise ValueError(
            f"routed_experts contain {wrong}; slots lie in 0 ... {num_experts - 1}, {num_experts} skips the experts, "
            "-1 leaves the choice to the router."
        )
    return list(slots.unbind(-1))


def _outside(values: Tensor, lowest: int, highest: int) -> int | None:
    """A value outside the bounds, if there is one and looking is free, or asked for with ZAYA_DEBUG=1."""
    if is_tracing(values) or values.numel() == 0:
        return None
    if values.device.type != "cpu" and os.environ.get("ZAYA_DEBUG") != "1":
        return None
    low, high = (int(bound) for bound in values.aminmax())
    return low if low < lowest else high if high > highest else None


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
    first = segments != torch.nn.functional.pad(segments, (1, 0), value=PADDING - 1)[:, :-1]
    return labels.masked_fill((first | (segments == PADDING)).to(labels.device), ignore_index)
