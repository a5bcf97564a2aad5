"""What only a static cache has: memory of a fixed size that stays where it is, slots used in turn, and an end."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import StaticCache
from transformers import ZayaConfig as NativeConfig

from cached_runs import (
    as_traced,
    assert_close,
    assert_same_contents,
    cache_for,
    contents,
    feed,
    left_padded,
    model_of,
    uncached,
)
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, record_run, redraw, tiny_config

MODELS = ["full", "sliding", "window 1", "widths 3 4", "bias, sliding, widths 3 2"]


@pytest.fixture(params=MODELS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tensors_of(cache) -> list[torch.Tensor]:
    """Everything that a compiled program would read from a cache."""
    states = [state for layer in cache.layers for state in (layer.keys, layer.values, *layer.conv_states.values())]
    history = cache.layers[0].history
    return [*states, history.filled, *([] if history._rows is None else [history._rows])]


def addresses(cache) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(cache)]


def sliding_layers(cache) -> list:
    return [layer for layer in cache.layers if layer.is_sliding]


# ----------------------------------------------------------------------------------------------------------- memory
def test_shapes():
    """Keys and values as long as the cache; states as in a growing one, not of the shape of keys."""
    model = model_of("full")
    cache = StaticCache(config=model.config, max_cache_len=20)
    feed(model, cache, random_ids(2, 12), [12])
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, 2, 20, 16)
        assert layer.conv_states[0].shape == (2, 96, 2)
        assert layer.conv_states[1].shape == (2, 16, 1)


def test_tensors_stay_where_they_are(model):
    ids, mask = left_padded(9, 5, 7)
    cache = cache_for(model, recording=True, kind="static")
    feed(model, cache, ids, [9], mask)
    before = addresses(cache)
    feed(model, cache, random_ids(3, 5), [1, 3, 1])
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    feed(model, cache, random_ids(3, 2), [1, 1])
    assert addresses(cache) == before
    cache.reset()
    feed(model, cache, random_ids(3, 4), [4])
    of_rows = 0 if cache.layers[0].history.is_plain else 1
    assert addresses(cache)[: len(before) - 1 + of_rows] == before[: len(before) - 1 + of_rows]


@pytest.mark.parametrize("kind", ["sliding", "window 1"])
def test_sliding_layers_hold_their_window_however_long_the_row(kind):
    model = model_of(kind)
    ids, mask = left_padded(31, 22)
    cache = cache_for(model, kind="static")
    got = feed(model, cache, ids, [9, 1, 1, 8, 1, 10, 1], mask)
    assert_close(got, uncached(model, ids, attention_mask=mask), where=mask.bool())
    for layer in sliding_layers(cache):
        assert layer.keys.shape[2] == layer.values.shape[2] == model.config.sliding_window


@pytest.mark.parametrize("because", ["recording", "right padding"])
def test_sliding_layers_give_every_token_a_slot_when_older_ones_are_needed(because):
    model, ids = model_of("sliding"), random_ids(2, 14)
    mask = torch.ones_like(ids)
    cache = cache_for(model, kind="static")
    feed(model, cache, ids[:, :9], [9])
    if because == "recording":
        cache.activate_past_recording()
    else:
        mask[1, 10:12] = 0
    got = feed(model, cache, ids[:, 9:], [3, 1, 1], mask[:, 9:], mask_form="of the piece")
    for row in range(2):
        real = mask[row].bool()
        want = uncached(model, ids[row : row + 1, real])
        assert_close(got[row : row + 1, real[9:]], want[:, 9:])
    assert all(layer.keys.shape[2] == 40 for layer in sliding_layers(cache))


def test_a_cache_shorter_than_the_window():
    model = redraw(ZayaForCausalLM(tiny_config(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=30)))
    ids = random_ids(2, 10)
    cache = StaticCache(config=model.config, max_cache_len=10)
    assert_close(feed(model, cache, ids, [4, 1, 5]), uncached(model, ids))
    assert all(layer.keys.shape[2] == 10 for layer in cache.layers)


def test_layers_that_all_slide():
    """The library tells them nothing but their window; a crop needs more than that."""
    model = redraw(ZayaForCausalLM(tiny_config(layer_types=["hybrid_sliding"] * 4, sliding_window=4)))
    ids = random_ids(2, 20)
    cache = StaticCache(config=model.config, max_cache_len=24)
    feed(model, cache, ids[:, :9], [9])
    cache.activate_past_recording()
    feed(model, cache, ids[:, 9:], [11])
    cache.crop(-6)
    assert_close(feed(model, cache, ids[:, 14:], [1, 5]), uncached(model, ids)[:, 14:])


def test_what_an_earlier_prompt_left_does_not_matter(model):
    """What a mask hides is multiplied by 0; a NaN would show."""
    cache = cache_for(model, kind="static")
    feed(model, cache, random_ids(2, 12), [12])
    for tensor in tensors_of(cache)[:-1]:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    cache.reset()
    ids = random_ids(2, 9, seed=3)
    got = feed(model, cache, ids, [4, 1, 4])
    assert_close(got, uncached(model, ids))


def test_layout_does_not_depend_on_the_prompt(model):
    """A compiled program is one for the strides of its tensors."""
    strides = []
    for rows, tokens in ((1, 5), (1, 9), (3, 4)):
        cache = cache_for(model, kind="static")
        feed(model, cache, random_ids(rows, tokens), [tokens])
        strides.append([tensor.stride() for tensor in tensors_of(cache)])
    assert strides[0] == strides[1] == strides[2]


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("then", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cache_goes_from_mode_to_mode(model, first, then):
    ids, mask = left_padded(10, 7)
    cache = cache_for(model, kind="static")
    with first():
        feed(model, cache, ids[:, :5], [5], mask[:, :5])
    with then():
        got = feed(model, cache, ids[:, 5:], [1, 4])
        cache.reset()
    assert_close(got, uncached(model, ids, attention_mask=mask)[:, 5:], where=mask.bool()[:, 5:])


def test_a_shallow_copy_of_a_layer_has_memory_of_its_own(model):
    cache = cache_for(model, kind="static")
    feed(model, cache, random_ids(2, 6), [6])
    for layer in cache.layers:
        copied = copy.copy(layer)
        held = [(each.keys, each.values, *each.states()) for each in (copied, layer)]
        for ours, theirs in zip(*held, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_autocast_that_comes_or_goes(dtypes):
    """Memory becomes wide enough for both, as the keys of a growing cache do."""
    model, ids = model_of("full"), random_ids(2, 9)
    caches = {kind: cache_for(model, kind=kind) for kind in ("dynamic", "static")}
    for piece, dtype in zip((ids[:, :5], ids[:, 5:6], ids[:, 6:]), (*dtypes, dtypes[0]), strict=True):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = {kind: model(piece, cache=cache).logits for kind, cache in caches.items()}
        torch.testing.assert_close(logits["static"], logits["dynamic"], rtol=0, atol=0.03)


# ---------------------------------------------------------------------------------------------------------- traced
@pytest.mark.parametrize("sizes", [[1] * 14, [4, 1, 1, 8], [14]], ids=str)
@pytest.mark.parametrize("given", ["nothing", "positions", "a mask"])
def test_calls_as_a_compiler_sees_them(model, sizes, given):
    """No number is read: shapes are fixed and masks hide what is not there."""
    ids = random_ids(2, 14)
    cache = cache_for(model, kind="static")
    runs, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        extra = {
            "nothing": {},
            "positions": {"position_ids": torch.arange(start, piece.stop)[None]},
            "a mask": {"attention_mask": torch.ones(2, piece.stop if start % 2 else size)},
        }[given]
        with as_traced():
            runs.append(record_run(model, ids[:, piece], cache=cache, **extra))
        start += size
    got = type(runs[0]).join(runs)
    assert_close(got, uncached(model, ids))
    assert cache.get_seq_length() == 14
    assert_close(
        feed(model, cache, random_ids(2, 2), [1, 1]), uncached(model, torch.cat([ids, random_ids(2, 2)], 1))[:, 14:]
    )


def test_two_programs_serve_a_prompt_and_every_step():
    """The cache is new when the first is traced; the second is compiled once for all steps."""
    torch._dynamo.reset()
    model, counted = model_of("sliding"), []

    def backend(module, inputs):
        counted.append(len(inputs))
        return module.forward

    compiled, ids = torch.compile(model.forward, fullgraph=True, backend=backend), random_ids(2, 14)
    cache = StaticCache(config=model.config, max_cache_len=20)
    logits = [compiled(piece, cache=cache).logits for piece in ids.split([6, *[1] * 8], dim=1)]
    assert len(counted) == 2
    assert_close(torch.cat(logits, dim=1), uncached(model, ids).logits)
    assert cache.get_seq_length() == 14
    torch._dynamo.reset()


def test_traced_calls_refuse_what_needs_numbers(model):
    cache = cache_for(model, kind="static")
    feed(model, cache, random_ids(1, 4), [4])
    before = contents(cache)
    for given in ({"attention_mask": torch.ones(1, 1, 1, 5)}, {"seq_idx": torch.zeros(1, 1, dtype=torch.long)}):
        with as_traced(), pytest.raises(ValueError, match="a compiled or exported call with a static cache takes no"):
            model(random_ids(1, 1), cache=cache, **given)
    assert_same_contents(cache, before)


# --------------------------------------------------------------------------------------------------------- its end
@pytest.mark.parametrize("given", ["ids", "mask", "masks made ahead"])
def test_more_tokens_than_it_holds_are_refused_before_anything_changes(model, given):
    ids, mask = left_padded(12, 8)
    cache = StaticCache(config=model.config, max_cache_len=14)
    feed(model, cache, ids, [12], mask)
    before = contents(cache)
    new = random_ids(2, 3)
    grown = torch.nn.functional.pad(mask, (0, 3), value=1)
    call = {
        "ids": lambda: model(new, cache=cache),
        "mask": lambda: model(new, attention_mask=grown, cache=cache),
        "masks made ahead": lambda: model.create_masks_for_generate(model.config, new[..., None], grown, cache=cache),
    }[given]
    with pytest.raises(ValueError, match=r"holds 12 of at most 14 tokens, and the call has 3; make one with a larger"):
        call()
    assert_same_contents(cache, before)
    got = feed(model, cache, new[:, :2], [1, 1])
    whole_mask = torch.nn.functional.pad(mask, (0, 2), value=1)
    assert_close(got, uncached(model, torch.cat([ids, new[:, :2]], dim=1), attention_mask=whole_mask)[:, 12:])


def test_a_call_that_dies_in_a_layer_is_noticed(monkeypatch):
    model, ids = model_of("full"), random_ids(1, 8)
    cache = cache_for(model, kind="static")
    feed(model, cache, ids[:, :4], [4])
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.layers[2].mlp), "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 4:5], cache=cache)
    with pytest.raises(RuntimeError, match="left the cache half-filled"):
        model(ids[:, 4:5], cache=cache)
    cache.reset()
    assert_close(feed(model, cache, ids, [5, 3]), uncached(model, ids))


@pytest.mark.parametrize("remove", [1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_crop_does_not_hide_that_a_call_died(monkeypatch, kind, remove):
    model, ids = model_of("full"), random_ids(1, 8)
    cache = cache_for(model, recording=True, kind=kind)
    feed(model, cache, ids[:, :4], [4])
    with monkeypatch.context() as patched:
        patched.setattr(type(model.model.layers[0].input_layernorm), "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 4:6], cache=cache)
    cache.crop(-remove)
    with pytest.raises(RuntimeError, match="left the cache half-filled"):
        model(ids[:, 4:5], cache=cache)


# -------------------------------------------------------------------------------------------------- whose cache it is
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_made_with_the_config_of_the_stock_class(kind):
    model, ids = model_of(kind), random_ids(2, 9)
    values = {key: getattr(model.config, key) for key in ("num_hidden_layers", "layer_types", "sliding_window")}
    got = feed(model, StaticCache(config=NativeConfig(**values), max_cache_len=12), ids, [4, 1, 4])
    assert_close(got, uncached(model, ids))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 3}, "has 3 layers, the model 4"),
        ({"layer_types": ["hybrid"] * 4}, "layer 1 of the cache is a LinearAttentionAndStaticFull"),
        ({"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 7}, "has a window of 7, the model 4"),
    ],
    ids=["depth", "kinds of layers", "window"],
)
def test_made_for_another_model_is_refused(changes, match):
    model = model_of("sliding")
    cache = StaticCache(config=tiny_config(**changes), max_cache_len=20)
    with pytest.raises(ValueError, match=match) as error:
        model(random_ids(1, 3), cache=cache)
    assert "\n" not in str(error.value)


def test_gradients_are_those_of_the_call(model):
    """Of the tokens of this call; what is cached counts as given."""
    ids = random_ids(2, 9)

    def gradients(kind: str) -> list[torch.Tensor]:
        cache = cache_for(model, kind=kind)
        feed(model, cache, ids[:, :5], [5])
        with torch.enable_grad():
            loss = model(ids[:, 5:], cache=cache, labels=ids[:, 5:]).loss
            return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    for got, want in zip(gradients("static"), gradients("dynamic"), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "window 1"])
@pytest.mark.parametrize("trained", ["q_proj", "v_proj_current", "temp"])
def test_gradients_of_few_parameters_survive_the_next_call(kind, trained):
    """A graph that needs a gradient of keys alone saves the values as well; the next call writes in that memory."""

    def gradient(kind_of_cache: str) -> torch.Tensor:
        model = copy.deepcopy(model_of(kind)).requires_grad_(False)
        parameter = next(p for name, p in model.named_parameters() if trained in name)
        parameter.requires_grad_()
        cache, ids = cache_for(model, kind=kind_of_cache), random_ids(2, 9)
        with torch.enable_grad():
            loss = model(ids[:, :5], cache=cache).logits.square().mean()
            model(ids[:, 5:], cache=cache)
            (got,) = torch.autograd.grad(loss, parameter)
        return got

    torch.testing.assert_close(gradient("static"), gradient("dynamic"), rtol=1e-4, atol=1e-5)


def test_nothing_that_is_held_keeps_a_graph_alive(model):
    cache = cache_for(model, recording=True, kind="static")
    with torch.enable_grad():
        feed(model, cache, random_ids(2, 9), [5, 1, 3])
    held = [*tensors_of(cache), *(columns for layer in cache.layers for columns in layer.recorded)]
    assert not any(tensor.requires_grad for tensor in held)
