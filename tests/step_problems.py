"""Decoding steps of CCA: rows with states, padding and new documents among their tokens, solved token by token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from cca_problems import WEIGHTS, Document, Problem, draw, naive
from zaya_hf import ops

#: by name, the segment of every token of every row: -1 padding, 0 the document of the state, others begin here
LAYOUTS: dict[str, list[list[int]]] = {
    "one-token": [[0], [1], [-1], [0]],
    "padding": [[-1, -1, 0, 0], [0, 0, -1, -1], [-1, 0, -1, -1], [-1, -1, -1, -1], [0, 0, 0, 0]],
    "documents": [[1, 1, 1, 1], [0, 1, 1, 2], [-1, 1, 1, -1], [0, 0, 1, -1]],
    "eight": [[0] * 8, [-1, -1, -1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2, -1]],
}


@dataclass
class Step:
    """Everything that `cca_step` reads."""

    problem: Problem
    qk_state: Tensor
    value_state: Tensor
    rows: ops.StepRows | None
    documents: list[Document]
    #: column of each row's last real token; -1 without one
    last: list[int]

    def arguments(self, dtype: torch.dtype | None = None, **others: Any) -> dict[str, Any]:
        """Of `cca_step`, in another dtype if wanted."""
        t = self.problem.tensors
        tensors = {
            "raw": torch.cat([t["query"], t["key"]], dim=-1),
            "value_current": t["value_current"],
            "value_delayed": t["value_delayed"],
            "qk_state": self.qk_state,
            "value_state": self.value_state,
            **{name: t[name] for name in (*WEIGHTS, "cos", "sin")},
            "value_of_nothing": t["nothing"],
        }
        cast = {name: tensor.detach().clone().to(dtype or tensor.dtype) for name, tensor in tensors.items()}
        return {**cast, "head_dim": self.problem.head_dim, "rows": self.rows, **others}


def draw_step(
    shape: tuple[int, int, int],
    widths: tuple[int, int],
    layout: list[list[int]] | tuple[int, int],
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Step:
    """Random inputs.

    Args:
        shape: query heads, key/value heads, head width.
        layout: one of `LAYOUTS`, or rows and length of plain rows.
    """
    is_plain = isinstance(layout, tuple)
    segments = [[0] * layout[1]] * layout[0] if isinstance(layout, tuple) else layout
    problem = draw(*shape, *widths, len(segments), len(segments[0]), seed, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    channels, width = problem.tensors["depthwise_bias"].shape[0], problem.tensors["nothing"].shape[0]
    qk = torch.randn(len(segments), channels, problem.look_back, generator=generator, dtype=torch.float64).to(dtype)
    value = torch.randn(len(segments), width, generator=generator, dtype=torch.float64).to(dtype)
    documents = []
    for row, of_row in enumerate(segments):
        column = 0
        for segment, tokens in groupby(of_row):
            length = len(list(tokens))
            if segment != -1:
                past = (qk[row], value[row]) if segment == 0 else ()
                documents.append(Document(row, column, length, *past))
            column += length
    last = [max((column for column, s in enumerate(of_row) if s != -1), default=-1) for of_row in segments]
    rows = None if is_plain else describe_rows(segments, problem.look_back)
    return Step(problem, qk, value, rows, documents, last)


def describe_rows(segments: list[list[int]], look_back: int) -> ops.StepRows:
    """What `visibility` says of them."""
    batch_size, length, entries = len(segments), len(segments[0]), max(look_back, 1)
    reach = torch.zeros(batch_size, length, dtype=torch.long)
    index = torch.zeros(batch_size, entries, dtype=torch.long)
    valid = torch.zeros(batch_size, entries, dtype=torch.bool)
    continues, has_real = torch.zeros(2, batch_size, dtype=torch.bool)
    last = torch.zeros(batch_size, dtype=torch.long)
    for row, of_row in enumerate(segments):
        for column in range(1, length):
            if of_row[column] == of_row[column - 1] != -1:
                reach[row, column] = min(int(reach[row, column - 1]) + 1, entries)
        real = [column for column in range(length) if of_row[column] != -1]
        has_real[row], last[row] = bool(real), max(real, default=0)
        first = min(real, default=length - 1)
        continues[row] = bool(real) and of_row[first] == 0
        for offset in range(entries):
            column = min(first + offset, length - 1)
            index[row, offset] = row * length + column
            valid[row, offset] = of_row[column] != -1 and reach[row, column] == offset
    return ops.StepRows(reach, continues, index, valid, last, has_real)


def naive_step(step: Step, **arguments: Any) -> tuple[Tensor, ...]:
    """From the definition: queries, keys and values ``[B, heads, S, D]``, and both next states."""
    t = step.problem.tensors
    results = [out.transpose(1, 2) for out in naive(step.problem, step.documents, **arguments)]
    qk, value = step.qk_state.clone(), step.value_state.clone()
    raw = torch.cat([t["query"], t["key"]], dim=-1).detach()
    for document in step.documents:
        end = document.start + document.length
        if step.last[document.row] != end - 1:
            continue
        past = raw.new_zeros(raw.shape[-1], step.problem.look_back) if document.past is None else document.past
        seen = torch.cat([past, raw[document.row, document.start : end].T], dim=1)
        qk[document.row] = seen[:, seen.shape[1] - step.problem.look_back :]
        value[document.row] = t["value_delayed"][document.row, end - 1].detach()
    return *results, qk, value
