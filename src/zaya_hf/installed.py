"""Whether optional packages are there, asked before anything large is imported."""

from __future__ import annotations

import importlib.util


def require(what: str, *packages: str) -> None:
    """Check that packages, under their names for pip, are installed for `what`.

    Raises:
        ValueError: some are not; the message names them and the command that installs them.
    """
    modules = {"pyyaml": "yaml"}
    missing = [name for name in packages if importlib.util.find_spec(modules.get(name, name.replace("-", "_"))) is None]
    if missing:
        raise ValueError(f"{what} also needs {', '.join(missing)}: pip install {' '.join(missing)}")
