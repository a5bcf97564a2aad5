"""Padding on either side and in between: no row feels it, in a prompt, in later pieces and while decoding.

The reference is always the model's own run of one row without its padding, uncached.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from solo_runs import KINDS, PAD, Batch, batch_of, check_equal, feed, model_of, new_model, solo, stock_of
from zaya_hf import ZayaForCausalLM, visibility
from zaya_hf.testing import RecordedRun, random_ids, record_run, redraw, tiny_config

LENGTHS = [4, 9, 1, 7]
LOWEST = torch.finfo(torch.float32).min
each_kind = pytest.mark.parametrize("kind", KINDS)
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])
each_side = pytest.mark.parametrize("side", ["left", "right", "both"])


def padded(side: str, lengths: list[int] = LENGTHS) -> Batch:
    """One document per row, padded to one width."""
    if side != "both":
        return batch_of([[n] for n in lengths], right=side == "right")
    left = batch_of([[n] for n in lengths])
    right = torch.arange(len(lengths)) % 3
    wide = Batch(*(torch.full((len(lengths), max(lengths) + 2), fill) for fill in (PAD, 0, 0)))
    for row, columns, document in left.places:
        shifted = slice(columns.start + 2 - int(right[row]), columns.stop + 2 - int(right[row]))
        for name in ("ids", "mask", "positions"):
            getattr(wide, name)[row, shifted] = getattr(left, name)[row, columns]
        wide.places.append((row, shifted, document))
    return wide


def positions_of(batch: Batch, style: str) -> dict[str, Tensor]:
    """Ways to say where tokens are: by the document, by the column, or not at all."""
    columns = torch.arange(batch.ids.shape[1])
    return {
        "none": {},
        "of the document": {"position_ids": batch.positions},
        "ones at pads": {"position_ids": torch.where(batch.mask.bool(), batch.positions, 1)},
        "of the row": {"position_ids": columns[None]},
    }[style]


def pairs_of(mask: Tensor, past: int = 0) -> Tensor:
    """``[B, 1, S, L + S]`` bool: the causal 4-D mask that says the same as a 2-D one over all columns."""
    real, total = mask.bool(), mask.shape[1]
    causal = torch.ones(total, total).tril().bool()
    return (causal & real[:, None, :] & real[:, :, None])[:, None, past:]


# ------------------------------------------------------------------------------------------------------ one shot
@torch.no_grad()
@pytest.mark.parametrize("style", ["none", "of the document", "ones at pads", "of the row"])
@each_side
@each_attention
@each_kind
def test_padded_rows(kind: str, attention: str, side: str, style: str) -> None:
    model, batch = model_of(kind, attention), padded(side)
    run = record_run(model, batch.ids, attention_mask=batch.mask, **positions_of(batch, style))
    batch.check(model, run)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.float16])
def test_mask_dtypes(dtype: torch.dtype) -> None:
    model, batch = model_of(), padded("both")
    batch.check(model, record_run(model, batch.ids, attention_mask=batch.mask.to(dtype)))


@torch.no_grad()
@each_side
def test_padded_embeddings(side: str) -> None:
    """What stands in the padding does not matter, be it huge."""
    model, batch = model_of("bias, sliding, widths 3 4"), padded(side)
    embeds = model.get_input_embeddings()(batch.ids)
    embeds = torch.where(batch.mask[..., None].bool(), embeds, 1e4)
    batch.check(model, record_run(model, inputs_embeds=embeds, attention_mask=batch.mask))


@torch.no_grad()
@hypothesis.given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right", "both"]),
    style=st.sampled_from(["none", "of the document", "ones at pads", "of the row"]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_any_padding(lengths: list[int], side: str, style: str, kind: str) -> None:
    model, batch = model_of(kind, dtype=torch.float64), padded(side, lengths)
    run = record_run(model, batch.ids, attention_mask=batch.mask, **positions_of(batch, style))
    batch.check(model, run)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["full", "bias, sliding, widths 3 4"])
def test_gradients_do_not_reach_padding(kind: str) -> None:
    model, batch = new_model(kind).train(), padded("both")
    embeds = model.get_input_embeddings()(batch.ids).detach().requires_grad_()
    # the first token of a row is no target: the logits before it are those of a pad
    labels = batch.ids.masked_fill((batch.mask == 0) | (batch.positions == 0), -100)
    with torch.enable_grad():
        model(inputs_embeds=embeds, attention_mask=batch.mask, labels=labels).loss.backward()
    assert embeds.grad is not None
    of_token = embeds.grad.abs().sum(-1)
    assert not of_token[batch.mask == 0].any()
    for row, columns, _ in batch.places:
        assert of_token[row, columns][:-1].all()


@torch.no_grad()
@each_side
def test_counts_are_of_real_tokens(side: str) -> None:
    model, batch = model_of(), padded(side)
    output = model(batch.ids, attention_mask=batch.mask, output_router_logits=True)
    want = sum(
        model(document[None], output_router_logits=True, use_cache=False).tokens_per_slot
        for _, _, document in batch.places
    )
    assert torch.equal(output.tokens_per_slot, want)
    assert int(output.tokens_per_slot.sum()) == int(batch.mask.sum()) * len(model.model.layers)
    for slots in output.router_slots:
        assert torch.equal(slots == -1, batch.mask == 0)


# ---------------------------------------------------------------------------------------------------------- holes
def run_with_hole(model: ZayaForCausalLM, before: Tensor, after: Tensor) -> RecordedRun:
    """What padding inside a document means: attention sees across, look-back does not. Without a mask: the second part
    is fed on the first one's keys and values, but from the states of a beginning."""
    cache = DynamicCache(config=model.config)
    first = record_run(model, before[None], cache=cache)
    for block, layer in zip(model.model.layers, cache.layers, strict=True):
        nothing = block.self_attn.qkv_proj.v_proj_delayed.bias
        qk, value = layer.conv_states.values()
        layer.conv_states[0] = torch.zeros_like(qk)
        layer.conv_states[1] = torch.zeros_like(value) if nothing is None else nothing[None, :, None].clone()
    return RecordedRun.join([first, record_run(model, after[None], cache=cache)])


