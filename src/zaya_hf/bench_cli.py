"""`zaya bench`: what the kernels take of the GPUs that they are made for."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zaya_hf import atomic, kernel_table
from zaya_hf.ops.common.targets import TARGETS

_WIDTH = 160
#: of the first column, however wide the others are
_LEAST_NAME = 30
_COLUMNS = (
    "VGPR",
    "AGPR",
    "SGPR",
    "spills",
    "scratch",
    "LDS",
    "MMA",
    "wide",
    "KiB",
    "w/SIMD",
    "w/CU",
    "programs",
    "fill",
)
_KEY = (
    "LDS, scratch: bytes. spills: vector/scalar registers. MMA: matrix instructions in the code. wide: loads of 16 "
    "bytes per thread, of all.",
    "KiB: of code. w/SIMD: waves that registers allow; w/CU: with LDS. fill: share of the units busy while the "
    "programs run, each unit one at a time.",
    "w, s, e, i of a configuration: waves, stages, waves per SIMD asked for, rows of a matrix instruction.",
)


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya bench kernels`; `args` has compile_only, target, operator, dtype, json, html, jobs. Returns 1 if
    a kernel is over a limit.

    Raises:
        ValueError: an unknown operator, timing asked for, nothing to compile with, a package missing.
        OSError: a file cannot be written.
    """
    if not args.compile_only:
        raise ValueError(_why_not_timed())
    kernel_table.check_can_compile()
    there = kernel_table.operators()
    unknown = [name for name in args.operator or () if name not in there]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no operator with kernels: {', '.join(there) or 'there is none'}")
    files = {"json": None if args.json in (None, "-") else Path(args.json), "html": args.html}
    for option, path in files.items():  # before minutes of compiling
        if path is not None and path.is_dir():
            raise ValueError(f"--{option} {path}: it is a folder")
        if path is not None:
            folder = next(above for above in path.absolute().parents if above.exists())  # the others are made
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ValueError(f"--{option} {path}: nothing can be written to {folder}")
    if args.html is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--html needs matplotlib, which is not installed (pip install zaya_hf[eval])")
    dtypes = tuple(dict.fromkeys(args.dtype or kernel_table.USUAL_DTYPES))
    archs = tuple(dict.fromkeys(args.target or TARGETS))
    names = tuple(dict.fromkeys(args.operator or there))
    table = kernel_table.build(kernel_table.jobs(names, dtypes, archs), args.jobs)
    return report(table, to_standard_output=args.json == "-", **files)


def report(table: dict[str, Any], to_standard_output: bool, json: Path | None, html: Path | None) -> int:
    """Print and write a table of `kernel_table.build`.

    Args:
        to_standard_output: print JSON, not the table for reading.
        json, html: files to write.

    Returns:
        exit code: 1 if a row is over a limit; those are named on standard error.
    """
    if json is not None:
        atomic.write_json(json, table)
    if html is not None:
        atomic.write_text(html, importlib.import_module("zaya_hf.reporting.kernels").page(table))
    print(_as_json(table) if to_standard_output else text(table))
    over = [found for found in table["rows"] if found["over"]]
    for found in over:
        print(f"over its limits: {name_of(found)}: {'; '.join(found['over'])}", file=sys.stderr)
    return 1 if over else 0


def name_of(row: dict[str, Any]) -> str:
    """A row in words."""
    return f"{row['target']} {row['operator']}, {row['kernel']}, {row['size']}, {row['dtype']}, {row['config']}"


