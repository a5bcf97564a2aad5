"""The `zaya` command: reads its arguments, then imports zaya_hf and runs the command that was asked for.

It stands outside the package because importing anything inside it runs `zaya_hf/__init__.py`, which registers classes
with transformers and so loads torch. `zaya --help`, `zaya --version` and a misspelt option answer without that wait.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C, 143 ended by SIGTERM. Errors and warnings are
one line on standard error; `--debug` or ZAYA_DEBUG=1 shows the traceback of an error as well.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from .evaluation_arguments import check_eval
from .parser import BENCH_DTYPES, BENCH_TARGETS, build_parser, version
from .training_arguments import QUICKSTART_MODELS

__all__ = ["BENCH_DTYPES", "BENCH_TARGETS", "COMMANDS", "QUICKSTART_MODELS", "build_parser", "main", "version"]

# command -> module whose `run(args) -> int` carries it out
COMMANDS = {
    "bench": "zaya_hf.bench_cli",
    "chat": "zaya_hf.chat_cli",
    "data": "zaya_hf.data_cli",
    "doctor": "zaya_hf.doctor",
    "eval": "zaya_hf.eval_cli",
    "generate": "zaya_hf.generation_cli",
    "lm-eval": "zaya_hf.lm_eval_cli",
    "quickstart": "zaya_hf.quickstart.run",
    "report": "zaya_hf.report_cli",
    "train": "zaya_hf.train_cli",
}
# Commands that read nothing but files of this machine: libraries below them must not reach for the network either.
# Sources, tokenizers and checkpoints of `data` and `train`, models and items of `eval` may be on the Hub.
OFFLINE = frozenset({"bench", "chat", "doctor", "generate", "quickstart", "report"})
INTERRUPTED = 130
TERMINATED = 143  # 128 + SIGTERM, likewise
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a program that the signal ended


def _one_line(error: BaseException) -> str:
    """The message of an error on one line; the type is named where the message alone would not say what happened."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. Everything that is cleaned up after Ctrl-C is cleaned up after this."""


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises `_Terminated` once. A process that ignores or handles the signal already keeps its own way."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the cleaning short
        raise _Terminated

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: Python delivers no signals here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _one_line_warnings(command: str) -> Iterator[None]:
    """Warnings are shown like errors: one line, without a line of some module's source."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"zaya {command}: warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _go_offline() -> None:
    """No look-ups on the network, even where huggingface_hub, which reads the variable once, is imported already."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_OFFLINE = True


def _print_anything() -> None:
    """A model's text may have characters that a terminal or a pipe cannot: they are shown as escapes, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` is the command line without the program's name."""
    parser = build_parser()
    args, left = parser.parse_known_args(argv)
    if args.command == "train":  # argparse takes no more KEY=VALUE once an option stood between them
        args.overrides += [argument for argument in left if not argument.startswith("-")]
        left = [argument for argument in left if argument.startswith("-")]
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    missing = check_eval(args) if args.command == "eval" else None
    if missing:
        parser.error(missing)
    asked = args.command == "generate" and not (args.prompt or args.prompt_file or args.prompts)
    if asked and sys.stdin is not None and sys.stdin.isatty():
        parser.error(
            "generate: no prompt: give --prompt TEXT, --prompt-file FILE, --prompts FILE, or text on standard input"
        )
    debug = getattr(args, "debug", False) or os.environ.get("ZAYA_DEBUG") == "1"
    if args.command in OFFLINE:
        _go_offline()
    _print_anything()
    try:
        with _sigterm_like_ctrl_c(), _one_line_warnings(args.command):
            code: int = importlib.import_module(COMMANDS[args.command]).run(args)
        if sys.stdout is not None:  # it is where the shell has closed it
            sys.stdout.flush()
    except _Terminated:
        print(f"zaya {args.command}: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print(f"\nzaya {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) is gone. Python flushes standard output once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        print(f"zaya {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 1
    return code
