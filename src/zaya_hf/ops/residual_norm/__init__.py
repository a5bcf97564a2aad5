"""Residual scaling and RMSNorm."""

from .op import residual_merge, residual_merge_norm, rms_norm

__all__ = ["residual_merge", "residual_merge_norm", "rms_norm"]