@torch.no_grad()
@each_attention
@each_kind
def test_holes(kind: str, attention: str) -> None:
    model = model_of(kind, attention)
    before, after = random_ids(4, seed=1), random_ids(5, seed=2)
    want = run_with_hole(model, before, after)
    for left, hole, right in ((0, 1, 0), (2, 3, 0), (0, 2, 2), (1, 6, 1)):
        pads = [torch.full((n,), PAD) for n in (left, hole, right)]
        ids = torch.cat([pads[0], before, pads[1], after, pads[2]])[None]
        mask = torch.tensor([[0] * left + [1] * 4 + [0] * hole + [1] * 5 + [0] * right])
        counted = (mask.cumsum(1) - 1).clamp_min(0)
        for given in ({}, {"position_ids": counted}, {"position_ids": torch.where(mask.bool(), counted, 0)}):
            run = record_run(model, ids, attention_mask=mask, **given)
            check_equal(run[:, mask[0].bool()], want)
    assert (want.logits[0, 4:] - solo(model, torch.cat([before, after])).logits[0, 4:]).abs().max() > 0.01


# ------------------------------------------------------------------------------------------------------ 4-D masks
FORMS = {
    "bool": lambda pairs: pairs,
    "integers": lambda pairs: pairs.long(),
    "additive": lambda pairs: torch.where(pairs, 0.0, LOWEST),
    "infinite": lambda pairs: torch.where(pairs, 0.0, -torch.inf),
    "-1e9": lambda pairs: torch.where(pairs, 0.0, -1e9),
    "-1e4": lambda pairs: torch.where(pairs, 0.0, -1e4),
    "half": lambda pairs: torch.where(pairs, 0.0, -65504.0).half(),
    "one per head": lambda pairs: pairs.expand(-1, 4, -1, -1),
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@each_side
@each_attention
def test_4d_masks(attention: str, side: str, form: str) -> None:
    for kind in ("full", "bias, sliding, widths 3 4"):
        model, batch = model_of(kind, attention), padded(side)
        run = record_run(model, batch.ids, attention_mask=FORMS[form](pairs_of(batch.mask)))
        batch.check(model, run)


@torch.no_grad()
@pytest.mark.parametrize("seen", ["pads see themselves", "pads see everything"])
@each_attention
@each_kind
def test_4d_masks_whose_padding_is_not_empty(kind: str, attention: str, seen: str) -> None:
    """Some masks let padding attend, to keep a softmax from running over nothing. Real tokens do not see it."""
    model, batch = model_of(kind, attention), padded("left")
    pairs = pairs_of(batch.mask)
    pad = batch.mask[:, None, :, None] == 0
    pairs = pairs | (pad & (torch.eye(batch.ids.shape[1]).bool() if seen == "pads see themselves" else pad))
    batch.check(model, record_run(model, batch.ids, attention_mask=pairs))


@torch.no_grad()
@each_attention
@each_kind
def test_4d_masks_of_packed_rows(kind: str, attention: str) -> None:
    model, batch = model_of(kind, attention), batch_of([[4, 5], [2, 1, 3], [1]])
    documents = (batch.mask * (batch.positions == 0)).cumsum(1)
    pairs = pairs_of(batch.mask) & (documents[:, None, :, None] == documents[:, None, None, :])
    for given in ({}, {"position_ids": batch.positions}):
        batch.check(model, record_run(model, batch.ids, attention_mask=pairs, **given))


@torch.no_grad()
@each_side
@each_attention
@each_kind
def test_4d_masks_with_a_cache(kind: str, attention: str, side: str) -> None:
    """Prompt, piece and single steps, each with its 4-D mask over cached and new columns."""
    model, batch = model_of(kind, attention), padded(side)
    new = random_ids(4, 5, seed=3)
    mask = torch.cat([batch.mask, torch.ones(4, 5, dtype=torch.long)], dim=1)
    cache, runs, start = DynamicCache(config=model.config), [], 0
    ids = torch.cat([batch.ids, new], dim=1)
    for stop in (batch.ids.shape[1], *range(batch.ids.shape[1] + 3, mask.shape[1] + 1)):
        pairs = pairs_of(mask[:, :stop], past=start)
        runs.append(record_run(model, ids[:, start:stop], attention_mask=pairs, cache=cache))
        start = stop
    check_continued(model, batch, RecordedRun.join(runs[1:]), new)


# ------------------------------------------------------------------------------------------------ rows of padding
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_attention
@pytest.mark.parametrize("kind", ["full", "bias, sliding, widths 3 4"])
def test_a_row_of_padding_beside_a_real_one(kind: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(kind, attention, dtype)
    ids, mask = random_ids(2, 12), torch.tensor([[1] * 12, [0] * 12])
    want = solo(model, ids[0])
    atol = 1e-5 if dtype == torch.float32 else 0.25
    for given in ({"attention_mask": mask}, {"attention_mask": pairs_of(mask)}):
        cache = DynamicCache(config=model.config)
        run = record_run(model, ids, cache=cache, **given)
        assert run.logits.isfinite().all()
        assert (run.logits[0] - want.logits[0]).abs().max() <= atol
        # the row stays padding, and becomes a document of its own when it gets a real token
        step = record_run(model, ids[:, :1], cache=cache, attention_mask=torch.tensor([[1], [0]]))
        assert step.logits.isfinite().all()
        alone = record_run(model, ids[:, 3:5], cache=cache)
        assert (alone.logits[1] - solo(model, ids[1, 3:5]).logits[0]).abs().max() <= atol


@torch.no_grad()
@each_attention
def test_a_row_of_padding_in_generate(attention: str) -> None:
    model, ids = model_of("full", attention), random_ids(2, 6)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    together = model.generate(ids, attention_mask=torch.tensor([[1] * 6, [0] * 6]), **settings)
    alone = model.generate(ids[:1], attention_mask=torch.ones(1, 6, dtype=torch.long), **settings)
    assert torch.equal(together[:1], alone)


@each_attention
def test_a_batch_of_padding(attention: str) -> None:
    """Nothing to learn from: the loss is 0, the gradients are 0, and neither is NaN."""
    model, ids = new_model("full", attention).train(), random_ids(2, 6)
    given = {"attention_mask": torch.zeros(2, 6), "labels": torch.full((2, 6), -100), "output_router_logits": True}
    output = model(ids, skip_logits=False, **given)
    assert float(output.loss.detach()) == 0
    assert output.logits.isfinite().all()
    assert not output.tokens_per_slot.any()
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


# ---------------------------------------------------------------------------------------------- prompt, then more
def check_continued(model: ZayaForCausalLM, batch: Batch, run: RecordedRun, new: Tensor) -> None:
    """`run` is of the tokens ``new[B, n]`` after the batch."""
    for row, _, document in batch.places:
        alone = solo(model, torch.cat([document, new[row]]))
        check_equal(run[row], alone[:, len(document) :])


@torch.no_grad()
@pytest.mark.parametrize("style", ["none", "of the document", "ones at pads"])
@pytest.mark.parametrize("form", ["grown", "new only", "none", "4-D"])
@each_side
@pytest.mark.parametrize("kind", ["full", "widths 1 1", "bias, sliding, widths 3 4"])
def test_padded_prompt_then_decoding(kind: str, side: str, form: str, style: str) -> None:
    """Rows of uneven lengths, padded on either side, then four single tokens; the mask grows, or covers the new token,
    or is left out."""
    model, batch = model_of(kind), padded(side)
    new, width = random_ids(4, 4, seed=3), batch.ids.shape[1]
    mask = torch.cat([batch.mask, torch.ones(4, 4, dtype=torch.long)], dim=1)
    cache = DynamicCache(config=model.config)
    prompt = record_run(model, batch.ids, attention_mask=batch.mask, cache=cache, **positions_of(batch, style))
    batch.check(model, prompt)
    runs = []
    for step in range(4):
        total = width + step + 1
        given = {
            "grown": {"attention_mask": mask[:, :total]},
            "new only": {"attention_mask": mask[:, total - 1 : total]},
            "4-D": {"attention_mask": pairs_of(mask[:, :total], past=total - 1)},
            "none": {},
        }[form]
        if style != "none":
            given["position_ids"] = batch.mask.sum(1, keepdim=True) + step
        runs.append(record_run(model, new[:, step : step + 1], cache=cache, **given))
    check_continued(model, batch, RecordedRun.join(runs), new)


@torch.no_grad()
@each_kind
def test_positions_that_count_padding_are_used_as_they_are(kind: str) -> None:
    """Right pads that take up positions: the document goes on behind them, at the distance that was asked for."""
    model, batch = model_of(kind), padded("right")
    new, width = random_ids(4, 3, seed=3), batch.ids.shape[1]
    for sizes in ([3], [1, 1, 1], [2, 1]):
        cache = DynamicCache(config=model.config)
        record_run(model, batch.ids, attention_mask=batch.mask, position_ids=torch.arange(width), cache=cache)
        run = feed(model, cache, sizes, new, position_ids=torch.arange(width, width + 3)[None])
        for row, columns, document in batch.places:
            ids = torch.cat([document, new[row]])[None]
            places = torch.cat([torch.arange(columns.stop), torch.arange(width, width + 3)])
            one_document = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril().bool()
            want = record_run(model, ids, attention_mask=one_document, position_ids=places, use_cache=False)
            check_equal(run[row], want[:, columns.stop :])


@torch.no_grad()
@each_attention
@each_side
@each_kind
def test_padded_turns(kind: str, side: str, attention: str) -> None:
    """Turns of uneven length, each padded inside its own piece, with single tokens between them."""
    model = model_of(kind, attention)
    turns = [padded(side, lengths) for lengths in (LENGTHS, [3, 1, 6, 2], [1, 5, 1, 4])]
    for form in ("grown", "new only"):
        cache = DynamicCache(config=model.config)
        mask = torch.zeros(4, 0, dtype=torch.long)
        said = [torch.zeros(0, dtype=torch.long)] * 4
        for index, turn in enumerate(turns):
            single = random_ids(4, 1, seed=index)
            for ids, of_piece in ((turn.ids, turn.mask), (single, torch.ones(4, 1, dtype=torch.long))):
                mask = torch.cat([mask, of_piece], dim=1)
                given = mask if form == "grown" else of_piece
                run = record_run(model, ids, attention_mask=given, cache=cache)
                for row in range(4):
                    real = of_piece[row].bool()
                    said[row] = torch.cat([said[row], ids[row, real]])
                    alone = solo(model, said[row])
                    check_equal(run[row : row + 1][:, real], alone[:, len(said[row]) - int(real.sum()) :])


@torch.no_grad()
@each_kind
def test_a_row_may_pause(kind: str) -> None:
    """Steps in which some rows get padding: they go on later as if nothing had been."""
    model, ids = model_of(kind), random_ids(2, 8)
    cache = DynamicCache(config=model.config)
    record_run(model, ids[:, :3], cache=cache)
    talking = [[1, 1], [1, 0], [0, 0], [0, 1], [1, 0], [1, 1]]
    done = [3, 3]
    for pattern in talking:
        tokens = torch.tensor([[int(ids[row, done[row]]) if talks else PAD] for row, talks in enumerate(pattern)])
        run = record_run(model, tokens, cache=cache, attention_mask=torch.tensor(pattern)[:, None])
        for row, talks in enumerate(pattern):
            if talks:
                done[row] += 1
                check_equal(run[row], solo(model, ids[row, : done[row]])[:, -1:])


@torch.no_grad()
@hypothesis.given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    kind=st.sampled_from(sorted(KINDS)),
    grown=st.booleans(),
    data=st.data(),
)
def test_left_padded_prompts_in_any_pieces(lengths: list[int], kind: str, grown: bool, data) -> None:
    model, batch = model_of(kind, dtype=torch.float64), padded("left", lengths)
    width = batch.ids.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=4))) if width > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, width], strict=True)]
    mask = {"grown_mask" if grown else "attention_mask": batch.mask}
    batch.check(model, feed(model, DynamicCache(config=model.config), sizes, batch.ids, **mask))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_right_padded_prompt_then_decoding_in_other_dtypes(dtype: torch.dtype) -> None:
    model, batch = model_of("full", "sdpa", dtype), padded("right")
    new, cache = random_ids(4, 3, seed=3), DynamicCache(config=model.config)
    model(batch.ids, attention_mask=batch.mask, cache=cache)
    for step in range(3):
        got = model(new[:, step : step + 1], cache=cache).logits
        for row, _, document in batch.places:
            want = solo(model, torch.cat([document, new[row, : step + 1]])).logits[0, -1]
            assert (got[row, 0] - want).abs().max() < {torch.float64: 1e-10, torch.bfloat16: 0.3}[dtype]
    for layer in cache.layers:
        assert layer.keys.dtype == layer.conv_states[0].dtype == dtype


