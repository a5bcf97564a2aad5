"""From suites to lm-eval's task objects: what a suite asks for is checked against the tasks' definitions, then applied.

lm-eval takes much without a word: an answer budget of 256 tokens where a task's file has none, examples that a task
does not use, examples drawn from the items themselves. Here each of these is an error before anything runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from tqdm import tqdm

from zaya_hf.hints import near_hint

from .quiet import quiet, random_states_kept
from .suite_files import ABILITIES, Entry, Suite, read_suite, suite_names, task_folders
from .task_definitions import LM_EVAL_TASKS, Leaf, leaves, manager

__all__ = ["ABILITIES", "Entry", "LoadedTask", "Suite", "definitions", "load_suite", "load_tasks", "suite_names"]


@dataclass(frozen=True)
class LoadedTask:
    """One of lm-eval's tasks with its items, ready to be evaluated.

    Attributes:
        entry: of the suite.
        leaf_name: the task's name in lm-eval.
        task_object: lm-eval's task, with examples and settings of generation applied, and lm-eval's default seed of the
            examples. Its draws go on where the model before stopped: seed it again before each model, or a second one
            is asked with other examples.
        task_hash: SHA-256 of the definition with everything applied, the source code of its functions included.
        data_hash: SHA-256 of the documents that are evaluated and of those that examples are taken from, in order.
        group: what it is a member of, if anything.
        limit: how many documents are evaluated, the first ones; None is all.
        items: how many that are.
    """

    entry: Entry
    leaf_name: str
    task_object: Any
    task_hash: str
    data_hash: str
    group: str | None
    limit: int | None
    items: int


def load_suite(name_or_path: str | Path) -> Suite:
    """A suite, checked by itself and against the definitions of its tasks; no data is read.

    Args:
        name_or_path: a suite that comes with zaya_hf (`suite_names()`), or a YAML file.

    Raises:
        ValueError: as `read_suite`; or a task is unknown, or in two entries, or lacks the metric, or has no budget for
            its answers, or does not take the examples that the suite asks for. One line.
    """
    suite = read_suite(name_or_path)
    found = definitions(suite)
    owner: dict[str, str] = {}
    for entry in suite.entries:
        for leaf in found[entry.task]:
            if leaf.name in owner:
                raise ValueError(
                    f"suite {suite.name}: {leaf.name} is part of both {owner[leaf.name]} and {entry.task}; "
                    "a task is evaluated once in a suite"
                )
            owner[leaf.name] = entry.task
    return replace(suite, entries=tuple(_checked(entry, found[entry.task], suite) for entry in suite.entries))


def definitions(suite: Suite) -> dict[str, list[Leaf]]:
    """For each entry's task the tasks that it consists of, as their files define them.

    Raises:
        ValueError: a task is unknown.
    """
    names = [entry.task for entry in suite.entries]
    try:
        tasks = manager(names, task_folders(suite))
    except ValueError as error:
        raise ValueError(f"suite {suite.name}: {error}") from None
    return {name: leaves(tasks, name) for name in names}


def load_tasks(
    suite: Suite, *, limit: int | None = None, progress: Callable[[str], None] | None = None
) -> list[LoadedTask]:
    """lm-eval's tasks of a suite with their items, groups in their members, in the order of the suite.

    Args:
        limit: only so many items of each task, the first ones, where the suite does not say fewer.
        progress: is told the name of each entry before it is loaded; otherwise a bar is drawn on a terminal.

    Raises:
        ValueError: items cannot be loaded, or the limit is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, but it must be at least 1")
    loaded: list[LoadedTask] = []
    with random_states_kept():
        tasks = manager([entry.task for entry in suite.entries], task_folders(suite))
        bar = tqdm(suite.entries, desc="loading tasks", disable=None if progress is None else True, file=sys.stderr)
        for entry in bar:
            if progress is not None:
                progress(entry.task)
            for name, task in _built(tasks, entry).items():
                loaded.append(_applied(entry, name, task, limit))
    return loaded


# --- checks against definitions --------------------------------------------------------------------------------------


def _checked(entry: Entry, found: Sequence[Leaf], suite: Suite) -> Entry:
    """The entry with what its tasks' definitions add: whether it is a group, and whether answers are run."""
    for leaf in found:
        where = f"suite {suite.name}: {leaf.name}"
        if "class" in leaf.config:  # what such a task does is in its code
            continue
        if "gpqa" in str(leaf.config.get("dataset_path")) and leaf.file and LM_EVAL_TASKS in leaf.file.parents:
            raise ValueError(
                f"{where}: lm-eval shuffles its choices anew in each process, so that models would be asked different "
                "questions; there are zaya_gpqa_diamond, zaya_gpqa_main and zaya_gpqa_diamond_cot"
            )
        _check_shots(entry, leaf, where)
        _check_generation(entry, leaf, where)
        for metric in (entry.metric, *entry.also):
            _check_metric(metric, leaf, where)
    code = entry.unsafe_code or any(leaf.config.get("unsafe_code") for leaf in found)
    group = entry.task if [leaf.name for leaf in found] != [entry.task] else None
    return replace(entry, unsafe_code=code, group=group)


