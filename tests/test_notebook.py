"""The notebook in docs/: it runs as it is, and what is committed shows the outputs of a clean run."""

from __future__ import annotations

import os
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from doc_examples import ROOT

NOTEBOOK = ROOT / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def committed() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in an empty folder, in a kernel of this interpreter and of this source tree, with shorter training."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert sum("steps=160" in cell.source for cell in code_cells(notebook)) == 1
    for cell in code_cells(notebook):
        cell.outputs = []
        cell.source = cell.source.replace("steps=160", "steps=30")
    folder = tmp_path_factory.mktemp("tour")
    resources = {"metadata": {"path": str(folder)}}
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | environment | {"OMP_NUM_THREADS": "1"})
    assert list(folder.iterdir()) == []  # it leaves nothing where it was started
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> set[str]:
    """What a cell has shown: text on a stream, or a picture."""
    return {output.get("name", "picture" if "image/png" in output.get("data", {}) else "") for output in cell.outputs}


def test_it_runs_and_shows_what_is_committed(executed: Any, committed: Any) -> None:
    """Cells raise nothing (they check what they say) and show text and pictures where the committed ones do."""
    shown = [kinds(cell) for cell in code_cells(executed)]
    assert shown == [kinds(cell) for cell in code_cells(committed)]
    assert sum("picture" in kind for kind in shown) == 2


def test_nothing_is_said_on_standard_error(executed: Any) -> None:
    for cell in code_cells(executed):
        assert "stderr" not in kinds(cell), [output.get("text") for output in cell.outputs]


def test_what_is_committed_is_one_run_in_order(committed: Any) -> None:
    cells = code_cells(committed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 3
    assert all("execution" not in cell.metadata for cell in cells)


def test_what_is_committed_tells_nothing_of_a_machine(committed: Any) -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
    assert len(text) < 200_000
    assert committed.metadata.kernelspec.name == "python3"


def test_readers_can_import_what_it_imports(committed: Any) -> None:
    """Every module of zaya_hf that it names is in the API reference, or the tokenizer of the quickstart."""
    source = "\n".join(cell.source for cell in code_cells(committed))
    listed = (ROOT / "docs" / "build_api.py").read_text(encoding="utf-8")
    modules = set(re.findall(r"from (zaya_hf[\w.]*) import", source))
    assert modules
    for module in modules - {"zaya_hf.quickstart.bpe"}:
        assert f'"{module}"' in listed, module
