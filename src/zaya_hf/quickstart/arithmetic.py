"""Sums and differences of small numbers: lines to train on, and held-out ones with wrong answers to choose among."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedTokenizerFast

from zaya_hf.quickstart.corpus import unit_hash

_HELD_OUT_COUNT = 200  # of 2,000


@dataclass(frozen=True)
class Sum:
    """`first` + `second`, or `first` - `second` where `sign` is "-"."""

    first: int
    sign: str
    second: int

    @property
    def value(self) -> int:
        return self.first + self.second if self.sign == "+" else self.first - self.second

    @property
    def question(self) -> str:
        return f"{self.first}{self.sign}{self.second}"

    def __str__(self) -> str:
        return f"{self.question}={self.value}"


def _group(item: Sum) -> str:
    """The same for sums that differ in the order of their terms: who has seen 3+5 is not asked 5+3 as something new."""
    first, second = item.first, item.second
    return f"{max(first, second)}+{min(first, second)}" if item.sign == "+" else item.question


def _split() -> tuple[tuple[Sum, ...], tuple[Sum, ...]]:
    """(training, held out), decided by hashes, so the same for every seed, model and machine."""
    groups: dict[str, list[Sum]] = {}
    for item in (Sum(first, sign, second) for first in range(100) for sign in "+-" for second in range(10)):
        groups.setdefault(_group(item), []).append(item)
    train: list[Sum] = []
    held_out: list[Sum] = []
    for group in sorted(groups, key=lambda group: unit_hash(f"sum:{group}")):
        fits = len(held_out) + len(groups[group]) <= _HELD_OUT_COUNT
        (held_out if fits else train).extend(groups[group])
    return tuple(train), tuple(held_out)


# All sums of 0..99 and 0..9: 1,800 to train on and 200 that no model sees before it is asked.
TRAINING, HELD_OUT = _split()
_VALUES = range(0 - 9, 99 + 9 + 1)  # of all sums; a wrong answer is one of these too, or it would stand out


def _others(item: Sum) -> list[int]:
    """Wrong answers as long as the right one, in an order that looks random."""
    fitting = (value for value in _VALUES if value != item.value and len(str(value)) == len(str(item.value)))
    return sorted(fitting, key=lambda value: unit_hash(f"{item}?{value}"))


def far_answers(item: Sum) -> list[str]:
    """Three wrong answers of the right one's length in characters, random ones that are not within 10 of it.

    Of one digit, and above 99, all others are within 10: then they are random ones.
    """
    return _first_three(sorted(_others(item), key=lambda value: abs(value - item.value) <= 10))


def near_answers(item: Sum) -> list[str]:
    """Three wrong answers of the right one's length: three of those 1 or 10 away, else the nearest beyond these."""

    def rank(value: int) -> int:
        distance = abs(value - item.value)
        return 0 if distance in (1, 10) else distance

    return _first_three(sorted(_others(item), key=rank))


def _first_three(values: Iterable[int]) -> list[str]:
    return [str(value) for value in values][:3]


@lru_cache(maxsize=2)  # a training run asks for rows at every step
def _encoded_lines(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    lines = [f"{item}\n" for item in TRAINING]
    encoded: list[list[int]] = tokenizer(lines, add_special_tokens=False)["input_ids"]
    return encoded


def rows(tokenizer: PreTrainedTokenizerFast, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Training text: each row is an eos and then random lines like "37+5=42", as many as fit and one that is cut off.

    Args:
        tokenizer: encodes every digit by itself, so that a text's ids are its lines' ids one after another.
        generator: on the CPU; decides which lines.

    Returns:
        int64 [count, length].
    """
    lines = _encoded_lines(tokenizer)
    enough = -(-length // min(map(len, lines)))  # lines that fill a row even if all are the shortest
    chosen = torch.randint(len(lines), (count, enough), generator=generator).tolist()
    found = [([tokenizer.eos_token_id] + [i for line in row for i in lines[line]])[:length] for row in chosen]
    return torch.tensor(found, dtype=torch.int64).view(count, length)
