"""What is timed: every operator at a size, its stock counterparts, and what it has to read, write and multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.zaya.configuration_zaya import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaExperts

from zaya_hf import ops
from zaya_hf.ops.cca_mix import reference as cca_reference
from zaya_hf.ops.cca_step import reference as step_reference
from zaya_hf.ops.experts import reference as experts_reference
from zaya_hf.ops.linear_cross_entropy import reference as loss_reference
from zaya_hf.ops.residual_norm import reference as norm_reference
from zaya_hf.ops.router import reference as router_reference

Function = Callable[..., Any]


@dataclass(frozen=True)
class Widths:
    """Sizes of a model, as in `zaya_hf.ops.Facts`."""

    hidden: int = 2048
    heads: int = 8
    groups: int = 2
    head_dim: int = 128
    rotated: int = 64
    experts: int = 16
    inner: int = 2048
    router: int = 256
    vocabulary: int = 262_272

    @property
    def channels(self) -> int:
        """Queries' and keys'."""
        return (self.heads + self.groups) * self.head_dim

    @property
    def value_half(self) -> int:
        return self.groups * self.head_dim // 2


SMALL = Widths(512, 4, 1, 64, 32, 4, 512, 64, 8192)


@dataclass(frozen=True)
class Case:
    """An operator at one size.

    Attributes:
        operator: key of `zaya_hf.ops.backends`; `size` in words.
        inputs: makes the arguments for a number of tokens; tensors that require a gradient get one.
        tokens: that are timed; `checked` as many as are compared with float64, which takes far more memory.
        ours, eager: functions of those arguments, which give a tensor or several; None among them is left out.
        exact: the definition, for arguments in float64.
        stock: what `eager` is; `others`: further stock ones by name.
        flops: of the products for the tokens that are timed, forward.
        backward: whether there is one.
    """

    operator: str
    size: str
    inputs: Callable[[int], dict[str, Any]]
    tokens: int
    checked: int
    ours: Function
    eager: Function
    exact: Function
    stock: str
    flops: float
    backward: bool = True
    others: dict[str, Function] = field(default_factory=dict)


def cases(widths: Widths, tokens: int, few: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """All of them.

    Args:
        tokens: of training and prefill; `few`: rows that decode.
    """

    def drawn(*shape: int, scale: float = 1.0, of: torch.dtype = dtype, learned: bool = True) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(of).requires_grad_(learned)

    yield _loss(widths, tokens, drawn)
    for count in (tokens, few):
        yield _norm(widths, count, drawn)
    yield _mix(widths, tokens, drawn)
    for count in (tokens, few):
        yield _experts(widths, count, drawn)
    for count in (tokens, few):
        yield _router(widths, count, drawn)
    for count in dict.fromkeys((1, few)):
        yield _step(widths, count, drawn)


def _loss(widths: Widths, tokens: int, drawn: Callable[..., Tensor]) -> Case:
    def inputs(count: int) -> dict[str, Any]:
        hidden = drawn(count, widths.hidden)
        weight = drawn(widths.vocabulary, widths.hidden, scale=widths.hidden**-0.5)
        targets = torch.randint(widths.vocabulary, (count,), device=hidden.device)
        targets[:: max(2, count // 8)] = -100
        return {"hidden": hidden, "weight": weight, "targets": targets, "divisor": (targets >= 0).sum().float()}

    def with_function(function: Function) -> Function:
        def run(hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor) -> Tensor:
            return function(hidden, weight, None, targets, divisor=divisor)

        return run

    eager = with_function(loss_reference.linear_cross_entropy)
    return Case(
        "linear_cross_entropy",
        f"{tokens:,} tokens, {widths.vocabulary:,} words",
        inputs,
        tokens,
        min(tokens, 512),
        with_function(ops.linear_cross_entropy),
        eager,
        eager,
        "F.linear and F.cross_entropy",
        2.0 * tokens * widths.hidden * widths.vocabulary,
    )


def _norm(widths: Widths, tokens: int, drawn: Callable[..., Tensor]) -> Case:
    names = ("output_scale", "output_bias", "residual_scale", "residual_bias", "weight")

    def inputs(count: int) -> dict[str, Any]:
        vectors = {name: drawn(widths.hidden, scale=0.3) for name in names}
        residual = drawn(count, widths.hidden, of=torch.promote_types(vectors["weight"].dtype, torch.float32))
        return {"output": drawn(count, widths.hidden), "residual": residual} | vectors

    def eager(**arguments: Tensor) -> Any:
        return norm_reference.residual_merge_norm(**arguments, eps=1e-5)

    return Case(
        "residual_norm",
        f"{tokens:,} tokens",
        inputs,
        tokens,
        min(tokens, 2048),
        lambda **arguments: ops.residual_merge_norm(**arguments, eps=1e-5),
        eager,
        eager,
        "its definition in plain PyTorch",
        0.0,
    )


def _mix_inputs(widths: Widths, rows: int, length: int, drawn: Callable[..., Tensor]) -> dict[str, Any]:
    c, d = widths.channels, widths.head_dim
    first = torch.arange(length, dtype=torch.float32)[:, None]
    angles = first / 10_000 ** (torch.arange(widths.rotated // 2) / (widths.rotated // 2))
    raw = drawn(rows, length, c)
    table = torch.cat([angles, angles], dim=-1)[None].to(raw.device)
    return {
        "raw": raw,
        "value_current": drawn(rows, length, widths.value_half),
        "value_delayed": drawn(rows, length, widths.value_half),
        "depthwise_weight": drawn(c, 1, 2, scale=0.5),
        "depthwise_bias": drawn(c, scale=0.1),
        "grouped_weight": drawn(c, d, 2, scale=(2 * d) ** -0.5),
        "grouped_bias": drawn(c, scale=0.1),
        "temperature": drawn(widths.groups),
        "cos": table.cos(),
        "sin": table.sin(),
    }


def _mix_flops(widths: Widths) -> float:
    return 2.0 * widths.channels * widths.head_dim * 2


def _mix(widths: Widths, tokens: int, drawn: Callable[..., Tensor]) -> Case:
    def inputs(count: int) -> dict[str, Any]:
        rows = max(1, count // 4096)
        return _mix_inputs(widths, rows, count // rows, drawn)

    def eager(**given: Tensor) -> Any:
        values = given.pop("value_current"), given.pop("value_delayed")
        scale = cca_reference.key_scale(given.pop("temperature"), False)
        pair = cca_reference.mix_queries_and_keys(**given, key_scale=scale, head_dim=widths.head_dim)
        return *pair, cca_reference.delayed_values(*values, widths.head_dim, None, None, None)

    return Case(
        "cca_mix",
        f"{tokens:,} tokens",
        inputs,
        tokens,
        min(tokens, 1024),
        lambda **given: ops.cca_mix(**given, head_dim=widths.head_dim),
        eager,
        eager,
        "its definition in plain PyTorch",
        tokens * _mix_flops(widths),
    )


def _step(widths: Widths, rows: int, drawn: Callable[..., Tensor]) -> Case:
    def inputs(count: int) -> dict[str, Any]:
        given = _mix_inputs(widths, count, 1, drawn)
        states = {"qk_state": drawn(count, widths.channels, 2), "value_state": drawn(count, widths.value_half)}
        return {name: t.detach() for name, t in (given | states).items()}

    def eager(**given: Tensor) -> Any:
        return step_reference.cca_step(**given, head_dim=widths.head_dim)

    return Case(
        "cca_step",
        "1 row" if rows == 1 else f"{rows} rows",
        inputs,
        rows,
        rows,
        lambda **given: ops.cca_step(**given, head_dim=widths.head_dim),
        eager,
        eager,
        "its definition in plain PyTorch",
        rows * _mix_flops(widths),
        backward=False,
    )


def _experts(widths: Widths, tokens: int, drawn: Callable[..., Tensor]) -> Case:
    act = torch.nn.SiLU()

    def inputs(count: int) -> dict[str, Any]:
        x = drawn(count, widths.hidden)
        shapes = (widths.experts, 2 * widths.inner, widths.hidden), (widths.experts, widths.hidden, widths.inner)
        slots = torch.randperm(count, device=x.device) % widths.experts  # every expert has its share
        slots[31::32] = widths.experts  # and one token in 32 skips them
        return {
            "x": x,
            "slots": slots,
            "weights": torch.rand(count, device=x.device).requires_grad_(),
            "gate_up_proj": drawn(*shapes[0], scale=widths.hidden**-0.5),
            "down_proj": drawn(*shapes[1], scale=widths.inner**-0.5),
        }

    def transformers_with(implementation: str) -> Function:
        config = ZayaConfig(
            num_experts=widths.experts,
            hidden_size=widths.hidden,
            moe_intermediate_size=widths.inner,
            hidden_act="silu",
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            module = ZayaExperts(config)

        def run(x: Tensor, slots: Tensor, weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
            skips = slots >= widths.experts  # as transformers' router says it
            index, weight = slots.masked_fill(skips, 0)[:, None], weights.masked_fill(skips, 0)[:, None].to(x.dtype)
            parameters = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
            return torch.func.functional_call(module, parameters, (x, index, weight))

        return run

    return Case(
        "experts",
        f"{tokens:,} tokens",
        inputs,
        tokens,
        min(tokens, 2048),
        lambda **given: ops.experts(**given, act_fn=act),
        transformers_with("eager"),
        lambda **given: experts_reference.experts(**given, act_fn=F.silu),
        "transformers' ZayaExperts, eager",
        2.0 * tokens * widths.hidden * widths.inner * 3,
        others={"grouped_mm": transformers_with("grouped_mm")},
    )


def _router(widths: Widths, tokens: int, drawn: Callable[..., Tensor]) -> Case:
    r, slots = widths.router, widths.experts + 1
    shapes = {
        "down_weight": (r, widths.hidden),
        "down_bias": (r,),
        "state_scale": (r,),
        "norm_weight": (r,),
        "fc1_weight": (r, r),
        "fc1_bias": (r,),
        "fc2_weight": (r, r),
        "fc2_bias": (r,),
        "out_weight": (slots, r),
    }

    def inputs(count: int) -> dict[str, Any]:
        found = {name: drawn(*shape, scale=shape[-1] ** -0.5) for name, shape in shapes.items()}
        x = drawn(count, widths.hidden)
        # slots are given, so that a rounding which tips the choice of one cannot look like a fault
        replayed = torch.randint(slots, (count,), device=x.device)
        return {"x": x, "state": drawn(count, r), "replayed": replayed} | found

    def with_function(function: Function) -> Function:
        def run(x: Tensor, state: Tensor, replayed: Tensor, **parameters: Tensor) -> Any:
            biases = torch.zeros(slots, device=x.device)
            found = function(x, state, ops.RouterWeights(**parameters, eps=1e-5), biases, replayed)
            return found.logits, found.weights, found.state

        return run

    eager = with_function(router_reference.route)
    return Case(
        "router",
        f"{tokens:,} tokens",
        inputs,
        tokens,
        min(tokens, 2048),
        with_function(ops.route),
        eager,
        eager,
        "its definition in plain PyTorch",
        2.0 * tokens * (widths.hidden * r + 2 * r * r + r * slots),
    )
