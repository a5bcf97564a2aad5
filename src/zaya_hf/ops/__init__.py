"""Operators. One folder each: `reference.py` is the definition in plain PyTorch."""

from .cca_mix import SegmentStates, cca_mix, initial_states, next_states
from .experts import experts
from .residual_norm import residual_merge, rms_norm
from .router import count_slots, initial_balancing_biases, select_slots

#: operators by name; the keys of `backends()`
OPERATORS = ("cca_mix", "experts", "residual_norm", "router")


def backends() -> dict[str, tuple[str, str]]:
    """For each operator, the backend that runs and why."""
    return dict.fromkeys(OPERATORS, ("reference", "the only backend in this version"))


__all__ = [
    "OPERATORS",
    "SegmentStates",
    "backends",
    "cca_mix",
    "count_slots",
    "experts",
    "initial_balancing_biases",
    "initial_states",
    "next_states",
    "residual_merge",
    "rms_norm",
    "select_slots",
]
