"""ZAYA written down token by token, from the equations alone: slow, without a mask, a batch or a cache.

It shares nothing with zaya_hf but the names of the weights. Every function takes one document; what a token may see
is what comes before it in the lists. Sources: CCA arXiv 2510.04476, section 2; router, experts and residual scaling
arXiv 2605.05365.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


# ------------------------------------------------------------------------------------------------------------------ CCA
def cca(
    query: Tensor,
    key: Tensor,
    value_current: Tensor,
    value_delayed: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: Any,
    *,
    head_dim: int,
    clamp_temperature: bool = False,
    nothing: Tensor | None = None,
    past: Tensor | None = None,
    past_value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """CCA's queries, keys and values of one document.

    Args:
        query, key: raw projections ``[S, H D]`` and ``[S, G D]``; `value_current`, `value_delayed` ``[S, G D / 2]``.
        cos, sin: ``[S, R]``; the second half repeats the first.
        weights: has depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature.
        nothing: delayed value of the first token, unless `past_value` gives one.
        past: ``[C, K]`` raw columns before the first token, oldest first; None: zeros.

    Returns:
        ``[S, H, D]``, ``[S, G, D]``, ``[S, G, D]``.
    """
    length, query_width = query.shape
    heads, groups = query_width // head_dim, key.shape[1] // head_dim
    per_group = heads // groups
    width0, width1 = weights.depthwise_weight.shape[2], weights.grouped_weight.shape[2]
    padding = width0 + width1 - 2
    raw = [torch.cat([query[t], key[t]]) for t in range(length)]
    # All padding comes once, before the first convolution.
    zero = torch.zeros(query_width + key.shape[1], dtype=query.dtype)
    before = [zero if past is None else past[:, column] for column in range(padding)]
    padded = before + raw

    # depthwise[i] belongs to padded[i + width0 - 1]
    depthwise = []
    for i in range(len(padded) - width0 + 1):
        total = weights.depthwise_bias
        for tap in range(width0):
            total = total + weights.depthwise_weight[:, 0, tap] * padded[i + tap]
        depthwise.append(total)
    queries, keys, values = [], [], []
    for t in range(length):
        convolved = []
        for head in range(heads + groups):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            total = weights.grouped_bias[rows]
            for tap in range(width1):
                total = total + weights.grouped_weight[rows, :, tap] @ depthwise[t + tap][rows]
            convolved.append(total)

        raw_queries = [query[t, h * head_dim : (h + 1) * head_dim] for h in range(heads)]
        raw_keys = [key[t, g * head_dim : (g + 1) * head_dim] for g in range(groups)]
        means = [(raw_queries[h] + raw_keys[h // per_group]) / 2 for h in range(heads)]
        row_q = [_rope(_unit(convolved[h] + means[h]), cos[t], sin[t]) for h in range(heads)]
        row_k = []
        for g in range(groups):
            of_group = sum(raw_queries[h] for h in range(heads) if h // per_group == g) / per_group
            scale = weights.temperature[g]
            if clamp_temperature:
                scale = torch.exp(torch.clamp(scale, 1e-7, 2.0))
            direction = _unit(convolved[heads + g] + of_group / 2 + raw_keys[g] / 2)
            row_k.append(_rope(direction * scale, cos[t], sin[t]))
        queries.append(torch.stack(row_q))
        keys.append(torch.stack(row_k))

        if t > 0:
            previous = value_delayed[t - 1]
        elif past_value is not None:
            previous = past_value
        else:
            previous = torch.zeros_like(value_current[0]) if nothing is None else nothing
        values.append(torch.cat([value_current[t], previous]).view(groups, head_dim))
    return torch.stack(queries), torch.stack(keys), torch.stack(values)


def _unit(vector: Tensor) -> Tensor:
    return vector / torch.sqrt((vector * vector).sum()) * math.sqrt(vector.shape[0])


def _rope(vector: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R/2) of the first R numbers by the angle of i."""
    half = cos.shape[0] // 2
    c, s = cos[:half], sin[:half]
    first, second, rest = vector[:half], vector[half : 2 * half], vector[2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest])


# ---------------------------------------------------------------------------------------------------------------- model
def logits(tensors: Mapping[str, Tensor], config: Any, ids: list[int]) -> Tensor:
    """Logits ``[S, vocab_size]`` of one document, in float64.

    Args:
        tensors: a state dict of the model with its head; converted to float64.
        config: its config.
        ids: token ids.
    """
    w = {name: tensor.detach().to(torch.float64) for name, tensor in tensors.items()}
    embedded = [w["model.embed_tokens.weight"][token] for token in ids]
    scale, bias = w["model.input_hidden_states_scale"], w["model.input_hidden_states_bias"]
    stream = [(e + bias) * scale for e in embedded]
    states: list[Tensor] | None = None
    for index in range(config.num_hidden_layers):
        p = f"model.layers.{index}."
        normed = [_rms(x, w[p + "input_layernorm.weight"], config.rms_norm_eps) for x in stream]
        outputs = attention(w, p + "self_attn.", config, config.layer_types[index], torch.stack(normed))
        stream = [_merge(w, p + "post_attention_residual_scale.", o, x) for o, x in zip(outputs, stream, strict=True)]
        normed = [_rms(x, w[p + "post_attention_layernorm.weight"], config.rms_norm_eps) for x in stream]
        results = [
            experts(w, p + "mlp.", config, x, None if states is None else states[t]) for t, x in enumerate(normed)
        ]
        states = [state for _, state in results]
        stream = [
            _merge(w, p + "post_mlp_residual_scale.", output, x) for (output, _), x in zip(results, stream, strict=True)
        ]
    final = [_rms(x, w["model.norm.weight"], config.rms_norm_eps) for x in stream]
    head = w["model.embed_tokens.weight"] if config.tie_word_embeddings else w["lm_head.weight"]
    return torch.stack([head @ x + w.get("lm_head.bias", 0.0) for x in final])


