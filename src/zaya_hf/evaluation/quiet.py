"""What lm-eval and datasets do to the process they run in, kept from whoever called."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["quiet", "random_states_kept"]


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """The global random states are afterwards what they were: lm-eval and datasets draw names and samples."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, lm-eval shows neither its log below errors nor its bars, of which some have no switch of their own."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    drawn = {name: vars(module)["tqdm"] for name, module in _lm_eval_modules() if "tqdm" in vars(module)}
    logger.setLevel(logging.ERROR)
    for name, bar in drawn.items():
        vars(sys.modules[name])["tqdm"] = _switched_off(bar)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, bar in drawn.items():
            vars(sys.modules[name])["tqdm"] = bar


def _lm_eval_modules() -> list[tuple[str, Any]]:
    return [(name, module) for name, module in sys.modules.items() if name.startswith("lm_eval.")]


def _switched_off(bar: Any) -> Any:
    def silent(*args: Any, **kwargs: Any) -> Any:
        return bar(*args, **(kwargs | {"disable": True}))

    return silent
