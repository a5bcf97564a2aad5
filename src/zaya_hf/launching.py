"""Several processes of one job on this machine: starting them, passing signals on, and one exit code.

`torchrun` ends its processes by force 30 seconds after it was told to stop, which is less than saving may take. So
zaya starts them itself, with the variables that `torchrun` would set. Imports nothing of the package.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

__all__ = [
    "end_process",
    "end_with_launcher",
    "exit_code",
    "gpus",
    "launch_processes",
    "reserved_port",
    "signals_go_to",
]

GRACE = 60.0  # seconds that processes have to end by themselves after one of them has failed
STOPPED = (130, 143)  # exit codes of processes that were told to stop, saved, and did; the others are about to
PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1")
_LAUNCHER = "ZAYA_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def launch_processes(command: Sequence[str], processes: int, grace: float = GRACE) -> int:
    """Run `command` in so many processes that find each other, and wait for them.

    They are told to stop (SIGTERM) when one of them fails, and killed after `grace` seconds more. SIGTERM, SIGINT and
    SIGUSR1 are passed on to all, who may take the time that they need.

    Returns:
        0, or the exit code of the first process that failed; 128 + the number of the signal that ended it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
        _LAUNCHER: str(os.getpid()),
    }
    children: list[subprocess.Popen[bytes]] = []
    with reserved_port() as port, signals_go_to(lambda: [child.pid for child in children]):
        try:
            for rank in range(processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
                # In a session of their own, so that Ctrl-C reaches them once: through us.
                children.append(subprocess.Popen(command, env=os.environ | common | own, start_new_session=True))
            return _wait(children, grace)
        finally:
            for child in children:
                child.kill()
                child.wait()


def gpus() -> int:
    """GPUs that a process may use; 0 without any."""
    import torch  # no process that only waits for others needs it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def end_with_launcher() -> None:
    """Ask the kernel (Linux) for SIGTERM should the process that launched this one end: none trains on unseen."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux") or os.getppid() != int(launcher):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def end_process(code: int) -> NoReturn:
    """End this process, one of several, with exit handlers and flushed output, but without taking its objects apart.

    Destroying a process group of torch's waits, with the interpreter locked, for gloo's threads; a thread that just
    then releases a tensor waits for the interpreter (torch 2.11 to 2.13). The process, its work done, would never end.
    """
    gc.freeze()  # exit handlers may start a collection, which would reach the group
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this machine that, inside, nobody is given by chance; torch's store can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does; of two such one may listen
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def signals_go_to(receivers: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Inside, what arrives here is sent to the processes of these ids."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        _send(receivers(), number)

    before = {}
    for name in PASSED_ON:
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(code: int) -> int:
    """As a shell says it: 128 + the signal."""
    return 128 - code if code < 0 else code


def _wait(children: Sequence[subprocess.Popen[bytes]], grace: float) -> int:
    failed: int | None = None
    end = float("inf")
    while True:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes):
            return failed if failed is not None else next((exit_code(code) for code in codes if code), 0)
        broken = [code for code in codes if code not in (None, 0, *STOPPED)]
        if failed is None and broken:
            failed = exit_code(broken[0])
            end = time.monotonic() + grace
            _send([child.pid for child in children if child.poll() is None], signal.SIGTERM)
        if time.monotonic() > end:
            _send([child.pid for child in children if child.poll() is None], signal.SIGKILL)
            end = float("inf")
        time.sleep(0.05)


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
