"""Which implementation of the operators runs: the fast ones, or only the definitions.

The environment variable ``ZAYA_OPS`` says it for a process (``auto``, the default, or ``reference``), `use` for a block
of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CHOICES = ("auto", "reference")


def _checked(name: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"ZAYA_OPS is {name!r}; expected one of: {', '.join(CHOICES)}.")
    return name


_chosen = _checked(os.environ.get("ZAYA_OPS") or "auto")


def reference_only() -> bool:
    """Whether every operator has to run its definition."""
    return _chosen == "reference"


def is_eager() -> bool:
    """Whether no trace, compilation, transform of torch.func or forward-mode derivative is on: these cannot look into
    functions that have their gradient written out, or operators that are not torch's usual ones."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def is_exporting() -> bool:
    """Whether a program is being made that has to run without this package, and on values that are not known yet."""
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and bool(torch._C._get_tracing_state()))


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether all are torch's own strided tensors or parameters, no subclass that has its own idea of operators."""
    return all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided) for t in tensors)


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
