"""Attention without a mask over all pairs: document by document, behind a cache, and one query at a time.

The reference is the same model with `attn_implementation="eager"`, which always gets a mask. Rows of a few tokens keep
theirs because it is cheaper; the fixture `always` takes that reason away.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from described import config_for, describe
from solo_runs import Batch, batch_of
from zaya_hf import ZayaForCausalLM, attention
from zaya_hf.attention import Continued, Documents, Plan
from zaya_hf.attention_masks import worthwhile_pieces
from zaya_hf.history import PADDING, RowHistory
from zaya_hf.testing import RecordedRun, assert_equal_logits, random_ids, record_run, redraw, tiny_config

HEADS = [(2, 2), (4, 2), (8, 1)]
SLIDING = {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 4}

each_heads = pytest.mark.parametrize("heads", HEADS, ids=str)
each_window = pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PAIRS_OF_A_CALL", 0)


def pair_of(heads: tuple[int, int], changes: dict, dtype: torch.dtype = torch.float64) -> list[ZayaForCausalLM]:
    """Two models of the same weights, with eager attention and with sdpa."""
    models = []
    for name in ("eager", "sdpa"):
        config = tiny_config(num_hidden_layers=2, num_attention_heads=heads[0], num_key_value_heads=heads[1], **changes)
        model = redraw(ZayaForCausalLM(config)).to(dtype)
        model.set_attn_implementation(name)
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
        models.append(model)
    return models


def check(got: RecordedRun, want: RecordedRun, where: Tensor | None = None) -> None:
    atol = 1e-10 if want.logits.dtype == torch.float64 else 1e-5
    assert got.logits.isfinite().all()
    assert_equal_logits(got, want, atol=atol, rtol=atol, where=where)


class KernelCalls(TorchFunctionMode):
    """Shapes of the keys of every call of torch's fused attention, and what mask it got."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[tuple[int, ...]] = []
        self.masks: list[Tensor | None] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.keys.append(tuple(args[1].shape))
            self.masks.append((kwargs or {}).get("attn_mask"))
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The most elements that a tensor had which some operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.numel())
        return result


