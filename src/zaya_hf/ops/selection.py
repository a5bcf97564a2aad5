"""Which implementation of the operators runs: the fast ones, or only the definitions.

The environment variable ``ZAYA_OPS`` says it for a process (``auto``, the default, or ``reference``), `use` for a block
of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

CHOICES = ("auto", "reference")


def _checked(name: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"ZAYA_OPS is {name!r}; expected one of: {', '.join(CHOICES)}.")
    return name


_chosen = _checked(os.environ.get("ZAYA_OPS") or "auto")


def reference_only() -> bool:
    """Whether every operator has to run its definition."""
    return _chosen == "reference"


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the operators in one way inside a ``with`` block, in all threads of the process.

    Args:
        name: "auto" (the fastest that covers the input) or "reference" (the definition in plain PyTorch).

    Raises:
        ValueError: for another name.
    """
    global _chosen
    before, _chosen = _chosen, _checked(name)
    try:
        yield
    finally:
        _chosen = before
