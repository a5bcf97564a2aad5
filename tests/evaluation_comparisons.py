"""Made-up comparisons, in the shape in which `zaya_hf.evaluation.comparison.compare` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COUNTS = {
    "requests": 400,
    "tokens_given": 120_000,
    "tokens_computed": 30_000,
    "tokens_generated": 2_000,
    "truncated_prompts": 0,
    "truncated_answers": 0,
    "empty_answers": 0,
    "thoughts_without_end": 0,
}
NOTES = ["The noise of items is not the noise of seeds.", "Means give every task the same weight."]
ARITHMETIC = ("arithmetic", "Sums", "math", "acc", "binary")
STORIES = ("stories", "Ends of stories", "reasoning", "acc_norm", "binary")
PROSE = ("prose", "Prose", "language", "bits_per_byte", "bits_per_byte")


def task(name: str, title: str, ability: str, metric: str, metric_kind: str, **changes: Any) -> dict[str, Any]:
    """A leaf of its own."""
    binary = metric_kind == "binary"
    known: dict[str, Any] = {
        "id": name, "kind": "leaf", "parent": None, "leaves": [], "title": title, "ability": ability, "metric": metric,
        "filter": "none", "metric_kind": metric_kind,
        "higher_is_better": metric_kind in ("binary", "mean"), "in_suite_mean": binary, "items": 200,
        "shots": 5, "chance": 0.25 if binary else None,
    }  # fmt: skip
    return known | changes


def score(value: float | None, **changes: Any) -> dict[str, Any]:
    """A finished run's score."""
    known = {
        "value": value, "interval": None if value is None else [max(0.0, value - 0.06), min(1.0, value + 0.06)],
        "interval_method": "Wilson", "items": 200, "correct": None, "above_chance": None, "stderr": 0.03,
        "stated": value, "macro": None, "interval_macro": None, "interval_clusters": None, "clusters": None,
        "further": [], "counts": dict(COUNTS), "seconds": 12.0, "run": "run", "missing": [], "warnings": [],
    }  # fmt: skip
    return known | changes


def model(name: str, baseline: bool = False, **changes: Any) -> dict[str, Any]:
    """A model with its facts."""
    known = {
        "name": name, "title": name, "family": "zaya", "baseline": baseline, "parameters": 8_400_000_000,
        "parameters_active": 760_000_000, "dtype": "bfloat16", "path": f"org/{name}", "revision": "0123abcd",
        "bos": {"setting": "required", "id": 2}, "max_length": 4096, "chat_template": False,
        "weights": {"kind": "folder", "sha256": "ab" * 32}, "warnings": [],
        "cost": {**COUNTS, "runs": 3, "items": 600, "seconds": 125.0, "tokens_per_second": 256.0},
    }  # fmt: skip
    return known | changes


def pair(name: str, task_id: str, difference: float, verdict: str, **changes: Any) -> dict[str, Any]:
    """A difference to the baseline."""
    known = {
        "model": name, "baseline": "zaya", "task": task_id, "n": 200, "value": 0.5 + difference, "baseline_value": 0.5,
        "difference": difference, "stderr": 0.02, "interval": [difference - 0.04, difference + 0.04],
        "interval_method": "percentile bootstrap", "interval_percentile": None, "interval_clusters": None,
        "difference_macro": None, "interval_macro": None, "n10": 31, "n01": 17, "p_mcnemar": 0.0434,
        "p_permutation": 0.05, "test": "McNemar", "p": 0.0434, "p_holm": 0.1302, "smallest_detectable": 0.0975,
        "correlation": 0.4, "verdict": verdict, "sentence": f"{name} on {task_id}, in words.", "prompts_differ": False,
        "notes": [],
    }  # fmt: skip
    return known | changes


def item(task_id: str, **changes: Any) -> dict[str, Any]:
    """An item that both models answered, one of them rightly."""
    known = {
        "task": task_id, "doc_id": 7, "model_score": 1.0, "baseline_score": 0.0, "difference": 1.0, "hidden": False,
        "prompt": "What is 2 + 2?", "prompt_cut": False, "target": "4", "choices": None, "model_answer": "It is 4.",
        "baseline_answer": "It is 5.",
    }  # fmt: skip
    return known | changes


def comparison(names: Sequence[str] = ("zaya", "qwen", "olmoe"), tasks: Sequence[tuple[str, ...]] | None = None) -> Any:
    """All models on all tasks, finished and without a flaw; "better", "worse" and "cannot be told apart" in turn."""
    kinds = [ARITHMETIC, STORIES, PROSE] if tasks is None else tasks
    rows = [task(*kind) for kind in kinds]
    models = [
        model(name, place == 0, parameters=(place + 1) * 4_000_000_000, parameters_active=(place + 1) * 700_000_000)
        for place, name in enumerate(names)
    ]
    verdicts = ("better", "worse", "cannot be told apart")
    fractions = [row["id"] for row in rows if row["in_suite_mean"]]
    mean = {
        "id": "overall", "title": "All tasks", "tasks": fractions,
        "left_out": [{"task": row["id"], "reason": "no fraction"} for row in rows if not row["in_suite_mean"]],
        "scores": {
            name: {"value": 0.51 + place / 50, "interval": [0.47 + place / 50, 0.55 + place / 50],
                   "interval_method": "percentile bootstrap"}
            for place, name in enumerate(names)
        },
        "pairs": {
            name: {"difference": 0.02, "interval": [-0.01, 0.05], "stderr": 0.015, "p": None,
                   "verdict": "cannot be told apart"}
            for name in names[1:]
        },
    }  # fmt: skip
    return {
        "format": 1, "folder": "evaluation", "created": "2026-03-01T10:00:00+00:00",
        "updated": "2026-03-01T11:00:00+00:00",
        "suite": {"name": "small", "title": "Small", "description": "Three small tasks."}, "limit": None,
        "code_execution": {"allowed": False, "layers": []}, "baseline": names[0],
        "settings": {"confidence": 0.95, "draws": 10_000, "seed": 0, "alpha": 0.05, "power": 0.8},
        "models": models, "tasks": rows,
        "scores": {
            name: {
                row["id"]: score(0.4321 + place / 16 + column / 8)
                for column, row in enumerate(rows)
            }
            for place, name in enumerate(names)
        },
        "reported": {name: {} for name in names},
        "pairs": [
            pair(name, row["id"], (0.0625, -0.1375, 0.0125)[column % 3], verdicts[column % 3], baseline=names[0])
            for name in names[1:]
            for column, row in enumerate(rows)
        ],
        "refused": [], "means": [mean] if fractions else [],
        "discordant": [
            {"model": name, "baseline": names[0], "task": rows[0]["id"], "items": [item(rows[0]["id"])]}
            for name in names[1:]
        ],
        "warnings": [], "notes": list(NOTES),
    }  # fmt: skip


MANIFEST = {
    "made_by": "zaya eval",
    "format": 1,
    "command": ["zaya", "eval", "--suite", "small", "--out", "my folder"],
    "versions": {"torch": "2.13.0", "lm-eval": "0.4.13"},
    "hardware": {"device": "CPU (x86_64)", "cores": 2},
}
