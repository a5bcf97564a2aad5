"""`results.json` of a quickstart: what ran, and every figure that the report and the model card show."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import zaya_hf
from zaya_hf.evaluation import harness
from zaya_hf.quickstart import data, output
from zaya_hf.quickstart.jobs import TASK_FOLDER, TASKS, Job
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.reporting.results import FORMAT, MADE_BY
from zaya_hf.training.newton_schulz import newton_schulz_dtype

# Modules of the quickstart that move no number of a job.
_SHOWING = ("output", "pipeline", "progress", "publish", "report", "report_words", "search", "summary")
SEARCH = Path(__file__).with_name("search.json")


def versions() -> dict[str, str]:
    """Of Python and of every package that has a part in the numbers."""
    names = ("torch", "numpy", "transformers", "tokenizers", "accelerate", "datasets", "lm_eval")
    installed = {name: metadata.version(name) for name in names}
    return {"zaya_hf": zaya_hf.__version__, "python": platform.python_version()} | installed


def learning_rate_factors() -> dict[str, float]:
    """What the search (`python -m zaya_hf.quickstart.search`) chose for each model: a factor of the recipe's rates."""
    chosen: dict[str, float] = json.loads(SEARCH.read_text(encoding="utf-8"))["chosen"]
    return chosen


def fingerprint(name: str, seed: int, rate: float, recipe: Recipe, prepared: dict[str, Any]) -> str:
    """Of everything that moves a number of a job: settings, text, versions, and the code itself."""
    settings = {key: value for key, value in recipe.as_dict().items() if key != "checkpoint_every"}
    content = {
        "name": name,
        "seed": seed,
        "rate": rate,
        "recipe": settings | {"newton_schulz_dtype": _newton_schulz_dtype()},
        "corpus": prepared["corpus"]["sha256"],
        "items": prepared["items_sha256"],
        "versions": versions(),
        "code": _code_digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _code_digest() -> str:
    """Of the sources that train and score, and of the evaluation's tasks: an edited checkout is another version."""
    package = Path(zaya_hf.__file__).parent
    sources = [path for path in package.rglob("*.py") if not _only_shows(path.relative_to(package))]
    return data.digest([*sorted(sources), *sorted(path for path in TASK_FOLDER.iterdir() if path.is_file())])


def _only_shows(path: Path) -> bool:
    """Whether a source only runs the quickstart or shows what came of it: a change of wording repeats no training."""
    if path.parts[0] == "quickstart":
        return path.stem in _SHOWING
    return path.parts[0] in ("reporting", "hub", "report_cli.py")


def _newton_schulz_dtype() -> str:
    return str(newton_schulz_dtype(torch.device("cpu"))).removeprefix("torch.")


def collect(
    jobs: Sequence[Job],
    done: Sequence[dict[str, Any]],
    prepared: dict[str, Any],
    *,
    command: str,
    processes: int,
    cores: int,
) -> dict[str, Any]:
    """The content of `results.json`, but for `seconds`, which come at the end, and `published`, which is None.

    Args:
        done: the result of each of `jobs`.
        prepared: what `data.prepare` returned.
    """
    recipe = jobs[0].recipe
    seeds = sorted({job.seed for job in jobs})
    return {
        "made_by": MADE_BY,
        "format": FORMAT,
        "command": command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": recipe.as_dict() | {"seeds": seeds, "newton_schulz_dtype": _newton_schulz_dtype()},
        "versions": versions(),
        "hardware": {"cpu": _cpu_name(), "cores": cores, "processes": processes},
        "corpus": prepared["corpus"],
        "arithmetic": prepared["arithmetic"],
        "tokenizer": prepared["tokenizer"],
        "unigram_bits_per_byte": prepared["unigram_bits_per_byte"],
        "evaluation_items": prepared["items_sha256"],
        "tasks": harness.describe(TASKS, task_folder=TASK_FOLDER, items=jobs[0].items),
        "models": [
            _model(name, [result for job, result in zip(jobs, done, strict=True) if job.name == name])
            for name in FAMILIES
            if any(job.name == name for job in jobs)
        ],
        "search": json.loads(SEARCH.read_text(encoding="utf-8")),
        "evaluation_command": _evaluation_command(recipe),
        "published": None,
    }


def _model(name: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs of one model."""
    shared = ("class", "parameters", "active_parameters", "learning_rate", "adamw_learning_rate")
    own = ("seed", "losses", "tokens", "seconds", "tokens_per_second", "router_load")
    return {
        "name": name,
        "title": FAMILIES[name].title,
        **{key: results[0][key] for key in shared},
        "shape": FAMILIES[name].shape,
        "runs": [
            {key: result[key] for key in own} | {"evaluation": _scores(result["evaluation"])} for result in results
        ],
    }


def _scores(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Without the outcome of every single item, which stays in the job's own file."""
    scores = {name: {k: v for k, v in score.items() if k != "outcomes"} for name, score in evaluation["tasks"].items()}
    return evaluation | {"tasks": scores}


def _evaluation_command(recipe: Recipe) -> str:
    """What measures the published folder by lm-eval's own command line, in the output folder."""
    model = f"pretrained={output.HUB}/zaya,max_length={recipe.sequence_length},dtype=float32,logits_cache=False"
    return (
        f"lm_eval run --model hf --model_args {model} --include_path {output.TASKS} --tasks zaya_quickstart "
        f"""--metadata '{{"items": "{output.ITEMS}"}}' --device cpu --batch_size 32"""
    )


def _cpu_name() -> str:
    """As the system names it; the architecture where it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
