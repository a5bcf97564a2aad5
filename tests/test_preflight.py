"""What a suite lacks: all of it in one message, with what to do, before any model is loaded."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets.load import CachedDatasetModuleFactory
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from local_tasks import entry, write_suite, write_tasks
from zaya_hf.evaluation import preflight
from zaya_hf.evaluation.suites import Suite, load_suite

GENERATED = {"output_type": "generate_until"}


@pytest.fixture(autouse=True)
def network_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def own(tmp_path: Path) -> Any:
    def load(tasks: Mapping[str, Mapping[str, Any]], *entries: Mapping[str, Any], functions: str = "") -> Suite:
        folder = write_tasks(tmp_path / "tasks", tasks)
        file = folder / "functions.py"
        file.write_text(functions + file.read_text())
        return load_suite(write_suite(tmp_path / "own.yaml", *entries))

    return load


def test_a_suite_that_lacks_nothing(own):
    suite = own({"sums": {}}, entry("sums"))
    assert preflight.check(suite, allow_code=False) is None


def test_everything_is_said_at_once_with_what_to_do(own, tmp_path):
    tasks = {
        "own_code": {**GENERATED, "unsafe_code": True},
        "far": {"dataset_path": "someone/far_away", "dataset_name": "main"},
        "file": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "gone.jsonl")}}},
    }
    suite = own(
        tasks,
        entry("own_code", metric="exact_match,none", ability="code"),
        entry("far"),
        entry("file"),
        entry("zaya_gpqa_main", private_items=True),
        functions="import surely_no_package\n",
    )
    with pytest.raises(ValueError) as raised:
        preflight.check(suite, allow_code=False)
    assert "\n" not in str(raised.value)
    head, *lines = re.split(r";? \(\d\) ", str(raised.value))
    assert head == "suite own lacks 5 things:"
    consent, packages, file, gated, absent = lines
    assert consent.startswith("consent: own_code runs programs")
    assert "--allow-code-execution" in consent
    assert packages == "packages: own_code needs surely_no_package: pip install surely_no_package"
    assert file == f"data: file reads {tmp_path / 'gone.jsonl'}, which is not there"
    assert "Idavidrein/gpqa, for zaya_gpqa_main, is gated" in gated
    assert "https://huggingface.co/datasets/Idavidrein/gpqa" in gated
    assert "HF_TOKEN" in gated
    assert "HF_HUB_OFFLINE" in absent
    assert absent.endswith("not in the cache are someone/far_away (for far): run once with a network")
    with pytest.raises(ValueError, match="lacks 4 things"):
        preflight.check(suite, allow_code=True)


def test_what_the_loader_of_own_items_says_is_passed_on(own):
    broken = 'raise ValueError("no items: run `zaya eval data sums`")\n    content'
    suite = own({"sums": {}, "more": {}}, entry("sums"), entry("more"))
    file = suite.folders[0] / "functions.py"
    file.write_text(file.read_text().replace("content", broken, 1))
    with pytest.raises(ValueError, match="items: sums, more: no items: run `zaya eval data sums`"):
        preflight.check(suite, allow_code=True)


def test_only_imports_that_must_work_count(own):
    functions = """
import json, no_package_a.inner
from typing import TYPE_CHECKING
try:
    import no_package_b
except ImportError:
    no_package_b = None
try:
    from no_package_c import x
except ImportError as error:
    raise ImportError("no_package_c is needed") from error
if TYPE_CHECKING:
    import no_package_d
def later():
    import no_package_e
