"""YAML as settings need it: the core schema of YAML 1.2, no key twice, and where every value was written.

PyYAML reads YAML 1.1, in which ``6e-4`` is text, ``no`` is false, ``010`` is eight and ``1:30`` is ninety. Here numbers
are what they look like (``8_000_000`` too), only ``true`` and ``false`` are truth values, and nothing becomes a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

# Dotted key as a tuple: names, and numbers of list entries.
Key = tuple[str | int, ...]

_SCALARS: dict[str, tuple[str, str]] = {
    "null": (r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^[-+]?[0-9][0-9_]*$|^0x[0-9a-fA-F]+$", "-+0123456789"),
    "float": (
        r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        "-+0123456789.",
    ),
}


_TOO_DEEP = "no settings: YAML that is nested too deep"
_PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _firsts = [character if character != "\0" else "" for character in _first]
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _firsts)
# What YAML 1.1 takes for something else than text is quoted too, so that its readers find what was written.
for _character, _resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items():
    _Dumper.yaml_implicit_resolvers.setdefault(_character, []).extend(_resolvers)


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 16 if text.startswith("0x") else 10)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


@dataclass(frozen=True)
class Settings:
    """What was read, and where: `origins` has "FILE, line N" for every key, sections included."""

    values: dict[str, Any]
    origins: dict[Key, str]


def read(text: str, name: str) -> Settings:
    """The mapping that a YAML text is.

    Args:
        name: of the text, for messages.

    Raises:
        ValueError: it is no YAML, holds something else than one mapping, has a key twice or one that is no text.
    """
    node = _compose(text, name)
    if node is None:
        return Settings({}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{name} holds no settings: expected `key: value` lines at its top level")
    origins: dict[Key, str] = {}
    return Settings(_value(node, name, origins), origins)


def read_value(text: str, name: str) -> Any:
    """The value that a YAML text is: a number, a truth value, null, text, a list or a mapping.

    Raises:
        ValueError: as `read`.
    """
    node = _compose(text, name)
    return None if node is None else _value(node, name, {})


def write(values: Any) -> str:
    """YAML that `read` and other readers of YAML 1.2 or 1.1 take back as `values`."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = name if mark is None else f"{name}, line {mark.line + 1}"
        raise ValueError(f"{where}: no YAML: {' '.join((error.problem or str(error)).split())}") from None
    except RecursionError:
        raise ValueError(f"{name}: {_TOO_DEEP}") from None
    except yaml.YAMLError as error:  # characters that no YAML may have
        raise ValueError(f"{name}: no YAML: {' '.join(str(error).split())}") from None


def _value(node: yaml.Node, name: str, origins: dict[Key, str]) -> Any:
    try:
        return _Reading(name, origins).value(node, ())
    except RecursionError:
        raise ValueError(f"{name}: {_TOO_DEEP}") from None


class _Reading:
    """Turns nodes into values."""

    def __init__(self, name: str, origins: dict[Key, str]):
        self._name, self._origins = name, origins
        self._open: list[yaml.Node] = []
        self._loader = _Loader("")

    def value(self, node: yaml.Node, key: Key) -> Any:
        self._origins[key] = self._where(node)
        if any(node is outer for outer in self._open):
            raise ValueError(f"{self._where(node)}: an alias stands inside what it repeats")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            raise ValueError(f"{self._where(node)}: settings have no tags such as {node.tag}")
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, key)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(entry, (*key, index)) for index, entry in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = self._scalar(name_node) if isinstance(name_node, yaml.ScalarNode) else name_node
            if not isinstance(name, str):
                raise ValueError(f"{self._where(name_node)}: a key has to be text; a text in braces needs quotes")
            if name in found:
                raise ValueError(f"{self._where(name_node)}: {dotted((*key, name))} is there twice; keep one")
            place = (*key, name)
            found[name] = self.value(value_node, place)
            self._origins[place] = self._where(name_node)
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:  # an explicit tag that does not fit, such as !!int of a word
            problem = getattr(error, "problem", None) or str(error)
            raise ValueError(f"{self._where(node)}: {' '.join(problem.split())}") from None

    def _where(self, node: yaml.Node) -> str:
        return f"{self._name}, line {node.start_mark.line + 1}"


def dotted(key: Key) -> str:
    """``("data", "sources", 0, "path")`` -> ``data.sources.0.path``."""
    return ".".join(str(part) for part in key)
