"""Cross-entropy of a linear layer, a chunk of rows at a time: there never are logits of all rows.

The gradients are computed in the forward pass, while a chunk's logits are there, so nothing is multiplied twice. Beside
its results the function needs one chunk of logits; for weights narrower than fp32 and several chunks also a second
tensor like the weight, which keeps what rounding takes from the sum of the chunks' gradients. The products are torch's;
what becomes of a chunk's logits is computed by torch (`rows`) or by a kernel (`triton`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import selection
from ..linear import linear, product
from ..numerics import wide_dtype
from . import reference, rows
from .sums import ProductSum

#: bytes of a chunk of logits: so many, or a share of the weight's size (bytes per element) if that is more. With fewer
#: rows the gradient of the weight is bound by memory: each chunk reads and writes all of it.
CHUNK_BYTES = 64 * 2**20
WEIGHT_SHARE = {"cuda": 2.0}
WEIGHT_SHARE_ELSEWHERE = 0.5
#: a GPU's kernel takes a row with one workgroup, and 304 compute units want several each
FEWEST_ROWS = {"cuda": 1024}
FEWEST_ROWS_ELSEWHERE = 32
#: devices where looking at the targets costs nothing
LOOKED_AT = ("cpu",)

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias
Wanted = tuple[bool, bool, bool]
NOTHING = (False, False, False)


@dataclass(frozen=True)
class Problem:
    """All but the tensors.

    Attributes:
        dtype: in which is multiplied.
        ignore_index, z_loss, softcap: as in `op.linear_cross_entropy`.
    """

    dtype: torch.dtype
    ignore_index: int = -100
    z_loss: float = 0.0
    softcap: float | None = None


def declines(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, wide_logits: bool = False
) -> str | None:
    """Why these tensors cannot be computed here; None: they can."""
    tensors = [hidden, weight, targets] if bias is None else [hidden, weight, targets, bias]
    floats = {tensor.dtype for tensor in tensors if tensor is not targets}
    if not selection.are_plain(*tensors):
        return "a tensor is of a class of its own"
    if hidden.device.type == "meta" or len({tensor.device for tensor in tensors}) > 1:
        return "the tensors are on several devices, or on none"
    if len(floats) > 1 and (torch.float64 in floats or not (wide_logits or _autocasts(hidden))):
        return "the tensors have several dtypes"
    return None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | None = None,
    ignore_index: int = -100,
    wide_logits: bool = False,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """See `op.linear_cross_entropy`."""
    problem = Problem(product_dtype(hidden, wide_logits), ignore_index, z_loss, softcap)
    divisor = None if divisor is None else widened(divisor, hidden, problem.dtype)
    if any(wanted_of(hidden, weight, bias)):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, divisor, problem)
    with torch.no_grad():
        total, _ = compute(hidden, weight, bias, targets, problem, NOTHING, 1.0)
    return total if divisor is None else total / divisor


def wanted_of(*tensors: Tensor | None) -> Wanted:
    """Of which of three tensors the gradient is wanted."""
    first, second, third = (torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    return first, second, third


def widened(divisor: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """`divisor` where and as it is used."""
    return divisor.detach().to(hidden.device, wide_dtype(dtype))


def _autocasts(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


def product_dtype(hidden: Tensor, wide_logits: bool) -> torch.dtype:
    """In what the reference would multiply."""
    if _autocasts(hidden) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return wide_dtype(hidden.dtype) if wide_logits else hidden.dtype


def comes_later(dtype: torch.dtype) -> bool:
    """Whether gradients wait for the backward pass: fp16 holds those of logits only times the loss scale, which comes
    with it."""
    return dtype == torch.float16


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        divisor: Tensor | None,
        problem: Problem,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets, divisor)
        ctx.problem, ctx.gradients = problem, None
        later = comes_later(problem.dtype)
        wanted = NOTHING if later else ctx.needs_input_grad[:3]
        scale = 1.0 if divisor is None else divisor.reciprocal()
        total, gradients = compute(hidden, weight, bias, targets, problem, wanted, scale)
        if not later:
            ctx.gradients = gradients
        return total if divisor is None else total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, weight, bias, targets, divisor = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: what was computed ahead is no function of the inputs
            found = differentiable(hidden, weight, bias, targets, divisor, ctx.problem, wanted, grad)
            return *found, None, None, None
        # Given away, not kept: autograd can make them .grad without a copy, and they can be scaled in place.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # fp16, or the graph is used again
            scale = grad if divisor is None else grad / divisor
            _, gradients = compute(hidden, weight, bias, targets, ctx.problem, wanted, scale)
        elif grad.device.type != "cpu" or torch.compiler.is_compiling() or grad.item() != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad)
        return *gradients, None, None, None


def differentiable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    problem: Problem,
    wanted: Wanted,
    grad: Tensor,
) -> Gradients:
    """The wanted gradients as part of the graph, by way of all logits."""
    with torch.autocast(hidden.device.type, enabled=False):
        loss = reference.linear_cross_entropy(
            hidden.to(problem.dtype),
            weight.to(problem.dtype),
            None if bias is None else bias.to(problem.dtype),
            targets,
            divisor=divisor,
            ignore_index=problem.ignore_index,
            z_loss=problem.z_loss,
            softcap=problem.softcap,
        )
    inputs = [t for t, needed in zip((hidden, weight, bias), wanted, strict=True) if needed and t is not None]
    found = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
    first, second, third = (next(found) if needed else None for needed in wanted)
    return first, second, third


def compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    problem: Problem,
    wanted: Wanted,
    scale: Tensor | float,
) -> tuple[Tensor, Gradients]:
    """The sum, and the wanted gradients of `scale` times the sum; outside the graph. All results are contiguous."""
    dtype, kernels = problem.dtype, _kernels(hidden.device, problem.dtype)
    chunk, which = _Chunk(problem, kernels), None
    keep = targets != problem.ignore_index
    looks = hidden.device.type in LOOKED_AT
    if looks:  # leave rows without a target out of the products
        which = None if bool(keep.all()) else keep.nonzero()[:, 0]
        targets = targets if which is None else targets[which]
        _check(targets, weight.shape[0])
    elif kernels is None:
        targets = targets.masked_fill(~keep, 0)
    targets = targets.contiguous()
    number, wide = targets.shape[0], wide_dtype(dtype)
    size = _chunk_size(number, weight, dtype)
    losses = hidden.new_empty(number, dtype=wide)
    prepared = chunk.prepared(scale, losses) if any(wanted) else None
    head, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    hidden_grad = weight_sum = bias_sum = None
    if wanted[0]:
        hidden_grad = hidden.new_empty(hidden.shape) if which is None else hidden.new_zeros(hidden.shape)
    if wanted[1]:
        weight_sum = ProductSum(weight, several=number > size, kernels=kernels)
    if wanted[2]:
        bias_sum = weight.new_zeros(weight.shape[0], dtype=wide)
    for start in range(0, number, size):
        part = slice(start, start + size)
        place = part if which is None else which[part]
        x = hidden[place].to(dtype)
        logits = linear(x, head, offset)
        chunk.differentiate(logits, targets[part], None if looks else keep[part], losses[part], prepared)
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


def _kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module of Triton's kernels, if they are to run for logits of `dtype`."""
    if not selection.wants_triton("linear_cross_entropy", device):
        return None
    why_not = selection.triton_declines(device) or kernels_decline(dtype)
    if why_not is not None:
        selection.say_once("linear_cross_entropy", why_not)
        return None
    from . import triton as kernels

    return kernels


