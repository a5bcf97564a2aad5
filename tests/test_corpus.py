"""The quickstart's text and its tokenizer."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from zaya_hf.quickstart import bpe, corpus

SPLITS = ("train", "validation", "held_out")


def write_library(root: Path, files: int = 60, size: int = 6000) -> Path:
    """A made-up standard library: every file has prose and code of about `size` bytes each."""
    for index in range(files):
        path = root / f"package{index % 7}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{f"Text of module {index}. " * (size // 20)}"""\nx = {index}\n', encoding="utf-8")
    return root


def documents(text: corpus.Corpus) -> dict[str, list[corpus.Document]]:
    return {split: getattr(text, split) for split in SPLITS}


def size(found: list[corpus.Document], kind: str) -> int:
    return sum(len(document.text.encode()) for document in found if document.kind == kind)


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load_corpus()


class TestCorpus:
    def test_this_python_has_enough_text_of_both_kinds(self, text: corpus.Corpus) -> None:
        for kind in ("prose", "code"):
            assert size(text.train, kind) > 500_000
            assert size(text.validation, kind) > 20_000
            assert size(text.held_out, kind) > 50_000
        assert text == corpus.load_corpus()

    def test_no_file_gives_text_to_two_splits(self, text: corpus.Corpus) -> None:
        names = {split: {document.name for document in found} for split, found in documents(text).items()}
        assert not names["train"] & names["validation"]
        assert not names["train"] & names["held_out"]
        assert not names["validation"] & names["held_out"]

    def test_every_file_is_somewhere_and_most_train(self, tmp_path: Path) -> None:
        found = documents(corpus.load_corpus(write_library(tmp_path, files=200, size=1500)))
        modules = {split: {doc.text.split("module ")[1].split(".")[0] for doc in docs} for split, docs in found.items()}
        assert sorted(module for split in modules.values() for module in split) == sorted(str(i) for i in range(200))
        assert 10 < len(modules["held_out"]) < 30
        assert 3 < len(modules["validation"]) < 20

    def test_training_text_mixes_kinds_and_subjects(self, text: corpus.Corpus) -> None:
        for start in range(0, len(text.train) - 60, 60):
            stretch = text.train[start : start + 60]
            assert {document.kind for document in stretch} == {"prose", "code"}
            assert len({document.name for document in stretch}) > 50

    def test_a_split_takes_little_more_than_its_budget(self, text: corpus.Corpus) -> None:
        for split, found in documents(text).items():
            for kind in ("prose", "code"):
                largest = max(len(document.text.encode()) for document in found if document.kind == kind)
                assert size(found, kind) < corpus._BUDGETS[split] + largest

    def test_the_hash_is_of_every_name_and_text(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root).sha256
        file = root / "package3" / "module3.py"
        source = file.read_text()
        file.write_text(source + "y = 1\n")
        changed = corpus.load_corpus(root).sha256
        file.rename(file.with_name("renamed.py"))
        (root / "package3" / "renamed.py").write_text(source)
        renamed = corpus.load_corpus(root).sha256
        assert len({before, changed, renamed}) == 3

    def test_tests_and_installed_packages_are_left_out(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root)
        for part in ("test", "site-packages/numpy", "json/tests", "__pycache__"):
            write_library(root / part, files=3)
        assert corpus.load_corpus(root) == before

    def test_unreadable_files_are_passed_over(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        before = corpus.load_corpus(root)
        (root / "template.py").write_text("def {{ name }}(: pass")
        (root / "latin.py").write_bytes(b"x = '\xe9'\n")
        (root / "null.py").write_bytes(b"x = 1\0\n")
        (root / "surrogate.py").write_text('"""A docstring with half a character, \\ud800, and forty characters."""\n')
        (root / "nested.py").write_text(f"x = {'-' * 200_000}1\n")
        (root / "long.py").write_text(f"x = {'a + ' * 100_000}a\n")
        assert corpus.load_corpus(root) == before

    def test_language_reference_topics_are_prose_to_train_on(self, tmp_path: Path) -> None:
        root = write_library(tmp_path)
        (root / "pydoc_data").mkdir()
        topics = "topics = {'if': 'The if statement', 'del': 'The del statement'}"
        (root / "pydoc_data" / "topics.py").write_text(topics)
        found = [document for document in corpus.load_corpus(root).train if "statement" in document.text]
        topics = "The if statement\n\nThe del statement"
        assert found == [corpus.Document("prose", "pydoc_data/topics.py", topics)]

    def test_what_training_text_has_is_found_whatever_its_lines(self, tmp_path: Path) -> None:
        text = corpus.load_corpus(write_library(tmp_path))
        seen = text.train[0].text.split()[:6]
        assert text.trains_on(" ".join(seen))
        assert text.trains_on("\n    ".join(seen))
        assert not text.trains_on(" ".join([*seen[:5], "nowhere"]))
        module = text.held_out[0].text.split("module ")[1].split(".")[0]
        assert not text.trains_on(f"module {module}.")

    def test_text_over_the_end_of_a_document_is_not_training_text(self, tmp_path: Path) -> None:
        text = corpus.load_corpus(write_library(tmp_path))
        last, first = text.train[0].text.split()[-1], text.train[1].text.split()[0]
        assert text.trains_on(last)
        assert text.trains_on(first)
        assert not text.trains_on(f"{last} {first}")

    def test_dependencies_serve_where_the_library_has_no_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = write_library(tmp_path / "installed")
        (package / "__init__.py").write_text("")

        def find_spec(name: str) -> ModuleSpec | None:
            return ModuleSpec(name, None, origin=str(package / "__init__.py")) if name == "torch" else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        text = corpus.load_corpus(tmp_path / "empty")
        assert text.origin == "torch"
        assert text.train

    def test_no_text_at_all_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match="no text to train on"):
            corpus.load_corpus(tmp_path / "empty")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=400)


