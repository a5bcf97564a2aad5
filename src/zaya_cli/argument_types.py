"""Types of arguments: what a text on the command line has to be, with an error that says so."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable


def number(convert: Callable[[str], float], allowed: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """An argparse type: `convert`, then refuse what `allowed` refuses with `wanted` in the message."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def stop_string(text: str) -> str:
    """Shells pass a backslash on as it is typed, so a line end is hard to type otherwise."""
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda match: meant[match[1]], not_empty(text))


def not_empty(text: str) -> str:
    """An argparse type: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


POSITIVE = number(int, lambda n: n >= 1, "a whole number from 1 up")
SEED = number(int, lambda n: 0 <= n < 2**63, "a whole number from 0 up")
TEMPERATURE = number(float, lambda t: 0 <= t < float("inf"), "a number from 0 up (0 means greedy)")
TOP_P = number(float, lambda p: 0 < p <= 1, "a number above 0 and at most 1")