# -------------------------------------------------------------------------------------------------------- documents
def random_batch(rng: random.Random) -> Batch:
    """Rows of up to four documents, some empty, padded on either side; sometimes all rows alike."""
    rows = [[rng.choice([0, 1, 2, 5, 5, 9]) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        rows = rows[:1] * rng.randint(1, 3)
    if not any(map(sum, rows)):
        rows[0][0] = 3
    return batch_of(rows, right=rng.random() < 0.5, seed=rng.randrange(1000))


def is_one_document(batch: Batch) -> bool:
    return bool(batch.mask.all()) and bool((batch.positions == torch.arange(batch.ids.shape[1])).all())


@each_heads
@each_window
def test_random_rows_equal_the_masked_ones(heads, changes, always, test_seed: int, fuzzing: bool) -> None:
    eager, fused = pair_of(heads, changes)
    rng, seen = random.Random(test_seed), 0
    for _ in range(300 if fuzzing else 25):
        batch = random_batch(rng)
        given = {"attention_mask": batch.mask, "position_ids": batch.positions}
        use_cache = rng.choice([None, True, False])
        with torch.no_grad():
            got = record_run(fused, batch.ids, **given, use_cache=use_cache)
            want = record_run(eager, batch.ids, **given, use_cache=use_cache)
        check(got, want, batch.mask.bool())
        masks = describe(*batch.ids.shape, fused.config, **given).masks
        seen += all(isinstance(mask, Documents) for mask in masks.values())
        assert is_one_document(batch) or all(isinstance(mask, Documents) for mask in masks.values())
    assert seen > 10


def gradients(model: ZayaForCausalLM, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions).logits
    (logits * weights * batch.mask[..., None]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_heads
@each_window
def test_gradients_equal_the_masked_ones(heads, changes, training: bool, always) -> None:
    eager, fused = pair_of(heads, changes)
    batch = batch_of([[9, 5], [2, 1, 6], [5, 5]])
    weights = torch.randn(*batch.ids.shape, 128, dtype=torch.float64)
    want = gradients(eager.train(training), batch, weights)
    runs = [gradients(fused.train(training), batch, weights)]
    if training:
        fused.activation_checkpointing_enable()
        runs.append(gradients(fused, batch, weights))
    for got in runs:
        assert got.keys() == want.keys()
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_packed_rows_make_no_tensor_of_all_pairs(training: bool) -> None:
    """In a model of few and narrow layers nothing else is so large. The masked path shows that the test can fail."""
    lengths = [64] * 6 + [100, 28]
    batch = batch_of([lengths])
    given = {"attention_mask": batch.mask, "position_ids": batch.positions}
    eager, fused = (model.train(training) for model in pair_of((4, 2), {}, torch.float32))
    with Largest() as largest, KernelCalls() as calls:
        got = fused(batch.ids, **given).logits
        got.sum().backward()
    assert calls.masks == [None] * 6
    assert calls.keys == [(6, 4, 64, 16), (1, 4, 100, 16), (1, 4, 28, 16)] * 2
    assert largest.elements < 512**2
    with Largest() as largest:
        want = eager(batch.ids, **given).logits
    assert largest.elements >= 512**2
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_long_documents_of_sliding_layers_keep_their_window(always) -> None:
    eager, fused = pair_of((4, 2), SLIDING)
    batch = batch_of([[30, 4, 30]])
    with torch.no_grad(), KernelCalls() as calls:
        got = record_run(fused, batch.ids, position_ids=batch.positions)
    bands = [None if mask is None else tuple(mask.shape) for mask in calls.masks]
    assert bands == [None] * 3 + [(30, 30), None, (30, 30)]
    assert calls.masks[3] is calls.masks[5]
    with torch.no_grad():
        check(got, record_run(eager, batch.ids, position_ids=batch.positions))


def segments(*rows: str) -> Tensor:
    """One letter or dot (padding) per token."""
    return torch.tensor([[PADDING if c == "." else ord(c) - ord("a") for c in row] for row in rows])


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [
        (["aaabbb"], ((2, 3, True),)),
        (["aab.cc"], ((1, 2, True), (1, 1, True), (1, 1, False), (1, 2, True))),
        (["..aa", "aa.."], ((1, 2, False), (2, 2, True), (1, 2, False))),
        (["aabb", "aabb"], ((4, 2, True),)),
        (["aaaa", "abbb"], ((1, 4, True), (1, 1, True), (1, 3, True))),
        (["aa.a", "bbbb"], None),
        (["....", "...."], None),
    ],
    ids=str,
)
def test_pieces(rows: list[str], pieces, always) -> None:
    assert worthwhile_pieces(segments(*rows)) == pieces


def test_few_tokens_keep_their_mask() -> None:
    assert worthwhile_pieces(segments("aaaaaabbbbbb")) is None
    assert worthwhile_pieces(torch.arange(2048)[None] // 16) == ((128, 16, True),)
    assert worthwhile_pieces(torch.cat([torch.full((1, 100), PADDING), torch.zeros(1, 1948)], dim=1).long()) is not None


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])},
        {"attention_mask": torch.ones(1, 1, 6, 6).tril().bool()},
        {"attention_mask": torch.tensor([[0, 0, 0, 0, 0, 0]])},
    ],
    ids=["a hole", "4-D", "only padding"],
)
def test_what_only_a_mask_can_say_keeps_it(given: dict, always) -> None:
    masks = describe(1, 6, config_for("sdpa"), **given).masks
    assert all(isinstance(mask, Tensor) for mask in masks.values())


