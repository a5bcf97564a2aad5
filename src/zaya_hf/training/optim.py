"""HybridMuon: Muon for hidden matrices and experts, AdamW for everything else, in one optimizer object.

Reference: `torch.optim.Muon` (Jordan et al., https://kellerjordan.github.io/posts/muon/; the learning rate's adjustment
by shape: Liu et al., arXiv 2502.16982) and `torch.optim.AdamW`. torch's Muon takes 2-D tensors one by one; nine tenths
of ZAYA1-8B's parameters are 3-D. One object and not two, since sharded checkpoints pair one model with one optimizer.

Sharded parameters (DTensor): the elementwise parts, momentum and AdamW, take them as they are. Muon needs whole
matrices, and `whole_matrices` is the one place that knows where they are: in the process itself for replicated
parameters and for experts that are sharded by expert. Another sharding needs its matrices gathered there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from .config import OptimizerConfig
from .muon import ADJUSTMENTS, Matrices, is_whole, placements, update_all, whole_matrices
from .newton_schulz import NS_COEFFICIENTS, newton_schulz_dtype
from .roles import MUON_ROLES, ROLES, Role, parameter_roles

__all__ = ["HybridMuon", "build_optimizer", "optimizer_for"]


class HybridMuon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer; every group says by its `role` which of the two, see `parameter_roles`.

    All matrices of one shape, transposed or not, from any group, go through one batched Newton-Schulz iteration.
    Decoupled weight decay in both parts. All state exists from the start: `momentum_buffer` for Muon; `step`,
    `exp_avg` and `exp_avg_sq` for AdamW; a checkpoint has the same keys at any time. A parameter without a gradient is
    left alone; an expert without tokens has a gradient of zeros, and moves on by its momentum. A step at `lr` 0 changes
    no parameter; as in torch, gradients still enter the momenta.

    Args:
        params: groups, dicts with `params` (tensors, or names with tensors), `role` and optionally `lr`,
            `weight_decay` and any other of the options below, for that group alone.
        muon_lr, adamw_lr: the group's `lr` where it names none.
        weight_decay: decoupled, times `lr`; role "adamw_no_decay" has none where its group names none.
        momentum, nesterov: Muon's, an exponential moving average as in torch.
        ns_coefficients, ns_steps, muon_eps: of the iteration, see `orthogonalise`.
        adjust_lr: what `lr` is multiplied by. "original": sqrt(max(1, rows / columns)); "match_rms_adamw":
            0.2 sqrt(max(rows, columns)), with which learning rates of AdamW can be taken over.
        newton_schulz_dtype: torch.bfloat16, torch.float32, or None: what `newton_schulz_dtype` says of the device.
        betas, adamw_eps: AdamW's.

    Raises:
        ValueError: for options out of range, an unknown role, or a rank or a sharding that does not fit it.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        muon_lr: float = 0.02,
        adamw_lr: float = 5e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_steps: int = 5,
        muon_eps: float = 1e-7,
        adjust_lr: str = "original",
        newton_schulz_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ):
        self._lr_of_role = {role: muon_lr if role in MUON_ROLES else adamw_lr for role in ROLES}
        defaults = {
            "lr": muon_lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "muon_eps": muon_eps,
            "adjust_lr": adjust_lr,
            "newton_schulz_dtype": newton_schulz_dtype,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, see the class; its state is created here."""
        role = param_group.get("role") if isinstance(param_group, dict) else None
        if role not in ROLES:
            raise ValueError(f"a parameter group has the role {role!r}; expected one of {', '.join(ROLES)}.")
        own = {"lr": self._lr_of_role[role], **({"weight_decay": 0.0} if role == "adamw_no_decay" else {})}
        super().add_param_group({**own, **param_group})
        group = self.param_groups[-1]
        try:
            self._complete(group)
        except ValueError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self._create_state(group, parameter)

    @staticmethod
    def _complete(group: dict[str, Any]) -> None:
        """Check a group and decide what was left open."""
        _check_options(group)
        devices = {parameter.device for parameter in group["params"]}
        if group["newton_schulz_dtype"] is None:
            dtypes = {newton_schulz_dtype(device) for device in devices}
            group["newton_schulz_dtype"] = torch.float32 if torch.float32 in dtypes else torch.bfloat16
        # With this key torch keeps the step count on the parameter's device when it loads a state.
        group["fused"] = group["role"] not in MUON_ROLES and {d.type for d in devices} <= {"cpu", "cuda"}
        rank = {"matrix": 2, "experts": 3, "gate_up_experts": 3}.get(group["role"])
        names = group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
        for name, parameter in zip(names, group["params"], strict=True):
            shape = tuple(parameter.shape)
            if not parameter.is_floating_point():
                raise ValueError(f"{name} is {parameter.dtype}: only real floating-point parameters can be trained.")
            if rank is not None and parameter.ndim != rank:
                raise ValueError(f"{name} has shape {shape}; the role {group['role']!r} takes {rank} dimensions.")
            if group["role"] == "gate_up_experts" and shape[1] % 2:
                raise ValueError(f"{name} has shape {shape}; gate and up need an even number of rows on dim 1.")
            if rank is not None and not is_whole(parameter):
                raise ValueError(
                    f"{name} is sharded as {placements(parameter)}: its matrices lie in several processes. Muon takes "
                    "replicated parameters, and experts sharded by expert (Shard(0))."
                )

    def _create_state(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if group["role"] in MUON_ROLES:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            return
        device = parameter.device if group["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, options of the groups included, as in torch.

        Raises:
            ValueError: the state is of groups with other roles or other parameters; torch itself compares sizes only.
        """
        saved, own = ([g.get("role") for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if saved != own:
            raise ValueError(f"the state has groups of roles {saved}; this optimizer has {own}.")
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if "param_names" not in theirs or "param_names" not in ours:
                continue
            different = set(theirs["param_names"]) ^ set(ours["param_names"])
            if different:
                raise ValueError(f"the state has other parameters: {sorted(different)}.")
            # By number a state goes to the parameter at the same place; by name (torch's sharded states) it finds it.
            by_number = all(isinstance(key, int) for key in theirs["params"])
            if by_number and list(theirs["param_names"]) != list(ours["param_names"]):
                raise ValueError(f"the state has its parameters in another order, from {theirs['param_names'][0]} on.")
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: for sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches: dict[tuple[Any, ...], list[Matrices]] = {}
        for group in self.param_groups:
            if group["role"] in MUON_ROLES:
                for matrices in self._proposals(group):
                    batches.setdefault(matrices.batch_key, []).append(matrices)
            else:
                self._adamw(group)
        for members in batches.values():
            update_all(members)
        return loss

    def _proposals(self, group: dict[str, Any]) -> Iterator[Matrices]:
        """Advance the momentum. The matrices that are handed out are those to be orthogonalised by this process."""
        momentum = group["momentum"]
        for parameter in _with_gradient(group):
            gradient, buffer = parameter.grad, self.state[parameter]["momentum_buffer"]
            assert gradient is not None
            buffer.lerp_(gradient, 1 - momentum)
            if group["lr"] == 0:
                continue
            matrices = Matrices(group, *(whole_matrices(t, group["role"]) for t in (parameter, gradient, buffer)))
            if matrices.parameter.numel():
                yield matrices

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = _with_gradient(group)
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _check_options(group: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: names the option.
    """
    for name in ("lr", "weight_decay", "muon_eps", "adamw_eps"):
        if not (isinstance(group[name], (int, float)) and 0 <= group[name] < math.inf):
            raise ValueError(f"{name} is {group[name]!r}; expected a finite number >= 0.")
    if group["muon_eps"] == 0:
        raise ValueError("muon_eps is 0; expected more: an expert that saw no token has a gradient of zeros.")
    for name, value in (("momentum", group["momentum"]), *(("betas", beta) for beta in group["betas"])):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {group[name]!r}; expected at least 0 and less than 1.")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas is {group['betas']!r}; expected two numbers.")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients is {group['ns_coefficients']!r}; expected three numbers.")
    if not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps is {group['ns_steps']!r}; expected 1 to 99.")
    if group["adjust_lr"] not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr is {group['adjust_lr']!r}; expected one of {', '.join(ADJUSTMENTS)}.")
    if group["newton_schulz_dtype"] not in (None, torch.bfloat16, torch.float32):
        raise ValueError(
            f"newton_schulz_dtype is {group['newton_schulz_dtype']!r}; expected torch.bfloat16, torch.float32 or None."
        )


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    if any(parameter.grad.layout != torch.strided for parameter in parameters):
        raise RuntimeError("HybridMuon takes no sparse gradients: build embeddings with sparse=False.")
    return parameters


def build_optimizer(
    model: nn.Module,
    *,
    muon_lr: float = 0.02,
    adamw_lr: float = 5e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    **options: Any,
) -> HybridMuon:
    """A `HybridMuon` for all trainable parameters of `model`, one group per role that occurs.

    Args:
        muon_lr, adamw_lr: learning rates of the two parts.
        weight_decay: of what decays at all, see `parameter_roles`.
        betas: of AdamW.
        options: further ones of `HybridMuon`.

    Raises:
        ValueError: as `parameter_roles` and `HybridMuon`; also if nothing is trainable.
    """
    return HybridMuon(
        _groups(model), muon_lr=muon_lr, adamw_lr=adamw_lr, weight_decay=weight_decay, betas=betas, **options
    )


def optimizer_for(model: nn.Module, config: OptimizerConfig) -> HybridMuon:
    """The optimizer for all trainable parameters of `model` that `config`, the section `optimizer` of a run, asks for.

    `name` "adamw" is the same class with all that Muon would take under AdamW, so that states, learning rates and what
    decays are handled alike; `adamw_lr`, or where it is null `lr`, is then the learning rate of everything.

    Raises:
        ValueError: as `build_optimizer`.
    """
    groups = _groups(model, muon=config.name == "hybrid_muon")
    return HybridMuon(
        groups,
        muon_lr=config.lr,
        adamw_lr=config.lr if config.adamw_lr is None else config.adamw_lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr=config.adjust_lr,
        newton_schulz_dtype=None if config.ns_dtype is None else getattr(torch, config.ns_dtype),
        betas=config.betas,
        adamw_eps=config.eps,
    )


def _groups(model: nn.Module, *, muon: bool = True) -> list[dict[str, Any]]:
    """One parameter group per role; every trainable parameter of `model` is in exactly one.

    Raises:
        ValueError: as `parameter_roles`; also if nothing is trainable.
    """
    roles: dict[str, Role] = parameter_roles(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if roles.keys() != trainable.keys():
        raise ValueError(f"parameters without a role, or twice: {sorted(roles.keys() ^ trainable.keys())}.")
    if not roles:
        raise ValueError(f"{type(model).__name__} has no trainable parameter.")
    if not muon:
        roles = {name: "adamw" if role in MUON_ROLES else role for name, role in roles.items()}
    return [
        {"params": [(name, trainable[name]) for name in roles if roles[name] == role], "role": role}
        for role in ROLES
        if role in roles.values()
    ]
