"""`zaya train`: read the settings once, then train in this process or start several."""

from __future__ import annotations

import argparse
import importlib
import sys

from zaya_hf.installed import require


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` has config, overrides, show, processes and accelerate_config.

    Returns:
        the exit code, see `zaya_hf.training.run.main`; with several processes that of the first one that failed.

    Raises:
        ValueError: for wrong settings, more processes than GPUs, and missing packages.
    """
    require("training", "accelerate", "pydantic", "pyyaml")
    # After the check: their absence would be a traceback.
    settings_files, launch = (
        importlib.import_module(f"zaya_hf.training.{name}") for name in ("settings_files", "launch")
    )
    config = settings_files.load(args.config, args.overrides)
    if args.show:
        print(importlib.import_module("zaya_hf.training.show").describe(config, args.processes or 1))
        return 0
    command = [args.config, *args.overrides, *(["--debug"] if getattr(args, "debug", False) else [])]
    if args.accelerate_config is not None:
        if args.processes is not None:
            raise ValueError(
                "--processes is for one machine without --accelerate-config, whose file says num_processes"
            )
        if not args.accelerate_config.is_file():
            raise ValueError(f"no such file: {args.accelerate_config}")
        return int(launch.launch_accelerate(str(args.accelerate_config), command))
    processes = args.processes or 1
    if processes == 1:
        return int(importlib.import_module("zaya_hf.training.run").main(config))
    gpus = launch.gpus()
    if 0 < gpus < processes:
        raise ValueError(f"--processes {processes}: there are {gpus} GPUs here, and each process needs one of its own")
    return int(launch.launch_processes([sys.executable, "-m", "zaya_hf.training", *command], processes))
