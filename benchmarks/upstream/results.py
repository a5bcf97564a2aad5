"""Entries of the result: times, ratios, what was aimed at; and the table."""

from __future__ import annotations

import fnmatch
from typing import Any

from .timing import Times

#: (name, dtype or None) -> what a full run at 8B widths aims at; the first that fits counts. Every row's ratio is to be
#: at least 1: no row slower than the stock class.
_TARGETS: list[tuple[str, str | None, dict[str, float]]] = [
    ("*-as-loaded", None, {}),
    ("decode-1", "fp32", {"ratio": 1.4, "share_of_floor": 0.85}),
    ("decode-1", "bf16", {"ratio": 2.0, "share_of_floor": 0.85}),
    ("decode-8", "fp32", {"ratio": 1.5, "share_of_floor": 0.85}),
    ("decode-8", "bf16", {"ratio": 2.0, "share_of_floor": 0.85}),
    ("prefill-*-chunks-*", None, {}),
    ("prefill-*", "fp32", {"share_of_floor": 0.95}),
    ("prefill-*", "bf16", {"ratio": 1.5}),
    ("ragged-packed", None, {"ratio": 2.5}),
    ("train-ragged-packed", None, {"ratio": 3.0}),
    ("train-1x*-checkpointed", None, {}),
    ("train-1x*", None, {"ratio": 1.8}),
    ("peak-train-*", None, {"ratio": 2.0}),
]


def target(name: str, size: str, dtype: str) -> dict[str, float]:
    """Least values of fields of a row in a full run."""
    found = {"ratio": 1.0}
    if size == "8b":
        for pattern, only, aims in _TARGETS:
            if fnmatch.fnmatchcase(name, pattern) and only in (None, dtype):
                return found | aims
    return found


def timed_fields(times: dict[str, Times], weight_bytes: float | None, bandwidth: float, scale: float) -> dict[str, Any]:
    """Fields of a row that was timed.

    Args:
        times: of "ours", and of "stock" and "floor" where there are such.
        weight_bytes: that the row must read; None if that says nothing.
        bandwidth: bytes per second.
        scale: of the floor's time, for products that were not run themselves.
    """
    fields: dict[str, Any] = {}
    for side in ("ours", "stock"):
        if side in times:
            fields[f"{side}_ms"] = _digits(times[side].median * 1e3)
            fields[f"{side}_min_ms"] = _digits(times[side].least * 1e3)
    if not fields:
        return fields
    fields["samples"] = len(times["ours"].samples)
    if "stock" in times:
        fields["ratio"] = round(fields["stock_ms"] / fields["ours_ms"], 3)
    if "floor" in times:
        fields["floor_ms"] = _digits(times["floor"].median * scale * 1e3)
        fields["share_of_floor"] = round(fields["floor_ms"] / fields["ours_ms"], 3)
    if weight_bytes is not None:
        fields["weight_mib"] = round(weight_bytes / 2**20, 1)
        fields["bandwidth_share"] = round(weight_bytes / (fields["ours_ms"] / 1e3) / bandwidth, 3)
    return fields


def with_target(entry: dict[str, Any], aims: dict[str, float]) -> dict[str, Any]:
    """The entry with what was aimed at, as far as it has such fields, and whether it was met."""
    if aims and "exponents" in entry:
        largest = max(found["all"] for found in entry["exponents"].values())
        return entry | {"target": {"largest_exponent": LARGEST_EXPONENT}, "met": largest <= LARGEST_EXPONENT}
    aims = {field: least for field, least in aims.items() if field in entry}
    if not aims:
        return entry
    met = not failed(entry) and all(entry[field] >= least for field, least in aims.items())
    return entry | {"target": aims, "met": met}


def failed(entry: dict[str, Any]) -> bool:
    return bool(entry["check"].startswith("failed"))


#: of the growth of a step's or chunk's time with the context: attention over all of it is linear; above 1 because the
#: keys and values fall out of the processor's cache meanwhile
LARGEST_EXPONENT = 1.15
_COLUMNS = ("ours", "stock", "ratio", "floor", "of floor", "of bandwidth", "aim")


def table(result: dict[str, Any]) -> str:
    """The rows for reading: milliseconds (or MiB), ratios, shares; a failed check in full below its row."""
    machine = result["machine"]
    rates = ", ".join(f"{name} {rate} GFLOP/s" for name, rate in machine["gemm_gflop_per_s"].items())
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['versions']['torch']}, transformers "
        f"{machine['versions']['transformers']}; memory {machine['bandwidth_gb_per_s']} GB/s, products {rates}",
    ]
    group = None
    width = max((len(row["name"]) for row in result["rows"]), default=0)
    for row in result["rows"]:
        if group != (row["size"], row["dtype"]):
            group = (row["size"], row["dtype"])
            lines += ["", f"{' '.join(group):{width}} " + "".join(f"{name:>14}" for name in _COLUMNS)]
        lines.append(f"{row['name']:{width}} " + "".join(f"{cell:>14}" for cell in _cells(row)))
        lines += [f"    {row['check']}"] if failed(row) else []
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if "exponents" in row:
        cells = [f"{kind} {found['all']}" for kind, found in row["exponents"].items()]
        return [*cells, *[""] * 4, {True: "met", False: "missed", None: ""}[row.get("met")]]
    if "bytes_per_token" in row:
        return [f"{row['bytes_per_token']:g} B", f"formula {row['bytes_per_token_formula']}"]
    unit = "mib" if "ours_mib" in row else "ms"
    numbers = [row.get(f"ours_{unit}"), row.get(f"stock_{unit}"), row.get("ratio"), row.get("floor_ms")]
    numbers += [row.get("share_of_floor"), row.get("bandwidth_share")]
    cells = ["" if number is None else f"{number:.4g}" for number in numbers]
    if unit == "mib":
        cells[0], cells[1] = f"{numbers[0]} MiB", f"{numbers[1]} MiB"
    return [*cells, {True: "met", False: "missed", None: ""}[row.get("met")]]


def _digits(number: float) -> float:
    """Five significant digits."""
    return float(f"{number:.5g}")
