"""Scores of a model in memory on local lm-eval tasks: no network, no cache, no output, one process."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import evaluate as lm_evaluate
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from zaya_hf.evaluation.quiet import quiet, random_states_kept
from zaya_hf.evaluation.statistics import above_chance, bootstrap_ratio_interval, wilson_interval

Score = dict[str, Any]


class _Scorer(HFLM):
    """lm-eval's scorer without a key-value cache, which nothing here reads again."""

    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=inps, use_cache=False).logits
        return logits

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        # lm-eval would cut the beginning off and go on. The last token is only predicted, hence the 1.
        sizes = [len(context) + len(continuation) for _, context, continuation in requests]
        too_long = sum(size > self.max_length + 1 for size in sizes)
        if too_long:
            raise ValueError(
                f"{too_long} of {len(sizes)} texts do not fit: the longest has {max(sizes)} tokens, but max_length is "
                f"{self.max_length}"
            )
        return super()._loglikelihood_tokens(requests, *args, **kwargs)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    task_folder: Path,
    items: Path,
    max_length: int,
    batch_size: int = 32,
    limit: int | None = None,
    lm_eval_tasks: bool = False,
) -> dict[str, Any]:
    """Score `model` on multiple-choice tasks (`acc`) and texts (`bits_per_byte`), as lm-eval's command line would.

    Texts longer than `max_length` are read in windows of that length, each with one token of context, the last with as
    many as fit; a choice with its prompt must fit. Weights, device, dtype, mode and the global random states stay as
    they are.

    Args:
        model: any causal language model of transformers' interface.
        tokenizer: the model's.
        tasks: names of tasks in `task_folder`.
        items: folder that the tasks are told in their metadata.
        max_length: tokens that the model sees at most.
        batch_size: texts at a time. They are padded on the right, which a causal model does not see.
        limit: only so many items of each task, the first ones.
        lm_eval_tasks: tasks that are not in `task_folder` may be lm-eval's own, which may fetch their data.

    Returns:
        {"seconds": float, "tasks": {name: score}}. A score of choices has `items`, `correct`, `accuracy`, `chance`,
        `interval_95`, `interval_99` (Wilson), `above_chance` (the 99 % interval is above it), and `outcomes`, 1 or 0
        per item. A score of texts has `items`, `bytes`, `bits_per_byte`, `interval_95` (bootstrap over the texts) and
        `outcomes`, [nats, bytes] per text. Both have `kind`.

    Raises:
        ValueError: a task is unknown or has another kind of metric, the items are not there, or a choice is longer than
            `max_length`.
    """
    started = time.perf_counter()
    with quiet(), _mode_kept(model), random_states_kept():
        loaded = _load(tasks, task_folder, items, lm_eval_tasks)
        low_precision = model.dtype.itemsize < 4
        scorer = _Scorer(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32" if low_precision else None,
            # Of windows with equal ids that begin to count at different places, the cache scores the wrong tokens.
            logits_cache=False,
        )
        found = lm_evaluate(scorer, loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    scores = {name: _score(loaded["tasks"][name], found["samples"][name]) for name in tasks}
    return {"seconds": time.perf_counter() - started, "tasks": scores}


def describe(
    tasks: Sequence[str], *, task_folder: Path, items: Path, lm_eval_tasks: bool = False
) -> list[dict[str, Any]]:
    """What each task is: `name`, `title`, `kind`, `items`, `version`, `description`; if choices, `choices`, `chance`;
    and `note`, which says what its scores have to be read against, or nothing.

    Args:
        tasks: names of tasks in `task_folder`.
        items: folder that the tasks are told in their metadata.
        lm_eval_tasks: as for `evaluate`.

    Raises:
        ValueError: a task is unknown or has another kind of metric, or the items are not there.
    """
    with quiet(), random_states_kept():
        loaded = _load(tasks, task_folder, items, lm_eval_tasks)["tasks"]
    found = []
    for name in tasks:
        task = loaded[name]
        about = task.config.metadata or {}
        entry = {"name": name, "title": about.get("title", name), "kind": _kind(task), "items": len(task.eval_docs)}
        if entry["kind"] == "choice":
            choices = len(task.doc_to_choice(task.eval_docs[0]))
            entry |= {"choices": choices, "chance": _chance(task)}
        words = {key: about.get(key, "") for key in ("description", "note")}
        found.append(entry | {"version": about.get("version", task.VERSION)} | words)
    return found


def _load(tasks: Sequence[str], task_folder: Path, items: Path, lm_eval_tasks: bool) -> Any:
    """lm-eval's tasks with their items, as `TaskManager.load` returns them."""
    told = {"include_path": str(task_folder), "metadata": {"items": str(items)}}
    manager = TaskManager(**told, include_defaults=False)
    known, further = ", ".join(manager.all_subtasks) or "none", ""
    if lm_eval_tasks and not set(tasks) <= set(manager.all_subtasks):  # looking through all of lm-eval's takes seconds
        manager, further = TaskManager(**told, include_defaults=True), "; nor has lm-eval one of that name"
    for name in tasks:
        if name not in manager.all_subtasks:
            raise ValueError(f"there is no task {name!r} in {task_folder}; its tasks: {known}{further}")
    loaded = manager.load(list(tasks))
    for task in loaded["tasks"].values():
        _kind(task)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # of the examples in prompts; lm-eval's command line has the same
    return loaded


def _kind(task: Any) -> str:
    metrics = set(task.aggregation())
    if task.OUTPUT_TYPE == "multiple_choice" and "acc" in metrics:
        return "choice"
    if task.OUTPUT_TYPE == "loglikelihood_rolling" and "bits_per_byte" in metrics:
        return "bits_per_byte"
    raise ValueError(
        f"task {task.config.task!r} is of type {task.OUTPUT_TYPE} with {', '.join(sorted(metrics))}; what is scored is "
        "multiple_choice with acc, or loglikelihood_rolling with bits_per_byte"
    )


def _chance(task: Any) -> float:
    """Share of right answers of one who does not look at the choices."""
    shares = [1 / len(task.doc_to_choice(doc)) for doc in task.eval_docs]
    return sum(shares) / len(shares)


def _score(task: Any, samples: list[dict[str, Any]]) -> Score:
    kind = _kind(task)
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    if kind == "choice":
        outcomes = [int(sample["acc"]) for sample in samples]
        return {"kind": kind, **_choice_score(outcomes, _chance(task)), "outcomes": outcomes}
    pairs = [sample["bits_per_byte"] for sample in samples]
    nats, sizes = [-float(likelihood) for likelihood, _ in pairs], [int(size) for _, size in pairs]
    bits = [value / math.log(2) for value in nats]
    return {
        "kind": kind,
        "items": len(pairs),
        "bytes": sum(sizes),
        "bits_per_byte": sum(bits) / sum(sizes),
        "interval_95": list(bootstrap_ratio_interval(bits, sizes)),
        "outcomes": [list(pair) for pair in zip(nats, sizes, strict=True)],
    }


def _choice_score(outcomes: list[int], chance: float) -> Score:
    items, correct = len(outcomes), sum(outcomes)
    return {
        "items": items,
        "correct": correct,
        "accuracy": correct / items,
        "chance": chance,
        "interval_95": list(wilson_interval(correct, items, 0.95)),
        "interval_99": list(wilson_interval(correct, items, 0.99)),
        "above_chance": above_chance(correct, items, chance, 0.99),
    }


@contextlib.contextmanager
def _mode_kept(model: PreTrainedModel) -> Iterator[None]:
    """HFLM calls `model.eval()`."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
