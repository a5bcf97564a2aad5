"""Files that come with the package are found in a wheel and in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from zaya_hf.resources import resource

ROOT = Path(__file__).resolve().parent.parent


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_here_they_are_the_repository_s() -> None:
    assert resource("eval", "tasks", "quickstart", "bits.yaml") == ROOT / "eval/tasks/quickstart/bits.yaml"
    assert resource("eval", "tasks") == ROOT / "eval/tasks"


def test_in_a_wheel_they_are_inside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "zaya_hf"
    inside = made(package / "_resources" / "eval" / "a.yaml")
    assert resource("eval", "a.yaml", package=package) == inside


def test_the_package_s_own_come_first(tmp_path: Path) -> None:
    package = tmp_path / "src" / "zaya_hf"
    made(tmp_path / "eval" / "a.yaml")
    assert resource("eval", "a.yaml", package=package) == tmp_path / "eval" / "a.yaml"
    inside = made(package / "_resources" / "eval" / "a.yaml")
    assert resource("eval", "a.yaml", package=package) == inside


def test_a_wheel_does_not_look_outside(tmp_path: Path) -> None:
    """Two folders above an installed package is the Python installation, where `eval` is somebody else's."""
    package = tmp_path / "site-packages" / "zaya_hf"
    made(tmp_path / "eval" / "a.yaml")
    with pytest.raises(FileNotFoundError, match=r"no eval/a\.yaml in .*_resources: this installation .* incomplete"):
        resource("eval", "a.yaml", package=package)
