"""Controllers of balancing biases: what a step's errors do to them.

Biases and errors are fp32 tensors ``[layers, slots]`` on the CPU, a layer per row; an error is the share of the tokens
that a slot ought to get minus the share that it got, so that a positive one asks for a larger bias. A controller keeps
what it needs of earlier steps, and nothing of the biases: those may be set from outside at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .config import BalancingConfig


class Controller:
    """One rule. `_rule` gives new biases and new state for all layers; layers without tokens keep both.

    Args:
        layers, slots: of the biases.
    """

    name: ClassVar[str]

    def __init__(self, layers: int, slots: int):
        self.shape = (layers, slots)
        self._state: dict[str, Tensor] = {}

    def update(self, biases: Tensor, errors: Tensor, active: Tensor) -> Tensor:
        """The biases after a step.

        Args:
            biases, errors: ``[layers, slots]`` fp32.
            active: ``[layers]`` bool; where it is False, there were no tokens: bias and state stay.

        Returns:
            a new tensor of the same shape.

        Raises:
            ValueError: for other shapes and dtypes.
        """
        for what, tensor in (("biases", biases), ("errors", errors)):
            if tuple(tensor.shape) != self.shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{what} are {tensor.dtype} {list(tensor.shape)}; expected torch.float32 {list(self.shape)}."
                )
        if tuple(active.shape) != self.shape[:1] or active.dtype != torch.bool:
            raise ValueError(
                f"active is {active.dtype} {list(active.shape)}; expected torch.bool {list(self.shape[:1])}."
            )
        moved, state = self._rule(biases, errors)
        rows = active[:, None]
        self._state = {name: torch.where(rows, state[name], old) for name, old in self._state.items()}
        return torch.where(rows, moved, biases)

    def _rule(self, biases: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, a row per layer; copies."""
        return {name: tensor.clone() for name, tensor in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, as tensors or as (nested) lists of their numbers.

        Raises:
            ValueError: a name is missing or not known, or a tensor has another shape. Nothing was taken over then.
        """
        if state.keys() != self._state.keys():
            raise ValueError(
                f"the state of the controller {self.name!r} has {sorted(state)}; expected {sorted(self._state)}."
            )
        self._state = {
            name: as_tensor(state[name], old, f"{name} of the controller {self.name!r}")
            for name, old in self._state.items()
        }


class AdamWController(Controller):
    """AdamW without decay, with the negative error as gradient: the rule of ZAYA1 (arXiv 2605.05365, II-A2, eq. 5).

    In the order of `torch.optim.AdamW`'s arithmetic, so to the same bits on a CPU.

    Args:
        layers, slots: of the biases.
        lr: the first step's size, in units of probability.
        betas, eps: AdamW's.
    """

    name = "adamw"

    def __init__(self, layers: int, slots: int, *, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(layers, slots)
        self.lr, self.betas, self.eps = lr, betas, eps
        self._state = {
            "mean": torch.zeros(layers, slots),
            "mean_square": torch.zeros(layers, slots),
            "steps": torch.zeros(layers, 1, dtype=torch.int64),
        }

    def _rule(self, biases: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        gradient, (beta1, beta2) = -errors, self.betas
        steps = self._state["steps"] + 1
        mean = self._state["mean"].lerp(gradient, 1 - beta1)
        mean_square = (self._state["mean_square"] * beta2).addcmul(gradient, gradient, value=1 - beta2)
        # In double precision as torch.optim has it: 1 - 0.999 ** n loses half of its digits in single.
        sizes = torch.tensor([[self.lr / (1 - beta1**n)] for n in steps[:, 0].tolist()])
        corrections = torch.tensor([[(1 - beta2**n) ** 0.5] for n in steps[:, 0].tolist()])
        moved = biases - sizes * mean / (mean_square.sqrt() / corrections + self.eps)
        return moved, {"mean": mean, "mean_square": mean_square, "steps": steps}


class SignController(Controller):
    """A fixed step in the direction of the error (DeepSeek, arXiv 2408.15664), less the mean step of the layer.

    Few experts are above their share and many below it, or the reverse; without the subtraction all biases of a layer
    would wander together, and so against the skip slot, whose bias stays.

    Args:
        layers, slots: of the biases.
        lr: the step, in units of probability.
    """

    name = "sign"

    def __init__(self, layers: int, slots: int, *, lr: float):
        super().__init__(layers, slots)
        self.lr = lr

    def _rule(self, biases: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        direction = errors.sign()
        return biases + self.lr * (direction - direction.mean(dim=-1, keepdim=True)), {}


class PIDController(Controller):
    """``kp * error + ki * sum of errors + kd * change of the error``, in velocity form.

    The form adds to each bias what these three terms changed by, so that the biases are the integral: any start will
    do, and with `ki` alone a step is ``biases += ki * errors``. Without a clamp the biases are, but for rounding, where
    they started plus the three terms.

    Args:
        layers, slots: of the biases.
        kp, ki, kd: change of a bias per share of the tokens.
        clamp: largest absolute bias; None: any. What would go beyond is dropped, so the integral does not wind up. A
            bias that starts beyond it moves inwards only.
    """

    name = "pid"

    def __init__(self, layers: int, slots: int, *, kp: float, ki: float, kd: float, clamp: float | None):
        super().__init__(layers, slots)
        self.kp, self.ki, self.kd, self.clamp = kp, ki, kd, clamp
        self._state = {"last": torch.zeros(layers, slots), "before_last": torch.zeros(layers, slots)}

    def _rule(self, biases: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        last, before_last = self._state["last"], self._state["before_last"]
        change = self.ki * errors
        change = change + self.kp * (errors - last) + self.kd * (errors - 2 * last + before_last)
        moved = biases + change
        if self.clamp is not None:
            limit = biases.abs().clamp_min(self.clamp)
            moved = moved.clamp(-limit, limit)
        return moved, {"last": errors, "before_last": last}


class FrozenController(Controller):
    """Biases stay."""

    name = "frozen"

    def _rule(self, biases: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return biases, {}


def build(config: BalancingConfig, layers: int, slots: int) -> Controller:
    """The controller that `config` names, with its gains, for biases ``[layers, slots]``, at its start."""
    if config.controller == "adamw":
        return AdamWController(layers, slots, lr=config.lr, betas=config.betas, eps=config.eps)
    if config.controller == "sign":
        return SignController(layers, slots, lr=config.lr)
    if config.controller == "pid":
        return PIDController(layers, slots, kp=config.kp, ki=config.ki, kd=config.kd, clamp=config.clamp)
    return FrozenController(layers, slots)


def as_tensor(value: Any, like: Tensor, what: str) -> Tensor:
    """`value`, a tensor or nested lists of numbers, as a new tensor on the CPU with the dtype and shape of `like`.

    Raises:
        ValueError: it is no such thing; `what` names it.
    """
    try:
        tensor = torch.as_tensor(value).to("cpu", like.dtype, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is no tensor of numbers: {' '.join(str(error).split())}") from None
    if tensor.shape != like.shape:
        raise ValueError(f"{what} has shape {list(tensor.shape)}; expected {list(like.shape)}.")
    return tensor
