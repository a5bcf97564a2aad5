"""The random generators of a process, as a state that can be saved: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "restore", "seed_all"]


def capture() -> dict[str, Any]:
    """The states of all generators, as tensors and plain values: `torch.load(weights_only=True)` reads them."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """Take over what `capture` gave. GPUs that it knows nothing of keep their state, and so does what is not here."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda, device)


def seed_all(seed: int, *stream: int) -> None:
    """Seed all generators for one of many streams: equal arguments give equal numbers, others unrelated ones.

    Args:
        seed: at least 0.
        stream: numbers that tell the streams of a seed apart, such as step and rank; at least 0.
    """
    words = np.random.SeedSequence([seed, len(stream), *stream]).generate_state(2, np.uint64)
    first, second = int(words[0]), int(words[1])
    random.seed(first)
    np.random.seed(first % 2**32)
    torch.manual_seed(second % 2**63)  # of all GPUs too
