"""zaya_hf's operators beside stock code: ours, eager, torch.compile of it, and the floor of the machine.

    python benchmarks/ops.py [--device cpu] [--small] [--dtype bf16] [--operator NAME] [--output FILE]

Sizes are those of ZAYA1-8B, at the tokens of a training step and of decoding rows; --small takes narrow ones. Before an
operator is timed, its results and gradients are compared with its definition in float64; if they are farther off than
its dtype explains, it is not timed, and the exit status is 1. Then all sides take turns and the medians count: on a GPU
by its own clock, with its caches overwritten before each sample. The floor is the larger of the bytes that have to be
read and written over the rate of a copy, and the products over the rate of a large product, both measured in the same
process. `ratio_to_eager` above 1: ours is faster. Without a GPU ours are the CPU's own implementations: the JSON says
`"gpu": null`, and that no Triton kernel was timed. One JSON object goes to standard output, a table to standard error.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compare_upstream import OneLineParser, _from
from operators.cases import SMALL, Case, Widths, cases
from operators.measure import check, measure, passes
from upstream.checks import Failed
from upstream.timing import Work, machine, progress, sample

from zaya_hf import ops
from zaya_hf.atomic import write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NOT_TIMED = "no GPU: the Triton kernels have not been timed; ours are the implementations for CPUs"
_COLUMNS = ("ours", "eager", "compiled", "to eager", "to compiled", "floor", "of floor", "GB/s", "TFLOP/s")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="ops.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1; default: a GPU if any")
    parser.add_argument("--small", action="store_true", help="narrow widths and few tokens; the numbers mean little")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the tensors; may be repeated")
    parser.add_argument("--operator", choices=ops.OPERATORS, action="append", help="only these; may be repeated")
    parser.add_argument("--tokens", type=_from(int, 32), metavar="N", help="of a training step (default: 16384)")
    parser.add_argument("--rows", type=_from(int, 1), metavar="N", help="that decode (default: 64)")
    parser.add_argument("--seconds", type=_from(float, 0), metavar="S", help="per row and side (default: 1)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--threads", type=_from(int, 1), metavar="N", help="on a CPU (default: all cores)")
    parser.add_argument("--seed", type=_from(int, 0), default=0, help="of all numbers (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a check failed."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        parser.error(f"torch has no device {str(device)!r} here")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result = run(arguments, device)
    if arguments.output is not None:
        write_json(arguments.output, result)
    print(json.dumps(result, indent=2, allow_nan=False))
    print(table(result), file=sys.stderr)
    return 1 if any(row["check"].startswith("failed") for row in result["rows"]) else 0


def run(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What `main` prints."""
    small = arguments.small
    names = arguments.dtype or (["bf16"] if device.type == "cuda" else ["fp32", "bf16"])
    seconds = (0.2 if small else 1.0) if arguments.seconds is None else arguments.seconds
    tokens, rows = arguments.tokens or (512 if small else 16_384), arguments.rows or (8 if small else 64)
    rates = _rates(device, names, small)
    found: list[dict[str, Any]] = []
    wanted = []
    for name in names:
        for case in cases(SMALL if small else Widths(), tokens, rows, DTYPES[name], device):
            if not arguments.operator or case.operator in arguments.operator:
                wanted.append((name, case))
    with progress(len(wanted)) as following:
        for name, case in wanted:
            following(f"{case.operator} {name}")
            torch.manual_seed(arguments.seed)
            of_dtype = {"bytes": rates["bytes"], "flops": rates[name]}
            found += _rows(case, name, not arguments.no_compile, seconds, of_dtype, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    gpu = _gpu(device)
    return {
        "made_by": "benchmarks/ops.py",
        "gpu": gpu,
        "triton_kernels_timed": gpu is not None,
        "note": NOT_TIMED if gpu is None else "ours are the Triton kernels where a row's backend says triton",
        "machine": machine(small) if gpu is None else {"versions": machine(True)["versions"]},
        "rates": {name: float(f"{rate:.4g}") for name, rate in rates.items()},
        "rows": found,
    }


def _rows(
    case: Case, dtype: str, compiled: bool, seconds: float, rates: dict[str, float], device: torch.device
) -> list[dict[str, Any]]:
    backend, why = ops.backends(device)[case.operator]
    common = {"operator": case.operator, "size": case.size, "dtype": dtype, "backend": backend, "why": why}
    common["stock"] = case.stock
    try:
        seen = check(case)
    except Failed as failure:
        return [common | {"pass": "", "check": f"failed: {failure}"}]
    except Exception as error:  # an operator that cannot run is a result, and the others go on
        return [common | {"pass": "", "check": f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]}]
    rows = []
    for which in passes(case):
        entry = measure(case, which, compiled, seconds, rates, device)
        rows.append(common | {"pass": which, "check": seen} | entry)
    return rows


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    arch = getattr(about, "gcnArchName", "") if torch.version.hip else f"sm_{about.major}{about.minor}"
    versions = {"hip": torch.version.hip, "cuda": torch.version.cuda}
    return {"name": about.name, "arch": arch, "memory_gib": round(about.total_memory / 2**30, 1)} | versions


def _rates(device: torch.device, names: list[str], quick: bool) -> dict[str, float]:
    """Bytes per second of a copy (read and written), and operations per second of a large product in each dtype."""
    on_gpu = device.type == "cuda"
    size, width = (1 << 30, 8192) if on_gpu else (256 << 20, 2048)
    repeats = 20 if on_gpu else 3 if quick else 7

    def best(call: Any) -> float:
        def synchronised() -> None:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)

        return min(sample(Work(synchronised)) for _ in range(repeats + 1))

    large, other = (torch.ones(size // 4, device=device) for _ in range(2))
    found = {"bytes": 2 * size / best(lambda: other.copy_(large))}
    for name in names:
        # ones and zeros would flatter a GPU, whose clock depends on the bits that change
        a, b = (torch.randn(width, width, device=device).to(DTYPES[name]) for _ in range(2))
        with torch.no_grad():
            found[name] = 2 * width**3 / best(lambda a=a, b=b: ops.linear(a, b))
    return found


def table(result: dict[str, Any]) -> str:
    """The rows for reading: microseconds, ratios, shares."""
    gpu = result["gpu"]
    lines = [result["note"] if gpu is None else f"{gpu['name']} ({gpu['arch']})"]
    names = [f"{row['operator']}, {row['size']}, {row['dtype']}, {row['pass']}" for row in result["rows"]]
    width = max(map(len, names), default=0)
    lines.append(f"{'us':{width}}" + "".join(f"{name:>13}" for name in _COLUMNS))
    keys = ("ours_us", "eager_us", "compiled_us", "ratio_to_eager", "ratio_to_compiled", "floor_us", "share_of_floor")
    for name, row in zip(names, result["rows"], strict=True):
        if row["check"].startswith("failed"):
            lines.append(f"{name:{width}}  {row['check']}")
            continue
        cells = [row.get(key) for key in (*keys, "gb_per_s", "tflop_per_s")]
        lines.append(f"{name:{width}}" + "".join(f"{'' if cell is None else f'{cell:.4g}':>13}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
