"""Questions of logic with four choices of which exactly one follows, and their checks.

A generator reasons with clauses: a statement follows if the facts and its opposite cannot be satisfied together. The
check knows only the item's text, and tries every possible world.

Where a statement is asked for, the choices are two statements and their opposites: one pair is decided by the facts,
the other is not. So neither the form of a choice nor its length tells the right one.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence

__all__ = ["CHOICES", "FORMS", "GENERATORS", "LEVELS", "right_choices"]

LEVELS = 3  # 1 is the easiest
CHOICES = 4
FORMS = 8

# The facts with the question, the right choice, the wrong ones.
Question = tuple[str, str, list[str]]
# From a level and a number from 0 to FORMS - 1 for what the right and the wrong statements are to look like, so that
# callers can balance it. None where the draw has no such question with one answer.
Generator = Callable[[random.Random, int, int], "Question | None"]
Literal = tuple[str, bool]
Clause = frozenset[Literal]  # at least one holds

_LAMPS = ["red", "blue", "green", "white", "yellow", "purple"]
_NAMES = ["Ann", "Ben", "Carl", "Dora", "Emma", "Fred", "Gina", "Hugo"]
_KINDS = ["dap", "wug", "fep", "blick", "zib", "tove", "mip", "lorp"]  # no words: nothing is known of them
_PLACES = ["first", "second", "third", "fourth", "fifth", "sixth"]


# --- generators -----------------------------------------------------------------------------------------------------


def _satisfiable(clauses: Sequence[Clause]) -> bool:
    """By taking one literal after the other as true, and as false where that leads nowhere."""
    if not clauses:
        return True
    if not all(clauses):
        return False
    shortest = min(clauses, key=lambda clause: (len(clause), sorted(clause)))
    name, truth = min(shortest)
    for value in (truth, not truth):
        rest = [clause - {(name, not value)} for clause in clauses if (name, value) not in clause]
        if _satisfiable(rest):
            return True
    return False


def _follows(clauses: Sequence[Clause], literal: Literal) -> bool:
    name, truth = literal
    return not _satisfiable([*clauses, frozenset({(name, not truth)})])


def _decided_and_open(
    draw: random.Random,
    facts: Sequence[tuple[str, list[Clause]]],
    names: Sequence[str],
    truth: bool,
    say: Callable[[Literal], str],
) -> Question | None:
    """A question with one name of which the facts decide something that they do not say, and one they leave open."""
    texts = [text for text, _ in facts]
    clauses = [clause for _, some in facts for clause in some]
    if len(set(texts)) < len(texts) or not _satisfiable(clauses):
        return None
    told = {name for clause in clauses if len(clause) == 1 for name, _ in clause}
    states = {name: [truth for truth in (True, False) if _follows(clauses, (name, truth))] for name in names}
    decided = [name for name in names if states[name] == [truth] and name not in told]
    left_open = [name for name in names if not states[name]]
    if not decided or not left_open:
        return None
    name, other = draw.choice(decided), draw.choice(left_open)
    wrong = [say((name, not truth)), say((other, True)), say((other, False))]
    return f"{' '.join(texts)} What follows?", say((name, truth)), wrong


def _entailment(draw: random.Random, level: int, wanted: int) -> Question | None:
    lamps = draw.sample(_LAMPS, level + 2)
    facts = [_lamp_fact(draw, lamps) for _ in range(level + 2)]
    told = (draw.choice(lamps), draw.random() < 0.5)
    facts.insert(draw.randint(0, len(facts)), (f"{_capital(_lamp(told))}.", [frozenset({told})]))
    return _decided_and_open(draw, facts, lamps, wanted % 2 == 0, lambda literal: f"{_capital(_lamp(literal))}.")


def _lamp(literal: Literal) -> str:
    return f"the {literal[0]} lamp is {'on' if literal[1] else 'off'}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _lamp_fact(draw: random.Random, lamps: Sequence[str]) -> tuple[str, list[Clause]]:
    a, b, c = ((name, draw.random() < 0.5) for name in draw.sample(lamps, 3))
    not_a, not_b = (a[0], not a[1]), (b[0], not b[1])
    first, second, third = _lamp(a), _lamp(b), _lamp(c)
    return draw.choice(
        [
            (f"If {first}, then {second}.", [frozenset({not_a, b})]),
            (f"{_capital(first)} or {second}, or both.", [frozenset({a, b})]),
            (f"It is not so that {first} and {second}.", [frozenset({not_a, not_b})]),
            (f"{_capital(first)} if and only if {second}.", [frozenset({not_a, b}), frozenset({a, not_b})]),
            (f"If {first} and {second}, then {third}.", [frozenset({not_a, not_b, c})]),
        ]
    )


def _membership(draw: random.Random, level: int, wanted: int) -> Question | None:
    kinds, name = draw.sample(_KINDS, level + 3), draw.choice(_NAMES)

    def say(literal: Literal) -> str:
        return f"{name} is {'a' if literal[1] else 'not a'} {literal[0]}."

    told = (draw.choice(kinds), draw.random() < 0.7)
    facts = [(say(told), [frozenset({told})])]
    for _ in range(level + 2):
        first, second = draw.sample(kinds, 2)
        form, a, b = draw.choice(
            [
                ("Every {} is a {}.", False, True),
                ("No {} is a {}.", False, False),
                ("Everything that is not a {} is a {}.", True, True),
            ]
        )
        facts.append((form.format(first, second), [frozenset({(first, a), (second, b)})]))
    draw.shuffle(facts)
    return _decided_and_open(draw, facts, kinds, wanted % 2 == 0, say)


_FORMS = ["All {}s are {}s.", "No {}s are {}s.", "Some {}s are {}s.", "Some {}s are not {}s."]
Quantified = tuple[int, str, str]  # an index of a form, and its two kinds


def _syllogism(draw: random.Random, level: int, wanted: int) -> Question | None:
    kinds = draw.sample(_KINDS, 4)

    def statement() -> Quantified:
        first, second = draw.sample(kinds, 2)
        return draw.choice([0, 0, 0, 1, 1, 2, 3]), first, second

    facts = [statement() for _ in range(level + 2)]
    used = [kind for kind in kinds if any(kind in fact for fact in facts)]
    pairs = list(itertools.permutations(used, 2))
    possible = [(form, *pair) for pair in pairs for form in range(len(_FORMS))]
    if not _consistent(facts, used):
        return None
    # What is said with the kinds the other way round is said, too.
    told = {*facts, *((form, second, first) for form, first, second in facts if form in (1, 2))}
    decided = [one for one in possible if one[0] == wanted % 4 and one not in told]
    decided = [one for one in decided if not _consistent([*facts, _opposite(one)], used)]
    others = [one for one in possible if (one[0] in (1, 2)) == (wanted < 4)]
    left_open = [one for one in others if all(_consistent([*facts, two], used) for two in (one, _opposite(one)))]
    if not decided or not left_open:
        return None
    right, other = draw.choice(decided), draw.choice(left_open)
    texts = [_FORMS[form].format(*pair) for form, *pair in facts]
    if len(set(texts)) < len(texts):
        return None
    wrong = [_FORMS[form].format(*pair) for form, *pair in (_opposite(right), other, _opposite(other))]
    listed = f"{', '.join(f'{kind}s' for kind in used[:-1])} and {used[-1]}s"
    return f"There are {listed}. {' '.join(texts)} What follows?", _FORMS[right[0]].format(*right[1:]), wrong


def _opposite(statement: Quantified) -> Quantified:
    form, first, second = statement
    return len(_FORMS) - 1 - form, first, second


def _consistent(statements: Sequence[Quantified], kinds: Sequence[str]) -> bool:
    """Whether statements can hold together where there is something of each kind: each thing that must exist can, as
    the rules for all things concern one thing at a time."""
    rules = [frozenset({(a, False), (b, form == 0)}) for form, a, b in statements if form < 2]
    needed = [[frozenset({(kind, True)})] for kind in kinds]
    needed += [[frozenset({(a, True)}), frozenset({(b, form == 2)})] for form, a, b in statements if form >= 2]
    return all(_satisfiable([*rules, *thing]) for thing in needed)


def _ordering(draw: random.Random, level: int, wanted: int) -> Question | None:
    names = draw.sample(_NAMES, level + 3)
    order = tuple(draw.sample(names, len(names)))
    orders = list(itertools.permutations(names))
    clues: list[tuple[str, Callable[[tuple[str, ...]], bool]]] = []
    while len(orders) > 1:
        clue = _clue(draw, order)
        fitting = [one for one in orders if clue[1](one)]
        if len(fitting) < len(orders):  # it says something new
            orders = fitting
            clues.append(clue)
    for clue in list(clues):  # an earlier one may say nothing new any more
        others = [one for one in clues if one is not clue]
        if sum(all(holds(one) for _, holds in others) for one in itertools.permutations(names)) == 1:
            clues = others
    asked = draw.randrange(len(names))
    if any(f"finished {_PLACES[asked]}." in text and "did not" not in text for text, _ in clues):
        return None
    facts = f"{', '.join(sorted(names)[:-1])} and {max(names)} ran a race. {' '.join(text for text, _ in clues)}"
    wrong = draw.sample([name for name in names if name != order[asked]], CHOICES - 1)
    return f"{facts} Who finished {_PLACES[asked]}?", f"{order[asked]}.", [f"{name}." for name in wrong]


def _clue(draw: random.Random, order: tuple[str, ...]) -> tuple[str, Callable[[tuple[str, ...]], bool]]:
    """Something that is so in an order, as text and as a test of other orders."""
    first, second = sorted(draw.sample(range(len(order)), 2))
    a, b = order[first], order[second]
    kind = draw.choice(["before", "before", "before", "right", "not", "at"])
    if kind == "right" and second == first + 1:
        return f"{a} finished right before {b}.", lambda one: one.index(b) == one.index(a) + 1
    if kind == "not":
        return f"{a} did not finish {_PLACES[second]}.", lambda one: one.index(a) != second
    if kind == "at":
        return f"{a} finished {_PLACES[first]}.", lambda one: one.index(a) == first
    return f"{a} finished before {b}.", lambda one: one.index(a) < one.index(b)


GENERATORS: dict[str, Generator] = {
    "entailment": _entailment,
    "membership": _membership,
    "syllogism": _syllogism,
    "ordering": _ordering,
}


# --- checks ---------------------------------------------------------------------------------------------------------

# A world is a set of what is so; a fact's text, read as (pattern, test of its parts in a world).
World = frozenset[object]
_Test = Callable[..., bool]

_LAMP = r"[Tt]he (\w+) lamp is (on|off)"


def _is(world: World, name: str, state: str) -> bool:
    return (name in world) == (state == "on")


_READ: dict[str, list[tuple[str, _Test]]] = {
    "lamps": [
        (rf"{_LAMP}\.", lambda w, a, s: _is(w, a, s)),
        (rf"If {_LAMP}, then {_LAMP}\.", lambda w, a, s, b, t: _is(w, b, t) if _is(w, a, s) else True),
        (rf"{_LAMP} or {_LAMP}, or both\.", lambda w, a, s, b, t: _is(w, a, s) or _is(w, b, t)),
        (rf"It is not so that {_LAMP} and {_LAMP}\.", lambda w, a, s, b, t: not (_is(w, a, s) and _is(w, b, t))),
        (rf"{_LAMP} if and only if {_LAMP}\.", lambda w, a, s, b, t: _is(w, a, s) == _is(w, b, t)),
        (
            rf"If {_LAMP} and {_LAMP}, then {_LAMP}\.",
            lambda w, a, s, b, t, c, u: _is(w, c, u) if _is(w, a, s) and _is(w, b, t) else True,
        ),
    ],
    "one thing": [
        (r"Every (\w+) is a (\w+)\.", lambda w, a, b: b in w if a in w else True),
        (r"No (\w+) is a (\w+)\.", lambda w, a, b: not {a, b} <= w),
        (r"Everything that is not a (\w+) is a (\w+)\.", lambda w, a, b: bool({a, b} & w)),
        (r"[A-Z]\w+ is a (\w+)\.", lambda w, a: a in w),
        (r"[A-Z]\w+ is not a (\w+)\.", lambda w, a: a not in w),
    ],
    # Of things, each of which is the set of its kinds.
    "things": [
        (r"There are (.*)s\.", lambda w, all_: all(any(k in t for t in w) for k in re.split(r"s(?:,| and) ", all_))),
        (r"All (\w+)s are (\w+)s\.", lambda w, a, b: all(b in thing for thing in w if a in thing)),
        (r"No (\w+)s are (\w+)s\.", lambda w, a, b: not any({a, b} <= thing for thing in w)),
        (r"Some (\w+)s are (\w+)s\.", lambda w, a, b: any({a, b} <= thing for thing in w)),
        (r"Some (\w+)s are not (\w+)s\.", lambda w, a, b: any(a in thing and b not in thing for thing in w)),
    ],
}


def right_choices(question: str, choices: Sequence[str]) -> list[int]:
    """Indices of the choices that hold in every world in which the facts of a question hold.

    Raises:
        ValueError: the text is no question of this module, or no world fits its facts.
    """
    facts = re.findall(r"[^.?]+[.?]", question)
    facts = [fact.strip() for fact in facts]
    asked = facts.pop()
    if asked != "What follows?":
        return _finishers(facts, asked, choices)
    for forms, worlds in _WORLDS.items():
        tests = [_test(text, _READ[forms]) for text in (*facts, *choices)]
        if all(tests):
            given, said = tests[: len(facts)], tests[len(facts) :]
            fitting = [world for world in worlds(facts, choices) if all(one(world) for one in given if one)]
            if not fitting:
                raise ValueError(f"facts that cannot be so together: {question}")
            return [index for index, one in enumerate(said) if one and all(one(world) for world in fitting)]
    raise ValueError(f"no question of a known kind: {question}")


def _test(text: str, forms: Sequence[tuple[str, _Test]]) -> Callable[[World], bool] | None:
    for pattern, test in forms:
        match = re.fullmatch(pattern, text)
        if match is not None:
            parts = match.groups()
            return lambda world: test(world, *parts)
    return None


def _subsets(members: Sequence[object]) -> Iterator[World]:
    for size in range(len(members) + 1):
        yield from map(frozenset, itertools.combinations(members, size))


def _kinds_in(texts: Sequence[str]) -> list[str]:
    return [kind for kind in _KINDS if re.search(rf"\b{kind}s?\b", " ".join(texts))]


def _worlds_of_things(facts: Sequence[str], choices: Sequence[str]) -> Iterator[World]:
    # A rule for all things is one for each thing: those that break one are in no world.
    rules = [_test(text, _READ["things"]) for text in facts if text.startswith(("All ", "No "))]
    things = [
        thing
        for thing in _subsets(_kinds_in([*facts, *choices]))
        if all(rule(frozenset({thing})) for rule in rules if rule)
    ]
    yield from _subsets(things)


_WORLDS: dict[str, Callable[[Sequence[str], Sequence[str]], Iterator[World]]] = {
    "lamps": lambda facts, choices: _subsets([one for one in _LAMPS if f"{one} lamp" in " ".join([*facts, *choices])]),
    "one thing": lambda facts, choices: _subsets(_kinds_in([*facts, *choices])),
    "things": _worlds_of_things,
}

_RACE: list[tuple[str, Callable[[Sequence[str], str, str], bool]]] = [
    (r"(\w+) finished before (\w+)\.", lambda order, a, b: order.index(a) < order.index(b)),
    (r"(\w+) finished right before (\w+)\.", lambda order, a, b: order[order.index(b) - 1 : order.index(b)] == (a,)),
    (r"(\w+) did not finish (\w+)\.", lambda order, a, place: order[_PLACES.index(place)] != a),
    (r"(\w+) finished (\w+)\.", lambda order, a, place: order[_PLACES.index(place)] == a),
]


def _finishers(facts: Sequence[str], asked: str, choices: Sequence[str]) -> list[int]:
    place = re.fullmatch(r"Who finished (\w+)\?", asked)
    runners = re.fullmatch(r"(.*) ran a race\.", facts[0])
    if place is None or runners is None:
        raise ValueError(f"no question of a known kind: {asked}")
    names = re.split(r", | and ", runners[1])
    clues = []
    for fact in facts[1:]:
        found = [(test, match.groups()) for pattern, test in _RACE if (match := re.fullmatch(pattern, fact))]
        if not found:
            raise ValueError(f"no clue of a known kind: {fact}")
        clues.append(found[0])
    orders = [order for order in itertools.permutations(names) if all(test(order, *parts) for test, parts in clues)]
    winners = {order[_PLACES.index(place[1])] for order in orders}
    if not winners:
        raise ValueError(f"facts that cannot be so together: {' '.join(facts)}")
    return [index for index, choice in enumerate(choices) if winners == {choice.rstrip(".")}]
