"""The parser of all commands. Imports nothing but the standard library."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

from .argument_types import POSITIVE
from .evaluation_arguments import Forwarding, add_eval, add_lm_eval, add_report
from .generation_arguments import add_chat, add_generate, model_options, sampling_options
from .training_arguments import add_data, add_quickstart, add_train

# GPUs that kernels are compiled for, and dtypes of their tensors; keys of tables in the package.
BENCH_TARGETS = ("gfx942", "gfx950", "sm_90")
BENCH_DTYPES = ("bf16", "fp16", "fp32")


def version() -> str:
    """The installed version of zaya_hf, read from its metadata so that the package need not be imported."""
    try:
        return metadata.version("zaya_hf")
    except metadata.PackageNotFoundError:
        return "unknown (running from a source tree that is not installed)"


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
    kernels.add_argument("--jobs", type=POSITIVE, metavar="N", help="processes; default: one per core, up to eight")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Imports nothing but the standard library."""
    common = Forwarding(add_help=False)
    common.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,  # else the sub-parser's default overwrites a --debug before the command
        help="show the traceback of an error (or ZAYA_DEBUG=1)",
    )
    parser = Forwarding(
        prog="zaya",
        description="ZAYA1 models in transformers: check an installation, generate text, chat, train, evaluate and "
        "compare.",
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"zaya_hf {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_bench(commands, [common])

    doctor = commands.add_parser(
        "doctor", parents=[common], help="what is installed here, what will run, and what is missing"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")

    add_generate(commands, [common, model_options(), sampling_options("default: 128, or what fits")])
    add_chat(commands, [common, model_options(), sampling_options("default: to the end of the context")])

    add_quickstart(commands, [common])
    add_train(commands, [common])
    add_data(commands, [common])

    add_eval(commands, [common])
    add_lm_eval(commands)
    add_report(commands, [common])
    return parser
