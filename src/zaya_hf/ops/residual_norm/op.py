"""Which implementation of the residual merge and of RMSNorm runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .. import selection
from ..common.dtypes import DTYPE_NAMES
from ..common.facts import Facts
from . import configs, fused, operators, reference


def residual_merge(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None = None,
    residual_bias: Tensor | None = None,
) -> Tensor:
    """``(output + b) s + (residual + b') s'`` in fp32 or wider; see `reference.residual_merge`.

    Args:
        output, residual: ``[..., hidden_size]``; without a residual the first summand alone.
        output_scale, output_bias: s and b, ``[hidden_size]``.
        residual_scale, residual_bias: s' and b', likewise.
    """
    arguments = (output, residual, output_scale, output_bias, residual_scale, residual_bias)
    if selection.wants_triton("residual_norm", output.device) and _takes(output, residual, arguments[2:], ()):
        return operators.merge(*arguments)
    return _other(output, residual).residual_merge(*arguments)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last dimension; see `reference.rms_norm`."""
    dtype = weight.dtype if dtype is None else dtype
    if selection.wants_triton("residual_norm", x.device) and _takes(x, None, (weight,), (dtype,)):
        return operators.norm(x, weight, eps, dtype)[0]
    return _other(x, weight).rms_norm(x, weight, eps, dtype)


def residual_merge_norm(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual_merge` and `rms_norm` of what it gives, both from one read where Triton runs; see
    `reference.residual_merge_norm`.

    Args:
        output, residual: ``[..., hidden_size]``.
        output_scale, output_bias, residual_scale, residual_bias, weight: ``[hidden_size]``.
        eps: of the norm.
        dtype: of the normed stream; None: the weight's.
        stream_dtype: what the stream is rounded to before the norm; None: fp32 or wider, that is, not at all.

    Returns:
        the stream and the normed stream, ``[..., hidden_size]``.
    """
    dtype = weight.dtype if dtype is None else dtype
    vectors = (output_scale, output_bias, residual_scale, residual_bias)
    if selection.wants_triton("residual_norm", output.device):
        rounded = torch.float32 if stream_dtype is None else stream_dtype
        if _takes(output, residual, (*vectors, weight), (dtype, rounded)):
            return operators.merge_norm(output, residual, *vectors, weight, eps, rounded, dtype)[:2]
    other = _other(output, residual, weight)
    return other.residual_merge_norm(output, residual, *vectors, weight, eps, dtype, stream_dtype)


def _takes(
    output: Tensor, residual: Tensor | None, vectors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> bool:
    """Whether the kernels take rows ``[..., D]`` and vectors ``[D]``, and make results of `dtypes`; if not, the user is
    told."""
    why_not = selection.triton_declines(output.device) or _declines(output, residual, vectors, dtypes)
    if why_not is not None:
        selection.say_once("residual_norm", why_not)
    return why_not is None


def _other(*tensors: Tensor | None) -> ModuleType:
    return fused if not selection.reference_only("residual_norm") and fused.covers(*tensors) else reference


def _declines(
    output: Tensor, residual: Tensor | None, vectors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> str | None:
    """Why the kernels do not take these tensors; None: they do."""
    tensors = [t for t in (output, residual, *vectors) if t is not None]
    if not selection.are_plain(*tensors):
        return "a tensor is of a subclass, or not strided"
    for dtype in (*(t.dtype for t in tensors), *dtypes):
        if dtype not in DTYPE_NAMES:
            return f"they take fp32, fp16 and bf16, not {dtype}"
    if any(t.device != output.device for t in tensors):
        return "the tensors are on several devices"
    if residual is not None and residual.shape != output.shape:
        return "output and residual differ in shape"
    if any(v is not None and v.shape != output.shape[-1:] for v in vectors):
        return "a vector is not as wide as the rows"
    return _width_declines(output.shape[-1])


def _width_declines(width: int) -> str | None:
    if 1 <= width <= configs.MOST_COLUMNS:
        return None
    return f"they take rows of up to {configs.MOST_COLUMNS} numbers, not of {width}"


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    declined = None
    if facts is not None:
        declined = _width_declines(facts.hidden_size) or _width_declines(facts.router_width)
        if facts.dtype not in DTYPE_NAMES:
            declined = f"they take fp32, fp16 and bf16, not {facts.dtype}"
    return selection.outcome(
        "residual_norm",
        device,
        ("fused", "few passes over memory, its own gradients; the reference while compiling"),
        declined,
    )
