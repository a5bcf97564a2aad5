"""Documents on disk: the folder of tokens, subsets, the held-out split, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_folders import all_ids, tokenizer
from zaya_hf.training.data import digests
from zaya_hf.training.data.documents import TokenDocuments, hashes, held_out_split
from zaya_hf.training.data.token_files import TokenFolderWriter, open_token_folder, smallest_dtype

ABOUT = {"key": "k", "sources": [{"path": "a.txt", "size": 3, "sha256": "abc"}], "eos_id": 1}


def write(
    folder: Path, documents: list[list[int]], *, vocab_size: int = 320, masks: list[list[bool]] | None = None
) -> TokenDocuments:
    with_masks = masks is not None
    with TokenFolderWriter(folder, vocab_size, with_bytes=not with_masks, with_targets=with_masks) as writer:
        for number, ids in enumerate(documents):
            writer.append(
                np.array(ids, np.int64),
                np.array([len(ids)]),
                None if with_masks else np.array([3 * len(ids)]),
                np.array(masks[number], bool) if masks is not None else None,
            )
        writer.finish(ABOUT)
    return open_token_folder(folder, "some")


class TestFolder:
    @given(documents=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=50), max_size=20))
    def test_documents_come_back(self, tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
        found = write(tmp_path_factory.mktemp("t") / "f", documents)
        assert all_ids(found) == documents
        assert found.lengths.tolist() == [len(ids) for ids in documents]
        assert found.bytes is not None
        assert found.bytes.tolist() == [3 * len(ids) for ids in documents]
        assert found.eos_id == 1
        assert len(found) == len(documents)

    @pytest.mark.parametrize(("vocab_size", "size"), [(2**16, 2), (2**16 + 1, 4)])
    def test_ids_take_the_smallest_dtype(self, tmp_path: Path, vocab_size: int, size: int) -> None:
        found = write(tmp_path / "f", [[0, vocab_size - 1]], vocab_size=vocab_size)
        assert all_ids(found) == [[0, vocab_size - 1]]
        assert np.dtype(smallest_dtype(vocab_size)).itemsize == size
        assert (tmp_path / "f" / "ids.bin").stat().st_size == 2 * size

    def test_targets_come_back(self, tmp_path: Path) -> None:
        found = write(tmp_path / "f", [[5, 6, 7], [8]], masks=[[False, True, True], [False]])
        assert [found.targets(0, 1, 3).tolist(), found.targets(1).tolist()] == [[True, True], [False]]  # type: ignore[union-attr]
        assert found.bytes is None
        assert write(tmp_path / "g", [[5]]).targets(0) is None

    def test_pieces(self, tmp_path: Path) -> None:
        found = write(tmp_path / "f", [[5, 6], [7, 8, 9]])
        assert found.tokens(1, 1).tolist() == [8, 9]
        assert found.tokens(1, 3, 3).tolist() == []
        for start, stop in ((0, 4), (-1, 2), (2, 1)):
            with pytest.raises(IndexError, match="some: document 1 has 3 tokens"):
                found.tokens(1, start, stop)

    def test_a_copy_for_another_process_maps_the_file_again(self, tmp_path: Path) -> None:
        found = write(tmp_path / "f", [list(range(300))] * 200)
        found.tokens(0)
        data = pickle.dumps(found)
        assert len(data) < 20_000  # the ids alone are 120,000 bytes
        assert all_ids(pickle.loads(data)) == all_ids(found)

    def test_the_fingerprint_is_of_the_content(self, tmp_path: Path) -> None:
        first = write(tmp_path / "f", [[5, 6], [7]]).fingerprint
        assert write(tmp_path / "elsewhere", [[5, 6], [7]]).fingerprint == first
        assert write(tmp_path / "g", [[5], [6, 7]]).fingerprint != first
        assert write(tmp_path / "h", [[5, 6], [8]]).fingerprint != first

    def test_an_id_outside_of_the_vocabulary_is_refused(self, tmp_path: Path) -> None:
        for wrong in (320, -1):
            with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary of 320"):
                write(tmp_path / "f", [[5], [wrong, 7]])
        assert list(tmp_path.iterdir()) == []

    def test_anyone_may_read_the_folder_who_may_read_its_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        write(tmp_path / "f", [[5]])
        assert (tmp_path / "f").stat().st_mode == (tmp_path / "other").stat().st_mode


class TestDamage:
    @pytest.mark.parametrize("file", ["ids.bin", "offsets.bin", "bytes.bin"])
    @pytest.mark.parametrize("how", ["missing", "shorter", "longer", "changed"])
    def test_a_file_is_named(self, tmp_path: Path, file: str, how: str) -> None:
        write(tmp_path / "f", [[5, 6], [7, 8, 9]])
        path = tmp_path / "f" / file
        data = path.read_bytes()
        path.unlink()
        if how != "missing":
            path.write_bytes({"shorter": data[:-1], "longer": data + b"a", "changed": data[:-1] + b"a"}[how])
        with pytest.raises(ValueError, match=rf"damaged.*{file}|{file} is damaged"):
            open_token_folder(tmp_path / "f", "some")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda text: text[: len(text) // 2], "meta.json is damaged: it is not JSON"),
            (lambda text: text.replace("zaya tokens", "tokens"), "does not say that the folder holds tokens"),
            (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2; this zaya_hf reads version 1"),
            (lambda text: text.replace('"documents": 2', '"documents": 3'), "does not have the size of 3 documents"),
            (lambda text: text.replace('"tokens": 5', '"tokens": "5"'), "'tokens' is missing or of another type"),
            (lambda text: text.replace("uint16", "int8"), "dtype 'int8'"),
            (lambda text: text.replace('"ids.bin"', '"other.bin"'), "does not list ids.bin"),
            (lambda text: text.replace('"sampled"', '"simple"'), "does not describe bytes.bin"),
        ],
    )
    def test_what_is_wrong_with_meta_json(self, tmp_path: Path, change: Callable[[str], str], message: str) -> None:
        write(tmp_path / "f", [[5, 6], [7, 8, 9]])
        meta = tmp_path / "f" / "meta.json"
        changed = change(meta.read_text(encoding="utf-8"))
        assert changed != meta.read_text(encoding="utf-8")
        meta.write_text(changed, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            open_token_folder(tmp_path / "f", "some")

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such folder of tokens"):
            open_token_folder(tmp_path / "f", "some")
        with pytest.raises(ValueError, match=r"there is no meta\.json"):
            open_token_folder(tmp_path, "some")

    def test_an_error_while_writing_leaves_nothing(self, tmp_path: Path) -> None:
        def fail() -> None:
            with TokenFolderWriter(tmp_path / "f", 320, with_bytes=False, with_targets=False) as writer:
                writer.append(np.array([5]), np.array([1]))
                assert list(tmp_path.iterdir())
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            fail()
        assert list(tmp_path.iterdir()) == []


class TestSubsets:
    def test_they_have_their_own_fingerprints(self, tmp_path: Path) -> None:
        found = write(tmp_path / "f", [[5, 6], [7], [8, 9, 10]])
        part = found.subset([2, 0])
        assert all_ids(part) == [[8, 9, 10], [5, 6]]
        assert part.bytes is not None
        assert part.bytes.tolist() == [9, 6]
        assert len({found.fingerprint, part.fingerprint, found.subset([0, 2]).fingerprint}) == 3
        assert all_ids(part.subset([1])) == [[5, 6]]

    def test_equal_documents_have_equal_hashes(self, tmp_path: Path) -> None:
        generator = np.random.default_rng(0)
        several = [generator.integers(0, 320, size).tolist() for size in (1, 2, 63, 64, 65, 1000, 1000)]
        first = hashes(write(tmp_path / "f", several))
        again = hashes(write(tmp_path / "g", several[::-1], vocab_size=2**20))  # another dtype
        assert first.tolist() == again[::-1].tolist()
        assert len(set(first.tolist())) == len(several)

    def test_length_and_content_decide_the_hash(self, tmp_path: Path) -> None:
        prompt = [7] * 900  # many conversations begin alike
        found = hashes(write(tmp_path / "f", [prompt, [*prompt, 7], [*prompt[:-1], 8], [*prompt[:450], *[8] * 450]]))
        assert len(set(found.tolist())) == 3  # one of 900 tokens is not among the 64 that are looked at
        assert found[0] == found[2]

    def test_the_split_keeps_copies_together_and_meets_the_fraction(self, tmp_path: Path) -> None:
        documents = [[number % 300, number // 300, 5] for number in range(2000)]
        found = write(tmp_path / "f", [*documents, *documents])
        train, held_out = held_out_split(found, 0.1)
        assert len(train) + len(held_out) == 4000
        seen = {tuple(ids) for ids in all_ids(train)}
        assert not seen & {tuple(ids) for ids in all_ids(held_out)}
        assert abs(len(held_out) / 4000 - 0.1) < 3 * (0.1 * 0.9 / 2000) ** 0.5

    def test_what_is_held_out_does_not_depend_on_the_other_documents(self, tmp_path: Path) -> None:
        documents = [[number % 300, number // 300, 5] for number in range(400)]
        _, of_all = held_out_split(write(tmp_path / "f", documents), 0.2)
        _, of_some = held_out_split(write(tmp_path / "g", documents[::2]), 0.2)
        assert {tuple(ids) for ids in all_ids(of_some)} == {tuple(i) for i in all_ids(of_all)} & {
            tuple(ids) for ids in documents[::2]
        }

    @pytest.mark.parametrize("fraction", [1e-9, 0.2, 0.999999])
    def test_of_few_documents_one_is_held_out_and_one_is_not(self, tmp_path: Path, fraction: float) -> None:
        sides = []
        for number in range(20):
            documents = [[number + 1, word] for word in (5, 6, 7, 5)]
            train, held_out = held_out_split(write(tmp_path / str(number), documents), fraction)
            sides.append((all_ids(train), all_ids(held_out)))
            assert sorted(map(tuple, (*sides[-1][0], *sides[-1][1]))) == sorted(map(tuple, documents))
            assert not {tuple(ids) for ids in sides[-1][0]} & {tuple(ids) for ids in sides[-1][1]}
        assert all(train and held_out for train, held_out in sides)

    @pytest.mark.parametrize(
        ("documents", "said"), [([[5, 6]], "here is one"), ([[5, 6], [5, 6]], "here are 2, all the same")]
    )
    def test_an_empty_side_is_an_error(self, tmp_path: Path, documents: list[list[int]], said: str) -> None:
        for fraction in (1e-9, 0.5, 0.999999):
            with pytest.raises(ValueError, match=rf"some: data\.held_out_fraction needs two .*{said}"):
                held_out_split(write(tmp_path / str(fraction), documents), fraction)


class TestDigests:
    def test_of_a_small_file_every_byte_counts(self, tmp_path: Path) -> None:
        file = tmp_path / "a"
        file.write_bytes(b"abc" * 100)
        first = digests.sampled(file)
        for place in (0, 150, 299):
            changed = bytearray(b"abc" * 100)
            changed[place] ^= 1
            file.write_bytes(changed)
            assert digests.sampled(file) != first

    def test_of_a_large_file_size_and_blocks_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(digests, "_BLOCK", 4)
        monkeypatch.setattr(digests, "_BLOCKS", 3)
        content = bytes(range(100))

        def digest(data: bytes) -> str:
            (tmp_path / "a").write_bytes(data)
            return digests.sampled(tmp_path / "a")

        first = digest(content)
        assert digest(content + b"a") != first
        for place in (0, 3, 48, 51, 96, 99):  # first, middle and last block
            assert digest(content[:place] + b"\xff" + content[place + 1 :]) != first
        assert digest(content[:30] + b"\xff" + content[31:]) == first  # as the docstring says

    def test_a_large_file_is_hashed_again_only_if_it_was_touched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(digests, "_BLOCK", 4)
        monkeypatch.setattr(digests, "_BLOCKS", 3)
        file, read = tmp_path / "a", []
        whole = digests.whole
        monkeypatch.setattr(digests, "whole", lambda path: read.append(path) or whole(path))
        file.write_bytes(bytes(100))
        first = digests.FileHashes(tmp_path).sha256(file)
        assert digests.FileHashes(tmp_path).sha256(file) == first
        assert len(read) == 1
        file.write_bytes(bytes(30) + b"\xff" + bytes(69))  # where no block is, at the same size
        os.utime(file, ns=(5, 5))
        assert digests.FileHashes(tmp_path).sha256(file) != first
        assert len(read) == 2

    def test_a_damaged_memory_is_forgotten(self, tmp_path: Path) -> None:
        (tmp_path / "file-hashes.json").write_text("{", encoding="utf-8")
        (tmp_path / "a").write_bytes(b"abc")
        assert digests.FileHashes(tmp_path).sha256(tmp_path / "a").startswith("ba7816bf")  # FIPS 180-2, B.1


def test_meta_json_says_what_the_folder_is(tmp_path: Path) -> None:
    with TokenFolderWriter(tmp_path / "f", 320, with_bytes=False, with_targets=False) as writer:
        writer.append(np.array([5, 6, 7]), np.array([1, 2]))
        writer.finish(ABOUT, tokenizer())
    meta = json.loads((tmp_path / "f" / "meta.json").read_text(encoding="utf-8"))
    assert (meta["documents"], meta["tokens"], meta["bytes"], meta["targets"]) == (2, 3, None, None)
    assert sorted(meta["files"]) == ["ids.bin", "offsets.bin"]
    assert (tmp_path / "f" / "tokenizer" / "tokenizer.json").is_file()
