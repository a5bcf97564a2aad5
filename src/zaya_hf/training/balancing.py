"""Balancing of ZAYA's routers: once per optimizer step, a controller moves the biases by the experts' shares.

Counts come from the model's output, `tokens_per_slot` with ``output_router_logits=True``. The model makes them outside
of its layers, of the real tokens of each call, so they are right once under activation checkpointing, which runs layers
twice, and padding is not in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import controllers
from .config import BalancingConfig

BIASES = "balancing_biases"


class BiasBalancer:
    """Updates the fp32 buffers `balancing_biases` ``[E + 1]`` of some routers, in place, once per optimizer step.

    The error of an expert is its target, ``(1 - skip_target) / E``, minus its share of all real tokens, those that
    skipped included. The bias of the last slot, which skips the experts, stays as it is without a `skip_target`; with
    one the same controller moves it towards that share.

    The buffers are the biases: they may be loaded or set at any time. This object holds the controller's state, on the
    CPU and in fp32 whatever the model's device, and the counts since the last step. Processes that step with the same
    counts have the same biases, to the bit.

    Args:
        routers: modules with a buffer `balancing_biases`, in the order of the layers, all with as many experts.
        config: controller and gains.

    Raises:
        ValueError: without routers, for different numbers of experts, for biases in another dtype than fp32.
    """

    def __init__(self, routers: Sequence[nn.Module], config: BalancingConfig | None = None):
        self.config = BalancingConfig() if config is None else config
        self._routers = list(routers)
        lengths = {len(biases) for biases in self._buffers()}
        if len(lengths) != 1:
            raise ValueError(f"routers have {sorted(lengths)} slots; expected at least one router, all with as many.")
        self._slots = lengths.pop()
        self._experts = self._slots - 1
        skip_target = self.config.skip_target
        targets = [(1 - (skip_target or 0.0)) / self._experts] * self._experts
        self._targets = torch.tensor(targets if skip_target is None else [*targets, skip_target])
        self._controller = controllers.build(self.config, len(self._routers), len(self._targets))
        self._counts: Tensor | None = None
        self._last: Tensor | None = None

    @classmethod
    def for_model(cls, model: nn.Module, config: BalancingConfig | None = None) -> BiasBalancer | None:
        """A balancer for every router of `model`, which may be wrapped (DDP, PEFT); None if it has none with biases."""
        routers = list(_routers(model))
        return cls(routers, config) if routers else None

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and slots of the counts."""
        return len(self._routers), self._slots

    def observe(self, tokens_per_slot: Tensor | None) -> None:
        """Add the counts of one micro-batch; the host waits for nothing.

        Args:
            tokens_per_slot: ``[layers, E + 1]`` int64, padding left out: the model's output has them under this name
                with `output_router_logits=True`. None, as of a model whose output has none, is for `frozen` alone.

        Raises:
            ValueError: for other shapes and dtypes, and for None if there is something to control.
        """
        if tokens_per_slot is None:
            if self.config.controller == "frozen":
                return
            raise ValueError(
                "the model has balancing biases but its output has no tokens_per_slot: use zaya_hf's classes with "
                'output_router_logits=True, or controller "frozen".'
            )
        if tuple(tokens_per_slot.shape) != self.shape or tokens_per_slot.dtype != torch.int64:
            raise ValueError(
                f"tokens_per_slot is {tokens_per_slot.dtype} {list(tokens_per_slot.shape)}; expected torch.int64 "
                f"{list(self.shape)}."
            )
        counts = tokens_per_slot.detach()
        self._counts = counts.clone() if self._counts is None else self._counts + counts

    def discard(self) -> None:
        """Forget the counts since the last step: of a step that is skipped."""
        self._counts = None

    @torch.no_grad()
    def step(self, reduce: Callable[[Tensor], Tensor | None] | None = None) -> None:
        """Update the biases by the counts since the last step; without a token, change nothing.

        Args:
            reduce: sums ``[layers, E + 1]`` int64 over all processes, in place or into what it returns. Called once, in
                every process, also in one that observed nothing.
        """
        counts, self._counts = self._counts, None
        if reduce is not None:
            if counts is None:
                counts = torch.zeros(self.shape, dtype=torch.int64, device=self._buffers()[0].device)
            summed = reduce(counts)
            counts = counts if summed is None else summed
        if counts is None:
            return
        counts = counts.cpu()
        tokens = counts.sum(dim=-1)  # integers: no order of summation, no rounding
        if not tokens.any():
            return
        self._last = counts
        biases, controlled = self._read(), len(self._targets)
        shares = counts[:, :controlled].float() / tokens.clamp_min(1).float()[:, None]
        moved = self._controller.update(biases[:, :controlled], self._targets - shares, tokens > 0)
        self._write(moved)

    def max_violation(self) -> Tensor | None:
        """``[layers]`` fp32 on the CPU: the busiest expert's load in units of a fair one, minus 1, at the last step.

        Of the tokens that reached an expert. 0 is perfect balance, E - 1 is all tokens on one expert, -1 a layer whose
        experts got none. None before the first step.
        """
        return None if self._last is None else _max_violation(self._last)

    def panel(self) -> dict[str, list[float] | list[int]] | None:
        """What the routers did at the last step, an entry per layer; None before the first.

        `load_entropy`: H(p) / ln E over the tokens that reached an expert, 1 is perfect balance (0 where none did);
        `max_violation`: as the method; `skip_rate`: share of all tokens; `dead_experts`: how many got no token;
        `bias_min`, `bias_max`: of the experts' biases now.
        """
        if self._last is None:
            return None
        taken, biases = self._last[:, :-1], self._read()[:, :-1]
        return {
            "load_entropy": _load_entropy(taken).tolist(),
            "max_violation": _max_violation(self._last).tolist(),
            "skip_rate": (self._last[:, -1] / self._last.sum(dim=-1).clamp_min(1)).tolist(),
            "dead_experts": (taken == 0).sum(dim=-1).tolist(),
            "bias_min": biases.amin(dim=-1).tolist(),
            "bias_max": biases.amax(dim=-1).tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, on the CPU; the biases too, which an adapter's files do not have."""
        counts = None if self._counts is None else self._counts.cpu()
        return {
            "controller": self._controller.name,
            "state": self._controller.state_dict(),
            "biases": self._read(),
            "counts": counts,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; tensors may be lists of their numbers, as JSON has them.

        Of another controller's state biases and counts are taken, and this one starts anew.

        Raises:
            ValueError: something is missing or has another shape. Nothing was taken over then.
        """
        missing = {"controller", "state", "biases", "counts", "last"} - state.keys()
        if missing:
            raise ValueError(f"the balancing state has no {', '.join(sorted(missing))}.")
        read, zeros = {}, torch.zeros(self.shape, dtype=torch.int64)
        biases = controllers.as_tensor(state["biases"], zeros.float(), "biases of the balancing state")
        for name in ("counts", "last"):
            given = state[name]
            read[name] = (
                None if given is None else controllers.as_tensor(given, zeros, f"{name} of the balancing state")
            )
        controller = controllers.build(self.config, len(self._routers), len(self._targets))
        if state["controller"] == controller.name:
            controller.load_state_dict(state["state"])
        self._controller, self._last = controller, read["last"]
        self._counts = None if read["counts"] is None else read["counts"].to(self._buffers()[0].device)
        self._write(biases)

    def _buffers(self) -> list[Tensor]:
        """Looked up anew each time: moving a model replaces them."""
        buffers = [router.get_buffer(BIASES) for router in self._routers]
        for buffer in buffers:
            if buffer.dtype != torch.float32 or buffer.is_meta:
                raise ValueError(
                    f"balancing biases are {buffer.dtype} on {buffer.device}; expected torch.float32 (in which small "
                    "updates do not vanish) on a device with memory."
                )
        return buffers

    def _read(self) -> Tensor:
        """``[layers, E + 1]`` fp32, a copy on the CPU."""
        buffers = self._buffers()
        return torch.stack([biases.detach().to(buffers[0].device) for biases in buffers]).cpu()

    @torch.no_grad()
    def _write(self, biases: Tensor) -> None:
        """The first slots of each layer's buffer; one transfer to each device."""
        buffers, there = self._buffers(), {}
        for buffer, layer in zip(buffers, range(len(biases)), strict=True):
            if buffer.device not in there:
                there[buffer.device] = biases.to(buffer.device)
            buffer[: biases.shape[-1]].copy_(there[buffer.device][layer])


def _routers(module: nn.Module) -> Iterator[nn.Module]:
    """Modules with balancing biases, in the model's order. Of PEFT's copies of a module (`modules_to_save`) only the
    one that computes."""
    if module._buffers.get(BIASES) is not None:
        yield module
        return
    copies, original = getattr(module, "modules_to_save", None), getattr(module, "original_module", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
        names: Any = module.active_adapters
        active = [name for name in names if name in copies]
        yield from _routers(copies[active[0]] if active else original)
        return
    for child in module.children():
        yield from _routers(child)


def _max_violation(counts: Tensor) -> Tensor:
    taken = counts[:, :-1].float()
    return taken.amax(dim=-1) / taken.sum(dim=-1).clamp_min(1) * taken.shape[-1] - 1


def _load_entropy(taken: Tensor) -> Tensor:
    """``[layers]`` of counts ``[layers, E]``."""
    loads = taken / taken.sum(dim=-1, keepdim=True).clamp_min(1)
    if taken.shape[-1] == 1:
        return loads[:, 0]  # one expert: balanced as soon as it has a token
    return -torch.xlogy(loads, loads).sum(dim=-1) / math.log(taken.shape[-1]) + 0.0  # which makes 0.0 of -0.0
