"""One gradient for an embedding that is also the head: rows are added to it, no second tensor of its size is made.

Autograd would give a tied weight two gradients of its full size, ``[V, D]`` each (2.1 GB in fp32 for the 262,272 words
of ZAYA1): the head's, and one for the embedding that is zero but for the words of the batch; and then their sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fusing import is_only_its_weights


def can_share(embedding: Any, head: Any, input_ids: Tensor | None) -> bool:
    """Whether the embedding is plain, trained, and the head's weight."""
    if input_ids is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if type(embedding) is not nn.Embedding:
        return False
    weight = embedding.weight
    return (
        weight is getattr(head, "weight", None)
        and weight.requires_grad
        and type(weight) is nn.Parameter
        and not embedding.sparse
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and is_only_its_weights(embedding)
        and not torch._C._are_functorch_transforms_active()
        # elsewhere rows are added in any order, and each sum of a narrow dtype is rounded
        and weight.device.type == "cpu"
    )


def look_up(embedding: Any, input_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Embeddings ``[B, S, D]``, and the weight to multiply by in the head; both lead to one gradient.

    Args:
        embedding, input_ids: accepted by `can_share`; ids ``[B, S]`` inside the vocabulary.
    """
    rows, head_weight = _Fork.apply(embedding.weight)
    return _LookUp.apply(input_ids, rows, embedding.padding_idx), head_weight


class _Fork(torch.autograd.Function):
    """Two aliases of a weight, and the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        of_rows, of_head = grads
        if of_head is None:
            return of_rows.to_dense() if of_rows is not None and of_rows.is_sparse else of_rows
        if of_rows is None:
            return of_head
        # In place where the head's gradient is nobody else's: autograd passes on what it need not keep.
        alone = of_head._base is None and of_head.is_contiguous() and not of_head.requires_grad
        if not of_rows.is_sparse or torch.is_grad_enabled() or not alone:
            return of_head + of_rows
        return of_head.index_add_(0, of_rows._indices()[0], of_rows._values())


class _LookUp(torch.autograd.Function):
    """An embedding whose gradient names the rows that it is not zero in; words of padding get none."""

    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(input_ids)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return F.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (input_ids,) = ctx.saved_tensors
        ids, rows = input_ids.reshape(-1), grads[0].reshape(-1, ctx.shape[1])
        if torch.is_grad_enabled():  # to be differentiated again: the dense form
            if ctx.padding_idx is not None:
                rows = rows * (ids != ctx.padding_idx)[:, None]
            return None, rows.new_zeros(ctx.shape).index_add(0, ids, rows), None
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx)[:, None], 0)
        return None, torch.sparse_coo_tensor(ids[None].long(), rows, ctx.shape, check_invariants=False), None