def text(table: dict[str, Any]) -> str:
    """The table for reading, at most 160 columns wide: a line for each kernel and size with what it has to read,
    write and multiply, and below it a line for each configuration with what it is compiled to."""
    rows = table["rows"]
    if not rows:
        return "no kernels"
    names = [_kernel(row) for row in rows] + [f"  {row['config']}" for row in rows]
    cells = [_cells(row) for row in rows]
    widths = [max(len(name), *(len(row[place]) for row in cells)) for place, name in enumerate(_COLUMNS)]
    room = _WIDTH - sum(widths) - 2 * len(widths)
    first = min(max(_LEAST_NAME, room), max(map(len, names)))
    head = _line("", first, _COLUMNS, widths)
    lines = []
    for arch, of_target in groupby(zip(rows, cells, strict=True), key=lambda pair: pair[0]["target"]):
        lines += ["", *_about_target(arch, table["targets"][arch]), "", head]
        for operator, of_operator in groupby(of_target, key=lambda pair: pair[0]["operator"]):
            lines += ["", operator]
            for name, of_kernel in groupby(of_operator, key=lambda pair: _kernel(pair[0])):
                found = list(of_kernel)
                lines.append(f"{_cut(name, first):{first}}  {_formula(found[0][0])}"[:_WIDTH])
                for row, row_cells in found:
                    lines.append(_line(f"  {row['config']}", first, row_cells, widths))
                    lines += [f"    ! {limit}"[:_WIDTH] for limit in row["over"]]
    kernels = len({(row["operator"], row["kernel"]) for row in rows})
    over = table["over_limits"]
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items() if version)
    lines += ["", *_KEY, ""]
    lines += [f"{kernels} kernels, {len(rows)} rows, {over or 'none'} over a limit: {table['note']}. {versions}"]
    return "\n".join(lines[1:])


def _about_target(arch: str, target: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in target["flops"].items())
    return [
        f"{arch} ({target['name']}): {target['units']} units, {target['lds_bytes']:,} bytes of LDS, measured ceilings "
        f"{target['bytes_per_second'] / 1e12:.1f} TB/s and TFLOP/s of {rates}"
    ]


def _kernel(row: dict[str, Any]) -> str:
    name = row["kernel"].removeprefix(row["operator"]).strip(" :,") or row["kernel"]
    return f"{name}, {row['size']}, {row['dtype']}"


def _formula(row: dict[str, Any]) -> str:
    products = f", {_short(row['flops'] / 1e9)} GFLOP, {row['flops_per_byte']:g} FLOP/B" if row["flops"] else ""
    return f"{_short(row['bytes'] / 1e6)} MB{products}: {_short(row['floor_us'])} us by {row['bound_by']}"


def _cells(row: dict[str, Any]) -> list[str]:
    facts = row["facts"]
    if facts is None:
        return ["-"] * 11 + [str(row["programs"]), f"{row['fill']:.2f}"]
    spills = [facts["vgpr_spills"], facts["sgpr_spills"]]
    shown = "0" if not any(spills) else "/".join(map(_known, spills))
    return [
        *(_known(facts[name]) for name in ("vgprs", "agprs", "sgprs")),
        "-" if spills == [None, None] else shown,
        _known(facts["scratch_bytes"]),
        str(facts["lds_bytes"]),
        str(facts["matrix_instructions"]),
        f"{facts['wide_loads']}/{facts['loads']}",
        f"{facts['code_bytes'] / 1024:.1f}",
        _known(facts["waves_per_simd"]),
        _known(facts["waves_per_unit"]),
        str(row["programs"]),
        f"{row['fill']:.2f}",
    ]


def _line(name: str, first: int, cells: tuple[str, ...] | list[str], widths: list[int]) -> str:
    columns = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{_cut(name, first):{first}}  {columns}"[:_WIDTH].rstrip()


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def _short(number: float) -> str:
    """Three digits, without a power of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _as_json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False, allow_nan=False)


def _why_not_timed() -> str:
    script = "benchmarks/ops.py of the source tree times the kernels beside torch's operators"
    if torch.cuda.is_available():
        return f"{script}; zaya bench kernels --compile-only says what they are compiled to"
    return f"timing kernels needs a GPU, and torch sees none; with --compile-only they are compiled. On a GPU {script}"
