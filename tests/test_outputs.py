"""What a forward pass returns: router records, hidden states and attentions as transformers has them, both cache names,
tuples, and empty inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config()))


def with_stock(implementation: str, **changes: Any) -> tuple[ZayaForCausalLM, StockForCausalLM]:
    settings = {"attn_implementation": implementation, **changes}
    ours = redraw(ZayaForCausalLM(tiny_config(**settings)))
    stock = StockForCausalLM(StockConfig(**{**TINY, **settings})).eval()
    stock.load_state_dict(ours.state_dict())
    return ours, stock


# ------------------------------------------------------------------------------------------------------ router records
@torch.no_grad()
def test_router_records(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 9)
    output = model(ids, output_router_logits=True)
    assert len(output.router_logits) == len(output.router_slots) == 4
    assert all(logits.shape == (18, 5) for logits in output.router_logits)
    assert all(slots.shape == (2, 9) and slots.dtype == torch.int64 for slots in output.router_slots)
    assert output.tokens_per_slot.shape == (4, 5)
    assert output.tokens_per_slot.dtype == torch.int64
    for index, layer in enumerate(model.model.layers):
        biased = torch.softmax(output.router_logits[index], -1) + layer.mlp.gate.balancing_biases
        assert torch.equal(output.router_slots[index].flatten(), biased.argmax(-1))
        counts = [int((output.router_slots[index] == slot).sum()) for slot in range(5)]
        assert output.tokens_per_slot[index].tolist() == counts
        assert sum(counts) == 18


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_token(side: str) -> None:
    """Its slot is -1, no count has it, and the counts of a padded batch are those of its rows alone."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 0.3  # so that padding and real tokens skip, too
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    columns = slice(0, 4) if side == "left" else slice(5, 9)
    mask[0, columns] = 0
    output = model(ids, attention_mask=mask, output_router_logits=True)
    real = mask.bool()
    for slots in output.router_slots:
        assert (slots[~real] == -1).all()
        assert ((slots[real] >= 0) & (slots[real] <= 4)).all()
    assert (output.tokens_per_slot.sum(1) == 14).all()
    solo = [model(ids[:1, real[0]], output_router_logits=True), model(ids[1:], output_router_logits=True)]
    assert torch.equal(output.tokens_per_slot, solo[0].tokens_per_slot + solo[1].tokens_per_slot)
    assert output.tokens_per_slot[:, -1].sum() > 0
    for padded, alone in zip(output.router_slots, solo[0].router_slots, strict=True):
        assert torch.equal(padded[0, real[0]], alone[0])


def test_router_records_only_when_asked(model: ZayaForCausalLM) -> None:
    ids = random_ids(1, 4)
    fields = ("router_logits", "router_slots", "tokens_per_slot", "hidden_states", "attentions", "loss")
    plain = model(ids)
    assert all(getattr(plain, field) is None for field in fields)
    assert all(getattr(model.model(ids), field) is None for field in fields[:-1])
    by_config = redraw(ZayaForCausalLM(tiny_config(output_router_logits=True)))
    assert by_config(ids).tokens_per_slot.sum() == 16
    assert by_config(ids, output_router_logits=False).router_logits is None
    assert by_config.model(ids).tokens_per_slot.sum() == 16


def test_router_logits_carry_gradients_and_slots_do_not(model: ZayaForCausalLM) -> None:
    output = model(random_ids(1, 4), output_router_logits=True)
    assert all(logits.requires_grad for logits in output.router_logits)
    assert not any(slots.requires_grad for slots in output.router_slots)
    assert not output.tokens_per_slot.requires_grad


@torch.no_grad()
def test_router_logits_equal_stocks() -> None:
    ours, stock = with_stock("sdpa")
    ids = random_ids(2, 7)
    got, want = (m(ids, output_router_logits=True).router_logits for m in (ours, stock))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


