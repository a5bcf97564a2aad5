"""ZAYA1 for transformers: model, loading of every published layout, generation and training."""

import os as _os

from .configuration_zaya import ZayaConfig
from .modeling_zaya import ZayaForCausalLM, ZayaModel, ZayaPreTrainedModel
from .registration import is_registered, register, unregister

__version__ = "0.1.0"
__all__ = [
    "ZayaConfig",
    "ZayaForCausalLM",
    "ZayaModel",
    "ZayaPreTrainedModel",
    "__version__",
    "is_registered",
    "register",
    "unregister",
]

if _os.environ.get("ZAYA_HF_NO_REGISTER") != "1":
    register()
