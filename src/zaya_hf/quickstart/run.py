"""`zaya quickstart`: checks that what it needs is installed before anything large is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.util

# Package in Python -> name for pip. They come with the extras `train` and `eval`.
_NEEDED = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "jinja2": "jinja2",
    "lm_eval": "lm-eval",
    "matplotlib": "matplotlib",
    "rich": "rich",
}


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit code.

    Raises:
        ValueError: a package is missing; besides, what `pipeline.run` raises.
    """
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(f"the quickstart also needs {', '.join(missing)}: pip install {' '.join(missing)}")
    importlib.import_module("zaya_hf.quickstart.pipeline").run(args)
    return 0
