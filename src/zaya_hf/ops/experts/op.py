"""Which implementation of the experts runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from .. import selection
from ..common.facts import Facts
from . import configs, grouped, reference, top1, traced
from .grouped import PackedExperts


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    packed: PackedExperts | None = None,
) -> Tensor:
    """``weights[n] * down(act(gate(x[n])) * up(x[n]))`` with the expert that slot n names; see `reference.experts`.

    Args:
        x: ``[N, D]``.
        slots, weights: ``[N]`` int64, the expert of each token (from 0 up; E or more: none, the
            result is 0), and its weight.
        gate_up_proj, down_proj: ``[E, 2 I, D]``, gate first, and ``[E, D, I]``.
        act_fn: the activation of the gate.
        packed: the two weights packed; used where no gradient is wanted, and never after the weights have changed.
    """
    arguments = (x, slots, weights, gate_up_proj, down_proj, act_fn)
    if selection.wants_triton("experts", x.device):
        output = by_kernels(*arguments)
        if output is not None:
            return output
    if traced.covers():
        return traced.experts(*arguments)
    if selection.reference_only("experts") or not grouped.covers(x):
        return reference.experts(*arguments)
    return grouped.experts(*arguments, packed)


def by_kernels(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """As `experts`, by Triton's kernels whatever was asked for; None, and said once, where they cannot run."""
    arguments = (x, slots, weights, gate_up_proj, down_proj, act_fn)
    autocast = _autocast_dtype(x)
    why_not = selection.triton_declines(x.device) or top1.declines(*arguments, autocast)
    if why_not is None:
        return top1.experts(*arguments, autocast)
    selection.say_once("experts", why_not)
    return None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies; None: it is off, or leaves `x` alone."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def grouped_mm_is_faster(device: torch.device, dtype: torch.dtype, experts: int, tokens: int | None) -> bool:
    """Whether torch's grouped product is taken where the kernels could run too. Decided by formula, not yet measured:

    - It is one tuned kernel on sm_90 and sm_100, for bf16. Elsewhere, on every AMD GPU too, torch (2.9 to 2.13) waits
      for the counts and then multiplies expert by expert. On an MI300X such a product of 1,000 rows has 64 tiles for
      304 compute units, where the kernels have those of all experts at once.
    - With few tokens the weights are all that is read, by either. The kernels are two or three launches and
      grouped_mm's way is some twenty; batched_mm copies the weights of every token before it multiplies.

    Args:
        device, dtype: of tokens and weights.
        experts: how many there are.
        tokens: in the call; None: not known, as in a graph that serves many sizes.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or not _has_grouped_kernel(device.index):
        return False
    if tokens is None:
        return torch.is_grad_enabled()
    return configs.choose_rows(tokens, experts) == configs.MANY_ROWS


def _has_grouped_kernel(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index)[0] in (9, 10)


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    otherwise = ("grouped", "on a CPU; elsewhere what experts_implementation names")
    dtype, experts, declined = torch.bfloat16, 1, None
    if facts is not None:
        dtype, experts = facts.dtype, facts.num_experts
        activation = type(ACT2FN[facts.activation])
        declined = top1.declines_sizes({dtype}, experts, facts.intermediate, facts.hidden_size, activation)
    name, why = selection.outcome("experts", device, otherwise, declined)
    chosen_here = name == "triton" and selection.requested("experts") == "auto"
    if chosen_here and grouped_mm_is_faster(device, dtype, experts, configs.MANY_ROWS * experts):
        why = "on a GPU for few tokens; for many torch's grouped_mm, which is one kernel here for bf16"
    return name, why
