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
import re
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
    "bench": "zaya_hf.bench_cli",
    "chat": "zaya_hf.chat_cli",
    "data": "zaya_hf.data_cli",
    "doctor": "zaya_hf.doctor",
    "generate": "zaya_hf.generation_cli",
    "quickstart": "zaya_hf.quickstart.run",
    "report": "zaya_hf.report_cli",
    "train": "zaya_hf.train_cli",
}
# Commands that read nothing but files of this machine: libraries below them must not reach for the network either.
# Sources, tokenizers and checkpoints of `data` and `train` may be on the Hub.
OFFLINE = frozenset({"bench", "chat", "doctor", "generate", "quickstart", "report"})
# The five models of the quickstart; ours first.
QUICKSTART_MODELS = ("zaya", "qwen3", "gemma3", "llama", "olmoe")
# GPUs that kernels are compiled for, and dtypes of their tensors; keys of tables in the package.
BENCH_TARGETS = ("gfx942", "gfx950", "sm_90")
BENCH_DTYPES = ("bf16", "fp16", "fp32")
# Fields of zaya_hf.training.config: kinds of text sources, and which turns of a conversation are predicted.
SOURCE_KINDS = ("auto", "text", "jsonl", "parquet", "arrow", "hub")
TRAIN_ON = ("assistant", "last_assistant", "all")
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


def _stop_string(text: str) -> str:
    """Shells pass a backslash on as it is typed, so a line end is hard to type otherwise."""
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda match: meant[match[1]], _not_empty(text))


def _not_empty(text: str) -> str:
    """An argparse type: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


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


def _model_options() -> argparse.ArgumentParser:
    """What `generate` and `chat` say alike about the model."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("path", type=Path, metavar="PATH", help="folder of a saved ZAYA model, any published layout")
    group = options.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights; auto, the default, keeps the folder's",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (also for ROCm); default: a GPU if any")
    group.add_argument(
        "--pack-weights", action="store_true", help="faster on a CPU; takes as much memory again as the weights"
    )
    group.add_argument(
        "--compile", action="store_true", help="compile the decoding step: a wait at first, then faster for long texts"
    )
    return options


def _sampling_options(length: str) -> argparse.ArgumentParser:
    """What `generate` and `chat` say alike about the texts. `length` is the help's word on the default length."""
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("text")
    group.add_argument("--max-new-tokens", type=_POSITIVE, metavar="N", help=length)
    group.add_argument(
        "--temperature", type=_TEMPERATURE, metavar="T", help="0 is greedy; default: the folder's generation config"
    )
    group.add_argument("--top-p", type=_TOP_P, metavar="P", help="sample from the likeliest words of total mass P")
    group.add_argument("--top-k", type=_POSITIVE, metavar="K", help="sample from the K likeliest words")
    group.add_argument("--seed", type=_SEED, metavar="N", help="makes sampling repeatable")
    group.add_argument(
        "--stop",
        type=_stop_string,
        action="append",
        default=[],
        metavar="TEXT",
        help=r"end a text before TEXT, in which \n, \t, \r and \\ are a line end, a tab, a return and a backslash; "
        "repeatable",
    )
    group.add_argument("--system", metavar="TEXT", help="the system prompt of a chat")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether a chat model thinks before it answers (enable_thinking); default: its template's",
    )
    return options