"""
    suite = own({"sums": {}}, entry("sums"), functions=functions)
    [text] = preflight.missing(suite, allow_code=True)
    assert text == "packages: sums needs no_package_a, no_package_c: pip install no_package_a no_package_c"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("4.11.1", []),
        ("4.11", []),
        ("4.13.2", ["antlr4-python3-runtime==4.11"]),
        (None, ["antlr4-python3-runtime==4.11"]),
    ],
)
def test_math_tasks_insist_on_one_version_of_antlr(monkeypatch, tmp_path, version, wanted):
    """With another one lm-eval's file fails in an assertion while it is imported."""

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    monkeypatch.setattr(metadata, "version", installed)
    file = write_suite(
        tmp_path / "own.yaml", entry("minerva_math", metric="math_verify,none", gen_kwargs={"max_gen_toks": 1024})
    )
    texts = [text for text in preflight.missing(load_suite(file), allow_code=True) if text.startswith("packages")]
    assert [re.search(r"needs (.*): pip", text)[1] for text in texts] == wanted


def test_packages_of_modules_that_a_tasks_code_imports_in_turn_count(monkeypatch, tmp_path):
    """What lm-eval's ifeval needs is imported by a file that its own file imports."""
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "langdetect" else there(name))
    file = write_suite(tmp_path / "own.yaml", entry("ifeval", metric="prompt_level_strict_acc,none"))
    [packages] = [text for text in preflight.missing(load_suite(file), allow_code=True) if "packages" in text]
    assert "ifeval needs" in packages
    assert "langdetect" in packages


def test_lm_evals_code_tasks_are_not_imported_to_find_that_they_need_the_network(tmp_path):
    file = write_suite(tmp_path / "own.yaml", entry("humaneval", metric="pass@1,create_test"))
    texts = preflight.missing(load_suite(file), allow_code=True)
    assert "network: humaneval fetches code_eval from the Hub when it is read; zaya_humaneval does not" in texts
    assert "lm_eval.tasks.humaneval.utils" not in sys.modules


@pytest.mark.parametrize(
    ("token", "answer", "message"),
    [
        (None, None, "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa, then set HF_TOKEN"),
        ("t", GatedRepoError, "the account of this token has not accepted its terms at https://"),
        ("t", RepositoryNotFoundError, "is hidden from this token: set HF_TOKEN to a valid one"),
        ("t", OSError, "cannot be asked for: no way"),
        ("t", None, None),
    ],
)
def test_a_gated_set_with_a_network(monkeypatch, tmp_path, token, answer, message):
    def auth_check(name: str, *, repo_type: str) -> None:
        assert (name, repo_type) == ("Idavidrein/gpqa", "dataset")
        assert token is not None, "without a token there is nothing to ask for"
        if answer is not None:
            raise answer("no way") if answer is OSError else _http_error(answer)

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(huggingface_hub, "auth_check", auth_check)
    suite = load_suite(write_suite(tmp_path / "own.yaml", entry("zaya_gpqa_main"), entry("arc_easy")))
    texts = preflight.missing(suite, allow_code=True)
    assert [message in text for text in texts] == ([] if message is None else [True])


def _http_error(kind: Any) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("path", "folder", "name", "found"),
    [
        ("Idavidrein/gpqa", "Idavidrein___gpqa", "gpqa_main", True),
        ("Idavidrein/gpqa", "Idavidrein___gpqa", "gpqa_diamond", False),
        ("TIGER-Lab/MMLU-Pro", "TIGER-Lab___mmlu-pro", None, True),
        ("someone/CamelCase", "someone___camel_case", None, True),
        ("someone/else", "Idavidrein___gpqa", None, False),
    ],
)
def test_a_prepared_set_in_the_cache_counts_as_there(tmp_path, path, folder, name, found):
    place = tmp_path / "cache" / folder / ("gpqa_main" if "gpqa" in folder else "default") / "0.0.0" / "abc"
    place.mkdir(parents=True)
    (place / "dataset_info.json").write_text(json.dumps({"config_name": "default"}))
    if name is None and found:  # the rule of `datasets` itself
        CachedDatasetModuleFactory(path, cache_dir=str(tmp_path / "cache")).get_module()
    task = {"dataset_path": path, **({"dataset_name": name} if name else {})}
    write_tasks(tmp_path / "tasks", {"cached": task})
    suite = load_suite(write_suite(tmp_path / "own.yaml", entry("cached")))
    assert bool(preflight.missing(suite, allow_code=True)) != found
