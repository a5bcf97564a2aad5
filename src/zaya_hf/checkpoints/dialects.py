"""Config dialects of the original ZAYA1 layout, translated to the combined one. Pure functions on dicts.

Three dialects describe alternating half-layers (layout: `zaya_hf.checkpoints.layouts`):

- A, one list entry per half-layer: `Zyphra/ZAYA1-base` and `Zyphra/ZAYA1-reasoning-base`. Its scalar
  `num_hidden_layers` (120) is stale and its `num_attention_heads` (16) only defines the head width.
- B, scalars: the `-legacy` repositories. An earlier revision wrote 16 heads and `cca_num_q_heads: 8`.
- C, model type `smoe`: as A, with `smoe_` names and `rotary_base`; lists may be longer than the model is deep.

What the combined layout cannot hold is refused; every switch it can hold is kept.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# One of these makes a config an original one, unless it also has the combined names of the same things.
_ORIGINAL_FIELDS = (
    "zaya_layers",
    "zaya_mlp_expansion",
    "ffn_hidden_size",
    "ffn_hidden_size_list",
    "num_query_groups",
    "num_query_groups_list",
    "cca_num_q_heads",
    "norm_epsilon",
    "moe_router_topk",
)
_COMBINED_FIELDS = ("moe_intermediate_size", "router_hidden_size")

# Everything else that files in these dialects are known to carry (for readers that must not stumble over it).
KNOWN_FIELDS = frozenset(_ORIGINAL_FIELDS) | {
    "activation_func",
    "activation_func_fp8_input_store",
    "add_bias_linear",
    "apply_rope_fusion",
    "ar_threshold",
    "bias_activation_fusion",
    "cca",
    "fused_add_norm",
    "gated_linear_unit",
    "kv_channels",
    "lora_rank",
    "mamba_cache_dtype",
    "normalization",
    "num_attention_heads_list",
    "scale_residual_merge",
    "swa_layers",
    "swa_rotary_base",
    "use_lora_att",
    "use_rope_scaling",
    "zaya_high_prec",
    "zaya_mod_per",
    "zaya_use_eda",
    "zaya_use_mod",
}

# Fields of the same name and meaning on both sides, and those of every transformers config.
_KEPT = (
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "cca_time0",
    "cca_time1",
    "clamp_temp",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "lm_head_bias",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "torch_dtype",
    "use_cache",
)

# (field, the only value that the combined layout can hold, which is also what a missing field means)
_FIXED: tuple[tuple[str, Any], ...] = (
    ("cca", True),
    ("zaya_use_mod", True),
    ("zaya_use_eda", True),
    ("scale_residual_merge", True),
    ("add_bias_linear", False),
    ("gated_linear_unit", True),
    ("activation_func", "swiglu"),
    ("normalization", "RMSNorm"),
    ("moe_router_topk", 1),
    ("num_experts_per_tok", 1),
    ("use_rope_scaling", False),
    ("use_lora_att", False),
    ("zaya_inhibitory", False),
    ("zaya_p_switch", 0),
)


class _Shape(NamedTuple):
    """What the lists (dialects A, C) or scalars (dialect B) say about the size of the model."""

    half_layers: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    ffn: int
    router: int


def is_original_config(config: Mapping[str, Any]) -> bool:
    """Whether a config dict is in one of the three dialects of the original layout."""
    if config.get("model_type") == "smoe" or any(str(key).startswith("smoe_") for key in config):
        return True
    if any(name in config for name in _COMBINED_FIELDS):
        return False
    return any(name in config for name in _ORIGINAL_FIELDS)


def original_to_combined_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an original config (dialect A, B or C) to the fields of `zaya_hf.ZayaConfig`.

    Raises: ValueError, one line naming the field, for a switch or a shape that the combined layout cannot hold, for
    lists that contradict each other, and for a missing field that has no safe default.
    """
    smoe = config.get("model_type") == "smoe" or any(str(key).startswith("smoe_") for key in config)
    given = _with_zaya_names(config) if smoe else dict(config)
    for name, right in _FIXED:
        value = given.get(name, right)
        # `True == 1`: compare the kinds too, or `moe_router_topk: true` would pass.
        same = value == right and isinstance(value, bool) == isinstance(right, bool)
        off = not right and not value
        if not same and not off:
            raise _inexpressible(config, name, value, f"only {right!r} can be held by the combined layout")
    lists = isinstance(given.get("zaya_layers"), list)
    shape = _shape_from_lists(config, given) if lists else _shape_from_scalars(config, given)

    out = {name: given[name] for name in _KEPT if name in given}
    out |= {
        "model_type": "zaya",
        "vocab_size": _whole(config, given, "vocab_size"),
        "hidden_size": _whole(config, given, "hidden_size"),
        "max_position_embeddings": _whole(config, given, "max_position_embeddings"),
        "num_hidden_layers": shape.half_layers // 2,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": shape.ffn // 2,
        "router_hidden_size": shape.router,
        "hidden_act": "silu",
        "rms_norm_eps": given.get("norm_epsilon", 1e-5),
        # Not written to a file when it has transformers' own default.
        "tie_word_embeddings": given.get("tie_word_embeddings", True),
        # Dialect B's class defaults to true; the classes of the list dialects to false.
        "residual_in_fp32": given.get("residual_in_fp32", not lists),
        "fp32_logits": given.get("zaya_high_prec", True),
        "skip_expert": "identity",
    }
    if lists and not smoe:
        # The code that dialect A was made for reads `layernorm_epsilon`, which its files do not have, and then
        # falls back to 1e-6 in the router (and in the router only).
        out["router_norm_eps"] = given.get("layernorm_epsilon", 1e-6)
    if "architectures" in out:
        out["architectures"] = [name.replace("SMoE", "Zaya").replace("Smoe", "Zaya") for name in out["architectures"]]
    out |= _layer_types(config, given, shape)
    return out


