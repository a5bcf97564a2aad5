"""Parameters and gradients without a model. Helpers for the tests of optimizers."""

from __future__ import annotations

import torch
from torch import nn


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def draw_gradients(tensors: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def copies(tensors: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.detach().clone()) for tensor in tensors]


def run(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], steps: range = range(5)) -> None:
    for step in steps:
        draw_gradients(tensors, step)
        optimizer.step()
