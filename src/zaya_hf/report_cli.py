"""`zaya report`: the report page of earlier results, built again from their figures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` has path. Returns the exit code.

    Raises:
        ValueError: `args.path` holds no results of ours, or matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report also needs matplotlib: pip install matplotlib")
    print(importlib.import_module("zaya_hf.quickstart.report").rebuild(args.path))
    return 0
