"""What a suite will cost before it runs: items, tokens, time and memory for each model, without data and weights.

Counts are those of the suite's file, which says what is typical; time is arithmetic and memory traffic over a speed
that is measured here or assumed, and said to be. They tell minutes from days; they are no forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .loading import shape
from .machine_speed import Speed, here, known
from .models import ModelSpec, Shape
from .suites import Entry, Suite, definitions
from .task_definitions import Leaf

__all__ = ["Cost", "Work", "cost", "dry_run", "work_of"]

_ROWS = 64  # texts that are generated side by side
_TOKEN_BUDGET = 4096  # tokens that go through a model at a time when it scores
_PLANNED = ("MI300X", "H100")  # for whom the machine at hand is not the one that will run it
# Values of the model's width that a token has at a time in one layer: the residual stream, what a norm gives, queries,
# keys, values, and the inner width of a feed-forward layer, which is three to four times the model's.
_WIDTHS = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Work:
    """What one entry of a suite asks of any model.

    Attributes:
        entry: of the suite.
        items: that are evaluated.
        prompt_tokens: all prompts together, each read once, for all its answers.
        answer_tokens: all answers: scored ones, or generated ones as they typically are.
        most_tokens: generated ones if none ends by itself; 0 where nothing is generated.
        budget: of one generated answer; 0 where nothing is generated.
    """

    entry: Entry
    items: int
    prompt_tokens: int
    answer_tokens: int
    most_tokens: int
    budget: int

    @property
    def generates(self) -> bool:
        return self.budget > 0


@dataclass(frozen=True)
class Cost:
    """What a suite costs with one model on one device.

    Attributes:
        operations: floating-point ones.
        seconds: on one device.
        memory: bytes at most: weights, and what is computed at a time.
    """

    operations: float
    seconds: float
    memory: float


def work_of(suite: Suite, *, limit: int | None = None) -> list[Work]:
    """The work of each entry, by the counts of the suite's file.

    Args:
        limit: only so many items of each task; of a group so many of each member.

    Raises:
        ValueError: the limit is not positive, or a task is unknown.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, but it must be at least 1")
    found = definitions(suite)
    return [_work(entry, found[entry.task], limit) for entry in suite.entries]


def cost(work: Sequence[Work], shape: Shape, speed: Speed, *, bytes_per_value: int, thinks: bool = False) -> Cost:
    """What `work` costs with a model of that shape.

    A token costs two operations for each parameter that it uses, and four for each value of the model's width, layer
    and earlier token in attention; the head's matrix product counts only where a word is predicted. While texts are
    generated, each step reads the weights once and the keys and values of all rows.

    Args:
        bytes_per_value: of weights and activations.
        thinks: the model thinks before it answers; then the whole budget is taken to be used.
    """
    head = shape.vocab_size * shape.hidden_size
    used = shape.parameters if shape.parameters_active is None else shape.parameters_active
    body = max(used - (shape.parameters - shape.parameters_without_embedding), 0)
    per_value = 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_per_value  # keys and values of a token
    weights = shape.parameters * bytes_per_value
    operations = seconds = 0.0
    computed = float(_TOKEN_BUDGET * per_value)
    for one in work:
        asked = one.items * one.entry.answers
        answers = one.most_tokens if thinks and one.generates else one.answer_tokens
        length = one.entry.prompt_tokens + (answers / asked if asked else 0)
        read = one.prompt_tokens + (0 if one.generates else answers)
        attention = 2 * shape.layers * shape.hidden_size * length  # of a token, in the middle of its text
        reading = read * (2 * body + attention) + 2 * head * (asked if one.generates else answers)
        operations += reading
        seconds += reading / speed.operations
        if one.generates:
            rows = min(_ROWS, max(asked, 1))
            per_token = 2 * (body + head) + 2 * attention
            # With several rows a mixture of experts reads more of its experts than one token uses.
            step_bytes = min(weights, rows * used * bytes_per_value) + rows * length * per_value
            step = max(step_bytes / speed.bandwidth, rows * per_token / speed.operations)
            operations += answers * per_token
            seconds += answers / rows * step
            computed = max(computed, rows * (one.entry.prompt_tokens + one.budget) * per_value)
    activations = _TOKEN_BUDGET * shape.hidden_size * _WIDTHS * bytes_per_value
    logits = 2 * 4 * shape.vocab_size * (_ROWS if any(one.generates for one in work) else 1)  # in fp32, with their logs
    return Cost(operations, seconds, weights + computed + activations + logits)


