"""What ZAYA changes about `generate`: right-padded prompts, caches that a caller brings, masks made ahead."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from transformers import Cache, GenerationConfig
from transformers.generation import GenerationMixin

from . import prepared_masks, visibility
from .cache import adopt, check_call, one_cache
from .configuration_zaya import ZayaConfig
from .generation_checks import WithoutContinuousBatching, check_settings

logger = logging.getLogger(__name__)


class ZayaGenerationMixin(WithoutContinuousBatching):
    """Goes before transformers' `GenerationMixin`."""

    _said_rolled = False

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, for prompts padded on either side.

        Prompts that are padded on the right are rolled to left padding first, and so are the returned sequences; a
        warning says so once. A `cache` (or `past_key_values`) that holds tokens wants all ids, or the new ones together
        with an `attention_mask` over cached and new tokens.

        Raises:
            TypeError: for a cache that cannot hold ZAYA's states.
            ValueError: for a cache of another model, one together with ``use_cache=False``, when no token is left to
                feed after the cached ones, for a prompt without rows or tokens, for embeddings together with what needs
                ids (`prefill_chunk_size`, assisted decoding), for `assistant_early_exit`, and for settings that ZAYA's
                cache or transformers itself does not support (see `generation_checks`).
        """
        cache = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        past = 0
        if cache is not None:
            past = adopt(cache, self.config).length  # type: ignore[attr-defined]
            if self._setting("use_cache", generation_config, kwargs) is False:
                raise ValueError("use_cache=False contradicts the cache that was passed; leave one of them out.")
            kwargs["cache"] = cache
        check_settings(
            lambda name: self._setting(name, generation_config, kwargs),
            self.device.type,  # type: ignore[attr-defined]
            custom=kwargs.get("custom_generate") is not None,
        )
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        embeds = kwargs.get("inputs_embeds")
        prompt = ids if embeds is None else embeds
        self._check_prompt(ids, embeds, generation_config, kwargs)
        mask = kwargs.get("attention_mask")
        if mask is None and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            mask = self._mask_of_pads(ids, generation_config, kwargs)
        if cache is not None and past and prompt is not None and not _is_only_new(prompt, mask):
            if prompt.shape[1] <= past:
                raise ValueError(
                    f"the cache holds {past} tokens and the prompt {prompt.shape[1]}. Pass all ids, the last ones not "
                    f"cached yet, or only the new ids with an attention_mask of [{prompt.shape[0]}, {past} + new]."
                )
            if self._drafts(generation_config, kwargs):
                self._start_over(cache, prompt, mask, kwargs)
                past = 0
        order = None if prompt is None else _left_padded(mask, prompt, past)
        if order is not None:
            assert mask is not None
            kwargs["attention_mask"] = mask.gather(1, order)
            if inputs is not None:
                inputs = _reordered(inputs, order)
            for name in ("input_ids", "inputs_embeds", "position_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = _reordered(kwargs[name], order)
            if not ZayaGenerationMixin._said_rolled:
                ZayaGenerationMixin._said_rolled = True
                logger.warning("generate: prompts padded on the right were rolled to left padding, as are the results.")
        return super().generate(inputs, generation_config, *args, **kwargs)  # type: ignore[misc]

    def _setting(self, name: str, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
        """A generation parameter, from where `generate` takes it."""
        if name in kwargs:
            return kwargs[name]
        given = getattr(generation_config, name, None)
        return getattr(self.generation_config, name, None) if given is None else given  # type: ignore[attr-defined]

    def _drafts(self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> bool:
        """Whether tokens are drafted and verified (assisted decoding)."""
        looked_up = self._setting("prompt_lookup_num_tokens", generation_config, kwargs)
        return looked_up is not None or kwargs.get("assistant_model") is not None

    def _check_prompt(
        self,
        ids: torch.Tensor | None,
        embeds: torch.Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Refuse what the library would take and stumble over later."""
        prompt = ids if embeds is None else embeds
        if isinstance(prompt, torch.Tensor) and 0 in prompt.shape[:2]:
            raise ValueError(f"the prompt has shape {tuple(prompt.shape)}; it needs at least one row and one token.")
        if self._setting("assistant_early_exit", generation_config, kwargs) is not None:
            raise ValueError("assistant_early_exit is not supported; pass an assistant_model instead.")
        if kwargs.get("routed_experts") is not None:
            raise ValueError("routed_experts are for forward: generate chooses tokens that have no slots yet.")
        if embeds is None:
            return
        if self._setting("prefill_chunk_size", generation_config, kwargs) is not None:
            raise ValueError("prefill_chunk_size splits ids; it cannot split inputs_embeds. Leave one of them out.")
        if self._drafts(generation_config, kwargs):  # its first step would feed the embeddings without the draft
            raise ValueError("assisted decoding drafts from ids and feeds ids; it cannot start from inputs_embeds.")

    def _start_over(self, cache: Cache, prompt: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        """Empty the cache: assisted decoding feeds all ids that it gets, cached or not. Its documents stay known."""
        history = adopt(cache, self.config)  # type: ignore[attr-defined]
        if history.has_holes():
            raise ValueError("assisted decoding cannot go on from a cache with padding between its tokens.")
        if history.segments is not None and kwargs.get("position_ids") is None:
            mask = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device) if mask is None else mask
            known = {"attention_mask": mask, "cache": cache}
            kwargs["position_ids"] = self._prepare_position_ids_for_generation(prompt, known)
        cache.reset()

    def _mask_of_pads(
        self, ids: torch.Tensor, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The mask that `generate` itself would infer: pad ids are padding unless they may also end a text."""
        pad, eos = (self._setting(f"{name}_token_id", generation_config, kwargs) for name in ("pad", "eos"))
        ends = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        return None if pad is None or int(pad) in ends else (ids != pad).long()

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """As in transformers, but counted on from the positions in the cache. After packed documents, or positions that
        did not start at 0, the number of a column is no position: it would start another document."""
        positions = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        cache = model_kwargs.get("cache")
        history = None if cache is None else adopt(cache, self.config)  # type: ignore[attr-defined]
        if history is None or history.segments is None or positions.shape[1] <= history.length:
            return positions
        mask = model_kwargs.get("attention_mask")
        new = torch.ones_like(positions) if mask is None else (mask != 0).long()
        every = max(len(history.segments) // len(inputs_tensor), 1)  # rows that were repeated for beams already
        cached, last = (t[::every] for t in history.counted_on())
        return torch.cat([cached, last[:, None] + new[:, history.length :].cumsum(1)], dim=1)

    def _get_candidate_generator(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but drafts end one token before the text has to. Looked-up ones can reach beyond: those
        tokens are fed, then dropped, and a static cache made for this text has no slots for them."""
        generator = super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]
        draft, longest = generator.get_candidates, generation_config.max_length - 1

        def get_candidates(ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            drafted, logits = draft(ids, *args, **kwargs)
            new = min(drafted.shape[1], max(longest, ids.shape[1])) - ids.shape[1]
            return drafted[:, : ids.shape[1] + new], logits[:, :new] if logits is not None and new else None

        generator.get_candidates = get_candidates
        return generator

    # transformers reads the signature of this method to learn whether prompts may be embeddings
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers; router records are kept only when the caller of `generate` asked for them.

        A decoding step whose rows are plain goes without positions: `generate` has counted them on from the cache, as
        the model does, and reading them to find that out would stall an accelerator at every step.
        """
        if kwargs.get("output_router_logits") is None:
            kwargs["output_router_logits"] = False
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        positions = inputs.get("position_ids")
        cache = inputs.get("cache")
        if cache is not None and "prepare_inputs_for_generation" in vars(self):
            inputs["past_key_values"] = cache  # PEFT, which calls this in its own, looks for the cache under that name
        if cache is None or positions is None or positions.shape[-1] != 1 or inputs.get("attention_mask") is not None:
            return inputs
        history = adopt(cache, self.config)  # type: ignore[attr-defined]
        plain = history.length > 0 and history.segments is None
        # Only the first positions can be the caller's own; they are looked at once.
        if plain and (not kwargs.get("is_first_iteration") or bool((positions == history.length).all())):
            del inputs["position_ids"]
        return inputs

    @staticmethod
    def create_masks_for_generate(
        config: ZayaConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Masks made ahead of `forward`, which takes the result in the place of its `attention_mask`.

        Args:
            inputs_embeds: ``[B, S, any]``; only its shape, dtype and device count.
            attention_mask, position_ids, cache: as for `ZayaModel.forward`.

        Returns:
            the mask of every layer type, and what `forward` would have read from the arguments: see `prepared_masks`.
        """
        cache = one_cache(cache, past_key_values)
        history = None if cache is None else adopt(cache, config)
        if cache is not None:
            check_call(cache, inputs_embeds)
        # The first call fills the cache and is not compiled; later ones shall meet one shape.
        fixed = history is not None and history.length > 0 and getattr(attention_mask, "ndim", 2) == 2
        visible = visibility.describe(
            config,
            batch_size=inputs_embeds.shape[0],
            sequence_length=inputs_embeds.shape[1],
            device=inputs_embeds.device,
            dtype=inputs_embeds.dtype,
            attention_mask=attention_mask,
            position_ids=position_ids,
            history=history,
            cache=cache,
            fixed=fixed,
        )
        return prepared_masks.to_dict(visible)


def _is_only_new(prompt: torch.Tensor, mask: Any) -> bool:
    """Whether the prompt lacks the cached tokens: then the mask is longer."""
    return isinstance(mask, torch.Tensor) and mask.shape[1] > prompt.shape[1]


def _left_padded(mask: Any, prompt: torch.Tensor, past: int) -> torch.Tensor | None:
    """How to gather the columns of `mask` so that no row ends in padding: ``[B, columns]``; None if no row does.

    Rows are rolled, so padding inside a row stays where it is relative to its tokens. The first `past` columns are
    cached and stay.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[0] != prompt.shape[0]:
        return None
    if mask.shape[1] not in (prompt.shape[1], past + prompt.shape[1]):
        return None
    real = mask[:, past:] != 0
    length = real.shape[1]
    columns = torch.arange(length, device=mask.device)
    after_last = torch.where(real, columns + 1, 0).amax(1) if length else real.sum(1)
    trailing = torch.where(after_last > 0, length - after_last, 0)
    if not bool(trailing.any()):
        return None
    rolled = past + (columns - trailing[:, None]) % length
    return torch.cat([torch.arange(past, device=mask.device).expand(len(mask), -1), rolled], dim=1)


def _reordered(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``[B or 1, columns, ...]`` (or ``[columns]``) gathered by `order`; a shorter one lacks the cached columns."""
    tensor = tensor[None] if tensor.ndim == 1 else tensor
    missing = order.shape[1] - tensor.shape[1]
    rows = tensor.expand(order.shape[0], *tensor.shape[1:])
    index = (order[:, missing:] - missing).view(order.shape[0], -1, *[1] * (tensor.ndim - 2))
    return rows.gather(1, index.expand_as(rows).to(tensor.device))
