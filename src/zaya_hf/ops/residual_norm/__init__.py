"""Residual scaling and RMSNorm."""

from .op import residual_merge, rms_norm

__all__ = ["residual_merge", "rms_norm"]
