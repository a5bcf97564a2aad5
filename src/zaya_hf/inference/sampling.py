"""Sampling with a generator for every row: the text of a prompt does not depend on what else is in its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

#: settings of transformers that only sampling reads, with the value that means "nothing is cut"
_SETTINGS = {
    "temperature": 1.0,
    "top_h": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
# What `generate` takes for a setting that neither the caller nor the folder has.
_DEFAULT_TOP_K = 50


def greedy_settings() -> dict[str, Any]:
    """Keyword arguments that make `generate` take the likeliest token, without a warning about unused settings."""
    return {"do_sample": False, **dict.fromkeys(_SETTINGS)}


def seed_of(seed: int, *place: int) -> int:
    """A seed of its own for a place in the work, such as prompt 3, sample 0: different, but as repeatable as `seed`."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RowSampler(LogitsProcessor):
    """Draws the next token of every row with that row's generator, and leaves no other token possible.

    `generate` is then told to be greedy. It draws all rows of a batch from one stream of random numbers, so that a
    prompt's text would change with its neighbours.

    Args:
        config: the generation config that says how to sample; its `do_sample` is not looked at.
        generators: one for each row, on the device of the logits.
    """

    def __init__(self, config: GenerationConfig, generators: Sequence[torch.Generator]):
        self._generators = list(generators)
        self._warpers = LogitsProcessorList(_warpers(config, generators[0].device))

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``[B, S]`` int64 ids and ``[B, V]`` fp32 logits to ``[B, V]``, minus infinity but for the drawn token."""
        chances = self._warpers(input_ids, scores).softmax(dim=-1)
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(chances, self._generators, strict=True)
        ]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)


def _warpers(config: GenerationConfig, device: torch.device) -> list[LogitsProcessor]:
    """transformers' own, in its order."""
    values = {name: getattr(config, name, None) for name in _SETTINGS}
    if values["top_k"] is None:
        values["top_k"] = _DEFAULT_TOP_K
    makers: dict[str, Any] = {
        "temperature": TemperatureLogitsWarper,
        "top_h": TopHLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
        "epsilon_cutoff": EpsilonLogitsWarper,
        "eta_cutoff": lambda epsilon: EtaLogitsWarper(epsilon, device=str(device)),
    }
    return [make(values[name]) for name, make in makers.items() if values[name] not in (None, _SETTINGS[name])]
