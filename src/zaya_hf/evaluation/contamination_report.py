"""What `contamination.probe` found, as a table, and what it means for scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zaya_hf.atomic import write_json, write_text

from .finished_runs import FinishedRun, read_manifest, read_runs

_PASSAGE = 200  # characters of a passage in the table


def markdown(report: Mapping[str, Any]) -> str:
    """A report of `probe`, with `scores` of `split_scores` if it has them, for people."""
    corpus = report["corpus"]
    skipped = (
        f" (passed over, as they hold no text, JSON lines or Parquet: {len(corpus['skipped'])})"
        if corpus["skipped"]
        else ""
    )
    lines = [
        f"# Overlap of {report['n']} {report['unit']} in a row",
        "",
        f"Corpus: {corpus['files']:,} files{skipped}, {corpus['documents']:,} documents, {corpus['units']:,} "
        f"{report['unit']}: {', '.join(corpus['paths'])}",
        "",
        "| task | items | tested | of them short | overlapping | of them short | share (95 % interval) | n-grams found "
        "| mean overlap |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for task in report["tasks"]:
        numbers = (task["items"], task["tested"], len(task["short"]), task["overlapping"], task["short_overlapping"])
        counts = [f"{number:,}" for number in numbers]
        interval = f" ({' to '.join(map(_percent, task['interval']))})" if task["interval"] else ""
        shares = [_percent(task["share"]) + interval, _percent(task["mean_found"]), _percent(task["mean_overlap"])]
        lines.append(f"| {' | '.join([task['task'], *counts, *shares])} |")
    lines += [
        "",
        f"Items with fewer than {report['n']} {report['unit']} are short: they are looked for as a whole, and the "
        f"shorter one is, the less it says that it was found. Not tested are items without {report['unit']} of their "
        "own. N-grams found: the share of an item's n-grams that the corpus has, and mean overlap: the share of its "
        f"{report['unit']} inside those, both over all tested items. Copies are found; paraphrases and translations "
        "are not, and a shared quotation is not a leaked answer.",
    ]
    if report.get("scores") is not None:
        lines += ["", *_score_lines(report["scores"])]
    for task in report["tasks"]:
        if task["worst"]:
            lines += ["", f"## {task['task']}", ""]
            lines += [_worst_line(item, report["unit"]) for item in task["worst"]]
    return "\n".join(lines) + "\n"


def check_folder(folder: Path) -> None:
    """Check that `write` may use `folder`, which need not be there yet.

    Raises:
        ValueError: it is a file.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file; expected a folder, for contamination.json and contamination.md")


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write a report as contamination.json and contamination.md into `folder`, which is made if need be."""
    write_json(folder / "contamination.json", report)
    write_text(folder / "contamination.md", markdown(report))


def split_scores(report: Mapping[str, Any], evaluation: Path) -> list[dict[str, Any]]:
    """Scores of an evaluation's models on the items that overlap and on those that do not.

    Args:
        report: of `probe`.
        evaluation: a folder of `zaya eval`.

    Returns:
        Per task and model: `task`, `model`, `metric`, `clean` and `overlapping` (`items` and `value`, None of no items)
        and `difference` of overlapping to clean with its `standard_error`; None where a part has fewer than 2 items,
        and for bits per byte and perplexities. Items that were not tested, or have no finite
        score, are in neither part. A difference is not
        proof: overlapping items may be easier or harder anyway.

    Raises:
        ValueError: the folder is no evaluation or has no finished run of these tasks, or items differ from those that
            were looked for.
    """
    runs, _ = read_runs(evaluation, read_manifest(evaluation))
    tasks = {task["task"]: task for task in report["tasks"]}
    found = [
        _split(tasks[name], run)
        for name in tasks
        for of_model in runs.values()
        if (run := of_model.get(name)) is not None
    ]
    if not found:
        raise ValueError(f"{evaluation} has no finished run of {', '.join(tasks)}")
    return found


def _split(task: Mapping[str, Any], run: FinishedRun) -> dict[str, Any]:
    parts: dict[str, list[int]] = {"clean": [], "overlapping": []}
    scores, sizes = run.items.scores, run.items.sizes
    for place, (doc_id, doc_hash) in enumerate(zip(run.items.doc_ids, run.items.doc_hashes, strict=True)):
        overlap = task["overlaps"].get(str(doc_id))
        if overlap is None:
            continue
        if task["hashes"][str(doc_id)] not in (None, doc_hash):
            raise ValueError(
                f"{run.folder}: item {doc_id} of {run.task} is another than the one that was looked for; the task or "
                "its data have changed since"
            )
        if np.isfinite(scores[place]):
            parts["overlapping" if overlap else "clean"].append(place)
    ratio = run.kind in ("bits_per_byte", "perplexity")
    line: dict[str, Any] = {"task": run.task, "model": run.model, "metric": run.metric}
    for name, places in parts.items():
        value = float(scores[places].sum() / sizes[places].sum()) if places else None
        if value is not None and ratio:
            value = value / math.log(2) if run.kind == "bits_per_byte" else math.exp(value)
        line[name] = {"items": len(places), "value": value}
    difference = error = None
    if not ratio and min(map(len, parts.values())) > 1:
        difference = line["overlapping"]["value"] - line["clean"]["value"]
        error = math.sqrt(sum(float(np.var(scores[places], ddof=1)) / len(places) for places in parts.values()))
    return line | {"difference": difference, "standard_error": error}


def _score_lines(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## Scores with and without overlap",
        "",
        "| task | model | metric | clean | overlapping | difference ± standard error |",
        "|---|---|---|---:|---:|---:|",
    ]
    for line in scores:
        parts = [
            f"{line[name]['value']:.4g} (n = {line[name]['items']:,})" if line[name]["items"] else "no items"
            for name in ("clean", "overlapping")
        ]
        known = line["difference"] is not None
        difference = f"{line['difference']:+.4f} ± {line['standard_error']:.4f}" if known else ""
        lines.append(f"| {' | '.join([line['task'], line['model'], line['metric'], *parts, difference])} |")
    return [*lines, "", "A difference is not proof: overlapping items may be easier or harder anyway."]


def _worst_line(item: Mapping[str, Any], unit: str) -> str:
    where = f"{item['file']}, document {item['document']}"
    start = f"- item {item['doc_id']}: {_percent(item['overlap'])}, {item['length']} {unit} in {where}"
    if item["passage"] is None:
        return f"{start} (not quoted: the items are private)"
    passage = item["passage"]
    return f"{start}: “{passage if len(passage) <= _PASSAGE else passage[:_PASSAGE] + ' …'}”"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