def attention(w: Mapping[str, Tensor], p: str, config: Any, layer_type: str, x: Tensor) -> list[Tensor]:
    """Outputs of one attention sublayer for ``x[S, hidden_size]``."""

    def project(name: str) -> Tensor:
        return torch.stack([w[f"{p}qkv_proj.{name}.weight"] @ t + w.get(f"{p}qkv_proj.{name}.bias", 0.0) for t in x])

    rope = config.rope_parameters[layer_type]
    rotary_width = int(config.head_dim * rope["partial_rotary_factor"])
    cos, sin = rotary_tables(range(len(x)), rope["rope_theta"], rotary_width)
    weights = SimpleNamespace(
        depthwise_weight=w[p + "qkv_proj.conv_qk_depthwise.weight"],
        depthwise_bias=w[p + "qkv_proj.conv_qk_depthwise.bias"],
        grouped_weight=w[p + "qkv_proj.conv_qk_grouped.weight"],
        grouped_bias=w[p + "qkv_proj.conv_qk_grouped.bias"],
        temperature=w[p + "qk_norm.temp"],
    )
    query, key, value = cca(
        project("q_proj"),
        project("k_proj"),
        project("v_proj_current"),
        project("v_proj_delayed"),
        cos,
        sin,
        weights,
        head_dim=config.head_dim,
        clamp_temperature=config.clamp_temp,
        nothing=w.get(p + "qkv_proj.v_proj_delayed.bias"),
    )
    per_group = config.num_attention_heads // config.num_key_value_heads
    window = config.sliding_window if layer_type == "hybrid_sliding" else len(x)
    outputs = []
    for t in range(len(x)):
        seen = range(max(0, t - window + 1), t + 1)
        heads = []
        for h in range(config.num_attention_heads):
            scores = torch.stack([query[t, h] @ key[s, h // per_group] for s in seen]) / math.sqrt(config.head_dim)
            shares = torch.exp(scores - scores.max())
            shares = shares / shares.sum()
            heads.append(sum(share * value[s, h // per_group] for share, s in zip(shares, seen, strict=True)))
        outputs.append(w[p + "o_proj.weight"] @ torch.cat(heads) + w.get(p + "o_proj.bias", 0.0))
    return outputs


def rotary_tables(
    positions: Any, theta: float, width: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """cos and sin ``[S, width]``. Frequencies are made in fp32 arithmetic, as the published models have them."""
    frequencies = (1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)).to(dtype)
    angles = torch.tensor(list(positions), dtype=dtype)[:, None] * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


def router(w: Mapping[str, Tensor], p: str, config: Any, x: Tensor, state: Tensor | None) -> tuple[int, Tensor, Tensor]:
    """Slot, weight and state of one token."""
    own = w[p + "down_proj.weight"] @ x + w[p + "down_proj.bias"]
    if state is not None:
        own = own + w[p + "router_states_scale"] * state
    eps = config.rms_norm_eps if config.router_norm_eps is None else config.router_norm_eps
    y = _rms(own, w[p + "router_mlp.norm.weight"], eps)
    for name in ("fc1", "fc2"):
        y = w[f"{p}router_mlp.{name}.weight"] @ y + w[f"{p}router_mlp.{name}.bias"]
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    scores = w[p + "router_mlp.out_proj.weight"] @ y
    shares = torch.exp(scores - scores.max())
    shares = shares / shares.sum()
    biased = (shares + w[p + "balancing_biases"]).tolist()
    slot = biased.index(max(biased))
    return slot, shares[slot], own


def experts(w: Mapping[str, Tensor], p: str, config: Any, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and router state of one token."""
    slot, weight, state = router(w, p + "gate.", config, x, state)
    if slot == config.num_experts:
        return (x * weight if config.skip_expert == "identity" else torch.zeros_like(x)), state
    return weight * swiglu(x, w[p + "experts.gate_up_proj"][slot], w[p + "experts.down_proj"][slot]), state


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert on one token."""
    width = gate_up.shape[0] // 2
    gate, up = gate_up[:width] @ x, gate_up[width:] @ x
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum() / x.shape[0] + eps) * weight


def _merge(w: Mapping[str, Tensor], p: str, output: Tensor, residual: Tensor) -> Tensor:
    scaled = (output + w[p + "hidden_states_bias"]) * w[p + "hidden_states_scale"]
    return scaled + (residual + w[p + "residual_bias"]) * w[p + "residual_scale"]
