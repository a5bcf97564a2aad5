"""Several processes of this machine that train together, each of which runs the same function of a test file."""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_hf.launching import end_process, reserved_port

TESTS = Path(__file__).resolve().parent
DEADLINE = 180.0  # seconds, by far more than any of them takes


def run_ranks(function: Callable[[Path], Any], folder: Path, processes: int = 2, **environment: str) -> str:
    """Call `function(folder)` in so many processes, joined by what Accelerate reads from the environment.

    Args:
        function: of a test file, at its top level; an AssertionError in any process fails the test.
        environment: further variables.

    Returns:
        what all of them printed.
    """
    common = os.environ | {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
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
    logs = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder.parent))
    started: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = [None] * processes
    try:
        with reserved_port() as port:
            for rank in range(processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
                with (logs / f"{rank}.log").open("w", encoding="utf-8") as log:
                    started.append(
                        subprocess.Popen(command, env=common | own | environment, stdout=log, stderr=subprocess.STDOUT)
                    )
            deadline = time.monotonic() + DEADLINE
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.02)
                codes = [process.poll() for process in started]
        if any(codes):  # the others may wait for it for ever, or say how it looks from there
            time.sleep(1)
            codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    outputs = [(logs / f"{rank}.log").read_text(encoding="utf-8") for rank in range(processes)]
    ends = ["it was ended, still running" if code is None else f"exit status {code}" for code in codes]
    assert codes == [0] * processes, "\n".join(
        f"---- process {rank}: {end}\n{output}" for rank, (end, output) in enumerate(zip(ends, outputs, strict=True))
    )
    return "".join(outputs)


def main(module: str, function: str, folder: str) -> None:
    faulthandler.dump_traceback_later(DEADLINE - 30)
    getattr(importlib.import_module(module), function)(Path(folder))
    end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
