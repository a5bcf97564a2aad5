"""The search behind the quickstart's learning rates: the same small grid for all five models.

    python -m zaya_hf.quickstart.search

Both rates of the recipe, Muon's and AdamW's, are multiplied by each factor, every model is trained with each, and the
factor with the fewest bits per byte on validation text is taken. That text is neither trained on nor held out, and the
seed is not the quickstart's. Runs have the full length: those of 200 steps chose twice to four times the rate, which is
worse after 800 (ZAYA 2.15 against 2.10 bits per byte). Takes about 15 minutes on two cores and writes `search.json`
beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from zaya_hf.quickstart import data, pool, results
from zaya_hf.quickstart.corpus import load_corpus
from zaya_hf.quickstart.jobs import Job, write_json
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.progress import watching
from zaya_hf.quickstart.recipe import Recipe

FACTORS = (0.5, 1.0, 2.0, 4.0)
STEPS = 800
SEED = 1000


def search(folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train every model with every factor under `folder`; the content of `search.json`."""
    recipe = Recipe(steps=steps)
    prepared = data.prepare(load_corpus(), recipe, folder / "prepared", folder / "items")
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
        for name in FAMILIES
        for factor in FACTORS
    ]
    with watching(jobs, sys.stderr) as watcher:
        done = pool.run_jobs(jobs, min(pool.available_cores(), len(jobs)), watcher)
    bits: dict[str, dict[str, float]] = {name: {} for name in FAMILIES}
    for job, result in zip(jobs, done, strict=True):
        bits[job.name][str(job.rate)] = round(result["validation_bits_per_byte"], 4)
    return {
        "command": "python -m zaya_hf.quickstart.search",
        "steps": steps,
        "seed": SEED,
        "muon_lr": recipe.muon_lr,
        "adamw_lr": recipe.adamw_lr,
        "measure": "bits per byte on validation text",
        "factors": list(FACTORS),
        "bits_per_byte": bits,
        "chosen": {name: min(FACTORS, key=lambda factor: found[str(factor)]) for name, found in bits.items()},
        "corpus_sha256": prepared["corpus"]["sha256"],
        "versions": results.versions(),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = search(Path(scratch))
    write_json(results.SEARCH, found)
    print(f"{results.SEARCH}: {found['chosen']}")
