"""Models that read forests: every token's logits are those of its text alone, in all five families."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import zaya_hf
from tiny_families import FAMILIES, build
from zaya_hf import tree_attention
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.token_tree import TokenTree, grow

WORDS = 128


def draw_texts(seed: int) -> list[tuple[int, ...]]:
    """Some questions with common examples, each with some answers."""
    chance = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [chance.randrange(WORDS) for _ in range(chance.randint(low, high))]

    examples, texts = some(1, 40), set()
    for _ in range(chance.randint(1, 6)):
        context = examples[: chance.randint(0, len(examples))] + some(1, 20)
        texts |= {tuple(context + some(1, 9)) for _ in range(chance.randint(1, 4))}
    return sorted(texts)


@torch.no_grad()
def read(model: Any, tree: TokenTree, taken: Any = None) -> torch.Tensor:
    ids = torch.from_numpy(tree.ids)[None]
    if isinstance(model, zaya_hf.ZayaForCausalLM):
        masks = tree_attention.zaya_masks(tree, model.config, taken)
        return model(input_ids=ids, attention_mask=masks, use_cache=False).logits[0]
    with tree_attention.reading(tree, taken):
        return model(input_ids=ids, position_ids=torch.from_numpy(tree.positions)[None], use_cache=False).logits[0]


@torch.no_grad()
def check(model: Any, seeds: range) -> None:
    for seed in seeds:
        texts = draw_texts(seed)
        tree = grow(texts)
        found = read(model, tree)
        for text, leaf in zip(texts, tree.leaves, strict=True):
            alone = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            torch.testing.assert_close(found[torch.from_numpy(tree.path(leaf))], alone, rtol=1e-9, atol=1e-9)


def zaya(**changes: Any) -> Any:
    return redraw(zaya_hf.ZayaForCausalLM(tiny_config(vocab_size=WORDS, num_hidden_layers=3, **changes))).double()


@pytest.fixture(params=[0, 20, 192], ids=["each alone", "some together", "all together"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens of neighbours are one product."""
    monkeypatch.setattr(tree_attention, "SMALL", request.param)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forest_is_its_texts(family: str, small: int) -> None:
    model = build(family)
    if family != "zaya":
        tree_attention.prepare(model)
    check(model, range(4))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 7},
        {"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 1},
        {"cca_time0": 4, "cca_time1": 3},
        {"cca_time0": 1, "cca_time1": 1},
        {"attention_bias": True},
        {"num_attention_heads": 2},
    ],
    ids=str,
)
def test_look_back_and_windows_go_along_the_path(changes: dict[str, Any], small: int) -> None:
    check(zaya(**changes), range(10, 13))


@pytest.mark.parametrize("family", ["zaya", "gemma3"])
def test_devices_without_the_kernel_get_one_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "_FLASH_ON_CPU", None)
    model = zaya(layer_types=["hybrid", "hybrid_sliding", "hybrid"], sliding_window=7)
    if family == "gemma3":
        model = build(family)
        tree_attention.prepare(model)
    check(model, range(2))


def test_a_prepared_model_still_does_everything_else() -> None:
    model = build("gemma3")
    ids = torch.randint(2, WORDS, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    before = model(input_ids=ids, attention_mask=mask).logits[:, 5:]
    text = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    tree_attention.prepare(model)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[:, 5:], before)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False), text)


def test_what_blocks_do_not_know_is_refused() -> None:
    tree = grow([(1, 2), (1, 3)])
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="does not know softcap"):
        tree_attention._attention(None, query, query, query, tree_attention.plan(tree), softcap=30.0)


def test_keys_values_and_columns_are_left_behind() -> None:
    model, taken = zaya(), tree_attention.Taken()
    tree = grow(draw_texts(0))
    read(model, tree, taken)
    assert len(taken.keys) == len(taken.values) == len(taken.states) == 3
    assert {t.shape for t in taken.keys + taken.values} == {(1, 2, len(tree), 16)}
    assert {(raw.shape[:2], value.shape[:2]) for raw, value in taken.states} == {((1, len(tree)), (1, len(tree)))}
