"""Which versions of other packages zaya_hf supports: the one place where they are stated, and the check at import.

`zaya_hf` imports this module before everything else. If torch or transformers is outside its range, one warning says so
and what would be right; the import goes on. Nothing heavy is imported here: versions come from the packages' metadata.
`ZAYA_HF_NO_VERSION_CHECK=1` in the environment silences the warning, as does a filter for `UnsupportedVersionWarning`.

What is optional is not looked at while importing, since an old package that nobody uses is nobody's trouble; `zaya
doctor` reports it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: What `import zaya_hf` needs; the bounds are those of pyproject.toml.
REQUIRED = {
    "torch": ">=2.11",
    "transformers": ">=5.24,<6",
    "safetensors": ">=0.5",
    "jinja2": ">=3.1",
    "numpy": ">=1.26",
    "tqdm": ">=4.66",
}
#: What parts of zaya_hf, or of what one does with it, need beyond that.
OPTIONAL = {
    "accelerate": ">=1.15",
    "datasets": ">=5.2",
    "lm-eval": ">=0.4.13",
    "matplotlib": ">=3.9",
    "peft": ">=0.21",
    "pyarrow": ">=17",
    "pydantic": ">=2.9",
    "pyyaml": ">=6",
    "rich": ">=13.7",
    "scipy": ">=1.11",
    "tensorboard": ">=2.16",
    "triton": ">=3.6",
    "trl": ">=1.16",
    "zstandard": ">=0.22",
}
#: The newest releases that the tests have run with. Newer ones inside the range above are expected to work.
TESTED = {"torch": "2.13", "transformers": "5.24"}

SILENCE = "ZAYA_HF_NO_VERSION_CHECK"
_CHECKED_AT_IMPORT = ("torch", "transformers")


class UnsupportedVersionWarning(UserWarning):
    """A package that zaya_hf needs has a version outside the supported range."""


class Installed(NamedTuple):
    """What is known about one package.

    Attributes:
        name: of the distribution.
        supported: the range, such as ">=5.24,<6".
        version: what is installed, None if nothing is.
        state: "supported", "too old", "too new", "newer than tested", "unreadable" (the version is no version), or
            "not installed".
    """

    name: str
    supported: str
    version: str | None
    state: str


def installed_version(name: str) -> str | None:
    """The version of the distribution `name` from its metadata, None if it is not installed. Imports nothing."""
    try:
        return metadata.version(name) or None
    except metadata.PackageNotFoundError:
        return None


def state_of(name: str, version: str | None, supported: str) -> str:
    """How `version` of package `name` lies to the range `supported`; the words are those of `Installed.state`.

    A build is judged by the release that it is on the way to: 5.24.0.dev0 and 5.24.0rc1 count as 5.24.0, and
    2.13.0+cpu, 2.13.0+rocm7.1 and 2.13.0a0+gitabc123 as 2.13.0.
    """
    if version is None:
        return "not installed"
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return "unreadable"
    for bound in SpecifierSet(supported):
        if not bound.contains(release):
            return "too new" if bound.operator in ("<", "<=") else "too old"
    tested = TESTED.get(name)
    if tested is not None and release.release[: tested.count(".") + 1] > Version(tested).release:
        return "newer than tested"
    return "supported"


def look_up(lookup: Callable[[str], str | None] = installed_version) -> list[Installed]:
    """Every package of `REQUIRED` and `OPTIONAL`, as it is installed here.

    Args:
        lookup: gives the version of a distribution, None where it is not installed.
    """
    found = []
    for name, supported in (REQUIRED | OPTIONAL).items():
        version = lookup(name)
        found.append(Installed(name, supported, version, state_of(name, version, supported)))
    return found


def complaint(lookup: Callable[[str], str | None] = installed_version) -> str | None:
    """One line about the packages that `import zaya_hf` rests on, None if all are supported.

    What is missing or unreadable is not mentioned: the first fails by itself, and nothing can be said about the second.

    Args:
        lookup: gives the version of a distribution, None where it is not installed.
    """
    wrong = []
    for name in _CHECKED_AT_IMPORT:
        version, supported = lookup(name), REQUIRED[name]
        state = state_of(name, version, supported)
        if state in ("too old", "too new"):
            wrong.append(f"{name} {version} is {state}, supported is {name}{supported}")
    if not wrong:
        return None
    install = " ".join(f"'{name}{REQUIRED[name]}'" for name in _CHECKED_AT_IMPORT if any(name in w for w in wrong))
    return f"zaya_hf: {'; '.join(wrong)}. Install {install}, or set {SILENCE}=1 to try it without this warning."


def silenced(value: str | None) -> bool:
    """Whether a value of the environment variable `SILENCE` switches the check off."""
    return (value or "").strip().lower() in ("1", "true", "yes", "on")


def warn_once() -> None:
    """Warn with an `UnsupportedVersionWarning` if `complaint` has something to say and nobody silenced it."""
    text = None if silenced(os.environ.get(SILENCE)) else complaint()
    if text is not None:
        warnings.warn(text, UnsupportedVersionWarning, stacklevel=4)  # the line that imports zaya_hf


# Here and not in `zaya_hf/__init__.py`: a module is run once, and before the imports that an old package lets fail.
warn_once()
