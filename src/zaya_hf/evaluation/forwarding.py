"""lm-eval's own command line with our scorer, our tasks, and a file of results where it was asked for.

lm-eval reads no entry points, so what it is to know has to be registered in the process that runs it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.loggers
import lm_eval.models  # before the scorer registers: lm-eval registers its own models in its import
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate

import zaya_hf.evaluation.scorer  # noqa: F401, registers the model `zaya`
from zaya_hf.atomic import write_json
from zaya_hf.evaluation import code_execution
from zaya_hf.evaluation.run_results import jsonable
from zaya_hf.resources import resource

__all__ = ["forward"]


def forward(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with `arguments`.

    It knows the model `zaya` and the tasks of this package. ``--confirm_run_unsafe_code`` is the consent that our code
    tasks ask for. With ``--output_path FILE.json`` the results are in that very file (lm-eval adds the time to its
    name), as JSON without NaN; a file that is there is not overwritten.

    Raises:
        SystemExit: lm-eval's exit code, where it does not just return.
        ValueError: the file of ``--output_path`` exists; before anything is loaded.
        OSError: the results could not be written, which lm-eval itself only warns of.
    """
    output = _output_file(arguments)
    if output is not None and output.exists():
        raise ValueError(f"--output_path {output} exists: choose another file, or remove it")
    if "--confirm_run_unsafe_code" in arguments:
        code_execution.allow()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(sys, "argv", ["lm-eval", *arguments]))
        stack.enter_context(_replaced(lm_eval.tasks, "TaskManager", _TaskManager))
        if output is not None:
            stack.enter_context(_replaced(lm_eval.loggers, "EvaluationTracker", _tracker(output)))
        cli_evaluate()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _output_file(arguments: Sequence[str]) -> Path | None:
    """The file that ``--output_path`` names, if it names one and no folder."""
    found: str | None = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name not in ("--output_path", "-o"):
            continue
        found = value if equals else next(iter(arguments[position + 1 :]), None)
    return Path(found) if found is not None and Path(found).suffix == ".json" else None


class _TaskManager(lm_eval.tasks.TaskManager):
    """lm-eval's, which also looks into our folder of tasks; what the user names wins."""

    def __init__(self, *args: Any, include_path: Any = None, **kwargs: Any):
        theirs = [] if include_path is None else include_path if isinstance(include_path, list) else [include_path]
        super().__init__(*args, include_path=[str(resource("eval", "tasks")), *theirs], **kwargs)


def _tracker(file: Path) -> type[lm_eval.loggers.EvaluationTracker]:
    class Tracker(lm_eval.loggers.EvaluationTracker):
        """Moves what lm-eval has written under a name of its own to the name that was asked for."""

        def save_results_aggregated(self, *args: Any, **kwargs: Any) -> None:
            super().save_results_aggregated(*args, **kwargs)
            written = file.with_name(f"{file.stem}_{getattr(self, 'date_id', '')}.json")
            if not written.is_file():
                raise OSError(f"the results could not be written to {file}")
            write_json(file, jsonable(json.loads(written.read_text(encoding="utf-8"))))
            written.unlink()

    return Tracker
