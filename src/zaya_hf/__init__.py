"""ZAYA1 for transformers: model, loading of every published layout, generation and training."""

import os as _os
import warnings as _warnings

from . import supported_versions as supported_versions  # first: it warns before the imports below can fail
from .configuration_zaya import ZayaConfig
from .modeling_zaya import ZayaForCausalLM, ZayaModel, ZayaPreTrainedModel
from .outputs import ZayaCausalLMOutput, ZayaModelOutput
from .registration import is_registered, register, unregister
from .task_heads import (
    ZayaForQuestionAnswering,
    ZayaForSequenceClassification,
    ZayaForTokenClassification,
    ZayaQuestionAnsweringOutput,
    ZayaSequenceClassifierOutput,
    ZayaTokenClassifierOutput,
)

__version__ = "0.1.0"
__all__ = [
    "ZayaCausalLMOutput",
    "ZayaConfig",
    "ZayaForCausalLM",
    "ZayaForQuestionAnswering",
    "ZayaForSequenceClassification",
    "ZayaForTokenClassification",
    "ZayaModel",
    "ZayaModelOutput",
    "ZayaPreTrainedModel",
    "ZayaQuestionAnsweringOutput",
    "ZayaSequenceClassifierOutput",
    "ZayaTokenClassifierOutput",
    "__version__",
    "is_registered",
    "register",
    "unregister",
]


def _opted_out() -> bool:
    """Whether ZAYA_HF_NO_REGISTER says that importing must not register; warns about a value that says neither."""
    value = _os.environ.get("ZAYA_HF_NO_REGISTER", "")
    word = value.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word not in ("", "0", "false", "no", "off"):
        _warnings.warn(
            f"ZAYA_HF_NO_REGISTER={value!r} is ignored: 1, true, yes or on keep zaya_hf from registering its classes",
            stacklevel=3,  # the line that imports zaya_hf
        )
    return False


if not _opted_out():
    register()
