"""The averaged weights: their formula, what is swapped, and what comes back from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saved_models import differing, tiny_model
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids
from zaya_hf.training.ema import ExponentialMovingAverage
from zaya_hf.training.lora import lora_targets


def move(model: nn.Module, seed: int) -> None:
    """As an optimizer would: every trainable parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_it_is_the_weighted_sum_of_all_weights_so_far() -> None:
    model = nn.Linear(3, 2)
    average, decay = ExponentialMovingAverage(model, 0.8), 0.8
    history = [model.weight.detach().clone()]
    for step in range(5):
        move(model, step)
        average.update()
        history.append(model.weight.detach().clone())
    expected = decay**5 * history[0] + sum((1 - decay) * decay ** (5 - k) * w for k, w in enumerate(history[1:], 1))
    torch.testing.assert_close(average.state_dict()["weight"], expected, atol=1e-6, rtol=0)


def test_small_moves_of_bf16_weights_are_not_rounded_away() -> None:
    model = nn.Linear(4, 4).bfloat16()
    average = ExponentialMovingAverage(model, 0.999)
    assert average.state_dict()["weight"].dtype == torch.float32
    start = model.weight.detach().float().clone()
    with torch.no_grad():
        model.weight += 1
    for _ in range(3):
        average.update()
    moved = average.state_dict()["weight"] - start
    expected = (model.weight.detach().float() - start) * (1 - 0.999**3)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_gives_the_averages_and_then_the_weights_back(dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=1).to(dtype)
    average = ExponentialMovingAverage(model, 0.5)
    move(model, 0)
    average.update()
    own, averaged = values(model), {n: t.to(model.state_dict()[n].dtype) for n, t in average.state_dict().items()}
    with average.swap():
        assert differing(model, averaged) == []
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert differing(model, own) == []
    with pytest.raises(RuntimeError, match="of the evaluation"), average.swap():
        raise RuntimeError("of the evaluation")
    assert differing(model, own) == []


def test_frozen_parameters_and_balancing_biases_are_the_models_own() -> None:
    model = tiny_model(num_hidden_layers=1)
    model.model.embed_tokens.requires_grad_(False)
    average = ExponentialMovingAverage(model, 0.5)
    before = values(model)
    move(model, 0)
    biases = model.get_buffer("model.layers.0.mlp.gate.balancing_biases")
    biases += 1
    average.update()
    state = average.state_dict()
    assert state.keys() == before.keys()
    assert torch.equal(state["model.layers.0.mlp.gate.balancing_biases"], biases)
    assert torch.equal(state["lm_head.weight"], before["lm_head.weight"])
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed == trained | {"model.layers.0.mlp.gate.balancing_biases"}
    with average.swap():
        assert model.get_buffer("model.layers.0.mlp.gate.balancing_biases") is biases


def whole_model() -> Any:
    return tiny_model(num_hidden_layers=1)


def adapted_model() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = tiny_model(num_hidden_layers=1)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, init_lora_weights=False, **lora_targets(base)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [whole_model, adapted_model])
def test_files_bring_it_back_bit_for_bit(make: Callable[[], Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = make()
    average = ExponentialMovingAverage(model, 0.9)
    for step in range(3):
        move(model, step)
        average.update()
    model.save_pretrained(tmp_path, state_dict=average.state_dict())
    (file,) = tmp_path.glob("*.safetensors")
    again = ExponentialMovingAverage(make(), 0.9)
    assert differing(again.state_dict(), average.state_dict()) != []
    again.load_state_dict(load_file(file))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.isdisjoint(differing(again.state_dict(), average.state_dict()))


def test_the_saved_folder_is_a_model_with_the_averages(tmp_path: Path) -> None:
    model = whole_model()
    average = ExponentialMovingAverage(model, 0.5)
    move(model, 0)
    average.update()
    model.save_pretrained(tmp_path, state_dict=average.state_dict())
    ids = random_ids(1, 8)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(), average.swap():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_state_of_another_model_changes_nothing() -> None:
    average = ExponentialMovingAverage(nn.Linear(3, 2), 0.5)
    before = values(average.model)
    with pytest.raises(ValueError, match="have no bias, which this model trains"):
        average.load_state_dict({"weight": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"averaged bias has shape \[3\]; the model has \[2\]"):
        average.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})
    assert differing(average.state_dict(), before) == []


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_that_averages_nothing(decay: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0 and less than 1"):
        ExponentialMovingAverage(nn.Linear(2, 2), decay)


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameter to average"):
        ExponentialMovingAverage(nn.Linear(2, 2).requires_grad_(False), 0.5)
