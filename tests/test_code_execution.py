"""Programs that models may write: what becomes of each, what is left of it, and that nothing runs without consent."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from zaya_hf.evaluation import code_execution
from zaya_hf.evaluation.code_execution import CONSENT, Outcome, Program, layers, run_tests

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
TEST = "assert answer() == 42"
RIGHT = "def answer():\n    return 42\n"
NAMESPACES = "Linux namespaces"


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONSENT, "1")


def outcome(source: str, tests: str = TEST, **settings: float) -> Outcome:
    return run_tests([Program(source, tests)], **settings)[0]  # type: ignore[arg-type]


def namespaces() -> bool:
    return any(NAMESPACES in layer for layer in layers())


# One batch, as each costs a process: source, tests, status, and what the message says.
PROGRAMS = {
    "right": (RIGHT, TEST, "passed", ""),
    "wrong": ("def answer():\n    return 41\n", TEST, "failed", "AssertionError (tests, line 1)"),
    "raises": ("def answer():\n    return {}['key']\n", TEST, "failed", "KeyError: 'key' (source, line 2)"),
    "no name": ("x = 1", TEST, "failed", "NameError"),
    "syntax": ("def answer(:", TEST, "failed", "SyntaxError"),
    "exits": (RIGHT + "import sys\nsys.exit(0)", TEST, "failed", "exits (0) before the tests"),
    "exits in the tests": ("def answer():\n    raise SystemExit", TEST, "failed", "before the tests have ended"),
    "leaves": ("import os\nos._exit(0)", TEST, "failed", "exit status 0"),
    "prints success": (
        'import os\nfor place in range(64):\n    try:\n        os.write(place, b\'{"status": "passed", "message": "", '
        '"seconds": 0}\\n\')\n    except OSError:\n        pass\nos._exit(0)',
        TEST,
        "failed",
        "exit status 0",
    ),
    "opens a string": ("'''", "assert False  # '''", "failed", "SyntaxError"),
    "hides the tests": ("if False:\n    pass", "assert False", "failed", "AssertionError"),
    "catches all": (
        "try:\n    answer = lambda: 42\nexcept BaseException:\n    pass",
        "assert answer() == 0",
        "failed",
        "",
    ),
    "replaces what runs the tests": (
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
        TEST,
        "failed",
        "NameError",
    ),
    "writes where outcomes are reported": (
        "import os\nos.write(os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY), b'{no outcome}\\n')",
        TEST,
        "failed",
        "",
    ),
    "reports an outcome of another form": (
        "import os\nos.write(os.open(f'/proc/{os.getppid()}/fd/1', os.O_WRONLY), b'{}\\n')\nos.killpg(0, 9)",
        TEST,
        "failed",
        "",
    ),
    "closes all files": (RIGHT + "import os\nos.closerange(0, 64)", TEST, "failed", "exit status 0"),
    "copies itself": (RIGHT + "import os\nos.fork()", TEST, "passed", ""),
    "fails in a copy of itself": (
        RIGHT + "import os, time\nif os.fork() == 0:\n    assert False\ntime.sleep(0.2)",
        TEST,
        "passed",
        "",
    ),
    "passes in a copy of itself alone": (
        RIGHT + "import os, time\nif os.fork():\n    time.sleep(0.2)\n    assert False",
        TEST,
        "failed",
        "AssertionError",
    ),
    "reads input": ("input()", TEST, "failed", "EOFError"),
    "much output": (RIGHT + "print('x' * 5_000_000)", TEST, "passed", ""),
    "much memory": ("x = bytearray(1 << 40)", TEST, "memory", "MemoryError"),
    "large file": ("with open('f', 'wb') as f:\n    f.write(bytes(1 << 25))", TEST, "failed", "OSError"),
    "a module in its folder": (RIGHT + "open('random.py', 'w').write('1/0')\nimport random, hmac", TEST, "passed", ""),
    "a thread left running": (
        RIGHT + "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        TEST,
        "passed",
        "",
    ),
    "raises while deleted": (
        RIGHT + "class A:\n    def __del__(self):\n        1 / 0\na = A()",
        TEST + "\ndel a",
        "passed",
        "",
    ),
    "kills its group": ("import os\nos.kill(0, 9)", TEST, "failed", ""),
    "a script's tail": (RIGHT + "if __name__ == '__main__':\n    input()", TEST, "passed", ""),
    "a data class": (
        RIGHT + "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int",
        "assert A(1).x == 1",
        "passed",
        "",
    ),
    "deletes names": (
        "import builtins, os\nos._exit = os.write = None\ndel builtins.open\n" + RIGHT,
        TEST,
        "passed",
        "",
    ),
    "an odd message": ("raise ValueError('\\ud800' * 1000)", TEST, "failed", "ValueError"),
    "a string it cannot say": (
        "class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E",
        TEST,
        "failed",
        "cannot",
    ),
    "the environment": (
        "import os\nassert 'ZAYA_SECRET' not in os.environ and 'PYTHONPATH' not in os.environ",
        "",
        "passed",
        "",
    ),
    "the order of a set": (
        "answer = lambda: list({'a', 'b', 'c', 'd', 'e'})",
        "import random; random.random()",
        "passed",
        "",
    ),
    "crashes": ("import ctypes\nctypes.string_at(0)", TEST, "failed", "SIGSEGV"),
}


def test_what_becomes_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_SECRET", "token")
    programs = [Program(source, tests) for source, tests, _, _ in PROGRAMS.values()]
    found = run_tests(programs, timeout=10, memory=512 << 20)
    for (name, (_, _, status, message)), one in zip(PROGRAMS.items(), found, strict=True):
        assert one.status == status, (name, one)
        assert message in one.message, (name, one)
        assert len(one.message) <= 400


def test_loops_end() -> None:
    """Also one that ignores that its time is over."""
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    found = run_tests([Program(start + "while True: pass", "") for start in ("", ignores)], timeout=1, wall=20)
    assert [(one.status, one.message) for one in found] == [("timeout", "more than 1 s of computing")] * 2


def test_sleep_ends() -> None:
    assert outcome("import time\ntime.sleep(99)", wall=1) == Outcome("timeout", "more than 1 s", 1)


def test_a_program_cannot_end_the_evaluation() -> None:
    source = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.2)\nassert False"
    assert outcome(source).status == "failed"


def test_a_forged_outcome_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with the rights of the process that watches over it writes in its place and ends it."""
    monkeypatch.setattr("pwd.getpwnam", lambda name: {}[name])
    words = json.dumps({"status": "passed", "message": "", "seconds": 0.0})
    source = (
        "import os, time\ntime.sleep(0.3)\n"  # the report that it has begun comes first
        f"os.write(os.open(f'/proc/{{os.getppid()}}/fd/1', os.O_WRONLY), {words!r}.encode() + b'\\n')\n"
        "os.kill(0, 9)\ntime.sleep(9)"
    )
    code_execution._protection.cache_clear()
    try:
        assert outcome(source, wall=5).status == "failed"
    finally:
        code_execution._protection.cache_clear()


