"""Top-1 SwiGLU experts."""

from .compiled import covers as can_compile_experts
from .compiled import experts as compiled_experts
from .grouped import PackedExperts
from .op import experts

__all__ = ["PackedExperts", "can_compile_experts", "compiled_experts", "experts"]