def _add_generate(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        parents=parents,
        help="continue prompts with a saved model",
        description="Load the model and tokenizer of a folder and continue one prompt or many. One text is streamed to "
        "standard output; several are printed in the order of their prompts.",
        epilog="With one seed, a prompt at one place in the list gives the same text whatever --batch-size is, but for "
        "rounding, where the chances of two words are next to equal (beam search with sampling aside).",
    )
    group = generate.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; repeatable; without any, standard input is one"
    )
    source.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        metavar="FILE",
        help="a UTF-8 file that is one prompt, less a newline at its end; repeatable; - is standard input",
    )
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line; in a .jsonl file each line is a string or an object with prompt or messages; "
        "- is standard input",
    )
    group.add_argument("--jsonl", action="store_true", help="read --prompts as JSON Lines, whatever its name")
    group.add_argument("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    group = generate.add_argument_group("how many, and where to")
    group.add_argument("--num-beams", type=_POSITIVE, metavar="N", help="beam search; its text comes at the end")
    group.add_argument(
        "--num-return-sequences", type=_POSITIVE, default=1, metavar="N", help="sample N texts for each prompt"
    )
    group.add_argument(
        "--batch-size", type=_POSITIVE, default=1, metavar="N", help="prompts at a time; default: %(default)s"
    )
    group.add_argument("--json", action="store_true", help="print JSON, one object a line, instead of the texts")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write JSON Lines to FILE when all texts are there; until then they are in FILE.part",
    )
    group.add_argument("--resume", action="store_true", help="go on with the FILE.part of an interrupted run")
    group.add_argument("--force", action="store_true", help="replace FILE and what is left of an interrupted run")


