"""What `generate` returns besides ids, when it stops, what it records, and which arguments it refuses."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import DeferredStopCheck, StopCheck

from generated_texts import KINDS, OPEN_ENDED, greedy, model_of, padded
from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.testing import random_ids, tiny_config


@pytest.fixture(params=KINDS)
def model(request) -> ZayaForCausalLM:
    return model_of(request.param)


def test_scores_hidden_states_and_attentions():
    model = copy.deepcopy(model_of("sliding"))
    model.set_attn_implementation("eager")
    prompt = random_ids(1, 6)
    out = model.generate(
        prompt,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
        **OPEN_ENDED,
    )
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], use_cache=False, output_hidden_states=True, output_attentions=True)
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == len(out.attentions) == 4
    torch.testing.assert_close(torch.stack(out.logits, 1), whole.logits[:, 5:], rtol=0, atol=3e-5)
    assert torch.isinf(out.scores[0][0, 0])  # the suppressed one
    for index, want in enumerate(whole.hidden_states):
        got = torch.cat([step[index] for step in out.hidden_states], dim=1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    for step, per_layer in enumerate(out.attentions):
        for index, got in enumerate(per_layer):
            query = 6 + step - 1  # the last one of the step
            keys = got.shape[-1]
            want = whole.attentions[index][:, :, query, query + 1 - keys : query + 1]
            torch.testing.assert_close(got[:, :, -1], want, rtol=0, atol=1e-5)


def test_texts_end_at_eos_and_are_padded_after_it(model):
    """Every row ends at its own place; the ids that it would have said without an end say where."""
    ids, mask, prompts = padded([4, 9, 6], "left")
    free = [greedy(model, prompt, 12)[0] for prompt in prompts]
    ends = sorted({int(free[0][2]), int(free[1][5])})
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [0], "pad_token_id": 0}
    got = model.generate(ids, attention_mask=mask, eos_token_id=ends, **options)[:, 9:]
    longest = 0
    for row, text in enumerate(free):
        hits = torch.isin(text, torch.tensor(ends)).nonzero()
        length = int(hits[0]) + 1 if len(hits) else 12
        longest = max(longest, length)
        assert torch.equal(got[row, :length], text[:length])
        assert not got[row, length:].any()
    assert got.shape[1] == longest
    assert int(free[0][2]) in got[0]


def test_streamer_sees_every_token_once(model):
    class Keep(BaseStreamer):
        def __init__(self):
            self.pieces, self.ended = [], False

        def put(self, value):
            self.pieces.append(value.flatten())

        def end(self):
            self.ended = True

    streamer, prompt = Keep(), random_ids(1, 5)
    got = model.generate(prompt, streamer=streamer, max_new_tokens=6, **OPEN_ENDED)
    assert streamer.ended
    assert [len(piece) for piece in streamer.pieces] == [5] + [1] * 6
    assert torch.equal(torch.cat(streamer.pieces), got[0])


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments and outputs of every forward that `generate` makes."""
    seen = []
    forward = ZayaForCausalLM.forward

    @functools.wraps(forward)
    def spy(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        seen.append((kwargs, output))
        return output

    monkeypatch.setattr(ZayaForCausalLM, "forward", spy)
    return seen


def test_only_the_last_logits_are_computed(calls):
    model = model_of("full")
    model.generate(random_ids(2, 6), max_new_tokens=3, **OPEN_ENDED)
    assert [output.logits.shape for _, output in calls] == [(2, 1, 128)] * 3
    calls.clear()
    model.generate(random_ids(2, 6), max_new_tokens=3, logits_to_keep=0, **OPEN_ENDED)
    assert [output.logits.shape[1] for _, output in calls] == [6, 1, 1]


def test_router_records_are_kept_only_when_asked_for(calls):
    model = copy.deepcopy(model_of("full"))
    model.config.output_router_logits = True
    prompt = random_ids(1, 6)
    assert model(prompt).router_logits is not None
    for asked in (None, False, True):
        calls.clear()
        options = {} if asked is None else {"output_router_logits": asked}
        model.generate(prompt, max_new_tokens=3, **options, **OPEN_ENDED)
        assert [output.router_logits is not None for _, output in calls] == [bool(asked)] * 3


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad", "training", "training, checkpointed"])
def test_any_mode_of_torch(mode):
    model = model_of("sliding")
    if mode.startswith("training"):
        model = copy.deepcopy(model).train()
        if "checkpointed" in mode:
            model.activation_checkpointing_enable()
    prompt = random_ids(1, 6)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        got = model.generate(prompt, max_new_tokens=5, **OPEN_ENDED)
        drafted = model.generate(prompt, max_new_tokens=5, prompt_lookup_num_tokens=2, **OPEN_ENDED)
    assert torch.equal(got, drafted)
    assert torch.equal(got[:, 6:], greedy(model_of("sliding"), prompt, 5))
    assert model.training == mode.startswith("training")


def test_generation_config_of_the_checkpoint_is_used(tmp_path):
    model = copy.deepcopy(model_of("full"))
    prompt = random_ids(1, 6)
    text = greedy(model, prompt, 8)[0]
    end = int(text[4])
    model.generation_config.update(max_new_tokens=7, eos_token_id=[end, 1], suppress_tokens=[0], do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    length = text.tolist().index(end) + 1
    assert loaded.generate(prompt)[0, 6:].tolist() == text[:length].tolist()
    assert loaded.generate(prompt, eos_token_id=None)[0, 6:].tolist() == text[:7].tolist()


def test_special_tokens_come_from_the_config():
    config = ZayaForCausalLM(tiny_config(pad_token_id=3, bos_token_id=4, eos_token_id=[5, 6])).generation_config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 4, [5, 6])
    assert isinstance(model_of("full").config, ZayaConfig)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4), (2, 0)])
