"""What the Python code of tasks needs as soon as it is imported, read from its source without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .task_definitions import LM_EVAL_TASKS, Leaf

__all__ = ["hub_metrics", "imported"]

_TASKS = "lm_eval.tasks"


def imported(leaf: Leaf) -> list[str]:
    """Top-level modules, beside Python's own, without which the functions of a task cannot be imported."""
    found = {name for file in _files(leaf) for name in _modules(file)}
    return sorted(found - set(sys.stdlib_module_names) - {"lm_eval"})


def hub_metrics(leaf: Leaf) -> list[str]:
    """Metrics that the task's code fetches with `evaluate.load` while it is imported."""
    return sorted({name for file in _files(leaf) for name in _fetched(file)})


def _files(leaf: Leaf) -> list[Path]:
    """Files of the task's functions, and lm-eval's own that those import."""
    found: dict[Path, None] = {}
    todo = [file for value in _values(leaf.config) if (file := _file_of(value)) is not None]
    while todo:
        file = todo.pop()
        if file not in found:
            found[file] = None
            todo += _further(file)
    return list(found)


def _values(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _values(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _values(value)


def _file_of(value: str) -> Path | None:
    """lm-eval gives a function that is not loaded as "FOLDER/module.name"."""
    if not value.startswith("/") or "\n" in value:
        return None
    folder, _, function = value.rpartition("/")
    module, _, name = function.rpartition(".")
    file = Path(folder, *module.split(".")).with_suffix(".py")
    return file if name.isidentifier() and module and file.is_file() else None


@cache
def _modules(file: Path) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name, level in _imports(_tree(file).body) if level == 0)


@cache
def _fetched(file: Path) -> frozenset[str]:
    """Only what runs at import: not the bodies of functions."""
    found = set()
    todo: list[ast.AST] = list(_tree(file).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "load"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("evaluate", "hf_evaluate")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
        todo += ast.iter_child_nodes(node)
    return frozenset(found)


def _further(file: Path) -> list[Path]:
    found = []
    for name, level in _imports(_tree(file).body):
        if level:
            places = [file.parents[level - 1].joinpath(*name.split("."))] if name else []
        elif name.startswith(f"{_TASKS}."):
            places = [LM_EVAL_TASKS.joinpath(*name.removeprefix(f"{_TASKS}.").split("."))]
        else:
            places = []
        for place in places:
            found += [one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()]
    return found


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def _imports(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Names and levels of the modules that must be there: not those in an `if`, nor in a `try` that does without."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level
            if not node.level and (node.module or "").startswith(_TASKS):  # the names may be modules
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", 0
        elif isinstance(node, ast.Try) and all(_raises(handler) for handler in node.handlers):
            yield from _imports(node.body)


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))
