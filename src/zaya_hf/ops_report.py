"""`model.ops_report()`: which implementation of each operator runs for a model, and why."""

from __future__ import annotations

from typing import Any

from . import ops
from .experts_dispatch import OURS, TRITON


def facts_of(model: Any) -> ops.Facts:
    """What of a model decides which kernels take it: its sizes, and where its first layer is."""
    config, weight = model.config, next(model.parameters())
    return ops.Facts(
        device=weight.device,
        dtype=weight.dtype,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=config.head_dim,
        widths=(config.cca_time0, config.cca_time1),
        num_experts=config.num_experts,
        intermediate=config.moe_intermediate_size,
        activation=config.hidden_act,
        router_width=config.router_hidden_size,
    )


def _backends(model: Any, facts: ops.Facts) -> dict[str, tuple[str, str]]:
    """As `ops.backends`; for the experts the config's `experts_implementation` has a say."""
    found, name = ops.backends(facts.device, facts), model.config._experts_implementation
    if ops.selection.reference_only("experts"):
        return found
    if name == TRITON:
        with ops.selection.use(ops.selection.description(), experts="triton"):
            backend, why = ops.backends(facts.device, facts)["experts"]
        found["experts"] = backend, f"experts_implementation={name!r}" if backend == "triton" else why
    elif name not in (None, OURS, "eager"):
        found["experts"] = "transformers", f"experts_implementation={name!r}"
    return found


class ZayaOpsMixin:
    """`ops_report` of every ZAYA model class."""

    def ops_report(self) -> dict[str, tuple[str, str]]:
        """For each operator, the implementation that runs for this model's device, dtype and sizes, and why; with the
        calls in this process, of any model, that had to do without the kernels meant for them.

        Returns:
            ``{"cca_mix": ("triton", "on a GPU"), ...}``. A call may still need another one: inside an exported program,
            say, or for a tensor subclass. ``ZAYA_OPS`` and `ops.selection.use` change the choice.
        """
        facts = facts_of(self)
        report = {}
        for name, (backend, why) in _backends(self, facts).items():
            without = [reason for reason in ops.selection.said(name) if reason not in why]
            calls = f"; calls went without kernels since {'; '.join(without)}" if without else ""
            report[name] = (backend, why + calls)
        return report
