"""Weights of a model whose parameters may be spread over the processes (FSDP2), as whole tensors and back.

accelerate 1.15 has two faults here for models with buffers in their state, such as the routers' balancing biases: with
`cpu_ram_efficient_loading` it takes every tensor of the state for a sharded one, and what it unwraps is still sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from .ranks import is_main

__all__ = ["full_state", "is_sharded", "load_full_state", "prepare"]


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any) -> tuple[Any, ...]:
    """`accelerator.prepare(model, *others)`, also where only the main process has loaded the weights.

    That is what `cpu_ram_efficient_loading` of accelerate's FSDP2 means: the others have a model of the same shapes and
    any values. Afterwards parameters are sharded, and persistent buffers whole and equal to the main process's.
    """
    if not (accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading):
        return tuple(accelerator.prepare(model, *others))
    with _buffers_out_of_state(model):
        prepared = tuple(accelerator.prepare(model, *others))
    for buffer in prepared[0].buffers():
        dist.broadcast(buffer, src=0)
    return prepared


@contextmanager
def _buffers_out_of_state(model: nn.Module) -> Iterator[None]:
    """Meanwhile no buffer is persistent: accelerate keeps such buffers whole, as they are in each process."""
    before = [(module, set(module._non_persistent_buffers_set)) for module in model.modules()]
    for module, _ in before:
        module._non_persistent_buffers_set.update(module._buffers)
    try:
        yield
    finally:
        for module, names in before:
            module._non_persistent_buffers_set.intersection_update(names)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as plain tensors; those of a sharded model on the CPU.

    Collective. Of a sharded model only the main process gets them, the others nothing; and tied parameters come under
    one of their names, as they would not be one tensor any more.
    """
    if not is_sharded(model):
        return dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    further = {name for names in _names(model) for name in names[1:]}
    return {name: tensor for name, tensor in whole.items() if name not in further}


def load_full_state(model: nn.Module, read: Callable[[], Mapping[str, Tensor]]) -> None:
    """Put whole tensors into `model`, in place. Collective.

    Args:
        read: gives the tensors by name; of tied parameters one name is enough. For a sharded model it is called in the
            main process alone.

    Raises:
        ValueError: names that `model` does not have or that are missing, and other shapes.
    """
    if not is_sharded(model):
        tensors = _with_tied(model, read())
        _check(model, tensors)
        model.load_state_dict(tensors)
        return
    whole: dict[str, Any] = dict(_with_tied(model, read())) if is_main() else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def is_sharded(model: nn.Module) -> bool:
    """Whether some parameters are spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _names(model: nn.Module) -> list[list[str]]:
    """For every parameter its names: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _with_tied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every name of a tied parameter of which one name is there."""
    complete = dict(tensors)
    for names in _names(model):
        given = [name for name in names if name in tensors]
        if given:
            complete.update({name: tensors[given[0]] for name in names if name not in tensors})
    return complete


def _check(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors:
            raise ValueError(f"the weights have no {name}, which the model has.")
        if name not in own:
            raise ValueError(f"the weights have {name}, which the model does not have.")
        if own[name].shape != tensors[name].shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}; the model has {list(own[name].shape)}.")
