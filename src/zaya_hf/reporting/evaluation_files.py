"""How the folder of an evaluation is told from others."""

from __future__ import annotations

import json
from pathlib import Path

MANIFEST = "manifest.json"
_MADE_BY = "zaya eval"


def is_evaluation(folder: Path) -> bool:
    """Whether there is the manifest of an evaluation in the folder."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("made_by") == _MADE_BY
