"""Supported versions: stated once, the same in pyproject.toml, README and docs, and checked at import."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from doc_examples import ROOT
from zaya_hf import supported_versions
from zaya_hf.supported_versions import OPTIONAL, REQUIRED, TESTED, UnsupportedVersionWarning, complaint, state_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where the standard library lacks it

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROCM = (ROOT / "docs" / "rocm.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "docker" / "rocm.Dockerfile").read_text(encoding="utf-8")


def bounds(texts: list[str]) -> dict[str, SpecifierSet]:
    requirements = [Requirement(text) for text in texts]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in requirements}


def lower(name: str) -> str:
    (bound,) = (s.version for s in SpecifierSet((REQUIRED | OPTIONAL)[name]) if s.operator == ">=")
    return bound


class TestOnePlace:
    def test_what_is_required_is_what_pyproject_requires(self) -> None:
        assert bounds(PROJECT["dependencies"]) == {name: SpecifierSet(text) for name, text in REQUIRED.items()}

    def test_extras_ask_for_the_stated_versions(self) -> None:
        stated = {name: SpecifierSet(text) for name, text in (REQUIRED | OPTIONAL).items()}
        for extra, texts in PROJECT["optional-dependencies"].items():
            for name, specifier in bounds(texts).items():
                if extra == "dev" and name not in stated:
                    continue  # tools of this repository
                assert stated.get(name) == specifier, (extra, name)

    def test_readme_says_the_same(self) -> None:
        assert re.search(r"transformers must be ≥ ([\d.]+) and below (\d+)", README), "README states the range"
        low, high = re.findall(r"transformers must be ≥ ([\d.]+) and below (\d+)", README)[0]
        assert SpecifierSet(f">={low},<{high}") == SpecifierSet(REQUIRED["transformers"])
        assert set(re.findall(r"torch ≥ ([\d.]+\d)", README)) == {lower("torch")}
        assert set(re.findall(r"Python ([\d.]+\d) or newer", README)) == {PROJECT["requires-python"].strip(">= ")}

    def test_the_rocm_page_says_the_same(self) -> None:
        low, high = re.findall(r"transformers ≥ ([\d.]+) and below (\d+)", ROCM)[0]
        assert SpecifierSet(f">={low},<{high}") == SpecifierSet(REQUIRED["transformers"])
        assert set(re.findall(r"torch ≥ ([\d.]+\d)", ROCM)) == {lower("torch")}
        assert set(re.findall(r"Triton ≥ ([\d.]+\d)", ROCM)) == {lower("triton")}
        assert set(re.findall(r"Python ≥ ([\d.]+\d)", ROCM)) == {PROJECT["requires-python"].strip(">= ")}
        for row in re.findall(r"^\| ([\d., ]+) \| [\d.]+ \|", ROCM, re.MULTILINE):
            for version in row.split(", "):
                assert state_of("torch", version, REQUIRED["torch"]) == "supported", version

    def test_what_is_tested_is_in_range(self) -> None:
        for name, version in TESTED.items():
            assert state_of(name, version, REQUIRED[name]) == "supported"


class TestDockerfile:
    def test_what_it_copies_exists(self) -> None:
        copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
        assert copied
        for line in copied:
            for path in line.split():
                assert (ROOT / path).exists(), path

    def test_what_the_build_needs_is_copied(self) -> None:
        copied = set(" ".join(re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)).split())
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        included = re.findall(r'^"(\w+)" = "zaya_hf/_resources', text, re.MULTILINE)
        assert included
        assert copied >= {"pyproject.toml", "Makefile", "src", PROJECT["readme"], *PROJECT["license-files"], *included}

    def test_its_make_target_and_extras_exist(self) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        (target,) = re.findall(r"^RUN make ([a-z-]+)", DOCKERFILE, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])

    def test_everything_it_fetches_is_an_argument(self) -> None:
        assert re.search(r"^FROM \$\{BASE_IMAGE\}:\$\{BASE_TAG\}$", DOCKERFILE, re.MULTILINE)
        names = re.findall(r"^ARG (\w+)=\S", DOCKERFILE, re.MULTILINE)
        assert names == ["BASE_IMAGE", "BASE_TAG", "TORCH", "EXTRAS"]
        for name in names:
            assert f"`{name}`" in ROCM

    def test_its_torch_is_supported_and_in_the_table(self) -> None:
        version, rocm = re.findall(
            r'^ARG TORCH="torch==(\S+) --index-url \S+/rocm([\d.]+)"$', DOCKERFILE, re.MULTILINE
        )[0]
        assert state_of("torch", version, REQUIRED["torch"]) == "supported"
        assert re.search(rf"^\| {re.escape(version)} \| {re.escape(rocm)} \|", ROCM, re.MULTILINE)
        assert f'TORCH="torch=={version} --index-url' in ROCM
        (default,) = re.findall(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert version == default

    def test_the_commands_of_the_page_name_it(self) -> None:
        assert "docker build -f docker/rocm.Dockerfile" in ROCM
        for flag in ("--device=/dev/kfd", "--device=/dev/dri", "--group-add", "--ipc=host", "seccomp=unconfined"):
            assert flag in ROCM


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("torch", "2.10.9", "too old"),
        ("torch", "2.11", "supported"),
        ("torch", "2.11.0a0+git1234", "supported"),
        ("torch", "2.13.0+cpu", "supported"),
        ("torch", "2.13.1+rocm7.2", "supported"),
        ("torch", "2.14.0.dev20260101+cpu", "newer than tested"),
        ("torch", "3.0.0", "newer than tested"),
        ("transformers", "4.57.1", "too old"),
        ("transformers", "5.23.9", "too old"),
        ("transformers", "5.24.0.dev0", "supported"),
        ("transformers", "5.24.0rc1", "supported"),
        ("transformers", "5.24.7", "supported"),
        ("transformers", "5.25.0.dev0", "newer than tested"),
        ("transformers", "5.100.0", "newer than tested"),
        ("transformers", "6.0.0.dev0", "too new"),
        ("transformers", "6.0.0rc1", "too new"),
        ("transformers", "6.1", "too new"),
        ("transformers", "main", "unreadable"),
        ("transformers", None, "not installed"),
    ],
)
def test_the_state_of_a_version(name: str, version: str | None, state: str) -> None:
    assert state_of(name, version, REQUIRED[name]) == state


def test_nothing_to_say_about_what_is_installed_here() -> None:
    assert complaint() is None
    found = {about.name: about for about in supported_versions.look_up()}
    assert set(found) == set(REQUIRED) | set(OPTIONAL)
    assert found["torch"].version == metadata.version("torch")
    assert {found[name].state for name in REQUIRED} <= {"supported", "newer than tested"}
    # Tests run with what TESTED names, or with something newer on purpose (make test-latest).
    installed = Version(metadata.version("transformers"))
    assert installed.release[:2] >= Version(TESTED["transformers"]).release


@pytest.mark.parametrize("versions", [{"torch": "2.13.0", "transformers": "5.25.0.dev0"}, {"torch": "x"}, {}], ids=str)
def test_no_complaint(versions: dict[str, str]) -> None:
    assert complaint(versions.get) is None


def test_the_complaint_is_one_line_about_everything_that_is_wrong() -> None:
    text = complaint({"torch": "2.9.1+cpu", "transformers": "6.0.0rc1"}.get)
    assert text == (
        "zaya_hf: torch 2.9.1+cpu is too old, supported is torch>=2.11; transformers 6.0.0rc1 is too new, supported is "
        "transformers>=5.24,<6. Install 'torch>=2.11' 'transformers>=5.24,<6', or set ZAYA_HF_NO_VERSION_CHECK=1 to "
        "try it without this warning."
    )
    only = complaint({"torch": "2.13", "transformers": "5.1"}.get)
    assert only is not None
    assert "Install 'transformers>=5.24,<6', or" in only


class TestAtImport:
    @pytest.fixture(autouse=True)
    def _old_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions = {"torch": "2.13.0", "transformers": "5.1"}
        monkeypatch.setattr(metadata, "version", lambda name: versions[name])

    def test_one_warning(self) -> None:
        spec = importlib.util.spec_from_file_location("another_copy", supported_versions.__file__)
        assert spec is not None
        assert spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        with pytest.warns(UserWarning, match="transformers 5.1 is too old") as caught:
            spec.loader.exec_module(copy)
        assert [warning.category for warning in caught] == [copy.UnsupportedVersionWarning]

    @pytest.mark.parametrize(("value", "silent"), [("1", True), ("yes", True), ("0", False), ("", False)])
    def test_the_switch(self, monkeypatch: pytest.MonkeyPatch, value: str, silent: bool) -> None:
        monkeypatch.setenv("ZAYA_HF_NO_VERSION_CHECK", value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            supported_versions.warn_once()
        assert len(caught) == (0 if silent else 1)


# What an old transformers does to the imports of zaya_hf must not come before the warning; nor may the check itself
# import anything heavy. Both are seen where the imports fail at the first heavy package.
_FRESH = """
import sys, warnings
from importlib import metadata
real = metadata.version
metadata.version = lambda name: {"transformers": "5.1"}.get(name) or real(name)

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "tokenizers", "safetensors"):
            raise ImportError(f"heavy: {name}")

