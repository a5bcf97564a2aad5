"""The layouts in which ZAYA1 checkpoints are published: tensor names, both ways. Pure data and pure functions.

*Combined*: one decoder layer is one CCA sublayer and one MoE sublayer; the experts of a layer are two stacked tensors.
`Zyphra/ZAYA1-8B` and `Zyphra/ZAYA1-74B-preview` have it, and so does transformers' own `zaya` model.

*Original*: half-layers alternate (even: attention, odd: MoE), every expert is a tensor of its own, and the residual
scale that follows a sublayer is stored at the start of the next half-layer. `Zyphra/ZAYA1-base`,
`Zyphra/ZAYA1-reasoning-base` and the `-legacy` repositories have it. A variant of it (`smoe`) writes `smoe_block` for
`zaya_block`. Nothing is permuted, transposed or split between the two; experts are stacked on a new first dimension.

The configs of the original layout are translated in `zaya_hf.checkpoints.dialects`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["combined", "original"]

MOE_BLOCKS = ("zaya_block", "smoe_block")

# Inside an even half-layer 2i: (original, combined), relative to the half-layer and to block i.
_ATTENTION = {
    "self_attn.qkv.linear_q": "self_attn.qkv_proj.q_proj",
    "self_attn.qkv.linear_k": "self_attn.qkv_proj.k_proj",
    "self_attn.qkv.val_proj1": "self_attn.qkv_proj.v_proj_current",
    "self_attn.qkv.val_proj2": "self_attn.qkv_proj.v_proj_delayed",
    "self_attn.qkv.conv_qk.0": "self_attn.qkv_proj.conv_qk_depthwise",
    "self_attn.qkv.conv_qk.1": "self_attn.qkv_proj.conv_qk_grouped",
    "self_attn.qkv.temp": "self_attn.qk_norm.temp",
    "self_attn.o_proj": "self_attn.o_proj",
    "input_norm": "input_layernorm",
}
# Inside an odd half-layer 2i + 1, after the name of the MoE block.
_ROUTER = {
    "router.down_proj": "mlp.gate.down_proj",
    "router.router_states_scale": "mlp.gate.router_states_scale",
    "router.balancing_biases": "mlp.gate.balancing_biases",
    "router.rmsnorm_eda": "mlp.gate.router_mlp.norm",
    "router.router_mlp.0": "mlp.gate.router_mlp.fc1",
    "router.router_mlp.2": "mlp.gate.router_mlp.fc2",
    "router.router_mlp.4": "mlp.gate.router_mlp.out_proj",
}
_EXPERTS = {"linear_fc1": "mlp.experts.gate_up_proj", "linear_fc2": "mlp.experts.down_proj"}
_SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")

_ATTENTION_BACK = {combined: original for original, combined in _ATTENTION.items()}
_ROUTER_BACK = {combined: original for original, combined in _ROUTER.items()}
_EXPERTS_BACK = {combined: original for original, combined in _EXPERTS.items()}

# Tensors that are one parameter of their module have no `.weight` or `.bias` behind the mapped name.
_BARE = {"self_attn.qkv.temp", "router.router_states_scale", "router.balancing_biases"}

_ORIGINAL_MARK = re.compile(
    r"(^|\.)(zaya_block|smoe_block|input_norm|final_norm)\.|\.self_attn\.qkv\.|(^|\.)layers\.\d+\.res_scale\.|^(model\.)?res_scale\."
)
_COMBINED_MARK = re.compile(r"\.(qkv_proj|qk_norm|input_layernorm|post_mlp_residual_scale)\.|\.mlp\.(gate|experts)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)\.weight")


@dataclass(frozen=True)
class CombinedName:
    """Where an original tensor goes: the combined name and, for an expert's tensor, its row on dimension 0."""

    name: str
    expert: int | None = None


def detect_layout(names: Iterable[str]) -> Layout | None:
    """The layout that a set of tensor names is in; None if no name is typical of either."""
    for name in names:
        if _COMBINED_MARK.search(name):
            return "combined"
        if _ORIGINAL_MARK.search(name):
            return "original"
    return None


def original_key_to_combined(key: str, num_blocks: int) -> CombinedName | None:
    """Combined name of an original tensor (`zaya_block` and `smoe_block` files alike), or None if it is unknown.

    `key` may or may not start with `model.`; the result always does, except for the head. `num_blocks` is the number
    of combined blocks (half the number of half-layers): the last residual scale goes to the last of them.
    """
    if key in ("lm_head.weight", "lm_head.bias"):
        return CombinedName(key)
    name = key.removeprefix("model.")
    if name == "embed_tokens.weight":
        return CombinedName("model.embed_tokens.weight")
    if name == "final_norm.weight":
        return CombinedName("model.norm.weight")
    module, _, leaf = name.rpartition(".")
    if module == "res_scale" and leaf in _SCALES:
        return CombinedName(f"model.layers.{num_blocks - 1}.post_mlp_residual_scale.{leaf}")
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    half, rest = int(match[1]), match[2]
    if half >= 2 * num_blocks:
        return None
    return _half_layer_to_combined(half, rest)


