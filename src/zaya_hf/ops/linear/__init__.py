"""Matrix products of the linear layers."""

from .op import linear, product, wide_linear
from .packed import PackedWeight, Transient, can_pack

__all__ = ["PackedWeight", "Transient", "can_pack", "linear", "product", "wide_linear"]
