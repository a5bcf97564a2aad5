"""Attention masks: a caller's 4-D mask, and what every attention implementation gets for documents and padding."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    DynamicCache,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import naive_visibility as naive
from described import LOWEST, WIDTHS, WINDOW, config_for, describe, spelled_out
from solo_runs import batch_of, check_equal, feed, model_of, new_model, solo
from zaya_hf import ZayaForCausalLM
from zaya_hf.history import RowHistory
from zaya_hf.testing import random_ids, record_run, redraw, tiny_config

# --------------------------------------------------------------------------------------------------- 4-D masks
FORMS = {
    "bool": lambda allowed: allowed,
    "integers": lambda allowed: allowed.long(),
    "additive": lambda allowed: torch.where(allowed, 0.0, LOWEST),
    "infinite": lambda allowed: torch.where(allowed, 0.0, -torch.inf),
    "-1e9": lambda allowed: torch.where(allowed, 0.0, -1e9),
    "-1e4": lambda allowed: torch.where(allowed, 0.0, -1e4),
    "-1e4 in bf16": lambda allowed: torch.where(allowed, 0.0, -1e4).bfloat16(),
    "half": lambda allowed: torch.where(allowed, 0.0, -65504.0).half(),
    "biased": lambda allowed: torch.where(allowed, -0.5 * torch.arange(allowed.shape[-1]), LOWEST),
}


def test_three_hundred_random_4d_rows(test_seed: int, fuzzing: bool) -> None:
    generator = torch.Generator().manual_seed(test_seed)
    rng = random.Random(test_seed)
    for _ in range(3000 if fuzzing else 300):
        length, past = rng.randint(1, 7), rng.choice([0, 0, 1, 4])
        widths = rng.choice(sorted(WIDTHS))
        heads = rng.choice([1, 4])
        history, before = RowHistory(), []
        if past:
            real = [rng.random() < 0.7 for _ in range(past)]
            naive.feed(before, real, 1)
            history.extend(describe(1, past, attention_mask=torch.tensor([real])))
        allowed = torch.rand(1, heads, length, past + length, generator=generator) < rng.choice([0.3, 0.6, 0.9])
        allowed &= torch.arange(past + length) <= torch.arange(past, past + length)[:, None]
        form = rng.choice(sorted(FORMS))
        visible = describe(
            1, length, config_for(widths=widths), attention_mask=FORMS[form](allowed), history=history if past else None
        )
        of_heads = allowed.any(1)[0]
        segments, reach, continues = naive.from_pairs(of_heads.tolist(), past, before, WIDTHS[widths])
        assert visible.segment[0].tolist() == segments, form
        assert spelled_out(visible, WIDTHS[widths]).reach[0].tolist() == reach, form
        if visible.continues is not None:
            assert visible.continues[0] == continues
        # attention: as given, and a query that may attend to nothing attends to itself
        alone = ~allowed.any(-1, keepdim=True) & (
            torch.arange(past + length) == torch.arange(past, past + length)[:, None]
        )
        assert torch.equal(visible.masks["hybrid"] > -5000, allowed | alone), form


@pytest.mark.parametrize("form", FORMS)
def test_4d_mask_says_the_same_as_a_2d_one(form: str) -> None:
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    causal = torch.ones(5, 5).tril().bool()
    pairs = (causal & real[:, None, :] & real[:, :, None])[:, None]
    of_4d, of_2d = describe(3, 5, attention_mask=FORMS[form](pairs)), describe(3, 5, attention_mask=real)
    assert torch.equal(of_4d.segment, of_2d.segment)
    assert torch.equal(of_4d.reach, of_2d.reach)
    assert torch.equal(of_4d.last, of_2d.last)
    assert torch.equal(of_4d.position_ids, of_2d.position_ids)
    for layer_type, mask in of_2d.masks.items():
        assert torch.equal(of_4d.masks[layer_type] > -5000, mask == 0), layer_type


def test_4d_masks_keep_their_biases() -> None:
    biases = torch.where(torch.ones(4, 4).tril().bool(), -torch.arange(4.0), -torch.inf)[None, None].repeat(1, 4, 1, 1)
    biases[:, 1] *= 2
    full = describe(1, 4, attention_mask=biases).masks["hybrid"]
    assert full.shape == (1, 4, 4, 4)
    assert torch.equal(full, biases.clamp_min(LOWEST).nan_to_num(0))


def test_4d_masks_of_one_row_serve_all() -> None:
    pairs = torch.ones(1, 1, 4, 4).tril().bool()
    visible = describe(3, 4, attention_mask=pairs)
    assert visible.segment.shape == (3, 4)
    assert visible.reach.tolist() == [[0, 1, 2, 2]] * 3


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_4d_masks_need_eager_or_sdpa(attention: str) -> None:
    with pytest.raises(ValueError, match=rf"4-D attention_mask needs .*'eager' or 'sdpa', not '{attention}'"):
        describe(1, 3, config_for(attention), attention_mask=torch.ones(1, 1, 3, 3).tril().bool())


# ------------------------------------------------------------------------------------- attention implementations
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
PACKED = torch.tensor([[0, 0, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4]])


def naive_pairs(given: dict, past_mask: Tensor | None = None) -> tuple[list[list[naive.Slot]], int]:
    rows: list[list[naive.Slot]] = [[], []]
    mask = given.get("attention_mask", torch.ones(2, 7))
    for index, row in enumerate(rows):
        if past_mask is not None:
            naive.feed(row, past_mask[index].bool().tolist(), 2)
        positions = given["position_ids"][index].tolist() if "position_ids" in given else None
        naive.feed(row, mask[index].bool().tolist(), 2, positions)
    return rows, 0 if past_mask is None else past_mask.shape[1]


GIVEN = {
    "padded": {"attention_mask": PADDED},
    "packed": {"position_ids": PACKED},
    "padded and packed": {"attention_mask": PADDED, "position_ids": PACKED},
    "plain": {},
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_masks_of_each_implementation(monkeypatch, name: str, cached: bool, attention: str) -> None:
    # building a block mask compiles it; what it is built from says as much
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda mask_mod, B, H, Q_LEN, KV_LEN, **_: mask_mod)
    given = GIVEN[name]
    history, past_mask = None, None
    if cached:
        history, past_mask = RowHistory(), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
        history.extend(describe(2, 4, attention_mask=past_mask))
    visible = describe(2, 7, config_for(attention), history=history, **given)
    rows, past = naive_pairs(given, past_mask)
    for layer_type, window in (("hybrid", None), ("hybrid_sliding", WINDOW)):
        mask = visible.masks[layer_type]
        if name == "plain" and not cached and attention == "sdpa" and window is None:
            assert mask is None
            continue
        if attention == "flex_attention":
            batch, query, key = torch.arange(2)[:, None, None], torch.arange(7)[:, None], torch.arange(past + 7)
            mask = mask(batch, torch.tensor(0), query, key).expand(2, -1, -1)[:, None]
        elif attention == "eager":
            mask = mask == 0
        assert mask.shape == (2, 1, 7, past + 7)
        for index, row in enumerate(rows):
            want = [[naive.may_attend(row, past + q, k, window) for k in range(past + 7)] for q in range(7)]
            assert mask[index, 0].tolist() == want, (layer_type, index)


@pytest.mark.parametrize(
    ("past", "length", "full", "sliding"),
    [(0, 1, None, None), (0, 3, None, None), (0, 4, None, "mask"), (5, 1, None, None), (5, 2, "mask", "mask")],
)
def test_sdpa_goes_without_a_mask_only_where_it_needs_none(past: int, length: int, full, sliding) -> None:
    masks = describe(1, length, config_for("sdpa"), history=RowHistory(length=past)).masks
    assert ("mask" if masks["hybrid"] is not None else None) == full
    assert ("mask" if masks["hybrid_sliding"] is not None else None) == sliding


def test_sdpa_masks_one_query_of_a_padded_row() -> None:
    history = RowHistory()
    history.extend(describe(2, 4, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])))
    mask = describe(2, 1, config_for("sdpa"), history=history).masks["hybrid"]
    assert mask[:, 0, 0].tolist() == [[False, True, True, True, True], [True] * 5]


def run_pairs(cumulative: list[int], width: int) -> list[list[list[bool]]]:
    """Which key of its row each query sees in variable-length causal attention over flattened rows."""
    sequence = [index for index, (a, b) in enumerate(itertools.pairwise(cumulative)) for _ in range(b - a)]
    rows = [sequence[start : start + width] for start in range(0, len(sequence), width)]
    return [[[k <= q and row[k] == row[q] for k in range(width)] for q in range(width)] for row in rows]


@pytest.mark.parametrize("name", ["padded", "packed", "padded and packed"])
def test_flash_attention_gets_cumulative_lengths(name: str) -> None:
    given = GIVEN[name]
    visible = describe(2, 7, config_for("flash_attention_2"), **given)
    assert visible.masks == {"hybrid": None, "hybrid_sliding": None}
    lengths = visible.attention_kwargs
    assert lengths["cu_seq_lens_q"] is lengths["cu_seq_lens_k"]
    cumulative = lengths["cu_seq_lens_q"]
    assert cumulative.dtype == torch.int32
    assert cumulative[0] == 0
    assert cumulative[-1] == 14
    assert lengths["max_length_q"] == lengths["max_length_k"] == int(cumulative.diff().max())
    pairs = run_pairs(cumulative.tolist(), 7)
    rows, _ = naive_pairs(given)
    for index, row in enumerate(rows):
        for q in range(7):
            if row[q].real:
                assert pairs[index][q] == [naive.may_attend(row, q, k) for k in range(7)]


def test_flash_attention_keeps_rows_apart_and_needs_nothing_for_plain_ones() -> None:
    both = describe(2, 3, config_for("flash_attention_2"), position_ids=torch.tensor([[4, 5, 6], [1, 2, 3]]))
    assert both.attention_kwargs["cu_seq_lens_q"].tolist() == [0, 3, 6]
    assert describe(2, 3, config_for("flash_attention_2")).attention_kwargs is None
    assert (
        describe(2, 3, config_for("sdpa"), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])).attention_kwargs is None
    )


def test_flash_attention_decodes_with_the_keys_of_the_last_document() -> None:
    history = RowHistory()
    mask, positions = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]), torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    history.extend(describe(2, 5, attention_mask=mask, position_ids=positions))
    visible = describe(2, 1, config_for("flash_attention_2"), history=history)
    assert visible.attention_kwargs is None
    assert visible.masks["hybrid"].tolist() == [
        [False, False, True, True, True, True],
        [True, True, True, False, False, True],
    ]
    # a row that gets padding sees padding: not nothing, which would be NaN
    padded = describe(2, 1, config_for("flash_attention_2"), history=history, attention_mask=torch.tensor([[1], [0]]))
    assert padded.masks["hybrid"].any(1).all()
    with pytest.raises(
        ValueError, match=r"flash_attention_2 cannot continue padded or packed rows .* 2 tokens at once"
    ):
        describe(2, 2, config_for("flash_attention_2"), history=history)


@pytest.mark.parametrize("mask", [[[1, 0, 1, 1]], [[0, 1, 0, 1]], [[1, 1, 1, 1], [1, 0, 0, 1]]])
def test_flash_attention_refuses_padding_inside_a_document(mask: list) -> None:
    with pytest.raises(ValueError, match="flash_attention_2 cannot attend across padding inside a document"):
        describe(len(mask), 4, config_for("flash_attention_2"), attention_mask=torch.tensor(mask))
    # between documents it may lie
    describe(
        1,
        4,
        config_for("flash_attention_2"),
        attention_mask=torch.tensor([[1, 0, 1, 1]]),
        position_ids=torch.tensor([[0, 0, 0, 1]]),
    )


def test_windows_count_real_tokens() -> None:
    """A window of 3 holds the query and the 2 real tokens before it, however much padding lies between."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 1]])
    sliding = describe(1, 7, config_for("sdpa"), attention_mask=mask).masks["hybrid_sliding"]
    assert sliding[0, 0, 6].tolist() == [False, True, True, False, False, False, True]
    history = RowHistory()
    history.extend(describe(1, 6, attention_mask=mask[:, :6]))
    assert history.slots_for(2) == 5
    later = describe(1, 1, config_for("sdpa"), history=history).masks["hybrid_sliding"]
    assert later[0, 0, 0].tolist() == [False, True, True, False, False, False, True]
    pairs = torch.ones(1, 1, 1, 7).bool()
    pairs[..., 3:6] = False
    given = describe(1, 1, config_for("sdpa"), history=history, attention_mask=pairs).masks["hybrid_sliding"]
    assert given[0, 0, 0].tolist() == [False, True, True, False, False, False, True]