def _check_shots(entry: Entry, leaf: Leaf, where: str) -> None:
    config, asked = leaf.config, entry.num_fewshot
    own = config.get("num_fewshot")
    if asked is not None and own == 0 and asked != 0:
        raise ValueError(f"{where}: num_fewshot is {asked}, but the task's file says 0, which lm-eval keeps to")
    shots = _examples(config)
    samples = shots.get("samples") is not None and shots.get("split") is None
    if asked is not None and samples and own is not None and asked != own:
        raise ValueError(f"{where}: num_fewshot is {asked}, but the task's file has {own} fixed examples")
    if isinstance(shots.get("samples"), list) and samples and (asked or 0) > len(shots["samples"]):
        raise ValueError(f"{where}: num_fewshot is {asked}, but the task's file has {len(shots['samples'])} examples")
    if not (asked if asked is not None else own) or samples:
        return
    # lm-eval's own rule. It leaves out the document that is asked only where the two splits here are the same.
    evaluated = config.get("test_split") or config.get("validation_split")
    fallback = (config.get(key) for key in ("training_split", "validation_split", "test_split"))
    pool = shots.get("split") or next((split for split in fallback if split), None)
    if pool == evaluated and shots.get("split") != config.get("test_split"):
        raise ValueError(
            f"{where}: its examples would come from the split that is evaluated ({evaluated}), the item that is asked "
            "among them; num_fewshot must be 0"
        )


def _examples(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where a task's examples come from: "split", or "samples"."""
    own = config.get("fewshot_config") or {}
    return {"split": config.get("fewshot_split"), **own} if isinstance(own, Mapping) else {}


def _check_generation(entry: Entry, leaf: Leaf, where: str) -> None:
    own = leaf.config.get("generation_kwargs") or {}
    if leaf.config.get("output_type", "generate_until") != "generate_until":
        if entry.gen_kwargs:
            raise ValueError(f"{where}: gen_kwargs are for generated answers, but this task scores given ones")
    elif "max_gen_toks" not in {**own, **entry.gen_kwargs}:
        raise ValueError(
            f"{where}: no max_gen_toks, neither in the suite nor in the task's file; lm-eval would cut answers at 256 "
            "tokens. Set gen_kwargs: {max_gen_toks: N}"
        )


def _check_metric(key: str, leaf: Leaf, where: str) -> None:
    name, _, kind = key.partition(",")
    filters = [str(one["name"]) for one in leaf.config.get("filter_list") or []] or ["none"]
    listed = leaf.config.get("metric_list")
    if listed is None:
        names = list(DEFAULT_METRIC_REGISTRY.get(leaf.config.get("output_type", "generate_until"), []))
    else:
        names = [str(one.get("metric")) for one in listed]
    own_function = any("/" in one for one in names)  # its name is a path until it is loaded, its keys are not known
    if kind not in filters or (name not in names and not own_function):
        keys = [f"{one},{other}" for one in names for other in filters if "/" not in one]
        raise ValueError(f"{where} has no metric {key}; it has {', '.join(keys) or filters}{near_hint(key, keys)}")


# --- loading ----------------------------------------------------------------------------------------------------------


def _built(tasks: Any, entry: Entry) -> dict[str, Task]:
    try:
        with quiet():
            found: dict[str, Task] = tasks.load([entry.task])["tasks"]
    except (OSError, ImportError, AssertionError, ValueError) as error:  # no network, no such set, no such package
        raise ValueError(f"{entry.task}: its items cannot be loaded: {' '.join(str(error).split())}") from error
    return found


def _applied(entry: Entry, name: str, task: Any, limit: int | None) -> LoadedTask:
    """The task with the entry's settings, as lm-eval's own command line would apply them."""
    own = task.get_config("num_fewshot")
    shots = entry.num_fewshot if entry.num_fewshot is not None else own if own is not None else 0
    task.set_config("num_fewshot", shots)
    if entry.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
        task.set_config("generation_kwargs", dict(entry.gen_kwargs), update=True)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    documents = getattr(task, "task_docs", None)
    documents = task.eval_docs if documents is None else documents
    limits = [one for one in (limit, entry.limit) if one is not None]
    count = min([*limits, len(documents)])
    pool = task.sampler.df if shots and hasattr(task, "sampler") else []
    return LoadedTask(
        entry=entry,
        leaf_name=name,
        task_object=task,
        task_hash=_hash(_config(task)),
        data_hash=_hash([_documents(islice(documents, count)), _documents(pool)]),
        group=entry.task if name != entry.task else None,
        limit=min(limits) if limits else None,
        items=count,
    )


def _config(task: Any) -> dict[str, Any]:
    """A task's settings without what says where its files lie: the documents are hashed by themselves."""
    config = dict(vars(task.config))
    metadata = config.get("metadata")
    if isinstance(metadata, Mapping):
        config["metadata"] = {key: value for key, value in metadata.items() if key != "config_source"}
    places = config.get("dataset_kwargs")
    if isinstance(places, Mapping):
        config["dataset_kwargs"] = {k: value for k, value in places.items() if k not in ("data_files", "data_dir")}
    return config | {"class": "" if type(task) is ConfigurableTask else _source(type(task))}


def _documents(documents: Iterable[Any]) -> str:
    """One hash of documents in their order, which need not be in memory together."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(_text(document).encode() + b"\n")
    return digest.hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON does not know, as something that is the same in each process."""
    if isinstance(value, partial):
        return [_plain(value.func), list(value.args), value.keywords]
    if callable(value):
        return _source(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return dict(vars(value)) if hasattr(value, "__dict__") else str(value)


def _source(function: Any) -> list[str]:
    """A function's name with its whole file: what it calls counts, too."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        return [name, Path(inspect.getfile(function)).read_text(encoding="utf-8")]
    except (TypeError, OSError):
        return [name, getattr(function, "__module__", "")]
