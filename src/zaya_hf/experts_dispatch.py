"""Which of several implementations runs the experts of a call, and what each of them cannot take.

``experts_implementation`` names one: "zaya" (the default), "zaya_triton" (our kernels), "eager" (`ops.experts`,
always), or one of transformers' (grouped_mm, batched_mm ...). "zaya" is the fastest known for the device: `ops.experts`
on a CPU, where torch's grouped product is a slower loop, inside a compiled graph as one operator, and in an exported
program, which may hold no operator of this package or of transformers; on a GPU our kernels, but for what torch's
grouped product is thought to do faster (`ops.experts.op.grouped_mm_is_faster`), and where they cannot run grouped_mm,
and batched_mm for the few tokens of a decoding step, as `generate` of transformers does. ``ZAYA_OPS=triton`` and
``ZAYA_OPS=reference`` (or ``experts=...`` of them) decide for "zaya" as they do for the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from . import ops
from .ops.experts import op

#: name of our choice, and default
OURS = "zaya"
#: name of our kernels
TRITON = "zaya_triton"
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
    if module.config._experts_implementation in (OURS, TRITON):
        if _takes_kernels(module, hidden_states):
            output = _by_kernels(module, *arguments)
            if output is not None:
                return output
        if ops.can_compile_experts(hidden_states):
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


def triton_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Our kernels, for experts of any of transformers' models: what "zaya_triton" names.

    Args:
        module: experts with `gate_up_proj` ``[E, 2 I, D]``, gate first, and `down_proj` ``[E, D, I]``.
        hidden_states: ``[N, D]``.
        top_k_index, top_k_weights: ``[N, K]``; index E or more means no expert.

    Returns:
        ``[N, D]``.

    Raises:
        ValueError: for experts of another form.
    """
    plain = module.has_gate and module.is_concatenated
    if not plain or module.has_bias or module.is_transposed or module.has_post_expert_norm:
        raise ValueError(
            f'experts_implementation="{TRITON}" is for gate and up in one matrix, gate first, without biases, '
            f"transposition or a norm, which {type(module).__name__} does not have."
        )
    chosen = top_k_index.shape[1]
    rows = hidden_states if chosen == 1 else hidden_states.repeat_interleave(chosen, dim=0)
    matrices = (module.gate_up_proj, module.down_proj)
    arguments = (rows, top_k_index.reshape(-1), top_k_weights.reshape(-1), *matrices, module.act_fn)
    output = op.by_kernels(*arguments)
    if output is None:
        output = ops.experts(*arguments)
    return output if chosen == 1 else output.unflatten(0, (-1, chosen)).sum(1)


def register_kernels() -> None:
    """Let transformers know "zaya_triton". A ZAYA model does so when it is asked for the name; importing the package
    leaves transformers' tables alone."""
    ALL_EXPERTS_FUNCTIONS.register(TRITON, triton_experts)


def _takes_kernels(module: Any, hidden_states: Tensor) -> bool:
    """Whether our kernels are to be tried."""
    if ops.selection.reference_only("experts"):
        return False
    if module.config._experts_implementation == TRITON or ops.selection.requested("experts") == "triton":
        return True
    if not ops.selection.wants_triton("experts", hidden_states.device):
        return False
    dtype = module.gate_up_proj.dtype
    tokens = None if is_tracing(hidden_states) else hidden_states.shape[0]
    return not op.grouped_mm_is_faster(hidden_states.device, dtype, module.num_experts, tokens)


def _by_kernels(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
    slots, weights = top_k_index[:, 0], top_k_weights[:, 0]
    return op.by_kernels(hidden_states, slots, weights, module.gate_up_proj, module.down_proj, module.act_fn)


def _name(module: Any, hidden_states: Tensor) -> str:
    """The implementation that takes this input."""
    name = module.config._experts_implementation
    if hidden_states.shape[0] == 0:  # not every implementation takes an empty input
        return "eager"
    tracing = is_tracing(hidden_states)
    if name in (OURS, TRITON):
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
