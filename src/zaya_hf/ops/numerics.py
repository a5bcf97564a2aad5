"""Precision by promotion: at least fp32 where it matters, and float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)  # what `promote` leaves as it is; it is called often


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or `dtype` itself if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def promote(tensor: Tensor) -> Tensor:
    """`tensor` in `wide_dtype` of its dtype."""
    return tensor if tensor.dtype in _WIDE else tensor.to(wide_dtype(tensor.dtype))
