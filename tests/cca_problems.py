"""Random inputs of `ops.cca_mix`, layouts of documents, padding and states, and both ways to solve them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import naive_zaya
from zaya_hf import ops

WEIGHTS = ("depthwise_weight", "depthwise_bias", "grouped_weight", "grouped_bias", "temperature")
INPUTS = ("query", "key", "value_current", "value_delayed")


@dataclass
class Problem:
    """Everything `cca_mix` reads, for ``rows`` x ``length`` tokens."""

    tensors: dict[str, Tensor]
    head_dim: int
    look_back: int

    def leaves(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t.requires_grad}


def draw(
    heads: int,
    groups: int,
    head_dim: int,
    width0: int,
    width1: int,
    rows: int,
    length: int,
    seed: int,
    dtype: torch.dtype,
) -> Problem:
    """Random inputs and weights of a scale at which every part matters; all of them want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
        value = around + scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return value.to(dtype).requires_grad_()

    channels, width = (heads + groups) * head_dim, groups * head_dim // 2
    tensors = {
        "query": normal(rows, length, heads * head_dim),
        "key": normal(rows, length, groups * head_dim),
        "value_current": normal(rows, length, width),
        "value_delayed": normal(rows, length, width),
        "depthwise_weight": normal(channels, 1, width0, scale=0.6),
        "depthwise_bias": normal(channels, scale=0.4),
        "grouped_weight": normal(channels, head_dim, width1, scale=0.6 * head_dim**-0.5),
        "grouped_bias": normal(channels, scale=0.4),
        "temperature": normal(groups, scale=0.2, around=0.9),
        "nothing": normal(width, scale=0.5),
    }
    rotated = max(head_dim // 2 // 2 * 2, 2)
    cos, sin = naive_zaya.rotary_tables(range(length), 50.0, rotated)
    tensors["cos"], tensors["sin"] = cos[None].to(dtype), sin[None].to(dtype)
    return Problem(tensors, head_dim, width0 + width1 - 2)


@dataclass
class Document:
    """Tokens ``row, start ... start + length - 1`` that see each other, and what they saw before."""

    row: int
    start: int
    length: int
    past: Tensor | None = None  # [C, K]
    past_value: Tensor | None = None  # [W]


def describe(
    documents: list[Document], rows: int, length: int, look_back: int
) -> tuple[Tensor, ops.SegmentStates | None]:
    """The `reach` and the `states` of a layout; tokens of no document are padding, which reaches nothing."""
    reach = torch.zeros(rows, length, dtype=torch.int64)
    for d in documents:
        reach[d.row, d.start : d.start + d.length] = torch.arange(d.length).clamp_max(max(look_back, 1))
    with_past = [d for d in documents if d.past is not None]
    if not with_past:
        return reach, None
    entries = max(look_back, 1)
    index = torch.zeros(len(with_past), entries, dtype=torch.int64)
    valid = torch.zeros(len(with_past), entries, dtype=torch.bool)
    for n, d in enumerate(with_past):
        for o in range(min(entries, d.length)):
            index[n, o], valid[n, o] = d.row * length + d.start + o, True
    states = ops.SegmentStates(
        torch.stack([d.past for d in with_past]), torch.stack([d.past_value for d in with_past]), index, valid
    )
    return reach, states


def mix(problem: Problem, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`cca_mix` on a problem, as ``[B, S, heads, D]``."""
    t = problem.tensors
    outputs = ops.cca_mix(
        torch.cat([t["query"], t["key"]], dim=-1),
        t["value_current"],
        t["value_delayed"],
        **{name: t[name] for name in WEIGHTS},
        cos=t["cos"],
        sin=t["sin"],
        head_dim=problem.head_dim,
        **{"value_of_nothing": t["nothing"], **arguments},
    )
    query, key, value = (out.transpose(1, 2) for out in outputs)
    return query, key, value


def naive(problem: Problem, documents: list[Document], **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the definition, with padding as documents of one token."""
    t = problem.tensors
    rows, length = t["query"].shape[:2]
    covered = {(d.row, d.start + i) for d in documents for i in range(d.length)}
    singles = [Document(r, c, 1) for r in range(rows) for c in range(length) if (r, c) not in covered]
    grid: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    weights = SimpleNamespace(**{name: t[name] for name in WEIGHTS})
    for d in documents + singles:
        span = slice(d.start, d.start + d.length)
        outputs = naive_zaya.cca(
            *(t[name][d.row, span] for name in INPUTS),
            t["cos"][0, span],
            t["sin"][0, span],
            weights,
            head_dim=problem.head_dim,
            past=d.past,
            past_value=d.past_value,
            **{"nothing": t["nothing"], **arguments},
        )
        for i in range(d.length):
            grid[d.row, d.start + i] = tuple(out[i] for out in outputs)
    query, key, value = (
        torch.stack([torch.stack([grid[r, c][k] for c in range(length)]) for r in range(rows)]) for k in range(3)
    )
    return query, key, value


def assert_same(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], leaves: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Equal outputs, and equal gradients of a random projection of them for every leaf."""
    generator = torch.Generator().manual_seed(99)
    directions = [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype) for w in want]
    for name, g, w in zip(("query", "key", "value"), got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    gradients = [
        torch.autograd.grad(
            sum((o * d).sum() for o, d in zip(outputs, directions, strict=True)),
            list(leaves.values()),
            allow_unused=True,
        )
        for outputs in (got, want)
    ]
    for name, g, w in zip(leaves, *gradients, strict=True):
        g = torch.zeros_like(leaves[name]) if g is None else g
        w = torch.zeros_like(leaves[name]) if w is None else w
        scale = max(float(w.abs().max()), 1.0) if w.numel() else 1.0
        torch.testing.assert_close(
            g, w, rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


def with_random_past(documents: list[Document], problem: Problem, chosen: set[int], seed: int) -> dict[str, Tensor]:
    """Give the chosen documents a state; returns the states' tensors as leaves."""
    generator = torch.Generator().manual_seed(seed)
    channels = problem.tensors["depthwise_bias"].shape[0]
    width, dtype = problem.tensors["nothing"].shape[0], problem.tensors["nothing"].dtype
    leaves = {}
    for n in sorted(chosen):
        past = torch.randn(channels, problem.look_back, generator=generator, dtype=torch.float64).to(dtype)
        value = torch.randn(width, generator=generator, dtype=torch.float64).to(dtype)
        documents[n].past, documents[n].past_value = past.requires_grad_(), value.requires_grad_()
        leaves[f"past {n}"], leaves[f"past value {n}"] = past, value
    return leaves


def layout(name: str) -> tuple[int, int, list[Document], set[int]]:
    """rows, length, documents, and which of those have a past."""
    if name == "one-document-per-row":
        return 2, 7, [Document(0, 0, 7), Document(1, 0, 7)], set()
    if name == "pads-and-documents":  # left, middle and right padding; documents of one token
        return (
            3,
            8,
            [Document(0, 3, 5), Document(1, 0, 1), Document(1, 1, 4), Document(1, 6, 2), Document(2, 0, 6)],
            set(),
        )
    if name == "rows-with-a-past":
        return 2, 6, [Document(0, 0, 6), Document(1, 0, 6)], {0, 1}
    if name == "one-token-with-a-past":  # a decoding step
        return 3, 1, [Document(0, 0, 1), Document(1, 0, 1), Document(2, 0, 1)], {0, 1, 2}
    assert name == "segments-with-a-past"
    documents = [
        Document(0, 0, 2),
        Document(0, 2, 5),
        Document(0, 7, 1),
        Document(1, 1, 4),
        Document(1, 5, 1),
        Document(1, 7, 1),
    ]
    return 2, 8, documents, {0, 1, 3, 4}


LAYOUTS = (
    "one-document-per-row",
    "pads-and-documents",
    "rows-with-a-past",
    "one-token-with-a-past",
    "segments-with-a-past",
)
