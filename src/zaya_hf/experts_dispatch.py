"""Which of several implementations runs the experts of a call, and what each of them cannot take.

``experts_implementation`` names one: "zaya" (the default), "eager" (`ops.experts`, always), or one of transformers'
(grouped_mm, batched_mm ...). "zaya" is the fastest known for the device: `ops.experts` on a CPU, where torch's grouped
product is a slower loop, inside a compiled graph as one operator, and in an exported program, which may hold no
operator of this package or of transformers; elsewhere grouped_mm, and batched_mm for the few tokens of a decoding step,
as `generate` of transformers does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from . import ops

#: name of our choice, and default
OURS = "zaya"
#: rows up to which gathering every row's matrices beats grouping, on an accelerator
DECODING_ROWS = 32


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output, ``[N, hidden_size]``, by the implementation that the config of `module` names.

    Args:
        module: the experts; its `eager` is `ops.experts`.
        hidden_states: ``[N, hidden_size]``.
        top_k_index, top_k_weights: ``[N, 1]``; index num_experts means no expert.
    """
    arguments = (hidden_states, top_k_index, top_k_weights)
    if module.config._experts_implementation == OURS and ops.can_compile_experts(hidden_states):
        slots, weights, name = top_k_index[:, 0], top_k_weights[:, 0], module.config.hidden_act
        matrices = (module.gate_up_proj, module.down_proj)
        return ops.compiled_experts(hidden_states, slots, weights, *matrices, name, module.packed_experts)
    name = _name(module, hidden_states)
    if name == "eager":
        return module.eager(*arguments)
    library = ALL_EXPERTS_FUNCTIONS.get_interface(name, module.eager)
    if name == "batched_mm" and hidden_states.device.type == "cpu" and not is_tracing(hidden_states):
        # It has no way to leave a row out, so leave it out for it where looking costs nothing.
        rows = (top_k_index[:, 0] < module.num_experts).nonzero()[:, 0]
        if rows.numel() == 0:
            return module.eager(*arguments)
        if rows.numel() < hidden_states.shape[0]:
            kept = library(module, *(t[rows] for t in arguments))
            return torch.zeros_like(hidden_states).index_copy(0, rows, kept)
    return library(module, *arguments)


def _name(module: Any, hidden_states: Tensor) -> str:
    """The implementation that takes this input."""
    name = module.config._experts_implementation
    if hidden_states.shape[0] == 0:  # not every implementation takes an empty input
        return "eager"
    tracing = is_tracing(hidden_states)
    if name == OURS:
        if ops.selection.is_exporting() or (hidden_states.device.type == "cpu" and not tracing):
            return "eager"
        few = not tracing and hidden_states.shape[0] <= DECODING_ROWS and not torch.is_grad_enabled()
        # without values, torch's grouped product is there for bf16 only
        name = "batched_mm" if few or hidden_states.device.type == "meta" else "grouped_mm"
    if name == "grouped_mm" and not tracing and not _grouped_mm_takes(module, hidden_states.dtype):
        return "eager"
    return name


def _grouped_mm_takes(module: Any, dtype: torch.dtype) -> bool:
    """torch's grouped product knows no float64, and wants rows of a multiple of 16 bytes."""
    widths = (module.gate_up_proj.shape[-1], module.down_proj.shape[-1])
    return dtype != torch.float64 and all(width * dtype.itemsize % 16 == 0 for width in widths)
