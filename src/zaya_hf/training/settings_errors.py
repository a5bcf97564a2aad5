"""What pydantic finds wrong with settings, in one line: where, the dotted key, what is wrong, what would be right."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ..hints import near_hint
from .config import TrainingConfig
from .settings_yaml import Key, Settings, dotted, read_value

MOST = 3  # errors in one message

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section of keys and values",
    "model_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


def check(settings: Settings) -> TrainingConfig:
    """The config of what was read.

    Raises:
        ValueError: see `settings_files.load`.
    """
    try:
        return TrainingConfig.model_validate(settings.values)
    except ValidationError as error:
        lines: dict[Key, str] = {}  # one line for a key, also where each branch of a union complains
        found = sorted(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
        for one in found:
            key = _own_part(one["loc"])
            lines.setdefault(key, _line(key, one, settings))
        texts = list(lines.values())
    more = [f"and {len(texts) - MOST} more"] if len(texts) > MOST else []
    raise ValueError("; ".join([*texts[:MOST], *more]))


def takes_text(key: Key, text: str) -> bool:
    """Whether a value on the command line is text as it stands: the field takes nothing else, or nothing but null
    besides, and the value is neither null nor a quoted text."""
    annotation = _annotation(key)
    options = set(_options(annotation)) - {type(None)}
    if options != {str}:
        return False
    try:
        value = read_value(text, "")
    except ValueError:
        return True
    return not isinstance(value, str) and value is not None


def _line(key: Key, error: Any, settings: Settings) -> str:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    name = dotted(key)
    if kind == "missing" and isinstance(error["loc"][-1], int):  # of a list that has as many entries as it has types
        return f"{_where(key, settings)}{name} is {_shown(given)}; entry {error['loc'][-1]} is missing"
    if kind == "missing":
        return f"{_where(key[:-1], settings)}{name} is missing{_description(key, ': {}')}"
    where = _where(key, settings)
    if kind == "extra_forbidden":
        return f"{where}unknown key {name}: {_nearest(key)}"
    if kind == "value_error":  # of our own validators
        return f"{where}{f'{name}: ' if name else ''}{context['error']!s}"
    if kind == "literal_error":
        allowed = _allowed(_annotation(key))
        return f"{where}{name} is {_shown(given)}; expected one of {', '.join(allowed)}{near_hint(str(given), allowed)}"
    if kind in ("too_short", "too_long"):
        count = context.get("min_length", context.get("max_length"))
        word = "at least" if kind == "too_short" else "at most"
        return f"{where}{name} has {len(given)} entries; expected {word} {count}"
    if kind in _BOUNDS:
        word, bound = _BOUNDS[kind]
        wanted = f"a number {word} {_bound(context[bound])}"
    elif kind == "string_pattern_mismatch":  # the description says which
        wanted = "a name"
    elif {dict, str} & {get_origin(option) or option for option in _options(_annotation(key))} == {dict, str}:
        wanted = "a section of keys and values, or text"
    else:
        wanted = _KINDS.get(kind, error["msg"])
    return f"{where}{name} is {_shown(given)}; expected {wanted}{_advice(kind, given)}{_description(key, ' ({})')}"


def _bound(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _advice(kind: str, given: Any) -> str:
    """How the value would have to be written, for what people write most often."""
    if kind == "string_type" and isinstance(given, dict):
        return ', in quotes where it has braces, e.g. "{stdlib}/*.py"'
    if kind == "string_type" and given is not None:
        return f", in quotes: {str(given)!r}"
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and given.is_integer():
        return f", written out: {int(given)}"
    return ""


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _where(key: Key, settings: Settings) -> str:
    """Origin of a key or of the innermost section around it that was written down."""
    for length in range(len(key), -1, -1):
        origin = settings.origins.get(key[:length])
        if origin is not None:
            # The top level has no line worth naming.
            return f"{origin.rpartition(', line')[0] or origin if length == 0 else origin}: "
    return ""


# --- the schema -----------------------------------------------------------------------------------------------------


def _options(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that an annotation allows, and whether as entries of a list."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option, False
        if get_origin(option) is list:
            inner, _ = _section(get_args(option)[0])
            if inner is not None:
                return inner, True
    return None, False


def _annotation(key: Key) -> Any:
    """What the schema says of a key; None for a key that it does not have."""
    annotation: Any = TrainingConfig
    for part in key:
        section, listed = _section(annotation)
        if isinstance(part, int):
            lists = [option for option in _options(annotation) if get_origin(option) is list]
            annotation = section if listed else get_args(lists[0])[0] if lists else None
        else:
            field = section.model_fields.get(part) if section is not None and not listed else None
            annotation = field.annotation if field is not None else None
        if annotation is None:
            return None
    return annotation


def _description(key: Key, form: str) -> str:
    """The schema's words for a field, put into `form`; nothing where it has none."""
    section, _ = _section(_annotation(key[:-1])) if len(key) > 1 else (TrainingConfig, False)
    field = section.model_fields.get(str(key[-1])) if section is not None and key else None
    return form.format(field.description) if field is not None and field.description else ""


def _own_part(location: tuple[Any, ...]) -> Key:
    """A pydantic location without its names of union branches and of what is inside a free mapping."""
    key: Key = ()
    for part in location:
        if _annotation((*key, part)) is None and _section(_annotation(key))[0] is None:
            break
        key = (*key, part)
    return key


def _allowed(annotation: Any) -> list[str]:
    """Values of the literals in an annotation."""
    found: list[str] = []
    for option in _options(annotation):
        if get_origin(option) is Literal:
            found += [str(value) for value in get_args(option)]
        elif option is type(None):
            found.append("null")
    return found


def _known(section: type[BaseModel], prefix: Key) -> Iterator[Key]:
    """Keys of a section and of those inside it."""
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        inner, listed = _section(field.annotation)
        if inner is not None:
            yield from _known(inner, (*prefix, name, 0) if listed else (*prefix, name))


def _nearest(key: Key) -> str:
    """Which known key may have been meant."""
    section, _ = _section(_annotation(key[:-1]))
    name, known = str(key[-1]), list(_known(TrainingConfig, ()))
    siblings = list(section.model_fields) if section is not None else []
    same_name = [candidate for candidate in known if candidate[-1] == name]
    near_here = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if same_name and not near_here:
        return f"did you mean {' or '.join(dotted(candidate) for candidate in same_name[:2])}?"
    if not near_here:
        by_name = {str(candidate[-1]): candidate for candidate in reversed(known)}
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
        if near:
            return f"did you mean {dotted(by_name[near[0]])}?"
        near_here = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if near_here:
        return f"did you mean {dotted((*key[:-1], near_here[0]))}?"
    return f"{dotted(key[:-1]) or 'the top level'} has {', '.join(siblings)}"
