"""The iteration at the heart of Muon: matrices to nearly orthogonal ones, many of one shape at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["NS_COEFFICIENTS", "newton_schulz_dtype", "orthogonalise"]

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz_dtype(device: torch.device | str) -> torch.dtype:
    """bf16 on CUDA, ROCm and XPU devices and on CPUs that multiply bf16 matrices natively, fp32 elsewhere.

    A CPU without these instructions emulates them, at a fraction of fp32's speed.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 may not have it
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    else:
        native = kind in ("cuda", "xpu")
    return torch.bfloat16 if native else torch.float32


def orthogonalise(
    matrices: Tensor,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Bring the singular values of every matrix close to 1 by a quintic Newton-Schulz iteration.

    Args:
        matrices: ``[N, rows, columns]``, best with rows <= columns (cost grows with rows^2); overwritten. The iteration
            runs in its dtype.
        coefficients: of x, x^3 and x^5.
        steps: of the iteration.
        eps: smallest Frobenius norm that is divided by. A matrix of zeros stays zero.

    Returns:
        ``[N, rows, columns]``, singular values between about 0.5 and 1.5.
    """
    a, b, c = coefficients
    x = matrices.div_(torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x
