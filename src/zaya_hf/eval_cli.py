"""`zaya eval`: models on a suite of tasks; `zaya eval data`: items to evaluate on; `zaya eval contamination`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

from zaya_hf import launching
from zaya_hf.installed import require


def run(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Args:
        args: `action` is "data" (names, list), "contamination" (see `zaya_hf.evaluation.contamination`) or None, with
            suite, models, out, limit, resume, dry_run, dtype, device, max_length, chat_template, token_budget,
            processes, allow_code_execution, baseline and seed.

    Raises:
        ValueError: something is wrong or missing: one line.
    """
    require("an evaluation", "lm-eval", "datasets", "pyyaml", "scipy", "matplotlib")
    if args.action == "data":
        return int(_module("data").run(args.names, args.list))
    if args.action == "contamination":
        return int(_module("contamination").run(args))
    runs = _module("runs")
    plain = ("limit", "resume", "token_budget", "processes", "baseline", "seed")
    names = (*plain, "dtype", "device", "max_length", "chat_template")
    settings = runs.Settings(
        suite=args.suite,
        models=tuple(args.models),
        out=str(args.out or ""),
        allow_code_execution=args.allow_code_execution or _module("code_execution").consented(),
        **{name: getattr(args, name) for name in names},
    )
    if args.dry_run:
        return _dry_run(settings)
    try:
        code, loud = _evaluate(runs, settings)
    except KeyboardInterrupt:
        print(f"\nzaya eval: what is done is in {settings.out}; the same command goes on from there", file=sys.stderr)
        raise
    for line in loud:
        print(f"zaya eval: warning: {line}", file=sys.stderr)
    if code == 0:
        print(_module("report").write_report(args.out))
    return code


def _evaluate(runs: Any, settings: Any) -> tuple[int, list[str]]:
    """The exit code, and what readers of the scores have to know."""
    if settings.processes == 1:
        return 0, runs.evaluate(settings)
    runs.prepare(settings)  # what is wrong is said once, not by every process
    gpus = launching.gpus()
    if 0 < gpus < settings.processes:
        raise ValueError(f"--processes {settings.processes}: there are {gpus} GPUs, and each process needs its own")
    command = [sys.executable, "-m", "zaya_hf.evaluation", json.dumps(asdict(settings))]
    code = launching.launch_processes(command, settings.processes)
    if code in launching.STOPPED:
        print(f"zaya eval: what is done is in {settings.out}; the same command goes on from there", file=sys.stderr)
    return code, []


def _dry_run(settings: Any) -> int:
    """Print what the evaluation will cost, and what is missing for it."""
    suite = _module("suites").load_suite(settings.suite)
    specs = _module("models").resolve(settings.models, **settings.overrides())
    print(_module("estimates").dry_run(suite, specs, limit=settings.limit, device=settings.device))
    lacking = _module("preflight").missing(suite, allow_code=settings.allow_code_execution)
    if lacking:
        print("\n".join(["", "Before it can run:", *(f"  - {' '.join(one.split())}" for one in lacking)]))
    return 0


def _module(name: str) -> Any:
    """Imported after the check of packages, whose absence would be a traceback."""
    return importlib.import_module(f"zaya_hf.evaluation.{name}")
