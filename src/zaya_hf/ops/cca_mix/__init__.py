"""CCA's mixing step, and the states that it leaves for the next call."""

from .op import cca_mix
from .reference import SegmentStates, initial_states, next_states

__all__ = ["SegmentStates", "cca_mix", "initial_states", "next_states"]
