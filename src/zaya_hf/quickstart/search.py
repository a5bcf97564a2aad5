"""The search behind the quickstart's learning rates: the same for all five models.

    python -m zaya_hf.quickstart.search

Both rates of the recipe, Muon's and AdamW's, are multiplied by each of three factors; every model is trained with each,
and the factor with the least validation loss is taken. While a model's best factor is at the end of those tried, the
next one beyond is tried as well. Validation text is neither trained on nor held out, and the seed is not the
quickstart's. Runs have the full length: of 200 steps, all models preferred rates that are worse after 800.

Takes some 20 minutes on two cores and writes `search.json` beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from zaya_hf.atomic import write_json
from zaya_hf.quickstart import collect, data, pool
from zaya_hf.quickstart.corpus import load_corpus
from zaya_hf.quickstart.jobs import Job
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.progress import watching
from zaya_hf.quickstart.recipe import Recipe

FACTORS = (0.5, 1.0, 2.0)  # to begin with
SEED = 1000

Losses = dict[str, dict[float, float]]  # by model and factor


def search(folder: Path) -> dict[str, Any]:
    """Train every model with every factor under `folder`; the content of `search.json`."""
    recipe = Recipe()
    prepared = data.prepare(load_corpus(), recipe, folder / "prepared", folder / "items")
    losses: Losses = {name: {} for name in FAMILIES}
    while wanted := untried(losses):
        jobs = [
            Job(
                name=name,
                seed=SEED,
                rate=factor,
                recipe=recipe,
                folder=folder / f"{name}-{factor}",
                data=folder / "prepared",
                items=folder / "items",
                fingerprint="search",
                evaluate=False,
            )
            for name, factor in wanted
        ]
        with watching(jobs, sys.stderr) as watcher:
            done = pool.run_jobs(jobs, pool.available_cores(), watcher)
        for job, result in zip(jobs, done, strict=True):
            losses[job.name][job.rate] = round(result["validation_loss"], 4)
    return {
        "command": "python -m zaya_hf.quickstart.search",
        "steps": recipe.steps,
        "seed": SEED,
        "muon_lr": recipe.muon_lr,
        "adamw_lr": recipe.adamw_lr,
        "factors": sorted({factor for found in losses.values() for factor in found}),
        "validation_loss": {name: {str(f): found[f] for f in sorted(found)} for name, found in losses.items()},
        "chosen": {name: best(found) for name, found in losses.items()},
        "corpus_sha256": prepared["corpus"]["sha256"],
        "versions": collect.versions(),
    }


def best(found: dict[float, float]) -> float:
    """The factor with the least loss."""
    return min(found, key=lambda factor: found[factor])


def untried(losses: Losses) -> list[tuple[str, float]]:
    """What to train next: the first factors, then the one beyond a best one that is at the end of those tried."""
    wanted = []
    for name, found in losses.items():
        if not found:
            wanted += [(name, factor) for factor in FACTORS]
        elif best(found) == min(found):
            wanted.append((name, min(found) / 2))
        elif best(found) == max(found):
            wanted.append((name, max(found) * 2))
    return wanted


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = search(Path(scratch))
    write_json(collect.SEARCH, found)
    print(f"{collect.SEARCH}: {found['chosen']}")
