"""The API reference: every public name has a docstring that states its arguments, and the pages build cleanly."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zaya_hf
from doc_examples import ROOT


def load_builder() -> ModuleType:
    """`docs/build_api.py`, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_api = load_builder()


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a page shows of a module: its `__all__`, else what is defined in it under a name without underscore."""
    listed = getattr(module, "__all__", None)
    for name in listed if listed is not None else vars(module):
        value = getattr(module, name)
        here = getattr(value, "__module__", None) == module.__name__
        if (listed is not None or (here and not name.startswith("_"))) and callable(value):
            yield f"{module.__name__}.{name}", value


def methods(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines itself."""
    for attribute, value in vars(cls).items():
        if attribute.startswith("_"):
            continue
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if isinstance(value, property) or inspect.isfunction(value):
            yield f"{name}.{attribute}", value


PUBLIC = dict(pair for module in build_api.MODULES for pair in public_names(importlib.import_module(module)))
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if not inspect.isclass(value)}
METHODS = dict(
    pair for name, cls in CLASSES.items() if cls.__module__.startswith("zaya_hf") for pair in methods(name, cls)
)


def test_what_people_import_is_there() -> None:
    assert {f"zaya_hf.{name}" for name in zaya_hf.__all__ if callable(getattr(zaya_hf, name))} <= set(PUBLIC)
    assert {"zaya_hf.testing.redraw", "zaya_hf.training.loop.train", "zaya_hf.training.optim.HybridMuon"} <= set(PUBLIC)


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_it_has_a_docstring_of_its_own(name: str) -> None:
    value = (PUBLIC | METHODS)[name]
    text = value.__doc__
    inherited = {base.__doc__ for base in value.__mro__[1:]} if inspect.isclass(value) else set()
    assert text, name
    assert text not in inherited, name
    if dataclasses.is_dataclass(value):
        assert not text.startswith(f"{value.__name__}("), f"{name}: only the signature that dataclass writes"
    assert text.strip().split("\n\n")[0].rstrip().endswith((".", ":", "!", "`")), name


# Arguments that say nothing beyond their own name.
OBVIOUS = {"self", "cls", "args", "kwargs", "model_args", "device", "dtype"}


def stated(text: str, parameter: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(parameter)}(?![A-Za-z0-9_])", text) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_states_its_arguments(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    missing = [p for p in parameters if p not in OBVIOUS and not p.startswith("_") and not stated(text, p)]
    assert not missing, f"{name}: {', '.join(missing)}"


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_states_the_arguments_of_its_constructor_and_its_fields(name: str) -> None:
    cls = CLASSES[name]
    if issubclass(cls, enum.Enum | Exception) or not cls.__module__.startswith("zaya_hf"):
        return
    own = cls.__dict__.get("__init__")
    if dataclasses.is_dataclass(cls):
        inherited = {
            field.name
            for base in cls.__mro__[1:]
            if dataclasses.is_dataclass(base)
            for field in dataclasses.fields(base)
        }
        wanted = [field.name for field in dataclasses.fields(cls) if field.init and field.name not in inherited]
        own = None
    else:
        wanted = list(getattr(cls, "_fields", ())) if own is None else list(inspect.signature(own).parameters)
    text = (cls.__doc__ or "") + ((own.__doc__ or "") if own is not None else "")
    missing = [p for p in wanted if p not in OBVIOUS and not p.startswith("_") and not stated(text, p)]
    assert not missing, f"{name}: {', '.join(missing)}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("api")
    return folder, build_api.build(folder)


def page_of(folder: Path, module: str) -> str:
    return (folder / f"{module.replace('.', '/')}.html").read_text(encoding="utf-8")


def test_the_pages_build_without_complaint(pages: tuple[Path, list[str]]) -> None:
    assert pages[1] == []


def test_every_public_name_is_on_its_page_with_its_docstring(pages: tuple[Path, list[str]]) -> None:
    folder, _ = pages
    for module in build_api.MODULES:
        page = page_of(folder, module)
        for full, _ in public_names(importlib.import_module(module)):
            name = full.removeprefix(f"{module}.")
            section = re.search(rf'<section id="{re.escape(name)}">(.*?)</section>', page, re.DOTALL)
            assert section, full
            assert '<div class="docstring">' in section[1], full


def test_private_modules_have_no_page(pages: tuple[Path, list[str]]) -> None:
    folder, _ = pages
    built = {path.relative_to(folder).with_suffix("").as_posix().replace("/", ".") for path in folder.rglob("*.html")}
    assert built == {*build_api.MODULES, "index"}


def test_the_index_names_every_module_with_its_first_line(pages: tuple[Path, list[str]]) -> None:
    index = (pages[0] / "index.html").read_text(encoding="utf-8")
    for module in build_api.MODULES:
        assert f'href="{module.replace(".", "/")}.html"' in index
    assert "Fixtures for tests of ZAYA models" in index


def test_what_is_built_is_not_committed() -> None:
    assert "docs/api/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
