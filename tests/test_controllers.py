"""The controllers of balancing biases: each against its formula, at its limits, and over a saved state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zaya_hf.training import controllers
from zaya_hf.training.config import BalancingConfig

LAYERS, SLOTS = 3, 5
ALL = torch.ones(LAYERS, dtype=torch.bool)
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6},
    "sign": {"lr": 0.01},
    "pid": {"kp": 0.3, "ki": 0.2, "kd": 0.1},
    "frozen": {},
}


def made(controller: str, **gains: Any) -> controllers.Controller:
    return controllers.build(BalancingConfig(controller=controller, **gains), LAYERS, SLOTS)


def drawn(seed: int, size: float = 0.2) -> Tensor:
    return torch.randn(LAYERS, SLOTS, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize("gains", [KINDS["adamw"], {}], ids=["other", "default"])
def test_adamw_is_torchs_to_the_bit(gains: dict[str, Any]) -> None:
    controller, biases = made("adamw", **gains), drawn(0)
    expected = nn.Parameter(biases.clone())
    config = BalancingConfig(**gains)
    reference = torch.optim.AdamW([expected], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0)
    for step in range(300):
        errors = drawn(step + 1)
        biases = controller.update(biases, errors, ALL)
        expected.grad = -errors
        reference.step()
        assert torch.equal(biases, expected.detach()), step


def test_adamws_first_step_is_its_rate_towards_the_target() -> None:
    biases = drawn(0)
    errors = torch.tensor([0.4, -0.1, -0.1, -0.2, 0.0]).expand(LAYERS, SLOTS)
    moved = made("adamw", lr=0.01).update(biases, errors, ALL)
    torch.testing.assert_close(moved - biases, 0.01 * errors.sign(), atol=1e-6, rtol=0)


def test_sign_keeps_the_layers_mean() -> None:
    errors = torch.tensor([[0.3, -0.1, -0.1, -0.05, -0.05], [0.1, -0.1, 0.0, 0.0, 0.0], [0.0] * 5])
    moved = made("sign", lr=0.01).update(torch.zeros(LAYERS, SLOTS), errors, ALL)
    expected = [[1.6, -0.4, -0.4, -0.4, -0.4], [1.0, -1.0, 0.0, 0.0, 0.0], [0.0] * 5]
    torch.testing.assert_close(moved, torch.tensor(expected) * 0.01, atol=1e-8, rtol=0)
    later, controller = drawn(0), made("sign", lr=0.01)
    mean = later.mean(-1)
    for step in range(50):
        later = controller.update(later, drawn(step), ALL)
    torch.testing.assert_close(later.mean(-1), mean, atol=1e-6, rtol=0)


def test_the_integral_alone_adds_the_error() -> None:
    controller, biases = made("pid", kp=0, ki=0.2, kd=0, clamp=None), drawn(0, size=3)
    for step in range(20):
        moved = controller.update(biases, drawn(step + 1), ALL)
        assert torch.equal(moved, biases + 0.2 * drawn(step + 1))
        biases = moved


def test_pid_is_the_textbooks_sum_of_three_terms() -> None:
    controller, start = made("pid", **KINDS["pid"], clamp=None), drawn(0)
    biases, errors = start, [drawn(step + 1) for step in range(30)]
    for step, error in enumerate(errors):
        biases = controller.update(biases, error, ALL)
        before = errors[step - 1] if step else torch.zeros_like(error)
        expected = start + 0.3 * error + 0.2 * sum(errors[: step + 1]) + 0.1 * (error - before)
        torch.testing.assert_close(biases, expected, atol=2e-6, rtol=0)


def test_a_clamped_bias_does_not_wind_up() -> None:
    controller, biases = made("pid", ki=0.5, clamp=0.4), torch.zeros(LAYERS, SLOTS)
    push = torch.tensor([0.2, -0.2, 0.0, 0.1, -0.1]).expand(LAYERS, SLOTS)
    for _ in range(100):
        biases = controller.update(biases, push, ALL)
    torch.testing.assert_close(biases[0], torch.tensor([0.4, -0.4, 0.0, 0.4, -0.4]))
    turned = controller.update(biases, -push, ALL)
    torch.testing.assert_close(turned[0], torch.tensor([0.3, -0.3, 0.0, 0.35, -0.35]))


def test_a_bias_beyond_the_clamp_moves_inwards_only() -> None:
    controller, biases = made("pid", ki=0.5, clamp=0.4), torch.full((LAYERS, SLOTS), 2.0)
    outwards = controller.update(biases, torch.full_like(biases, 0.1), ALL)
    assert torch.equal(outwards, biases)
    inwards = controller.update(biases, torch.full_like(biases, -0.1), ALL)
    torch.testing.assert_close(inwards, torch.full_like(biases, 1.95))


def test_frozen_biases_stay() -> None:
    assert torch.equal(made("frozen").update(drawn(0), drawn(1), ALL), drawn(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_tokens_is_as_if_the_step_had_not_been(kind: str) -> None:
    controller, other = made(kind, **KINDS[kind]), made(kind, **KINDS[kind])
    biases = expected = drawn(0)
    without_middle = torch.tensor([True, False, True])
    for step in range(6):
        biases = controller.update(biases, drawn(step + 1), ALL if step % 2 else without_middle)
        if step % 2:
            expected = other.update(expected, drawn(step + 1), ALL)
    assert torch.equal(biases[1], expected[1])
    if kind != "frozen":
        assert not torch.equal(biases[0], expected[0])


@pytest.mark.parametrize("as_json", [False, True], ids=["tensors", "json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_to_the_bit(kind: str, as_json: bool) -> None:
    straight = made(kind, **KINDS[kind])
    biases = drawn(0)
    for step in range(3):
        biases = straight.update(biases, drawn(step + 1), ALL)
    state: Any = straight.state_dict()
    if as_json:
        state = json.loads(json.dumps({name: tensor.tolist() for name, tensor in state.items()}))
    resumed, again = made(kind, **KINDS[kind]), biases
    resumed.load_state_dict(state)
    for step in range(3, 6):
        biases, again = (c.update(b, drawn(step + 1), ALL) for c, b in ((straight, biases), (resumed, again)))
    assert torch.equal(biases, again)


def test_a_state_is_a_copy() -> None:
    controller = made("adamw")
    state = controller.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    controller.load_state_dict(state)
    controller.update(drawn(0), drawn(1), ALL)
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert not torch.equal(controller.state_dict()["mean"], kept["mean"])


class TestErrors:
    @pytest.mark.parametrize(
        ("biases", "errors", "active", "message"),
        [
            (torch.zeros(3, 4), torch.zeros(3, 5), ALL, r"biases are torch\.float32 \[3, 4\]; expected torch\.float32"),
            (torch.zeros(3, 5).double(), torch.zeros(3, 5), ALL, r"biases are torch\.float64"),
            (torch.zeros(3, 5), torch.zeros(2, 5), ALL, r"errors are torch\.float32 \[2, 5\]"),
            (torch.zeros(3, 5), torch.zeros(3, 5), ALL[:2], r"active is torch\.bool \[2\]"),
            (torch.zeros(3, 5), torch.zeros(3, 5), ALL.int(), r"active is torch\.int32"),
        ],
    )
    def test_of_a_step(self, biases: Tensor, errors: Tensor, active: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            made("pid").update(biases, errors, active)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mean": None}, r"mean of the controller 'adamw' is no tensor of numbers"),
            ({"mean": torch.zeros(2, 5)}, r"mean of the controller 'adamw' has shape \[2, 5\]; expected \[3, 5\]"),
            ({"steps": [["a"]] * 3}, r"steps of the controller 'adamw' is no tensor of numbers"),
            ({"integral": torch.zeros(3, 5)}, r"has \['integral', 'mean', 'mean_square', 'steps'\]; expected"),
        ],
    )
    def test_of_a_state(self, change: dict[str, Any], message: str) -> None:
        controller = made("adamw")
        before = controller.state_dict()
        with pytest.raises(ValueError, match=message):
            controller.load_state_dict(before | {"mean_square": torch.ones(3, 5)} | change)
        assert torch.equal(controller.state_dict()["mean_square"], before["mean_square"])

    @pytest.mark.parametrize("gains", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"clamp": -1.0}])
    def test_of_gains(self, gains: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(gains))):
            BalancingConfig(**gains)
