"""Cross-entropy of a linear layer, a chunk of rows at a time: there never are logits of all rows.

The gradients are computed in the forward pass, while a chunk's logits are there, so nothing is multiplied twice. Beside
its results the function needs one chunk of logits; for weights narrower than fp32 and several chunks also a second
tensor like the weight, which keeps what rounding takes from the sum of the chunks' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..linear import linear, product
from ..numerics import wide_dtype
from . import reference

#: bytes of a chunk of logits: so many, or half as many as the weight has elements if that is more. With fewer rows the
#: gradient of the weight is bound by memory: each chunk reads and writes all of it.
CHUNK_BYTES = 64 * 2**20
FEWEST_ROWS = 32
#: elements of a chunk whose softmax is taken at once: on a CPU what stays in its caches
BLOCK_ELEMENTS = {"cpu": 2**20}
#: elements of the weight's gradient that are added at once, where adding takes more than the product itself
SLICE_ELEMENTS = {"cpu": 2**22}
ELSEWHERE = 2**26  # both, on devices where a call costs more than memory

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias
NOTHING = (False, False, False)


def covers(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, wide_logits: bool) -> bool:
    """Whether these tensors can be computed here."""
    tensors = [hidden, weight, targets] if bias is None else [hidden, weight, targets, bias]
    floats = {tensor.dtype for tensor in tensors if tensor is not targets}
    return (
        selection.is_eager()
        and selection.are_plain(*tensors)
        and len({tensor.device for tensor in tensors}) == 1
        and hidden.device.type != "meta"
        and (len(floats) == 1 or (torch.float64 not in floats and (wide_logits or _autocasts(hidden))))
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | None = None,
    ignore_index: int = -100,
    wide_logits: bool = False,
) -> Tensor:
    """See `op.linear_cross_entropy`."""
    dtype = _product_dtype(hidden, wide_logits)
    if divisor is not None:
        divisor = divisor.detach().to(hidden.device, wide_dtype(dtype))
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if wanted:
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, divisor, ignore_index, dtype)
    with torch.no_grad():
        total, _ = _compute(hidden, weight, bias, targets, ignore_index, dtype, NOTHING, 1.0)
    return total if divisor is None else total / divisor


def _autocasts(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def _product_dtype(hidden: Tensor, wide_logits: bool) -> torch.dtype:
    """In what the reference would multiply."""
    if _autocasts(hidden) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return wide_dtype(hidden.dtype) if wide_logits else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        divisor: Tensor | None,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets, divisor)
        ctx.ignore_index, ctx.dtype, ctx.gradients = ignore_index, dtype, None
        # fp16 holds the gradients of logits only times the loss scale, which comes with the backward pass.
        later = dtype == torch.float16
        wanted = NOTHING if later else ctx.needs_input_grad[:3]
        scale = 1.0 if divisor is None else divisor.reciprocal()
        total, gradients = _compute(hidden, weight, bias, targets, ignore_index, dtype, wanted, scale)
        if not later:
            ctx.gradients = gradients
        return total if divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph: what was computed ahead is no function of the inputs
            return *_differentiable(ctx, grad), None, None, None, None
        # Given away, not kept: autograd can make them .grad without a copy, and they can be scaled in place.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # fp16, or the graph is used again
            hidden, weight, bias, targets, divisor = ctx.saved_tensors
            scale = grad if divisor is None else grad / divisor
            wanted = ctx.needs_input_grad[:3]
            _, gradients = _compute(hidden, weight, bias, targets, ctx.ignore_index, ctx.dtype, wanted, scale)
        elif grad.device.type != "cpu" or torch.compiler.is_compiling() or grad.item() != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        return *gradients, None, None, None, None


def _differentiable(ctx: Any, grad: Tensor) -> Gradients:
    """The wanted gradients as part of the graph, by way of all logits."""
    hidden, weight, bias, targets, divisor = ctx.saved_tensors
    with torch.autocast(hidden.device.type, enabled=False):
        loss = reference.linear_cross_entropy(
            hidden.to(ctx.dtype),
            weight.to(ctx.dtype),
            None if bias is None else bias.to(ctx.dtype),
            targets,
            divisor=divisor,
            ignore_index=ctx.ignore_index,
        )
    wanted = [tensor for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
    first, second, third = (next(found) if needed else None for needed in ctx.needs_input_grad[:3])
    return first, second, third


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    scale: Tensor | float,
) -> tuple[Tensor, Gradients]:
    """The sum, and the wanted gradients of `scale` times the sum; outside the graph."""
    keep, rows = targets != ignore_index, None
    if hidden.device.type == "cpu":  # looking is free: leave rows without a target out of the products
        rows = None if bool(keep.all()) else keep.nonzero()[:, 0]
        targets = targets if rows is None else targets[rows]
        _check(targets, weight.shape[0])
    else:
        targets = targets.masked_fill(~keep, 0)
    number, wide = targets.shape[0], wide_dtype(dtype)
    size = _chunk_size(number, weight, dtype)
    losses = hidden.new_empty(number, dtype=wide)
    if isinstance(scale, Tensor) and scale.device.type == "cpu":
        scale = scale.item()
    head, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    hidden_grad = weight_sum = bias_sum = None
    if wanted[0]:
        hidden_grad = torch.empty_like(hidden) if rows is None else torch.zeros_like(hidden)
    if wanted[1]:
        weight_sum = _ProductSum(weight, several=number > size)
    if wanted[2]:
        bias_sum = weight.new_zeros(weight.shape[0], dtype=wide)
    for start in range(0, number, size):
        part = slice(start, start + size)
        place = part if rows is None else rows[part]
        x = hidden[place].to(dtype)
        logits = linear(x, head, offset)
        counted = None if hidden.device.type == "cpu" else keep[part]
        _differentiate(logits, targets[part], counted, losses[part], scale if any(wanted) else None)
        if hidden_grad is not None:
            hidden_grad[place] = product(logits, head.t()).to(hidden.dtype)
        if weight_sum is not None:
            weight_sum.add(logits, x)
        if bias_sum is not None:
            bias_sum += logits.sum(0, dtype=wide)
        del logits  # before the next ones are made
    return losses.sum(), (
        hidden_grad,
        None if weight_sum is None else weight_sum.result(),
        None if bias is None or bias_sum is None else bias_sum.to(bias.dtype),
    )


def _check(targets: Tensor, words: int) -> None:
    if targets.numel() == 0:
        return
    low, high = (int(bound) for bound in targets.aminmax())
    if low < 0 or high >= words:
        raise IndexError(f"Target {low if low < 0 else high} is out of bounds.")  # as torch's cross_entropy says it


def _chunk_size(number: int, weight: Tensor, dtype: torch.dtype) -> int:
    """Rows of one chunk, such that all chunks are about equal."""
    row = max(1, weight.shape[0] * dtype.itemsize)
    most = max(FEWEST_ROWS, max(CHUNK_BYTES, weight.numel() // 2) // row)
    chunks = max(1, -(-number // most))
    return max(1, -(-number // chunks))


def _differentiate(
    logits: Tensor, targets: Tensor, counted: Tensor | None, losses: Tensor, scale: Tensor | float | None
) -> None:
    """Write the losses of some rows, and put `scale` times their gradients in the place of the logits.

    Args:
        logits: ``[T, V]``.
        targets: ``[T]``, valid words also where `counted` ``[T]`` says that a row has none; None: all have one.
        losses: ``[T]``, fp32 or wider.
        scale: None: the gradients are not wanted; the logits are lost.
    """
    rows = max(1, BLOCK_ELEMENTS.get(logits.device.type, ELSEWHERE) // max(1, logits.shape[1]))
    if logits.device.type == "cpu":
        rows = max(rows, torch.get_num_threads())  # a softmax takes one thread per row
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        block, target = logits[part], targets[part, None]
        values = block.to(losses.dtype)
        shares = torch.softmax(values, 1)
        # The largest share is 1 / sum(exp(values - largest)), so no share that may be 0 has its logarithm taken.
        above = values.amax(1, keepdim=True) - values.gather(1, target)
        loss = above - shares.amax(1, keepdim=True).log()
        losses[part] = (loss if counted is None else loss.where(counted[part, None], 0))[:, 0]
        if scale is None:
            continue
        factor = scale if counted is None else scale * counted[part, None]
        of_target = (shares.gather(1, target) - 1) * factor
        block.copy_(shares.mul_(factor).scatter_(1, target, of_target))


class _ProductSum:
    """``sum(d.T @ x)`` over chunks, in the dtype of a weight. A narrow dtype rounds each product and the sum of all,
    but no sum on the way, so the error does not grow with the chunks.

    Args:
        weight: ``[V, D]``, whose gradient this is.
        several: whether there are several chunks.
    """

    def __init__(self, weight: Tensor, several: bool):
        self.weight, self.wide = weight, wide_dtype(weight.dtype)
        self.narrow, self.several = self.wide != weight.dtype, several
        self.total: Tensor | None = None
        self.rest: Tensor | None = None  # what rounding took from the total

    def add(self, d: Tensor, x: Tensor) -> None:
        """``[T, V]`` and ``[T, D]``, in one dtype."""
        if d.dtype == self.weight.dtype and self.total is None:
            self.total = product(d.t(), x.t())
        elif d.dtype == self.weight.dtype and not self.narrow:
            self.result().addmm_(d.t(), x)
        else:
            self._add_slices(d, x)

    def _add_slices(self, d: Tensor, x: Tensor) -> None:
        if self.total is None:
            self.total = torch.zeros_like(self.weight)
        if self.rest is None and self.narrow and self.several:
            self.rest = torch.zeros_like(self.weight)
        words, width = self.weight.shape
        rows = min(words, max(1, SLICE_ELEMENTS.get(d.device.type, ELSEWHERE) // max(1, width)))
        space = d.new_empty(rows, width)
        # Reused from slice to slice: a CPU spends more on fresh memory of this size than on the sums.
        sums, others = (d.new_empty(rows, width, dtype=self.wide) for _ in range(2))
        for start in range(0, words, rows):
            total = self.total[start : start + rows]
            number = total.shape[0]
            part = torch.mm(d[:, start : start + rows].t(), x, out=space[:number])
            if not self.narrow:
                total += part
                continue
            exact, other = sums[:number].copy_(total), others[:number]
            exact += other.copy_(part)
            if self.rest is None:
                total.copy_(exact)
                continue
            rest = self.rest[start : start + rows]
            exact += other.copy_(rest)
            total.copy_(exact)
            exact -= other.copy_(total)
            rest.copy_(exact)

    def result(self) -> Tensor:
        """``[V, D]``."""
        return torch.zeros_like(self.weight) if self.total is None else self.total
