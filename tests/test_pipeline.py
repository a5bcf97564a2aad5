"""`pipeline("text-generation")` and transformers' streamers: the same texts as `generate`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from chat_folders import TEMPLATE, save_chat_folder
from zaya_hf import ZayaForCausalLM

PROMPTS = ["def add(a, b):", "x", "import os and all that is in it, please"]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_folder(tmp_path_factory.mktemp("pipeline") / "model", TEMPLATE)


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return pipeline("text-generation", model=str(folder))


def continued(pipe: Any, prompt: str, **options: Any) -> str:
    """What `generate` makes of a prompt on its own."""
    inputs = pipe.tokenizer(prompt, return_tensors="pt")
    output = pipe.model.generate(**inputs, **{**GREEDY, **options})
    return str(pipe.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_pipeline_runs_this_class(pipe: Any) -> None:
    assert type(pipe.model) is ZayaForCausalLM
    assert isinstance(pipe.tokenizer, PreTrainedTokenizerFast)


def test_one_text(pipe: Any) -> None:
    (result,) = pipe(PROMPTS[0], **GREEDY)
    text = continued(pipe, PROMPTS[0])
    assert len(text) > 3
    assert result == {"generated_text": PROMPTS[0] + text}
    (result,) = pipe(PROMPTS[0], return_full_text=False, **GREEDY)
    assert result == {"generated_text": text}
    (result,) = pipe(PROMPTS[0], return_tensors=True, **GREEDY)
    inputs = pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    assert result["generated_token_ids"] == pipe.model.generate(**inputs, **GREEDY)[0].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_padded_batches(pipe: Any, batch_size: int) -> None:
    results = pipe(PROMPTS, batch_size=batch_size, return_full_text=False, **GREEDY)
    assert [result["generated_text"] for (result,) in results] == [continued(pipe, prompt) for prompt in PROMPTS]


def test_a_stream_of_prompts(pipe: Any) -> None:
    results = list(pipe((prompt for prompt in PROMPTS), return_full_text=False, **GREEDY))
    assert [result["generated_text"] for (result,) in results] == [continued(pipe, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("thinking", [None, False])
def test_chats(pipe: Any, thinking: bool | None) -> None:
    variables = {} if thinking is None else {"enable_thinking": thinking}
    rendered = pipe.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
    assert rendered.endswith("<think>\n" if thinking is None else "</think>\n\n")
    answer = {"role": "assistant", "content": continued(pipe, rendered)}
    options = GREEDY if thinking is None else {**GREEDY, "tokenizer_encode_kwargs": variables}
    (result,) = pipe(CHAT, **options)
    assert result["generated_text"] == [*CHAT, answer]
    (first,), (second,) = pipe(
        [CHAT, [{"role": "user", "content": "a longer message than that"}]], batch_size=2, **options
    )
    assert first["generated_text"] == [*CHAT, answer]
    assert second["generated_text"][-1]["role"] == "assistant"


def test_stop_strings(pipe: Any) -> None:
    whole = continued(pipe, PROMPTS[0], max_new_tokens=24)
    stop = whole[9:12]
    options = {**GREEDY, "max_new_tokens": 24, "stop_strings": [stop], "tokenizer": pipe.tokenizer}
    (result,) = pipe(PROMPTS[0], return_full_text=False, **options)
    text = result["generated_text"]
    assert whole.startswith(text)
    assert whole.index(stop) + len(stop) <= len(text) < len(whole)


def test_several_samples(pipe: Any) -> None:
    results = pipe("x", do_sample=True, temperature=1.5, num_return_sequences=3, max_new_tokens=10)
    assert len({result["generated_text"] for result in results}) == 3


def test_device_and_dtype(folder: Path) -> None:
    pipe = pipeline("text-generation", model=str(folder), device="cpu", dtype=torch.bfloat16)
    assert (pipe.model.dtype, pipe.model.device.type) == (torch.bfloat16, "cpu")
    assert pipe.model.model.layers[0].mlp.gate.balancing_biases.dtype == torch.float32
    (result,) = pipe("x", **GREEDY)
    assert result["generated_text"] == "x" + continued(pipe, "x")


def test_a_model_that_is_there_already(pipe: Any, folder: Path) -> None:
    model = ZayaForCausalLM.from_pretrained(folder).fuse_for_inference()
    made = pipeline("text-generation", model=model, tokenizer=pipe.tokenizer)
    assert made.model is model
    assert made("x", **GREEDY) == pipe("x", **GREEDY)


def test_text_streamer(pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    (result,) = pipe(PROMPTS[0], streamer=streamer, return_full_text=False, **GREEDY)
    assert capsys.readouterr().out == result["generated_text"] + "\n"


def in_thread(pipe: Any, streamer: Any) -> threading.Thread:
    inputs = pipe.tokenizer(PROMPTS[0], return_tensors="pt")
    thread = threading.Thread(target=pipe.model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    return thread


def test_text_iterator_streamer(pipe: Any) -> None:
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = in_thread(pipe, streamer)
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == continued(pipe, PROMPTS[0])
    assert sum(bool(piece) for piece in pieces) > 1


def test_async_text_iterator_streamer(pipe: Any) -> None:
    async def collect() -> list[str]:
        streamer = AsyncTextIteratorStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        thread = in_thread(pipe, streamer)
        pieces = [piece async for piece in streamer]
        thread.join()
        return pieces

    pieces = asyncio.run(collect())
    assert "".join(pieces) == continued(pipe, PROMPTS[0])
    assert sum(bool(piece) for piece in pieces) > 1
