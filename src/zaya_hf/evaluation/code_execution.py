"""Runs programs that a model wrote, with their tests, each in a process of its own with limits.

**This is no security boundary.** It keeps a clumsy program from hurting an evaluation: endless loops, memory, output,
files and processes left over, exits and kills. A program that means harm can read what the user may read and, where
`layers` does not name a user of its own, delete what the user may delete. Run models that you do not trust in a
container or a virtual machine that you can throw away. For the same reason nothing runs without consent.

What a verdict is worth: solution and tests share one interpreter, as in the benchmarks' own harnesses. Printing,
exiting or ending the process cannot pass for success: a program passes only if the tests came to their end and random
bytes that it was not told say so. A program that searches the interpreter's frames for those bytes could cheat.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

CONSENT = "ZAYA_ALLOW_CODE_EXECUTION"
TIMEOUT = 5.0
MEMORY = 2 << 30
_FILE = 16 << 20  # bytes of a file that a program writes
_FILES = 64  # open at a time
_PROCESSES = 64
_MOST_OUTPUT = 1 << 16
_NAMESPACES = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_USER_NAMESPACES = ("unshare", "--user", "--map-current-user", *_NAMESPACES[1:])
_READS_ALL = "-all,+dac_read_search"  # the one right that is left: an interpreter in root's folder must be readable
_PROBE = """
import decimal, json, statistics, threading
thread = threading.Thread(target=int)
thread.start()
thread.join()
with open("file", "w") as file:
    file.write("written")
"""

Status = Literal["passed", "failed", "timeout", "memory", "error"]


@dataclass(frozen=True)
class Program:
    """Python source, and the tests that are run after it in the same names. Each is compiled by itself."""

    source: str
    tests: str


@dataclass(frozen=True)
class Outcome:
    """What became of a program: `passed` (the tests came to their end), `failed`, `timeout`, `memory` (Python found
    none left), or `error` (it could not be run at all: a fault of the machine). `seconds` are of computing; of waiting
    where the time to wait was over."""

    status: Status
    message: str
    seconds: float


@dataclass(frozen=True)
class _Protection:
    command: tuple[str, ...] = ()  # in front of the interpreter
    user: int | None = None
    reads_all: bool = False  # as that user, with root's right to read
    processes: int | None = None
    limits: tuple[str, ...] = ()


def consented() -> bool:
    """Whether the user allowed programs to be run: `--allow-code-execution`, or ZAYA_ALLOW_CODE_EXECUTION=1."""
    return os.environ.get(CONSENT) == "1"


def allow() -> None:
    """Note the user's consent, for this process and those that it starts."""
    os.environ[CONSENT] = "1"


def require_consent() -> None:
    """Check that the user allowed programs to be run.

    Raises:
        ValueError: not so.
    """
    if not consented():
        raise ValueError(
            "code tasks run programs that the model writes, on this machine, with limits but without a real sandbox; "
            f"allow it with --allow-code-execution or {CONSENT}=1"
        )


def layers() -> list[str]:
    """The protections that are on, in words, for a manifest. The first call tries them out with a harmless program,
    which needs no consent.

    Raises:
        ValueError: no program can be run on this machine.
    """
    protection = _protection()
    found = [
        "a session of its own, killed whole when its time is over",
        f"limits: {', '.join(sorted(protection.limits))}",
        "isolated interpreter, empty environment, temporary folder, no input, output dropped",
    ]
    if protection.command[:1] == _NAMESPACES[:1]:
        found.append("no network, other processes out of sight (Linux namespaces)")
    if protection.user is not None:
        found.append(f"a user without rights{' but to read all files' if protection.reads_all else ''} (nobody)")
    return found


def run_tests(
    programs: Sequence[Program],
    *,
    timeout: float = TIMEOUT,
    wall: float | None = None,
    memory: int = MEMORY,
    workers: int | None = None,
) -> list[Outcome]:
    """Run programs with their tests, some at a time; from any thread.

    Standard input is empty, output is dropped, the folder is new and goes away with all that is in it, the environment
    is empty. `__name__` is not `"__main__"`. The hash seed and `random`'s seed are fixed, so that a program which
    depends on the order of a set has one outcome.

    Args:
        programs: what to run.
        timeout: seconds of computing per program, rounded up to whole ones.
        wall: seconds from its start until its end at most; by default 3 times `timeout`, as other programs compute at
            the same time.
        memory: bytes of address space.
        workers: programs at a time; by default as many as there are cores, 8 at most.

    Returns:
        An outcome for each, in the order given.

    Raises:
        ValueError: without consent, or where programs cannot be run.
    """
    require_consent()
    protection = _protection()
    wall = 3 * timeout if wall is None else wall
    run = functools.partial(_run, protection=protection, cpu=math.ceil(timeout), wall=wall, memory=memory)
    with ThreadPoolExecutor(workers or min(8, _cores())) as pool:
        found: Iterable[Outcome] = pool.map(run, programs)
        bar = tqdm(found, total=len(programs), desc="running programs", disable=None if len(programs) > 1 else True)
        return list(bar)


