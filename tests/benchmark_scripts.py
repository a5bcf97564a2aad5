"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@contextmanager
def benchmark_script(name: str) -> Iterator[Any]:
    """`benchmarks/NAME.py`, imported as ``python benchmarks/NAME.py`` would find its parts."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop(name, None)