sys.meta_path.insert(0, Refuse())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import zaya_hf
    except ImportError as error:
        print(error)
print([(warning.category.__name__, warning.filename) for warning in caught])
"""


def test_the_warning_comes_before_every_heavy_import_and_at_the_users_line() -> None:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", _FRESH], env=environment, capture_output=True, text=True, check=True)
    heavy, warned = done.stdout.splitlines()
    assert heavy.startswith("heavy: ")
    assert warned == "[('UnsupportedVersionWarning', '<string>')]"


def test_it_is_a_warning_that_can_be_filtered() -> None:
    assert issubclass(UnsupportedVersionWarning, UserWarning)


class TestLatest:
    def test_make_test_latest_ignores_the_upper_bound(self) -> None:
        command = ["make", "-n", "test-latest", "LATEST_VENV=/no/such", "PYTHON=python3"]
        plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "/no/such/bin/python -m pip install --quiet --disable-pip-version-check --upgrade transformers\n" in plan
        assert plan.index('--editable ".[dev]"') < plan.index("--upgrade transformers")
        assert plan.index("--upgrade transformers") < plan.index("/no/such/bin/python -m pytest")
        tests = set(re.findall(r"tests/\w+\.py", plan))
        assert {"tests/test_parity_stock.py", "tests/test_cache.py", "tests/test_generate_cache.py"} <= tests
        assert all((ROOT / test).exists() for test in tests)

    def test_pre_releases_on_request(self) -> None:
        command = ["make", "-n", "test-latest", "LATEST=--pre transformers", "LATEST_VENV=/no/such"]
        plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "--upgrade --pre transformers\n" in plan
