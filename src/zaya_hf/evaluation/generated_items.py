"""Items of mathematics and logic that are made here: from a seed, checked one by one, as many as are wanted.

No training text can hold them. They say whether a model reasons in a small closed world, not how it does on a
published benchmark.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import generated_logic, generated_math

__all__ = ["COUNT", "EXAMPLES", "SEED", "logic_items", "math_items", "verify"]

COUNT = 200
EXAMPLES = 30  # for prompts
SEED = 20260
PARTS = ("test", "examples")
_EXAMPLE_SHARE = 0.2  # of all questions there are
_MOST_DRAWS = 10_000

Item = dict[str, Any]
_Maker = Callable[[str, random.Random, int, int], "Item | None"]  # of a kind, a level, and the kind's how-manieth item


def math_items(count: int = COUNT, *, seed: int = SEED, part: str = "test") -> list[Item]:
    """Questions with a whole number as the answer: equally many of each kind and level, in turn.

    Args:
        count: how many; a larger count begins with the same items.
        seed: another one gives other items.
        part: "test" or "examples" (for prompts). No question is in both, whatever the seeds and counts.

    Returns:
        Items with `id`, `kind`, `level` (1 to 3), `question`, `answer` (text).

    Raises:
        ValueError: no such part, or a count below 1.
    """
    return list(_items(list(generated_math.GENERATORS), generated_math.LEVELS, _math_item, count, seed, part))


def logic_items(count: int = COUNT, *, seed: int = SEED, part: str = "test") -> list[Item]:
    """Questions with four choices of which one follows; its place goes round, so a fixed one is right in a quarter.

    Args, Raises: as `math_items`.

    Returns:
        Items with `id`, `kind`, `level` (1 to 3), `question`, `choices`, `answer` (index).
    """
    return list(_items(list(generated_logic.GENERATORS), generated_logic.LEVELS, _logic_item, count, seed, part))


def verify(item: Item) -> None:
    """Solve an item from its text alone, by another way than it was made.

    Raises:
        ValueError: its answer is not the right one, or not the only one, or a choice is there twice.
    """
    found: list[Any]
    if "choices" in item:
        found = generated_logic.right_choices(item["question"], item["choices"])
        fits = found == [item["answer"]] and len(set(item["choices"])) == generated_logic.CHOICES
    else:
        found = [str(generated_math.solve(item["question"]))]
        fits = found == [item["answer"]]
    if not fits:
        raise ValueError(f"{item['id']} has the answer {item['answer']}, but its text says {found}: {item['question']}")


def _items(kinds: Sequence[str], levels: int, make: _Maker, count: int, seed: int, part: str) -> Iterator[Item]:
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; expected one of {', '.join(PARTS)}")
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1")
    seen = set[str]()
    for index in range(count):
        kind, turn = kinds[index % len(kinds)], index // len(kinds)
        level = turn % levels + 1
        draw = random.Random(f"{kind} {part} {seed} {index}")  # text: the same in every version of Python
        for _ in range(_MOST_DRAWS):
            made = make(kind, draw, level, turn)
            if made is not None and _part(made["question"]) == part and made["question"] not in seen:
                break
        else:
            raise ValueError(f"there are not {count} different items: no more of {kind}, level {level}")
        seen.add(made["question"])
        item = {"id": f"{kind}-{part}-{seed}-{index}", "kind": kind, "level": level} | made
        verify(item)
        yield item


def _part(question: str) -> str:
    """A question's part depends on the question alone, so that no seed and no count can bring one into both."""
    share = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") / 2**32
    return PARTS[share < _EXAMPLE_SHARE]


def _math_item(kind: str, draw: random.Random, level: int, turn: int) -> Item:
    question, answer = generated_math.GENERATORS[kind](draw, level)
    return {"question": question, "answer": str(answer)}


def _logic_item(kind: str, draw: random.Random, level: int, turn: int) -> Item | None:
    place, wanted = turn % generated_logic.CHOICES, turn // generated_logic.CHOICES % generated_logic.FORMS
    drawn = generated_logic.GENERATORS[kind](draw, level, wanted)
    if drawn is None:
        return None
    question, right, choices = drawn
    draw.shuffle(choices)
    choices.insert(place, right)
    return {"question": question, "choices": choices, "answer": place}
