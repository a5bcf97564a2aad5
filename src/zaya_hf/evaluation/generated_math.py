"""Sums, congruences, equations, sequences, shares and units with a whole number as the answer, and their checks.

A generator builds an item from its answer outwards; the check knows only the item's text, and solves it another way.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

__all__ = ["GENERATORS", "LEVELS", "solve"]

LEVELS = 3  # 1 is the easiest

Generator = Callable[[random.Random, int], tuple[str, int]]  # from a level to a question and its answer


# --- generators -----------------------------------------------------------------------------------------------------


def _arithmetic(draw: random.Random, level: int) -> tuple[str, int]:
    text, value, binding = str(first := draw.randint(2, 20)), first, 2  # 2: a number or in brackets, 1: *, 0: + -
    for _ in range(level + 1):
        sign, number = draw.choice("+-*"), draw.randint(2, 9 if level == 1 else 12)
        if sign == "*":
            text, value, binding = f"{text if binding else f'({text})'} * {number}", value * number, 1
        elif draw.random() < 0.5 or sign == "+":
            text, value, binding = f"{text} {sign} {number}", value + number * (1 if sign == "+" else -1), 0
        else:
            text, value, binding = f"{number} - {text if binding else f'({text})'}", number - value, 0
    return f"What is {text}?", value


def _modular(draw: random.Random, level: int) -> tuple[str, int]:
    modulus = draw.randint(3, 5 + 4 * level)
    if level == LEVELS:
        base, exponent = draw.randint(2, 9), draw.randint(5, 30)
        return f"What is the remainder when {base}^{exponent} is divided by {modulus}?", pow(base, exponent, modulus)
    factors = [draw.randint(3, 10 * level + 10) for _ in range(level)]
    rest, term = 1, draw.randint(1, 50)
    for factor in factors:
        rest = rest * (factor % modulus) % modulus
    product = " * ".join(map(str, factors))
    return f"What is the remainder when {product} + {term} is divided by {modulus}?", (rest + term) % modulus


def _linear(draw: random.Random, level: int) -> tuple[str, int]:
    x = draw.randint(-9, 12)
    if level == LEVELS:
        y = draw.randint(-9, 9)
        while True:
            a, b, c, d = (draw.choice([-5, -4, -3, -2, 2, 3, 4, 5]) for _ in range(4))
            if a * d != b * c:
                break
        first = f"{a}x {_signed(b)}y = {a * x + b * y}"
        return f"It holds that {first} and {c}x {_signed(d)}y = {c * x + d * y}. What is x?", x
    a, b = draw.randint(2, 9), draw.randint(-20, 20) or 1
    if level == 1:
        return f"It holds that {a}x {_signed(b)} = {a * x + b}. What is x?", x
    c = draw.choice([number for number in range(-6, 10) if number not in (0, 1, -1, a)])
    return f"It holds that {a}x {_signed(b)} = {c}x {_signed(a * x + b - c * x)}. What is x?", x


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _sequence(draw: random.Random, level: int) -> tuple[str, int]:
    rule = draw.choice([["sum"], ["ratio", "second"], ["fibonacci", "affine"]][level - 1])
    first, step = draw.randint(1, 40), draw.randint(2, 12)
    terms = [first]
    if rule == "sum":
        step = draw.choice([-1, 1]) * step
    if rule == "fibonacci":
        terms.append(draw.randint(1, 12))
    while len(terms) < 7:
        last = terms[-1]
        if rule == "sum":
            terms.append(last + step)
        elif rule == "ratio":
            terms.append(last * (2 + step % 2))
        elif rule == "second":
            terms.append(last + step + 2 * len(terms))
        elif rule == "affine":
            terms.append(2 * last + step - 6)
        else:
            terms.append(last + terms[-2])
    return f"Which number comes next: {', '.join(map(str, terms[:-1]))}?", terms[-1]


def _percent(draw: random.Random, level: int) -> tuple[str, int]:
    share = draw.choice([[10, 20, 50], [5, 15, 25, 30, 40], [12, 35, 45, 60, 75]][level - 1])
    base = draw.randint(2, 150) * (100 // _common(share, 100))
    part = base * share // 100
    if level == 1 or draw.random() < 0.4:
        return f"What is {share}% of {base}?", part
    if draw.random() < 0.5:
        return f"A price of {base} dollars rises by {share}%. How many dollars is the new price?", base + part
    return f"A price of {base} dollars falls by {share}%. How many dollars is the new price?", base - part


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


_UNITS = {  # of the smaller ones in a larger one
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("meters", "centimeters"): 100,
    ("kilometers", "meters"): 1000,
    ("feet", "inches"): 12,
    ("yards", "feet"): 3,
}


def _units(draw: random.Random, level: int) -> tuple[str, int]:
    (large, small), factor = draw.choice(list(_UNITS.items()))
    count, rest = draw.randint(2, 40), draw.randint(2, max(2, factor - 1))
    if level == 1:
        return f"How many {small} are {count} {large}?", count * factor
    if level == 2:
        return f"How many {small} are {count} {large} and {rest} {small}?", count * factor + rest
    speed, quarters = draw.randint(2, 30) * 4, draw.randint(2, 14)
    text = f"A train moves at {speed} kilometers per hour. How many kilometers does it move in {15 * quarters} minutes?"
    return text, speed // 4 * quarters


GENERATORS: dict[str, Generator] = {
    "arithmetic": _arithmetic,
    "modular": _modular,
    "linear": _linear,
    "sequence": _sequence,
    "percent": _percent,
    "units": _units,
}


# --- checks ---------------------------------------------------------------------------------------------------------


def solve(question: str) -> Fraction:
    """The answer to a question of this module, from its text alone.

    Raises:
        ValueError: the text is no such question, or has no answer or several.
    """
    for pattern, solver in _SOLVERS.items():
        match = re.fullmatch(pattern, question)
        if match is not None:
            return solver(*match.groups())
    raise ValueError(f"no question of a known kind: {question}")


_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _value(expression: str) -> Fraction:
    def of(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Fraction(node.value)
        raise ValueError(f"no sum: {expression}")

    return of(ast.parse(expression, mode="eval").body)


def _remainder(expression: str, modulus: str) -> Fraction:
    base, power, exponent = expression.partition("^")
    return (Fraction(int(base) ** int(exponent)) if power else _value(expression)) % int(modulus)


def _equations(text: str) -> Fraction:
    rows = []
    for equation in text.split(" and "):
        left, right = (_coefficients(side) for side in equation.split(" = "))
        rows.append([a - b for a, b in zip(left, right, strict=True)])  # ax + by + c = 0
    if len(rows) == 1:
        ((a, b, c),) = rows
        if b or not a:
            raise ValueError(f"not one solution: {text}")
        return -c / a
    (a, b, c), (d, e, f) = rows
    if a * e == b * d:
        raise ValueError(f"not one solution: {text}")
    return (b * f - c * e) / (a * e - b * d)


def _coefficients(side: str) -> list[Fraction]:
    """Of x, of y, and the rest."""
    found = {"x": Fraction(0), "y": Fraction(0), "": Fraction(0)}
    for number, unknown in re.findall(r"([+-]?\d+)([xy]?)", side.replace(" ", "")):
        found[unknown] += int(number)
    return list(found.values())


def _next(text: str) -> Fraction:
    """What all rules that give the terms agree on as the next one."""
    terms = [Fraction(term) for term in text.split(", ")]
    rules: list[Callable[[Sequence[Fraction]], Fraction | None]] = [
        lambda known: 2 * known[-1] - known[-2],
        lambda known: known[-1] * known[-1] / known[-2] if known[-2] else None,
        lambda known: 3 * known[-1] - 3 * known[-2] + known[-3],
        lambda known: known[-1] + known[-2],
        lambda known: _affine(known),
    ]
    answers = {rule(terms) for rule in rules if all(rule(terms[:n]) == terms[n] for n in range(3, len(terms)))}
    if len(answers) != 1 or (answer := answers.pop()) is None:
        raise ValueError(f"not one way to go on: {text}")
    return answer


def _affine(known: Sequence[Fraction]) -> Fraction | None:
    """Each term a multiple of the one before plus a constant, both found from the last three."""
    if known[-2] == known[-3]:
        return None
    factor = (known[-1] - known[-2]) / (known[-2] - known[-3])
    return factor * known[-1] + known[-1] - factor * known[-2]


def _changed(price: str, way: str, share: str) -> Fraction:
    return int(price) * (1 + Fraction(int(share), 100) * (1 if way == "rises" else -1))


def _converted(small: str, count: str, large: str, rest: str | None) -> Fraction:
    return Fraction(int(count) * _UNITS[large, small] + int(rest or 0))


_SOLVERS: dict[str, Callable[..., Fraction]] = {
    r"What is ([\d(][\d ()*+-]*)\?": _value,
    r"What is the remainder when ([\d *+^]+) is divided by (\d+)\?": _remainder,
    r"It holds that (.*)\. What is x\?": _equations,
    r"Which number comes next: (.*)\?": _next,
    r"What is (\d+)% of (\d+)\?": lambda share, base: Fraction(int(share) * int(base), 100),
    r"A price of (\d+) dollars (rises|falls) by (\d+)%\. How many dollars is the new price\?": _changed,
    r"How many (\w+) are (\d+) (\w+)(?: and (\d+) \1)?\?": _converted,
    r"A train moves at (\d+) kilometers per hour\. How many kilometers does it move in (\d+) minutes\?": (
        lambda speed, minutes: Fraction(int(speed) * int(minutes), 60)
    ),
}
