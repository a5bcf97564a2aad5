"""What to say of a name that is not known: which known one may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near_hint"]


def near_hint(name: str, known: Iterable[str]) -> str:
    """What to put behind the message of an unknown `name`: the known one that may have been meant, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
