"""`zaya quickstart`: checks that what it needs is installed before anything large is imported."""

from __future__ import annotations

import argparse
import importlib

from zaya_hf.installed import require


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit code.

    Raises:
        ValueError: a package is missing; besides, what `pipeline.run` raises.
    """
    # They come with the extras `train` and `eval`.
    require("the quickstart", "accelerate", "datasets", "lm-eval", "matplotlib", "rich")
    importlib.import_module("zaya_hf.quickstart.pipeline").run(args)
    return 0
