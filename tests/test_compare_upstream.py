"""The benchmark beside transformers' own class: what it prints and refuses, and that a wrong side is found out.

No time is asserted: the rows run at the quickstart's widths, on inputs of a few dozen tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zaya_hf import ZayaForCausalLM

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = ["--size", "quickstart", "--quick", "--seconds", "0", "--threads", "1", "--layers", "2"]
TIMED = {"ours_ms", "ours_min_ms", "stock_ms", "stock_min_ms", "samples", "ratio"}
WITH_FLOOR = TIMED | {"floor_ms", "share_of_floor", "bandwidth_share", "weight_mib", "experts_hit"}


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module, imported as `python benchmarks/compare_upstream.py` would find its parts."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import compare_upstream

        yield compare_upstream
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _leaves_threads_alone():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(benchmark, capsys, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, standard error."""
    status = benchmark.main([*SMALL, *arguments])
    output = capsys.readouterr()
    return status, json.loads(output.out), output.err


def test_rows_of_each_kind(benchmark, capsys, tmp_path):
    patterns = ["prefill-1x48", "prefill-*-chunks-*", "ragged-packed", "decode-4", "generate-*", "train-ragged-packed"]
    chosen = [argument for pattern in patterns for argument in ("--rows", pattern)]
    file = tmp_path / "made" / "result.json"
    status, result, table = run(benchmark, capsys, "--dtype", "fp32", *chosen, "--output", str(file))
    assert status == 0
    assert result == json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [
        "prefill-1x48",
        "prefill-1x128-chunks-of-32",
        "ragged-packed",
        "decode-4",
        "generate-8",
        "train-ragged-packed",
    ]
    for name, row in rows.items():
        assert row["check"].startswith("ok: "), row
        assert row.keys() >= WITH_FLOOR | {"name", "size", "dtype", "what"}
        assert "target" not in row, "a quick run has none"
        assert row["ratio"] == pytest.approx(row["stock_ms"] / row["ours_ms"], rel=2e-3, abs=1e-3)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ours_ms"], rel=2e-3, abs=1e-3)
        assert row["ours_min_ms"] <= row["ours_ms"]
        assert row["stock_min_ms"] <= row["stock_ms"]
        assert 1 <= row["experts_hit"] <= 8
        assert name in table
    assert result["machine"]["threads"] == 1
    row, bandwidth = rows["decode-4"], result["machine"]["bandwidth_gb_per_s"] * 1e9
    share = row["weight_mib"] * 2**20 / (row["ours_ms"] / 1e3) / bandwidth
    assert row["bandwidth_share"] == pytest.approx(share, rel=0.05, abs=1e-3)


def test_floor_counts_every_product_once(benchmark):
    from upstream.floors import Products, make_call
    from upstream.pair import Pair, make_config

    pair = Pair("quickstart", "fp32", make_config("quickstart", layers=2), 0)
    config, products = pair.config, Products(pair.ours)
    slots = torch.tensor([[0, 8], [3, 8], [3, 1]])  # 8 is the skip slot
    call = make_call(slots, [(0, 3)], head_rows=1, num_experts=8)
    assert call.loads == (((0, 1), (3, 2)), ((1, 1),))
    expert = 3 * config.moe_intermediate_size * config.hidden_size
    matrices = ("q_proj", "k_proj", "v_proj_", "o_proj", "conv_qk_grouped", "gate.down_proj", "fc1", "fc2", "out_proj")
    always = sum(
        parameter.numel()
        for name, parameter in pair.ours.named_parameters()
        if parameter.ndim > 1 and any(part in name for part in matrices)
    )
    attention = 2 * 2 * (1 + 2 + 3) * config.num_attention_heads * config.head_dim  # two products, two layers
    assert products.layer_flops(call) == 2 * (3 * always + attention + 4 * expert)
    head = config.vocab_size * config.hidden_size
    assert products.head_flops(call) == 2 * head
    assert products.weight_bytes(call) == 4 * (always + 3 * expert + head)
    products.run(call)


