"""What a suite lacks on this machine, all of it at once and before any model is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import datasets
import huggingface_hub
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from lm_eval.tasks._yaml_loader import load_yaml

from .quiet import quiet, random_states_kept
from .suites import Suite, definitions
from .task_definitions import Leaf
from .task_imports import hub_metrics, imported

__all__ = ["GATED", "check", "missing"]

# Data sets that are given only to accounts that have accepted their terms.
GATED = {"Idavidrein/gpqa": "https://huggingface.co/datasets/Idavidrein/gpqa"}

# What the packages of imported modules are called for pip, where that differs; with the version that tasks insist on.
_PACKAGES = {
    "PIL": "pillow",
    "antlr4": "antlr4-python3-runtime==4.11",
    "bs4": "beautifulsoup4",
    "math_verify": "math-verify",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# lm-eval's own code tasks, which cannot be read without a network, and ours.
_OWN = {
    "humaneval": "zaya_humaneval",
    "humaneval_plus": "zaya_humaneval_plus",
    "mbpp": "zaya_mbpp",
    "mbpp_plus": "zaya_mbpp_plus",
}

# A task of the suite, and one of those that it consists of.
_Found = tuple[str, Leaf]


def check(suite: Suite, *, allow_code: bool) -> None:
    """Check that a suite can run here. Loads no model; of data only the small sets of own loaders, which may fetch it.

    Args:
        allow_code: whether answers may be run as programs.

    Raises:
        ValueError: something is missing; one line with all of it and what to do about it.
    """
    problems = missing(suite, allow_code=allow_code)
    if problems:
        what = "something" if len(problems) == 1 else f"{len(problems)} things"
        listed = problems if len(problems) == 1 else [f"({i}) {text}" for i, text in enumerate(problems, start=1)]
        raise ValueError(f"suite {suite.name} lacks {what}: {'; '.join(listed)}")


def missing(suite: Suite, *, allow_code: bool) -> list[str]:
    """What `check` would say, one text for each thing; nothing if the suite can run."""
    found = [(task, leaf) for task, members in definitions(suite).items() for leaf in members]
    return [*_consent(suite, allow_code), *_packages(found), *_metrics(found), *_hub_sets(found), *_own_items(found)]


def _consent(suite: Suite, allow_code: bool) -> list[str]:
    names = [entry.task for entry in suite.entries if entry.unsafe_code]
    if allow_code or not names:
        return []
    verb = "runs" if len(names) == 1 else "run"
    return [f"consent: {_listed(names)} {verb} programs that the model writes; allow it with --allow-code-execution"]


def _packages(found: Sequence[_Found]) -> list[str]:
    """Packages that tasks' own code imports and that are not here, or not in the version needed."""
    users: dict[str, list[str]] = {}
    for task, leaf in found:
        for module in imported(leaf):
            if wrong := _wrong_package(module):
                users.setdefault(wrong, []).append(task)
    tasks = [task for using in users.values() for task in using]
    wanted = sorted(users)
    return [f"packages: {_listed(tasks)} needs {', '.join(wanted)}: pip install {' '.join(wanted)}"] if users else []


def _wrong_package(module: str) -> str | None:
    """Name for pip of a module's package if it is not here as it must be."""
    package = _PACKAGES.get(module, module)
    if importlib.util.find_spec(module) is None:
        return package
    name, _, version = package.partition("==")
    if not version:
        return None
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return package
    return None if found == version or found.startswith(f"{version}.") else package


def _metrics(found: Sequence[_Found]) -> list[str]:
    """Tasks whose code fetches a metric from the Hub as soon as it is read, which fails without a network."""
    if not datasets.config.HF_HUB_OFFLINE:
        return []
    problems = []
    for task, leaf in found:
        if names := hub_metrics(leaf):
            other = f"; {_OWN[leaf.name]} does not" if leaf.name in _OWN else "; run it with a network"
            problems.append(f"network: {task} fetches {', '.join(names)} from the Hub when it is read{other}")
    return list(dict.fromkeys(problems))


