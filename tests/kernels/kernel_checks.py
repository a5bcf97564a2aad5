"""How kernels are checked: against a definition in float64, in memory full of NaN, on tensors of every layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

#: where kernels run: on a GPU if there is one (``-m gpu``), else interpreted on the CPU (``-m interpreter``)
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"

#: relative error in norm that each dtype may show against float64
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCES)
DTYPE_IDS = ("fp32", "fp16", "bf16")


def error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in norm; of shapes that must be equal. Infinite where `got` holds NaN."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = got.detach().double(), want.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    scale = want.norm().item()
    return (got - want).norm().item() / scale if scale else got.norm().item()


def assert_near(got: Tensor, want: Tensor, what: str = "", tolerance: float | None = None) -> None:
    """`got` is `want` but for what its dtype cannot hold."""
    limit = TOLERANCES[got.dtype] if tolerance is None else tolerance
    found = error(got, want)
    assert found <= limit, f"{what}: relative error {found:.2e}, allowed {limit:.0e}"


def gradients(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: dict[str, Tensor], cotangents: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The results of ``function(**inputs)``, and the gradient that every input which wants one gets from `cotangents`,
    one for each result (cast to its dtype)."""
    results = function(**inputs)
    results = [results] if isinstance(results, Tensor) else list(results)
    leaves = {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}
    pairs = [(r, c.to(r.dtype)) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [c for _, c in pairs], allow_unused=True)
    return results, dict(zip(leaves, found, strict=True))


def in_float64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in float64, as leaves of their own; what is no floating-point tensor stays."""

    def wide(t: Tensor) -> Tensor:
        floats = isinstance(t, Tensor) and t.is_floating_point()
        return t.detach().double().requires_grad_(t.requires_grad) if floats else t

    return {name: wide(t) for name, t in inputs.items()}


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Fresh memory holds NaN (the largest number where there is no NaN), so that what is not written shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: object, **options: object) -> Tensor:
            tensor = make(*arguments, **options)
            if tensor.device.type != "meta" and tensor.numel():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                elif tensor.dtype != torch.bool:
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return made

    names = ("empty", "empty_like", "empty_strided")
    methods = ("new_empty", "new_empty_strided")
    patches = [mock.patch.object(torch, name, filled(getattr(torch, name))) for name in names]
    patches += [mock.patch.object(Tensor, name, filled(getattr(Tensor, name))) for name in methods]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The numbers of `x` in memory of other strides: leaves of the same shape that want gradients as `x` does."""

    def leaf(tensor: Tensor) -> Tensor:
        assert torch.equal(tensor, x)
        return tensor.detach().requires_grad_(x.requires_grad)

    data = x.detach()
    spread = data.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    spread[..., ::2] = data
    wider = data.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wider[..., 2:-1] = data
    found = {"every second column": leaf(spread[..., ::2]), "columns of a wider tensor": leaf(wider[..., 2:-1])}
    if x.ndim > 1:
        found["transposed"] = leaf(data.transpose(-1, -2).contiguous().transpose(-1, -2))
    return found
