"""Which parameter is trained how: by the type of its module, its rank, and nothing that a config could change."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn
from transformers.pytorch_utils import Conv1D

Role = Literal["matrix", "experts", "gate_up_experts", "adamw", "adamw_no_decay"]
ROLES: tuple[Role, ...] = get_args(Role)
MUON_ROLES: tuple[Role, ...] = ("matrix", "experts", "gate_up_experts")

_HEADS = ("lm_head", "score", "classifier")
_ROUTERS = ("gate", "router")


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The role of every trainable parameter of `model`, by its first name. A tied parameter is there once, a frozen one
    is not.

    - "matrix": the weight of a hidden linear layer. Muon. A router's inner matrices (ZAYA has three) are among them.
    - "experts": ``[E, out, in]``, one matrix per expert. Muon on each.
    - "gate_up_experts": ``[E, 2 x out, in]``, gate and up behind each other on dim 1: two matrices per expert, as
      fusing them is storage and not mathematics. Muon on each.
    - "adamw": what else has two or more dimensions: embeddings, heads, convolution kernels, the matrix that gives the
      router its logits, and linear layers with one input or output, which are vectors.
    - "adamw_no_decay": vectors, scalars, and biases of any rank.

    The low-rank factors of PEFT's LoRA are "adamw": those of 3-D experts lie behind each other in one matrix, which is
    none, and of the others only the product acts on anything.

    A parameter that several modules share is left to AdamW if one of them would: a tied embedding never reaches Muon.

    Raises:
        ValueError: for fused gates that are not stored as above (transposed or interleaved ones).
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names: dict[int, str] = {}
    roles: dict[str, Role] = {}
    for path, module in model.named_modules():
        owner = model.get_submodule(path.rpartition(".")[0]) if path else model
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            role = _role(path, module, owner, key, parameter, is_head=module is head)
            name = names.setdefault(id(parameter), f"{path}.{key}" if path else key)
            if name not in roles or role not in MUON_ROLES:
                roles[name] = role
    return roles


def _role(path: str, module: nn.Module, owner: nn.Module, key: str, parameter: nn.Parameter, *, is_head: bool) -> Role:
    if parameter.ndim < 2 or key.endswith("bias"):
        return "adamw_no_decay"
    if "lora_" in path or "lora_" in key:
        return "adamw"
    last = path.rpartition(".")[2]
    if parameter.ndim == 3 and ("expert" in last or "Expert" in type(module).__name__):
        return _expert_role(path, module, key, parameter)
    hidden = parameter.ndim == 2 and isinstance(module, (nn.Linear, Conv1D)) and min(parameter.shape) > 1
    # The last matrix of a router with several, and the only one of a router that is a plain linear layer.
    routes = last in _ROUTERS or (last == "out_proj" and "Router" in type(owner).__name__)
    return "matrix" if hidden and not (is_head or last in _HEADS or routes) else "adamw"


def _expert_role(path: str, module: nn.Module, key: str, parameter: nn.Parameter) -> Role:
    if "gate_up" not in key:
        return "experts"
    down = getattr(module, "down_proj", None)
    expected = None if down is None else (down.shape[0], 2 * down.shape[2], down.shape[1])
    if not getattr(module, "is_concatenated", True) or expected not in (None, tuple(parameter.shape)):
        raise ValueError(
            f"{path}.{key} has shape {tuple(parameter.shape)}: gate and up have to lie behind each other on dim 1, as "
            "[experts, 2 x intermediate, hidden]."
        )
    return "gate_up_experts"
