"""Problems for the loss without the logits, and what is right of a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zaya_hf import ZayaForCausalLM
from zaya_hf.ops.linear_cross_entropy import chunked, compiled, reference
from zaya_hf.testing import random_ids

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
IGNORED = -100


class Case:
    """Rows, a head and targets, drawn afresh. `where`: which rows have a target."""

    def __init__(self, seed: int, rows: int, words: int, width: int, bias: bool, where: str = "some"):
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {
            "hidden": torch.randn(rows, width, generator=generator, dtype=torch.float64),
            "weight": torch.randn(words, width, generator=generator, dtype=torch.float64) * 0.5,
        }
        if bias:
            self.tensors["bias"] = torch.randn(words, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(0, words, (rows,), generator=generator)
        if where != "all":
            ignored = torch.rand(rows, generator=generator) < (0.3 if where == "some" else 2)
            self.targets[ignored] = IGNORED
        self.number = (self.targets != IGNORED).sum()

    def largest_logsumexp(self) -> float:
        """In size."""
        logits = self.tensors["hidden"] @ self.tensors["weight"].t() + self.tensors.get("bias", 0)
        return max([0.0, *logits.logsumexp(1).abs().tolist()])

    def leaves(self, dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Rounded to `dtype`."""
        return {name: t.to(dtype).requires_grad_(name not in frozen) for name, t in self.tensors.items()}

    def run(self, function: Any, leaves: dict[str, Tensor], factor: float = 1.0, **options: Any) -> dict[str, Tensor]:
        loss = function(leaves["hidden"], leaves["weight"], leaves.get("bias"), self.targets, **options)
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        found = torch.autograd.grad(loss * factor, list(wanted.values()))
        return {"loss": loss.detach(), **dict(zip(wanted, found, strict=True))}

    def exact(self, leaves: dict[str, Tensor], factor: float = 1.0, **options: Any) -> dict[str, Tensor]:
        """In float64 from the same, rounded, numbers."""
        wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in leaves.items()}
        return self.run(reference.linear_cross_entropy, wide, factor, **options)


def split(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Chunks of so many rows."""
    monkeypatch.setattr(chunked, "_chunk_size", lambda number, weight, dtype: rows)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm())


def assert_as_exact(
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], dtype: Any, terms: float = 0.0
) -> None:
    """Not further from the truth than twice the reference, which rounds as often, and a few roundings of the whole.

    Args:
        terms: size of what is added up for an element of a gradient, where the sum may be close to 0.
    """
    assert got.keys() == plain.keys() == exact.keys()
    for name, tensor in got.items():
        assert tensor.dtype == plain[name].dtype, name
        assert tensor.shape == plain[name].shape, name
        assert tensor.isfinite().all(), name
        rounding = torch.finfo(torch.promote_types(dtype, torch.float32) if name == "loss" else dtype).eps
        whole = 4 * float(exact[name].norm()) + terms * tensor.numel() ** 0.5
        bound = 2 * error(plain[name], exact[name]) + rounding * whole
        assert error(tensor, exact[name]) <= bound, name


def which(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the implementations that are called from now on."""
    called: list[str] = []
    for module, name in ((chunked, "chunked"), (compiled, "compiled"), (reference, "reference")):
        real = module.linear_cross_entropy
        monkeypatch.setattr(
            module, "linear_cross_entropy", lambda *a, n=name, f=real, **k: called.append(n) or f(*a, **k)
        )
    return called


def step(model: ZayaForCausalLM, **given: Any) -> dict[str, Tensor]:
    ids = random_ids(2, 12, seed=11)
    labels = ids.clone()
    labels[1, 8:] = -100
    model.zero_grad()
    output = model(ids, **{"labels": labels, **given})
    assert (output.logits is None) == (given.get("skip_logits") is not False)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in found.values())
    return {"loss": output.loss.detach(), **found}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Equal up to a share of each gradient's norm."""
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype, name
        assert (tensor - want[name]).norm() <= tolerance * want[name].norm().clamp_min(1.0), name
