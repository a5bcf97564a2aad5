"""Operators. One folder each: `reference.py` is the definition in plain PyTorch, `op.py` says what runs instead.

`selection` decides; `ops/README.md` has a row for each.
"""

import torch

from . import selection
from .cca_mix import SegmentStates, cca_mix, initial_states, next_states
from .cca_mix import op as _cca_mix
from .cca_step import StepRows, cca_step
from .cca_step import op as _cca_step
from .common.facts import Facts
from .experts import PackedExperts, can_compile_experts, compiled_experts, experts
from .experts import op as _experts
from .linear import PackedWeight, Transient, can_pack, linear, wide_linear
from .linear import op as _linear
from .linear_cross_entropy import linear_cross_entropy
from .linear_cross_entropy import op as _linear_cross_entropy
from .residual_norm import op as _residual_norm
from .residual_norm import residual_merge, residual_merge_norm, rms_norm
from .router import RouterWeights, Routing, count_slots, initial_balancing_biases, route, route_takes, select_slots
from .router import op as _router

#: operators by name; the keys of `backends()`
OPERATORS = selection.OPERATORS
_BACKENDS = {
    "cca_mix": _cca_mix.backend,
    "cca_step": _cca_step.backend,
    "experts": _experts.backend,
    "linear": _linear.backend,
    "linear_cross_entropy": _linear_cross_entropy.backend,
    "residual_norm": _residual_norm.backend,
    "router": _router.backend,
}


def backends(device: torch.device | str = "cpu", facts: Facts | None = None) -> dict[str, tuple[str, str]]:
    """For each operator, what runs for tensors on `device`, and why.

    Args:
        facts: the sizes of a model, which the kernels may decline; None: sizes that they take.
    """
    device = torch.device(device)
    return {name: backend(device, facts) for name, backend in sorted(_BACKENDS.items())}


__all__ = [
    "OPERATORS",
    "Facts",
    "PackedExperts",
    "PackedWeight",
    "RouterWeights",
    "Routing",
    "SegmentStates",
    "StepRows",
    "Transient",
    "backends",
    "can_compile_experts",
    "can_pack",
    "cca_mix",
    "cca_step",
    "compiled_experts",
    "count_slots",
    "experts",
    "initial_balancing_biases",
    "initial_states",
    "linear",
    "linear_cross_entropy",
    "next_states",
    "residual_merge",
    "residual_merge_norm",
    "rms_norm",
    "route",
    "route_takes",
    "select_slots",
    "wide_linear",
]
