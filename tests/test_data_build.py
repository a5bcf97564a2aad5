"""Tokenising: the same bytes by any number of processes, whole or not at all, and again only when something changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from chat_folders import chat_tokenizer
from token_folders import TEXTS, all_ids, ids_of, source, tokenizer, write_megatron
from zaya_hf.training.config import ChatConfig
from zaya_hf.training.data import build, encoding
from zaya_hf.training.data.bpe import train_bpe
from zaya_hf.training.data.build import build_folder, prepare
from zaya_hf.training.data.chat import encode_conversation
from zaya_hf.training.data.text_sources import Record, TextSource
from zaya_hf.training.data.token_files import TokenFolderWriter, open_token_folder

TALKS = [
    [{"role": "user", "content": f"{n} <eos>"}, {"role": "assistant", "content": "good " * n}] for n in range(1, 30)
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text, "messages": []}) + "\n" for text in TEXTS), encoding="utf-8")
    return file


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestDocuments:
    def test_every_text_ends_with_eos_and_holds_no_special_token(self, lines: Path, tmp_path: Path) -> None:
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        found = open_token_folder(tmp_path / "out", "a")
        assert all_ids(found) == [ids_of(text) for text in TEXTS]
        assert found.bytes is not None
        assert found.bytes.tolist() == [len(text.encode()) for text in TEXTS]
        assert found.files["a/ids.bin"] != found.files["a/offsets.bin"]

    def test_bos_comes_where_the_tokenizer_adds_it(self, lines: Path, tmp_path: Path) -> None:
        with_bos = train_bpe(["a b c"], 260)
        with_bos.add_special_tokens({"bos_token": "<bos>"})
        bos = with_bos.bos_token_id
        without = prepare([source(lines)], with_bos, tmp_path / "c")[0].open()
        assert bos not in without.tokens(0)
        with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bos)]
        )
        found = prepare([source(lines)], with_bos, tmp_path / "c")[0].open()
        assert all_ids(found) == [[bos, *ids] for ids in all_ids(without)]

    def test_sources_follow_each_other(self, lines: Path, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("last", encoding="utf-8")
        both = [TextSource(source(lines)), TextSource(source(tmp_path / "b.txt"))]
        built = build_folder(both, tokenizer(), tmp_path / "out")
        assert all_ids(open_token_folder(tmp_path / "out", "a"))[-2:] == [ids_of(TEXTS[-1]), ids_of("last")]
        assert (built.documents, built.new) == (len(TEXTS) + 1, True)

    def test_conversations(self, tmp_path: Path) -> None:
        chat, talker = ChatConfig(), chat_tokenizer()
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS), encoding="utf-8")
        limit = 60
        expected = [encode_conversation(talker, talk, chat, limit) for talk in TALKS]
        kept = [one for one in expected if one is not None]
        assert 0 < len(kept) < len(TALKS)
        options: dict[str, Any] = {"chat": chat, "max_length": limit}
        (first,) = prepare([source(file, field="messages")], talker, tmp_path / "c", **options)
        found = first.open()
        assert all_ids(found) == [list(ids) for ids, _ in kept]
        assert [found.targets(n).tolist() for n in range(len(found))] == [list(mask) for _, mask in kept]  # type: ignore[union-attr]
        assert found.bytes is None
        assert first.built is not None
        assert first.built.dropped == {"without a target, or too long": len(TALKS) - len(kept)}
        (other,) = prepare([source(file, field="messages")], talker, tmp_path / "c", chat=chat, max_length=500)
        assert len(other.open()) == len(TALKS)

    def test_a_conversation_that_the_template_refuses_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        bad = [{"role": "judge", "content": "a"}, {"role": "assistant", "content": "b"}]
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in (TALKS[0], bad)), encoding="utf-8")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*unknown role judge"):
            prepare([source(file, field="messages")], chat_tokenizer(), tmp_path / "c", chat=ChatConfig())

    def test_no_document_is_an_error_that_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
        with pytest.raises(ValueError, match=r"a\.jsonl: no document \(2 empty\)"):
            prepare([source(tmp_path / "a.jsonl")], tokenizer(), tmp_path / "c")
        assert names(tmp_path / "c") == set()


class TestChangedMeanwhile:
    @pytest.mark.parametrize("back", [False, True])
    def test_a_file_that_changes_while_it_is_read_is_named(
        self, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
    ) -> None:
        """`back`: it has its old content again before the end, which only its time of change tells."""
        before, read = lines.read_bytes(), TextSource.records

        def records(self: TextSource, *rest: Any) -> Any:
            lines.write_bytes(b'{"text": "another"}\n')
            yield from read(self, *rest)
            if back:
                lines.write_bytes(before)
                os.utime(lines, ns=(1, 1))

        monkeypatch.setattr(TextSource, "records", records)
        with pytest.raises(ValueError, match=r"a\.jsonl was changed while it was read"):
            prepare([source(lines)], tokenizer(), tmp_path / "c")
        assert names(tmp_path / "c") == set()


class TestProcesses:
    def test_their_number_does_not_show_in_a_byte(
        self, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encoding, "_BATCH_RECORDS", 2)  # so that there are more batches than are under way
        for processes in (1, 2):
            build_folder([TextSource(source(lines))], tokenizer(), tmp_path / f"{processes}", processes=processes)
        assert content(tmp_path / "1") == content(tmp_path / "2")
        assert len(open_token_folder(tmp_path / "2", "a")) == len(TEXTS)

    def test_an_error_in_one_of_them_comes_out(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps({"messages": [{"role": "judge", "content": "a"}]}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*unknown role judge"):
            prepare([source(file, field="messages")], chat_tokenizer(), tmp_path / "c", chat=ChatConfig(), processes=2)
        assert names(tmp_path / "c") == set()

    def test_one_that_is_killed_is_said(self) -> None:
        with pytest.raises(ValueError, match="a process that tokenises was killed"):
            list(encoding.encoded([Record("a", text="a")], _Killer(), 2))  # type: ignore[arg-type]

    def test_batches_are_bounded_in_bytes_and_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(encoding, "_BATCH_BYTES", 10)
        monkeypatch.setattr(encoding, "_BATCH_RECORDS", 3)
        records = [Record("", text="a" * size, size=size) for size in (1, 1, 1, 1, 30, 5, 5, 1)]
        assert [[r.size for r in batch] for batch in encoding._batches(records)] == [[1, 1, 1], [1, 30], [5, 5], [1]]


class _Killer:
    def __call__(self, records: list[Record]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _build_and_die(lines: Path, cache: Path, at: int) -> None:
    """Of a process of its own: is killed before the batch with this number, or else before the folder has its name."""
    append, batches = TokenFolderWriter.append, iter(range(at))

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: TokenFolderWriter, *rest: Any) -> None:
        (die if next(batches, None) is None else append)(self, *rest)

    TokenFolderWriter.append = counted  # type: ignore[method-assign, assignment]
    Path.rename = die  # type: ignore[method-assign, assignment]
    prepare([source(lines)], tokenizer(), cache)


class TestKilled:
    @pytest.mark.parametrize("at", [0, 2, 99])
    def test_nothing_looks_whole_and_a_repeat_cleans_up(
        self, lines: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encoding, "_BATCH_RECORDS", 10)
        cache = tmp_path / "c"
        process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(lines, cache, at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        (left,) = cache.iterdir()
        assert left.name.startswith(".tokens-")
        assert len(list(left.rglob("meta.json"))) == (at == 99)
        (again,) = prepare([source(lines)], tokenizer(), cache)
        assert all_ids(again.open()) == [ids_of(text) for text in TEXTS]
        assert names(cache) == {again.files[0][1].name}


class TestCache:
    def prepared(self, lines: Path, **options: Any) -> build.Built:
        (found,) = prepare([source(lines)], tokenizer(), lines.parent / "c", **options)
        assert found.built is not None
        return found.built

    def test_nothing_is_done_twice(self, lines: Path) -> None:
        first, again = self.prepared(lines), self.prepared(lines, processes=2)
        assert (first.new, again.new) == (True, False)
        assert (again.folder, again.documents, again.tokens, again.bytes) == (
            first.folder,
            first.documents,
            first.tokens,
            first.bytes,
        )
        os.utime(lines, ns=(5, 5))
        assert not self.prepared(lines).new

    def test_a_changed_file_is_tokenised_again_and_can_be_named(self, lines: Path, tmp_path: Path) -> None:
        other = tmp_path / "b.txt"
        other.write_text("same", encoding="utf-8")

        def opened() -> Any:
            return prepare([source(f"{tmp_path}/a.jsonl"), source(other)], tokenizer(), tmp_path / "c")[0].open()

        first = opened()
        status = lines.stat()
        lines.write_text(lines.read_text(encoding="utf-8").replace("text 7", "text 8"), encoding="utf-8")
        os.utime(lines, ns=(status.st_atime_ns, status.st_mtime_ns))  # neither size nor time tell
        second = opened()
        assert first.fingerprint != second.fingerprint
        assert first.files.keys() == second.files.keys() == {"a.jsonl"}
        assert first.files != second.files

    def test_another_tokenizer_is_another_cache(self, lines: Path) -> None:
        first = self.prepared(lines)
        (found,) = prepare([source(lines)], train_bpe(["x y z"], 270), lines.parent / "c")
        assert found.built is not None
        assert found.built.new
        assert not self.prepared(lines).new
        assert found.built.folder != first.folder

    def test_a_damaged_folder_is_built_again(self, lines: Path) -> None:
        first = self.prepared(lines)
        (first.folder / "ids.bin").write_bytes(b"ab")
        assert self.prepared(lines).new
        assert all_ids(open_token_folder(first.folder, "a"))[0] == ids_of(TEXTS[0])


class TestOut:
    def test_a_repeat_leaves_what_is_there(self, lines: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        first = build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out", with_tokenizer=True)
        again = build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out", with_tokenizer=True)
        assert (first.new, again.new) == (True, False)
        assert again.documents == first.documents == len(TEXTS)
        assert names(tmp_path) == {"a.jsonl", "out"}

    def test_what_is_something_else_stays(self, lines: Path, tmp_path: Path) -> None:
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        (tmp_path / "file").write_text("a")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a").write_text("a")
        (tmp_path / "b.txt").write_text("other")
        for name in ("out", "file", "folder"):
            with pytest.raises(ValueError, match=f"{name} exists and holds something else"):
                build_folder([TextSource(source(tmp_path / "b.txt"))], tokenizer(), tmp_path / name)
        assert all_ids(open_token_folder(tmp_path / "out", "a"))[0] == ids_of(TEXTS[0])


class TestIds:
    def test_a_folder_of_tokens_is_opened_where_it_is(self, lines: Path, tmp_path: Path) -> None:
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        (found,) = prepare([source(tmp_path / "out", name="mine")], tokenizer(), tmp_path / "c")
        assert all_ids(found.open()) == [ids_of(text) for text in TEXTS]
        assert (found.open().name, found.built) == ("mine", None)
        assert not (tmp_path / "c").exists()

    def test_every_format_has_the_same_documents(self, lines: Path, tmp_path: Path) -> None:
        write_megatron(tmp_path / "m", [ids_of(text) for text in TEXTS])
        np.save(tmp_path / "f.npy", np.concatenate([ids_of(text) for text in TEXTS]))
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        sources = [source(tmp_path / name) for name in ("a.jsonl", "m.bin", "f.npy", "out")]
        opened = [prepared.open() for prepared in prepare(sources, tokenizer(), tmp_path / "c")]
        assert [len(documents) for documents in opened] == [len(TEXTS)] * 4
        assert all(all_ids(documents) == all_ids(opened[0]) for documents in opened)

    def test_those_of_another_tokenizer_are_refused(self, lines: Path, tmp_path: Path) -> None:
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        for other in (train_bpe(["x y z " * 9], 320), train_bpe(["x y z"], 258)):
            with pytest.raises(ValueError, match=r"tokenised with another tokenizer \(320 entries; the run's has"):
                prepare([source(tmp_path / "out")], other, tmp_path / "c")

    def test_a_tokenizer_with_more_entries_reads_them_alike(self, lines: Path, tmp_path: Path) -> None:
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        more = train_bpe([(Path(__file__).parent / "token_folders.py").read_text(encoding="utf-8")], 320)
        more.add_tokens(["<think>"])
        (found,) = prepare([source(tmp_path / "out")], more, tmp_path / "c")
        assert len(found.open()) == len(TEXTS)

    def test_texts_are_no_conversations(self, lines: Path, tmp_path: Path) -> None:
        write_megatron(tmp_path / "m", [[5, 1]])
        build_folder([TextSource(source(lines))], tokenizer(), tmp_path / "out")
        with pytest.raises(ValueError, match="out holds no conversations: it was built without --chat"):
            prepare([source(tmp_path / "out")], tokenizer(), tmp_path / "c", chat=ChatConfig())
        with pytest.raises(ValueError, match=r"m\.bin holds token ids \(kind megatron\)"):
            prepare([source(tmp_path / "m.bin")], tokenizer(), tmp_path / "c", chat=ChatConfig())
