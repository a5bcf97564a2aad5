"""Folders of evaluations that never ran, with the shape of real ones; the same for the same arguments."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TITLES = {
    "ZAYA1-base": ("ZAYA1 base", "zaya", 8_840_000_000, 800_000_000),
    "Qwen3-4B-Base": ("Qwen3 4B base", "qwen3", 4_022_468_096, 4_022_468_096),
    "Gemma3-12B-pt": ("Gemma 3 12B pt", "gemma3", 12_187_325_040, 12_187_325_040),
    "OLMoE-1B-7B": ("OLMoE 1B-7B", "olmoe", 6_919_161_856, 1_281_556_480),
}


def facts(name: str, **changes: Any) -> dict[str, Any]:
    """What a manifest says of a model."""
    title, family, total, active = TITLES.get(name, (name, "llama", 1_000_000, 1_000_000))
    return {
        "name": name,
        "title": title,
        "path": f"models/{name}",
        "revision": None,
        "dtype": "float32",
        "family": family,
        "parameters": total,
        "parameters_active": active,
        "max_length": 4096,
        "chat_template": {"used": False, "sha256": None},
        "reported": {},
        **changes,
    }


def item(doc: int, score: Any, **changes: Any) -> dict[str, Any]:
    """A line of samples of a question with four choices, of which the first is right; `score` of its `acc,none`."""
    answers = ["four", "five", "six", "seven"]
    right = bool(score) if not isinstance(score, list) else False
    return {
        "doc_id": doc,
        "doc_hash": _hash(f"doc {doc}"),
        "target_hash": _hash(f"target {doc}"),
        "prompt_hash": _hash(f"prompt {doc}"),
        "cluster": None,
        "scores": {"acc,none": score},
        "prompt": f"Question {doc}: what is two and two?\nAnswer:",
        "target": "four",
        "answer": answers[0 if right else 1 + doc % 3],
        "choices": answers,
        "loglikelihoods": [-1.0 - doc / 7 * (not right), -2.0, -3.0, -4.0],
        "truncated": False,
        **changes,
    }


def text_item(doc: int, nats: float, size: int, metric: str = "bits_per_byte", **changes: Any) -> dict[str, Any]:
    """A line of samples of a text, whose score is nats and bytes or words."""
    scores = {f"{metric},none": [nats, size]}
    told = {"prompt": "", "target": f"Text {doc}.", "answer": None, "choices": None, "loglikelihoods": None}
    return item(doc, 0.0, scores=scores, **(told | changes))


def run(
    model: str,
    task: str,
    samples: Sequence[Mapping[str, Any]],
    *,
    metric: str = "acc,none",
    kind: str = "binary",
    **changes: Any,
) -> dict[str, Any]:
    """A finished run: its result, and its samples under "samples"."""
    name, filters = metric.split(",")
    higher = kind in ("binary", "mean")
    primary = {
        "metric": name,
        "filter": filters,
        "value": None,
        "stderr": None,
        "primary": True,
        "higher_is_better": higher,
        "chance": 0.25 if kind == "binary" else None,
        "kind": kind,
    }
    return {
        "format": 1,
        "key": _hash(f"{model} {task}"),
        "model": model,
        "task": task,
        "entry": changes.get("group") or task,
        "title": task.replace("_", " ").capitalize(),
        "ability": "reasoning",
        "group": None,
        "num_fewshot": 0,
        "items": len(samples),
        "metrics": [primary],
        "counts": {
            "requests": 4 * len(samples),
            "tokens_given": 200 * len(samples),
            "tokens_computed": 80 * len(samples),
            "tokens_generated": 0,
            "truncated_prompts": 0,
            "truncated_answers": 0,
            "empty_answers": 0,
            "thoughts_without_end": 0,
            "seconds": 2.0,
        },
        "seconds": 2.0,
        "settings": {"chat_template": False, "system": None, "gen_kwargs": {}},
        "versions": {"lm_eval": "0.4.13"},
        "warnings": [],
        "samples": list(samples),
        **changes,
    }


def write(
    folder: Path,
    runs: Sequence[Mapping[str, Any]],
    *,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    unfinished: Sequence[tuple[str, str]] = (),
    **changes: Any,
) -> Path:
    """The folder of an evaluation with these runs; models are those of `models`, or of the runs in their order."""
    models = models or {name: facts(name) for name in dict.fromkeys(one["model"] for one in runs)}
    titles = {one["entry"]: one["group"].upper() if one["group"] else one["title"] for one in runs}
    entries = {
        one["entry"]: {"task": one["entry"], "title": titles[one["entry"]], "ability": one["ability"]} for one in runs
    }
    names: dict[str, dict[str, str]] = {name: {} for name in models}
    for one in runs:
        name = f"{one['model']}--{one['task']}--{one['key'][:12]}"
        names[one["model"]][one["task"]] = name
        place = folder / "runs" / name
        place.mkdir(parents=True)
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in one["samples"]]
        (place / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
        result = {key: value for key, value in one.items() if key != "samples"}
        (place / "result.json").write_text(json.dumps(result), encoding="utf-8")
    for model, task in unfinished:
        names[model][task] = f"{model}--{task}--000000000000"
        (folder / "runs" / names[model][task]).mkdir(parents=True)
    manifest = {
        "made_by": "zaya eval",
        "format": 1,
        "command": ["zaya", "eval", "--suite", "offline"],
        "created": "2026-01-02T03:04:05+00:00",
        "updated": "2026-01-02T04:04:05+00:00",
        "suite": {"name": "offline", "title": "Offline", "description": "", "entries": list(entries.values())},
        "models": models,
        "versions": {"lm_eval": "0.4.13"},
        "hardware": {"cpu": "a processor", "gpus": []},
        "code_execution": {"allowed": False, "layers": []},
        "limit": None,
        "runs": names,
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def realistic(folder: Path, models: Sequence[str] = tuple(TITLES), items: int = 60) -> Path:
    """An evaluation of four tasks, one of them a group and one of texts; its scores are drawn with a fixed seed."""
    runs = []
    for strength, model in zip((0.62, 0.55, 0.7, 0.4), models, strict=False):
        rng = random.Random(model)
        hard = random.Random("how hard each item is")

        def outcomes(count: int, strength: float = strength, rng: Any = rng, hard: Any = hard) -> list[float]:
            return [float(rng.gauss(strength, 0.1) > hard.random()) for _ in range(count)]

        runs.append(run(model, "hellaswag", [item(d, s) for d, s in enumerate(outcomes(items))], title="HellaSwag"))
        for subject in ("anatomy", "astronomy", "virology"):
            task = f"mmlu_{subject}"
            samples = [item(d, s, cluster=task) for d, s in enumerate(outcomes(items // 3))]
            about = {"group": "mmlu", "ability": "knowledge", "num_fewshot": 5, "title": subject.capitalize()}
            runs.append(run(model, task, samples, **about))
        answers = [
            item(d, s, scores={"exact_match,flexible": s}, choices=None, loglikelihoods=None)
            for d, s in enumerate(outcomes(items))
        ]
        runs.append(run(model, "gsm8k", answers, metric="exact_match,flexible", ability="math", title="GSM8K"))
        texts = [text_item(d, (1 - strength / 3 + 0.1 * rng.random()) * 90 * math.log(2), 90 + d) for d in range(20)]
        runs.append(
            run(model, "wikitext", texts, metric="bits_per_byte,none", kind="bits_per_byte", ability="language")
        )
    reported = {"hellaswag": {"metric": "acc_norm", "value": 0.7, "source": "a paper, table 3"}}
    about = {name: facts(name, reported=reported if name == models[0] else {}) for name in models}
    return write(folder, runs, models=about)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
