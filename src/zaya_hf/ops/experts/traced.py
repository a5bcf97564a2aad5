"""Top-1 gated experts in a program that is traced now and run later: torch's usual operators, no decision by values.

Every expert picks its rows with `nonzero`, whose length is known when the program runs. An expert without a row
multiplies an empty matrix, and no row is multiplied for an expert that it did not choose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import selection


def covers() -> bool:
    """Whether such a program is being made."""
    return torch.compiler.is_compiling() or selection.is_exporting()


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """As `reference.experts`."""
    picked, parts = [], []
    matrices = zip(gate_up_proj.unbind(0), down_proj.unbind(0), strict=True)
    for expert, (gate_up, down) in enumerate(matrices):
        rows = (slots == expert).nonzero()[:, 0]
        gate, up = F.linear(x[rows], gate_up).chunk(2, dim=-1)
        parts.append(F.linear(act_fn(gate) * up, down) * weights[rows, None].to(x.dtype))
        picked.append(rows)
    return torch.zeros_like(x).index_copy(0, torch.cat(picked), torch.cat(parts).to(x.dtype))