def test_a_plan_is_the_mask_that_it_stands_for(always) -> None:
    eager, fused = config_for("eager"), config_for("sdpa")
    batch = batch_of([[5, 2], [3], [4, 1, 2]])
    given = {"attention_mask": batch.mask, "position_ids": batch.positions}
    plans, masks = describe(3, 7, fused, **given).masks, describe(3, 7, eager, **given).masks
    for layer_type, plan in plans.items():
        assert isinstance(plan, Documents)
        assert torch.equal(plan.mask(torch.device("cpu")), masks[layer_type] == 0)
    with torch.no_grad():
        plan = describe(2, 3, fused, history=RowHistory(length=4)).masks["hybrid"]
    assert isinstance(plan, Continued)
    want = describe(2, 3, eager, history=RowHistory(length=4)).masks["hybrid"]
    assert torch.equal(plan.mask(torch.device("cpu")), want == 0)


# ------------------------------------------------------------------------------------------------- behind a cache
@each_heads
@pytest.mark.parametrize("sizes", [[7, 5, 1, 20], [1, 2, 30], [16, 17]], ids=str)
@pytest.mark.parametrize("window", [None, 4, 20], ids=lambda window: f"window {window}")
@torch.no_grad()
def test_chunks_equal_the_masked_ones(heads, sizes: list[int], window: int | None) -> None:
    eager, fused = pair_of(heads, {} if window is None else {**SLIDING, "sliding_window": window})
    ids = random_ids(2, 33)
    runs = []
    for model in (eager, fused):
        cache = DynamicCache(config=model.config)
        runs.append(RecordedRun.join([record_run(model, part, cache=cache) for part in ids.split(sizes, dim=1)]))
    check(runs[1], runs[0])
    check(runs[1], record_run(eager, ids, use_cache=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_chunk_makes_no_mask_and_no_copy_of_the_past(dtype: torch.dtype) -> None:
    eager, fused = pair_of((8, 1), {}, dtype)
    ids, outputs = random_ids(1, 1000), []
    for model in (eager, fused):
        cache = DynamicCache(config=model.config)
        model(ids[:, :600], cache=cache)
        with Largest() as largest:
            outputs.append(model(ids[:, 600:], cache=cache).logits)
    assert largest.elements < 1000 * 8 * 16  # the keys, one for every query head
    error = (outputs[1] - outputs[0]).abs()
    # bf16: a routing that rounding tips changes a token for good, so the middle of the errors counts
    assert error.max() < 1e-3 if dtype == torch.float32 else error.float().median() < 0.1


def test_a_chunk_that_wants_gradients_keeps_its_mask() -> None:
    """Also when the masks were made ahead, where nobody wanted any yet."""
    eager, fused = pair_of((4, 2), {})
    ids, grads = random_ids(2, 12), []
    for model in (eager, fused, fused):
        cache = DynamicCache(config=model.config)
        logits = model(ids[:, :5], cache=cache).logits.sum()
        ahead = None
        if grads:
            with torch.no_grad():
                ahead = model.create_masks_for_generate(model.config, torch.empty(2, 7, 0), None, cache)
            assert isinstance(ahead["hybrid"], Continued)
        if len(grads) == 1:
            ahead = None
        model.zero_grad()
        (logits + model(ids[:, 5:], cache=cache, attention_mask=ahead).logits.pow(2).mean()).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for got in grads[1:]:
        torch.testing.assert_close(got, grads[0], rtol=1e-9, atol=1e-10)


def test_a_chunk_under_dropout_keeps_its_mask() -> None:
    with torch.no_grad():
        plan = describe(1, 3, config_for("sdpa"), history=RowHistory(length=4)).masks["hybrid"]
        query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 7, 16)
        assert plan.takes(query, key, 0.0)
        assert not plan.takes(query, key, 0.1)
        assert not plan.takes(query, torch.zeros(1, 2, 8, 16), 0.0)


# -------------------------------------------------------------------------------------------------- one query per row
@each_heads
@each_window
@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 4, 1)], ids=["plain", "left pads"])
@torch.no_grad()
def test_steps_equal_the_masked_ones(heads, changes, lengths) -> None:
    eager, fused = pair_of(heads, changes)
    batch, new = batch_of([[length] for length in lengths]), random_ids(3, 6, seed=4)
    runs = []
    for model in (eager, fused):
        cache, mask = DynamicCache(config=model.config), batch.mask
        model(batch.ids, attention_mask=mask, cache=cache)
        steps = []
        for step in new.split(1, dim=1):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
            with KernelCalls() as calls:
                steps.append(record_run(model, step, attention_mask=mask, cache=cache))
        runs.append(RecordedRun.join(steps))
    check(runs[1], runs[0])
    kept = [layer.keys.shape[-2] + (layer.is_sliding and layer.keys.shape[-2] < 15) for layer in cache.layers]
    assert calls.keys == [(3, heads[1], tokens, 16) for tokens in kept]  # not one copy for every query head


