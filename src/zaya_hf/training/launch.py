"""Several processes of one training run: those of `zaya_hf.launching`, or those that accelerate starts.

`accelerate launch --cpu --num_processes 2` starts one process, so `zaya train` starts them itself; across machines, see
train/README.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import psutil

from ..launching import GRACE, end_with_launcher, exit_code, gpus, launch_processes, signals_go_to

__all__ = ["GRACE", "end_with_launcher", "gpus", "launch_accelerate", "launch_processes"]


def launch_accelerate(config_file: str, arguments: Sequence[str]) -> int:
    """Run ``accelerate launch --config_file CONFIG_FILE -m zaya_hf.training ARGUMENTS``, and wait for it.

    Args:
        config_file: path to a file of accelerate's settings.
        arguments: the recipe or file of settings, and what is changed in it.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the processes that it starts and not to itself, who would end them by
    force after 30 seconds.

    Returns:
        its exit code.
    """
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file)
    child = subprocess.Popen([*launcher, "-m", "zaya_hf.training", *arguments], start_new_session=True)
    with signals_go_to(lambda: _children_of(child.pid)):
        try:
            return exit_code(child.wait())
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


def _children_of(process: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(process).children()]
    except psutil.NoSuchProcess:
        return []
