"""The kernels as operators of torch, with their gradients.

Saved for the backward pass is what it reads: output and residual where both scales learn (the stream is merged again
from them), else the stream, which the next merge keeps anyway, and the summand whose scale learns; with a norm also
each row's factor. Frozen scales save neither summand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.library import define
from . import differentiable

_VECTORS = "Tensor output_scale, Tensor output_bias, Tensor? residual_scale, Tensor? residual_bias"
Gradients = tuple[Tensor | None, ...]


# ------------------------------------------------------------------------------------------------------- forward
def _run_merge_norm(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor,
    eps: float,
    stream_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Any:
    from . import triton as kernels

    vectors = (output_scale, output_bias, residual_scale, residual_bias)
    return kernels.forward(output, residual, vectors, weight, eps, stream_dtype, dtype)


def _fake_merge_norm(output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, stream_dtype, dtype = rest
    return (
        output.new_empty(output.shape, dtype=stream_dtype),
        output.new_empty(output.shape, dtype=dtype),
        _fake_factor(output),
    )


def _fake_factor(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _run_merge(
    output: Tensor,
    residual: Tensor | None,
    output_scale: Tensor,
    output_bias: Tensor,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
) -> Any:
    from . import triton as kernels

    vectors = (output_scale, output_bias, residual_scale, residual_bias)
    return kernels.forward(output, residual, vectors, None, 0.0, torch.float32, torch.float32)[0]


def _fake_merge(output: Tensor, *rest: Any) -> Tensor:
    return output.new_empty(output.shape, dtype=torch.float32)


def _run_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    from . import triton as kernels

    return kernels.forward(x, None, (None, None, None, None), weight, eps, torch.float32, dtype)[1:]


def _fake_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), _fake_factor(x)


# ------------------------------------------------------------------------------------------------------ backward
def _results(
    stream_grad: Tensor | None,
    normed_grad: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    wanted: list[bool],
) -> list[Tensor | None]:
    like = stream_grad if stream_grad is not None else normed_grad
    assert like is not None
    results = [like.new_empty(like.shape, dtype=d) if w else None for d, w in zip(dtypes, wanted[:2], strict=True)]
    for vector, needed in zip(vectors, wanted[2:], strict=True):
        results.append(vector.new_empty(vector.shape) if needed and vector is not None else None)
    return results


def _run_backward(
    stream_grad: Tensor | None,
    normed_grad: Tensor | None,
    output: Tensor | None,
    residual: Tensor | None,
    stream: Tensor | None,
    factor: Tensor | None,
    output_scale: Tensor | None,
    output_bias: Tensor | None,
    residual_scale: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor | None,
    output_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    stream_dtype: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    from . import triton_backward as kernels

    vectors = (output_scale, output_bias, residual_scale, residual_bias)
    results = _results(stream_grad, normed_grad, (*vectors, weight), (output_dtype, residual_dtype), wanted)
    kernels.backward(
        (stream_grad, normed_grad), (output, residual), stream, factor, vectors, weight, results, stream_dtype
    )
    return [result for result in results if result is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    output_dtype, residual_dtype, _, wanted = arguments[11:]
    results = _results(arguments[0], arguments[1], arguments[6:11], (output_dtype, residual_dtype), wanted)
    return [result for result in results if result is not None]


_backward = define(
    "residual_norm_backward(Tensor? stream_grad, Tensor? normed_grad, Tensor? output, Tensor? residual, "
    "Tensor? stream, Tensor? factor, Tensor? output_scale, Tensor? output_bias, Tensor? residual_scale, "
    "Tensor? residual_bias, Tensor? weight, ScalarType output_dtype, ScalarType residual_dtype, "
    "ScalarType stream_dtype, bool[] wanted) -> Tensor[]",
    _run_backward,
    _fake_backward,
)


# ---------------------------------------------------------------------------------------------------- gradients
def _save(
    ctx: Any,
    output: Tensor,
    residual: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    weight: Tensor | None,
    stream: Tensor,
    factor: Tensor | None,
    eps: float,
    wanted: tuple[bool, ...],
) -> None:
    """What the backward pass needs; `wanted` are the gradients of output, residual, the four vectors, the weight."""
    learns, residual_learns = wanted[2], wanted[4]
    merged = vectors[0] is not None
    again = merged and learns and (residual is None or residual_learns)
    ctx.set_materialize_grads(False)
    ctx.wanted, ctx.eps = wanted, eps
    ctx.dtypes = output.dtype, output.dtype if residual is None else residual.dtype, stream.dtype
    ctx.save_for_backward(
        output if learns else None,
        residual if residual_learns else None,
        None if again or factor is None else stream,
        factor,
        *vectors,
        weight,
    )


def _gradients(ctx: Any, stream_grad: Tensor | None, normed_grad: Tensor | None) -> Gradients:
    """Of output, residual, the four vectors and the norm's weight; None where not wanted, or none arrived."""
    if stream_grad is None and normed_grad is None:
        return (None,) * 7
    wanted = [*ctx.wanted[:6], ctx.wanted[6] and normed_grad is not None]
    if torch.is_grad_enabled():  # to be differentiated again
        return differentiable.gradients(
            stream_grad, normed_grad, *ctx.saved_tensors, dtypes=ctx.dtypes, eps=ctx.eps, wanted=wanted
        )
    found = iter(_backward(stream_grad, normed_grad, *ctx.saved_tensors, *ctx.dtypes, wanted))
    return tuple(next(found) if needed else None for needed in wanted)


def _save_merge_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    stream, _, factor = output
    ctx.mark_non_differentiable(factor)
    _save(ctx, inputs[0], inputs[1], inputs[2:6], inputs[6], stream, factor, inputs[7], ctx.needs_input_grad[:7])


def _merge_norm_backward(ctx: Any, stream_grad: Tensor | None, normed_grad: Tensor | None, _: Any) -> Gradients:
    return *_gradients(ctx, stream_grad, normed_grad), None, None, None


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save(ctx, inputs[0], inputs[1], inputs[2:6], None, output, None, 0.0, (*ctx.needs_input_grad[:6], False))


def _merge_backward(ctx: Any, grad: Tensor | None) -> Gradients:
    return _gradients(ctx, grad, None)[:6]


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, eps, _ = inputs
    ctx.mark_non_differentiable(output[1])
    wanted = (ctx.needs_input_grad[0], *(False,) * 5, ctx.needs_input_grad[1])
    _save(ctx, x, None, (None,) * 4, weight, x, output[1], eps, wanted)


def _norm_backward(ctx: Any, grad: Tensor | None, _: Any) -> Gradients:
    found = _gradients(ctx, None, grad)
    return found[0], found[6], None, None


merge_norm = define(
    f"residual_merge_norm(Tensor output, Tensor? residual, {_VECTORS}, Tensor weight, float eps, "
    "ScalarType stream_dtype, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _run_merge_norm,
    _fake_merge_norm,
    backward=_merge_norm_backward,
    setup_context=_save_merge_norm,
)
merge = define(
    f"residual_merge(Tensor output, Tensor? residual, {_VECTORS}) -> Tensor",
    _run_merge,
    _fake_merge,
    backward=_merge_backward,
    setup_context=_save_merge,
)
norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _run_norm,
    _fake_norm,
    backward=_norm_backward,
    setup_context=_save_norm,
)