@pytest.mark.parametrize("heads", HEADS, ids=str)
@torch.no_grad()
def test_one_query_with_a_mask_of_every_head(heads) -> None:
    eager, fused = pair_of(heads, {})
    ids = random_ids(2, 8)
    mask = torch.rand(2, heads[0], 1, 8) < 0.6
    mask[..., -2:] = True
    runs = []
    for model in (eager, fused):
        cache = DynamicCache(config=model.config)
        model(ids[:, :7], cache=cache)
        runs.append(record_run(model, ids[:, 7:], attention_mask=mask, cache=cache))
    check(runs[1], runs[0])


@torch.no_grad()
def test_a_mask_for_one_query_is_made_to_be_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every layer: on a GPU each time would be three kernels."""
    model = redraw(ZayaForCausalLM(tiny_config(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=4)))
    batch = batch_of([[3], [7]])
    made, add = [], attention._added
    monkeypatch.setattr(attention, "_added", lambda mask, dtype: made.append(mask.dtype) or add(mask, dtype))
    cache = DynamicCache(config=model.config)
    model(batch.ids, attention_mask=batch.mask, cache=cache)
    assert not made
    mask = torch.cat([batch.mask, torch.ones(2, 1, dtype=batch.mask.dtype)], dim=1)
    model(random_ids(2, 1), attention_mask=mask, cache=cache)
    assert made == [torch.bool] * 2


# ------------------------------------------------------------------------------------- somebody else's implementation
@torch.no_grad()
def test_ones_own_function_under_the_name_sdpa_gets_masks(monkeypatch: pytest.MonkeyPatch, always) -> None:
    _, model = pair_of((4, 2), {})
    batch, seen = batch_of([[5, 6]]), []

    def own(module, query, key, value, mask, **kwargs):
        seen.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    want = record_run(model, batch.ids, position_ids=batch.positions)
    assert not seen
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    check(record_run(model, batch.ids, position_ids=batch.positions), want)
    assert [tuple(mask.shape) for mask in seen] == [(1, 1, 11, 11)] * 2


@torch.no_grad()
def test_masks_made_ahead_serve_another_function(monkeypatch: pytest.MonkeyPatch, always) -> None:
    """A plan that was made for the library's function becomes a mask where that is no longer the one that runs."""
    _, model = pair_of((4, 2), {})
    batch = batch_of([[5, 6]])
    given = {"attention_mask": None, "position_ids": batch.positions}
    ahead = model.create_masks_for_generate(model.config, torch.empty(1, 11, 0), **given)
    assert isinstance(ahead["hybrid"], Plan)
    want = record_run(model, batch.ids, attention_mask=ahead)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *a, **k: sdpa_attention_forward(*a, **k))
    check(record_run(model, batch.ids, attention_mask=ahead), want)
    with pytest.raises(ValueError, match="covers 10 keys"):
        model(random_ids(1, 11), attention_mask={**ahead, "hybrid": Documents(10, lambda: None)})


@torch.no_grad()
def test_arguments_for_the_librarys_function_reach_it(always) -> None:
    _, model = pair_of((4, 2), {})
    with pytest.raises(ValueError, match="does not support `softcap`"):
        model(random_ids(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]), softcap=30.0)
