"""What a user gets: wheel and sdist are built, and the wheel is installed apart from the source tree and run."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def files(root: Path, *folders: str) -> set[str]:
    """Names relative to `root` of all files in its `folders`."""
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}


SOURCES = files(ROOT / "src", "zaya_hf", "zaya_cli")
# Evaluation tasks, model cards and recipes: at the root of the repository, inside the package of a wheel.
RESOURCES = files(ROOT, "eval", "model_cards", "train")


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, with no trace of the source tree in its environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ZAYA_HF_NO_REGISTER")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, made by the build backend as it is installed: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own with the wheel installed and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"),
        *("--target", target, wheel),
        cwd=target,
    )
    return target


def test_the_wheel_has_every_source_file_and_resource_and_no_other_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert "zaya_hf/py.typed" in SOURCES
    assert {"eval/tasks/quickstart/group.yaml", "eval/tasks/quickstart/local_items.py"} <= RESOURCES
    inside = {f"zaya_hf/_resources/{name}" for name in RESOURCES}
    assert code == SOURCES | inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata_state_versions_extras_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        about = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{folder}/entry_points.txt").decode())
    assert about["Name"] == "zaya_hf"
    assert set(about.get_all("Provides-Extra")) == {"train", "eval", "kernels", "dev"}
    assert about["License-Expression"] == "Apache-2.0"
    core = {Requirement(text).name for text in about.get_all("Requires-Dist") if "extra ==" not in text}
    assert core == {"torch", "transformers", "safetensors", "jinja2", "numpy", "tqdm"}
    assert dict(scripts["console_scripts"]) == {"zaya": "zaya_cli:main"}


def test_the_sdist_can_be_built_and_tested_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {f"src/{name}" for name in SOURCES} | {"pyproject.toml"}
    wanted |= {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "tests/conftest.py"}
    assert wanted | RESOURCES <= names
    assert not any(part in name for name in names for part in ("__pycache__", ".venv", "runs/"))


def test_the_installed_package_is_imported_and_its_command_runs(installed: Path, tmp_path: Path) -> None:
    code = "import zaya_hf; print(zaya_hf.__file__); print(zaya_hf.__version__)"
    file, version = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert Path(file).is_relative_to(installed)
    (command,) = (path for path in (installed / "bin").iterdir() if path.stem == "zaya")
    assert run(command, "--version", cwd=tmp_path, PYTHONPATH=str(installed)) == f"zaya_hf {version}\n"


def test_the_installed_package_has_its_resources(installed: Path, tmp_path: Path) -> None:
    code = 'from zaya_hf.resources import resource; print(resource("eval", "tasks", "quickstart", "bits.yaml"))'
    found = Path(run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).strip())
    assert found.is_relative_to(installed)
    assert found.read_text() == (ROOT / "eval" / "tasks" / "quickstart" / "bits.yaml").read_text()


def test_doctor_reads_the_extras_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    report = json.loads(
        run(sys.executable, "-m", "zaya_cli", "doctor", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    )
    assert report["ok"]
    assert report["core"]["missing"] == []
    assert set(report["extras"]) == {"train", "eval", "kernels"}
