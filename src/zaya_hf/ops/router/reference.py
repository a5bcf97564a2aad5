"""The router (arXiv 2605.05365, eq. 4): depth averaging, norm, MLP, softmax, balancing bias, argmax, weight."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear.reference import linear
from ..numerics import promote
from ..residual_norm.reference import rms_norm


class RouterWeights(NamedTuple):
    """What a router multiplies and adds; D is the model's width, R the router's, E + 1 the number of slots.

    Attributes:
        down_weight, down_bias: ``[R, D]``, ``[R]``, to the router's width.
        state_scale: ``[R]``, of the state of the layer before; None: the first layer's.
        norm_weight: ``[R]``, and `eps` of the RMSNorm.
        fc1_weight, fc1_bias, fc2_weight, fc2_bias: ``[R, R]``, ``[R]``, each followed by GELU.
        out_weight: ``[E + 1, R]``.
    """

    down_weight: Tensor
    down_bias: Tensor
    state_scale: Tensor | None
    norm_weight: Tensor
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor
    out_weight: Tensor
    eps: float


class Routing(NamedTuple):
    """What a router decides about N tokens.

    Attributes:
        logits: ``[N, E + 1]``.
        slots: ``[N]`` int64; the last one skips the experts.
        weights: ``[N]``, fp32 or wider: the probability of the slot.
        state: ``[N, R]``, for the next layer.
        counts: ``[E + 1]`` int64, real tokens of each slot, or None.
    """

    logits: Tensor
    slots: Tensor
    weights: Tensor
    state: Tensor
    counts: Tensor | None


def route(
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None = None,
    *,
    count: bool = False,
    real: Tensor | None = None,
) -> Routing:
    """Project, average with the state of the layer before, normalise, three linear layers, choose a slot.

    Each linear layer, GELU and the average are rounded to the dtype that they come in; the norm and the softmax run in
    fp32 or wider.

    Args:
        x: ``[N, D]``.
        state: ``[N, R]`` of the layer before; None: there is none.
        weights: see `RouterWeights`.
        balancing_biases, replayed: see `select_slots`.
        count, real: whether to count, and which tokens; see `count_slots`.
    """
    own = linear(x, weights.down_weight, weights.down_bias)
    if state is not None:
        assert weights.state_scale is not None
        own = own + weights.state_scale * state
    hidden = rms_norm(own, weights.norm_weight, weights.eps).to(weights.fc1_weight.dtype)
    hidden = F.gelu(linear(hidden, weights.fc1_weight, weights.fc1_bias))
    hidden = F.gelu(linear(hidden, weights.fc2_weight, weights.fc2_bias))
    logits = linear(hidden, weights.out_weight)
    slots, chosen = select_slots(logits, balancing_biases, replayed)
    counts = count_slots(slots, logits.shape[-1], real) if count else None
    return Routing(logits, slots, chosen, own, counts)


def state_dtype(x: Tensor, state: Tensor | None, scale: Tensor | None) -> torch.dtype:
    """Of the next state, which is the projected x plus `scale` times `state`."""
    if state is None or scale is None:
        return x.dtype
    return torch.promote_types(x.dtype, torch.promote_types(state.dtype, scale.dtype))


def select_slots(logits: Tensor, balancing_biases: Tensor, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose a slot per token by biased probability, weigh it by the unbiased one.

    Args:
        logits: ``[N, E + 1]``; the last slot skips the experts.
        balancing_biases: ``[E + 1]`` fp32, outside the graph.
        replayed: ``[N]`` int64, slots that were chosen before and are taken as they are; -1: choose.

    Returns:
        slots ``[N]`` int64 (the lowest index wins a tie) and weights ``[N]``, fp32 or wider, not renormalised.
    """
    probabilities = torch.softmax(promote(logits), dim=-1)
    with torch.no_grad():
        slots = (probabilities + balancing_biases).argmax(-1)
        if replayed is not None:
            slots = torch.where(replayed < 0, slots, replayed)
    return slots, probabilities.gather(-1, slots[:, None])[:, 0]


def count_slots(slots: Tensor, num_slots: int, real: Tensor | None = None) -> Tensor:
    """Tokens per slot, ``[num_slots]`` int64.

    Args:
        slots: ``[N]`` int64.
        real: ``[N]`` bool, False for padding, which is not counted; None: all are real.
    """
    ones = torch.ones_like(slots) if real is None else real.to(slots.dtype)
    return slots.new_zeros(num_slots).index_add(0, slots, ones)


def initial_balancing_biases(num_experts: int) -> Tensor:
    """``[E + 1]`` fp32 for `num_experts` = E: no preference among them; the skip slot loses against each of them."""
    return torch.cat([torch.zeros(num_experts), -torch.ones(1)]).to(torch.float32)
