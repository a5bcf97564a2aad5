"""README: its code runs, and every test that it names exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from doc_examples import ROOT, python_blocks, quickstart_folder, run_block
from zaya_hf.quickstart.models import FAMILIES

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_folder(tmp_path_factory.mktemp("readme") / "model", README)


CODE = python_blocks(README)


@pytest.mark.parametrize("code", CODE, ids=lambda code: code.splitlines()[0][:40])
def test_the_python_examples_run(code: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "runs/quickstart/hub/zaya" in code
    run_block(code, {"runs/quickstart/hub/zaya": folder}, "README.md")
    assert capsys.readouterr().out.strip()


def test_there_are_python_examples() -> None:
    assert len(CODE) == README.count("```python") >= 2


def named_tests() -> list[str]:
    """`file.py::test` for every test that the table names; a name that begins with `::` is in the file before it."""
    found, file = [], ""
    for before, name in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", README):
        file = before or file
        found.append(f"{file}::{name}")
    return found


def test_the_table_names_tests() -> None:
    rows = [line for line in README.splitlines() if line.startswith("|") and "test_" in line]
    assert len(rows) >= 25
    for row in rows:
        assert re.search(r"`test_\w+\.py::test_\w+`", row), row


@pytest.mark.parametrize("name", sorted(set(named_tests())))
def test_a_named_test_exists(name: str) -> None:
    file, test = name.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = set(re.findall(r"`make ([a-z-]+)", README))
    assert used
    assert used <= targets


def test_named_files_exist() -> None:
    for path in re.findall(r"`(?:python )?((?:benchmarks|docker|docs|src|tests)/[\w/.]+)", README):
        assert (ROOT / path).exists(), path


def test_pictures_exist() -> None:
    pictures = re.findall(r'src="([^"]+)"', README)
    assert pictures
    for path in pictures:
        assert (ROOT / path).read_bytes().startswith(b"\x89PNG"), path


def test_the_table_of_the_quickstart_is_what_a_run_prints() -> None:
    """Its rows and columns; the figures are one run's."""
    (block,) = re.findall(r"```\n( +Held-out text.*?)```", README, re.DOTALL)
    shown = [line.split("  ")[0] for line in block.splitlines()[2:]]
    assert shown == [*(family.title for family in FAMILIES.values()), "frequencies, chance"]
    assert len(re.findall(r"^\S.*?(?: +[\d.,]+){5}(?: +0.49 M +[\d,]+)?$", block, re.MULTILINE)) == len(shown)


def test_the_speed_table_is_that_of_the_committed_results() -> None:
    """Ratios as `make bench` wrote them."""
    results = json.loads((ROOT / "benchmarks/results/cpu.json").read_text(encoding="utf-8"))
    measured = {(row["name"], row["dtype"]): row for row in results["rows"] if row["size"] == "8b"}
    lines = re.findall(r"^\| .*\(`([\w-]+)`\) \| (\S+) x \| (\S+) x \|$", README, re.MULTILINE)
    assert len(lines) >= 8
    for name, *ratios in lines:
        for dtype, ratio in zip(("fp32", "bf16"), ratios, strict=True):
            row = measured[name, dtype]
            assert ratio == f"{row['ratio']:.2f}", (name, dtype)
            assert row["check"].startswith("ok"), (name, dtype)
