"""Masks made ahead of the forward pass: the dict of `create_masks_for_generate` carries documents and padding."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from transformers import DynamicCache

from zaya_hf import ZayaForCausalLM, visibility
from zaya_hf.testing import random_ids, redraw, tiny_config

PACKED = torch.cat([torch.arange(n) for n in (5, 1, 6)])[None]
LEFT = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
RIGHT = torch.tensor([[1] * 4 + [0] * 8, [1] * 12])
CASES = {
    "nothing": {},
    "left pads": {"attention_mask": LEFT},
    "right pads": {"attention_mask": RIGHT},
    "packed": {"position_ids": PACKED},
    "left pads, packed": {"attention_mask": LEFT, "position_ids": PACKED},
    "4-D": {"attention_mask": torch.ones(12, 12, dtype=torch.bool).tril()[None, None]},
}


@pytest.fixture(scope="module", params=["full", "sliding"])
def model(request: pytest.FixtureRequest) -> ZayaForCausalLM:
    sliding = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4}
    return redraw(ZayaForCausalLM(tiny_config(**(sliding if request.param == "sliding" else {}))))


def prepare(model: ZayaForCausalLM, shape: tuple[int, int], **given) -> dict:
    embeds = torch.empty(*shape, 0)
    return model.create_masks_for_generate(
        model.config, embeds, given.pop("attention_mask", None), given.pop("cache", None), **given
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_the_dict_says_what_the_arguments_said(model: ZayaForCausalLM, name: str, attention: str) -> None:
    model.set_attn_implementation(attention)
    ids = random_ids(2, 12)
    masks = prepare(model, (2, 12), **CASES[name])
    with torch.no_grad():
        want = model(ids, **CASES[name]).logits
        got = model(ids, attention_mask=masks).logits
        plain = model(ids).logits
    assert torch.equal(got, want)
    if name not in ("nothing", "4-D"):
        assert (got - plain).abs().max() > 0.1  # the case is not a trivial one


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_reach_and_states_through_a_cache(model: ZayaForCausalLM, attention: str) -> None:
    """Right-padded prefill, then two more steps, every call with a prepared dict: equal to each row alone."""
    model.set_attn_implementation(attention)
    ids, steps = random_ids(2, 12), random_ids(2, 2, seed=1)
    cache, mask = DynamicCache(config=model.config), RIGHT
    with torch.no_grad():
        model(ids, cache=cache, attention_mask=prepare(model, (2, 12), attention_mask=mask, cache=cache))
        got = []
        for step in steps.split(1, dim=1):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            masks = prepare(model, (2, 1), attention_mask=mask, cache=cache)
            got.append(model(step, cache=cache, attention_mask=masks).logits)
        for row, length in enumerate((4, 12)):
            alone = model(torch.cat([ids[row : row + 1, :length], steps[row : row + 1]], dim=1)).logits[:, length:]
            torch.testing.assert_close(torch.cat(got, dim=1)[row : row + 1], alone, atol=1e-5, rtol=0)


def test_the_model_works_without_its_own_description(model: ZayaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dict, nothing is described a second time."""
    masks = prepare(model, (2, 12), attention_mask=LEFT)

    def fail(*args, **kwargs):
        raise AssertionError("described again")

    monkeypatch.setattr("zaya_hf.visibility.describe", fail)
    with torch.no_grad():
        model(random_ids(2, 12), attention_mask=masks, use_cache=False)


def test_a_dict_of_something_else_is_refused(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 12)
    with pytest.raises(ValueError, match=r"'position_ids' is missing or unknown.*create_masks_for_generate"):
        model(ids, attention_mask=dict.fromkeys(model.config.layer_types))
    with pytest.raises(ValueError, match=r"'conv' is missing or unknown"):
        model(ids, attention_mask={**prepare(model, (2, 12)), "conv": None})
    with pytest.raises(ValueError, match=r"made for \[1, 11\] tokens"):
        model(ids, attention_mask=prepare(model, (2, 11)))
    with pytest.raises(ValueError, match=r"made for \[3, 12\] tokens"):
        model(ids, attention_mask=prepare(model, (3, 12), attention_mask=torch.ones(3, 12).triu()))
    cache = DynamicCache(config=model.config)
    masks = prepare(model, (2, 12), cache=cache)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"after 12 cached ones"):
        model(ids, cache=cache, attention_mask=masks)
    assert cache.get_seq_length() == 12


def test_a_dict_goes_with_no_other_description(model: ZayaForCausalLM) -> None:
    masks, lengths = prepare(model, (1, 12)), torch.tensor([0, 5, 12])
    for given in ({"cu_seq_lens_q": lengths}, {"cu_seq_lens_k": lengths}, {"seq_idx": PACKED}):
        with pytest.raises(ValueError, match="knows its documents"):
            model(random_ids(1, 12), attention_mask=masks, **given)


def test_a_visibility_moves_to_a_device_whole() -> None:
    """Layers on several devices get the same description; the meta device stands for another one."""
    config = tiny_config(attn_implementation="eager")
    visible = visibility.describe(
        config,
        batch_size=2,
        sequence_length=12,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention_mask=LEFT,
        position_ids=PACKED,
    )
    moved = visible.to("meta")
    for item in fields(visible):
        before, after = getattr(visible, item.name), getattr(moved, item.name)
        if isinstance(before, torch.Tensor):
            assert (before.device.type, after.device.type, after.shape) == ("cpu", "meta", before.shape), item.name
    assert moved.masks is not None
    assert moved.masks["hybrid"].device.type == "meta"
    assert (moved.batch_size, moved.sequence_length, moved.key_lengths) == (2, 12, {"hybrid": 12})
