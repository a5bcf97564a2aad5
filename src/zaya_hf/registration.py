"""Registration with transformers' Auto classes: importing zaya_hf does it, and nothing else."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def _model_classes() -> dict[Any, Any]:
    """Auto class -> ours."""
    from .modeling_zaya import ZayaForCausalLM, ZayaModel
    from .task_heads import ZayaForQuestionAnswering, ZayaForSequenceClassification, ZayaForTokenClassification

    return {
        AutoModel: ZayaModel,
        AutoModelForCausalLM: ZayaForCausalLM,
        AutoModelForQuestionAnswering: ZayaForQuestionAnswering,
        AutoModelForSequenceClassification: ZayaForSequenceClassification,
        AutoModelForTokenClassification: ZayaForTokenClassification,
    }


def register() -> None:
    """Let the Auto classes build zaya_hf's classes for ``model_type: zaya``. Repeating it changes nothing."""
    from .configuration_zaya import ZayaConfig

    AutoConfig.register("zaya", ZayaConfig, exist_ok=True)
    for auto_class, model_class in _model_classes().items():
        auto_class.register(ZayaConfig, model_class, exist_ok=True)


def unregister() -> None:
    """Give ``model_type: zaya`` back to transformers' own classes. Models that exist already keep working."""
    from .configuration_zaya import ZayaConfig

    if is_registered():
        CONFIG_MAPPING._extra_content.pop("zaya")
    for auto_class in _model_classes():
        auto_class._model_mapping._extra_content.pop(ZayaConfig, None)


def is_registered() -> bool:
    """Whether the Auto classes build zaya_hf's classes at the moment."""
    from .configuration_zaya import ZayaConfig

    return CONFIG_MAPPING._extra_content.get("zaya") is ZayaConfig
