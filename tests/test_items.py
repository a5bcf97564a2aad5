"""The evaluation's items: true texts unseen in training, copies of the same words, and the files themselves."""

from __future__ import annotations

import io
import json
import re
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zaya_hf.quickstart import arithmetic, corpus, items
from zaya_hf.quickstart.corpus import Corpus, Document

Sets = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def text() -> Corpus:
    return corpus.load_corpus()


@pytest.fixture(scope="module")
def folder(text: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("items") / "new"
    counts = items.write_items(folder, text)
    assert counts == {"bits": 120, "prose": 200, "code": 200, "arithmetic_far": 200, "arithmetic_near": 200}
    return folder


@pytest.fixture(scope="module")
def sets(folder: Path) -> Sets:
    lines = {path.stem: path.read_text(encoding="utf-8").split("\n")[:-1] for path in folder.iterdir()}
    return {name: [json.loads(line) for line in found] for name, found in lines.items()}


def true_text(item: dict[str, Any]) -> str:
    return item["choices"][item["answer"]]


def training_text(text: Corpus) -> str:
    return "\n".join(" ".join(document.text.split()) for document in text.train)


class TestPairs:
    @pytest.mark.parametrize("name", ["prose", "code"])
    def test_four_different_texts_of_the_same_words(self, sets: Sets, name: str) -> None:
        for item in sets[name]:
            assert len(set(item["choices"])) == 4
            assert len({"".join(sorted(choice)) for choice in item["choices"]}) == 1
            true = re.findall(r"\w+|\W", true_text(item))
            for choice in item["choices"]:
                if choice != true_text(item) and name == "code":
                    changed = [(a, b) for a, b in zip(true, re.findall(r"\w+|\W", choice), strict=True) if a != b]
                    assert len(changed) == 2
                    assert changed[0] == changed[1][::-1]

    @pytest.mark.parametrize("name", ["prose", "code"])
    def test_they_are_held_out_text_that_no_training_text_has(self, sets: Sets, text: Corpus, name: str) -> None:
        seen = training_text(text)
        held_out = "\n".join(" ".join(d.text.split()) for d in text.held_out if d.kind == name)
        for item in sets[name]:
            assert " ".join(true_text(item).split()) in held_out
            for choice in item["choices"]:
                assert " ".join(choice.split()) not in seen

    @pytest.mark.parametrize("name", ["prose", "code", "arithmetic_far", "arithmetic_near"])
    def test_the_place_of_the_right_one_tells_nothing(self, sets: Sets, name: str) -> None:
        places = [item["answer"] for item in sets[name]]
        assert all(25 < places.count(place) < 75 for place in range(4))

    def test_sentences_keep_their_first_and_last_word(self, sets: Sets) -> None:
        for item in sets["prose"]:
            assert 60 <= len(true_text(item)) <= 160
            assert true_text(item).isascii()
            ends = {(choice.split()[0], choice.split()[-1]) for choice in item["choices"]}
            assert len(ends) == 1
            wrong = (choice for choice in item["choices"] if choice != true_text(item))
            assert not any(re.search(r"\b(\w+) \1\b", choice, re.IGNORECASE) for choice in wrong)

    def test_code_lines_have_four_names_and_no_strings(self, sets: Sets) -> None:
        for item in sets["code"]:
            line = true_text(item)
            assert len(re.findall(r"[A-Za-z_]\w*", line)) >= 4
            assert not set("\"'#") & set(line)

    def test_they_come_from_many_files(self, sets: Sets, text: Corpus) -> None:
        for kind in ("prose", "code"):
            documents = [" ".join(d.text.split()) for d in text.held_out if d.kind == kind]
            counts = [sum(" ".join(true_text(i).split()) in document for i in sets[kind]) for document in documents]
            assert sum(count > 0 for count in counts) > 0.5 * len(documents)
            assert max(counts) < 40


class TestSentences:
    def test_what_is_a_sentence(self) -> None:
        good = "The quick brown fox jumps over the lazy dog, which sleeps in the sun."
        found = list(
            items._sentences(
                f"Too short.\n\n{good[:30]}\n    {good[30:].strip()} It has the number 12 in it and so it is not one "
                "of plain words at all.\n\nthis one does not begin with a capital letter and so is a part of something."
            )
        )
        assert [text for text, _ in found] == [good]
        words = [good[start:end] for start, end in found[0][1]]
        assert words == good.replace(",", "").split()[1:-1]

    def test_copies_of_a_sentence(self) -> None:
        text = "One two two three."
        words = [match.span() for match in re.finditer(r"\w+", text)]
        # The other three have "two two".
        assert set(items._swapped(text, words)) == {"two One two three.", "One two three two."}

    def test_words_of_different_lengths(self) -> None:
        assert set(items._swapped("a bcd e", [(0, 1), (2, 5), (6, 7)])) == {"bcd a e", "e bcd a", "a e bcd"}


class TestCodeLines:
    def test_what_is_a_line(self) -> None:
        source = (
            '"""A docstring of one two three four words\nfor name in other names of it\n"""\n'
            "class Thing(Base, metaclass=Meta):\n"
            "    def method(self, first, second):\n"
            "        return first.value + second.other\n"
            "        # a comment with many words in it\n"
            "        x = first + 'text of four words'\n"
            "        y = first.value(1)\n"
        )
        lines = ["class Thing(Base, metaclass=Meta):", "def method(self, first, second):"]
        assert [line for line, _ in items._code_lines(source)] == [*lines, "return first.value + second.other"]

    def test_spans_are_of_the_line_without_its_indentation(self) -> None:
        source = "if True:\n    total = first + second * third\n"
        ((line, words),) = items._code_lines(source)
        assert [line[start:end] for start, end in words] == ["total", "first", "second", "third"]

    def test_python_tokenizes_all_of_them(self, text: Corpus) -> None:
        for document in text.held_out:
            if document.kind == "code":
                list(tokenize.generate_tokens(io.StringIO(document.text).readline))


class TestPieces:
    def test_they_are_whole_lines_of_about_a_thousand_bytes(self, sets: Sets, text: Corpus) -> None:
        held_out = [document.text for document in text.held_out]
        for item in sets["bits"]:
            assert 600 <= len(item["text"].encode()) < 2000
            (document, *_) = (document for document in held_out if item["text"] in document)
            end = document.index(item["text"]) + len(item["text"])
            assert item["text"].endswith("\n") or end == len(document)
        sizes = [len(item["text"].encode()) for item in sets["bits"]]
        assert 900 < sum(sizes) / len(sizes) < 1200

    def test_both_kinds_and_many_files(self, sets: Sets, text: Corpus) -> None:
        for kind in ("prose", "code"):
            documents = [document.text for document in text.held_out if document.kind == kind]
            found = [sum(item["text"] in document for item in sets["bits"]) for document in documents]
            assert sum(found) >= 60
            assert sum(count > 0 for count in found) >= 10

    def test_copied_text_is_no_piece(self, text: Corpus) -> None:
        licence = "".join(f"Permission number {i} is hereby granted to any person to do this.\n" for i in range(40))
        own = "".join(f"This text of its own has the number {i} and is not in any other file.\n" for i in range(40))
        found = [Document("prose", "copied.py", licence), Document("prose", "own.py", own)]
        changed = replace(text, train=[Document("prose", "first.py", f"    {licence}")], held_out=found)
        pieces = [item["text"] for item in items._pieces(changed, "prose")]
        assert pieces
        assert all(piece in own for piece in pieces)

    def test_every_byte_of_a_document_is_in_one_piece(self) -> None:
        text = "".join(f"line {i} of the text\r\n" for i in range(200)) + "é" * 500
        assert "".join(items._cut(text)) == text


class TestSums:
    def test_they_are_the_held_out_ones(self, sets: Sets) -> None:
        held_out = {str(item) for item in arithmetic.HELD_OUT}
        for name in ("arithmetic_far", "arithmetic_near"):
            found = [f"{item['question']}={true_text(item)}" for item in sets[name]]
            assert set(found) == held_out
            assert len(found) == 200

    def test_both_sets_ask_the_same_in_the_same_order(self, sets: Sets) -> None:
        """lm-eval draws the examples of a prompt by an item's place, so that both sets have the same prompts."""
        questions = [[item["question"] for item in sets[f"arithmetic_{name}"]] for name in ("far", "near")]
        assert questions[0] == questions[1]

    def test_examples_are_solved_training_sums(self, sets: Sets) -> None:
        found = [f"{item['question']}={true_text(item)}" for item in sets["arithmetic_examples"]]
        assert found == [str(item) for item in arithmetic.TRAINING]


def test_the_same_corpus_gives_the_same_files(folder: Path, text: Corpus, tmp_path: Path) -> None:
    items.write_items(tmp_path, text)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_too_little_text_is_an_error_and_writes_nothing(text: Corpus, tmp_path: Path) -> None:
    little = replace(text, held_out=[d for d in text.held_out if d.kind == "code"])
    with pytest.raises(
        RuntimeError, match=r"0 items for prose\.jsonl from the \d+ held-out documents .* 30 are needed"
    ):
        items.write_items(tmp_path / "new", little)
    assert not (tmp_path / "new").exists()