# -------------------------------------------------------------------------------------- hidden states and attentions
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True])
def test_hidden_states_and_attentions_are_as_stocks(sliding: bool, implementation: str) -> None:
    changes = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 3} if sliding else {}
    ours, stock = with_stock(implementation, **changes)
    ids = random_ids(2, 7)
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    got, want = ours(ids, **asked), stock(ids, **asked)
    assert len(got.hidden_states) == len(want.hidden_states) == 5
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert mine.shape == (2, 7, 64)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    assert torch.equal(got.hidden_states[-1], ours.model(ids).last_hidden_state)
    assert len(got.attentions) == len(want.attentions) == (4 if implementation == "eager" else 0)
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):
        assert mine.shape == (2, 4, 7, 7)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.sum(-1), torch.ones(2, 4, 7))
        assert not mine.triu(1).any()
    if sliding and implementation == "eager":
        assert not got.attentions[1].tril(-3).any()
        assert got.attentions[0].tril(-3).any()


@torch.no_grad()
def test_some_hidden_states_can_be_selected(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 7)
    every = model(ids, output_hidden_states=True).hidden_states
    some = model(ids, output_hidden_states=[0, -2]).hidden_states
    assert [h is None for h in some] == [False, True, True, False, True]
    assert torch.equal(some[0], every[0])
    assert torch.equal(some[3], every[3])


@torch.no_grad()
def test_attentions_with_a_cache_cover_the_cached_keys() -> None:
    model = redraw(ZayaForCausalLM(tiny_config(attn_implementation="eager")))
    ids = random_ids(2, 7)
    whole = model(ids, output_attentions=True).attentions
    cache = model(ids[:, :4], use_cache=True).cache
    rest = model(ids[:, 4:], cache=cache, output_attentions=True).attentions
    for mine, full in zip(rest, whole, strict=True):
        assert mine.shape == (2, 4, 3, 7)
        torch.testing.assert_close(mine, full[:, :, 4:], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------- tuples and names
@torch.no_grad()
@pytest.mark.parametrize("through", ["argument", "config"])
def test_tuples(through: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 5)
    named = model(ids, labels=ids, use_cache=False, output_router_logits=True, output_hidden_states=True)
    given: dict[str, Any] = {"return_dict": False}
    if through == "config":
        model.config.return_dict, given = False, {}
    plain = model(ids, labels=ids, use_cache=False, output_router_logits=True, output_hidden_states=True, **given)
    assert isinstance(plain, tuple)
    assert len(plain) == len(named.to_tuple()) == 6  # loss, logits, hidden states, three router fields
    for mine, theirs in zip(plain, named.to_tuple(), strict=True):
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
        assert all(torch.equal(a, b) for a, b in pairs)
    inner = model.model(ids, use_cache=False, **given)
    assert isinstance(inner, tuple)
    assert torch.equal(inner[0], named.hidden_states[-1])


@torch.no_grad()
def test_the_cache_has_two_names(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 6)
    want = model(ids).logits[:, 4:]
    for name in ("cache", "past_key_values"):
        first = model(ids[:, :4], use_cache=True)
        assert first.past_key_values is first.cache
        assert "past_key_values" not in first.keys()  # noqa: SIM118
        second = model(ids[:, 4:], **{name: getattr(first, name)})
        torch.testing.assert_close(second.logits, want, rtol=0, atol=1e-5)
        assert second.cache is first.cache
        inner = model.model(ids[:, :4], **{name: DynamicCache(config=model.config)})
        assert inner.past_key_values is inner.cache
        assert inner.cache.get_seq_length() == 4
    cache = DynamicCache(config=model.config)
    assert model(ids, cache=cache, past_key_values=cache).cache is cache
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=cache, past_key_values=DynamicCache(config=model.config))