def test_prompts_without_rows_or_tokens_are_refused(shape):
    model, ids = model_of("full"), torch.zeros(shape, dtype=torch.long)
    for given in ({"inputs": ids}, {"input_ids": ids}, {"inputs_embeds": torch.zeros(*shape, 64)}):
        with pytest.raises(ValueError, match="at least one row and one token"):
            model.generate(**given, max_new_tokens=2)


def test_embeddings_where_ids_are_needed_are_refused():
    model, embeds = model_of("full"), torch.zeros(1, 8, 64)
    with pytest.raises(ValueError, match="prefill_chunk_size splits ids"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=5, max_new_tokens=2)
    for options in ({"assistant_model": model_of("full", seed=1)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="drafts from ids"):
            model.generate(inputs_embeds=embeds, max_new_tokens=2, **options)


def test_early_exit_is_refused_before_it_changes_the_config():
    model = model_of("full")
    with pytest.raises(ValueError, match="assistant_early_exit"):
        model.generate(random_ids(1, 4), assistant_early_exit=2, max_new_tokens=2)
    assert model.config.num_hidden_layers == 4


def test_stopping_one_step_late_leaves_no_trace(model, monkeypatch):
    """Where reading the device is slow, the library decides one step late and crops that step from the cache."""

    class LateStop(DeferredStopCheck):
        def __init__(self, input_ids, max_length, cache, cache_is_returned, streamer=None):
            StopCheck.__init__(self, streamer)
            self.max_length, self.cache = max_length, cache if cache_is_returned else None
            self.slots, self.stop_reported, self.due = (), False, False
            if self.cache is not None:
                self.cache.activate_past_recording()

        def __call__(self, unfinished_sequences, tokens, length):
            self.stop_reported, self.due = self.due, bool(unfinished_sequences.max() == 0)
            stopping = self.stop_reported or length >= self.max_length
            if not stopping and self.cache is not None:
                self.cache.crop(0)
            return stopping

    LateStop.is_supported = staticmethod(lambda *args, **kwargs: True)
    prompt = random_ids(1, 6)
    text = greedy(model, prompt, 12)
    options = {**OPEN_ENDED, "eos_token_id": int(text[0, 4]), "max_new_tokens": 12, "return_dict_in_generate": True}
    want = model.generate(prompt, **options)
    monkeypatch.setattr("transformers.generation.utils.DeferredStopCheck", LateStop)
    got = model.generate(prompt, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert got.sequences.shape[1] < 6 + 12
    assert got.cache.get_seq_length() == want.cache.get_seq_length()
    options["eos_token_id"] = None
    whole = torch.cat([got.sequences, random_ids(1, 2, seed=1)], dim=1)
    on = model.generate(whole, cache=got.cache, **{**options, "max_new_tokens": 5})
    assert torch.equal(on.sequences[:, -5:], greedy(model, whole, 5))


def test_misspelt_arguments_are_named():
    with pytest.raises(ValueError, match="atention_mask"):
        model_of("full").generate(random_ids(1, 4), atention_mask=torch.ones(1, 4), max_new_tokens=2)
