"""The kernels at ZAYA1-8B's sizes: a layer's merge and norm with ``[tokens, 2048]``, the router's norm with 256."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import configs

_HIDDEN, _ROUTER, _TOKENS, _DECODING = 2048, 256, 16_384, 8
_WIDER = (4096,)  # no ZAYA1, but what the tables have
_WIDE = torch.float32


def workloads(dtype: torch.dtype) -> list[Workload]:
    """Every kernel, forward and backward; `dtype` is that of sublayers, weights and normed rows, the stream is fp32."""
    wider = [make(_TOKENS, width, dtype) for width in _WIDER for make in (_merge_norm, _merge_norm_backward)]
    return [
        _merge_norm(_TOKENS, _HIDDEN, dtype),
        _merge_norm(_DECODING, _HIDDEN, dtype),
        _norm(_TOKENS, dtype),
        _merge_norm_backward(_TOKENS, _HIDDEN, dtype),
        _merge_norm_backward(_TOKENS, _HIDDEN, dtype, learns=False),
        _norm_backward(_TOKENS, dtype),
        _reduction(_TOKENS, dtype),
        *wider,
    ]


def _size(tokens: int, width: int) -> str:
    return f"{tokens} tokens" + ("" if width in (_HIDDEN, _ROUTER) else f" of {width}")


def _rows(tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(tokens, width, dtype=dtype, device="meta")


def _vectors(width: int, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(width, dtype=dtype, device="meta") for _ in range(count))


def _merge_norm(tokens: int, width: int, dtype: torch.dtype) -> Workload:
    output, residual = _rows(tokens, width, dtype), _rows(tokens, width, _WIDE)
    *vectors, weight = _vectors(width, dtype, 5)

    def launch(config: KernelConfig) -> None:
        from . import triton as kernels

        kernels.forward(output, residual, tuple(vectors), weight, 1e-5, _WIDE, dtype, config)

    return Workload(
        kernel="residual_norm: merge and norm",
        size=_size(tokens, width),
        dtype=DTYPE_NAMES[dtype],
        configs=(configs.choose_forward(width),),
        launch=launch,
        # output and residual; stream and normed rows; a factor each
        bytes=tokens * (width * (2 * dtype.itemsize + 8) + 4) + 5 * width * dtype.itemsize,
    )


def _norm(tokens: int, dtype: torch.dtype) -> Workload:
    x, (weight,) = _rows(tokens, _ROUTER, dtype), _vectors(_ROUTER, dtype, 1)

    def launch(config: KernelConfig) -> None:
        from . import triton as kernels

        kernels.forward(x, None, (None,) * 4, weight, 1e-5, _WIDE, dtype, config)

    return Workload(
        kernel="residual_norm: router's norm",
        size=f"{tokens} tokens",
        dtype=DTYPE_NAMES[dtype],
        configs=(configs.choose_forward(_ROUTER),),
        launch=launch,
        bytes=tokens * (_ROUTER * 2 * dtype.itemsize + 4) + _ROUTER * dtype.itemsize,
    )


def _merge_norm_backward(tokens: int, width: int, dtype: torch.dtype, learns: bool = True) -> Workload:
    output, residual = _rows(tokens, width, dtype), _rows(tokens, width, _WIDE)
    stream_grad, normed_grad = _rows(tokens, width, _WIDE), _rows(tokens, width, dtype)
    factor = torch.empty(tokens, dtype=_WIDE, device="meta")
    *vectors, weight = _vectors(width, dtype, 5)
    wanted = (True, True, *(learns,) * 5)
    chosen = configs.choose_backward(width)
    programs = configs.backward_programs(tokens, chosen)

    def launch(config: KernelConfig) -> None:
        from . import triton_backward as kernels

        kernels.rows_backward(
            config,
            kernels.Sums(output, configs.backward_programs(tokens, config), width, wanted),
            (stream_grad, normed_grad),
            (output, residual) if learns else (None, None),
            None if learns else residual,
            factor,
            tuple(vectors),
            weight,
            (torch.empty_like(output), torch.empty_like(residual)),
            _WIDE,
        )

    # upstream and what is saved; gradients of output and residual; a factor each; sums of every program
    rows = 2 * dtype.itemsize + 8 + (dtype.itemsize + 4 if learns else 4)
    return Workload(
        kernel="residual_norm backward: " + ("all gradients" if learns else "frozen vectors"),
        size=_size(tokens, width),
        dtype=DTYPE_NAMES[dtype],
        configs=(chosen,),
        launch=launch,
        bytes=tokens * (width * rows + 4) + 5 * width * dtype.itemsize + (16 * programs * width if learns else 0),
    )


def _norm_backward(tokens: int, dtype: torch.dtype) -> Workload:
    x, grad, (weight,) = _rows(tokens, _ROUTER, dtype), _rows(tokens, _ROUTER, dtype), _vectors(_ROUTER, dtype, 1)
    factor = torch.empty(tokens, dtype=_WIDE, device="meta")
    wanted = (True, False, False, False, False, False, True)
    chosen = configs.choose_backward(_ROUTER)
    programs = configs.backward_programs(tokens, chosen)

    def launch(config: KernelConfig) -> None:
        from . import triton_backward as kernels

        kernels.rows_backward(
            config,
            kernels.Sums(x, configs.backward_programs(tokens, config), _ROUTER, wanted),
            (None, grad),
            (None, None),
            x,
            factor,
            (None,) * 4,
            weight,
            (torch.empty_like(x), None),
            _WIDE,
        )

    return Workload(
        kernel="residual_norm backward: router's norm",
        size=f"{tokens} tokens",
        dtype=DTYPE_NAMES[dtype],
        configs=(chosen,),
        launch=launch,
        bytes=tokens * (_ROUTER * 3 * dtype.itemsize + 4) + _ROUTER * (dtype.itemsize + 4 * programs),
    )


def _reduction(tokens: int, dtype: torch.dtype) -> Workload:
    vectors = _vectors(_HIDDEN, dtype, 4)
    results = _vectors(_HIDDEN, dtype, 5)
    programs = configs.backward_programs(tokens, configs.choose_backward(_HIDDEN))

    def launch(config: KernelConfig) -> None:
        from . import triton_backward as kernels

        kernels.reduce(config, kernels.Sums(vectors[0], programs, _HIDDEN, (True,) * 7), vectors, results)

    return Workload(
        kernel="residual_norm backward: vectors",
        size=f"{programs} programs",
        dtype=DTYPE_NAMES[dtype],
        configs=configs.REDUCTION,
        launch=launch,
        bytes=4 * 4 * programs * _HIDDEN + 9 * _HIDDEN * dtype.itemsize,
    )
