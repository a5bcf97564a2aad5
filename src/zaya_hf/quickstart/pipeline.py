"""The quickstart in order: text, five trainings, evaluation, a folder to publish, results and report.

Each model's training and evaluation is a job of its own (`jobs.py`) in a worker process (`pool.py`). A run that is
stopped, by Ctrl-C or by losing power, is taken up by the same command where it was, and no finished training or
evaluation is repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from zaya_hf.atomic import write_json
from zaya_hf.hub.card import write_card
from zaya_hf.quickstart import collect, data, jobs, output, pool, report
from zaya_hf.quickstart.corpus import load_corpus
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.progress import say, waiting, watching
from zaya_hf.quickstart.publish import publish
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.quickstart.summary import conclude
from zaya_hf.reporting.results import FILE

# In this order the models are trained: the slow ones first, so that no core is idle at the end.
_SLOW_FIRST = ("zaya", "olmoe", "gemma3", "qwen3", "llama")


def run(args: argparse.Namespace) -> None:
    """Carry out `zaya quickstart`; `args` has steps, seed, seeds, only and out.

    Raises:
        ValueError: `args.out` is not ours to write to.
        RuntimeError: there is no text, a training diverged, or the published folder does not load to equal logits.
    """
    with output.owned(args.out):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    transformers_logging.disable_progress_bar()
    recipe = Recipe(steps=args.steps)
    names = [name for name in _SLOW_FIRST if args.only is None or name in args.only]
    seeds = range(args.seed, args.seed + args.seeds)
    out: Path = args.out
    titles = ", ".join(family.title for name, family in FAMILIES.items() if name in names)
    each = "" if len(seeds) == 1 else f", each with {len(seeds)} seeds"
    say("quickstart", f"{titles}{each}: {recipe.tokens / 1e6:.2f} M tokens of training, evaluation, report")
    say("", "offline, on CPU; Ctrl-C stops it, and the same command goes on where it was")
    with waiting("reading, learning a tokenizer, choosing what to ask", sys.stderr):
        prepared = data.prepare(load_corpus(), recipe, out / output.PREPARED, out / output.ITEMS)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(jobs.TASK_FOLDER, out / output.TASKS, ignore=ignored, dirs_exist_ok=True)
    _describe_text(prepared)

    rates = collect.learning_rate_factors()
    todo = [
        jobs.Job(
            name=name,
            seed=seed,
            rate=rates[name],
            recipe=recipe,
            folder=out / output.RUNS / f"{name}-seed{seed}",
            data=out / output.PREPARED,
            items=out / output.ITEMS,
            fingerprint=collect.fingerprint(name, seed, rates[name], recipe, prepared),
        )
        for seed in seeds
        for name in names
    ]
    cores = pool.available_cores()
    processes = min(cores, len(todo))
    done = {job: result for job in todo if (result := jobs.finished(job)) is not None}
    for job in done:
        say(job.label, "done before, with the same settings, text and versions")
    remaining = [job for job in todo if job not in done]
    if remaining:
        say("training", _expected(recipe, len(remaining)))
        with watching(remaining, sys.stderr) as watcher:
            results = _run_jobs(remaining, processes, watcher)
        done |= zip(remaining, results, strict=True)
    found = collect.collect(
        todo,
        [done[job] for job in todo],
        prepared,
        command=_command(args),
        processes=processes,
        cores=cores,
    )
    if "zaya" in names:
        first = next(job for job in todo if job.name == "zaya")
        with waiting("loading the saved model in fresh processes", sys.stderr):
            found["published"] = _publish(first, found, out)
    found["seconds"] = time.monotonic() - started  # of this command; earlier ones may have done a part
    _tell_of_others(out, names)
    output.replace_hub(out)
    write_json(out / FILE, found)
    report.write_report(found, out / output.REPORT)
    conclude(out, found)


def _run_jobs(remaining: list[jobs.Job], processes: int, watcher: pool.Watcher) -> list[dict[str, Any]]:
    try:
        return pool.run_jobs(remaining, processes, watcher)
    except KeyboardInterrupt:
        say("stopped", "the same command goes on where it was")
        raise


def _expected(recipe: Recipe, count: int) -> str:
    """How long so many jobs take on the two cores that it was measured on, in words."""
    minutes = max(1, round(count * recipe.steps / 800))
    runs, plural = "run" if count == 1 else "runs", "" if minutes == 1 else "s"
    return f"{count} {runs} of {recipe.steps} steps, on two idle cores about {minutes} minute{plural} with evaluation"


def _describe_text(prepared: dict[str, Any]) -> None:
    text, tokenizer = prepared["corpus"], prepared["tokenizer"]
    megabytes = f"{text['train_bytes'] / 1e6:.1f} MB to train on, {text['held_out_bytes'] / 1e6:.2f} MB held out"
    say("text", f"{text['origin']}: {megabytes}")
    say("tokenizer", f"{tokenizer['entries']:,} entries, {tokenizer['bytes_per_token']:.2f} bytes per token")


def _tell_of_others(out: Path, names: list[str]) -> None:
    """Say what becomes of models that earlier results have and these have not."""
    try:
        earlier = [model["name"] for model in json.loads((out / FILE).read_text(encoding="utf-8"))["models"]]
    except (OSError, ValueError, KeyError, TypeError):
        return
    others = [name for name in earlier if name not in names]
    if others:
        say(
            "note",
            f"results and report are now of {', '.join(names)} alone; {', '.join(others)} stay in {out / output.RUNS},",
        )
        say("", "and a command that names them, or all, shows them again without training them again")


def _publish(job: jobs.Job, found: dict[str, Any], out: Path) -> dict[str, Any]:
    """Fill the folder that will be `hub`; what `results.json` says about it."""
    shutil.rmtree(out / output.NEW_HUB, ignore_errors=True)
    folder = out / output.NEW_HUB / job.name
    checked = publish(job.folder / jobs.MODEL, job.folder / jobs.LOGITS, folder, job.recipe.threads, job.seed)
    published = {"model": job.name, "seed": job.seed, "folder": f"{output.HUB}/{job.name}"} | checked
    write_card(found | {"published": published}, folder)
    return published


def _command(args: argparse.Namespace) -> str:
    """The command that gives the same results."""
    only = [] if args.only is None else [f"--only {','.join(args.only)}"]
    return " ".join(["zaya quickstart", f"--steps {args.steps} --seed {args.seed} --seeds {args.seeds}", *only])
