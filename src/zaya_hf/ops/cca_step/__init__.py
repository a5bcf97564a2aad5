"""A decoding step of CCA: from the projections of one to eight new tokens per row and the cached states to queries,
keys, values and the next states, in one launch."""

from .op import cca_step
from .reference import StepRows

__all__ = ["StepRows", "cca_step"]