def kernels_decline(dtype: torch.dtype) -> str | None:
    """Why the kernels do not take logits of `dtype`."""
    return "the kernels compute in fp32, and the tensors are float64" if dtype == torch.float64 else None


class _Chunk:
    """What becomes of the logits of a chunk: by a kernel where there are `kernels`, else by torch."""

    def __init__(self, problem: Problem, kernels: ModuleType | None):
        self.problem, self.kernels = problem, kernels

    def prepared(self, scale: Tensor | float, losses: Tensor) -> Tensor | float:
        """`scale` as `differentiate` takes it."""
        if self.kernels is not None:
            return losses.new_full((), scale) if isinstance(scale, float) else scale.to(losses.dtype)
        return scale.item() if isinstance(scale, Tensor) and scale.device.type == "cpu" else scale

    def differentiate(
        self, logits: Tensor, targets: Tensor, counted: Tensor | None, losses: Tensor, scale: Any
    ) -> None:
        """As `rows.differentiate`."""
        problem = self.problem
        if self.kernels is None:
            rows.differentiate(logits, targets, counted, losses, scale, problem.z_loss, problem.softcap)
        else:
            self.kernels.differentiate(
                logits, targets, losses, scale, problem.ignore_index, problem.z_loss, problem.softcap
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
    share = WEIGHT_SHARE.get(weight.device.type, WEIGHT_SHARE_ELSEWHERE)
    fewest = FEWEST_ROWS.get(weight.device.type, FEWEST_ROWS_ELSEWHERE)
    most = max(fewest, max(CHUNK_BYTES, int(weight.numel() * share)) // row)
    chunks = max(1, -(-number // most))
    return max(1, -(-number // chunks))
