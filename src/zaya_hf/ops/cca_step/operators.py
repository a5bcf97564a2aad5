"""A decoding step as operators of torch, with the next states as new tensors or written over the states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.library import define
from .configs import choose_step
from .reference import StepRows

_STATES = "Tensor qk_state, Tensor value_state"
_WRITTEN = "Tensor(a!) qk_state, Tensor(b!) value_state"
_SCHEMA = (
    "Tensor raw, Tensor value_current, Tensor value_delayed, {states}, Tensor depthwise_weight, Tensor depthwise_bias, "
    "Tensor grouped_weight, Tensor grouped_bias, Tensor temperature, Tensor cos, Tensor sin, int head_dim, "
    "bool clamp_temperature, Tensor? value_of_nothing, Tensor? reach, Tensor? continues, Tensor? entry_index, "
    "Tensor? entry_valid, Tensor? last, Tensor? has_real"
)


def _run(
    raw: Tensor, value_current: Tensor, value_delayed: Tensor, qk_state: Tensor, value_state: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    after = raw.new_empty(qk_state.shape), raw.new_empty(value_state.shape)
    return *_launch((raw, value_current, value_delayed, qk_state, value_state), after, others), *after


def _run_in_place(
    raw: Tensor, value_current: Tensor, value_delayed: Tensor, qk_state: Tensor, value_state: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    states = (qk_state, value_state)
    results = _launch((raw, value_current, value_delayed, *states), states, others)
    torch.autograd.graph.increment_version([state for state in states if not state.is_inference()])
    return results


def _launch(tensors: tuple[Any, ...], after: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Tensor, ...]:
    from . import launcher

    *arguments, reach, continues, entry_index, entry_valid, last, has_real = others
    rows = None if reach is None else StepRows(reach, continues, entry_index, entry_valid, last, has_real)
    batch_size, length, _ = tensors[0].shape
    given: list[Any] = [*tensors, *after, *arguments, rows, choose_step(batch_size, length, tensors[0].dtype)]
    return launcher.step(*given)


def _fake(
    raw: Tensor, value_current: Tensor, value_delayed: Tensor, qk_state: Tensor, value_state: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    results = _fake_in_place(raw, value_current, value_delayed, qk_state, value_state, *others)
    return *results, raw.new_empty(qk_state.shape), raw.new_empty(value_state.shape)


def _fake_in_place(raw: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch_size, length, channels = raw.shape
    temperature, head_dim = others[8], others[11]
    groups = temperature.shape[0]
    heads = channels // head_dim - groups
    return tuple(raw.new_empty(batch_size, count, length, head_dim) for count in (heads, groups, groups))


step = define(f"cca_step({_SCHEMA.format(states=_STATES)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _run, _fake)
step_in_place = define(
    f"cca_step_({_SCHEMA.format(states=_WRITTEN)}) -> (Tensor, Tensor, Tensor)", _run_in_place, _fake_in_place
)
