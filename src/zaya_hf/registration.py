"""Registration with transformers' Auto classes: importing zaya_hf does it, and nothing else."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING


def register() -> None:
    """Let the Auto classes build zaya_hf's classes for ``model_type: zaya``. Repeating it changes nothing."""
    from .configuration_zaya import ZayaConfig
    from .modeling_zaya import ZayaForCausalLM, ZayaModel

    AutoConfig.register("zaya", ZayaConfig, exist_ok=True)
    AutoModel.register(ZayaConfig, ZayaModel, exist_ok=True)
    AutoModelForCausalLM.register(ZayaConfig, ZayaForCausalLM, exist_ok=True)


def unregister() -> None:
    """Give ``model_type: zaya`` back to transformers' own classes. Models that exist already keep working."""
    from .configuration_zaya import ZayaConfig

    if is_registered():
        CONFIG_MAPPING._extra_content.pop("zaya")
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._extra_content.pop(ZayaConfig, None)


def is_registered() -> bool:
    """Whether the Auto classes build zaya_hf's classes at the moment."""
    from .configuration_zaya import ZayaConfig

    return CONFIG_MAPPING._extra_content.get("zaya") is ZayaConfig
