"""Packed documents: several in one row give what each gives alone, logits and gradients, with a cache and without.

The reference is always the model's own run of one document, unpadded and uncached.
"""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from solo_runs import KINDS, Batch, batch_of, check_equal, feed, model_of, new_model, solo, stock_of
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import RecordedRun, random_ids, record_run, redraw, tiny_config

CUTS = {
    "two documents": [[5, 7]],
    "documents of one token": [[1, 1, 4, 1]],
    "documents shorter than the look-back": [[2, 3, 1, 4, 2]],
    "rows with different cuts": [[4, 5], [3, 3, 3], [9], [1] * 9],
    "rows with left pads": [[4, 5], [2, 1], [6], [1]],
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


# ---------------------------------------------------------------------------------------------------------- logits
@torch.no_grad()
@pytest.mark.parametrize("cuts", CUTS)
@each_attention
@each_kind
def test_packed_equals_separate(kind: str, attention: str, cuts: str) -> None:
    model, batch = model_of(kind, attention), batch_of(CUTS[cuts])
    mask = None if batch.mask.all() else batch.mask
    for use_cache in (None, True, False):
        run = record_run(model, batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=use_cache)
        batch.check(model, run)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [None, True, False])
@each_attention
@each_kind
def test_packed_by_cumulative_lengths(kind: str, attention: str, use_cache: bool | None) -> None:
    model, batch = model_of(kind, attention), batch_of([[0, 3, 1, 0, 6, 2, 0]])
    lengths = torch.tensor([0, 0, 3, 4, 4, 10, 12, 12], dtype=torch.int32)
    for given_lengths in (lengths, batch.cumulative):
        run = record_run(
            model, batch.ids, cu_seq_lens_q=given_lengths, cu_seq_lens_k=given_lengths, use_cache=use_cache
        )
        batch.check(model, run)


@torch.no_grad()
def test_empty_documents_change_nothing() -> None:
    model, batch = model_of(), batch_of([[5, 7]])
    runs = [
        record_run(model, batch.ids, cu_seq_lens_q=torch.tensor(lengths))
        for lengths in ([0, 5, 12], [0, 0, 5, 5, 12], [0, 0, 0, 5, 12, 12])
    ]
    batch.check(model, runs[0])
    for run in runs[1:]:
        assert torch.equal(run.logits, runs[0].logits)


@torch.no_grad()
@hypothesis.given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    right=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 10**6),
)
def test_any_documents_and_pads(lengths: list[list[int]], right: bool, kind: str, seed: int) -> None:
    model, batch = model_of(kind, dtype=torch.float64), batch_of(lengths, right=right, seed=seed)
    batch.check(model, record_run(model, batch.ids, attention_mask=batch.mask, position_ids=batch.positions))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_in_other_dtypes(dtype: torch.dtype) -> None:
    model, batch = model_of("full", "sdpa", dtype), batch_of(CUTS["rows with left pads"])
    run = record_run(model, batch.ids, attention_mask=batch.mask, position_ids=batch.positions)
    for row, columns, document in batch.places:
        error = (run.logits[row, columns] - solo(model, document).logits[0]).abs().max()
        assert error < {torch.float64: 1e-12, torch.bfloat16: 0.3}[dtype]


@torch.no_grad()
def test_positions_need_not_start_at_0() -> None:
    """What counts is the jump; rotary embeddings are relative."""
    model, batch = model_of(), batch_of([[5, 4, 3]])
    shift = torch.tensor([[20] * 5 + [3] * 4 + [40] * 3])
    batch.check(model, record_run(model, batch.ids, position_ids=batch.positions + shift), atol=3e-5)  # larger angles


@torch.no_grad()
def test_no_rows() -> None:
    model = model_of()
    nothing = torch.zeros(0, 5, dtype=torch.long)
    for given in (
        {},
        {"position_ids": nothing},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        {"attention_mask": nothing},
    ):
        assert model(nothing, **given).logits.shape == (0, 5, 128)
        assert model(nothing, **given, cache=DynamicCache(config=model.config)).logits.shape == (0, 5, 128)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@each_attention