# ------------------------------------------------------------------------------------------- as on an accelerator
@torch.no_grad()
@each_attention
@pytest.mark.parametrize("kind", ["full", "widths 1 1", "bias, sliding, widths 3 4"])
def test_short_cuts_change_nothing(monkeypatch, kind: str, attention: str) -> None:
    """On a device values of masks and positions are not read, so nothing there is known to be trivial."""
    monkeypatch.setattr(visibility, "is_free_to_read", lambda tensor: False)
    model = model_of(kind, attention)
    full = batch_of([[6], [6]])
    for batch in (full, padded("left"), padded("right"), padded("both"), batch_of([[4, 5], [2, 1, 3]])):
        for given in ({}, {"position_ids": batch.positions}):
            if len(batch.places) > len(batch.ids) and not given:
                continue
            cache = DynamicCache(config=model.config)
            prompt = record_run(model, batch.ids, attention_mask=batch.mask, cache=cache, **given)
            batch.check(model, prompt)
            new, mask = random_ids(len(batch.ids), 4, seed=3), batch.mask
            runs = []
            for columns in (slice(0, 1), slice(1, 2), slice(2, 4)):
                mask = torch.cat([mask, torch.ones_like(new[:, columns])], dim=1)
                runs.append(record_run(model, new[:, columns], attention_mask=mask, cache=cache))
            last = {row: document for row, _, document in batch.places}
            for row, document in last.items():
                alone = solo(model, torch.cat([document, new[row]]))
                check_equal(RecordedRun.join(runs)[row], alone[:, len(document) :])


