"""An exponential moving average of the weights: a smoother model than the last one, at no cost in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["ExponentialMovingAverage"]


class ExponentialMovingAverage:
    """The average of a model's trainable parameters over its updates, in fp32 or wider, beside the model.

    average = decay x average + (1 - decay) x weights, once per good step, from the weights that the model has when this
    is built: after n updates they still count for decay^n. A bf16 weight moves in steps that a decay close to 1 would
    round away, hence the wider copy.

    Frozen parameters and buffers are the model's own, also in `state_dict` and inside `swap`. That includes the
    balancing biases: they answer to what the routers do now and are driven to their values within some hundred steps,
    so an average over many more would lag behind them; and the averaged routers are close to the current ones.

    Args:
        model: at its device and, if it is to be, sharded, with the names that are to be saved: not the wrapper of DDP.
        decay: more than 0 and less than 1.

    Raises:
        ValueError: for another `decay`, and a model without trainable parameters.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"the decay of the averaged weights is {decay!r}; expected more than 0 and less than 1.")
        self.model, self.decay = model, decay
        if not self._parameters:
            raise ValueError(f"{type(model).__name__} has no trainable parameter to average.")
        self._averages = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
        }

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Looked up each time: sharding a model puts other parameters under its names."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        for name, parameter in self._parameters.items():
            average = self._averages[name]
            average.lerp_(parameter.detach().to(average.dtype), 1 - self.decay)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, rounded to its dtype; afterwards its own again, bit for bit.

        Needs memory for one more copy of the trainable parameters.
        """
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._put(self._averages)
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """What `model.state_dict()` has, with the averages, in their dtype, in the place of all trained parameters.

        It is all there is to know, and with `save_pretrained(..., state_dict=...)` a model of its own.
        """
        of_parameter = {id(parameter): self._averages[name] for name, parameter in self._parameters.items()}
        state = self.model.state_dict(keep_vars=True)
        return {name: of_parameter.get(id(tensor), tensor.detach()) for name, tensor in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the averages over from what `state_dict` gave, or from the files that were saved from it.

        Args:
            state: more than the averages may be in it. Of a tied parameter one name is enough; for a PEFT model the
                names are also those of the adapter's file.

        Raises:
            ValueError: an average is missing or has another shape; names it. Nothing is changed then.
        """
        names = self._names_in_files()
        found = {}
        for name, average in self._averages.items():
            given = [state[other] for other in names[name] if other in state]
            if not given:
                raise ValueError(f"the averaged weights have no {name}, which this model trains.")
            if given[0].shape != average.shape:
                shapes = f"{list(given[0].shape)}; the model has {list(average.shape)}"
                raise ValueError(f"the averaged {name} has shape {shapes}.")
            found[name] = given[0]
        for name, tensor in found.items():
            self._averages[name].copy_(tensor)

    def _names_in_files(self) -> dict[str, list[str]]:
        """For every averaged parameter the names that it may be stored under, its first own name first."""
        names = {name: [name] for name in self._parameters}
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        state = self.model.state_dict(keep_vars=True)
        if hasattr(self.model, "peft_config"):
            from peft import get_peft_model_state_dict

            state |= get_peft_model_state_dict(self.model, state_dict=dict(state), save_embedding_layers=False)
        for other, tensor in state.items():
            if id(tensor) in first:
                names[first[id(tensor)]].append(other)
        return names
