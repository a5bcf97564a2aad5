"""Tiny models, padded prompts, and the texts that step-by-step runs without a cache and without padding write."""

from __future__ import annotations

import functools

import torch

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

KINDS = {
    "full": {},
    "sliding": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4},
    "bias, widths 3 4": {"attention_bias": True, "cca_time0": 3, "cca_time1": 4},
}
#: no token ends a text, and the pad token is never chosen: a text must not look like its padding
OPEN_ENDED = {"eos_token_id": None, "suppress_tokens": [0], "do_sample": False}


@functools.cache
def model_of(kind: str, seed: int = 0) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**KINDS[kind])), seed=seed)


@torch.no_grad()
def greedy(model: ZayaForCausalLM, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[1, tokens]``: the most likely next id, `tokens` times over, each from a whole run without a cache."""
    ids = prompt
    for _ in range(tokens):
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        logits[:, 0] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, prompt.shape[1] :]


def padded(lengths: list[int], side: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Ids ``[B, max length]`` padded with 0 on one side, their mask, and the prompts alone ``[1, length]``."""
    width = max(lengths)
    prompts = [random_ids(1, length, seed=seed + index) for index, length in enumerate(lengths)]
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        columns = slice(width - prompt.shape[1], width) if side == "left" else slice(0, prompt.shape[1])
        ids[row, columns], mask[row, columns] = prompt[0], 1
    return ids, mask, prompts
