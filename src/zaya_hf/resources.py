"""Files that come with zaya_hf and are no Python modules: evaluation tasks, model cards, training recipes."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource(*parts: str, package: Path = _PACKAGE) -> Path:
    """Path of a file or folder that comes with the package, such as `resource("eval", "tasks", "quickstart")`.

    A wheel has them inside the package; an editable installation uses those of the repository.

    Args:
        package: the folder of zaya_hf.

    Raises:
        FileNotFoundError: this installation has no such file.
    """
    places = [package / "_resources"]
    if package.parent.name == "src":
        places.append(package.parent.parent)
    for place in places:
        found = place.joinpath(*parts)
        if found.exists():
            return found
    looked = " and ".join(str(place) for place in places)
    raise FileNotFoundError(f"no {'/'.join(parts)} in {looked}: this installation of zaya_hf is incomplete")
