"""The two classes with one set of weights, at the sizes that are measured."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.models.zaya.configuration_zaya import ZayaConfig as StockConfig
from transformers.models.zaya.modeling_zaya import ZayaForCausalLM as StockModel

from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.quickstart.models import FAMILIES
from zaya_hf.quickstart.recipe import Recipe

SIDES = ("ours", "stock")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = ("8b", "quickstart")
FULL_VOCABULARY = 262_272
_TIMED_VOCABULARY = 32_768
_LAYERS = 4
_CONTEXT = 262_144  # max_position_embeddings, above every context that is measured
_BALANCING_STEPS = 300
_BALANCING_TOKENS = 512
_LARGEST_BIAS = 0.3  # beyond it a bias would decide alone, for experts whose probability is next to nothing
_SKIP_BIAS = -1.0  # the value to which the stock class sets it


@dataclass(frozen=True)
class Shapes:
    """Token counts of the rows."""

    short: int = 512
    long: int = 2048
    chunk: int = 256
    documents: int = 6
    document_lengths: tuple[int, int] = (16, 512)
    context: int = 128  # before the decoding steps
    batches: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 64
    peak: int = 4096
    long_contexts: tuple[int, ...] = (8192, 32768, 131072)
    long_chunk: int = 512

    def lengths(self, seed: int) -> list[int]:
        """Lengths of the documents of a ragged batch: log-uniform, the longest one first and of full length."""
        low, high = self.document_lengths
        chance = random.Random(seed)
        drawn = [round(low * (high / low) ** chance.random()) for _ in range(self.documents - 1)]
        return [high, *drawn]


QUICK = Shapes(
    short=48,
    long=128,
    chunk=32,
    document_lengths=(8, 48),
    context=16,
    batches=(1, 4),
    new_tokens=8,
    peak=64,
    long_contexts=(256, 512, 1024),
    long_chunk=64,
)


def make_config(size: str, layers: int | None = None, **changes: Any) -> ZayaConfig:
    """The widths of ZAYA1-8B or of the quickstart's ZAYA, with few layers; `changes` are fields of the config."""
    fields: dict[str, Any] = {"num_hidden_layers": layers or _LAYERS, "max_position_embeddings": _CONTEXT, **changes}
    if size == "8b":
        return ZayaConfig(**{"vocab_size": _TIMED_VOCABULARY, **fields})
    recipe = Recipe()
    common = {
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "num_attention_heads": recipe.num_attention_heads,
        "num_key_value_heads": recipe.num_key_value_heads,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    with no_init_weights():
        return FAMILIES["zaya"].build(recipe, {**common, **fields}).config


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> nn.Module:
    """Draw every weight, reproducibly: matrices keep the size of what goes through them, at any width.

    The layers of the routers are drawn larger and centred, so that different tokens choose different experts.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):  # the tensors themselves; the classes' own orders differ
        if name == "lm_head.weight" and tensor.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            continue
        if name.endswith("balancing_biases"):
            tensor.normal_(0, 0.02, generator=generator)
            tensor[-1] = _SKIP_BIAS
        elif name.endswith(".temp"):
            tensor.uniform_(0.7, 1.1, generator=generator)
        elif "norm.weight" in name or name.endswith("_scale"):
            tensor.normal_(1, 0.1, generator=generator)
        elif tensor.ndim == 1:  # the first bias is added to embeddings, which are small
            scale = tensor.shape[0] ** -0.5 if "input_hidden_states" in name else 1.0
            tensor.normal_(0, 0.1 * scale, generator=generator)
        else:
            fan_in = tensor.shape[-1] * tensor.shape[-2] if "conv_qk" in name else tensor.shape[-1]
            routes = "router_mlp.fc" in name or "router_mlp.out_proj" in name
            tensor.normal_(0, (2.0 if routes else 1.0) * fan_in**-0.5, generator=generator)
            if routes:  # what comes out of a GELU has a positive mean; it must not prefer an expert for every token
                tensor -= tensor.mean(-1, keepdim=True)
    return model.eval()


@torch.no_grad()
def balance(model: Any, ids: Tensor) -> None:
    """Set the balancing biases of one of our models so that `ids` spread over the experts, as training would."""
    for index, layer in enumerate(model.model.layers):  # a layer's tokens depend on the biases before it
        logits = model(ids, output_router_logits=True, use_cache=False, logits_to_keep=1).router_logits[index]
        chances = torch.softmax(logits.float(), dim=-1)
        biases = layer.mlp.gate.balancing_biases
        experts = len(biases) - 1
        for step in range(_BALANCING_STEPS):
            load = torch.bincount((chances + biases).argmax(-1), minlength=experts + 1)[:experts] / len(chances)
            rate = 0.02 * (1 - step / _BALANCING_STEPS)
            biases[:experts] -= rate * (load * experts - 1).clamp(-1, 1)
            biases[:experts].clamp_(-_LARGEST_BIAS, _LARGEST_BIAS)


def build(side: str, config: ZayaConfig, seed: int | None = None) -> nn.Module:
    """A model of one side, fp32; its weights are drawn with `seed`, or not set at all without one."""
    with no_init_weights():
        model = ZayaForCausalLM(config) if side == "ours" else StockModel(StockConfig(**config.to_dict()))
    model.tie_weights()  # part of the initialisation, too
    return model if seed is None else draw(model, seed)


def random_ids(config: ZayaConfig, *shape: int, seed: int) -> Tensor:
    """Token ids without the special ones, int64."""
    return torch.randint(3, config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


#: how ours can be prepared for inference: what a row's name and its description say of it
WAYS = {
    "fused": ("", ""),
    "loaded": ("-as-loaded", "; ours as loaded, not fused for inference"),
    "packed": ("-packed", "; ours with packed weights, a second copy of them"),
    "compiled": ("-compiled", "; ours with packed weights and a compiled step"),
}


class Pair:
    """One model of each class. They share the storage of every weight, and have gradients of their own."""

    def __init__(self, size: str, dtype: str, config: ZayaConfig, seed: int) -> None:
        self.size, self.dtype, self.config, self.seed = size, dtype, config, seed
        self.ours: Any = build("ours", config, seed)
        balance(self.ours, random_ids(config, 1, _BALANCING_TOKENS, seed=seed + 1000))  # tokens that no row has
        self.ours.to(DTYPES[dtype])
        self.stock: Any = build("stock", config)
        share(self.stock, self.ours.state_dict())
        self._wide: Any = None

    def side(self, name: str) -> Any:
        return self.ours if name == "ours" else self.stock

    @property
    def wide(self) -> Any:
        """The stock class with the same weights in fp32."""
        if self.dtype == "fp32":
            return self.stock
        if self._wide is None:
            self._wide = build("stock", self.config)
            share(self._wide, {name: tensor.float() for name, tensor in self.ours.state_dict().items()})
        return self._wide

    def for_inference(self, way: str = "fused") -> None:
        """Both in eval mode, ours prepared in one of `WAYS`."""
        for model in (self.ours, self.stock):
            _checkpoint(model, False)
            model.eval()
        self._as_loaded()
        if way != "loaded":
            self.ours.fuse_for_inference(pack_weights=way in ("packed", "compiled"))
        if way == "compiled":
            self.ours.compile_decoding()

    def _as_loaded(self) -> None:
        self.ours.uncompile_decoding()
        self.ours.unfuse()

    def for_training(self, checkpointing: bool) -> None:
        self._as_loaded()
        for model in (self.ours, self.stock):
            model.train()
            _checkpoint(model, checkpointing)

    def drop_gradients(self) -> None:
        for model in (self.ours, self.stock):
            model.zero_grad(set_to_none=True)

    def ids(self, *shape: int, more: int = 0) -> Tensor:
        """Random token ids, int64; `more` tells apart those of one row."""
        return random_ids(self.config, *shape, seed=self.seed + more)


def _checkpoint(model: Any, on: bool) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) != on:
        verb = "enable" if on else "disable"
        older = getattr(model, f"gradient_checkpointing_{verb}")  # before transformers 5.24
        getattr(model, f"activation_checkpointing_{verb}", older)()


def share(model: Any, state: dict[str, Tensor]) -> None:
    """Give `model` these tensors as its weights, without a copy."""
    model.load_state_dict(state, assign=True)
    model.tie_weights()  # assigning has made two parameters of a tied one
    model.config.dtype = next(iter(state.values())).dtype
    model.eval()
