"""One process of a training run: ``python -m zaya_hf.training CONFIG [KEY=VALUE ...]``, alone or as one of several that
`accelerate launch`, `torchrun`, `srun` or `zaya train --processes` start."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from zaya_hf import launching

from . import launch, run, settings_files


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code; see `zaya_hf.training.run.main`. Errors are one line on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m zaya_hf.training",
        description="One process of a training run. `zaya train` starts one or several of them; so do `accelerate "
        "launch -m zaya_hf.training` and `torchrun -m zaya_hf.training`.",
    )
    parser.add_argument("config", metavar="CONFIG", help="settings file, or the name of a recipe such as cpu-small")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="settings to change, such as optimizer.lr=1e-3"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (or ZAYA_DEBUG=1)")
    args = parser.parse_args(argv)
    launch.end_with_launcher()
    rank = os.environ.get("RANK", "0")
    try:
        return run.main(settings_files.load(args.config, args.overrides))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug or os.environ.get("ZAYA_DEBUG") == "1":
            raise
        text = " ".join(str(error).split())
        if not (text and isinstance(error, ValueError | OSError)):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1
        who = f" (process {rank})" if several else ""
        if several and _is_of_connections(error):
            text = f"another process of the run has ended or cannot be reached; see what it says itself ({text})"
        print(f"zaya train: error{who}: {text}", file=sys.stderr)
        return 1


def _is_of_connections(error: Exception) -> bool:
    """torch has errors of its own for them, and gloo has its source files in the text of a RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        launching.end_process(code)
    sys.exit(code)
