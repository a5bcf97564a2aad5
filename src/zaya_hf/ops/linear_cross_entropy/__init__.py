"""The product of the language-model head and the cross-entropy of its logits."""

from .op import linear_cross_entropy, loss_of_logits

__all__ = ["linear_cross_entropy", "loss_of_logits"]
