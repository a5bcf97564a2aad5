"""`zaya report`: the page of a training run, of several side by side, of an evaluation, or of an earlier quickstart."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from zaya_hf.installed import require

PAGE = "report.html"


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` has paths, at least one, and out, None for report.html in the first folder. An
    evaluation has a Markdown file beside its page. Returns the exit code.

    Raises:
        ValueError: a path holds no results of ours, or they cannot be on one page, or a package is missing.
    """
    require("a report", "matplotlib", "pyyaml")
    paths, out = [Path(path) for path in args.paths], None if args.out is None else Path(args.out)
    run_files = importlib.import_module("zaya_hf.reporting.run_files")
    if len(paths) == 1:
        files = importlib.import_module("zaya_hf.reporting.evaluation_files")
        if files.is_evaluation(paths[0]):
            require("a report on an evaluation", "scipy")
            print(importlib.import_module("zaya_hf.evaluation.report").write_report(paths[0], out))
            return 0
    folders = [path.parent if path.name == run_files.METRICS else path for path in paths]
    runs = [run_files.is_run(folder) for folder in folders]
    if not any(runs) and len(paths) == 1:
        # Says what is wrong if it is no quickstart either.
        print(importlib.import_module("zaya_hf.quickstart.report").rebuild(paths[0], out))
        return 0
    for path, is_run in zip(paths, runs, strict=True):
        if not is_run:
            raise ValueError(f"{path} is no folder of a training run; only those can be side by side on a page")
    out = folders[0] / PAGE if out is None else out
    page = importlib.import_module("zaya_hf.reporting.training_run").build_report(folders)
    importlib.import_module("zaya_hf.atomic").write_text(out, page)
    print(out)
    return 0
