"""Runs one program in a process of its own: what `code_execution` gives to a fresh interpreter, as text.

It needs the standard library alone and imports nothing of this package. Its standard input holds one JSON object:
`source` and `tests` (Python), `memory` (bytes), `cpu` (seconds), `file` (bytes), `files` (open at a time), `processes`
(or null), `user` (id to become, or null), `token` (random text). To its standard output it writes `{"started":
[limits]}` and then `{"status", "message", "seconds", "token"}`, a line each. The program, which runs in a child, has no
file open there. It may find a way to write, but is not told the token, without which neither that line counts nor the
child's report to this process.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import types
from typing import Any

MESSAGE = 300  # characters of a message that are kept
REPORT = 4096  # bytes of a child's report that are read; a pipe holds more, so that writing it never waits


def main() -> None:
    sys.path[:] = [folder for folder in sys.path if folder]  # or a file of the program's could pose as a module
    task = json.load(sys.stdin)
    token = task.pop("token")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _become_child(writing)
        limits = _set_limits(task)
        os.write(writing, json.dumps(limits).encode() + b"\n")
        _run(task, writing, token.encode())
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        first = _line(pipe)
        if not first:
            raise OSError("the child process ended before the program began")
        _say({"started": json.loads(first)})
        _, state, usage = os.wait4(child, 0)
        os.set_blocking(reading, False)  # what the program started may hold the other end open
        written = pipe.read(REPORT) or b""
    seconds = usage.ru_utime + usage.ru_stime
    begin = token.encode()
    report = json.loads(written[len(begin) :]) if written.startswith(begin) else None
    _say((report or _without_report(state, seconds, task["cpu"])) | {"seconds": seconds, "token": token})
    sys.stdout.flush()
    os._exit(0)


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def _line(file: Any) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := file.read(1)):
        line += byte
    return line


def _become_child(writing: int) -> None:
    """No open file but the report's; nothing to read; what is printed goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, writing)
    os.closerange(writing + 1, min(most, 4096) if most > 0 else 4096)


def _set_limits(task: dict[str, Any]) -> list[str]:
    """Names of the limits that this system accepted."""
    wanted = {
        "CORE": (0, 0),
        "FSIZE": (task["file"],) * 2,
        "NOFILE": (task["files"],) * 2,
        "AS": (task["memory"],) * 2,
        "CPU": (task["cpu"], task["cpu"] + 1),  # the first ends a program that does not defend itself, the second any
    }
    if task["processes"] is not None:
        wanted["NPROC"] = (task["processes"],) * 2
    accepted = []
    for name, values in wanted.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), values)
        except (AttributeError, OSError, ValueError):  # not on this system, or above what the machine allows
            continue
        accepted.append(name)
    if task["user"] not in (None, os.getuid()):
        os.setgroups([])
        os.setgid(task["user"])
        os.setuid(task["user"])
    return accepted


def _run(task: dict[str, Any], writing: int, token: bytes) -> None:
    """Run the program, then the tests in the same names; report; end at once, whatever still runs."""
    # The program may overwrite them.
    leave, write, dumps, run, translate, process = os._exit, os.write, json.dumps, exec, compile, os.getpid
    own = process()
    out_of_memory = token + b'{"status": "memory", "message": "MemoryError"}'
    passed = token + b'{"status": "passed", "message": ""}'
    try:
        random.seed(0)
        module = types.ModuleType("solution")  # not __main__: a script's tail is not part of the answer
        sys.modules["solution"] = module
        for name in ("source", "tests"):
            # Each by itself: what the first leaves open, a string or a condition, must not swallow the second.
            run(translate(task[name], f"<{name}>", "exec", dont_inherit=True), module.__dict__)
        report = passed
    except MemoryError:
        report = out_of_memory
    except BaseException as error:  # SystemExit too: it ends the program before its tests have
        try:
            report = token + dumps({"status": "failed", "message": _words(error)}).encode()
        except BaseException:
            report = token + b'{"status": "failed", "message": "an exception that cannot be described"}'
    try:
        if process() == own:  # a copy that the program made of itself comes here, too
            write(writing, report)
    finally:  # also where the program has closed what it did not open
        leave(0)


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it exits ({error.code!r}) before the tests have ended"[:MESSAGE]
    line = error.__traceback__
    where = ""
    while line is not None:
        file = line.tb_frame.f_code.co_filename
        if file in ("<source>", "<tests>"):
            where = f" ({file[1:-1]}, line {line.tb_lineno})"
        line = line.tb_next
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[: MESSAGE - len(where)] + where


def _without_report(state: int, seconds: float, cpu: int) -> dict[str, Any]:
    """What became of a child that said nothing."""
    if os.WIFEXITED(state):
        text = f"it ends the process (exit status {os.WEXITSTATUS(state)}) before the tests have ended"
        return {"status": "failed", "message": text}
    number = os.WTERMSIG(state)
    if number == signal.SIGXCPU or (number == signal.SIGKILL and seconds >= cpu):
        return {"status": "timeout", "message": f"more than {cpu} s of computing"}
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return {"status": "failed", "message": f"the process was ended by {name}"}


if __name__ == "__main__":
    main()