@pytest.fixture
def without_mask_function():
    name = "attention_without_a_mask_function"
    AttentionInterface.register(name, sdpa_attention_forward)
    yield name
    AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop(name, None)


@torch.no_grad()
def test_an_implementation_without_a_mask_function(without_mask_function: str) -> None:
    """It would get no mask at all, and read padding and other documents without a word."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 7)
    model.set_attn_implementation("sdpa")
    plain, padded = record_run(model, ids), record_run(model, ids, attention_mask=PADDED)
    model.set_attn_implementation(without_mask_function)
    assert torch.equal(record_run(model, ids).logits, plain.logits)
    for given in (GIVEN["padded"], GIVEN["packed"], {"position_ids": PACKED[:1]}):
        with pytest.raises(ValueError, match=f"'{without_mask_function}' has no mask function"):
            model(ids, **given)
    AttentionMaskInterface.register(without_mask_function, masking_utils.sdpa_mask)
    assert torch.equal(record_run(model, ids, attention_mask=PADDED).logits, padded.logits)


# ----------------------------------------------------------------------------------------- a model on flash attention
def like_flash(module, query, key, value, mask, *, scaling, sliding_window=None, **kwargs):
    """What flash attention computes from the arguments it gets: ``[B, keys]`` mask, cumulative lengths, or neither."""
    batch_size, _, length, _ = query.shape
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    sequence = torch.zeros(batch_size, key.shape[2], dtype=torch.long)
    if mask is not None:
        assert length == 1
        sequence = (~mask).long()
    elif kwargs.get("cu_seq_lens_q") is not None:
        flat = torch.arange(batch_size * length)
        sequence = torch.bucketize(flat, kwargs["cu_seq_lens_q"][1:], right=True).view(batch_size, length)
    outputs = []
    for row in range(batch_size):
        of_query = []
        for t in range(length):
            end = key.shape[2] - length + t
            seen = [k for k in range(end + 1) if sequence[row, k] == sequence[row, end]][
                -(sliding_window or length + end) :
            ]
            weights = torch.softmax(query[row, :, t : t + 1] @ key[row, :, seen].transpose(1, 2) * scaling, dim=-1)
            of_query.append((weights @ value[row, :, seen])[:, 0])
        outputs.append(torch.stack(of_query))
    return torch.stack(outputs), None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["full", "bias, sliding, widths 3 4"])
def test_a_model_on_flash_attention(monkeypatch, kind: str) -> None:
    """Packed and padded rows in one shot, then single tokens, as far as flash attention can be told."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", like_flash)
    model, batch = new_model(kind), batch_of([[4, 5], [2, 1, 3], [1], [9]])
    right = batch_of([[4], [6], [1]], right=True)
    reference = model_of(kind)
    model.config._attn_implementation = "flash_attention_2"
    for rows in (batch, right, batch_of([[5, 7]]), batch_of([[8], [8]])):
        cache = DynamicCache(config=model.config)
        given = {"attention_mask": rows.mask, "position_ids": rows.positions}
        rows.check(reference, record_run(model, rows.ids, cache=cache, **given))
        new = random_ids(len(rows.ids), 3, seed=1)
        steps = feed(model, cache, [1, 1, 1], new)
        for row, document in {row: document for row, _, document in rows.places}.items():
            check_equal(steps[row], solo(reference, torch.cat([document, new[row]]))[:, len(document) :])
    one = batch_of([[3, 1, 6]])
    rows = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": document.tolist()} for _, _, document in one.places], return_tensors="pt"
    )
    rows.pop("labels")
    one.check(reference, record_run(model, **rows))


@torch.no_grad()
@pytest.mark.slow
def test_flex_attention_block_masks() -> None:
    """With real block masks; their compilation takes half a minute on a cold machine."""
    model = redraw(ZayaForCausalLM(config_for()))
    ids = random_ids(2, 7)
    for given in GIVEN.values():
        model.set_attn_implementation("eager")
        want = record_run(model, ids, **given)
        model.set_attn_implementation("flex_attention")
        got = record_run(model, ids, **given)
        real = given.get("attention_mask", torch.ones(2, 7)).bool()
        torch.testing.assert_close(got.logits[real], want.logits[real], atol=3e-5, rtol=0)