def _add_chat(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser(
        "chat",
        parents=parents,
        help="talk to a saved chat model",
        description="Load the model and tokenizer of a folder and talk to it; /help lists the commands. Ctrl-C stops "
        "an answer, Ctrl-D (or Ctrl-C twice at the prompt) leaves. Nothing is written to disk but with --history and "
        "/save.",
        epilog="Where standard input is not a terminal, each of its lines is a message of one conversation, and only "
        "the answers are printed. One message of several lines: zaya generate PATH --chat --prompt-file FILE.",
    )
    chat.add_argument(
        "--history", type=Path, metavar="FILE", help="go on with the conversation in FILE (JSON) and keep it there"
    )
    chat.add_argument(
        "--show-thinking",
        action=argparse.BooleanOptionalAction,
        help="print the model's thinking; default: only on a terminal, dimmed",
    )
    chat.add_argument("--json", action="store_true", help="print one JSON object a line for each answer")


def _add_bench(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", parents=parents, help="what the kernels take of a GPU")
    benches = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    kernels = benches.add_parser(
        "kernels",
        parents=parents,
        help="compile every Triton kernel for AMD and NVIDIA GPUs that need not be there",
        description="Compile every Triton kernel, at the sizes of ZAYA1-8B and with every configuration that may be "
        "chosen for it, and print what it takes: registers, spills, shared memory, matrix instructions, waves; bytes "
        "and operations by formula, and the time that the chip's measured ceilings allow. The exit code is 1 if a "
        "kernel is over a limit. Needs no GPU.",
    )
    kernels.add_argument("--compile-only", action="store_true", help="do not run the kernels")
    kernels.add_argument(
        "--target", choices=BENCH_TARGETS, action="append", help="a GPU to compile for; repeatable; default: all"
    )
    kernels.add_argument(
        "--operator", action="append", metavar="NAME", help="an operator of zaya_hf.ops; repeatable; default: all"
    )
    kernels.add_argument(
        "--dtype", choices=BENCH_DTYPES, action="append", help="of the tensors; repeatable; default: bf16 and fp32"
    )
    kernels.add_argument("--json", metavar="FILE", help="write JSON; - prints it instead of the table")
    kernels.add_argument("--html", type=Path, metavar="FILE", help="write a page with rooflines and the table")
    kernels.add_argument("--jobs", type=_POSITIVE, metavar="N", help="processes; default: one per core, up to eight")


def _add_train(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        parents=parents,
        help="train a model as a settings file says, in one process or several",
        description="Train as CONFIG says and write everything to the folder that it names (out). The same command "
        "again goes on from the newest checkpoint. SIGTERM, SIGUSR1 and Ctrl-C save and stop.",
        epilog="Settings: zaya_hf/training/config.py; recipes and several machines: train/README.md.",
    )
    train.add_argument(
        "config", metavar="CONFIG", help="YAML file of settings, or the name of a recipe of zaya_hf, such as cpu-small"
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings to change, such as optimizer.lr=1e-3 or data.sources.0.path=texts.jsonl; values are YAML",
    )
    train.add_argument(
        "--show",
        action="store_true",
        help="print all settings, numbers of parameters, FLOPs and memory, and train nothing",
    )
    train.add_argument("--processes", type=_POSITIVE, metavar="N", help="on this machine, one per GPU; default: 1")
    train.add_argument(
        "--accelerate-config",
        type=Path,
        metavar="FILE",
        help="start the processes by `accelerate launch` with this file; default: by zaya itself",
    )


def _add_data(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    data = commands.add_parser("data", parents=parents, help="prepare text for training")
    actions = data.add_subparsers(dest="action", metavar="WHAT", required=True)
    build = actions.add_parser(
        "build",
        parents=parents,
        help="tokenise text into files of tokens that training maps into memory",
        description="Tokenise the documents of all SOURCES and write them to one folder of tokens, which `zaya train` "
        "takes as a source. The folder is the same for any number of processes.",
    )
    build.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="file, folder, glob pattern in quotes, or hub id of a dataset"
    )
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    build.add_argument("--tokenizer", required=True, metavar="PATH", help="folder or hub id of the tokenizer")
    build.add_argument(
        "--processes", type=_POSITIVE, default=os.cpu_count() or 1, metavar="N", help="default: one per core"
    )
    group = build.add_argument_group("what the sources are")
    group.add_argument("--kind", choices=SOURCE_KINDS, default="auto", help="default: by the names of the files")
    group.add_argument(
        "--field", metavar="NAME", help="of a record: its text (default: text), with --chat its messages (messages)"
    )
    group.add_argument("--split", default="train", metavar="NAME", help="of a hub dataset; default: %(default)s")
    group.add_argument("--subset", metavar="NAME", help="configuration of a hub dataset")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub dataset")
    group = build.add_argument_group("conversations")
    group.add_argument("--chat", action="store_true", help="records are conversations: use the chat template")
    group.add_argument(
        "--train-on", choices=TRAIN_ON, default="assistant", help="which turns are targets; default: %(default)s"
    )
    group.add_argument(
        "--max-length",
        type=_POSITIVE,
        metavar="N",
        help="tokens of a conversation; longer ones are shortened by AP-trimming",
    )
    group.add_argument("--no-trim-thinking", action="store_true", help="leave longer ones out instead")

    show = actions.add_parser(
        "show", parents=parents, help="what is in a folder of tokens", description="Describe a folder of tokens."
    )
    show.add_argument("path", type=Path, metavar="FOLDER")


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
        description="ZAYA1 models in transformers: check an installation, generate text, chat, train and compare small "
        "ones.",
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"zaya_hf {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_bench(commands, [common])

    doctor = commands.add_parser(
        "doctor", parents=[common], help="what is installed here, what will run, and what is missing"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    _add_generate(commands, [common, _model_options(), _sampling_options("default: 128, or what fits")])
    _add_chat(commands, [common, _model_options(), _sampling_options("default: to the end of the context")])

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

    _add_train(commands, [common])
    _add_data(commands, [common])

    report = commands.add_parser(
        "report",
        parents=[common],
        help="the report page of a training run, of several side by side, or of a quickstart",
        description="Write a page about the training run in the folder PATH, or about several side by side. Of a "
        "quickstart's results, report.html is built again from the figures alone.",
    )
    report.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="folder of a run, or of a quickstart's results"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="the page; default: report.html in the (first) folder")
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
    args, left = parser.parse_known_args(argv)
    if args.command == "train":  # argparse takes no more KEY=VALUE once an option stood between them
        args.overrides += [argument for argument in left if not argument.startswith("-")]
        left = [argument for argument in left if argument.startswith("-")]
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
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


if __name__ == "__main__":
    sys.exit(main())
