"""The `zaya` command: reads its arguments, then imports zaya_hf and runs the command that was asked for.

It stands outside the package because importing anything inside it runs `zaya_hf/__init__.py`, which registers classes
with transformers and so loads torch. `zaya --help`, `zaya --version` and a misspelt option answer without that wait.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C, 143 ended by SIGTERM. Errors and warnings are
one line on standard error; `--debug` or ZAYA_DEBUG=1 shows the traceback of an error as well.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# command -> module whose `run(args) -> int` carries it out
COMMANDS = {
    "doctor": "zaya_hf.doctor",
    "generate": "zaya_hf.generation_cli",
    "quickstart": "zaya_hf.quickstart.run",
    "report": "zaya_hf.report_cli",
}
# Commands that read nothing but files of this machine: libraries below them must not reach for the network either.
OFFLINE = frozenset({"doctor", "generate", "quickstart", "report"})
# The five models of the quickstart; ours first.
QUICKSTART_MODELS = ("zaya", "qwen3", "gemma3", "llama", "olmoe")
INTERRUPTED = 130
TERMINATED = 143  # 128 + SIGTERM, likewise
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a program that the signal ended


def version() -> str:
    """The installed version of zaya_hf, read from its metadata so that the package need not be imported."""
    try:
        return metadata.version("zaya_hf")
    except metadata.PackageNotFoundError:
        return "unknown (running from a source tree that is not installed)"


def _number(convert: Callable[[str], float], allowed: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """An argparse type: `convert`, then refuse what `allowed` refuses with `wanted` in the message."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _model_names(text: str) -> tuple[str, ...]:
    """An argparse type: names of `QUICKSTART_MODELS`, separated by commas, each once."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in QUICKSTART_MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(QUICKSTART_MODELS)}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a model twice")
    return names


_POSITIVE = _number(int, lambda n: n >= 1, "a whole number from 1 up")
_SEED = _number(int, lambda n: 0 <= n < 2**63, "a whole number from 0 up")
_TEMPERATURE = _number(float, lambda t: 0 <= t < float("inf"), "a number from 0 up (0 means greedy)")
_TOP_P = _number(float, lambda p: 0 < p <= 1, "a number above 0 and at most 1")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Imports nothing but the standard library."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,  # else the sub-parser's default overwrites a --debug before the command
        help="show the traceback of an error (or ZAYA_DEBUG=1)",
    )
    parser = argparse.ArgumentParser(
        prog="zaya",
        description="ZAYA1 models in transformers: check an installation, generate text, train and compare small ones.",
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"zaya_hf {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor", parents=[common], help="what is installed here, what will run, and what is missing"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    generate = commands.add_parser(
        "generate",
        parents=[common],
        help="continue a prompt with a saved model",
        description="Load the model and tokenizer of a folder and continue a prompt. Text goes to standard output.",
    )
    generate.add_argument("path", type=Path, metavar="PATH", help="folder of a saved ZAYA model, any published layout")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the prompt; without it and --prompt-file, standard input")
    source.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="read the prompt from a UTF-8 file, less a newline at its end"
    )
    generate.add_argument("--max-new-tokens", type=_POSITIVE, metavar="N", help="default: 128, or what fits")
    generate.add_argument(
        "--temperature", type=_TEMPERATURE, metavar="T", help="0 is greedy; default: the folder's generation config"
    )
    generate.add_argument("--top-p", type=_TOP_P, metavar="P", help="sample from the likeliest words of total mass P")
    generate.add_argument("--top-k", type=_POSITIVE, metavar="K", help="sample from the K likeliest words")
    generate.add_argument("--num-beams", type=_POSITIVE, metavar="N", help="beam search; its text comes at the end")
    generate.add_argument("--seed", type=_SEED, metavar="N", help="makes sampling repeatable")
    generate.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights; auto, the default, keeps the folder's",
    )
    generate.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (also for ROCm); default: a GPU if any")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming the text")

    quickstart = commands.add_parser(
        "quickstart",
        parents=[common],
        help="train a tiny ZAYA and four other models alike, evaluate and compare them, write a report",
        description="Train a tiny ZAYA model and four others of its size (Qwen3, Gemma3, Llama, OLMoE) on text that "
        "every Python installation has, evaluate them with lm-eval, write a report, and save ZAYA as a folder that "
        "stock transformers loads. Offline; about five minutes on two CPU cores. Ctrl-C stops it, and the same command "
        "goes on.",
    )
    quickstart.add_argument(
        "--steps", type=_POSITIVE, default=800, metavar="N", help="of training, for each model; default: %(default)s"
    )
    quickstart.add_argument("--seed", type=_SEED, default=0, metavar="N", help="the first one; default: %(default)s")
    quickstart.add_argument(
        "--seeds", type=_POSITIVE, default=1, metavar="N", help="train each model with N seeds; default: %(default)s"
    )
    quickstart.add_argument(
        "--only",
        type=_model_names,
        metavar="MODELS",
        help=f"some of {','.join(QUICKSTART_MODELS)}, separated by commas; default: all",
    )
    quickstart.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), metavar="FOLDER", help="default: %(default)s"
    )

    report = commands.add_parser(
        "report",
        parents=[common],
        help="build the report page of earlier results again",
        description="Build report.html beside a results.json again, from its figures alone.",
    )
    report.add_argument("path", type=Path, metavar="PATH", help="folder of results, or its results.json")
    return parser


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
    args = parser.parse_args(argv)
    if args.command == "generate" and args.prompt is None and args.prompt_file is None and sys.stdin.isatty():
        parser.error("generate: no prompt: give --prompt TEXT, --prompt-file FILE, or text on standard input")
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


if __name__ == "__main__":
    sys.exit(main())