def test_gradients_of_no_tokens(attention: str, shape: tuple[int, int]) -> None:
    """No row or no token: every gradient is 0, none is missing or NaN."""
    model = new_model("bias, sliding, widths 3 4", attention).train()
    nothing = torch.zeros(shape, dtype=torch.long)
    for given in ({}, {"position_ids": nothing}, {"attention_mask": nothing}, {"seq_idx": nothing}):
        model.zero_grad()
        for skip_logits in (False, True):
            output = model(nothing, labels=nothing, use_cache=False, skip_logits=skip_logits, **given)
            assert skip_logits or output.logits.shape == (*shape, 128)
            assert float(output.loss.detach()) == 0
            output.loss.backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert not parameter.grad.any(), name
            model.zero_grad()


# ------------------------------------------------------------------------------------------------------- gradients
def gradients(
    model: ZayaForCausalLM, weights: Tensor, ids: Tensor, **given
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients of ``(logits * weights).sum()``: of every parameter, and of the embeddings; and the logits."""
    model.zero_grad()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **given).logits
    (logits * weights).sum().backward()
    assert embeds.grad is not None
    return (
        {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()},
        embeds.grad,
        logits,
    )


def check_gradients(model: ZayaForCausalLM, batch: Batch, atol: float = 2e-5, **given) -> None:
    """Gradients of the packed batch are the sums, and for the embeddings the rows, of those of each document alone."""
    weights = torch.randn(*batch.ids.shape, model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    weights = weights * batch.mask[..., None]
    packed, packed_embeds, logits = gradients(model, weights, batch.ids, **given)
    separate = {name: torch.zeros_like(grad) for name, grad in packed.items()}
    separate_embeds, separate_logits = torch.zeros_like(packed_embeds), logits.detach().clone()
    for row, columns, document in batch.places:
        of_document, embeds, alone = gradients(model, weights[row, columns], document[None], use_cache=False)
        separate = {name: total + of_document[name] for name, total in separate.items()}
        separate_embeds[row, columns], separate_logits[row, columns] = embeds[0], alone[0].detach()
    torch.testing.assert_close(logits.detach(), separate_logits, atol=atol, rtol=0)
    for name, want in {**separate, "inputs_embeds": separate_embeds}.items():
        got = packed_embeds if name == "inputs_embeds" else packed[name]
        error = (got - want).abs().max() / want.abs().max().clamp_min(1)
        assert error <= atol, f"{name}: {error:.2e} of {want.abs().max():.2e}"
    assert not separate_embeds[~batch.mask.bool()].any()
    assert all(grad.any() for name, grad in packed.items() if "embed_tokens" not in name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("use_cache", [None, True, False])
@each_attention
def test_gradients(attention: str, use_cache: bool | None, training: bool) -> None:
    model, batch = new_model("full", attention).train(training), batch_of(CUTS["rows with left pads"])
    check_gradients(model, batch, attention_mask=batch.mask, position_ids=batch.positions, use_cache=use_cache)


@each_attention
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_gradients_of_every_kind(kind: str, attention: str) -> None:
    model = new_model(kind, attention).train()
    for cuts in ("rows with different cuts", "rows with left pads"):
        batch = batch_of(CUTS[cuts])
        check_gradients(model, batch, attention_mask=batch.mask, position_ids=batch.positions)


@each_attention
def test_gradients_by_cumulative_lengths(attention: str) -> None:
    model = new_model("sliding", attention).train()
    batch = batch_of([[5, 1, 6]])
    check_gradients(model, batch, cu_seq_lens_q=torch.tensor([0, 0, 5, 6, 6, 12]))


def test_gradients_to_1e_10_in_float64() -> None:
    """Where rounding leaves no room, so does the test."""
    model = new_model("bias, sliding, widths 3 4").double().train()
    batch = batch_of(CUTS["rows with left pads"])
    check_gradients(model, batch, atol=1e-10, attention_mask=batch.mask, position_ids=batch.positions)


def test_gradients_under_checkpointing() -> None:
    model = new_model().train()
    model.activation_checkpointing_enable()
    batch = batch_of([[4, 5], [3, 1]])
    check_gradients(model, batch, attention_mask=batch.mask, position_ids=batch.positions)


# ----------------------------------------------------------------------------------------------------------- cache
def compositions(total: int) -> list[list[int]]:
    """Every way to cut `total` tokens into pieces."""
    cuts = itertools.product([False, True], repeat=total - 1)
    return [_sizes([i for i, cut in enumerate(of_row, 1) if cut], total) for of_row in cuts]


def _sizes(cuts: list[int], total: int) -> list[int]:
    return [b - a for a, b in itertools.pairwise([0, *cuts, total])]


@torch.no_grad()
@pytest.mark.parametrize("sizes", compositions(6), ids=lambda sizes: "-".join(map(str, sizes)))
def test_packed_rows_in_pieces_of_every_split(sizes: list[int]) -> None:
    batch = batch_of([[2, 1, 3], [4, 1]])
    for kind in ("full", "bias, sliding, widths 3 4"):
        model = model_of(kind)
        for mask in ({"attention_mask": batch.mask}, {"grown_mask": batch.mask}):
            cache = DynamicCache(config=model.config)
            batch.check(model, feed(model, cache, sizes, batch.ids, position_ids=batch.positions, **mask))
            assert cache.get_seq_length() == 6


@torch.no_grad()
@hypothesis.given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    kind=st.sampled_from(sorted(KINDS)),
    data=st.data(),
)
def test_packed_rows_in_any_pieces(lengths: list[list[int]], kind: str, data) -> None:
    model, batch = model_of(kind, dtype=torch.float64), batch_of(lengths)
    width = batch.ids.shape[1]
    sizes = _sizes(sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=5))) if width > 1 else [], width)
    run = feed(
        model, DynamicCache(config=model.config), sizes, batch.ids, position_ids=batch.positions, grown_mask=batch.mask
    )
    batch.check(model, run)


@torch.no_grad()
@each_attention
@each_kind
def test_decoding_continues_the_last_document(kind: str, attention: str) -> None:
    model, batch = model_of(kind, attention), batch_of([[4, 5], [2, 1], [6], [1]])
    new = random_ids(4, 4, seed=9)
    ends = {row: (columns, document) for row, columns, document in batch.places}  # the last of each row
    for given_positions in (False, True):
        cache = DynamicCache(config=model.config)
        model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions, cache=cache)
        runs = []
        for step in range(4):
            positions = batch.positions[:, -1:] + step + 1 if given_positions else None
            runs.append(record_run(model, new[:, step : step + 1], cache=cache, position_ids=positions))
        run = RecordedRun.join(runs)
        for row, (_, document) in ends.items():
            alone = solo(model, torch.cat([document, new[row]]))
            check_equal(run[row], alone[:, len(document) :])


@torch.no_grad()
@each_kind
def test_a_document_may_start_with_a_piece(kind: str) -> None:
    model = model_of(kind)
    first, second, third = (random_ids(2, n, seed=n) for n in (5, 4, 1))
    cache = DynamicCache(config=model.config)
    runs = [
        record_run(model, ids, cache=cache, position_ids=torch.arange(ids.shape[1]))
        for ids in (first, second, third, second)
    ]
    for ids, run in zip((first, second, third, second), runs, strict=True):
        for row in range(2):
            check_equal(run[row], solo(model, ids[row]))


@torch.no_grad()
def test_one_row_may_start_a_document_where_another_goes_on() -> None:
    model, ids = model_of("bias, sliding, widths 3 4"), random_ids(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    for sizes in ([5, 4], [4, 5], [5, 1, 3], [6, 3]):
        run = feed(model, DynamicCache(config=model.config), sizes, ids, position_ids=positions)
        check_equal(run[0], solo(model, ids[0]))
        check_equal(run[1, :5], solo(model, ids[1, :5]))
        check_equal(run[1, 5:], solo(model, ids[1, 5:]))


@torch.no_grad()
def test_generate_from_packed_prompts() -> None:
    """The last document is continued; the others are hidden."""
    model, batch = model_of(), batch_of([[4, 5], [2, 4]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    together = model.generate(batch.ids, attention_mask=batch.mask, position_ids=batch.positions, **settings)
    for row, (_, document) in {row: (columns, document) for row, columns, document in batch.places}.items():
        alone = model.generate(document[None], attention_mask=torch.ones(1, len(document)), **settings)
        assert together[row, -6:].tolist() == alone[0, -6:].tolist()


@torch.no_grad()
def test_generate_from_a_packed_cache() -> None:
    model, batch = model_of(), batch_of([[4, 5], [2, 4]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cache = DynamicCache(config=model.config)
    model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions, cache=cache)
    new = random_ids(2, 2, seed=3)
    ids, mask = torch.cat([batch.ids, new], dim=1), torch.cat([batch.mask, torch.ones(2, 2)], dim=1).long()
    together = model.generate(ids, attention_mask=mask, cache=cache, **settings)
    for row, (_, document) in {row: (columns, document) for row, columns, document in batch.places}.items():
        prompt = torch.cat([document, new[row]])[None]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert together[row, -6:].tolist() == alone[0, -6:].tolist()


# -------------------------------------------------------------------------------------------------------- collator
COLLATORS = {
    "positions": {},
    "positions and lengths": {"return_flash_attn_kwargs": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "lengths": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "document numbers": {"return_seq_idx": True, "return_position_ids": False},
    "positions from 2": {"position_ids_start": 2},
}


@torch.no_grad()
@pytest.mark.parametrize("collator", COLLATORS)
@each_attention
def test_flattening_collator(collator: str, attention: str) -> None:
    """What transformers' padding-free collator makes is used as it is, and no part of it is ignored."""
    model, batch = model_of("full", attention), batch_of([[3, 1, 6, 2]])
    features = [{"input_ids": document.tolist()} for _, _, document in batch.places]
    flat = DataCollatorWithFlattening(**COLLATORS[collator])(features, return_tensors="pt")
    assert torch.equal(flat["input_ids"], batch.ids)
    output = model(**flat)
    labels = flat.pop("labels")
    batch.check(model, record_run(model, **flat))
    losses, targets = [], []
    for _, _, document in batch.places:
        targets.append(len(document) - 1)
        losses.append(model(document[None], labels=document[None], use_cache=False).loss * targets[-1])
    assert int((labels != -100).sum()) == sum(targets)
    torch.testing.assert_close(output.loss, torch.stack(losses).sum() / sum(targets), atol=1e-5, rtol=0)


# ----------------------------------------------------------------------------------------------------------- stock
@torch.no_grad()
@each_attention
def test_transformers_own_class_leaks_here(attention: str) -> None:
    """Convolutions and delayed value of transformers' class look across the border, and with a cache so does attention.
    With the same weights, each document alone gives the same logits in both."""
    model, stock, batch = model_of("full", attention), stock_of("full", attention), batch_of([[5, 7]])
    for _, _, document in batch.places:
        torch.testing.assert_close(stock(document[None]).logits, solo(model, document).logits, atol=1e-5, rtol=0)
    columns, document = batch.places[1][1:]
    want = solo(model, document).logits
    for use_cache in (False, True):
        got = stock(batch.ids, position_ids=batch.positions, use_cache=use_cache).logits
        assert (got[:, columns] - want).abs().max() > 0.1
        assert (got[:, columns.start] - want[:, 0]).abs().max() > 0.1
        ours = model(batch.ids, position_ids=batch.positions, use_cache=use_cache).logits
        torch.testing.assert_close(ours[:, columns], want, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "left pads", "right pads"])
