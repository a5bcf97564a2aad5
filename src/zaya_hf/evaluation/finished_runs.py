"""What an evaluation's folder holds, read for comparison: the scores of all items, and texts of single ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..json_checks import read_json_object
from .bootstrap import Array
from .statistics import pass_at_k

FORMAT = 1
KINDS = ("binary", "mean", "bits_per_byte", "perplexity")
_RATIOS = ("bits_per_byte", "perplexity")
_PASS_AT = re.compile(r"pass(?:@|_at_)(\d+)")


@dataclass(frozen=True)
class Items:
    """The items of one run, in the order of `doc_ids`.

    `scores` [items] over `sizes` [items] is the item's own value: sizes are 1, but for bits per byte and perplexities
    they are bytes or words, and the scores nats. What was no finite number is NaN. `margins` [items] say by how much
    the first choice was preferred to the second, 0 where there were no choices. `offsets` are the places of the items'
    lines in the samples' file.
    """

    doc_ids: list[int]
    doc_hashes: list[str]
    target_hashes: list[str]
    prompt_hashes: list[str]
    clusters: list[str | None]
    scores: Array
    sizes: Array
    margins: Array
    offsets: list[int]


@dataclass(frozen=True)
class FinishedRun:
    """One model on one task. `kind` is "mean" where the primary metric was said to be binary but items have parts."""

    model: str
    task: str
    folder: Path
    result: dict[str, Any]
    primary: dict[str, Any]
    kind: str
    items: Items

    @property
    def metric(self) -> str:
        """Key of the primary metric, such as "acc,none"."""
        return f"{self.primary['metric']},{self.primary['filter']}"

    @property
    def unscored(self) -> int:
        """How many items have no finite score, such as those on which a model's output was NaN."""
        return int(np.isnan(self.items.scores).sum())

    def texts(self, index: int) -> dict[str, Any]:
        """What was logged of the item at `index`, read from the file."""
        with (self.folder / "samples.jsonl").open("rb") as file:
            file.seek(self.items.offsets[index])
            sample: dict[str, Any] = json.loads(file.readline())
        return sample


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an evaluation's folder.

    Raises:
        ValueError: `folder` has none, or it is not one of `zaya eval`.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no manifest.json, so it is not the output of `zaya eval`")
    manifest = read_json_object(file, "the manifest of an evaluation")
    if manifest.get("made_by") != "zaya eval" or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} is not a manifest of `zaya eval` in format {FORMAT}")
    if not isinstance(manifest.get("models"), dict) or not isinstance(manifest.get("runs"), dict):
        raise ValueError(f"{file} must have `models` and `runs`, both objects")
    return manifest


def read_runs(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, dict[str, FinishedRun]], list[list[str]]]:
    """The finished runs {model: {task: run}} and the unfinished [[model, task], ...] that the manifest names.

    Raises:
        ValueError: a file of a finished run is broken, or is not that of its model and task.
    """
    finished: dict[str, dict[str, FinishedRun]] = {model: {} for model in manifest["models"]}
    unfinished = []
    for model, tasks in manifest["runs"].items():
        if model not in finished:
            raise ValueError(f"{folder / 'manifest.json'} has runs of {model!r}, which is not among its models")
        for task, name in tasks.items():
            if Path(name).name != name:
                raise ValueError(
                    f"{folder / 'manifest.json'}: the run of {model} on {task} has no plain name: {name!r}"
                )
            run = folder / "runs" / name
            if (run / "result.json").is_file():
                finished[model][task] = _read_run(run, model, task)
            else:
                unfinished.append([model, task])
    return finished, unfinished


def _read_run(folder: Path, model: str, task: str) -> FinishedRun:
    file = folder / "result.json"
    result = read_json_object(file, "the result of an evaluation")
    for key, expected in (("model", model), ("task", task)):
        if result.get(key) != expected:
            raise ValueError(f"{file} is of {key} {result.get(key)!r}, but the manifest says {expected!r}")
    primary = [metric for metric in result.get("metrics", []) if metric.get("primary")]
    if len(primary) != 1:
        raise ValueError(f"{file} must have one primary metric, but has {len(primary)}")
    kind = primary[0].get("kind")
    if kind not in KINDS:
        raise ValueError(f"{file}: the kind of the primary metric is {kind!r}; it must be one of {', '.join(KINDS)}")
    items = _read_items(folder / "samples.jsonl", primary[0])
    if len(items.doc_ids) != result.get("items"):
        raise ValueError(f"{folder} has {len(items.doc_ids)} samples, but {result.get('items')} items were scored")
    if kind == "binary" and not np.isin(items.scores[~np.isnan(items.scores)], (0, 1)).all():
        kind = "mean"
    return FinishedRun(model, task, folder, result, primary[0], kind, items)


def _read_items(file: Path, primary: Mapping[str, Any]) -> Items:
    key = f"{primary['metric']},{primary['filter']}"
    samples: list[tuple[int, dict[str, Any], tuple[float, float], float, int]] = []
    offset = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    sample = json.loads(line)
                    score = _score(sample["scores"][key], primary["kind"], str(primary["metric"]))
                    kept = {name: sample[name] for name in ("doc_hash", "target_hash", "prompt_hash")}
                    kept["cluster"] = sample.get("cluster")
                    samples.append((sample["doc_id"], kept, score, _margin(sample.get("loglikelihoods")), offset))
                except (ValueError, KeyError, TypeError) as error:
                    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                    raise ValueError(f"{file}, line {number} is no scored item: {reason}") from None
                offset += len(line)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing, although the run is finished") from None
    if not samples:
        raise ValueError(f"{file} has no items")
    samples.sort(key=lambda sample: sample[0])
    doc_ids = [sample[0] for sample in samples]
    if len(set(doc_ids)) != len(doc_ids):
        raise ValueError(f"{file} has an item twice")
    scores = np.array([sample[2] for sample in samples], dtype=np.float64)
    return Items(
        doc_ids,
        [sample[1]["doc_hash"] for sample in samples],
        [sample[1]["target_hash"] for sample in samples],
        [sample[1]["prompt_hash"] for sample in samples],
        [sample[1]["cluster"] for sample in samples],
        scores[:, 0],
        scores[:, 1],
        np.array([sample[3] for sample in samples], dtype=np.float64),
        [sample[4] for sample in samples],
    )


def _score(score: Any, kind: str, metric: str) -> tuple[float, float]:
    """Score and size of an item; of several answers to it, one score: their mean, or pass@k over all of them."""
    if kind in _RATIOS:
        nats, size = score
        if not (math.isfinite(size) and size > 0):
            raise ValueError(f"its score is {score}, but it must be nats and a positive size")
        return _finite(nats), float(size)
    if isinstance(score, list):
        if not score:
            raise ValueError("it has no answers")
        at = _PASS_AT.fullmatch(metric)
        if at:
            score = pass_at_k(len(score), sum(value == 1 for value in score), int(at[1]))
        else:
            score = math.fsum(map(_finite, score)) / len(score)
    return _finite(score), 1.0


def _finite(score: float | None) -> float:
    return float(score) if score is not None and math.isfinite(score) else math.nan


def _margin(loglikelihoods: Any) -> float:
    if not isinstance(loglikelihoods, list) or len(loglikelihoods) < 2:
        return 0.0
    known = sorted((value for value in loglikelihoods if value is not None and math.isfinite(value)), reverse=True)
    return known[0] - known[1] if len(known) > 1 else 0.0
