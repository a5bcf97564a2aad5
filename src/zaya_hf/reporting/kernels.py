"""The page of `zaya bench kernels`: a roofline for each target, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from zaya_hf.reporting.formats import joined
from zaya_hf.reporting.page import render
from zaya_hf.reporting.roofline import Mark, Roof, roofline_chart
from zaya_hf.reporting.svg import SLOTS


def page(table: dict[str, Any]) -> str:
    """The HTML page of a table of `zaya_hf.kernel_table.build`."""
    rows = table["rows"]
    slots = {name: index % SLOTS for index, name in enumerate(dict.fromkeys(row["operator"] for row in rows))}
    targets = []
    for arch, about in table["targets"].items():
        found = [row for row in rows if row["target"] == arch]
        targets.append(
            {
                "arch": arch,
                "name": about["name"],
                "units": about["units"],
                "lds_bytes": about["lds_bytes"],
                "chart": Markup(_roofline(arch, about, found, slots)),
                "hollow": len({row["dtype"] for row in found if row["flops"]}) > 1,
                "unmarked": len({_kernel(row) for row in found if not row["flops"]}),
                "operators": [
                    (operator, [_workload(list(of_kernel)) for _, of_kernel in groupby(of_operator, key=_kernel)])
                    for operator, of_operator in groupby(found, key=lambda row: row["operator"])
                ],
            }
        )
    return render(
        "kernels.html.jinja",
        targets=targets,
        note=table["note"],
        versions=[(name, version) for name, version in table["versions"].items() if version],
        kernels=len({(row["operator"], row["kernel"]) for row in rows}),
        rows=len(rows),
        over=table["over_limits"],
    )


def _kernel(row: dict[str, Any]) -> tuple[str, ...]:
    return row["operator"], row["kernel"], row["size"], row["dtype"]


def _workload(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**rows[0], "rows": rows, "gigaflops": rows[0]["flops"] / 1e9}


def _roofline(arch: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], slots: dict[str, int]) -> str:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    rates: dict[float, list[str]] = {}
    for dtype in dtypes or list(about["flops"]):
        rates.setdefault(about["flops"][dtype], []).append(dtype)
    marks = []
    for row in {_kernel(row): row for row in rows if row["flops"]}.values():
        attainable = min(row["flops_per_byte"] * about["bytes_per_second"], about["flops"][row["dtype"]])
        hollow = row["dtype"] != dtypes[0]
        marks.append(Mark(row["operator"], row["flops_per_byte"], attainable / 1e12, slots[row["operator"]], hollow))
    bandwidth = about["bytes_per_second"] / 1e12
    return roofline_chart(
        f"roofline-{arch.replace('_', '')}",
        [Roof(joined(names), rate / 1e12) for rate, names in sorted(rates.items(), reverse=True)],
        marks,
        terabytes_per_second=bandwidth,
        description=f"Roofline of {about['name']}: {bandwidth:.3g} TB/s of memory, products of "
        + joined([f"{joined(names)} {rate / 1e12:.3g} TFLOP/s" for rate, names in rates.items()])
        + f"; {len(marks)} kernels on it",
    )
