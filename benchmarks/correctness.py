"""What transformers' own `zaya` and zaya_hf compute on inputs where one of them goes wrong, side by side.

    python benchmarks/correctness.py [--seed N]

Both classes hold the same weights, every one drawn at random (`zaya_hf.testing.redraw`), in fp32 with eager attention.
The right value is the class's own run of the same tokens without padding, packing or cache. One JSON object goes to
standard output: for every case the largest error of a logit per side (or what the case says), or the error raised, and
beside them the number of parameters and the root mean square of the logits, the scale of the errors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.zaya.configuration_zaya import ZayaConfig as StockConfig
from transformers.models.zaya.modeling_zaya import ZayaForCausalLM as StockModel

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config

Measured = float | str
SIDES = ("transformers", "zaya_hf")


class Side:
    """One of the two classes: builds models that hold the same weights as the other side's."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed

    def model(self, **changes):
        if self.name == "zaya_hf":
            built = ZayaForCausalLM(tiny_config(attn_implementation="eager", **changes))
        else:
            built = StockModel(StockConfig(**{**TINY, **changes}, attn_implementation="eager"))
        return redraw(built, self.seed)

    def ids(self, *shape: int, more: int = 0) -> Tensor:
        return random_ids(*shape, seed=self.seed + more)


def error(got: Tensor, want: Tensor) -> float:
    return round((got - want).abs().max().item(), 7)


def packed(side: Side) -> float:
    model, ids, lengths = side.model(), side.ids(1, 12), (5, 1, 6)
    alone = torch.cat([model(document).logits for document in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return error(model(ids, position_ids=positions, use_cache=False).logits, alone)


def packed_with_cache(side: Side) -> float:
    model, ids, lengths = side.model(), side.ids(1, 12), (5, 1, 6)
    alone = torch.cat([model(document).logits for document in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return error(model(ids, position_ids=positions).logits, alone)


def right_padded_then_decoded(side: Side) -> float:
    model, ids, step = side.model(), side.ids(2, 9), side.ids(2, 1, more=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 4:] = 0
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, cache=cache, use_cache=True)
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    positions = mask.sum(1, keepdim=True)
    got = model(step, attention_mask=grown, position_ids=positions, cache=cache).logits[:1]
    return error(got, model(torch.cat([ids[:1, :4], step[:1]], dim=1)).logits[:, -1:])


def left_padded(side: Side, four_dimensional: bool = False, **changes) -> float:
    model, ids = side.model(**changes), side.ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    given = mask
    if four_dimensional:
        allowed = torch.ones(9, 9, dtype=torch.bool).tril() & mask[:, None, None].bool()
        given = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    return error(model(ids, attention_mask=given).logits[:1, 5:], model(ids[:1, 5:]).logits)


def cropped(side: Side) -> float:
    model, ids = side.model(), side.ids(1, 12)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, cache=cache, use_cache=True)
    cache.crop(-4)
    return error(model(ids[:, 8:9], cache=cache).logits, model(ids).logits[:, 8:9])


def rows_repeated(side: Side) -> float:
    model, ids, step = side.model(), side.ids(1, 12), side.ids(3, 1, more=1)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True)
    cache.batch_repeat_interleave(3)
    return error(model(step, cache=cache).logits, model(torch.cat([ids.expand(3, -1), step], dim=1)).logits[:, -1:])


def bare_cache(side: Side) -> float:
    model, ids = side.model(), side.ids(1, 12)
    cache = DynamicCache()
    model(ids[:, :8], cache=cache, use_cache=True)
    return error(model(ids[:, 8:], cache=cache).logits, model(ids).logits[:, 8:])


def window_of_one(side: Side) -> float:
    model, ids = side.model(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=1), side.ids(1, 12)
    cache = DynamicCache(config=model.config)
    steps = [model(token, cache=cache, use_cache=True).logits for token in ids.split(1, dim=1)]
    return error(torch.cat(steps, dim=1), model(ids).logits)


def skip_bias_loaded(side: Side) -> float:
    model = side.model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder)
    return error(
        torch.stack([layer.mlp.gate.balancing_biases for layer in loaded.model.layers]),
        torch.stack([layer.mlp.gate.balancing_biases for layer in model.model.layers]),
    )


def distinct_biases_in_bf16(side: Side) -> float:
    model = side.model()
    biases = model.model.layers[1].mlp.gate.balancing_biases
    biases.copy_(torch.tensor([8.0, 8.003, 8.006, 8.009, 0.0]))
    return len(model.to(torch.bfloat16).model.layers[1].mlp.gate.balancing_biases.unique())


def largest_key_of_a_fresh_model(side: Side) -> float:
    torch.manual_seed(side.seed)
    model = (ZayaForCausalLM if side.name == "zaya_hf" else StockModel)(side.model().config)
    cache = DynamicCache(config=model.config)
    model(side.ids(1, 12), cache=cache, use_cache=True)
    return round(max(layer.keys.abs().max().item() for layer in cache.layers), 4)


def loss_without_targets(side: Side) -> float:
    model, ids = side.model(), side.ids(1, 12)
    return model(ids, labels=torch.full_like(ids, -100)).loss.item()


def rows_of_an_empty_batch(side: Side) -> float:
    return side.model()(torch.zeros(0, 5, dtype=torch.long)).logits.shape[0]


CASES: dict[str, tuple[str, Callable[[Side], float]]] = {
    "packed": ("error of packed documents, no cache", packed),
    "packed_with_cache": ("the same, use_cache unset", packed_with_cache),
    "right_padded_then_decoded": ("error of the token after a right-padded prompt", right_padded_then_decoded),
    "left_padded": ("error of a left-padded row", left_padded),
    "left_padded_4d": ("the same with a 4-D mask", lambda side: left_padded(side, four_dimensional=True)),
    "left_padded_bias": ("the same with attention_bias=True", lambda side: left_padded(side, attention_bias=True)),
    "cropped": ("error of the next token after crop(-4), with activate_past_recording()", cropped),
    "rows_repeated": ("error after batch_repeat_interleave(3)", rows_repeated),
    "bare_cache": ("error with DynamicCache()", bare_cache),
    "window_of_one": ("error of decoding with sliding_window=1", window_of_one),
    "skip_bias_loaded": ("change of the balancing biases by save and load", skip_bias_loaded),
    "distinct_biases_in_bf16": ("of 5 balancing biases, distinct after .to(bfloat16)", distinct_biases_in_bf16),
    "largest_key_of_a_fresh_model": ("largest key of a fresh model", largest_key_of_a_fresh_model),
    "loss_without_targets": ("loss of a batch without targets", loss_without_targets),
    "rows_of_an_empty_batch": ("rows returned for a batch of 0", rows_of_an_empty_batch),
}


@torch.no_grad()
def measure(case: Callable[[Side], float], side: Side) -> Measured:
    """The number, or the error that the side raised, or "nan"."""
    try:
        value = case(side)
    except Exception as reason:  # an error is a result here
        return f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}".strip()
    return value if value == value else "nan"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the tokens; default: %(default)s")
    seed = parser.parse_args().seed
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # that stock resets the skip bias, say, is a result here
    cases = {
        name: {"what": what} | {side: measure(case, Side(side, seed)) for side in SIDES}
        for name, (what, case) in CASES.items()
    }
    model = Side("zaya_hf", seed).model()
    with torch.no_grad():
        logits = model(random_ids(2, 12, seed=seed)).logits
    about = {
        "seed": seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "logit_rms": round(logits.square().mean().sqrt().item(), 2),
    }
    print(json.dumps(about | {"cases": cases}, indent=2))


if __name__ == "__main__":
    main()