def _hub_sets(found: Sequence[_Found]) -> list[str]:
    """Data sets that are not in the cache and cannot be fetched."""
    users: dict[str, list[str]] = {}
    problems = []
    for task, leaf in found:
        path = leaf.config.get("dataset_path")
        if "custom_dataset" in leaf.config or not isinstance(path, str):
            continue
        if path in _PACKAGED_DATASETS_MODULES:
            problems += _local_files(leaf)
        elif not Path(path).exists() and not _in_cache(path, leaf.config.get("dataset_name")):
            users.setdefault(path, []).append(task)
    absent = []
    for path, tasks in users.items():
        if problem := _not_granted(path):
            problems.append(f"data: {path}, for {_listed(tasks)}, {problem}")
        elif datasets.config.HF_HUB_OFFLINE:
            absent.append(f"{path} (for {_listed(tasks)})")
    if absent:
        problems.append(
            "data: the Hub is switched off (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE), and not in the cache are "
            f"{', '.join(absent)}: run once with a network"
        )
    return problems


def _local_files(leaf: Leaf) -> list[str]:
    """Files that a task names and that are not there."""
    named = (leaf.config.get("dataset_kwargs") or {}).get("data_files") or []
    lists = named.values() if isinstance(named, Mapping) else [named]
    files = [file for one in lists for file in ([one] if isinstance(one, str) else one)]
    plain = [file for file in files if "://" not in file and not set("*?[") & set(file)]
    return [f"data: {leaf.name} reads {file}, which is not there" for file in plain if not Path(file).is_file()]


def _in_cache(path: str, name: str | None) -> bool:
    """Whether `datasets` has prepared this set before and so loads it without a network."""
    owner, _, short = path.rpartition("/")
    folder = "___".join([*([owner] if owner else []), camelcase_to_snakecase(short)])
    return any(Path(datasets.config.HF_DATASETS_CACHE).glob(f"{folder}/{name or '*'}/*/*/dataset_info.json"))


def _not_granted(path: str) -> str | None:
    """What a gated data set still takes; None for one that is not gated, or granted."""
    terms = GATED.get(path)
    if terms is None:
        return None
    if datasets.config.HF_HUB_OFFLINE:
        return (
            "is gated and not in the cache, and the Hub is switched off (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE): accept "
            f"its terms at {terms}, set HF_TOKEN to a token of that account, and run once with a network"
        )
    if huggingface_hub.get_token() is None:
        return f"is gated: accept its terms at {terms}, then set HF_TOKEN to a token of that account"
    try:
        huggingface_hub.auth_check(path, repo_type="dataset")
    except GatedRepoError:
        return f"is gated: the account of this token has not accepted its terms at {terms}"
    except RepositoryNotFoundError:
        return f"is hidden from this token: set HF_TOKEN to a valid one of an account that accepted {terms}"
    except Exception as error:  # of whichever HTTP client this version of huggingface_hub has
        return f"cannot be asked for: {' '.join(str(error).split())}"
    return None


def _own_items(found: Sequence[_Found]) -> list[str]:
    """What the loaders of own tasks, which are small, say against loading their items."""
    users: dict[str, list[str]] = {}
    for task, leaf in found:
        if "custom_dataset" not in leaf.config or leaf.file is None:
            continue
        try:
            with quiet(), random_states_kept():
                config = load_yaml(leaf.file, resolve_func=True)
                told = {**(config.get("metadata") or {}), **(config.get("dataset_kwargs") or {})}
                config["custom_dataset"](**told)
        except ImportError:  # among the packages
            continue
        except (ValueError, OSError) as error:
            users.setdefault(" ".join(str(error).split()), []).append(task)
    return [f"items: {_listed(tasks)}: {problem}" for problem, tasks in users.items()]


def _listed(names: Iterable[str], most: int = 6) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
