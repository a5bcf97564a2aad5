"""fp32 products on a CPU through oneDNN.

torch gives fp32 products to MKL, which runs at less than half the speed of oneDNN on processors that are not Intel's,
and for a few rows at a quarter of it on any (benchmarks/NOTES.md). torch ships oneDNN and reaches it by the operator
that its own compiler uses for linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection

#: multiplications below which the call costs more than it saves: 10 us, against 2 us of torch's own product
FEWEST_MULTIPLICATIONS = 1_200_000


def _find_operator() -> Any:
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_OPERATOR = _find_operator()


def is_available() -> bool:
    """Whether this build of torch has oneDNN and the operator."""
    return _OPERATOR is not None


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of ``[..., K]`` and ``[N, K]`` should come here."""
    return (
        x.numel() * weight.shape[0] >= FEWEST_MULTIPLICATIONS
        and x.dtype == weight.dtype == torch.float32
        and _OPERATOR is not None
        and is_unwatched(x, weight)
    )


def is_unwatched(x: Tensor, weight: Tensor) -> bool:
    """Plain tensors on a CPU, and no trace, no transform of torch.func, no autocast and no mode that watches operators:
    these know torch's own product and not oneDNN's."""
    return bool(
        x.device.type == weight.device.type == "cpu"
        and selection.is_eager()
        and selection.are_plain(x, weight)
        and not torch.is_autocast_enabled("cpu")
        and torch._C._len_torch_dispatch_stack() == 0
        and torch.backends.mkldnn.enabled
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[..., K]``, ``[N, K]``, ``[N]`` -> ``[..., N]``; all fp32 on a CPU, see `covers`."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _Linear.apply(rows, weight)
        y = y if bias is None else y + bias
    else:
        y = multiply(rows, weight, bias)
    # No view where none is needed: autograd adds gradients in place only to tensors that own their memory.
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias`` outside the graph: ``[M, K]`` and ``[N, K]`` of any strides, ``[N]``."""
    return _OPERATOR(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """``a @ b.T``. Its gradients are products of the same kind, so it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        wanted_a, wanted_b = ctx.needs_input_grad  # what a frozen factor would need is not kept
        ctx.save_for_backward(a if wanted_b else None, b if wanted_a else None)
        return multiply(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        from .op import product

        a, b = ctx.saved_tensors
        (grad,) = grads
        wanted_a, wanted_b = ctx.needs_input_grad
        return product(grad, b.t()) if wanted_a else None, product(grad.t(), a.t()) if wanted_b else None
