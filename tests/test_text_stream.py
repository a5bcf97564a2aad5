"""Text from tokens that come one by one: whole characters, stop strings, thinking, control characters."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from chat_folders import chat_tokenizer
from zaya_hf.inference.text_stream import StopStrings, TextStream, ThinkingSplitter, printable, split_thinking

UNICODE = "naïve — “日本語” 👩‍🔬 e\u0301\n\tx = {'a': 1}  \u0628\u064a \U0001d518 \x1b[2J"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As ZAYA1's: words with a mark for the space before them, and a token for every byte of anything else."""
    words = ["▁", "▁hello", "hello", "▁the", "re", "a"]
    names = ["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def streamed(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip: set[int] | None = None) -> list[str]:
    stream = TextStream(tokenizer, skip or set())
    return [*(stream.push(token) for token in ids), stream.end()]


def test_all_pieces_are_the_text(tokenizer: PreTrainedTokenizerFast, test_seed: int, fuzzing: bool) -> None:
    draw = random.Random(test_seed)
    for _ in range(200 if fuzzing else 20):
        ids = [
            draw.randrange(len(tokenizer)) for _ in range(draw.randrange(300))
        ]  # mostly bytes that are no characters
        ids += tokenizer(UNICODE, add_special_tokens=False)["input_ids"]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["hello there", " hello", "日本語", "hello日a本", "a\n\nb"])
def test_bytes_between_words(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = []
    for part in text.replace(" ", "▁"):
        known = tokenizer.get_vocab().get(part)
        ids += [tokenizer.get_vocab()[f"<0x{b:02X}>"] for b in part.encode()] if known is None else [known]
    assert tokenizer.decode(ids) == text
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_of_several_tokens_comes_whole_and_at_once(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("é日👩", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3
    assert [piece for piece in streamed(tokenizer, ids) if piece] == ["é", "日", "👩"]


def test_text_comes_with_its_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("def add(a, b):", add_special_tokens=False)["input_ids"]
    *pieces, end = streamed(tokenizer, ids)
    assert all(pieces)
    assert end == ""


def test_half_a_character_is_shown_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("a日", add_special_tokens=False)["input_ids"][:-1]
    assert streamed(tokenizer, ids)[-1] == "\ufffd"


def test_bytes_that_never_become_text_are_not_held_back_for_ever(tokenizer: PreTrainedTokenizerFast) -> None:
    byte = tokenizer("日", add_special_tokens=False)["input_ids"][-1]
    assert "".join(streamed(tokenizer, [byte] * 200)[:100]).count("\ufffd") > 50


def test_end_tokens_are_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert "".join(streamed(tokenizer, [*ids, end, *ids], {end})) == "abab"
    assert "".join(streamed(tokenizer, [*ids, end])) == "ab<|im_end|>"


@pytest.mark.parametrize("cut", range(1, 6))
@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("one\n\ntwo", "one"),
        ("one\ntwo", "one\ntwo"),
        ("one\n\n", "one"),
        ("a\nEND\n\n", "a\n"),
        ("ENEND", "EN"),
        ("\n\nx", ""),
        ("ends with \n", "ends with \n"),
    ],
)
def test_stop_strings(text: str, before: str, cut: int) -> None:
    stop = StopStrings(["\n\n", "END"])
    pieces = [stop.push(text[start : start + cut]) for start in range(0, len(text), cut)]
    assert "".join(pieces) + stop.end() == before
    assert stop.found == (before != text)


THINKING = [
    ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
    ("hm\n</think>\n\nyes", True, "hm", "yes"),
    ("  <think>hm</think>yes", False, "hm", "yes"),
    ("yes", False, None, "yes"),
    ("  yes <think> is a word </think>", False, None, "  yes <think> is a word </think>"),
    ("hm </thin </think> a </think> b", True, "hm </thin", "a </think> b"),
    ("half a thought", True, "half a thought", ""),
    ("<think>half</thin", False, "half</thin", ""),
    ("\n\n</think>\n\nyes", True, None, "yes"),
    ("<thin", False, None, "<thin"),
    ("", True, None, ""),
]


@pytest.mark.parametrize(("text", "opened", "thinking", "answer"), THINKING)
def test_thinking_is_told_from_the_answer(text: str, opened: bool, thinking: str | None, answer: str) -> None:
    assert split_thinking(text, opened) == (thinking, answer)


@pytest.mark.parametrize("cut", range(1, 10))
@pytest.mark.parametrize(("text", "opened", "thinking", "answer"), THINKING)
def test_thinking_in_pieces(text: str, opened: bool, thinking: str | None, answer: str, cut: int) -> None:
    splitter = ThinkingSplitter(opened)
    parts = [part for start in range(0, len(text), cut) for part in splitter.push(text[start : start + cut])]
    parts += splitter.end()
    assert ("".join(text for is_thinking, text in parts if is_thinking).rstrip() or None) == thinking
    assert "".join(text for is_thinking, text in parts if not is_thinking) == answer


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[2Jb\x07\x9b31m\x00\x7f") == "a\\x1b[2Jb\\x07\\x9b31m\\x00\\x7f"
    assert printable("tab\tline\nend\r\nnaïve 日本") == "tab\tline\nend\nnaïve 日本"
    assert printable("over\rwritten") == "over\\x0dwritten"