def _with_zaya_names(config: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(config)
    for name, value in config.items():
        if str(name).startswith("smoe_"):
            given["zaya_" + name.removeprefix("smoe_")] = value
    for smoe_name, name in (("rotary_base", "rope_theta"), ("rope_pct", "partial_rotary_factor")):
        if smoe_name in config:
            given.setdefault(name, config[smoe_name])
    return given


def _inexpressible(config: Mapping[str, Any], field: str, value: Any, right: str) -> ValueError:
    if field.startswith("zaya_") and any(str(name).startswith("smoe_") for name in config):
        field = "smoe_" + field.removeprefix("zaya_")
    return ValueError(f"original ZAYA config: {field}={value!r}: {right}")


def _required(config: Mapping[str, Any], given: Mapping[str, Any], field: str) -> Any:
    if given.get(field) is None:
        raise _inexpressible(config, field, None, "this field is required")
    return given[field]


def _whole(config: Mapping[str, Any], given: Mapping[str, Any], field: str) -> int:
    value = _required(config, given, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _inexpressible(config, field, value, "it must be a whole number of at least 1")
    return value


def _shape_from_lists(config: Mapping[str, Any], given: Mapping[str, Any]) -> _Shape:
    kinds = given["zaya_layers"]
    experts: list[int] = []
    for index, kind in enumerate(kinds):
        # bool is an int in Python, and True would read as one expert.
        odd_right = isinstance(kind, int) and not isinstance(kind, bool)
        if (index % 2 == 0 and kind != "a") or (index % 2 == 1 and not odd_right):
            right = 'half-layers must alternate: "a", number of experts, "a", ...'
            raise _inexpressible(config, f"zaya_layers[{index}]", kind, right)
        if index % 2:
            experts.append(kind)
    depth = len(kinds)
    if depth == 0 or depth % 2:
        raise _inexpressible(config, "zaya_layers", f"{depth} entries", "pairs of half-layers are needed")
    heads = _whole(config, given, "num_attention_heads")
    hidden = _whole(config, given, "hidden_size")
    if hidden % heads:
        raise _inexpressible(config, "num_attention_heads", heads, f"it must divide hidden_size={hidden}")
    return _Shape(
        half_layers=depth,
        query_heads=_one_value(config, given, "cca_num_q_heads", depth, 0),
        key_value_heads=_one_value(config, given, "num_query_groups_list", depth, 0, "num_key_value_heads"),
        head_dim=given.get("kv_channels") or hidden // heads,
        experts=_same(config, "zaya_layers", experts),
        ffn=_even(config, "ffn_hidden_size_list", _one_value(config, given, "ffn_hidden_size_list", depth, 1)),
        router=_one_value(config, given, "zaya_mlp_expansion", depth, 1),
    )


def _one_value(
    config: Mapping[str, Any], given: Mapping[str, Any], field: str, depth: int, parity: int, scalar: str | None = None
) -> int:
    """The one value that a per-layer list has on its half-layers (even or odd); a scalar is taken as it is."""
    value = given.get(field)
    if value is None and scalar is not None:
        field, value = scalar, given.get(scalar)
    if value is None:
        raise _inexpressible(config, field, None, "this field is required")
    if isinstance(value, list):
        # Longer lists occur: a published 120-layer config has 160 entries in one field.
        if len(value) < depth:
            raise _inexpressible(config, field, f"{len(value)} entries", f"zaya_layers has {depth}")
        value = _same(config, field, value[parity:depth:2])
    return _whole(config, {field: value}, field)


def _same(config: Mapping[str, Any], field: str, values: list[int]) -> int:
    different = sorted(set(values))
    if len(different) > 1:
        raise _inexpressible(config, field, different, "all layers must have the same value in the combined layout")
    return different[0]


def _even(config: Mapping[str, Any], field: str, value: int) -> int:
    if value % 2:
        raise _inexpressible(config, field, value, "it must be even: it counts the gate and the up half")
    return value


def _shape_from_scalars(config: Mapping[str, Any], given: Mapping[str, Any]) -> _Shape:
    depth = _whole(config, given, "num_hidden_layers")
    if depth % 2:
        raise _inexpressible(config, "num_hidden_layers", depth, "it must be even: half-layers come in pairs")
    heads = _whole(config, given, "num_attention_heads")
    hidden = _whole(config, given, "hidden_size")
    # The earlier revision: `num_attention_heads` counts the heads before compression and only defines their width.
    compressed = given.get("cca_num_q_heads")
    head_dim = given.get("head_dim") or given.get("kv_channels")
    if head_dim is None:
        if compressed is None:
            raise _inexpressible(config, "head_dim", None, "this field (or kv_channels) is required")
        head_dim = hidden // heads
    groups = given.get("num_query_groups")
    kv_heads = given.get("num_key_value_heads", groups)
    if groups is not None and kv_heads != groups:
        raise _inexpressible(config, "num_query_groups", groups, f"num_key_value_heads is {kv_heads}")
    return _Shape(
        half_layers=depth,
        query_heads=heads if compressed is None else _one_value(config, given, "cca_num_q_heads", depth, 0),
        key_value_heads=_whole(config, {"num_key_value_heads": kv_heads}, "num_key_value_heads"),
        head_dim=head_dim,
        experts=_whole(config, given, "num_experts"),
        ffn=_even(config, "ffn_hidden_size", _whole(config, given, "ffn_hidden_size")),
        router=_one_value(config, given, "zaya_mlp_expansion", depth, 1),
    )


def _layer_types(config: Mapping[str, Any], given: Mapping[str, Any], shape: _Shape) -> dict[str, Any]:
    """`layer_types`, `sliding_window` and `rope_parameters` from the sliding-window and rotary fields."""
    blocks = shape.half_layers // 2
    windows = [0] * blocks
    swa = given.get("swa_layers")
    if swa:
        # One entry per half-layer (those of MoE half-layers mean nothing), or one per block; 0 is full attention.
        if len(swa) != blocks and len(swa) < 2 * blocks:
            right = f"it must have {2 * blocks} entries, one per half-layer, or {blocks}"
            raise _inexpressible(config, "swa_layers", f"{len(swa)} entries", right)
        windows = [window or 0 for window in (swa if len(swa) == blocks else swa[: 2 * blocks : 2])]
    elif given.get("sliding_window"):
        right = "swa_layers must say which half-layers it applies to"
        raise _inexpressible(config, "sliding_window", given["sliding_window"], right)
    used = sorted({window for window in windows if window})
    if len(used) > 1:
        raise _inexpressible(config, "swa_layers", used, "all sliding layers must have the same window")
    scaling = given.get("rope_scaling") or None
    if scaling is not None and not isinstance(scaling, Mapping):
        raise _inexpressible(config, "rope_scaling", scaling, "it must be false, null or an object")
    partial = given.get("partial_rotary_factor", 0.5)
    rope = {"rope_type": "default", "rope_theta": _required(config, given, "rope_theta")}
    rope |= {"partial_rotary_factor": partial}
    if scaling is not None:
        rope |= {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
        rope |= {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}
    out: dict[str, Any] = {
        "layer_types": ["hybrid_sliding" if window else "hybrid" for window in windows],
        # The original counts the tokens before the current one, the combined layout the current one too.
        "sliding_window": used[0] + 1 if used else None,
        "rope_parameters": {"hybrid": rope},
    }
    if used:
        theta = given.get("swa_rotary_base") or rope["rope_theta"]
        out["rope_parameters"]["hybrid_sliding"] = {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": partial,
        }
    return out