@torch.no_grad()
def test_no_cache_unless_asked(model: ZayaForCausalLM) -> None:
    ids = random_ids(1, 4)
    assert model(ids, use_cache=False).cache is None
    assert isinstance(model(ids, use_cache=True).cache, DynamicCache)
    assert isinstance(model(ids).cache, DynamicCache)  # the config's default
    assert redraw(ZayaForCausalLM(tiny_config(use_cache=False)))(ids).cache is None


@torch.no_grad()
@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=["last", "last-3", "indices"])
def test_logits_to_keep(keep: int | Tensor, model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 5)
    every = model(ids).logits
    want = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
    torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_embeddings_instead_of_ids(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 5)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


# ------------------------------------------------------------------------------------------------------- wrong inputs
@pytest.mark.parametrize("wrong", [-1, 128, 10**6, -100])
def test_ids_outside_the_vocabulary(wrong: int, model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 5)
    ids[1, 3] = wrong
    for call in (model, model.model):
        with pytest.raises(ValueError, match=rf"input_ids contain {wrong}; ids must lie in 0 \.\.\. 127"):
            call(ids)
    model(torch.tensor([[0, 127]]))


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary(tied: bool) -> None:
    """The id check follows `resize_token_embeddings`, up and down; old words and the biases stay as they were."""
    model = redraw(ZayaForCausalLM(tiny_config(tie_word_embeddings=tied)))
    ids = random_ids(2, 5, high=90)
    want, before = model(ids).logits, {name: b.clone() for name, b in model.named_buffers()}
    model.resize_token_embeddings(140, mean_resizing=False)
    output = model(torch.tensor([[3, 139]]), labels=torch.tensor([[3, 139]]))
    assert output.logits.shape == (1, 2, 140)
    assert output.loss.isfinite()
    torch.testing.assert_close(model(ids).logits[..., :128], want)
    with pytest.raises(ValueError, match=r"contain 140; ids must lie in 0 \.\.\. 139"):
        model(torch.tensor([[140]]))
    model.resize_token_embeddings(100, mean_resizing=False)
    torch.testing.assert_close(model(ids).logits, want[..., :100])
    with pytest.raises(ValueError, match=r"contain 139; ids must lie in 0 \.\.\. 99"):
        model(torch.tensor([[3, 139]]))
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=["batch-0", "length-0", "both-0"])
def test_empty_inputs_forward_and_backward(shape: tuple[int, int], experts: str, implementation: str) -> None:
    settings = {"attn_implementation": implementation, "experts_implementation": experts}
    changes = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 3}
    model = redraw(ZayaForCausalLM(tiny_config(**settings, **changes)))
    ids = torch.zeros(shape, dtype=torch.int64)
    for given in ({}, {"attention_mask": torch.ones_like(ids)}, {"use_cache": False}):
        output = model(ids, labels=ids, output_router_logits=True, output_hidden_states=True, **given)
        assert output.logits.shape == (*shape, 128)
        assert output.loss.item() == 0
        assert not output.tokens_per_slot.any()
        assert all(slots.shape == shape for slots in output.router_slots)
        assert all(h.shape == (*shape, 64) for h in output.hidden_states)
        model.zero_grad()
        output.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


@torch.no_grad()
def test_an_empty_call_leaves_a_cache_as_it_was(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 6)
    want = model(ids).logits
    cache = model(ids[:, :4], use_cache=True).cache
    assert model(ids[:, :0], cache=cache).logits.shape == (2, 0, 128)
    assert cache.get_seq_length() == 4
    torch.testing.assert_close(model(ids[:, 4:], cache=cache).logits, want[:, 4:], rtol=0, atol=1e-5)
    fresh = model(ids[:, :0], use_cache=True).cache
    torch.testing.assert_close(model(ids, cache=fresh).logits, want, rtol=0, atol=1e-5)


def test_bidirectional_attention_is_refused() -> None:
    """transformers lets `is_causal=False` through to the attention function, which would then see the future."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    with pytest.raises(ValueError, match="is_causal=False"):
        model(random_ids(1, 5), is_causal=False)