@pytest.mark.slow
def test_bf16_load_peak_and_long_context(benchmark, capsys):
    status, result, table = run(
        benchmark, capsys, "--dtype", "bf16", "--rows", "ragged-padded", "--rows", "load", "--rows", "long-*"
    )
    assert status == 0, table
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["load"].keys() >= TIMED
    assert "distance from fp32" in rows["ragged-padded"]["check"]
    cache = rows["long-cache-at-1024"]
    assert (
        cache["bytes_per_token"] == cache["bytes_per_token_formula"] == 2 * 2 * 24 * 2 * 2
    )  # k and v, G, D, bf16, layers
    assert cache["bytes_per_token_allocated"] >= cache["bytes_per_token"]
    assert cache["state_bytes"] == rows["long-cache-at-256"]["state_bytes"]
    assert rows["long-decode-at-256"].keys() >= TIMED
    assert "stock_ms" not in rows["long-decode-at-1024"]
    assert set(rows["long-growth"]["exponents"]) == {"chunk", "decode"}


@pytest.mark.slow
def test_peak_memory_comes_from_processes_of_their_own(benchmark, capsys):
    ballast = torch.ones(2**28 // 4)  # 256 MiB here must not count there
    status, result, table = run(benchmark, capsys, "--dtype", "fp32", "--rows", "peak-train-*")
    assert status == 0, table
    (row,) = result["rows"]
    assert row["weights_mib"] >= 262_272 * 96 * 4 // 2**20
    for side in ("ours", "stock"):
        assert row["before_mib"][side] >= row["weights_mib"]
        assert row[f"{side}_mib"] >= row["before_mib"][side] + row["weights_mib"] * 0.9  # the gradients
    del ballast


def test_table_replaces_the_json(benchmark, capsys):
    status = benchmark.main([*SMALL, "--dtype", "fp32", "--rows", "prefill-1x48", "--table"])
    output = capsys.readouterr()
    assert status == 0
    assert "prefill-1x48" in output.out
    assert "{" not in output.out
    assert output.err == ""


@pytest.mark.parametrize("row", ["prefill-1x48", "decode-1", "train-1x48"])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_wrong_side_is_found_out(benchmark, capsys, monkeypatch, row, dtype):
    right = ZayaForCausalLM.forward

    def wrong(self, *args, **kwargs):
        output = right(self, *args, **kwargs)
        if output.logits is not None:
            output.logits = output.logits * 1.1
        if output.loss is not None:
            output.loss = output.loss * 1.1
        return output

    monkeypatch.setattr(ZayaForCausalLM, "forward", wrong)
    status, result, table = run(benchmark, capsys, "--dtype", dtype, "--rows", row)
    assert status == 1
    (found,) = result["rows"]
    assert found["check"].startswith("failed: ")
    assert found["check"] in table


def test_a_side_that_cannot_run_fails_its_row_only(benchmark, capsys, monkeypatch):
    right = ZayaForCausalLM.forward

    def broken(self, input_ids=None, *args, **kwargs):
        if input_ids.shape[1] == 128:
            raise RuntimeError("out of order\nand more")
        return right(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(ZayaForCausalLM, "forward", broken)
    status, result, _ = run(benchmark, capsys, "--dtype", "fp32", "--rows", "prefill-1x128", "--rows", "prefill-1x48")
    assert status == 1
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["prefill-1x48"]["check"].startswith("ok: ")
    assert rows["prefill-1x128"]["check"] == "failed: RuntimeError: out of order"
    assert "ours_ms" not in rows["prefill-1x128"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "prefil-*"], "no row fits 'prefil-*'"),
        (["--size", "9b"], "9b"),
        (["--threads", "0"], "--threads"),
        (["--seconds", "nan"], "--seconds"),
        (["--layers", "many"], "--layers"),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(benchmark, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(arguments)
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert said in output.err


def test_targets_of_a_full_run(benchmark):
    from upstream.results import target, with_target

    assert target("decode-1", "8b", "bf16") == {"ratio": 2.0, "share_of_floor": 0.85}
    assert target("decode-1-as-loaded", "8b", "bf16") == target("decode-1", "quickstart", "bf16") == {"ratio": 1.0}
    assert target("prefill-1x2048", "8b", "fp32") == {"ratio": 1.0, "share_of_floor": 0.95}
    assert target("train-1x512-checkpointed", "8b", "fp32") == {"ratio": 1.0}
    entry = {"check": "ok: ", "ratio": 2.0, "share_of_floor": 0.8}
    aims = {"ratio": 2.0, "share_of_floor": 0.85}
    assert with_target(entry, aims)["met"] is False
    assert with_target(entry | {"share_of_floor": 0.85}, aims)["met"] is True
    assert with_target(entry | {"share_of_floor": 0.85, "check": "failed: "}, aims)["met"] is False
    assert with_target(entry, {}) == entry
