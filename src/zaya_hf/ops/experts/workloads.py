"""The experts' kernels at the sizes of ZAYA1-8B, for the table of compiled kernels and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..common.configs import KernelConfig
from ..common.dtypes import DTYPE_NAMES
from ..common.workloads import Workload
from . import configs

WIDTH, INNER, EXPERTS = 2048, 2048, 16
TOKENS = 16384
#: tokens at which a tile of that many rows is taken: of training, of a long prompt, of many requests that decode
TOKENS_OF_TILE = {128: TOKENS, 64: 1024, 16: 64}


def workloads(dtype: torch.dtype) -> list[Workload]:
    """Every kernel of the experts with all its configurations for `dtype`."""
    from . import triton, triton_backward

    def made(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    gate_up, down = made(EXPERTS, 2 * INNER, WIDTH), made(EXPERTS, WIDTH, INNER)
    offsets = made(EXPERTS + 1, of=torch.int32)
    size, name = dtype.itemsize, DTYPE_NAMES[dtype]
    found: list[Workload] = []

    def add(kernel: str, tokens: int, config: KernelConfig, launch: Callable, values: float, macs: float) -> None:
        """`values` read and written, and products as multiplications per token."""
        flops = 2.0 * tokens * macs
        found.append(Workload(f"experts {kernel}", f"{tokens} tokens", name, (config,), launch, values * size, flops))

    def by_tile(table: Mapping[int, KernelConfig]) -> list[tuple[int, KernelConfig, Tensor, Tensor, Tensor, Tensor]]:
        rows = []
        for tile, config in table.items():
            n = TOKENS_OF_TILE[tile]
            tensors = made(n, WIDTH), made(n, INNER), made(n, 2 * INNER), made(n, of=torch.int32)
            rows.append((n, config, *tensors))
        return rows

    tables = configs.tables(dtype)
    for n, config, x, hidden, pre, order in by_tile(tables.gate_up):
        values = gate_up.numel() + x.numel() + hidden.numel()
        for kernel, saved in (("gate and up", None), ("gate and up, saved", pre)):
            add(
                kernel, n, config,
                lambda c, x=x, order=order, saved=saved: triton.gate_up(x, order, offsets, gate_up, "silu", saved, c),
                values + (0 if saved is None else pre.numel()), 2.0 * WIDTH * INNER,
            )  # fmt: skip
    for n, config, x, hidden, _, order in by_tile(tables.down):
        add(
            "down", n, config,
            lambda c, h=hidden, order=order, n=n: triton.scatter_product(h, order, offsets, down, made(n), c),
            down.numel() + hidden.numel() + x.numel(), 1.0 * WIDTH * INNER,
        )  # fmt: skip
    for n, config, x, _, pre, order in by_tile(tables.input_gradient):
        add(
            "backward: input", n, config,
            lambda c, pre=pre, order=order: triton.scatter_product(pre, order, offsets, gate_up, None, c, across=True),
            gate_up.numel() + pre.numel() + x.numel(), 2.0 * WIDTH * INNER,
        )  # fmt: skip
    for n, config, x, hidden, pre, order in by_tile(tables.hidden_gradient):
        add(
            "backward: hidden", n, config,
            lambda c, x=x, pre=pre, order=order, n=n: triton_backward.hidden_gradient(
                x, order, offsets, down, pre, made(n), "silu", (True, True, True), c
            ),
            down.numel() + x.numel() + 2 * pre.numel() + hidden.numel(), 1.0 * WIDTH * INNER,
        )  # fmt: skip
    x, hidden, pre = made(TOKENS, WIDTH), made(TOKENS, INNER), made(TOKENS, 2 * INNER)
    order = made(TOKENS, of=torch.int32)
    for config in tables.weight_gradient.values():
        add(
            "backward: gate_up weights", TOKENS, config,
            lambda c: triton_backward.weight_gradient(pre, x, order, offsets, False, c),
            gate_up.numel() + pre.numel() + x.numel(), 2.0 * WIDTH * INNER,
        )  # fmt: skip
        add(
            "backward: down weights", TOKENS, config,
            lambda c: triton_backward.weight_gradient(x, hidden, order, offsets, True, c),
            down.numel() + hidden.numel() + x.numel(), 1.0 * WIDTH * INNER,
        )  # fmt: skip
    slots = made(TOKENS, of=torch.int64)
    for most, config in configs.SORT.items():
        experts = EXPERTS if most == min(configs.SORT) else most - 2
        add(
            f"sorting, {experts} experts", TOKENS, config, lambda c, e=experts: triton.sort(slots, e, c),
            12 / size * TOKENS, 0.0,
        )  # fmt: skip
    parts = made(32, TOKENS, of=torch.float32)
    add(
        "backward: router weights", TOKENS, configs.REDUCE,
        lambda c: triton_backward.scale_gradient(parts, order, offsets, dtype, c), (4 * 32 / size + 1) * TOKENS, 0.0,
    )  # fmt: skip
    for n in (1, configs.DECODING_TOKENS):
        hit = min(n, EXPERTS) / EXPERTS
        few, inner, few_slots = made(n, WIDTH), made(n, INNER), made(n, of=torch.int64)
        # one token is multiplied on vector units, which are no matrix instructions
        add(
            "decoding: gate and up", n, configs.DECODE_GATE_UP[dtype][n],
            lambda c, x=few, s=few_slots: triton.decode_gate_up(x, s, gate_up, "silu", c),
            gate_up.numel() * hit, 0.0 if n == 1 else 2.0 * WIDTH * INNER,
        )  # fmt: skip
        add(
            "decoding: down", n, configs.DECODE_DOWN[dtype][n],
            lambda c, h=inner, s=few_slots, n=n: triton.decode_down(h, s, down, made(n), c),
            down.numel() * hit, 0.0 if n == 1 else 1.0 * WIDTH * INNER,
        )  # fmt: skip
    return found
