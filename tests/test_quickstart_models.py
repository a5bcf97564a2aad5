"""The five models of the quickstart: what they share, what is their own, and that they are of one size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zaya_cli
from zaya_hf.quickstart import pipeline, report
from zaya_hf.quickstart.models import FAMILIES, build_model, parameter_counts
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.testing import redraw

IDS: Any = SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=1)
RECIPE = Recipe()


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return build_model(name, RECIPE, IDS, seed=0)


def test_the_command_line_knows_them_all() -> None:
    assert tuple(FAMILIES) == zaya_cli.QUICKSTART_MODELS


def test_every_place_that_lists_them_has_them_all() -> None:
    assert set(pipeline._SLOW_FIRST) == set(FAMILIES)  # one that is missing there would never be trained
    assert len(pipeline._SLOW_FIRST) == len(FAMILIES)
    assert set(report._SLOTS) == set(FAMILIES)
    assert len(set(report._SLOTS.values())) == len(FAMILIES)


def test_ours_is_ours_and_the_others_are_transformers_own(name: str, model: Any) -> None:
    expected = {"zaya": "zaya_hf.modeling_zaya"}.get(name, f"transformers.models.{name}.modeling_{name}")
    assert type(model).__module__ == expected


def test_shared_sizes(model: Any) -> None:
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (1024, 96, 4)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert getattr(config, "head_dim", None) in (24, None)
    assert config.max_position_embeddings == 512
    assert config.eos_token_id == config.bos_token_id == 1
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    thetas = [
        parameters["rope_theta"]
        for parameters in (config.rope_parameters, *config.rope_parameters.values())
        if isinstance(parameters, dict) and "rope_theta" in parameters
    ]
    assert thetas
    assert set(thetas) == {10_000.0}


def test_active_parameters_are_equal_to_two_percent(model: Any) -> None:
    _, zaya = parameter_counts(build_model("zaya", RECIPE, IDS, seed=0))
    assert parameter_counts(model)[1] == pytest.approx(zaya, rel=0.02)


def test_a_token_reaches_as_many_parameters_as_are_called_active(model: Any) -> None:
    """Gradients of one prediction after one token: with one position, only the active experts get any."""
    redraw(model, seed=4)
    model.train()
    model(input_ids=torch.tensor([[7]]), use_cache=False).logits.square().sum().backward()
    reached = 0
    for parameter_name, parameter in model.named_parameters():
        if ".experts." in parameter_name:
            reached += sum(p.numel() for p, g in zip(parameter, parameter.grad, strict=True) if g.any())
        else:
            reached += parameter.numel()
    model.zero_grad()
    # Of ZAYA a token may also skip a layer's experts; redrawn biases make that possible, and then fewer are reached.
    total, active = parameter_counts(model)
    assert reached <= active <= total
    if not hasattr(model.config, "router_hidden_size"):
        assert reached == active


def test_the_seed_decides_the_weights(name: str) -> None:
    small = Recipe(hidden_size=32, head_dim=8, num_hidden_layers=2)
    a, b, c = (build_model(name, small, IDS, seed) for seed in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))


def test_what_the_report_says_of_its_shape_is_in_the_config(name: str, model: Any) -> None:
    names = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
    if name == "zaya":
        names["intermediate_size"] = "moe_intermediate_size"
    for key, value in FAMILIES[name].shape.items():
        assert getattr(model.config, names.get(key, key)) == value
