"""`zaya bench kernels` with rows that were not compiled here: what is printed and written, and the exit codes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

import zaya_cli
from commands import error_line, zaya
from zaya_hf import bench_cli, kernel_table
from zaya_hf.ops.common.configs import config
from zaya_hf.ops.common.targets import TARGETS
from zaya_hf.ops.common.workloads import Workload

FACTS = {
    "vgprs": 120,
    "agprs": 16,
    "sgprs": 38,
    "vgpr_spills": 0,
    "sgpr_spills": 0,
    "scratch_bytes": 0,
    "lds_bytes": 32768,
    "threads": 512,
    "matrix": {"v_mfma_f32_16x16x16_bf16": 48},
    "matrix_instructions": 48,
    "loads": 7,
    "wide_loads": 6,
    "code_bytes": 4568,
    "waves_per_simd": 4,
    "waves_per_unit": 16,
}


def a_row(**changed: Any) -> dict[str, Any]:
    return {
        "target": "gfx942",
        "operator": "experts",
        "kernel": "experts forward: gate and up",
        "size": "16,384 tokens",
        "dtype": "bf16",
        "config": "M=128 N=128 K=32 w8 s2 i16",
        "blocks": {"BLOCK_M": 128},
        "options": {"num_warps": 8},
        "error": None,
        "over": [],
        "facts": FACTS,
        "programs": 4096,
        "fill": 0.963,
        "bytes": 218_000_000,
        "flops": 275_000_000_000,
        "flops_per_byte": 1260.0,
        "floor_us": 388.4,
        "bound_by": "products",
    } | changed


def a_table(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "made_by": "zaya bench kernels --compile-only",
        "format": 1,
        "gpu": None,
        "note": "compiled for these GPUs, not run on them",
        "versions": {"zaya_hf": "1.2.3", "torch": "2.13.0", "triton": "3.9.0"},
        "targets": {
            arch: kernel_table._described(TARGETS[arch]) for arch in dict.fromkeys(row["target"] for row in rows)
        },
        "rows": list(rows),
        "over_limits": sum(bool(row["over"]) for row in rows),
    }


GOOD = a_table(
    a_row(),
    a_row(config="M=64 N=64 K=32 w4 s2", facts=FACTS | {"vgprs": 64}),
    a_row(operator="router", kernel="router", flops=0, flops_per_byte=0.0, bound_by="memory", floor_us=4.0),
    a_row(target="sm_90", facts=FACTS | dict.fromkeys(("agprs", "sgprs", "sgpr_spills"))),
    a_row(target="sm_90", dtype="fp32", flops_per_byte=12.0),
)
BAD = a_table(
    a_row(),
    a_row(
        config="M=256 N=256 K=64 w4 s2",
        facts=FACTS | {"vgpr_spills": 7, "scratch_bytes": 32},
        over=["spills 7 vector and 0 scalar registers", "32 bytes of scratch memory"],
    ),
    a_row(
        config="M=96 w4 s2", facts=None, error="CompilationError: no", over=["does not compile: CompilationError: no"]
    ),
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiling gives GOOD; what was asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(kernel_table, "check_can_compile", lambda: None)
    monkeypatch.setattr(kernel_table, "operators", lambda: ("experts", "router"))
    monkeypatch.setattr(kernel_table, "jobs", lambda *arguments: arguments)
    monkeypatch.setattr(kernel_table, "build", lambda *arguments: asked.append(arguments) or copy.deepcopy(GOOD))
    return asked


COMMAND = ("bench", "kernels", "--compile-only")


# ------------------------------------------------------------------------------------------------------ what is asked
def test_all_is_compiled_unless_some_is_asked_for(capsys: pytest.CaptureFixture[str], compiled: list[Any]) -> None:
    code, out, err = zaya(capsys, *COMMAND)
    assert (code, err) == (0, "")
    assert out == bench_cli.text(GOOD) + "\n"
    assert compiled == [((("experts", "router"), ("bf16", "fp32"), tuple(TARGETS)), None)]


def test_some_can_be_asked_for_and_each_counts_once(capsys: pytest.CaptureFixture[str], compiled: list[Any]) -> None:
    chosen = ["--target", "sm_90", "--target", "gfx942", "--target", "sm_90", "--operator", "router", "--dtype", "fp16"]
    assert zaya(capsys, *COMMAND, *chosen, "--jobs", 3)[0] == 0
    assert compiled == [((("router",), ("fp16",), ("sm_90", "gfx942")), 3)]


def test_the_parser_knows_what_the_package_has() -> None:
    assert tuple(TARGETS) == zaya_cli.BENCH_TARGETS
    assert sorted(zaya_cli.BENCH_DTYPES) == sorted(kernel_table.DTYPES)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench"],
        ["bench", "nothing"],
        [*COMMAND, "--target", "gfx90a"],
        [*COMMAND, "--dtype", "fp64"],
        [*COMMAND, "--jobs", "0"],
        [*COMMAND, "--json"],
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = zaya(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "usage: zaya bench" in err


def test_an_unknown_operator_is_named(capsys: pytest.CaptureFixture[str], compiled: list[Any]) -> None:
    assert "'linear' is no operator with kernels: experts, router" in error_line(
        capsys, *COMMAND, "--operator", "linear"
    )
    assert not compiled


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_folder_is_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], compiled: list[Any], tmp_path: Path, option: str
) -> None:
    assert "it is a folder" in error_line(capsys, *COMMAND, option, tmp_path)
    assert not compiled
    (tmp_path / "file").write_text("")
    assert f"nothing can be written to {tmp_path / 'file'}" in error_line(
        capsys, *COMMAND, option, tmp_path / "file" / "deeper" / "out"
    )
    assert not compiled


def test_timing_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "timing kernels needs a GPU, and torch sees none" in error_line(capsys, "bench", "kernels")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "benchmarks/ops.py" in error_line(capsys, "bench", "kernels")


def test_interpreted_kernels_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "TRITON_INTERPRET is set" in error_line(capsys, *COMMAND)


def test_without_triton_it_is_said_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install zaya_hf[kernels]" in error_line(capsys, *COMMAND)


# ---------------------------------------------------------------------------------------------------- what comes out
def test_the_table_has_one_line_for_a_configuration() -> None:
    lines = bench_cli.text(GOOD).splitlines()
    assert max(map(len, lines)) <= 160
    (first,) = [line for line in lines if "M=64 N=64" in line]
    assert first.split()[-13:] == ["64", "16", "38", "0", "0", "32768", "48", "6/7", "4.5", "4", "16", "4096", "0.96"]
    heads = [line for line in lines if "scratch" in line and "VGPR" in line]
    assert len(heads) == 2
    assert heads[0].index("VGPR") + 4 == first.index("64", first.index("w4")) + 2
    assert [line.split(" ")[0] for line in lines if re.match(r"(gfx|sm)", line)] == ["gfx942", "sm_90"]
    formulas = [line for line in lines if " us by " in line]
    assert formulas[0].startswith("forward: gate and up, 16,384 tokens, bf16 ")
    assert formulas[0].endswith(" 218 MB, 275 GFLOP, 1260 FLOP/B: 388 us by products")
    assert formulas[1].endswith(" 218 MB: 4 us by memory")
    assert lines[-1].startswith("2 kernels, 5 rows, none over a limit: compiled for these GPUs, not run on them.")


def test_what_is_not_known_is_a_dash() -> None:
    (line,) = [line for line in bench_cli.text(GOOD).splitlines() if re.search(r"120 +- +-", line)]
    assert line.split()[-13:-8] == ["120", "-", "-", "0", "0"]


def test_long_names_do_not_widen_the_table() -> None:
    long = a_row(kernel="k" * 200, size="s" * 50, config="c" * 200, over=["o" * 300])
    assert max(map(len, bench_cli.text(a_table(long)).splitlines())) <= 160


def test_no_kernels() -> None:
    assert bench_cli.text(a_table()) == "no kernels"


def test_rows_over_their_limits_are_named_and_fail(
    capsys: pytest.CaptureFixture[str], compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_table, "build", lambda *_: BAD)
    code, out, err = zaya(capsys, *COMMAND)
    assert code == 1
    assert err.splitlines() == [
        "over its limits: gfx942 experts, experts forward: gate and up, 16,384 tokens, bf16, M=256 N=256 K=64 w4 s2: "
        "spills 7 vector and 0 scalar registers; 32 bytes of scratch memory",
        "over its limits: gfx942 experts, experts forward: gate and up, 16,384 tokens, bf16, M=96 w4 s2: "
        "does not compile: CompilationError: no",
    ]
    assert "    ! 32 bytes of scratch memory\n" in out
    assert " 7/0 " in out
    assert "2 over a limit" in out


def test_json_is_printed_or_written(capsys: pytest.CaptureFixture[str], compiled: list[Any], tmp_path: Path) -> None:
    assert json.loads(zaya(capsys, *COMMAND, "--json", "-")[1]) == GOOD
    file = tmp_path / "new" / "kernels.json"
    code, out, _ = zaya(capsys, *COMMAND, "--json", file)
    assert (code, out) == (0, bench_cli.text(GOOD) + "\n")
    assert json.loads(file.read_text(encoding="utf-8")) == GOOD
    assert [path.name for path in file.parent.iterdir()] == ["kernels.json"]


def test_the_page_is_one_file_with_a_roofline_for_each_target(
    capsys: pytest.CaptureFixture[str], compiled: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "kernels.html"
    assert zaya(capsys, *COMMAND, "--html", file)[0] == 0
    page = file.read_text(encoding="utf-8")
    assert re.findall(r'<svg [^>]*id="([^"]+)"', page) == ["roofline-gfx942", "roofline-sm90"]
    assert "Roofline of MI300X: 4.2 TB/s of memory, products of bf16 708 TFLOP/s; 1 kernels on it" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert page.count("<tr><td>") == 5
    assert page.count("1 without products are not marked") == 1


def test_the_page_marks_rows_over_their_limits(tmp_path: Path) -> None:
    assert bench_cli.report(BAD, to_standard_output=True, json=None, html=tmp_path / "k.html") == 1
    page = (tmp_path / "k.html").read_text(encoding="utf-8")
    assert page.count('<tr class="over">') == 2
    assert "32 bytes of scratch memory" in page


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    row = a_row(kernel="<b>&", config="<i>", over=["<u>"])
    bench_cli.report(a_table(row), to_standard_output=True, json=None, html=tmp_path / "k.html")
    page = (tmp_path / "k.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;" in page
    assert not re.search(r"<[biu]>", page)


# ---------------------------------------------------------------------------------------------------------- the rows
@pytest.mark.parametrize(
    ("changed", "limits"),
    [
        ({}, []),
        ({"vgpr_spills": 2, "sgpr_spills": None}, ["spills 2 vector and 0 scalar registers"]),
        ({"sgpr_spills": 5}, ["spills 0 vector and 5 scalar registers"]),
        ({"vgpr_spills": None, "scratch_bytes": 8}, ["8 bytes of scratch memory"]),
        ({"lds_bytes": 65536}, []),
        ({"lds_bytes": 65537}, ["65,537 bytes of shared memory, of 65,536"]),
        ({"threads": 2048}, ["2,048 threads, of 1,024"]),
        ({"matrix_instructions": 0}, ["products, and no matrix instruction"]),
    ],
)
def test_limits(changed: dict[str, Any], limits: list[str]) -> None:
    workload = Workload("k", "s", "bf16", (), lambda config: None, 1.0, 1.0)
    assert kernel_table.violations(FACTS | changed, workload, TARGETS["gfx942"]) == limits


@pytest.mark.parametrize(
    ("arch", "dtype", "flops", "needed"),
    [
        ("gfx942", "bf16", 0.0, False),
        ("gfx942", "fp32", 1.0, True),
        ("sm_90", "fp32", 1.0, False),
        ("sm_90", "fp16", 1.0, True),
    ],
)
def test_where_a_matrix_instruction_is_needed(arch: str, dtype: str, flops: float, needed: bool) -> None:
    workload = Workload("k", "s", dtype, (), lambda config: None, 1.0, flops)
    found = kernel_table.violations(FACTS | {"matrix_instructions": 0}, workload, TARGETS[arch])
    assert bool(found) == needed


def test_configurations_are_named_in_few_characters() -> None:
    assert kernel_table.label(config(BLOCK_M=64, K=32)) == "M=64 K=32 w4 s1"
    assert kernel_table.label(config(8, 2, 1, 16, BLOCK_M=64)) == "M=64 w8 s2 e1 i16"


def test_rows_are_in_the_order_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def workloads(operator: str, dtype: str) -> list[Workload]:
        return [Workload(operator, dtype, dtype, (config(M=1), config(M=2)), lambda _: None, 1.0)] * 2

    monkeypatch.setattr(kernel_table, "workloads", workloads)
    found = kernel_table.jobs(["a", "b"], ["fp32"], ["sm_90", "gfx942"])
    assert found[:4] == [("a", "fp32", index, place, "sm_90") for index in (0, 1) for place in (0, 1)]
    assert [job.operator for job in found] == ["a"] * 4 + ["b"] * 4 + ["a"] * 4 + ["b"] * 4
    assert len(set(found)) == 16
