"""`zaya lm-eval`: lm-eval's own command line with the model `zaya` and the tasks of this package."""

from __future__ import annotations

import argparse
import importlib

from zaya_hf.installed import require


def run(args: argparse.Namespace) -> int:
    """Hand `args.arguments` to lm-eval as they are, and return its exit code.

    Raises:
        SystemExit: lm-eval's, for a wrong command line and for help.
        ValueError: lm-eval is not installed, or a file of results is there already.
    """
    require("zaya lm-eval", "lm-eval", "datasets")
    # After the check: its absence would be a traceback.
    importlib.import_module("zaya_hf.evaluation.forwarding").forward(args.arguments)
    return 0