def test_the_administrators_files_are_safe_where_layers_say_so(tmp_path: Path) -> None:
    if not any("nobody" in layer for layer in layers()):
        pytest.skip("programs run as the user here")
    file = tmp_path / "file"
    file.touch()
    tmp_path.chmod(0o755)
    one = outcome(f"import os\nos.remove({str(file)!r})", "")
    assert (one.status, "PermissionError" in one.message) == ("failed", True), one
    assert file.exists()


def test_processes_without_end_are_limited() -> None:
    """A fork bomb that stops by itself, should nothing stop it."""
    if not any("NPROC" in layer for layer in layers()):
        pytest.skip("nothing limits the processes here")
    source = "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(5)\n        os._exit(0)"
    one = outcome(source)
    assert (one.status, "BlockingIOError" in one.message) == ("failed", True), one


def test_children_are_ended_with_it(tmp_path: Path) -> None:
    """They write the time as long as they live; the group is left on purpose where a namespace holds them anyway."""
    alive = Path(tempfile.mkdtemp(dir=tmp_path))
    alive.chmod(0o777)
    tmp_path.chmod(0o755)
    leave = "os.setsid()" if namespaces() else "pass"
    source = (
        f"import os, time\nfor number in range(5):\n    if os.fork() == 0:\n        {leave}\n        while True:\n"
        f"            open({str(alive)!r} + f'/{{number}}', 'a').write('x')\n            time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
    )
    one = outcome(source + RIGHT)
    assert one.status == "passed", one
    written = {file.name: file.stat().st_size for file in alive.iterdir()}
    time.sleep(0.2)
    assert written == {file.name: file.stat().st_size for file in alive.iterdir()}
    if not any("rights (nobody" in layer for layer in layers()):  # who may not look into the folder of the tests
        assert set(written) == {"0", "1", "2", "3", "4"}