class TestTokenizer:
    def test_size_and_special_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert len(tokenizer) == 400
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 1)

    def test_every_digit_is_a_token(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert [token for token in tokenizer.tokenize("x=2024 + 10") if token.isdigit()] == list("202410")
        entries = tokenizer.get_vocab()
        assert [entry for entry in entries if len(entry) > 1 and any(c.isdigit() for c in entry)] == []

    @given(text=st.text())
    def test_any_text_comes_back(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        text = text.replace("<pad>", "").replace("<eos>", "")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text

    def test_the_name_of_a_special_token_in_a_document_is_text(self, tokenizer: PreTrainedTokenizerFast) -> None:
        (*ids, last) = bpe.encode_documents(tokenizer, ["a<eos>b<pad>"]).tolist()
        assert last == tokenizer.eos_token_id
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == "a<eos>b<pad>"

    def test_documents_end_with_eos(self, tokenizer: PreTrainedTokenizerFast) -> None:
        stream = bpe.encode_documents(tokenizer, ["ab", "", "c"])
        expected = [*tokenizer("ab")["input_ids"], 1, 1, *tokenizer("c")["input_ids"], 1]
        assert stream.tolist() == expected

    def test_training_it_again_gives_the_same(self, tokenizer: PreTrainedTokenizerFast) -> None:
        again = bpe.train_tokenizer([Path(__file__).read_text(encoding="utf-8")], vocab_size=400)
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

    def test_a_huge_text_does_not_outweigh_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bpe, "_LARGEST_PART", 60)
        found = bpe.train_tokenizer(["qx\n" * 1000, "ab\n" * 20, "ab\n" * 20], vocab_size=259)
        assert "ab" in found.get_vocab()
        assert "qx" not in found.get_vocab()

    def test_text_beyond_the_sample_is_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bpe, "_SAMPLE", 100)
        found = bpe.train_tokenizer(["ab " * 50, "qxqx " * 1000], vocab_size=262)
        assert "ab" in found.get_vocab()
        assert "qx" not in found.get_vocab()
