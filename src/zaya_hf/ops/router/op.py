"""Which implementation of the router runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import selection
from ..common.dtypes import DTYPE_NAMES
from ..common.facts import Facts
from . import configs, operators, reference
from .reference import RouterWeights, Routing


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
    """From hidden states to one slot per token, its weight, and the state for the next layer; see `reference.route`.

    Args:
        x: ``[N, D]``.
        state: ``[N, R]``, the next state of the layer before; None: there is none.
        weights: see `RouterWeights`.
        balancing_biases: ``[E + 1]`` fp32, outside the graph.
        replayed: ``[N]`` int64, slots that are taken as they are; -1: choose.
        count: also count the tokens of each slot.
        real: ``[N]`` bool, False for padding, which is not counted.
    """
    arguments = (x, state, weights, balancing_biases, replayed)
    if not selection.wants_triton("router", x.device) or not takes(*arguments, real=real):
        return reference.route(*arguments, count=count, real=real)
    if state is None:
        weights = weights._replace(state_scale=None)
    dtype = _product_dtype(x)
    if dtype != x.dtype or _autocasts(x):
        x, weights = x.to(dtype), _cast(weights, dtype)
    return operators.route(x, state, weights, balancing_biases, replayed, count=count, real=real)


def takes(
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None = None,
    *,
    real: Tensor | None = None,
) -> bool:
    """Whether Triton's kernels run where they are asked for. If not, the user is told why.

    Args:
        x, state, weights, balancing_biases, replayed, real: as for `route`.
    """
    why_not = selection.triton_declines(x.device) or _declines(x, state, weights, balancing_biases, replayed, real)
    if why_not is not None:
        selection.say_once("router", why_not)
    return why_not is None


def backend(device: torch.device, facts: Facts | None = None) -> tuple[str, str]:
    """What runs for tensors on `device` of a model with `facts`, and why."""
    declined = None
    if facts is not None:
        declined = _sizes_decline(facts.router_width, facts.num_experts + 1) or _dtype_declines(facts.dtype, device)
    return selection.outcome("router", device, ("reference", "layer by layer"), declined)


def _sizes_decline(width: int, slots: int) -> str | None:
    if width % 16 or not 0 < width <= configs.WIDEST:
        return f"the router's width is {width}, not a multiple of 16 up to {configs.WIDEST}"
    return None if slots <= configs.MOST_SLOTS else f"there are {slots} slots, more than {configs.MOST_SLOTS}"


def _dtype_declines(dtype: torch.dtype, device: torch.device) -> str | None:
    """Of the linear layers' products."""
    if dtype not in DTYPE_NAMES:
        return f"there are no kernels for {dtype}"
    if dtype == torch.float32 and device.type == "cuda" and not torch.version.hip:
        return "NVIDIA's GPUs have no matrix instruction for fp32 that is exact"
    return None


def _declines(
    x: Tensor,
    state: Tensor | None,
    weights: RouterWeights,
    balancing_biases: Tensor,
    replayed: Tensor | None,
    real: Tensor | None,
) -> str | None:
    """Why the kernels do not take these tensors; None: they do."""
    *tensors, _ = weights
    floats = [x, *(t for t in (state, *tensors) if t is not None)]
    others = [t for t in (balancing_biases, replayed, real) if t is not None]
    if not selection.are_plain(*floats, *others):
        return "a tensor is of a subclass, or sparse"
    if any(t.device != x.device for t in (*floats, *others)):
        return "tensors are on several devices"
    slots, width = weights.out_weight.shape
    why_not = _sizes_decline(width, slots) or _dtype_declines(_product_dtype(x), x.device)
    if why_not is not None:
        return why_not
    other = next((t.dtype for t in floats if t.dtype not in DTYPE_NAMES), None)
    if other is not None:
        return f"there are no kernels for {other}"
    if not _autocasts(x) and any(t.dtype != x.dtype for t in floats):
        return "dtypes are mixed"
    if state is not None and weights.state_scale is None:
        return "there is a state and no scale for it"
    if balancing_biases.dtype != torch.float32:
        return f"the balancing biases are {balancing_biases.dtype}, not fp32"
    return None


def _autocasts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _product_dtype(x: Tensor) -> torch.dtype:
    """In what the linear layers multiply."""
    return torch.get_autocast_dtype(x.device.type) if _autocasts(x) else x.dtype


def _cast(weights: RouterWeights, dtype: torch.dtype) -> RouterWeights:
    """As autocast does it: the linear layers alone. A state's scale and the norm's weight keep their dtype."""
    kept = ("state_scale", "norm_weight", "eps")
    cast = {name: value.to(dtype) for name, value in weights._asdict().items() if name not in kept}
    return weights._replace(**cast)
