"""The floor of a row: how long its own matrix products take, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zaya_hf import ops

_QUERY_BLOCK = 256  # as in attention that never writes all scores: these stay in the cache


@dataclass(frozen=True)
class Call:
    """What one forward call needs.

    Attributes:
        tokens: real ones, of all rows.
        spans: for every row or document (first query's position in its keys, number of queries).
        loads: per layer, (expert, tokens) for the experts that have any.
        head_rows: positions whose logits are computed.
    """

    tokens: int
    spans: tuple[tuple[int, int], ...]
    loads: tuple[tuple[tuple[int, int], ...], ...]
    head_rows: int


def make_call(slots: Tensor, spans: list[tuple[int, int]], head_rows: int, num_experts: int) -> Call:
    """A call from the slots ``[tokens, layers]`` that its real tokens chose."""
    loads = []
    for layer in slots.unbind(-1):
        counts = torch.bincount(layer, minlength=num_experts + 1)[:num_experts].tolist()
        loads.append(tuple((expert, count) for expert, count in enumerate(counts) if count))
    return Call(slots.shape[0], tuple(spans), tuple(loads), head_rows)


class Products:
    """The products of a model, on its own weights: as cold, when their turn comes, as they are in the model.

    The four projections are one product, as they are after fusing, and so are the two taps of the grouped convolution.
    Attention is counted over visible keys only, in blocks of queries. Results go to memory that is there already.
    """

    def __init__(self, model: Any) -> None:
        config = self.config = model.config
        self.state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.dtype = self.state["model.norm.weight"].dtype
        self.heads, self.groups, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.layers = [self._layer(index) for index in range(config.num_hidden_layers)]
        self.spare: dict[str, Tensor] = {}

    def _layer(self, index: int) -> dict[str, Tensor]:
        start = f"model.layers.{index}."
        attention, gate = f"{start}self_attn.", f"{start}mlp.gate."
        names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
        grouped = self.state[f"{attention}qkv_proj.conv_qk_grouped.weight"]  # [C, D, taps]
        by_head = grouped.view(-1, self.head_dim, grouped[0].numel())
        return {
            "qkv": torch.cat([self.state[f"{attention}qkv_proj.{name}.weight"] for name in names]),
            "convolution": by_head.transpose(1, 2).contiguous(),  # [heads, taps D, D]
            "output": self.state[f"{attention}o_proj.weight"],
            "router_down": self.state[f"{gate}down_proj.weight"],
            "router_1": self.state[f"{gate}router_mlp.fc1.weight"],
            "router_2": self.state[f"{gate}router_mlp.fc2.weight"],
            "router_out": self.state[f"{gate}router_mlp.out_proj.weight"],
            "gate_up": self.state[f"{start}mlp.experts.gate_up_proj"],
            "down": self.state[f"{start}mlp.experts.down_proj"],
        }

    @torch.no_grad()
    def run(self, call: Call) -> None:
        """All products of one forward call."""
        for layer, loads in zip(self.layers, call.loads, strict=True):
            self._linear(call.tokens, layer["qkv"])
            self._batched(call.tokens, layer["convolution"])
            for (start, count), rows in Counter(call.spans).items():
                self._attend(rows, start, count)
            for name in ("output", "router_down", "router_1", "router_2", "router_out"):
                self._linear(call.tokens, layer[name])
            for expert, count in loads:
                self._linear(count, layer["gate_up"][expert])
                self._linear(count, layer["down"][expert])
        self._linear(call.head_rows, self.state["lm_head.weight"])

    def weight_bytes(self, call: Call) -> int:
        """Bytes of the weights that these products read."""
        size = self.state["lm_head.weight"].nbytes
        for layer, loads in zip(self.layers, call.loads, strict=True):
            size += sum(weight.nbytes for name, weight in layer.items() if name not in ("gate_up", "down"))
            size += len(loads) * (layer["gate_up"][0].nbytes + layer["down"][0].nbytes)
        return size

    def layer_flops(self, call: Call) -> int:
        """Operations of the products of all layers."""
        config = self.config
        always = sum(w.numel() for name, w in self.layers[0].items() if name not in ("gate_up", "down"))
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in call.spans)
        expert = self.layers[0]["gate_up"][0].numel() + self.layers[0]["down"][0].numel()
        total = len(self.layers) * (always * call.tokens + 2 * pairs * config.num_attention_heads * self.head_dim)
        return 2 * (total + expert * sum(count for loads in call.loads for _, count in loads))

    def head_flops(self, call: Call) -> int:
        """Operations of the LM head."""
        return 2 * call.head_rows * self.state["lm_head.weight"].numel()

    def _linear(self, rows: int, weight: Tensor) -> None:
        ops.linear(self._take("in", rows, weight.shape[1]), weight)  # by the faster of torch's libraries

    def _batched(self, rows: int, weight: Tensor) -> None:
        heads, width, out_width = weight.shape
        torch.bmm(self._take("in", heads, rows, width), weight, out=self._take("out", heads, rows, out_width))

    def _attend(self, rows: int, start: int, count: int) -> None:
        """Scores and weighted sums of `rows` rows, whose queries are at positions `start`, start + 1, ... of keys."""
        batch, shared = rows * self.groups, self.heads // self.groups
        for first in range(0, count, _QUERY_BLOCK):
            queries = min(_QUERY_BLOCK, count - first)
            keys = start + first + (queries + 1) // 2  # on average, those up to a query and itself
            scores = self._take("scores", batch, queries * shared, keys)
            key = self._take("keys", batch, keys, self.head_dim)
            query = self._take("in", batch, queries * shared, self.head_dim)
            torch.bmm(query, key.transpose(1, 2), out=scores)
            torch.bmm(scores, key, out=self._take("out", batch, queries * shared, self.head_dim))

    def _take(self, use: str, *shape: int) -> Tensor:
        """Memory of this shape, the same every time."""
        size = 1
        for length in shape:
            size *= length
        kept = self.spare.get(use)
        if kept is None or kept.numel() < size:
            kept = self.spare[use] = torch.full((size,), 1e-3, dtype=self.dtype)
        return kept[:size].view(shape)
