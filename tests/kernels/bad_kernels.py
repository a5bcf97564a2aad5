"""A product, and a sum of products that no matrix instruction does, for tests that look at what kernels become."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zaya_hf.ops.common.configs import KernelConfig
from zaya_hf.ops.common.triton import blocks_of, dot, launch
from zaya_hf.ops.common.workloads import Workload


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :])
        right = tl.load(b + columns[None, :].to(tl.int64) * K + k[:, None])
        acc = dot(left, right, acc)
    tl.store(c + rows[:, None].to(tl.int64) * N + columns[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def rows_times_vector(a, b, c, K, BM: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :]).to(tl.float32)
        acc += tl.sum(left * tl.load(b + k).to(tl.float32)[None, :], axis=1)
    tl.store(c + rows, acc.to(c.dtype.element_ty))


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["unaligned"])
def many_parameters(
    pointer, number, plain, unaligned, wide: tl.int64, share: tl.float32, N: tl.constexpr, M: tl.constexpr = 4
):
    tl.store(pointer, number)


def product_workload(*configs: KernelConfig, dtype: torch.dtype = torch.bfloat16, size: int = 4096) -> Workload:
    """A square product."""

    def run(config: KernelConfig) -> None:
        a, b, c = (torch.empty(size, size, dtype=dtype, device="meta") for _ in range(3))
        grid = (blocks_of(size, config["BM"]), blocks_of(size, config["BN"]))
        launch(product, grid, config, a, b, c, size, size, size)

    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return Workload("product", f"{size}^3", name, configs, run, 3 * size**2 * dtype.itemsize, 2 * size**3)


def vector_workload(*configs: KernelConfig, size: int = 4096) -> Workload:
    """Said to have products that a matrix instruction could do, and has none."""

    def run(config: KernelConfig) -> None:
        a, b, c = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((size, size), size, size))
        launch(rows_times_vector, (blocks_of(size, config["BM"]),), config, a, b, c, size)

    return Workload("rows times vector", f"{size}^2", "bf16", configs, run, 2 * size**2, 2 * size**2)
