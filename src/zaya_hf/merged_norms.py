"""A merge into the stream and the norm that reads it as one operator, where that saves reading the stream again.

Inside a layer both modules are at hand. Between layers the merge belongs to one and the norm to the next, so the norm
is lent to the layer before, which returns what it gives beside its other results. That happens only where Triton's
kernels run and nobody could tell: not to or from a layer that is hooked, wrapped or replaced (sharded or offloaded
weights are gathered by hooks), and not with gradient checkpointing, which would keep what is handed on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .basic_layers import ZayaResidualScaling, ZayaRMSNorm
from .fusing import is_only_its_weights
from .ops import selection


def kernels_run(device: torch.device) -> bool:
    """Whether anything is to be gained on `device`."""
    return selection.wants_triton("residual_norm", device) and selection.triton_declines(device) is None


def merge_and_norm(
    scaling: nn.Module, norm: nn.Module | None, output: Tensor, residual: Tensor, stream_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The stream after a sublayer, and what `norm` makes of it.

    Args:
        scaling, norm: a `ZayaResidualScaling` and a `ZayaRMSNorm` (None: there is none here); what was put in the place
            of one is called.
        output, residual: ``[B, S, hidden_size]``, of the sublayer, and the stream before it.
        stream_dtype: what the stream is rounded to; None: not at all.
    """
    if (
        kernels_run(output.device)
        and type(scaling) is ZayaResidualScaling
        and is_only_its_weights(scaling)
        and _can_be_left_out(norm, output)
        and selection.are_plain(*scaling.vectors())
    ):
        assert isinstance(norm, ZayaRMSNorm)
        return ops.residual_merge_norm(
            output, residual, *scaling.vectors(), norm.weight, norm.eps, stream_dtype=stream_dtype
        )
    merged = scaling(output, residual)
    stream = merged if stream_dtype is None else merged.to(stream_dtype)
    return stream, None if norm is None else norm(stream)


def embed_and_norm(
    embeddings: Tensor, scale: Tensor, bias: Tensor, norm: ZayaRMSNorm | None, stream_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The stream that embeddings ``[B, S, hidden_size]`` begin, and what `norm`, if it was lent, makes of it."""
    if norm is not None:
        vectors = (scale, bias, None, None)
        return ops.residual_merge_norm(embeddings, None, *vectors, norm.weight, norm.eps, stream_dtype=stream_dtype)
    merged = ops.residual_merge(embeddings, None, scale, bias)
    return merged if stream_dtype is None else merged.to(stream_dtype), None


def lent(model: Any, layer_class: type, embeddings: Tensor) -> list[ZayaRMSNorm | None]:
    """The norms that are lent: to the embedding's merge, then to each layer. None: it is called by whom it belongs to.

    Args:
        model: a `ZayaModel`; its layers are `layer_class`, or what was put in their place.
        embeddings: ``[B, S, hidden_size]``, of this call.
    """
    layers = list(model.layers)
    if not kernels_run(embeddings.device):
        return [None] * (len(layers) + 1)
    free = [_hands_on(layer, layer_class) for layer in layers]
    norms = [layer.input_layernorm if one else None for layer, one in zip(layers, free, strict=True)] + [model.norm]
    # the merge before the first layer and the norm after the last are the model's own
    pairs = zip(norms, [True, *free], strict=True)
    return [norm if before and _can_be_left_out(norm, embeddings) else None for norm, before in pairs]


def call(
    layer: nn.Module, normed: Tensor | None, norm: ZayaRMSNorm | None, *arguments: Any, **options: Any
) -> tuple[Any, ...]:
    """Results of a layer, and last its stream as the norm makes it that it was lent (None: it was lent none).

    Args:
        layer: any; what was put in the place of ours is given neither of the two.
        normed: the input as the layer's own norm makes it; None: the layer calls it.
        norm: from `lent`.
        arguments, options: its others.
    """
    if normed is not None:
        options["normed"] = normed
    if norm is None:
        return *layer(*arguments, **options), None
    return layer(*arguments, lent_norm=norm, **options)


def _can_be_left_out(norm: Any, x: Tensor) -> bool:
    """Whether a norm is ours, its weight at hand, and its call not watched."""
    return (
        type(norm) is ZayaRMSNorm
        and is_only_its_weights(norm)
        and selection.are_plain(norm.weight)
        and norm.weight.device == x.device
    )


def _hands_on(layer: Any, layer_class: type) -> bool:
    """Whether a layer may do its neighbour's norm, and leave its own to the other neighbour."""
    kind: type = type(layer)
    return (
        kind is layer_class
        and not (layer.gradient_checkpointing and layer.training)
        and is_only_its_weights(layer, though_recorded=True)
    )
