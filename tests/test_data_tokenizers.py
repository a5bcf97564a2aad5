"""Which tokenizer a run gets, and what it is known by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from token_folders import TEXTS, source, tokenizer
from zaya_hf.testing import TINY
from zaya_hf.training.config import DataConfig, TrainingConfig
from zaya_hf.training.data import tokenizers
from zaya_hf.training.data.bpe import train_bpe
from zaya_hf.training.data.build import build_folder
from zaya_hf.training.data.text_sources import TextSource


def config(out: Path, *paths: Path, model: dict[str, Any] | None = None, **asked: Any) -> TrainingConfig:
    sources = [
        source(path, weight=weight) for path, weight in zip(paths, asked.pop("weights", [1.0] * 9), strict=False)
    ]
    return TrainingConfig(
        out=str(out),
        steps=1,
        model=model or {"config": TINY},
        tokenizer=asked,
        data=DataConfig(sources=sources, sequence_length=8),
        batch={"rows": 1},
        optimizer={"lr": 1e-3},
    )


def text(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


class TestOfRun:
    def test_by_path(self, tmp_path: Path) -> None:
        tokenizer().save_pretrained(tmp_path / "t")
        file = text(tmp_path / "a.txt", "a")
        found = tokenizers.of_run(config(tmp_path / "run", file, path=str(tmp_path / "t")), tmp_path / "run")
        assert tokenizers.tokenizer_digest(found) == tokenizers.tokenizer_digest(tokenizer())
        again = tokenizers.of_run(config(tmp_path / "run", file), tmp_path / "run", build=False)  # another process
        assert tokenizers.tokenizer_digest(again) == tokenizers.tokenizer_digest(tokenizer())

    def test_that_of_the_checkpoint(self, tmp_path: Path) -> None:
        file = text(tmp_path / "a.txt", "a")
        tokenizer().save_pretrained(tmp_path / "model")
        train_bpe(["a b"], 258).save_pretrained(tmp_path / "earlier" / "tokenizer")
        for folder, size in (("model", 320), ("earlier", 258)):
            of_run = config(tmp_path / "run", file, model={"checkpoint": str(tmp_path / folder)})
            assert len(tokenizers.of_run(of_run, tmp_path / "run")) == size

    def test_that_of_folders_of_tokens(self, tmp_path: Path) -> None:
        file = text(tmp_path / "a.txt", "a")
        build_folder([TextSource(source(file))], tokenizer(), tmp_path / "out", with_tokenizer=True)
        assert len(tokenizers.of_run(config(tmp_path / "run", tmp_path / "out"), tmp_path / "run")) == 320
        with pytest.raises(ValueError, match=r"there is no tokenizer: name one by tokenizer\.path"):
            tokenizers.of_run(config(tmp_path / "run", tmp_path / "out", file), tmp_path / "run")

    def test_trained_on_the_sources_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, train = [], tokenizers.train_bpe
        monkeypatch.setattr(tokenizers, "train_bpe", lambda *rest: calls.append(rest) or train(*rest))
        file = text(tmp_path / "a.txt", "\n".join(TEXTS) * 3)
        asked = config(tmp_path / "run", file, train_vocab_size=280)
        first = tokenizers.of_run(asked, tmp_path / "run")
        assert len(first) == 280
        assert first.tokenize("x=20") == ["x", "=", "2", "0"]
        again = tokenizers.of_run(asked, tmp_path / "run")
        assert len(calls) == 1
        assert tokenizers.tokenizer_digest(again) == tokenizers.tokenizer_digest(first)
        elsewhere = tokenizers.of_run(asked, tmp_path / "other")
        assert tokenizers.tokenizer_digest(elsewhere) == tokenizers.tokenizer_digest(first)
        text(file, "other " * 200 + "\n".join(TEXTS) * 3)
        changed = tokenizers.of_run(asked, tmp_path / "run")
        assert tokenizers.tokenizer_digest(changed) != tokenizers.tokenizer_digest(first)

    def test_a_run_that_has_begun_keeps_its_own(self, tmp_path: Path) -> None:
        """Not one whose first save was killed: that starts anew, with the tokenizer that is asked for now."""
        file, out = text(tmp_path / "a.txt", "\n".join(TEXTS) * 3), tmp_path / "run"
        assert len(tokenizers.of_run(config(out, file, train_vocab_size=280), out)) == 280
        (out / "checkpoints" / "step-2.tmp").mkdir(parents=True)
        assert len(tokenizers.of_run(config(out, file, train_vocab_size=270), out)) == 270
        (out / "checkpoints" / "step-2").mkdir()
        assert len(tokenizers.of_run(config(out, file, train_vocab_size=280), out)) == 270

    def test_a_torn_one_says_what_to_do(self, tmp_path: Path) -> None:
        file, out = text(tmp_path / "a.txt", "\n".join(TEXTS) * 3), tmp_path / "run"
        asked = config(out, file, train_vocab_size=280)
        tokenizers.of_run(asked, out)
        whole = (out / "tokenizer" / "tokenizer.json").read_bytes()
        (out / "tokenizer" / "tokenizer.json").write_bytes(whole[:100])
        with pytest.raises(ValueError, match=r"no tokenizer at \S+tokenizer: [^\n]+; delete that folder, and the same"):
            tokenizers.of_run(asked, out)

    def test_weights_decide_what_is_learnt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizers, "_SAMPLE", (600, 600))
        files = [text(tmp_path / "a.txt", "qx " * 2000), text(tmp_path / "b.txt", "jk " * 2000)]
        learnt = []
        for weights in ([9.0, 1.0], [1.0, 9.0]):
            asked = config(tmp_path / "run", *files, train_vocab_size=259, weights=weights)
            learnt.append(set(tokenizers.of_run(asked, tmp_path / f"run {weights[0]}").get_vocab()) & {"qx", "jk"})
        assert learnt == [{"qx"}, {"jk"}]

    def test_the_sample_is_of_many_files_and_bounded(self, tmp_path: Path) -> None:
        for number in range(40):
            text(tmp_path / f"{number:02}.txt", chr(ord("A") + number) * 1000)
        found = list(tokenizers._sampled(TextSource(source(tmp_path)), 8000))
        assert sum(map(len, found)) == 8000
        assert len({part[0] for part in found}) == 16
        assert [part[0] for part in found] != sorted(part[0] for part in found)

    def test_too_little_text_is_an_error(self, tmp_path: Path) -> None:
        asked = config(tmp_path / "run", text(tmp_path / "a.txt", "a b"), train_vocab_size=300)
        with pytest.raises(ValueError, match=r"text for 25\d entries, not for 300"):
            tokenizers.of_run(asked, tmp_path / "run")

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({}, "there is no tokenizer: name one"),
            ({"path": "x", "train_vocab_size": 300}, "give either path or train_vocab_size, not both"),
            ({"path": "missing/tokenizer"}, r"^there is no tokenizer at missing/tokenizer: [^\n]+$"),
        ],
    )
    def test_refused(self, tmp_path: Path, asked: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            tokenizers.of_run(config(tmp_path / "run", text(tmp_path / "a.txt", "a"), **asked), tmp_path / "run")


class TestLoad:
    def test_a_folder_without_one(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer\.json\) in it"):
            tokenizers.load(str(tmp_path))

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"^there is no tokenizer at [^\n]+$"):
            tokenizers.load(str(tmp_path))

    def test_one_without_eos(self, tmp_path: Path) -> None:
        tokenizer().save_pretrained(tmp_path)
        about = json.loads((tmp_path / "tokenizer_config.json").read_text())
        about.pop("eos_token")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match="has no EOS token"):
            tokenizers.load(str(tmp_path))


class TestDigests:
    def test_what_a_call_leaves_behind_is_not_in_it(self) -> None:
        one = train_bpe(["a b c"], 260)
        first = tokenizers.tokenizer_digest(one)
        one(["a", "b c"], padding=True, truncation=True, max_length=3)
        assert tokenizers.tokenizer_digest(one) == first
        one.add_tokens(["new"])
        assert tokenizers.tokenizer_digest(one) != first
        assert tokenizers.vocabulary_digest(one, 258) == tokenizers.vocabulary_digest(train_bpe(["a b c"], 260), 258)

    def test_the_vocabulary_ends_behind_its_largest_id(self) -> None:
        one = train_bpe(["a b c"], 258)
        assert tokenizers.vocabulary_size(one) == len(one) == 258
        one.add_tokens(["new"])
        assert tokenizers.vocabulary_size(one) == 259
