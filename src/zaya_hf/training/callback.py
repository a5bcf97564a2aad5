"""Balancing of ZAYA's routers inside transformers' `Trainer`, and so inside TRL's trainers.

    Trainer(model, arguments, collator, rows, callbacks=[BalancingCallback()])

`Trainer` itself does not move the biases: no gradient reaches them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..modeling_zaya import ZayaModel
from .balancing import BIASES, BiasBalancer
from .config import BalancingConfig


class BalancingCallback(TrainerCallback, ExportableState):
    """Moves the balancing biases once per optimizer step, by the tokens of all its micro-batches in all processes.

    Counted is every forward pass in training mode with gradients, once, whatever is checkpointed; evaluation,
    generation and reference models are not. A step that the optimizer skips (fp16) moves nothing.

    Trainer's logs get `router_load_entropy` (mean over the layers), `router_max_violation` (of the worst layer),
    `router_skip_rate` (mean), `router_dead_experts` (sum), `router_bias_min` and `router_bias_max`, of the last step;
    see `BiasBalancer.panel`. Trainer puts the trackers of `report_to` before the callbacks it is given, and they log
    before this one has a say: for a tracker with these values leave it out there and hand its callback over behind this
    one, ``callbacks=[BalancingCallback(), TensorBoardCallback()]``.

    The state is in Trainer's checkpoints (`trainer_state.json`) and is restored with them.

    Args:
        config: controller and gains.
        options: fields of `BalancingConfig`, instead of it.

    Raises:
        ValueError: for fields that it does not have, and values out of range.
        TypeError: for both.
    """

    def __init__(self, config: BalancingConfig | None = None, **options: Any):
        if config is not None and options:
            raise TypeError(f"give either a config or its fields ({', '.join(sorted(options))}), not both.")
        try:
            self.config = BalancingConfig(**options) if config is None else config
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"balancing, {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
        self._balancer: BiasBalancer | None = None
        self._hooks: list[RemovableHandle] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the routers, and go on from the checkpoint that is resumed, if it is one of such a run.

        Raises:
            ValueError: for a model without a `ZayaModel` of this package, for a second such callback, for a checkpoint
                of another shape, and under `DataParallel`.
        """
        self._remove_hooks()  # of a call that failed
        bodies = [module for module in model.modules() if isinstance(module, ZayaModel)] if model is not None else []
        if len(bodies) != 1:
            raise ValueError(
                f"BalancingCallback found {len(bodies)} of zaya_hf.ZayaModel in {type(model).__name__}; expected one "
                "(transformers' own class does not count the tokens of its experts)."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"BalancingCallback cannot count in the {args.n_gpu} threads of DataParallel: start one process per "
                "GPU (torchrun, accelerate launch) or show one to this process."
            )
        name = type(self).__name__
        states: Any = state.stateful_callbacks  # declared as a list; a dict by name once it is made
        stored = states.get(name)
        if isinstance(stored, list):
            raise ValueError(f"Trainer has {len(stored)} callbacks of type {name}; expected one.")
        self._balancer = BiasBalancer.for_model(bodies[0], self.config)
        assert self._balancer is not None  # every ZayaModel has a router
        if state.global_step > 0 and stored is not None and stored["balancing"] is not None:
            self._balancer.load_state_dict(stored["balancing"])
        states[name] = self.state()  # Trainer saves only what it finds here
        self._hooks = [
            bodies[0].register_forward_pre_hook(_ask, with_kwargs=True),
            bodies[0].register_forward_hook(self._observe),
        ]
        if self.config.controller != "frozen" and _adapter_leaves_biases_out(model):
            warnings.warn(
                "BalancingCallback moves biases of the base model, which an adapter's folder does not have: save the "
                'merged model (merge_and_unload), or train the routers whole (modules_to_save=["gate"]).',
                stacklevel=2,
            )

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Move the biases. Trainer calls this after each step of its optimizer, also one that fp16 scaling skipped."""
        if self._balancer is None:
            return
        if getattr(optimizer, "step_was_skipped", False):
            self._balancer.discard()
        else:
            self._balancer.step(_sum_over_processes)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what the routers do to logs of the training loss."""
        panel = None if self._balancer is None else self._balancer.panel()
        if panel is None or logs is None or "loss" not in logs:
            return
        layers = len(panel["load_entropy"])
        shown = {
            "router_load_entropy": sum(panel["load_entropy"]) / layers,
            "router_max_violation": max(panel["max_violation"]),
            "router_skip_rate": sum(panel["skip_rate"]) / layers,
            "router_dead_experts": sum(panel["dead_experts"]),
            "router_bias_min": min(panel["bias_min"]),
            "router_bias_max": max(panel["bias_max"]),
        }
        logs.update(shown)
        state.log_history[-1].update(shown)  # a copy of `logs` that Trainer made before

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting."""
        self._remove_hooks()

    def state(self) -> dict[str, Any]:
        """What Trainer writes into its checkpoints, as JSON: arguments for a new callback, and the balancer's state."""
        balancing = None if self._balancer is None else _as_lists(self._balancer.state_dict())
        return {"args": self.config.model_dump(mode="json"), "attributes": {}, "balancing": balancing}

    def _observe(self, body: ZayaModel, args: tuple[Any, ...], output: Any) -> None:
        if _counts(body):
            assert self._balancer is not None
            self._balancer.observe(output.tokens_per_slot)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _ask(body: ZayaModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have the model count, whatever its caller and its config say."""
    return args, {**kwargs, "output_router_logits": True} if _counts(body) else kwargs


def _counts(body: ZayaModel) -> bool:
    """Without gradients it generates, or scores for a trainer that learns from the scores, also in training mode."""
    return body.training and torch.is_grad_enabled()


def _sum_over_processes(counts: Tensor) -> None:
    """In place. Over all: those that see the same tokens (tensor parallelism) multiply all counts alike."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)


def _adapter_leaves_biases_out(model: nn.Module | None) -> bool:
    """Whether PEFT is around `model` and saves no router whole."""
    names = [] if model is None or not hasattr(model, "peft_config") else [name for name, _ in model.named_buffers()]
    biases = [name for name in names if name.endswith(BIASES)]
    return bool(biases) and not any(".modules_to_save." in name for name in biases)


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_lists(entry) for name, entry in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value
