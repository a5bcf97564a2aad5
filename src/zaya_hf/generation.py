"""What ZAYA changes about `generate`: right-padded prompts, and no router records by default."""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class RightPaddingMixin:
    """Goes before transformers' `GenerationMixin`."""

    _said_rolled = False

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any):
        """transformers' `generate`. Prompts that are padded on the right are rolled to left padding first, and so are the
        returned sequences; a warning says so once."""
        name = "inputs" if inputs is not None else "input_ids"
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        embeds = kwargs.get("inputs_embeds")
        prompt = embeds if embeds is not None else ids
        mask = kwargs.get("attention_mask")
        if mask is None and embeds is None and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            mask = self._mask_of_pads(ids, args[0] if args else kwargs.get("generation_config"), kwargs)
        fits = isinstance(mask, torch.Tensor) and mask.ndim == 2 and prompt is not None and mask.shape == prompt.shape[:2]
        if not fits or mask.shape[1] == 0 or bool((mask[:, -1] != 0).all()) or _is_filled(kwargs):
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

        # a stable sort by "is real" moves padding to the front and keeps the order of everything else
        order = (mask != 0).to(torch.int8).argsort(dim=1, stable=True)
        kwargs["attention_mask"] = mask.gather(1, order)
        if ids is not None and ids.shape == mask.shape:
            ids = ids.gather(1, order)
            inputs, kwargs = (ids, kwargs) if name == "inputs" else (None, {**kwargs, "input_ids": ids})
        if embeds is not None:
            kwargs["inputs_embeds"] = embeds.gather(1, order[..., None].expand_as(embeds))
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"].expand_as(mask).gather(1, order)
        if not RightPaddingMixin._said_rolled:
            RightPaddingMixin._said_rolled = True
            logger.warning("generate: prompts with padding on the right were rolled to left padding, as are the results.")
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _mask_of_pads(self, ids: torch.Tensor, generation_config: Any, kwargs: dict) -> torch.Tensor | None:
        """The mask that `generate` itself would infer: pad ids are padding unless they may also end a text."""
        config = generation_config or self.generation_config  # type: ignore[attr-defined]
        pad = kwargs.get("pad_token_id", config.pad_token_id)
        eos = kwargs.get("eos_token_id", config.eos_token_id)
        ends = eos if isinstance(eos, (list, tuple)) else [eos]
        if pad is None or pad in ends:
            return None
        return (ids != pad).long()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers; router records are kept only when the caller of `generate` asked for them."""
        kwargs.setdefault("output_router_logits", False)
        return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]


def _is_filled(kwargs: dict) -> bool:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache is not None and cache.get_seq_length() > 0