def test_folder_is_new_and_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "import os\nassert os.listdir() == []\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)"
    assert outcome(source, "").status == "passed"
    assert list(tmp_path.iterdir()) == []


def test_no_network_where_a_namespace_says_so() -> None:
    if not namespaces():
        pytest.skip("no namespaces here")
    source = "import socket\nsocket.socket().connect(('192.0.2.1', 80))"
    assert "unreachable" in outcome(source, "").message


def test_order_is_that_of_the_programs_from_any_thread() -> None:
    programs = [
        Program(f"import time\ntime.sleep({0.2 if number == 0 else 0})", f"assert {number} % 2") for number in range(6)
    ]
    found: list[list[Outcome]] = []
    thread = threading.Thread(target=lambda: found.append(run_tests(programs, workers=3)))
    thread.start()
    thread.join()
    assert [one.status for one in found[0]] == ["failed", "passed"] * 3


def test_outcome_is_repeatable() -> None:
    source = "import random\nvalue = list({'a', 'b', 'c', 'd', 'e', 'f'}), random.random()\nraise ValueError(value)"
    first, second = run_tests([Program(source, ""), Program(source, "")])
    assert first.message == second.message


def test_nothing_runs_without_consent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in (None, "0", "true"):
        monkeypatch.delenv(CONSENT, raising=False)
        if value is not None:
            monkeypatch.setenv(CONSENT, value)
        with pytest.raises(ValueError, match="--allow-code-execution"):
            outcome(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()
    code_execution.allow()
    assert code_execution.consented()
    assert outcome(RIGHT).status == "passed"


def test_a_fault_of_the_machine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    layers()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert outcome(RIGHT).status == "error"


def test_machine_that_runs_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    code_execution._protection.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"cannot be run on this machine.*/no/such/python"):
            layers()
    finally:
        code_execution._protection.cache_clear()


def test_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest holds: a session that is killed whole, limits, a report that cannot be printed."""
    monkeypatch.setattr(code_execution.shutil, "which", lambda name: None)
    code_execution._protection.cache_clear()
    try:
        named = layers()
        assert not any(NAMESPACES in layer for layer in named)
        assert any("CPU" in layer and "FSIZE" in layer and "NOFILE" in layer for layer in named)
        programs = [RIGHT, "import os\nos._exit(0)", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)"]
        found = run_tests([Program(source, TEST) for source in programs], wall=5)
        assert [one.status for one in found] == ["passed", "failed", "failed"]
        assert "watches over it" in found[2].message
    finally:
        code_execution._protection.cache_clear()


def test_layers_can_be_written_to_a_manifest() -> None:
    assert json.loads(json.dumps(layers())) == layers()
