"""Top-1 SwiGLU experts."""

from .reference import experts

__all__ = ["experts"]
