"""`zaya report`: the report page of earlier results, built again from their figures."""

from __future__ import annotations

import argparse
import importlib

from zaya_hf.quickstart.run import require


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` has path. Returns the exit code.

    Raises:
        ValueError: `args.path` holds no results of ours, or a package is missing.
    """
    require("a report", "matplotlib")
    print(importlib.import_module("zaya_hf.quickstart.report").rebuild(args.path))
    return 0
