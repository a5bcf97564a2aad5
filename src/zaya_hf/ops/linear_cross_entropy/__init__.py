"""The product of the language-model head and the cross-entropy of its logits."""

from .op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