def _run(program: Program, *, protection: _Protection, cpu: int, wall: float, memory: int) -> Outcome:
    outcome, _ = _run_once(program, protection, cpu, wall, memory)
    if outcome.status == "error":  # the machine may have been out of processes for a moment
        outcome, _ = _run_once(program, protection, cpu, wall, memory)
    return outcome


def _run_once(
    program: Program, protection: _Protection, cpu: int, wall: float, memory: int
) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome, and the names of the limits that were set."""
    task = {"source": program.source, "tests": program.tests, "memory": memory, "cpu": cpu, "file": _FILE}
    token = secrets.token_hex(16)
    task |= {"files": _FILES, "processes": protection.processes, "user": protection.user, "token": token}
    with tempfile.TemporaryDirectory(prefix="zaya-program-", ignore_cleanup_errors=True) as folder:
        if protection.user is not None:
            os.chown(folder, protection.user, -1)
        # Like -I, but for -E: the environment is ours, and a fixed hash seed is set there.
        command = [*protection.command, sys.executable, "-s", "-c", _runner()]
        environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
        environment |= {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1"}
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome("error", f"the interpreter cannot be started: {error}", 0.0), ()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once, and says why
                process.stdin.write(json.dumps(task).encode())
                process.stdin.close()
            output, ended = _read(process.stdout.fileno(), started + wall)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # before the wait, which frees the number for another process
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
    return _outcome(output, ended, wall, token)


def _read(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """What comes out until it is closed or the time is over, and whether it was closed."""
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                piece = os.read(descriptor, _MOST_OUTPUT)
                if not piece:
                    return output, True
                output = (output + piece)[:_MOST_OUTPUT]
    return output, False


def _outcome(output: bytes, ended: bool, wall: float, token: str) -> tuple[Outcome, tuple[str, ...]]:
    lines = output.decode(errors="replace").splitlines()
    try:
        words = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        limits = tuple(words[0]["started"]) if words else ()
    except (ValueError, KeyError, TypeError, RecursionError):  # the output is open to a program that looks for it
        return Outcome("failed", "it wrote where the process that watches over it reports", 0.0), ()
    if len(words) == 2 and words[1].get("token") == token:
        return Outcome(words[1]["status"], words[1]["message"], words[1]["seconds"]), limits
    if not words:
        reason = lines[-1] if lines else "it says nothing" if ended else f"it has not begun after {wall:g} s"
        return Outcome("error", f"the program could not be run: {reason}", 0.0), limits
    if ended:
        return Outcome("failed", "it ended the process that watches over it", 0.0), limits
    return Outcome("timeout", f"more than {wall:g} s", wall), limits


@functools.cache
def _runner() -> str:
    return (Path(__file__).parent / "program_runner.py").read_text(encoding="utf-8")


@functools.cache
def _protection() -> _Protection:
    """The strictest that a harmless program still passes under, found out step by step."""
    if sys.platform == "win32":
        raise ValueError("code tasks run programs with limits that Windows does not have: use Linux, macOS or WSL")
    import pwd

    found = why = None
    for command in (_NAMESPACES, _USER_NAMESPACES, ()):
        if command and shutil.which(command[0]) is None:
            continue
        found, why = _tried(_Protection(command))
        if found is not None:
            break
    if found is None:
        raise ValueError(f"programs cannot be run on this machine, not even a harmless one: {why}")
    if os.geteuid() == 0 and found.command != _USER_NAMESPACES:
        with contextlib.suppress(KeyError):
            nobody = replace(found, user=pwd.getpwnam("nobody").pw_uid)
            found = _tried(nobody)[0] or _tried(_reading_all(nobody))[0] or found
    if os.geteuid() != 0 or found.user is not None:  # nothing limits how many processes the administrator has
        found = _tried(replace(found, processes=_PROCESSES))[0] or found
    return found


def _reading_all(protection: _Protection) -> _Protection:
    rights = ("--bounding-set", _READS_ALL, "--inh-caps", _READS_ALL, "--ambient-caps", _READS_ALL)
    user = ("--reuid", str(protection.user), "--regid", str(protection.user), "--clear-groups", "--no-new-privs")
    return replace(protection, command=(*protection.command, "setpriv", *user, *rights), reads_all=True)


def _tried(protection: _Protection) -> tuple[_Protection | None, str]:
    outcome, limits = _run_once(Program(_PROBE, ""), protection, cpu=5, wall=20.0, memory=MEMORY)
    return (replace(protection, limits=limits) if outcome.status == "passed" else None), outcome.message


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
