"""The configuration of ZAYA1 models: one layout out, every published dialect in, and errors that say what is wrong.

Field names and defaults are those of the combined-block layout (the one that `Zyphra/ZAYA1-8B` and transformers' own
`zaya` model use), plus the switches that this layout cannot express and that the older files carry. Original layouts
(alternating half-layers, three config dialects) are translated by `zaya_hf.checkpoints.layouts` while they are read.
"""

import copy
import difflib
import os
import warnings
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .checkpoints.dialects import KNOWN_FIELDS, is_original_config, original_to_combined_config
from .json_checks import json_kind, read_json_object, shadowing, wrong_kind
from .remote_code import refuse_own_code

LAYER_TYPES = ("hybrid", "hybrid_sliding")
SKIP_EXPERT = ("zero", "identity")

# Frequencies of these types depend on the length of the input; the model computes frequencies once from the config.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ROPE_TYPES = tuple(
    sorted(({"default"} | set(ROPE_INIT_FUNCTIONS)) - set(_LENGTH_DEPENDENT_ROPE) - {"axial"}),
)

# Keys that published configs carry and that mean nothing to the model: no spelling warning for them.
_HARMLESS_EXTRAS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "base_model_ep_plan",
        "experts_implementation",
        "finetuning_task",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "per_layer_config",
        "pruned_heads",
        "quantization_config",
        "task_specific_params",
        "tie_last_hidden_states",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
        "use_return_dict",
    }
)

C = TypeVar("C", bound=type)


def _one_line_errors(cls: C) -> C:
    """Turn the two-line errors of `huggingface_hub.strict` into a `ValueError` of one line.

    Raises (from the decorated class): ValueError naming the field, the value given and what would be right.
    """
    set_checked: Any = cls.__setattr__
    validate_all: Any = cls.validate  # type: ignore[attr-defined]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            set_checked(self, name, value)
        except StrictDataclassFieldValidationError as error:
            reason = " ".join(str(error.__cause__).split())
            raise ValueError(f"ZayaConfig: {name}={value!r}: {reason}") from None

    def validate(self: Any) -> None:
        """Check the whole configuration. Raises ValueError (one line)."""
        try:
            validate_all(self)
        except StrictDataclassClassValidationError as error:
            raise ValueError(" ".join(str(error.__cause__).split())) from None

    # `strict` refuses to decorate a subclass whose `validate` it did not make itself.
    validate.__is_defined_by_strict_decorator__ = True  # type: ignore[attr-defined]
    cls.__setattr__ = __setattr__  # type: ignore[assignment]
    cls.validate = validate  # type: ignore[attr-defined]
    return cls


def _wrong(field: str, value: Any, right: str) -> ValueError:
    return ValueError(f"ZayaConfig: {field}={value!r} is wrong: {right}")


