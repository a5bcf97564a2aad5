"""Texts out of files of every format: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from token_folders import TEXTS, source, write_megatron
from zaya_hf.training.data.source_files import locate, source_name
from zaya_hf.training.data.text_sources import TextSource

LINES = "".join(json.dumps({"id": n, "text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(TEXTS))


def texts(path: Path | str, **fields: Any) -> list[str | None]:
    return [record.text for record in TextSource(source(path, **fields)).records()]


def write_all_formats(folder: Path) -> dict[str, Path]:
    """`TEXTS` in every format, by kind."""
    column = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    paths = {
        name: folder / name
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.feather", "a.arrow", "saved", "files")
    }
    data = LINES.encode()
    paths["a.jsonl"].write_bytes(data)
    half = data.index(b"\n", len(data) // 2) - 7  # members and frames may end within a line
    paths["a.jsonl.gz"].write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))
    packer = zstandard.ZstdCompressor()
    paths["a.jsonl.zst"].write_bytes(packer.compress(data[:half]) + packer.compress(data[half:]))
    pq.write_table(column, paths["a.parquet"], row_group_size=7)
    pyarrow.feather.write_feather(column, paths["a.feather"], chunksize=5)
    with pa.ipc.new_stream(paths["a.arrow"], column.schema) as stream:
        stream.write_table(column, max_chunksize=9)
    datasets.Dataset(column).save_to_disk(paths["saved"], num_shards=3)
    paths["files"].mkdir()
    for number, text in enumerate(TEXTS):
        (paths["files"] / f"{number:03}.txt").write_bytes(text.encode())
    return paths


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all_formats(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.feather", "a.arrow", "saved", "files"]
)
def test_every_format_gives_the_same_documents(formats: dict[str, Path], name: str) -> None:
    found = TextSource(source(formats[name]))
    records = list(found.records())
    assert [record.text for record in records] == TEXTS
    assert [record.size for record in records] == [len(text.encode()) for text in TEXTS]
    assert not found.dropped


class TestText:
    def test_a_folder_is_read_by_name_without_what_is_hidden(self, tmp_path: Path) -> None:
        for name in ("b/z.md", "b/a.py", "a.txt", ".git/c.txt", "b/__pycache__/d.txt", "b/picture.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text(name, encoding="utf-8")
        assert texts(tmp_path) == ["a.txt", "b/a.py", "b/z.md"]
        assert texts(f"{tmp_path}/**/*.*y") == ["b/a.py"]
        assert texts(f"{tmp_path}/b/picture.*", kind="text") == ["b/picture.png"]

    def test_line_ends_stay_and_a_byte_order_mark_goes(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\n")
        assert texts(tmp_path / "a.txt") == ["one\r\ntwo\rthree\n\n"]

    def test_empty_files_and_others_than_utf8_are_counted(self, tmp_path: Path) -> None:
        for name, data in {"a.txt": b"", "b.txt": b"\xff", "c.txt": b"c", "d.txt": b"\xef\xbb\xbf"}.items():
            (tmp_path / name).write_bytes(data)
        found = TextSource(source(tmp_path))
        assert [record.text for record in found.records()] == ["c"]
        assert found.dropped == {"empty": 2, "not UTF-8": 1}

    def test_packed_files_are_unpacked(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
        (tmp_path / "b.md.zst").write_bytes(zstandard.ZstdCompressor().compress(b"two"))
        assert texts(tmp_path) == ["one", "two"]

    def test_the_standard_library_comes_without_its_tests(self) -> None:
        found = TextSource(source("{stdlib}"))
        names = [name for name, _ in found.files]
        assert {"argparse.py", "json/decoder.py"} <= set(names)
        assert names == sorted(names)
        assert not {part for name in names for part in name.split("/")} & {"test", "site-packages", "__pycache__"}
        assert found.name == "stdlib"
        assert TextSource(source("{stdlib}/json")).files[0][0] == "__init__.py"


class TestJsonLines:
    @given(some=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
    def test_any_text_comes_back(self, tmp_path_factory: pytest.TempPathFactory, some: list[str]) -> None:
        file = tmp_path_factory.mktemp("t") / "a.jsonl"
        file.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in some), "utf-8", None, "\n")
        assert texts(file) == some

    def test_blank_lines_and_a_byte_order_mark_are_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": ""}\n{"text": "b"}')
        found = TextSource(source(tmp_path / "a.json"))
        assert [(r.text, r.origin.split(", ")[-1]) for r in found.records()] == [("a", "line 1"), ("b", "line 5")]
        assert found.dropped == {"empty": 1}

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"text": "b"', r"line 2: not JSON: .*\(column 13\); the file is to have one object on each line"),
            (b"nothing", r"line 2: not JSON: Expecting value \(column 1\)$"),
            (b'["a"]', "line 2: expected one JSON object, found list"),
            (b'{"body": "a", "id": 1}', "line 2: no field 'text'; there is body, id"),
            (b'{"text": 3}', "line 2: the field 'text' is no text but int"),
            (b'{"text": null}', "line 2: the field 'text' is no text but null"),
            (b'{"text": "\xff"}', r"line 2: not UTF-8 \(byte 10\)"),
            (rb'{"text": "ab\ud800"}', "line 2: character 2 of the text is half of a surrogate pair"),
            (b'{"text": "a", "id": ' + b"1" * 5000 + b"}", "line 2: a number with thousands of digits"),
            (b"[" * 100_000, "line 2: JSON that is nested too deep|line 2: not JSON"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, line: bytes, message: str) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
        with pytest.raises(ValueError, match=r"a\.jsonl, " + message):
            texts(tmp_path / "a.jsonl")

    @pytest.mark.parametrize("keep", [0.5, 0.99])
    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
    def test_a_packed_file_that_ends_early_is_refused(
        self, formats: dict[str, Path], tmp_path: Path, name: str, keep: float
    ) -> None:
        data = formats[name].read_bytes()
        (tmp_path / name).write_bytes(data[: int(keep * len(data))])
        with pytest.raises(ValueError, match=rf"{name} cannot be unpacked"):
            texts(tmp_path / name)

    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
    def test_a_file_that_is_not_packed_as_its_name_says_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text(LINES, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{name} cannot be unpacked"):
            texts(tmp_path / name)


class TestColumns:
    @pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
    def test_what_is_wrong_is_named(self, formats: dict[str, Path], tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name}: no column 'body'; there is id, text"):
            texts(formats[name], field="body")
        with pytest.raises(ValueError, match=rf"{name}, row 1: the field 'id' is no text but int"):
            texts(formats[name], field="id")
        data = formats[name].read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=rf"{name} is no whole (Parquet|Arrow) file"):
            texts(tmp_path / name)

    @pytest.mark.parametrize("legacy", [False, True])
    def test_a_stream_that_ends_between_two_batches_is_refused(self, tmp_path: Path, legacy: bool) -> None:
        file, column = tmp_path / "a.arrow", pa.table({"text": TEXTS})
        options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy)
        with pa.ipc.new_stream(file, column.schema, options=options) as stream:
            stream.write_table(column, max_chunksize=9)
        assert texts(file) == TEXTS
        file.write_bytes(file.read_bytes()[: -4 if legacy else -8])
        with pytest.raises(ValueError, match=r"a\.arrow is no whole Arrow file: it ends between two batches"):
            texts(file)

    @pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
    def test_a_text_that_is_not_utf8_is_named_by_row(self, tmp_path: Path, name: str) -> None:
        bad = pa.array([b"a"] * 300 + [b"ab\xff"]).cast(pa.binary()).view(pa.string())
        write = pq.write_table if name == "a.parquet" else pyarrow.feather.write_feather
        write(pa.table({"text": bad}), tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}, row 301: not UTF-8 \(byte 2\)"):
            texts(tmp_path / name)

    @pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
    def test_a_column_that_is_there_twice_is_refused(self, tmp_path: Path, name: str) -> None:
        table = pa.table([["a"], ["b"]], names=["text", "text"])
        if name == "a.parquet":
            pq.write_table(table, tmp_path / name)
        else:
            with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
                stream.write_table(table)
        with pytest.raises(ValueError, match=rf"{name}: the column 'text' is there 2 times"):
            texts(tmp_path / name)

    @pytest.mark.parametrize(
        ("content", "said"),
        [("{", "it is not JSON"), ("[]", "no list '_data_files'"), ('{"_data_files": [{"a": 1}]}', "without names")],
    )
    def test_a_damaged_description_of_a_saved_dataset_is_named(self, tmp_path: Path, content: str, said: str) -> None:
        datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "d")
        (tmp_path / "d" / "state.json").write_text(content)
        with pytest.raises(ValueError, match=rf"state\.json is damaged: .*{said}"):
            texts(tmp_path / "d")

    def test_a_null_is_named_by_row(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": ["a"] * 300 + [None]}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a\.parquet, row 301: the field 'text' is no text but null"):
            texts(tmp_path / "a.parquet")

    def test_a_split_of_a_saved_dataset(self, tmp_path: Path) -> None:
        part = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
        datasets.DatasetDict({"train": part, "test": part.select([2, 0])}).save_to_disk(tmp_path / "d")
        assert texts(tmp_path / "d") == ["a", "b", "c"]
        assert texts(tmp_path / "d", split="test") == ["c", "a"]
        with pytest.raises(ValueError, match="no split 'dev'; there is train, test"):
            texts(tmp_path / "d", split="dev")
        (tmp_path / "d" / "train" / "data-00000-of-00001.arrow").unlink()
        with pytest.raises(ValueError, match=r"damaged: data-00000-of-00001\.arrow is missing"):
            texts(tmp_path / "d")


class TestConversations:
    TALK = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})

    def test_messages_come_as_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": self.TALK}) + '\n{"messages": []}\n')
        columns = [[*self.TALK, {"role": "assistant", "content": "c", "thinking": "d"}]]  # others have null in thinking
        pq.write_table(pa.table({"messages": columns}), tmp_path / "a.parquet")
        found = TextSource(source(tmp_path / "a.jsonl", field="messages"), chat=True)
        assert [record.messages for record in found.records()] == [list(self.TALK)]
        assert found.dropped == {"empty": 1}
        found = TextSource(source(tmp_path / "a.parquet", field="messages"), chat=True)
        assert [record.messages for record in found.records()] == columns

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("hello", "line 1, messages: expected a list of messages, found str"),
            ([3], "line 1, messages: message 1 is not an object"),
            ([TALK[0], {"content": "a"}], 'line 1, messages: message 2 has no text "role"'),
            ([TALK[0], {**TALK[1], "x": ["\udc00"]}], "line 1, messages: message 2 has half of a surrogate pair"),
            ([{"role": "user", "content": 3}], 'message 1 has no text "role", or a "content" that is no text'),
        ],
    )
    def test_what_is_no_conversation_is_named(self, tmp_path: Path, value: Any, message: str) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": value}))
        with pytest.raises(ValueError, match=message):
            list(TextSource(source(tmp_path / "a.jsonl", field="messages"), chat=True).records())

    def test_plain_text_has_none(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(ValueError, match="holds plain text; conversations need"):
            TextSource(source(tmp_path / "a.txt"), chat=True)


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("a.txt", "text"),
            ("a.PY", "text"),
            ("a.jsonl", "jsonl"),
            ("a.json.gz", "jsonl"),
            ("a.ndjson.zst", "jsonl"),
            ("a.parquet", "parquet"),
            ("a.feather", "arrow"),
            ("a.npy", "flat"),
            ("a.bin", "flat"),
        ],
    )
    def test_by_name(self, tmp_path: Path, name: str, kind: str) -> None:
        (tmp_path / name).write_text("a")
        assert locate(source(tmp_path / name)).kind == kind
        assert locate(source(f"{tmp_path}/a.*")).kind == kind

    def test_megatron_by_either_file_by_prefix_and_by_folder(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [[5]])
        for path in (tmp_path / "a.bin", tmp_path / "a.idx", tmp_path, f"{tmp_path}/a.*"):
            assert locate(source(path)).kind == "megatron"
            assert locate(source(path)).files == (("a.bin", tmp_path / "a.bin"),)
        assert locate(source(tmp_path / "a", kind="megatron")).files == (("a.bin", tmp_path / "a.bin"),)
        (tmp_path / "a.bin").unlink()
        with pytest.raises(ValueError, match=r"a\.bin is missing beside a\.idx"):
            locate(source(tmp_path / "a.idx"))

    def test_a_hub_id_is_what_cannot_be_a_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert locate(source("org/name")).hub_id == "org/name"
        (tmp_path / "org").mkdir()
        with pytest.raises(ValueError, match="no such file or folder: org/name"):
            locate(source("org/name"))
        assert locate(source("org/name", kind="hub")).hub_id == "org/name"

    @pytest.mark.parametrize(
        ("files", "path", "fields", "message"),
        [
            ([], "missing.txt", {}, "no such file or folder: .*missing.txt"),
            ([], "*.txt", {}, r"no file fits the pattern .*\*\.txt"),
            (["a.xyz"], "a.xyz", {}, r"the kind of .*a\.xyz cannot be told by its name: give kind"),
            (["a.xyz"], "", {}, "cannot be told by its name"),
            (["a.txt", "b.xyz"], "*", {}, r"cannot be told by its name \(b\.xyz\)"),
            (
                ["a.txt", "b.md", "c.parquet"],
                "",
                {},
                r"of several kinds \(1 of parquet, 2 of text\): say which by kind",
            ),
            (["a.txt"], "", {"kind": "parquet"}, "has no file of kind parquet in it"),
            (["a.txt"], "", {"kind": "tokens"}, "no folder that `zaya data build` wrote"),
            (["a.txt"], "a.txt", {"kind": "megatron"}, r"a\.txt is neither \.bin nor \.idx"),
            (["a.npy"], "a.npy", {}, "holds token ids"),
        ],
    )
    def test_refused(self, tmp_path: Path, files: list[str], path: str, fields: Any, message: str) -> None:
        for name in files:
            (tmp_path / name).write_text("a")
        with pytest.raises(ValueError, match=message):
            TextSource(source(f"{tmp_path}/{path}", **fields))

    def test_a_home_folder_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match="~nosuchuser/x: the home folder of ~nosuchuser is not known"):
            locate(source("~nosuchuser/x"))

    @pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python takes the pattern")
    def test_a_pattern_that_python_does_not_take(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a\*\*b is no pattern that can be looked for"):
            locate(source(f"{tmp_path}/a**b"))

    def test_a_folder_that_cannot_be_listed_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "a.txt").write_text("a")
        scan = os.scandir

        def refused(path: Any) -> Any:
            if str(path).endswith("/in"):
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refused)
        with pytest.raises(ValueError, match="/in: Permission denied"):
            locate(source(tmp_path))

    def test_some_of_a_mixed_folder(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("read me")
        (tmp_path / "a.jsonl").write_text('{"text": "a"}')
        assert texts(tmp_path, kind="jsonl") == ["a"]

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("data/a.jsonl", "a.jsonl"),
            ("{stdlib}/", "stdlib"),
            ("org/name", "name"),
            ("a/*", "source"),
            ("x/" + "a" * 200, "a" * 100),
        ],
    )
    def test_names(self, path: str, name: str) -> None:
        assert source_name(source(path)) == name
        assert source_name(source(path, name="mine")) == "mine"

    def test_a_hub_dataset_that_is_not_here_is_one_line(self) -> None:
        with pytest.raises(ValueError, match=r"^org/name cannot be loaded from the hub: [^\n]+$"):
            TextSource(source("org/name"))

    def test_a_hub_dataset(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What `load_dataset` of a hub id returns has the files of its cache behind it."""
        datasets.Dataset.from_dict({"text": ["a", "", "b"]}).save_to_disk(tmp_path / "d")
        asked = []

        def load(path: str, name: str | None, **options: Any) -> datasets.Dataset:
            asked.append((path, name, options))
            return datasets.load_from_disk(tmp_path / "d")

        monkeypatch.setattr(datasets, "load_dataset", load)
        found = TextSource(source("org/name", subset="en", split="train", revision="v1"))
        assert [record.text for record in found.records()] == ["a", "b"]
        assert asked == [("org/name", "en", {"split": "train", "revision": "v1"})]
        assert [name for name, _ in found.files] == ["org/name/data-00000-of-00001.arrow"]
        with pytest.raises(ValueError, match="org/name: no column 'body'; there is text"):
            list(TextSource(source("org/name", field="body")).records())