def test_the_loss_is_that_of_separate_rows(how: str) -> None:
    """With `labels=input_ids`, nothing masked by hand: the first token of a document and padding are no targets."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids, lengths = random_ids(1, 12), (5, 1, 6)
    given: dict = {}
    kept = ids
    if how == "position_ids":
        given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    elif how == "cu_seq_lens":
        given["cu_seq_lens_q"] = given["cu_seq_lens_k"] = torch.tensor([0, 5, 6, 12])
    else:
        lengths = (7,)
        given["attention_mask"] = torch.ones(1, 12, dtype=torch.long)
        padding, kept = (slice(0, 5), ids[:, 5:]) if how == "left pads" else (slice(7, 12), ids[:, :7])
        given["attention_mask"][:, padding] = 0
    documents = kept.split(lengths, dim=1)
    with torch.no_grad():
        sums = [model(document, labels=document).loss * (document.shape[1] - 1) for document in documents]
        want = torch.stack(sums).sum() / sum(n - 1 for n in lengths)
        got = model(ids, labels=ids, **given).loss
        explicit = model(ids, shift_labels=torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100), **given).loss
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (explicit - want).abs() > 1e-2  # labels that the caller shifted are used as they are


def test_the_document_of_each_token_is_in_the_output() -> None:
    model = redraw(ZayaForCausalLM(tiny_config())).model
    ids = random_ids(2, 6)
    with torch.no_grad():
        assert model(ids).segments is None
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        positions = torch.tensor([[0, 0, 0, 1, 0, 1], [0, 1, 2, 0, 1, 0]])
        segments = model(ids, attention_mask=mask, position_ids=positions).segments
    assert segments.tolist() == [[-1, -1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 2]]
