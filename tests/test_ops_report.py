"""`model.ops_report()` says what runs, and `ops.backends` follows what was asked for."""

from __future__ import annotations

import pytest
import torch

from zaya_hf import ZayaForCausalLM, ZayaModel, ops
from zaya_hf.ops import selection
from zaya_hf.ops_report import facts_of
from zaya_hf.testing import tiny_config


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    return ZayaForCausalLM(tiny_config())


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process have had calls declined."""
    monkeypatch.setattr(selection, "_said", {})


def test_every_operator_is_in_the_report(model: ZayaForCausalLM) -> None:
    report = model.ops_report()
    assert set(report) == set(ops.OPERATORS)
    assert report == ops.backends("cpu", facts_of(model))
    assert ZayaModel(tiny_config()).ops_report() == report  # every class has it
    assert all(backend != "triton" and why for backend, why in report.values())


def test_it_follows_the_choice(model: ZayaForCausalLM) -> None:
    with selection.use("reference"):
        assert {backend for backend, _ in model.ops_report().values()} == {"reference"}
    with selection.use("auto", router="reference"):
        assert model.ops_report()["router"] == ("reference", "ZAYA_OPS=auto,router=reference")
    with selection.use("triton"):
        for name, (backend, why) in model.ops_report().items():
            if name != "linear":  # torch's own everywhere
                assert backend != "triton"
                assert "TRITON_INTERPRET=1" in why


def test_the_experts_implementation_has_a_say() -> None:
    model = ZayaForCausalLM(tiny_config())
    model.set_experts_implementation("grouped_mm")
    assert model.ops_report()["experts"] == ("transformers", "experts_implementation='grouped_mm'")
    model.set_experts_implementation("zaya_triton")
    backend, why = model.ops_report()["experts"]
    assert (backend, "TRITON_INTERPRET=1" in why) == ("grouped", True)
    model.set_experts_implementation("zaya")
    assert model.ops_report() == ops.backends("cpu", facts_of(model))


def test_calls_that_went_without_kernels_are_in_it(model: ZayaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_said", {"experts": ["of a test", "of another"]})
    assert model.ops_report()["experts"][1].endswith("; calls went without kernels since of a test; of another")


def test_facts_are_the_models(model: ZayaForCausalLM) -> None:
    facts, config = facts_of(model.to(torch.bfloat16)), model.config
    assert (facts.dtype, facts.device.type) == (torch.bfloat16, "cpu")
    channels = (facts.heads + facts.groups) * facts.head_dim
    attention = model.model.layers[0].self_attn
    assert attention.qkv_proj.conv_qk_grouped.weight.shape == (channels, facts.head_dim, facts.widths[1])
    assert attention.qkv_proj.conv_qk_depthwise.weight.shape == (channels, 1, facts.widths[0])
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (facts.num_experts, 2 * facts.intermediate, facts.hidden_size)
    assert model.model.layers[0].mlp.gate.down_proj.weight.shape == (facts.router_width, facts.hidden_size)
    assert model.lm_head.weight.shape[0] == facts.vocab_size
    assert facts.activation == config.hidden_act
    model.to(torch.float32)
