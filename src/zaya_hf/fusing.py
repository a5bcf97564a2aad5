"""`fuse_for_inference`: one product instead of four per attention layer, and packed weights on request.

Fusing lays the weights of the four CCA projections side by side in one tensor, of which the parameters become views:
names, shapes, values and memory stay, and what is written to a parameter is written to the fused weight. Nothing of it
is in `state_dict`, and everything that moves, copies or replaces parameters simply ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from . import ops

_checked_outside = False


def is_only_its_weights(module: nn.Module, though_recorded: bool = False) -> bool:
    """Whether a call does nothing beside the forward of its class: no hook that loads, gathers or watches.

    Args:
        though_recorded: let the hooks pass that record outputs for transformers (``output_hidden_states``).
    """
    everywhere = nn.modules.module
    return not (
        "forward" in vars(module)  # where accelerate puts its own
        or (module._forward_hooks and not (though_recorded and _only_record(module._forward_hooks)))
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def _only_record(hooks: dict[int, Any]) -> bool:
    return all(getattr(hook, "__module__", None) == output_capturing.__name__ for hook in hooks.values())


def is_adapted(module: nn.Module) -> bool:
    """Whether this is what PEFT puts around a layer."""
    return not {"base_layer", "original_module"}.isdisjoint(module._modules)


def _pointers(layer: Any) -> tuple[int, int]:
    return layer.weight.data_ptr(), 0 if layer.bias is None else layer.bias.data_ptr()


@contextmanager
def checked_outside() -> Iterator[None]:
    """Compiled code inside relies on fused weights: the caller has asked `holds_for` right before."""
    global _checked_outside
    before, _checked_outside = _checked_outside, True
    try:
        yield
    finally:
        _checked_outside = before


class FusedLinears(ops.Transient):
    """Linear layers of one input as one product.

    Args:
        layers: plain linear layers ``[N_i, K]``; their weights and biases become views of the fused ones.
        pack: also keep the fused weight packed (`ops.PackedWeight`).
    """

    def __init__(self, layers: list[nn.Linear], pack: bool):
        self.layers = layers
        self.sizes = [layer.weight.shape[0] for layer in layers]
        self.weight = _as_views([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _as_views(biases) if biases else None
        self.pointers = [_pointers(layer) for layer in layers]
        self.packed = ops.PackedWeight(self.weight, [layer.weight for layer in layers]) if pack else None

    def holds_for(self, layers: list[Any]) -> bool:
        """Whether these are the layers that were fused, with the same storage and nothing hooked to their calls, and no
        gradient is wanted. A graph cannot ask that; see `checked_outside`."""
        if torch.compiler.is_compiling():
            return _checked_outside
        return not torch.is_grad_enabled() and all(
            layer is known and _pointers(layer) == pointers and is_only_its_weights(layer)
            for layer, known, pointers in zip(layers, self.layers, self.pointers, strict=True)
        )

    @torch.no_grad()
    def end(self) -> None:
        """Give the parameters that are still views memory of their own."""
        fused = {t.untyped_storage().data_ptr() for t in (self.weight, self.bias) if t is not None}
        for layer in self.layers:
            for parameter in (layer.weight, layer.bias):
                if parameter is not None and parameter.untyped_storage().data_ptr() in fused:
                    parameter.data = parameter.detach().clone()

    def __call__(self, x: Tensor, together: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The product of ``[..., K]``, as views of one tensor; `together` says how many layers share one of them."""
        sizes, ends = [], 0
        for count in together:
            sizes.append(sum(self.sizes[ends : ends + count]))
            ends += count
        return ops.linear(x, self.weight, self.bias, self.packed).split(sizes, dim=-1)


@torch.no_grad()
def _as_views(parameters: list[Any]) -> Tensor:
    fused = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, fused.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return fused


def _check_weight(name: str, module: nn.Module, weight: Any, pack: bool) -> None:
    """Refuse what is not there, not whole, or not plain."""
    why = None
    if weight.is_meta or hasattr(module, "_hf_hook"):
        why = "is offloaded or on the meta device"
    elif type(weight) is not nn.Parameter:
        why = f"has a weight of type {type(weight).__name__} (sharded or quantised)"
    elif pack and not ops.can_pack(weight):
        why = f"has a weight of {weight.dtype} on {weight.device}, which oneDNN does not pack here"
    if why is not None:
        raise ValueError(f"fuse_for_inference: {name} {why}.")


