"""From what lm-eval returns for one task to the two files of a run: result.json and samples.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from zaya_hf.evaluation.suites import LoadedTask

__all__ = ["describe_anew", "jsonable", "result_of", "samples_of"]

# Metrics whose items are (log-likelihood, size); the mean is over sizes.
SIZED = {"bits_per_byte": "bits_per_byte", "byte_perplexity": "perplexity", "word_perplexity": "perplexity"}
PERPLEXITY = "perplexity"  # its items are log-likelihoods; the mean is over items
LIKELIHOODS = ("multiple_choice", "loglikelihood")
# By metric, what a choice's log-likelihood is divided by before the choices are compared.
_LENGTHS = {"acc_norm": len, "acc_bytes": lambda text: len(text.encode())}


def result_of(task: LoadedTask, found: Mapping[str, Any]) -> dict[str, Any]:
    """What result.json says about the scores: `task`, `entry`, `title`, `ability`, `group`, `num_fewshot`, `items`,
    `metrics` and `warnings`.

    Args:
        found: of `lm_eval.evaluate` with `log_samples`, for this task alone.

    A metric has `metric`, `filter`, `value`, `stderr` (of the mean; None where it is none), `primary`,
    `higher_is_better`, `chance` and `kind`: "binary" (every item is 0 or 1), "mean", "bits_per_byte" or "perplexity".
    A value that is no number is None, and a warning says so. Metrics that are no mean over items are left out, with a
    warning.
    """
    name = task.leaf_name
    examples = found["samples"][name]
    values = found["results"][name]
    warnings: list[str] = []
    metrics = []
    for metric, filter_name in _metric_keys(examples):
        items = [
            example[metric] for example in examples if example["filter"] == filter_name and metric in example["metrics"]
        ]
        kind = _kind(metric, items)
        key = f"{metric},{filter_name}"
        if kind is None:
            warnings.append(f"{key} is left out: it is no mean over the items")
            continue
        value = jsonable(values[key])
        if value is None:
            warnings.append(f"{key} is {values[key]}")
        metrics.append(
            {
                "metric": metric,
                "filter": filter_name,
                "value": value,
                "stderr": _standard_error(items) if kind in ("binary", "mean") else None,
                "primary": False,
                "higher_is_better": bool(found["higher_is_better"][name].get(metric, True)),
                "chance": _chance(task, examples, metric) if kind in ("binary", "mean") else None,
                "kind": kind,
            }
        )
    warnings += _not_numbers(examples)
    result: dict[str, Any] = {"task": name, "items": len({example["doc_id"] for example in examples})}
    return describe_anew(result | {"metrics": metrics, "warnings": warnings}, task)


def describe_anew(result: Mapping[str, Any], task: LoadedTask) -> dict[str, Any]:
    """`result` with what the suite says about the task: title, ability, group, and which metric is the primary one.

    They are not in a run's key, as they move no number; so a run that is used again is described as it is now.

    Raises:
        ValueError: the suite's metric is none of the result's.
    """
    entry = task.entry
    keys = [f"{metric['metric']},{metric['filter']}" for metric in result["metrics"]]
    if entry.metric not in keys:
        raise ValueError(
            f"{task.leaf_name}: the suite's metric {entry.metric!r} is none of the task's: {', '.join(keys) or 'none'}"
        )
    return dict(result) | {
        "entry": entry.task,
        "title": entry.title,
        "ability": entry.ability,
        "group": task.group,
        "num_fewshot": task.task_object.config.num_fewshot or 0,
        "metrics": [
            metric | {"primary": key == entry.metric} for metric, key in zip(result["metrics"], keys, strict=True)
        ],
    }


def samples_of(
    task: LoadedTask, found: Mapping[str, Any], answer_facts: Mapping[tuple[str, int], Any]
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, one per item in the order of `doc_id`; every filter's scores are in the item's line.

    Args:
        found: of `lm_eval.evaluate` with `log_samples`.
        answer_facts: of the scorer: by prompt and how many of that prompt came before, with `finish` and
            `prompt_truncated`.

    Hashes are lm-eval's. Texts are None where the suite says that items are private. A score is a number, a list of
    numbers (several answers to one item), [nats, size] for perplexities and bits per byte, or None for what is no
    finite number.
    """
    by_document: dict[int, list[Mapping[str, Any]]] = {}
    for example in found["samples"][task.leaf_name]:
        by_document.setdefault(example["doc_id"], []).append(example)
    asked: dict[str, int] = {}
    lines = []
    for doc_id, examples in sorted(by_document.items()):
        first = examples[0]
        truncated = _truncated(first, answer_facts, asked)
        private = task.entry.private_items
        lines.append(
            {
                "doc_id": int(doc_id),
                **{name: first[name] for name in ("doc_hash", "target_hash", "prompt_hash")},
                "cluster": _cluster(task, first["doc"]),
                "scores": _scores(examples),
                **(dict.fromkeys(("prompt", "target", "answer", "choices")) if private else _texts(task, first)),
                "loglikelihoods": _log_likelihoods(task, first),
                "truncated": truncated,
            }
        )
    return lines


def jsonable(value: Any) -> Any:
    """`value` in plain JSON types: numbers of numpy and torch become Python's, NaN and infinities None."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().numpy() if value.dtype == torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [jsonable(inner) for inner in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _metric_keys(examples: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(metric, filter) in the order in which they appear; an item need not have every metric."""
    return list(dict.fromkeys((metric, example["filter"]) for example in examples for metric in example["metrics"]))


