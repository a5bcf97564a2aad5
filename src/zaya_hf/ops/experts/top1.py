"""The experts' kernels as operators of torch: one for inference, two for training.

Of the forward pass are kept the inputs, the sorting and what the activation was given, ``[N, 2 I]``: without it the
first product, two thirds of the forward pass, would be made once more. Hidden values are made from it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from .. import selection
from ..common.dtypes import DTYPE_NAMES
from ..common.library import define
from . import configs, reference

#: what the kernels call the activations that they have, by class
ACTIVATIONS: dict[type, str] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.AccurateGELUActivation: "gelu_tanh",
}
_MOST = 2**31 - 1


def declines(
    x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act_fn: Any, autocast: torch.dtype | None
) -> str | None:
    """Why the kernels do not take these arguments of `reference.experts`; None: they do. `autocast`: the dtype in which
    they are multiplied if it is not their own."""
    if not selection.are_plain(x, slots, weights, gate_up, down):
        return "a tensor is not a plain one"
    if not x.device == slots.device == weights.device == gate_up.device == down.device:
        return "tensors are on different devices"
    dtypes = {autocast or t.dtype for t in (x, gate_up, down)}
    return declines_sizes(dtypes, gate_up.shape[0], down.shape[2], x.shape[1], type(act_fn))


def declines_sizes(dtypes: set[torch.dtype], experts: int, inner: int, width: int, activation: type) -> str | None:
    """As `declines`, by dtypes of tokens and weights, sizes, and the class of the activation."""
    if len(dtypes) > 1:
        return "tokens and weights have different dtypes"
    (dtype,) = dtypes
    if dtype not in DTYPE_NAMES:
        return f"kernels are for fp32, bf16 and fp16, not for {dtype}"
    if activation not in ACTIVATIONS:
        return f"there is no kernel for the activation {activation.__name__}"
    if experts > configs.MOST_EXPERTS:
        return f"there are {experts} experts, more than {configs.MOST_EXPERTS}"
    if 2 * inner * width > _MOST:
        return "the weights of one expert have more than 2^31 values"
    return None


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act_fn: Any,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """As `reference.experts`, for what `declines` does not name."""
    dtype = autocast or x.dtype
    rows, scale, first, second = (t.to(dtype) for t in (x, weights, gate_up, down))
    arguments = (rows, slots, scale, first, second, ACTIVATIONS[type(act_fn)])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (rows, scale, first, second)):
        return _train(*arguments)[0].to(x.dtype)
    return _infer(*arguments).to(x.dtype)


def _run_infer(x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    if x.shape[0] == 0 or x.shape[1] == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    from . import triton as kernels

    tokens, number = x.shape[0], gate_up.shape[0]
    x, gate_up, down = (kernels.dense_rows(t) for t in (x, gate_up, down))
    slots, weights = slots.contiguous(), weights.contiguous()
    if tokens <= configs.DECODING_TOKENS:
        chosen = configs.choose_decoding(configs.DECODE_GATE_UP[x.dtype], tokens)
        hidden = kernels.decode_gate_up(x, slots, gate_up, activation, chosen)
        return kernels.decode_down(
            hidden, slots, down, weights, configs.choose_decoding(configs.DECODE_DOWN[x.dtype], tokens)
        )
    order, offsets = kernels.sort(slots, number, configs.choose_sort(number))
    tables = configs.tables(x.dtype)
    hidden = kernels.gate_up(
        x, order, offsets, gate_up, activation, None, configs.choose(tables.gate_up, tokens, number)
    )
    return kernels.scatter_product(hidden, order, offsets, down, weights, configs.choose(tables.down, tokens, number))


def _fake_infer(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


def _run_train(
    x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.shape[0] == 0 or x.shape[1] == 0:
        out, pre, order, offsets = _fake_train(x, slots, weights, gate_up)
        return out.zero_(), pre.zero_(), order.zero_(), offsets.zero_()
    from . import triton as kernels

    tokens, number = x.shape[0], gate_up.shape[0]
    pre = x.new_empty(tokens, gate_up.shape[1])
    x, gate_up, down = (kernels.dense_rows(t) for t in (x, gate_up, down))
    order, offsets = kernels.sort(slots.contiguous(), number, configs.choose_sort(number))
    tables = configs.tables(x.dtype)
    hidden = kernels.gate_up(
        x, order, offsets, gate_up, activation, pre, configs.choose(tables.gate_up, tokens, number)
    )
    out = kernels.scatter_product(
        hidden, order, offsets, down, weights.contiguous(), configs.choose(tables.down, tokens, number)
    )
    return out, pre, order, offsets


def _fake_train(
    x: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    offsets = torch.empty(gate_up.shape[0] + 1, dtype=torch.int32, device=x.device)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], gate_up.shape[1]), order, offsets


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, slots, weights, gate_up, down, activation = inputs
    _, pre, order, offsets = output
    ctx.mark_non_differentiable(pre, order, offsets)
    ctx.save_for_backward(x, slots, weights, gate_up, down, pre, order, offsets)
    ctx.activation = activation


def _backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    x, slots, weights, gate_up, down, pre, order, offsets = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4)]
    if torch.is_grad_enabled():  # to be differentiated again: by way of the definition
        found = _differentiable(grad, x, slots, weights, gate_up, down, ctx.activation, wanted)
    else:
        found = _gradients(grad, x, weights, gate_up, down, pre, order, offsets, ctx.activation, wanted)
    x_grad, weights_grad, gate_up_grad, down_grad = (g if w else None for g, w in zip(found, wanted, strict=True))
    return x_grad, None, weights_grad, gate_up_grad, down_grad, None


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}


def _differentiable(
    grad: Tensor,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    wanted: list[bool],
) -> list[Tensor | None]:
    out = reference.experts(x, slots, weights, gate_up, down, _FUNCTIONS[activation])
    leaves = (x, weights, gate_up, down)
    found = iter(
        torch.autograd.grad(out, [t for t, w in zip(leaves, wanted, strict=True) if w], grad, create_graph=True)
    )
    return [next(found) if w else None for w in wanted]


def _run_gradients(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    pre: Tensor,
    order: Tensor,
    offsets: Tensor,
    activation: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.shape[0] == 0 or x.shape[1] == 0:
        found = _fake_gradients(grad, x, weights, gate_up, down, pre, order, offsets, activation, wanted)
        return tuple(t.zero_() for t in found)  # type: ignore[return-value]
    from . import triton as kernels
    from . import triton_backward as backward

    tokens, number = x.shape[0], gate_up.shape[0]
    grad, x, gate_up, down = (kernels.dense_rows(t) for t in (grad, x, gate_up, down))
    tables = configs.tables(x.dtype)
    of_x, of_weights, of_gate_up, of_down = wanted
    pre_grad, scaled, parts = backward.hidden_gradient(
        grad, order, offsets, down, pre, weights.contiguous(), activation, (of_x or of_gate_up, of_down, of_weights),
        configs.choose(tables.hidden_gradient, tokens, number),
    )  # fmt: skip
    x_grad, weights_grad, gate_up_grad, down_grad = (x.new_empty(0) for _ in wanted)  # results must not be one tensor
    if parts is not None:
        weights_grad = backward.scale_gradient(parts, order, offsets, weights.dtype, configs.REDUCE)
    chosen = configs.choose_weight_gradient(tables.weight_gradient, tokens, number)
    if scaled is not None:
        down_grad = backward.weight_gradient(grad, scaled, order, offsets, True, chosen)
        del scaled
    if of_gate_up:
        assert pre_grad is not None
        gate_up_grad = backward.weight_gradient(pre_grad, x, order, offsets, False, chosen)
    if of_x:
        assert pre_grad is not None
        x_grad = kernels.scatter_product(
            pre_grad, order, offsets, gate_up, None, configs.choose(tables.input_gradient, tokens, number), across=True
        )
    return x_grad, weights_grad, gate_up_grad, down_grad


def _fake_gradients(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = others[-1]
    shapes = [t.shape if w else (0,) for t, w in zip((x, weights, gate_up, down), wanted, strict=True)]
    x_grad, weights_grad, gate_up_grad, down_grad = (x.new_empty(shape) for shape in shapes)
    return x_grad, weights_grad, gate_up_grad, down_grad


_TENSORS = "Tensor x, Tensor slots, Tensor weights, Tensor gate_up, Tensor down, str activation"
_infer = define(f"top1_experts({_TENSORS}) -> Tensor", _run_infer, _fake_infer)
_gradients = define(
    "top1_experts_backward(Tensor grad, Tensor x, Tensor weights, Tensor gate_up, Tensor down, Tensor pre, "
    "Tensor order, Tensor offsets, str activation, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
)
_train = define(
    f"top1_experts_train({_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_train,
    _fake_train,
    backward=_backward,
    setup_context=_setup,
)
