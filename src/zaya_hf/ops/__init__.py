"""Operators. One folder each: `reference.py` is the definition in plain PyTorch, `op.py` says what runs instead.

`selection.use("reference")`, or ``ZAYA_OPS=reference`` in the environment, makes all of them run their definition.
"""

from . import selection
from .cca_mix import SegmentStates, cca_mix, initial_states, next_states
from .cca_mix import op as _cca_mix
from .experts import PackedExperts, can_compile_experts, compiled_experts, experts
from .experts import op as _experts
from .linear import PackedWeight, Transient, can_pack, linear, wide_linear
from .linear import op as _linear
from .linear_cross_entropy import linear_cross_entropy
from .linear_cross_entropy import op as _linear_cross_entropy
from .residual_norm import op as _residual_norm
from .residual_norm import residual_merge, rms_norm
from .router import count_slots, initial_balancing_biases, select_slots

#: operators by name; the keys of `backends()`
OPERATORS = ("cca_mix", "experts", "linear", "linear_cross_entropy", "residual_norm", "router")


def backends() -> dict[str, tuple[str, str]]:
    """For each operator, the backend that runs and why."""
    if selection.reference_only():
        return dict.fromkeys(OPERATORS, ("reference", "ZAYA_OPS=reference"))
    return {
        "cca_mix": _cca_mix.backend(),
        "experts": _experts.backend(),
        "linear": _linear.backend(),
        "linear_cross_entropy": _linear_cross_entropy.backend(),
        "residual_norm": _residual_norm.backend(),
        "router": ("reference", "the only backend in this version"),
    }


__all__ = [
    "OPERATORS",
    "PackedExperts",
    "PackedWeight",
    "SegmentStates",
    "Transient",
    "backends",
    "can_compile_experts",
    "can_pack",
    "cca_mix",
    "compiled_experts",
    "count_slots",
    "experts",
    "initial_balancing_biases",
    "initial_states",
    "linear",
    "linear_cross_entropy",
    "next_states",
    "residual_merge",
    "rms_norm",
    "select_slots",
    "wide_linear",
]
