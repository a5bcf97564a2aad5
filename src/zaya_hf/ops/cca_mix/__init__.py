"""Convolutions, q-k mean, norms, RoPE and value shift of Compressed Convolutional Attention."""

from .reference import SegmentStates, cca_mix, initial_states, next_states

__all__ = ["SegmentStates", "cca_mix", "initial_states", "next_states"]
