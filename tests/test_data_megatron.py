"""Ids that others wrote: Megatron-LM's indexed datasets, and flat files."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_folders import TEXTS, all_ids, ids_of, source, tokenizer, write_megatron
from zaya_hf.training.data import flat_files
from zaya_hf.training.data.build import prepare
from zaya_hf.training.data.documents import TokenDocuments
from zaya_hf.training.data.megatron import open_megatron

DOCUMENTS = st.lists(st.lists(st.integers(2, 250), max_size=9).map(lambda ids: [*ids, 1]), min_size=1, max_size=9)
CODES = [(1, "|u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]


def opened(path: Path | str, cache: Path, **fields: Any) -> TokenDocuments:
    (prepared,) = prepare([source(path, **fields)], tokenizer(), cache)
    return pickle.loads(pickle.dumps(prepared)).open()  # as another process has it


class TestMegatron:
    @pytest.mark.parametrize(("code", "dtype"), CODES)
    @given(documents=DOCUMENTS)
    def test_documents_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], code: int, dtype: str
    ) -> None:
        folder = tmp_path_factory.mktemp("t")
        write_megatron(folder / "a", documents, code=code, dtype=dtype)
        found = opened(folder / "a.bin", folder)
        assert all_ids(found) == documents
        assert found.bytes is None
        assert found.eos_id == 1

    def test_texts_are_the_documents_of_our_own_format(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [ids_of(text) for text in TEXTS])
        found = opened(tmp_path / "a.idx", tmp_path)
        assert [tokenizer().decode(ids[:-1]) for ids in all_ids(found)] == TEXTS

    def test_a_document_may_have_several_sequences_or_none(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [[5], [6, 7], [8], [], [9]], documents=[0, 2, 2, 3, 4, 5])
        assert all_ids(opened(tmp_path / "a.bin", tmp_path)) == [[5, 6, 7], [8], [9]]

    def test_several_files_are_one_source(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "b", [[5], [6, 7]], code=4, dtype="<i4")
        write_megatron(tmp_path / "a", [[8, 9]])
        found = opened(tmp_path, tmp_path / "cache", name="mine")
        assert all_ids(found) == [[8, 9], [5], [6, 7]]
        assert sorted(found.files) == ["a.bin", "a.idx", "b.bin", "b.idx"]
        assert found.name == "mine"
        assert all_ids(found.subset([2, 0])) == [[6, 7], [8, 9]]

    def test_sequences_may_be_anywhere_but_those_of_a_document(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [[5], [6, 7], [8]])
        data = bytearray((tmp_path / "a.idx").read_bytes())
        places = 34 + 3 * 4  # behind the header and the lengths
        data[places : places + 24] = struct.pack("<3q", 2, 4, 0)
        data[34:46] = struct.pack("<3i", 1, 2, 1)
        (tmp_path / "a.idx").write_bytes(data)
        assert all_ids(open_megatron([("a", tmp_path / "a.bin")], "a", 1)) == [[6], [7, 8], [5]]
        data[-32:] = struct.pack("<4q", 0, 1, 1, 3)  # the last two in one document
        (tmp_path / "a.idx").write_bytes(data)
        with pytest.raises(ValueError, match="sequence 2 is not behind the one before it"):
            open_megatron([("a", tmp_path / "a.bin")], "a", 1)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: b"TNTIDX\x00\x00\x00" + data[9:], r"a\.idx is no index of Megatron-LM"),
            (lambda data: data[:20], r"a\.idx is damaged: it ends within its header"),
            (lambda data: data[:9] + b"\x02" + data[10:], r"a\.idx has version 2; version 1 can be read"),
            (lambda data: data[:17] + b"\x06" + data[18:], r"a\.idx has dtype code 6, which stands for no integers"),
            (lambda data: data[:-1], r"a\.idx is damaged: 101 bytes; 3 sequences take 102"),
            (lambda data: data + b"\x00" * 3, r"a\.idx is of a multimodal dataset"),
            (lambda data: data[:-8] + struct.pack("<q", 2), "index of documents does not ascend from 0 to 3"),
            (lambda data: data[:34] + struct.pack("<i", -1) + data[38:], "lengths or places that cannot be"),
            (lambda data: data[:46] + struct.pack("<q", 2**63 - 2) + data[54:], "lengths or places that cannot be"),
            (lambda data: data[:42] + struct.pack("<i", 9) + data[46:], r"a\.bin is damaged: 8 bytes; .* tells of 24"),
        ],
    )
    def test_a_damaged_index_is_named(self, tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
        write_megatron(tmp_path / "a", [[5], [6, 7], [8]], documents=[0, 1, 2, 3])
        index = tmp_path / "a.idx"
        index.write_bytes(change(index.read_bytes()))
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "a.bin", tmp_path)

    @pytest.mark.parametrize("change", [lambda data: data[:-2], lambda data: data + b"ab"])
    def test_a_bin_file_of_another_size_is_named(self, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
        write_megatron(tmp_path / "a", [[5], [6, 7], [8]])
        (tmp_path / "a.bin").write_bytes(change((tmp_path / "a.bin").read_bytes()))
        with pytest.raises(ValueError, match=r"a\.bin is damaged"):
            opened(tmp_path / "a.bin", tmp_path)

    @pytest.mark.parametrize(("code", "dtype", "wrong"), [(8, "<u2", 320), (3, "<i2", -1)])
    def test_ids_of_another_vocabulary_are_refused(self, tmp_path: Path, code: int, dtype: str, wrong: int) -> None:
        write_megatron(tmp_path / "a", [[5], [6, wrong]], code=code, dtype=dtype)
        with pytest.raises(ValueError, match=f"id {wrong} is not in the tokenizer's vocabulary of 320 entries"):
            opened(tmp_path / "a.bin", tmp_path)

    def test_no_document_is_an_error(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [])
        with pytest.raises(ValueError, match="no document has a token in it"):
            opened(tmp_path / "a.bin", tmp_path)

    def test_a_changed_file_has_another_digest(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [[5], [6, 7]])
        first = opened(tmp_path / "a.bin", tmp_path)
        write_megatron(tmp_path / "a", [[5], [6, 8]])
        second = opened(tmp_path / "a.bin", tmp_path)
        assert [name for name in first.files if first.files[name] != second.files[name]] == ["a.bin"]
        assert first.fingerprint != second.fingerprint


class TestFlat:
    @pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
    @given(documents=DOCUMENTS, rest=st.lists(st.integers(2, 250), max_size=3))
    def test_documents_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], rest: list[int], dtype: str
    ) -> None:
        folder = tmp_path_factory.mktemp("t")
        ids = np.array([number for document in documents for number in document] + rest, dtype)
        ids.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / "a.bin")
        np.save(folder / "a.npy", ids)
        whole = [*documents, rest] if rest else documents  # what follows the last EOS is a document too
        for path in (folder / "a.bin", folder / "a.npy"):
            found = opened(path, folder / "cache", dtype=dtype if path.suffix == ".bin" else None)
            assert all_ids(found) == whole
            assert found.eos_id == 1
        assert {path.name for path in folder.iterdir()} == {"a.bin", "a.npy", "cache"}

    def test_documents_longer_than_a_chunk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flat_files, "_CHUNK", 4)
        documents = [[5] * 11 + [1], [6, 1], [7, 8, 1], [1]]
        np.save(tmp_path / "a.npy", np.concatenate(documents))
        assert all_ids(opened(tmp_path / "a.npy", tmp_path / "cache")) == documents

    def test_bytes_behind_an_array_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([5, 1, 6, 1]))
        (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes() + bytes(8))
        with pytest.raises(ValueError, match=r"a\.npy has 8 bytes behind its array of 4 ids"):
            opened(tmp_path / "a.npy", tmp_path / "cache")

    def test_it_is_read_through_once_per_content(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, ends = [], flat_files._ends
        monkeypatch.setattr(flat_files, "_ends", lambda name, *rest: calls.append(name) or ends(name, *rest))
        np.save(tmp_path / "a.npy", np.array([5, 1, 6, 1]))
        np.save(tmp_path / "b.npy", np.array([7, 8, 1]))
        first = opened(f"{tmp_path}/*.npy", tmp_path / "cache")
        assert all_ids(opened(f"{tmp_path}/*.npy", tmp_path / "cache")) == [[5, 1], [6, 1], [7, 8, 1]]
        assert calls == ["a.npy", "b.npy"]
        np.save(tmp_path / "b.npy", np.array([7, 1, 1]))
        second = opened(f"{tmp_path}/*.npy", tmp_path / "cache")
        assert all_ids(second) == [[5, 1], [6, 1], [7, 1], [1]]
        assert calls == ["a.npy", "b.npy", "b.npy"]
        assert [name for name in first.files if first.files[name] != second.files[name]] == ["b.npy"]

    def test_a_file_that_changes_before_it_is_opened_is_named(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([5, 1]))
        (prepared,) = prepare([source(tmp_path / "a.npy")], tokenizer(), tmp_path / "cache")
        np.save(tmp_path / "a.npy", np.array([6, 1]))
        with pytest.raises(ValueError, match=r"a\.npy was changed while the run started"):
            prepared.open()

    @pytest.mark.parametrize(
        ("name", "ids", "fields", "message"),
        [
            ("a.bin", np.array([5, 1], "<u2"), {}, "a.bin has raw ids: say of which dtype"),
            ("a.bin", np.array([5, 1, 1], "|u1"), {"dtype": "uint16"}, "has 3 bytes, which are no whole number of ids"),
            (
                "a.bin",
                np.array([5, 320, 1], "<u2"),
                {"dtype": "uint16"},
                "a.bin: id 320 is not in the vocabulary of 320",
            ),
            ("a.bin", np.array([5, -2, 1], "<i4"), {"dtype": "int32"}, "a.bin: id -2 is not in the vocabulary of 320"),
            ("a.bin", np.array([5, 6], "<u2"), {"dtype": "uint16"}, "the eos id 1 is nowhere in it"),
            ("a.bin", np.array([], "<u2"), {"dtype": "uint16"}, "the eos id 1 is nowhere in it"),
            ("a.npy", np.array([5.0, 1.0]), {}, r"a\.npy holds float64 \[2\]; integers with one dimension"),
            ("a.npy", np.array([[5, 1]]), {}, r"a\.npy holds int64 \[1, 2\]; integers with one dimension"),
        ],
    )
    def test_refused(self, tmp_path: Path, name: str, ids: np.ndarray, fields: Any, message: str) -> None:
        if name.endswith(".npy"):
            np.save(tmp_path / name, ids)
        else:
            ids.tofile(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / name, tmp_path / "cache", **fields)

    def test_a_damaged_npy_file_is_named(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([5, 1]))
        data = (tmp_path / "a.npy").read_bytes()
        for broken in (b"", b"hello", data[:-3]):
            (tmp_path / "a.npy").write_bytes(broken)
            with pytest.raises(ValueError, match=r"a\.npy is no \.npy file that can be mapped"):
                opened(tmp_path / "a.npy", tmp_path / "cache")
