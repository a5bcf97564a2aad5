"""Several processes of this machine that train together, each of which runs the same function of a test file."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def run_ranks(function: Callable[[Path], Any], folder: Path, processes: int = 2, **environment: str) -> str:
    """Call `function(folder)` in so many processes, joined by what Accelerate reads from the environment.

    Args:
        function: of a test file, at its top level; an AssertionError in any process fails the test.
        environment: further variables.

    Returns:
        what all of them printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        str(TESTS / "rank_processes.py"),
        function.__module__,
        function.__qualname__,
        str(folder),
    ]
    started = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (process, output) in enumerate(zip(started, outputs, strict=True)):
        assert process.returncode == 0, f"process {rank}:\n{output}"
    return "".join(outputs)


def main(module: str, function: str, folder: str) -> None:
    getattr(importlib.import_module(module), function)(Path(folder))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
