"""Top-1 SwiGLU experts."""

from .grouped import PackedExperts
from .op import experts

__all__ = ["PackedExperts", "experts"]