def dry_run(suite: Suite, specs: Sequence[ModelSpec], *, limit: int | None = None, device: str | None = None) -> str:
    """Tables of what an evaluation will cost, and where the figures come from.

    Args:
        limit: as for `work_of`.
        device: that would run it; None is a GPU if there is one.

    Raises:
        ValueError: as `work_of`; or the config of a model's folder cannot be read.
    """
    work = work_of(suite, limit=limit)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    speeds: dict[str, str] = {name: known(name).source for name in _PLANNED}
    heads = [
        "model",
        "dtype",
        "parameters",
        "active",
        "Pflop",
        f"time on {chosen}",
        *(f"1 {name}" for name in _PLANNED),
        "memory",
    ]
    rows, notes = [], []
    for spec in specs:
        found = shape(spec)
        if found is None:
            rows.append([spec.name, spec.dtype, *["?"] * (len(heads) - 2)])
            notes.append(f"{spec.name}: its size is not known before its files are here")
            continue
        dtype = _DTYPES.get(spec.dtype, torch.float32 if chosen == "cpu" else torch.bfloat16)
        speed = here(chosen, dtype)
        speeds[speed.source] = speed.source
        thinks = spec.thinking is not None
        costs = [
            cost(work, found, one, bytes_per_value=dtype.itemsize, thinks=thinks)
            for one in (speed, *(known(name) for name in _PLANNED))
        ]
        active = found.parameters_active
        rows.append(
            [
                spec.name,
                str(dtype).removeprefix("torch."),
                _count(found.parameters),
                "?" if active is None else _count(active),
                f"{costs[0].operations / 1e15:.3g}",
                *(_time(one.seconds) for one in costs),
                f"{costs[0].memory / 1e9:.2g} GB",
            ]
        )
        notes += _notes(spec, work, thinks)
        if active is None:
            notes.append(f"{spec.name}: how many of its experts a token uses is not known; time is for all of them")
        if speed.memory is not None and costs[0].memory > speed.memory:
            notes.append(f"{spec.name}: does not fit on {speed.name}, which has {speed.memory / 1e9:.0f} GB")
    where = "time of one device, without loading weights and data; typical lengths from the suite's file"
    parts = [
        f"{suite.name}: {suite.title}" + (f" (at most {limit} items of a task)" if limit is not None else ""),
        _work_table(work),
        _table(heads, rows, left=2),
        "\n".join(
            [
                f"Items and tokens: {where}; nothing was loaded or counted.",
                "Time: operations and memory traffic, whichever takes longer, over",
                *(f"  - {text}" for text in dict.fromkeys(speeds.values())),
                f"Memory: weights, keys and values of {_ROWS} texts or {_TOKEN_BUDGET} tokens, activations and logits.",
                *(f"Note: {note}." for note in dict.fromkeys(notes)),
            ]
        ),
    ]
    return "\n\n".join(parts)


def _work(entry: Entry, found: Sequence[Leaf], limit: int | None) -> Work:
    limits = [one for one in (limit, entry.limit) if one is not None]
    items = min([entry.items, *(one * len(found) for one in limits)])
    generates = found[0].config.get("output_type", "generate_until") == "generate_until"
    settings: dict[str, Any] = {**(found[0].config.get("generation_kwargs") or {}), **entry.gen_kwargs}
    budget = int(settings.get("max_gen_toks", entry.answer_tokens)) if generates else 0
    answers = items * entry.answers
    return Work(
        entry=entry,
        items=items,
        prompt_tokens=items * entry.prompt_tokens,
        answer_tokens=answers * entry.answer_tokens,
        most_tokens=answers * budget,
        budget=budget,
    )


def _notes(spec: ModelSpec, work: Sequence[Work], thinks: bool) -> list[str]:
    notes = []
    for one in work:
        length = one.entry.prompt_tokens + max(one.budget, one.entry.answer_tokens)
        if length > spec.max_length:
            notes.append(
                f"{spec.name}: {one.entry.task} takes about {length} tokens, but max_length is {spec.max_length}; "
                "prompts would be cut"
            )
    if thinks and any(one.generates for one in work):
        notes.append(f"{spec.name} thinks before it answers: its whole budget is taken to be used")
    if spec.gate:
        notes.append(f"{spec.name}: {spec.gate.rstrip('.')}")
    return notes


def _work_table(work: Sequence[Work]) -> str:
    rows = [
        [
            one.entry.task,
            one.entry.ability,
            str(one.items),
            _count(one.prompt_tokens),
            "" if one.generates else _count(one.answer_tokens),
            _count(one.answer_tokens) if one.generates else "",
            _count(one.most_tokens) if one.generates else "",
        ]
        for one in work
    ]
    generated = [one for one in work if one.generates]
    total = [
        "total",
        "",
        str(sum(one.items for one in work)),
        _count(sum(one.prompt_tokens for one in work)),
        _count(sum(one.answer_tokens for one in work if not one.generates)),
        _count(sum(one.answer_tokens for one in generated)),
        _count(sum(one.most_tokens for one in generated)),
    ]
    heads = ["task", "ability", "items", "prompt tokens", "scored tokens", "generated", "generated at most"]
    return _table(heads, [*rows, total], left=2)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns in plain text, the first `left` of them to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = []
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(int(number))


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(seconds, 1):.0f} s"