class ZayaFusingMixin:
    """`fuse_for_inference` and `unfuse` of every ZAYA model class."""

    def fuse_for_inference(self, pack_weights: bool = False) -> Any:
        """Make inference faster; calling it again changes nothing but `pack_weights`.

        Args:
            pack_weights: on a CPU, also keep a copy of every large weight in the form that its matrix products read
                fastest. Takes as much memory again as the weights. A weight that changes later is used in its plain
                form until this is called again; a change made through ``.data`` is not seen, so call it after those.

        Returns:
            the model.

        Raises:
            ValueError: while training, and where a projection is wrapped, quantised, offloaded or sharded (merge or
                unload adapters first); with `pack_weights`, for weights that cannot be packed here.
        """
        model: Any = self
        if model.training:
            raise ValueError("fuse_for_inference() is for inference: call eval() first.")
        modules = dict(model.named_modules())
        projections = {name: m for name, m in modules.items() if hasattr(m, "fused_projections")}
        linears = {name: m for name, m in modules.items() if hasattr(m, "packed_weight")}
        experts = {name: m for name, m in modules.items() if hasattr(m, "packed_experts")}
        adapted = next((name for name, module in modules.items() if is_adapted(module)), None)
        if adapted is not None:
            raise ValueError(f"fuse_for_inference: {adapted} has an adapter; merge and unload it first.")
        for name, projection in projections.items():
            for child in projection.layers_to_fuse():
                if not hasattr(child, "packed_weight"):
                    raise ValueError(
                        f"{name} holds a {type(child).__name__} where a plain linear layer is fused: merge or unload "
                        "adapters first; quantised layers cannot be fused."
                    )
        for name, module in {**linears, **experts}.items():
            for weight in module.parameters(recurse=False):
                _check_weight(name, module, weight, pack_weights and weight.ndim > 1)
        self.unfuse()
        fused = set()
        for projection in projections.values():
            projection.fused_projections = FusedLinears(projection.layers_to_fuse(), pack_weights)
            fused.update(projection.layers_to_fuse())
        if pack_weights:
            for linear in linears.values():
                if linear not in fused and linear.reads_packed:
                    linear.packed_weight = ops.PackedWeight(linear.weight)
            for module in experts.values():
                module.packed_experts = ops.PackedExperts(module.gate_up_proj, module.down_proj)
        return model

    def unfuse(self) -> Any:
        """Undo `fuse_for_inference`; the parameters keep their values and get memory of their own again."""
        model: Any = self
        for module in model.modules():
            if getattr(module, "fused_projections", None) is not None:
                module.fused_projections.end()
                module.fused_projections = None
            for name in ("packed_weight", "packed_experts"):
                if getattr(module, name, None) is not None:
                    setattr(module, name, None)
        return model

    @property
    def is_fused(self) -> bool:
        """Whether `fuse_for_inference` is in force."""
        model: Any = self
        return any(getattr(module, "fused_projections", None) is not None for module in model.modules())

    @property
    def peft_config(self) -> Any:
        """Configs of the adapters in the model. PEFT sets this when it has put adapters in, which ends the fusing:
        adapters are merged through ``.data``, which packed weights would not notice. Adapters of the experts also end
        compiled decoding."""
        try:
            return vars(self)["_adapters"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no adapters.") from None

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        model: Any = self
        model.unfuse()
        if any(is_adapted(module) and hasattr(module, "parameter_name") for module in model.modules()):
            model.uncompile_decoding()  # such adapters cannot be compiled
        vars(self)["_adapters"] = configs

    @peft_config.deleter
    def peft_config(self) -> None:
        vars(self).pop("_adapters", None)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moving or casting a model ends the fusing: nothing of the old weights stays behind."""
        self.unfuse()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """As in torch; training ends the fusing."""
        if mode:
            self.unfuse()
        return super().train(mode)  # type: ignore[misc]
