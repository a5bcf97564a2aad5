"""zaya_hf beside transformers' own `zaya`, in one run: speed, share of what the machine allows, and memory.

    python benchmarks/compare_upstream.py [--size 8b|quickstart] [--dtype fp32|bf16] [--rows GLOB] [--output FILE]

Both classes hold the same weights, drawn at random, in one process with the same threads. Before a row is timed, the
outputs of both sides are compared; a row where they differ says so, and the exit status is 1. Then both sides and the
row's own matrix products (its floor) take turns, and the medians count. `ratio` is stock's time over ours, so above 1
is faster; `share_of_floor` is the time of the products alone over ours; `bandwidth_share` is the rate at which ours
had to read weights over what the memory gives. The rows of size 8b have the widths of ZAYA1-8B with four layers and a
vocabulary of 32,768, those of peak memory one layer and the full vocabulary. One JSON object goes to standard output,
a table to standard error; a file is written only where --output says.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from upstream import checks, memory, results
from upstream.floors import Products
from upstream.long_context import LongContext
from upstream.pair import DTYPES, QUICK, SIDES, SIZES, Pair, Shapes, make_config
from upstream.rows import Row, rows
from upstream.timing import Work, alternate, machine, progress

from zaya_hf.atomic import write_json

_QUICK_SECONDS = 0.2


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="compare_upstream.py", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, action="append", help="widths (default: both); may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the weights (default: both); likewise")
    parser.add_argument("--rows", metavar="GLOB", action="append", help="only rows whose name fits; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    parser.add_argument("--layers", type=_from(int, 2), metavar="N", help="of the models (default: 4)")
    parser.add_argument("--quick", action="store_true", help="short inputs, few repeats; the numbers mean little")
    parser.add_argument("--seconds", type=_from(float, 0), metavar="S", help="per row and side (default: 3)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=_from(int, 1), default=cores, metavar="N", help="default: all cores")
    parser.add_argument("--seed", type=_from(int, 0), default=0, help="of weights and tokens (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there as well")
    parser.add_argument("--table", action="store_true", help="print the table to standard output in place of the JSON")
    parser.add_argument("--peak-child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--peak-kind", choices=memory.KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--peak-tokens", type=int, help=argparse.SUPPRESS)
    return parser


def _from(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least} up")
        return value

    parse.__name__ = "number"
    return parse


class Run:
    """One run of the benchmark: what was asked for, and what was measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.sizes = arguments.size or list(SIZES)
        self.dtypes = arguments.dtype or list(DTYPES)
        self.patterns = arguments.rows or ["*"]
        self.quick, self.layers, self.seed, self.threads = (
            arguments.quick,
            arguments.layers,
            arguments.seed,
            arguments.threads,
        )
        self.shapes = QUICK if self.quick else Shapes()
        seconds = _QUICK_SECONDS if self.quick else 3.0
        self.seconds = seconds if arguments.seconds is None else arguments.seconds
        self.rows = rows(self.shapes, self.shapes.lengths(self.seed))
        self.peaks = [memory.Peak(kind, self.shapes.peak) for kind in memory.KINDS]
        self.entries: list[dict[str, Any]] = []
        #: what is measured so far, for when the run is stopped
        output = arguments.output
        self.partial = None if output is None else output.with_name(f"{output.name}.partial")
        self.machine: dict[str, Any] = {}

    def selected(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def names(self) -> list[tuple[str, str, str]]:
        """(size, dtype, row) of everything that there is at the chosen sizes and dtypes."""
        found = []
        for size, dtype in itertools.product(self.sizes, self.dtypes):
            names = [row.name for row in self.rows] + [memory.Load.name]
            if dtype == "fp32":
                names += [peak.name for peak in self.peaks]
            if size == "quickstart":
                names += LongContext(self.shapes, dtype, self.seed).names()
            found += [(size, dtype, name) for name in names]
        return found

    def measure(self) -> dict[str, Any]:
        """The whole result."""
        self.machine = machine(self.quick)
        total = sum(self.selected(name) for _, _, name in self.names())
        with progress(total) as following:
            for size, dtype in itertools.product(self.sizes, self.dtypes):
                self._pair_rows(size, dtype, following)
                gc.collect()  # the models of one size and dtype are gone before the next are built
                if dtype == "fp32":
                    self._peak_rows(size, following)
                if size == "quickstart":
                    self._long_rows(dtype, following)
        return self._result(complete=True)

    def _result(self, complete: bool) -> dict[str, Any]:
        about = {"quick": self.quick, "seconds": self.seconds, "seed": self.seed, "rows_selected": self.patterns}
        return {"machine": self.machine, "run": about | {"complete": complete}, "rows": self.entries}

    def _add(self, size: str, dtype: str, name: str, what: str, fields: dict[str, Any]) -> None:
        comparable = not self.quick and (self.layers is None or size != "8b")
        entry = {"name": name, "size": size, "dtype": dtype, "what": what} | fields
        self.entries.append(results.with_target(entry, results.target(name, size, dtype) if comparable else {}))
        if self.partial is not None:
            with suppress(OSError):  # the result itself will say what is wrong there
                write_json(self.partial, self._result(complete=False))

    def _pair_rows(self, size: str, dtype: str, following: Callable[[str], None]) -> None:
        chosen = [row for row in self.rows if self.selected(row.name)]
        loads = self.selected(memory.Load.name)
        if not chosen and not loads:
            return
        pair = Pair(size, dtype, make_config(size, self.layers), self.seed)
        products = Products(pair.ours)
        for row in chosen:
            following(f"{size} {dtype} {row.name}")
            self._add(size, dtype, row.name, row.what, self._measure(row, pair, products))
            pair.drop_gradients()
        if loads:
            following(f"{size} {dtype} {memory.Load.name}")
            check, times = memory.Load().measure(pair, self.seconds)
            fields = self._timed(times) | {"check": check}
            self._add(size, dtype, memory.Load.name, memory.Load.what, fields)

    def _timed(self, times: dict[str, Any], weight_bytes: float | None = None, scale: float = 1.0) -> dict[str, Any]:
        return results.timed_fields(times, weight_bytes, self.machine["bandwidth_gb_per_s"] * 1e9, scale)

    def _measure(self, row: Row, pair: Pair, products: Products) -> dict[str, Any]:
        """Check, then time; a row whose sides cannot run is not timed."""
        training = row.way is None
        if training:
            pair.for_training(row.checkpointing)
        else:
            pair.for_inference(row.way)
        with torch.set_grad_enabled(training):
            check = checks.verdict(lambda: row.check(pair))
        try:
            with torch.no_grad():
                samples = row.calls(pair)
            with torch.set_grad_enabled(training):
                turn = itertools.cycle(samples)
                works = {side: row.work(pair, side) for side in SIDES}
                works["floor"] = Work(lambda: [products.run(call) for call in next(turn)])
                times = alternate(works, self.seconds)
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return {"check": check if check.startswith("failed") else reason}
        layers = row.products * sum(products.layer_flops(call) for call in samples[0])
        head = row.head_products * sum(products.head_flops(call) for call in samples[0])
        scale = (layers + head) / sum(products.layer_flops(call) + products.head_flops(call) for call in samples[0])
        weights = row.reads * sum(sum(map(products.weight_bytes, calls)) for calls in samples) / len(samples)
        hits = [len(loads) for calls in samples for call in calls for loads in call.loads]
        return self._timed(times, weights, scale) | {
            "experts_hit": round(sum(hits) / len(hits), 2),
            "check": check,
        }

    def _peak_rows(self, size: str, following: Callable[[str], None]) -> None:
        for peak in self.peaks:
            if self.selected(peak.name):
                following(f"{size} fp32 {peak.name}")
                try:
                    fields = peak.measure(Path(__file__), size, self.threads)
                except checks.Failed as error:
                    fields = {"check": f"failed: {error}"}
                self._add(size, "fp32", peak.name, peak.what, fields)

    def _long_rows(self, dtype: str, following: Callable[[str], None]) -> None:
        long = LongContext(self.shapes, dtype, self.seed)
        chosen = [name for name in long.names() if self.selected(name)]
        if not chosen:
            return
        with torch.no_grad():
            for found in long.measure(self.selected, self.seconds):
                following(f"long {dtype} {found['name']}")
                fields = self._timed(found.pop("times")) | {k: v for k, v in found.items() if k not in ("name", "what")}
                self._add("quickstart", dtype, found["name"], found["what"], fields)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # what the stock class warns of is known here
    torch.set_num_threads(arguments.threads)
    if arguments.peak_child:
        size = (arguments.size or SIZES)[0]
        print(json.dumps(memory.peak_of_child(arguments.peak_child, size, arguments.peak_kind, arguments.peak_tokens)))
        return 0
    if arguments.output and arguments.output.is_dir():
        parser.error(f"--output: {arguments.output} is a folder; give the name of a file")
    run = Run(arguments)
    names = dict.fromkeys(name for _, _, name in run.names())
    if arguments.list:
        print("\n".join(names))
        return 0
    for pattern in run.patterns:
        if not fnmatch.filter(names, pattern):
            parser.error(f"--rows: no row fits {pattern!r}; --list prints their names")
    result = run.measure()
    if arguments.table:
        print(results.table(result))
    else:
        print(json.dumps(result, indent=2))
        print(results.table(result), file=sys.stderr)
    if arguments.output:
        try:
            write_json(arguments.output, result)
            run.partial.unlink(missing_ok=True)
        except OSError as error:
            parser.exit(1, f"{parser.prog}: {arguments.output}: {error.strerror}\n")
    return int(any(results.failed(entry) for entry in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
