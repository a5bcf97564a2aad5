"""Builds the API reference: one page per public module, from the docstrings.

    python docs/build_api.py docs/api

What is public is the list below, and in each of these modules what has a name without a leading underscore (or is in
its `__all__`). Everything else may change without notice.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pdoc

from zaya_hf import __version__, configuration_zaya

MODULES = (
    "zaya_hf",
    "zaya_hf.checkpoints.layouts",
    "zaya_hf.evaluation.harness",
    "zaya_hf.evaluation.statistics",
    "zaya_hf.exporting",
    "zaya_hf.hub.card",
    "zaya_hf.kernel_table",
    "zaya_hf.ops",
    "zaya_hf.ops.selection",
    "zaya_hf.supported_versions",
    "zaya_hf.testing",
    "zaya_hf.training",
    "zaya_hf.training.balancing",
    "zaya_hf.training.callback",
    "zaya_hf.training.checkpoint",
    "zaya_hf.training.config",
    "zaya_hf.training.controllers",
    "zaya_hf.training.data.build",
    "zaya_hf.training.data.chat",
    "zaya_hf.training.data.documents",
    "zaya_hf.training.data.order",
    "zaya_hf.training.data.packing",
    "zaya_hf.training.data.rows",
    "zaya_hf.training.distributed",
    "zaya_hf.training.ema",
    "zaya_hf.training.flops",
    "zaya_hf.training.guard",
    "zaya_hf.training.launch",
    "zaya_hf.training.loop",
    "zaya_hf.training.lora",
    "zaya_hf.training.models",
    "zaya_hf.training.optim",
    "zaya_hf.training.parts",
    "zaya_hf.training.roles",
    "zaya_hf.training.run",
    "zaya_hf.training.schedule",
    "zaya_hf.training.settings_files",
    "zaya_hf.training.simple",
    "zaya_hf.training.state",
    "zaya_hf.training.stopping",
)


def build(folder: Path, modules: tuple[str, ...] = MODULES) -> list[str]:
    """Write the pages into `folder` and return what pdoc complains about, one text each (nothing, if all is well)."""
    pdoc.render.configure(
        docformat="google",
        footer_text=f"zaya_hf {__version__}",
        template_directory=Path(__file__).parent / "api_templates",
    )
    with warnings.catch_warnings(record=True) as caught, _annotations_of_transformers():
        warnings.simplefilter("always")
        # A function of `zaya_hf.ops` has the name of the package behind it, which pdoc would show as well.
        others = f"!(?!({'|'.join(map(re.escape, modules))})$)"
        pdoc.pdoc(*modules, others, output_directory=folder)
    return [f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in caught if _by_pdoc(warning)]


@contextmanager
def _annotations_of_transformers() -> Iterator[None]:
    """Lets pdoc read the annotations of the fields that ZayaConfig inherits: it looks their names up in our module."""
    names = vars(configuration_zaya)
    names["Literal"] = Literal
    try:
        yield
    finally:
        del names["Literal"]


def _by_pdoc(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is about the pages; while pdoc imports modules, other packages warn about themselves."""
    return Path(pdoc.__file__).parent in Path(warning.filename).parents


def main() -> int:
    """Build, print the complaints, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Build the API reference as HTML.")
    parser.add_argument("folder", type=Path, help="where to write the pages")
    folder = parser.parse_args().folder
    complaints = build(folder)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    print(f"{folder / 'index.html'}: {len(MODULES)} modules")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