@_one_line_errors
@strict
class ZayaConfig(PreTrainedConfig):
    """Configuration of a ZAYA1 model (arXiv 2605.05365, table I; CCA: arXiv 2510.04476).

    Fields that are not self-explanatory:

    - `head_dim`: width of one head; query width is `num_attention_heads * head_dim`, which is less than `hidden_size`.
    - `layer_types`: one of "hybrid" (full attention) and "hybrid_sliding" per block; None means all "hybrid".
    - `rope_parameters`: one dict per layer type that is used, e.g. `{"hybrid": {"rope_type": "default",
      "rope_theta": 5e6, "partial_rotary_factor": 0.5}}`; None means theta 5e6 (full) and 1e4 (sliding), factor 0.5.
    - `sliding_window`: tokens that a sliding layer sees, the current one included.
    - `cca_time0`, `cca_time1`: widths (>= 1) of the depthwise and of the grouped q/k convolution.
    - `num_experts`: real experts; the router has one class more, the skip class.
    - `router_hidden_size`: width of the router MLP and of the state it carries from block to block.
    - `moe_intermediate_size`: inner width of one expert; `num_experts_per_tok` is 1.
    - `pad_token_id`, `bos_token_id`, `eos_token_id`: ids, or None; several ids may end a text.
    - `output_router_logits`: whether `forward` returns what the routers computed.

    The others mean what they mean in every transformers config: `vocab_size`, `num_hidden_layers`,
    `num_key_value_heads`, `hidden_act`, `max_position_embeddings`, `initializer_range`, `rms_norm_eps`, `use_cache`,
    `tie_word_embeddings`, `attention_dropout`, and `attention_bias` and `lm_head_bias`, whether these layers have one.

    Switches that the combined layout of transformers does not have (their defaults are what transformers computes):

    - `clamp_temp`: keys are scaled by `exp(clamp(temp, 1e-7, 2))` instead of by `temp`.
    - `residual_in_fp32`: keep the residual stream in fp32.
    - `router_norm_eps`: epsilon of the router's RMSNorm; None means `rms_norm_eps`.
    - `fp32_logits`: multiply by the LM head in fp32.
    - `skip_expert`: what a token that picks the skip class gets: "zero", or "identity" (its input times its weight).

    Raises: ValueError, one line, for every field that is out of range or contradicts another one.
    Warns (UserWarning) about an unknown key that is close to a known one.
    """

    model_type: ClassVar[str] = "zaya"
    base_model_ep_plan: ClassVar[dict[str, Any] | None] = {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    # The cache keeps two states per block: the last q/k columns and the delayed half of the value.
    number_of_conv_states: ClassVar[int] = 2
    # What `Trainer` leaves out of the predictions that it gathers over batches.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "router_logits", "router_slots", "tokens_per_slot"]

    vocab_size: int = 262272
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    sliding_window: int | None = None
    attention_dropout: float | int = 0.0
    moe_intermediate_size: int = 2048
    num_experts_per_tok: int = 1
    num_experts: int = 16
    output_router_logits: bool = False
    layer_types: list[str] | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 106
    head_dim: int = 128
    attention_bias: bool = False
    lm_head_bias: bool = False
    router_hidden_size: int = 256
    cca_time0: int = 2
    cca_time1: int = 2

    clamp_temp: bool = False
    residual_in_fp32: bool = True
    router_norm_eps: float | int | None = None
    fp32_logits: bool = False
    skip_expert: str = "zero"

    def __post_init__(self, **kwargs: Any) -> None:
        if is_original_config(kwargs):
            field = next(name for name in kwargs if name in KNOWN_FIELDS or name.startswith("smoe_"))
            raise _wrong(field, kwargs[field], "a field of the original layout; use ZayaConfig.from_dict(...)")
        self.layer_types = ["hybrid"] * self.num_hidden_layers if self.layer_types is None else list(self.layer_types)
        for name in ("rms_norm_eps", "router_norm_eps", "initializer_range"):
            # JSON writes 0.0 as 0 in some tools, and transformers' own config takes nothing but a float.
            if getattr(self, name) is not None:
                setattr(self, name, float(getattr(self, name)))
        # null is "not given"; `use_return_dict` is an old name that transformers cannot set any more.
        unset = ("num_labels",) if kwargs.get("num_labels") is None else ()
        kwargs = {name: value for name, value in kwargs.items() if name not in ("use_return_dict", *unset)}
        shared = {field.name: getattr(self, field.name) for field in fields(PreTrainedConfig)}
        found = wrong_kind(shared | kwargs) or shadowing(type(self), kwargs)
        if found is not None:
            raise _wrong(*found)
        kwargs = self._read_rope(kwargs)
        self._warn_about_misspelt(kwargs)
        if self.sliding_window and "hybrid_sliding" not in self.layer_types:
            nothing = 'does nothing: no entry of layer_types is "hybrid_sliding"'
            warnings.warn(f"ZayaConfig: sliding_window={self.sliding_window} {nothing}", stacklevel=4)
        super().__post_init__(**kwargs)

    # --- reading ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config from a dict in the combined layout or in any dialect of the original one.

        Raises: ValueError if the original config has a switch that the combined layout cannot hold, or if the result
        is invalid (keyword overrides included).
        """
        config_dict = cls._translate(config_dict)
        # Overrides go through construction as values of the file do; the parent would set them afterwards.
        for field in fields(cls):
            if field.name in kwargs and field.name != "dtype":
                config_dict[field.name] = kwargs.pop(field.name)
        built = super().from_dict(config_dict, **kwargs)
        config = built[0] if isinstance(built, tuple) else built
        config.validate()
        return built

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a config file (any dialect) as a dict in the combined layout, and the keyword arguments left over."""
        # Translated here already, or the parent would complain about the model type of the `smoe` dialect.
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        return cls._translate(config_dict), unused

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        return read_json_object(json_file, "a model config")

    @classmethod
    def _translate(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config_dict, dict):
            raise ValueError(f"ZayaConfig: a model config must be an object (dict), not {json_kind(config_dict)}")
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type == "zaya1_vl":
            raise ValueError(
                "ZayaConfig: model_type='zaya1_vl' is the vision-language model, which zaya_hf does not have; "
                "load a text checkpoint such as Zyphra/ZAYA1-8B"
            )
        if is_original_config(config_dict):
            return original_to_combined_config(config_dict)
        if model_type != cls.model_type:
            raise _wrong("model_type", model_type, f"only {cls.model_type!r} checkpoints can be read")
        # Combined files of other tools repeat some things under their original names; private keys are nobody's.
        # `auto_map` names files of Python code beside the config, which are not ours and not saved with it.
        dropped = KNOWN_FIELDS | {"auto_map"}
        return {key: value for key, value in config_dict.items() if key not in dropped and not key.startswith("_")}

    @classmethod
    def from_native(cls, native: PreTrainedConfig) -> "ZayaConfig":
        """Convert transformers' own `ZayaConfig`: every field, the dtype and the chosen implementations.

        A config that is ours already is returned as it is. Raises TypeError for anything else.
        """
        if isinstance(native, cls):
            return native
        if getattr(native, "model_type", None) != cls.model_type:
            raise TypeError(f"a ZAYA model needs a ZayaConfig, not a {type(native).__name__}")
        values = native.to_dict()
        for key in ("model_type", "transformers_version", "_name_or_path", "auto_map"):
            values.pop(key, None)
        values |= {
            "attn_implementation": native._attn_implementation,
            "experts_implementation": native._experts_implementation,
            "name_or_path": native.name_or_path or "",
        }
        return cls(**values)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Of use to subclasses defined elsewhere. Raises ValueError for this class: its folders need no code."""
        refuse_own_code(cls)
        super().register_for_auto_class(auto_class)

    def to_dict(self) -> dict[str, Any]:
        """All fields and extra keys, in the combined layout; no private attribute except the name of the source."""
        return {
            key: value for key, value in super().to_dict().items() if key == "_name_or_path" or not key.startswith("_")
        }

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing is left to convert: the parent would move a flat `rope_theta` beside the nested dicts."""
        return kwargs

    def _read_rope(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Normalise `rope_parameters` to one dict per layer type and take the older rope keys out of `kwargs`."""
        scaling = kwargs.pop("rope_scaling", None)
        if isinstance(scaling, dict) and self.rope_parameters is None:
            self.rope_parameters = scaling
        elif scaling:
            raise _wrong("rope_scaling", scaling, "give rope_parameters (one dict per layer type) instead")
        if self.rope_parameters is None:
            factor = 0.5
            self.rope_parameters = {
                "hybrid": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": factor},
                "hybrid_sliding": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": factor},
            }
        # A copy: the caller's dict must not change under it.
        rope = copy.deepcopy(self.rope_parameters)
        nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
        if nested:
            # Files on the Hub carry a stray `rope_type` beside the nested dicts.
            for stray in ("rope_type", "type"):
                rope.pop(stray, None)
            for parameters in nested.values():
                parameters.setdefault("rope_type", parameters.pop("type", "default"))
                if parameters["rope_type"] in ("llama3", "yarn"):
                    parameters.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        self.rope_parameters = rope
        for key in ("rope_theta", "partial_rotary_factor"):
            value = kwargs.pop(key, None)
            if value is not None and any(value != parameters.get(key) for parameters in nested.values()):
                raise _wrong(key, value, f'it belongs into rope_parameters, e.g. {{"hybrid": {{"{key}": {value!r}}}}}')
        return kwargs

    def _warn_about_misspelt(self, kwargs: dict[str, Any]) -> None:
        known = {field.name for field in fields(self)}
        harmless = _HARMLESS_EXTRAS | KNOWN_FIELDS | set(GenerationConfig._get_default_generation_params())
        for key in kwargs:
            if key in harmless or key.startswith("_"):
                continue
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8)
            if near:
                warnings.warn(f"ZayaConfig: unknown key {key!r} is ignored; did you mean {near[0]!r}?", stacklevel=5)

    # --- validation: run by `validate`, after construction and before saving ------------------------------

    def validate_architecture(self) -> None:
        """Every field in range and none contradicting another. Raises ValueError (one line)."""
        if self.is_heterogeneous:
            raise ValueError("ZayaConfig: per_layer_config is not supported: all blocks have one shape")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "moe_intermediate_size",
            "num_experts",
            "router_hidden_size",
            "cca_time0",
            "cca_time1",
        ):
            if getattr(self, name) < 1:
                raise _wrong(name, getattr(self, name), "it must be at least 1")
        if self.head_dim % 2:
            right = "it must be even: the value is made of two halves, and the rotation pairs the halves of a head"
            raise _wrong("head_dim", self.head_dim, right)
        if self.num_attention_heads % self.num_key_value_heads:
            raise _wrong(
                "num_attention_heads",
                self.num_attention_heads,
                f"it must be a multiple of num_key_value_heads={self.num_key_value_heads}",
            )
        if self.num_experts_per_tok != 1:
            raise _wrong("num_experts_per_tok", self.num_experts_per_tok, "ZAYA routes every token to 1 expert")
        for name in ("rms_norm_eps", "router_norm_eps", "initializer_range"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise _wrong(name, value, "it must not be negative")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise _wrong("pad_token_id", self.pad_token_id, f"it must be below vocab_size={self.vocab_size}, or None")
        if not 0 <= self.attention_dropout < 1:
            raise _wrong("attention_dropout", self.attention_dropout, "it must be at least 0 and less than 1")
        if self.hidden_act not in ACT2FN:
            near = difflib.get_close_matches(self.hidden_act, list(ACT2FN), n=1)
            raise _wrong("hidden_act", self.hidden_act, f"no such activation; try {near[0] if near else 'silu'!r}")
        if self.skip_expert not in SKIP_EXPERT:
            raise _wrong("skip_expert", self.skip_expert, 'it must be "zero" or "identity"')

    def validate_layer_type(self) -> None:
        """`layer_types` fits the depth, the known types and `sliding_window`. Raises ValueError (one line)."""
        types = self.layer_types or []
        for index, layer_type in enumerate(types):
            if layer_type not in LAYER_TYPES:
                raise _wrong(f"layer_types[{index}]", layer_type, f"it must be one of {', '.join(LAYER_TYPES)}")
        if len(types) != self.num_hidden_layers:
            wanted = f"num_hidden_layers={self.num_hidden_layers} needs {self.num_hidden_layers} entries"
            raise ValueError(f"ZayaConfig: layer_types has {len(types)}: {wanted}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise _wrong("sliding_window", self.sliding_window, "it must be at least 1 (the token itself) or None")
        if "hybrid_sliding" in types and self.sliding_window is None:
            raise _wrong("sliding_window", None, 'layer_types has "hybrid_sliding", which needs a window length')

    def validate_rope(self) -> None:
        """`rope_parameters` is nested, complete and of a kind that the model computes. Raises ValueError (one line)."""
        rope = self.rope_parameters or {}
        nested = '{"hybrid": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}'
        if not any(isinstance(value, dict) for value in rope.values()):
            raise _wrong("rope_parameters", rope, f"give one dict per layer type, e.g. {nested}")
        for key in rope:
            if key not in LAYER_TYPES:
                raise _wrong(f"rope_parameters[{key!r}]", rope[key], f"keys must be among {', '.join(LAYER_TYPES)}")
        for layer_type in sorted(set(self.layer_types or [])):
            where = f"rope_parameters[{layer_type!r}]"
            parameters = rope.get(layer_type)
            if not isinstance(parameters, dict):
                raise _wrong(where, parameters, f"layer_types uses this type, so it needs a dict, e.g. {nested}")
            self._validate_one_rope(where, parameters)
        try:
            super().validate_rope()
        except KeyError as error:
            raise ValueError(f"ZayaConfig: rope_parameters: {error.args[0]}") from None

    def _validate_one_rope(self, where: str, parameters: dict[str, Any]) -> None:
        kind = parameters.get("rope_type", "default")
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise _wrong(f"{where}['rope_type']", kind, f"frequencies may not depend on length: {_ROPE_TYPES}")
        if kind not in _ROPE_TYPES:
            raise _wrong(f"{where}['rope_type']", kind, f"it must be one of {', '.join(_ROPE_TYPES)}")
        theta = parameters.get("rope_theta")
        if not isinstance(theta, int | float) or not theta > 0:
            raise _wrong(f"{where}['rope_theta']", theta, "it must be a positive number")
        factor = parameters.get("partial_rotary_factor", 1.0)
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise _wrong(f"{where}['partial_rotary_factor']", factor, "it must be above 0 and at most 1")
        width = int(self.head_dim * factor)
        if width < 2 or width % 2:
            raise _wrong(
                f"{where}['partial_rotary_factor']",
                factor,
                f"it rotates {width} of head_dim={self.head_dim} dimensions; that number must be even and not 0",
            )


__all__ = ["ZayaConfig"]
