"""`zaya quickstart`: checks that what it needs is installed before anything large is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.util


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit code.

    Raises:
        ValueError: a package is missing; besides, what `pipeline.run` raises.
    """
    # They come with the extras `train` and `eval`.
    require("the quickstart", "accelerate", "datasets", "lm-eval", "matplotlib", "rich")
    importlib.import_module("zaya_hf.quickstart.pipeline").run(args)
    return 0


def require(what: str, *packages: str) -> None:
    """Check that packages, under their names for pip, are installed for `what`.

    Raises:
        ValueError: some are not; the message names them and the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        raise ValueError(f"{what} also needs {', '.join(missing)}: pip install {' '.join(missing)}")
