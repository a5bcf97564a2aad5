"""The cache of a conversation: what the next prompt has in common with what was fed before is not computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from zaya_hf.modeling_zaya import ZayaForCausalLM

_CHUNK = 512  # tokens of a prompt that are fed at a time; between them Ctrl-C is heard


class PromptCache:
    """Keeps two caches: one of all that was fed last, answer included, and a copy from before that answer began.

    Templates leave the thinking of earlier answers out, so a prompt often does not go on where the last answer ended:
    it then goes on from the copy. Cropping would do the same, but a cache that can be cropped records every token, and
    that costs more with every token of a long answer.
    """

    def __init__(self, model: ZayaForCausalLM):
        self._model = model
        self._whole: tuple[list[int], DynamicCache] | None = None
        self._before: tuple[list[int], DynamicCache] | None = None

    def clear(self) -> None:
        self._whole = self._before = None

    def prefill(
        self, ids: Sequence[int], lasting: int, interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[DynamicCache, int]:
        """A cache that holds the first tokens of a prompt, at least `lasting` and not all of them.

        Args:
            ids: the prompt.
            lasting: how many of its tokens later prompts will probably begin with as well; less than all.
            interrupted: is asked between pieces; when it says yes, fewer tokens may have been fed.

        Returns:
            the cache, and how many tokens needed no computing.
        """
        ids = list(ids)
        held, cache = self._fitting(ids)
        # A call that fails leaves its cache half-filled: until `hold` nothing refers to it.
        self._whole = None
        fed = len(held)
        while fed < lasting and not interrupted():
            piece = torch.tensor([ids[fed : min(fed + _CHUNK, lasting)]], device=self._model.device)
            with torch.no_grad():
                self._model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            fed += piece.shape[1]
        if fed > len(held):
            self._before = (ids[:fed], copy.deepcopy(cache))
        return cache, len(held)

    def hold(self, ids: Sequence[int], cache: DynamicCache) -> None:
        """Keep the cache after an answer; `ids` are prompt and answer, of which it may lack the last."""
        self._whole = (list(ids)[: cache.get_seq_length()], cache)

    def _fitting(self, ids: list[int]) -> tuple[list[int], DynamicCache]:
        """The longest of what is kept that the prompt goes on from, or an empty cache."""
        fitting = [kept for kept in (self._whole, self._before) if kept and _begins(ids, kept[0])]
        if not fitting:
            return [], DynamicCache(config=self._model.config)
        held, cache = max(fitting, key=lambda kept: len(kept[0]))
        if self._before is not None and cache is self._before[1]:
            cache = copy.deepcopy(cache)
        return held, cache


def _begins(ids: list[int], held: list[int]) -> bool:
    """Whether `held` is a beginning of `ids` that leaves something to feed."""
    return len(held) < len(ids) and ids[: len(held)] == held


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
