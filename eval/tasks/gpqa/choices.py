"""GPQA with choices in an order that depends on the question alone.

lm-eval's own GPQA shuffles them by Python's global random state while the data set is mapped: the order changes with
whatever was drawn before and with what the cache of `datasets` holds, and so between two models. It also shuffles the
examples of a prompt apart from the items, so that it does not see that an example is the item itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def process_docs(dataset: Dataset) -> Dataset:
    """The items with `question`, `choice1` ... `choice4`, `choices` (the four), and `answer`, such as "(B)".

    Nothing else of the data set: explanations and names have no business in a log.
    Not by `Dataset.map`, whose cache may hold another order.
    """
    return Dataset.from_list([_item(document) for document in dataset])


def _item(document: Mapping[str, Any]) -> dict[str, Any]:
    question = str(document["Question"])
    texts = [_cleaned(document["Correct Answer"]), *(_cleaned(document[key]) for key in _WRONG)]
    # Python promises no shuffle that is the same in all its versions; SHA-256 is.
    order = sorted(range(4), key=lambda number: hashlib.sha256(f"{number}\n{question}".encode()).digest())
    choices = [texts[number] for number in order]
    named = {f"choice{place}": text for place, text in enumerate(choices, 1)}
    return {"question": question, **named, "choices": choices, "answer": f"({'ABCD'[order.index(0)]})"}


def _cleaned(text: str | None) -> str:
    """As lm-eval cleans them."""
    return " " if text is None else text.strip().replace(" [title]", ". ").replace("  ", " ")