def _half_layer_to_combined(half: int, rest: str) -> CombinedName | None:
    block = f"model.layers.{half // 2}"
    module, _, leaf = rest.rpartition(".")
    if module == "res_scale" and leaf in _SCALES:
        if half == 0:
            # Nothing precedes the first half-layer: its scale acts on the embedding and has no residual half.
            return CombinedName(f"model.input_{leaf}") if leaf.startswith("hidden") else None
        if half % 2:
            return CombinedName(f"{block}.post_attention_residual_scale.{leaf}")
        return CombinedName(f"model.layers.{half // 2 - 1}.post_mlp_residual_scale.{leaf}")
    if half % 2 == 0:
        inner = _rename(rest, _ATTENTION)
    elif module == "input_norm" and leaf == "weight":
        inner = "post_attention_layernorm.weight"
    else:
        moe, _, rest = rest.partition(".")
        if moe not in MOE_BLOCKS:
            return None
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            return CombinedName(f"{block}.{_EXPERTS[expert[2]]}", int(expert[1]))
        inner = _rename(rest, _ROUTER)
    return None if inner is None else CombinedName(f"{block}.{inner}")


def _rename(rest: str, table: Mapping[str, str]) -> str | None:
    if rest in table:
        return table[rest] if rest in _BARE else None
    module, _, leaf = rest.rpartition(".")
    if leaf not in ("weight", "bias") or module not in table or module in _BARE:
        return None
    return f"{table[module]}.{leaf}"


def combined_key_to_original(
    key: str, num_blocks: int, num_experts: int, moe_block: str = "zaya_block"
) -> list[str] | None:
    """Original names of a combined tensor: one, or one per expert in the order of dimension 0; None if it is unknown.

    `key` may or may not start with `model.`; the results do, except for the head. `num_blocks` and `num_experts` are
    the sizes of the model in the combined layout (`num_hidden_layers` of its config). `moe_block` is one of
    `MOE_BLOCKS`.
    """
    if key in ("lm_head.weight", "lm_head.bias"):
        return [key]
    name = key.removeprefix("model.")
    if name == "embed_tokens.weight":
        return ["model.embed_tokens.weight"]
    if name == "norm.weight":
        return ["model.final_norm.weight"]
    if name in ("input_hidden_states_scale", "input_hidden_states_bias"):
        return [f"model.layers.0.res_scale.{name.removeprefix('input_')}"]
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= num_blocks:
        return None
    block, rest = int(match[1]), match[2]
    attention, moe = f"model.layers.{2 * block}", f"model.layers.{2 * block + 1}"
    if rest in _EXPERTS_BACK:
        fc = _EXPERTS_BACK[rest]
        return [f"{moe}.{moe_block}.experts.local_experts.{e}.{fc}.weight" for e in range(num_experts)]
    module, _, leaf = rest.rpartition(".")
    if module == "post_attention_residual_scale" and leaf in _SCALES:
        return [f"{moe}.res_scale.{leaf}"]
    if module == "post_mlp_residual_scale" and leaf in _SCALES:
        place = "model" if block == num_blocks - 1 else f"model.layers.{2 * block + 2}"
        return [f"{place}.res_scale.{leaf}"]
    if rest == "post_attention_layernorm.weight":
        return [f"{moe}.input_norm.weight"]
    for table, prefix in ((_ATTENTION_BACK, attention), (_ROUTER_BACK, f"{moe}.{moe_block}")):
        whole = table.get(rest)
        if whole is not None and whole in _BARE:
            return [f"{prefix}.{whole}"]
        part = table.get(module)
        if part is not None and part not in _BARE and leaf in ("weight", "bias"):
            return [f"{prefix}.{part}.{leaf}"]
    return None


@dataclass
class Plan:
    """How the tensors of an original checkpoint make up the combined ones.

    `sources[combined]` lists original names: one, or one per expert in index order. `unknown` are original names that
    belong nowhere (a name that occurs twice, with and without `model.`, included); `missing_experts` are the original
    names that an incomplete stack of experts lacks.
    """

    sources: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    missing_experts: list[str] = field(default_factory=list)


def plan_from_original(keys: Iterable[str], num_blocks: int, num_experts: int) -> Plan:
    """Sort the tensor names of an original checkpoint into the combined ones (see `Plan`).

    `keys` are all its names; `num_blocks` and `num_experts` are the sizes of the model in the combined layout.
    """
    plan = Plan()
    stacks: dict[str, dict[int, str]] = {}
    for key in keys:
        target = original_key_to_combined(key, num_blocks)
        if target is None or (target.expert is not None and target.expert >= num_experts):
            plan.unknown.append(key)
        elif target.expert is not None:
            if stacks.setdefault(target.name, {}).setdefault(target.expert, key) != key:
                plan.unknown.append(key)
        elif plan.sources.setdefault(target.name, [key]) != [key]:
            plan.unknown.append(key)
    for name, stack in stacks.items():
        if len(stack) == num_experts:
            plan.sources[name] = [stack[e] for e in range(num_experts)]
            continue
        sample = next(iter(stack.values()))
        for e in range(num_experts):
            if e not in stack:
                plan.missing_experts.append(re.sub(r"local_experts\.\d+\.", f"local_experts.{e}.", sample))
    return plan
