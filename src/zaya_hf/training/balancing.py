"""Balancing of ZAYA's routers: AdamW on the biases, with the error of each expert's share as its gradient.

arXiv 2605.05365, section II-A2, eq. 5. The paper leaves learning rate and betas open. In a toy trial (16 experts, a
drifting router) 5e-3 reached the noise floor and recovered from a change of data; 1e-3 was too slow to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class BiasBalancer:
    """Updates the fp32 buffers `balancing_biases` ``[E + 1]`` of some routers, in place, once per optimizer step.

    The gradient of expert e is its share minus 1 / E, where shares count the tokens that an expert took. The last slot,
    which skips the experts, is apart: its bias stays as it is. No weight decay. The model's buffers are the biases;
    this object holds AdamW's state for them, and the counts since the last step.

    Args:
        routers: modules with a buffer `balancing_biases`, in the order of the layers, all with as many experts.
        lr: of probabilities, which the biases are added to; 0: count only.
        betas, eps: AdamW's.

    Raises:
        ValueError: without routers, for different numbers of experts, and for options out of range.
    """

    def __init__(
        self,
        routers: Sequence[nn.Module],
        lr: float = 5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        self._routers = list(routers)
        lengths = {len(biases) for biases in self._buffers()}
        if len(lengths) != 1:
            raise ValueError(f"routers have {sorted(lengths)} slots; expected at least one router, all with as many.")
        if lr < 0:
            raise ValueError(f"the balancing learning rate is {lr}; expected at least 0.")
        self._slots = lengths.pop()
        self._biases = nn.Parameter(self._read())
        self._optimizer = torch.optim.AdamW([self._biases], lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self._counts: Tensor | None = None
        self._last: Tensor | None = None

    @classmethod
    def for_model(cls, model: nn.Module, lr: float = 5e-3, **options: Any) -> BiasBalancer | None:
        """A balancer for every router of `model`; None if it has none with such biases."""
        routers = [m for m in model.modules() if "balancing_biases" in dict(m.named_buffers(recurse=False))]
        return cls(routers, lr, **options) if routers else None

    def observe(self, tokens_per_slot: Tensor) -> None:
        """Add the counts of one micro-batch.

        Args:
            tokens_per_slot: ``[layers, E + 1]`` int64, padding left out: the model's output has them under this name
                with `output_router_logits=True`.

        Raises:
            ValueError: for other shapes and dtypes.
        """
        expected = (len(self._routers), self._slots)
        if tuple(tokens_per_slot.shape) != expected or tokens_per_slot.dtype != torch.int64:
            raise ValueError(
                f"tokens_per_slot is {tokens_per_slot.dtype} {list(tokens_per_slot.shape)}; expected torch.int64 "
                f"{list(expected)}."
            )
        counts = tokens_per_slot.detach()
        self._counts = counts.clone() if self._counts is None else self._counts + counts

    @torch.no_grad()
    def step(self) -> None:
        """Update the biases by the counts since the last step; without any, change nothing.

        A layer in which no token reached an expert has no error: its biases stay.
        """
        if self._counts is None:
            return
        counts, self._counts = self._counts, None
        self._last = counts
        before = self._read()  # the buffers are what counts: a checkpoint may have been loaded, or a bias been set
        taken = counts[:, :-1].to(before.device, torch.float32)
        total = taken.sum(dim=-1, keepdim=True)
        error = taken / total.clamp_min(1) - 1 / taken.shape[-1]
        self._biases.data.copy_(before)
        self._biases.grad = torch.where(total > 0, error, 0)
        self._optimizer.step()
        self._biases.grad = None
        after = torch.where(total > 0, self._biases, before)
        for buffer, values in zip(self._buffers(), after, strict=True):
            buffer[:-1].copy_(values)

    def max_violation(self) -> Tensor | None:
        """``[layers]`` fp32: the busiest expert's load in units of a fair one, minus 1, at the last step.

        0 is perfect balance, E - 1 is all tokens on one expert, -1 a layer whose experts got none. None before the
        first step.
        """
        if self._last is None:
            return None
        taken = self._last[:, :-1].float()
        return taken.amax(dim=-1) / taken.sum(dim=-1).clamp_min(1) * taken.shape[-1] - 1

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state and the counts. The biases themselves are in the model's state."""
        return {"optimizer": self._optimizer.state_dict(), "counts": self._counts, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._counts, self._last = state["counts"], state["last"]

    def _buffers(self) -> list[Tensor]:
        """Looked up anew each time: moving a model replaces them."""
        return [router.get_buffer("balancing_biases") for router in self._routers]

    def _read(self) -> Tensor:
        """``[layers, E]`` fp32, a copy without the skip slot, on the first router's device."""
        buffers = self._buffers()
        return torch.stack([biases[:-1].detach().to(buffers[0].device, torch.float32) for biases in buffers])