@torch.no_grad()
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(default: torch.dtype) -> None:
    for kind in ("full", "bias, sliding, widths 3 4"):
        model, batch = model_of(kind), padded("left")
        solo_runs = [solo(model, document) for _, _, document in batch.places]
        try:
            torch.set_default_dtype(default)
            for mask in (batch.mask, pairs_of(batch.mask)):
                run = record_run(model, batch.ids, attention_mask=mask)
                for (row, columns, _), want in zip(batch.places, solo_runs, strict=True):
                    check_equal(run[row, columns], want)
            run = feed(model, DynamicCache(config=model.config), [4, 1, 4], batch.ids, grown_mask=batch.mask)
        finally:
            torch.set_default_dtype(torch.float32)
        batch.check(model, run)


# ----------------------------------------------------------------------------------------------------------- stock
def largest_error(model: torch.nn.Module, batch: Batch, logits: Tensor) -> float:
    return max(
        float((logits[row, columns] - solo(model, document).logits[0]).abs().max())
        for row, columns, document in batch.places
    )


@torch.no_grad()
@each_attention
def test_transformers_own_class_is_wrong_here(attention: str) -> None:
    """Three cases of padding in which transformers' class gives other logits for a row than without its padding. With
    the same weights, and without padding, the two classes agree."""
    for kind in ("full", "bias"):
        model, stock, batch = model_of(kind, attention), stock_of(kind, attention), padded("left")
        for _, _, document in batch.places:
            torch.testing.assert_close(stock(document[None]).logits, solo(model, document).logits, atol=2e-5, rtol=1e-5)

    # a 4-D mask with left pads: its convolutions get no mask
    model, stock, batch = model_of("full", attention), stock_of("full", attention), padded("left")
    additive = torch.where(pairs_of(batch.mask), 0.0, LOWEST)
    assert largest_error(model, batch, stock(batch.ids, attention_mask=additive).logits) > 0.1
    assert largest_error(model, batch, model(batch.ids, attention_mask=additive).logits) < 2e-5

    # biases in the projections: a zeroed pad projects to the bias, not to nothing
    biased, stock_biased = model_of("bias", attention), stock_of("bias", attention)
    assert largest_error(biased, batch, stock_biased(batch.ids, attention_mask=batch.mask).logits) > 0.1
    assert largest_error(biased, batch, biased(batch.ids, attention_mask=batch.mask).logits) < 2e-5

    # right pads, then a step: the states come from the padding
    right, new = padded("right"), random_ids(4, 1, seed=3)
    mask = torch.cat([right.mask, torch.ones(4, 1, dtype=torch.long)], dim=1)
    errors = []
    for one in (stock, model):
        cache = one(right.ids, attention_mask=right.mask, use_cache=True).cache
        positions = right.mask.sum(1, keepdim=True)
        got = one(new, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1]
        wanted = [solo(model, torch.cat([document, new[row]])).logits[0, -1] for row, _, document in right.places]
        errors.append(float((got - torch.stack(wanted)).abs().max()))
    assert errors[0] > 0.1
    assert errors[1] < 2e-5


@pytest.mark.parametrize("use_cache", [False, True])
def test_masks_of_any_strides(use_cache: bool) -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    wide = torch.ones(2, 14, dtype=torch.long)
    wide[:, ::2] = mask
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=use_cache).logits
        for strided in (mask.T.contiguous().T, wide[:, ::2]):
            assert not strided.is_contiguous()
            got = model(ids, attention_mask=strided, use_cache=use_cache).logits
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
