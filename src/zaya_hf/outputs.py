"""Model outputs: transformers' fields, and what the routers did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from . import ops


class _OldCacheName:
    """The cache under the name it had before transformers 5.24."""

    @property
    def past_key_values(self) -> Cache | None:
        return self.cache  # type: ignore[attr-defined]


@dataclass
class ZayaModelOutput(ModelOutput, _OldCacheName):
    """Output of `ZayaModel`.

    Attributes:
        last_hidden_state: ``[B, S, hidden_size]`` after the final norm.
        cache: the cache that the call filled, when one was in use.
        hidden_states: the stream before each layer and the normed last one, ``num_hidden_layers + 1`` tensors.
        attentions: attention weights per layer, ``[B, heads, S, keys]`` (eager only).
        router_logits: per layer ``[B * S, num_experts + 1]``; the last column is the skip slot. The three router fields
            are there with ``output_router_logits=True``.
        router_slots: per layer ``[B, S]`` int64: 0 ... num_experts - 1 an expert, num_experts the skip slot,
            -1 padding; as `routed_experts` of a call takes them.
        tokens_per_slot: ``[layers, num_experts + 1]`` int64 counts over real tokens; the last column counts skips.
        segments: ``[B, S]`` int64, the document of each token, counted over the life of a row, -1 for padding; None
            when every row is one unpadded document.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    router_slots: tuple[torch.Tensor, ...] | None = None
    tokens_per_slot: torch.Tensor | None = None
    segments: torch.Tensor | None = None

    def record(self, logits: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], real: torch.Tensor | None) -> None:
        """Fill the router fields.

        Args:
            logits, slots: of each layer ``[B * S, num_experts + 1]`` and ``[B, S]``.
            real: ``[B, S]`` bool, False for padding; None: all are real.
        """
        num_slots, flat_real = logits[0].shape[-1], None if real is None else real.flatten()
        self.tokens_per_slot = torch.stack([ops.count_slots(s.flatten(), num_slots, flat_real) for s in slots])
        self.router_slots = tuple(s if real is None else torch.where(real, s, -1) for s in slots)
        self.router_logits = tuple(logits)


@dataclass
class ZayaCausalLMOutput(ModelOutput, _OldCacheName):
    """Output of `ZayaForCausalLM`.

    Attributes:
        loss: scalar, fp32 or wider, when labels were given.
        logits: ``[B, kept, vocab_size]``; None where they were skipped, see `skip_logits`.
        cache, hidden_states, attentions, router_logits, router_slots, tokens_per_slot: as in `ZayaModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    router_slots: tuple[torch.Tensor, ...] | None = None
    tokens_per_slot: torch.Tensor | None = None