def _kind(metric: str, items: Sequence[Any]) -> str | None:
    if metric in SIZED or metric == PERPLEXITY:
        return SIZED.get(metric, PERPLEXITY)
    values = [jsonable(item) for item in items]
    if not all(value is None or isinstance(value, int | float) for value in values):
        return None
    return "binary" if set(values) <= {0, 1, None} else "mean"


def _standard_error(items: Sequence[Any]) -> float | None:
    """Of the mean: the items' standard deviation (n - 1) by the square root of n."""
    values = np.array([float(item) for item in items])
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _not_numbers(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each metric of which some items are NaN or infinite."""
    found: dict[str, int] = {}
    for example in examples:
        for metric, value in _item_scores(example).items():
            if value is None or (isinstance(value, list) and None in value):
                found[metric] = found.get(metric, 0) + 1
    return [f"{metric} is no finite number for {n} items" for metric, n in found.items()]


def _item_scores(example: Mapping[str, Any]) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for metric in example["metrics"]:
        value = jsonable(example[metric])
        key = f"{metric},{example['filter']}"
        if metric in SIZED:
            likelihood, size = value
            scores[key] = [None if likelihood is None else -likelihood, size]
        elif metric == PERPLEXITY:
            scores[key] = [None if value is None else -value, 1]
        elif value is None or isinstance(value, int | float):
            scores[key] = None if value is None else float(value)
    return scores


def _scores(examples: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for example in examples for key, value in _item_scores(example).items()}


def _chance(task: LoadedTask, examples: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """What the suite says, or for a choice the share of right answers of one who does not look at the choices."""
    if task.entry.chance is not None:
        return float(task.entry.chance)
    if task.task_object.OUTPUT_TYPE != "multiple_choice" or not metric.startswith("acc"):
        return None
    shares = [1 / len(_asked_choices(task, example)[1]) for example in examples]
    return sum(shares) / len(shares)


def _asked_choices(task: LoadedTask, example: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The prompt of a multiple-choice item, and its choices.

    Where the choices stand in the prompt and one text follows them all (winogrande), the prompt is what they share.
    """
    pairs = [(str(context), str(continuation)) for context, continuation in example["arguments"]]
    if "acc_mutual_info" in example["metrics"]:  # asked again without a prompt, after the rest
        pairs = pairs[: len(pairs) // 2]
    contexts = [context for context, _ in pairs]
    if len(set(contexts)) <= 1:
        return contexts[0], [continuation for _, continuation in pairs]
    shared = os.path.commonprefix(contexts)  # noqa: RUF071, characters are meant
    return shared, [context[len(shared) :] for context in contexts]


def _log_likelihoods(task: LoadedTask, example: Mapping[str, Any]) -> list[float | None] | None:
    """Of the choices or the continuation; None for other tasks."""
    if task.task_object.OUTPUT_TYPE not in LIKELIHOODS:
        return None
    values = [jsonable(response[0][0]) for response in example["resps"]]
    if task.task_object.OUTPUT_TYPE == "multiple_choice":
        values = values[: len(_asked_choices(task, example)[1])]
    return values


def _texts(task: LoadedTask, example: Mapping[str, Any]) -> dict[str, Any]:
    target = jsonable(example["target"])
    if task.task_object.OUTPUT_TYPE == "multiple_choice":
        prompt, choices = _asked_choices(task, example)
        right = choices[target] if isinstance(target, int) and 0 <= target < len(choices) else _as_text(target)
        return {
            "prompt": prompt,
            "target": right,
            "answer": _chosen(task, example, choices),
            "choices": choices,
        }
    generated = task.task_object.OUTPUT_TYPE == "generate_until"
    return {
        "prompt": str(example["arguments"][0][0]),
        "target": _as_text(target),
        # With several answers to an item, the first.
        "answer": str(example["resps"][0][0]) if generated else None,
        "choices": None,
    }


def _chosen(task: LoadedTask, example: Mapping[str, Any], choices: Sequence[str]) -> str | None:
    """The choice that the primary metric takes for the model's."""
    likelihoods = _log_likelihoods(task, example)
    if likelihoods is None or None in likelihoods:
        return None
    length = _LENGTHS.get(task.entry.metric.split(",")[0])
    # Divided by what the task calls the choice, without the space before it.
    sizes = [1] * len(choices) if length is None else list(map(length, task.task_object.doc_to_choice(example["doc"])))
    return choices[int(np.argmax(np.array(likelihoods) / np.array(sizes)))]


def _as_text(target: Any) -> str | None:
    if target is None or isinstance(target, str):
        return target
    return json.dumps(target, ensure_ascii=False)


def _cluster(task: LoadedTask, doc: Mapping[str, Any]) -> str | None:
    by = task.entry.cluster_by
    if by is None:
        return None
    if by == "task":
        return task.leaf_name
    if by not in doc:
        raise ValueError(f"{task.leaf_name}: the suite groups items by {by!r}, which an item does not have")
    return str(doc[by])


def _truncated(example: Mapping[str, Any], answer_facts: Mapping[tuple[str, int], Any], asked: dict[str, int]) -> bool:
    """Whether a prompt or an answer of the item was cut. `asked` counts each prompt's answers over the items."""
    cut = False
    for arguments, responses in zip(example["arguments"], example["resps"], strict=True):
        prompt = arguments[0]
        for _ in responses:
            facts = answer_facts.get((prompt, asked.get(prompt, 0)))
            asked[prompt] = asked.get(prompt, 0) + 1
            cut |= facts is not None and (facts.finish == "length" or facts.prompt_truncated)
    return bool(cut)
