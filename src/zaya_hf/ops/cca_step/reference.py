"""A decoding step by its definition: CCA's mixing step on rows that have states, then the states after it.

Shapes as in `ops.cca_mix.reference`; every row of the call is one segment with a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cca_mix import SegmentStates, cca_mix, next_states


@dataclass
class StepRows:
    """Rows that are more than tokens which continue their past: padded ones, and those in which a document begins.

    Attributes:
        reach: ``[B, S]`` predecessors inside this call, see `cca_mix.reference.earlier_tokens`.
        continues: ``[B]`` bool, whether the first real token continues the document of the state; else it reads what
            the first token of a sequence reads.
        entry_index, entry_valid: ``[B, >= max(K, 1)]`` int64 and bool: flat position (``row * S + column``) of the
            row's first real tokens, and whether each is of the first one's document, directly behind the one before.
        last, has_real: ``[B]`` int64 and bool: column of the last real token, and whether the row has one. A row
            without keeps its states.
    """

    reach: Tensor
    continues: Tensor | None
    entry_index: Tensor | None
    entry_valid: Tensor | None
    last: Tensor | None
    has_real: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in order."""
        return self.reach, self.continues, self.entry_index, self.entry_valid, self.last, self.has_real


def cca_step(
    raw: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    qk_state: Tensor,
    value_state: Tensor,
    *,
    value_of_nothing: Tensor | None = None,
    rows: StepRows | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`op.cca_step`, which says what each argument is, by way of `cca_mix`; the states are new tensors.

    Args:
        arguments: further ones of `cca_mix`.
    """
    before = (qk_state, value_state)
    states = SegmentStates(qk_state, value_state)
    if rows is not None:
        if rows.continues is not None:
            states.qk = torch.where(rows.continues[:, None, None], qk_state, 0)
            fresh = torch.zeros_like(value_state[0]) if value_of_nothing is None else value_of_nothing
            states.value = torch.where(rows.continues[:, None], value_state, fresh.to(value_state.dtype))
        states.index, states.valid = rows.entry_index, rows.entry_valid
    reach = None if rows is None else rows.reach
    query, key, value = cca_mix(
        raw,
        value_current,
        value_delayed,
        value_of_nothing=value_of_nothing,
        reach=reach,
        states=states,
        **arguments,
    )
    last, has_real = (None, None) if rows is None else (rows.last, rows.has_real)
    after = next_states(raw, value_delayed, before, reach=reach, states=states, last=last, has_real=has_real)
    return query, key, value, *after
