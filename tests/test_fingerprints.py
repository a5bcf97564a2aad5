"""The hash of a model's files: what changes it, what does not, and the cache of hashes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from zaya_hf.evaluation import fingerprints
from zaya_hf.evaluation.fingerprints import fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hashes of this test are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zaya_hf" / "file_hashes.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    files = {
        "config.json": "{}",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "model-00001-of-00002.safetensors": "one",
        "model-00002-of-00002.safetensors": "two",
        "README.md": "a card",
        "training_args.bin": "no weights",
    }
    for name, text in files.items():
        (made / name).write_text(text)
        os.utime(made / name, (1e9, 1e9))  # long ago
    return made


def sha(path: Path) -> str:
    found: str = fingerprint(str(path))["sha256"]
    return found


class TestFolder:
    def test_it_names_every_file_that_moves_a_score(self, folder: Path) -> None:
        found = fingerprint(str(folder))
        assert found["kind"] == "folder"
        assert {file["name"] for file in found["files"]} == {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }
        first = next(file for file in found["files"] if file["name"] == "model-00001-of-00002.safetensors")
        assert first == {"name": first["name"], "size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
        json.dumps(found)

    def test_one_byte_of_equal_size_name_and_time_changes_it(self, folder: Path) -> None:
        """Also in place (the same inode), and with the time set back as copying programs do."""
        weights = folder / "model-00002-of-00002.safetensors"
        before, stat = sha(folder), weights.stat()
        with weights.open("r+b") as file:
            file.write(b"tvo")
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        assert sha(folder) != before

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
    def test_every_other_file_counts_too(self, folder: Path, name: str) -> None:
        before = sha(folder)
        (folder / name).write_text("other")
        assert sha(folder) != before

    def test_a_new_name_counts(self, folder: Path) -> None:
        before = sha(folder)
        (folder / "tokenizer.json").rename(folder / "vocab.json")
        assert sha(folder) != before

    def test_the_place_the_card_and_what_a_training_left_do_not_count(self, folder: Path) -> None:
        before = sha(folder)
        (folder / "README.md").write_text("another card")
        (folder / "training_args.bin").unlink()
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "state.safetensors").write_text("moments")
        assert sha(folder) == before
        assert sha(folder.rename(folder.with_name("elsewhere"))) == before

    def test_links_are_followed(self, folder: Path) -> None:
        """A snapshot in the Hub's cache is a folder of links."""
        snapshot = folder.with_name("snapshot")
        snapshot.mkdir()
        for file in folder.iterdir():
            (snapshot / file.name).symlink_to(file)
        assert sha(snapshot) == sha(folder)

    @pytest.mark.parametrize(
        ("left", "said"),
        [
            (["config.json"], "holds no saved model: no config.json or no weights"),
            (["model.Q4_1.gguf"], "holds GGUF files only"),
            ([], "is empty"),
        ],
    )
    def test_what_is_no_model_is_refused(self, tmp_path: Path, left: list[str], said: str) -> None:
        empty = tmp_path / "none"
        empty.mkdir()
        for name in left:
            (empty / name).write_text("{}")
        with pytest.raises(ValueError, match=said):
            fingerprint(str(empty))


class TestCache:
    def test_an_unchanged_file_is_not_read_again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = sha(folder)
        monkeypatch.setattr(fingerprints, "_sha256", lambda *_: pytest.fail("read again"))
        assert sha(folder) == before

    def test_a_file_that_is_young_is_read_again(
        self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second write within the clock tick of the file system would not show."""
        (folder / "model-00001-of-00002.safetensors").write_text("new")
        before = sha(folder)
        read: list[str] = []
        whole = fingerprints._sha256
        monkeypatch.setattr(fingerprints, "_sha256", lambda file, bar: read.append(file.name) or whole(file, bar))
        assert sha(folder) == before
        assert read == ["model-00001-of-00002.safetensors"]

    @pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}', "\x00\xff", "[" * 100_000])
    def test_a_broken_cache_counts_as_none(self, folder: Path, cache: Path, content: str) -> None:
        before = sha(folder)
        cache.write_text(content)
        assert sha(folder) == before
        assert len(json.loads(cache.read_text())) == 6

    def test_entries_of_a_wrong_kind_are_not_believed(self, folder: Path, cache: Path) -> None:
        before = sha(folder)
        known = json.loads(cache.read_text())
        cache.write_text(json.dumps(dict.fromkeys(known, "not a hash") | {"else": None}))
        assert sha(folder) == before

    def test_without_a_place_for_the_cache_it_works(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file is in the way")
        assert sha(folder) == sha(folder)

    def test_processes_that_write_at_once_leave_it_whole(self, folder: Path, cache: Path, tmp_path: Path) -> None:
        copies = [tmp_path / f"copy{number}" for number in range(3)]
        for copy in copies:
            shutil.copytree(folder, copy)
            (copy / "model-00001-of-00002.safetensors").write_text(copy.name)
            for file in copy.iterdir():
                os.utime(file, (1e9, 1e9))
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=fingerprint, args=(str(copy),)) for copy in copies]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        assert all(isinstance(value, str) for value in json.loads(cache.read_text()).values())
        assert {path.name for path in cache.parent.iterdir()} == {cache.name}
        assert len({sha(copy) for copy in copies}) == 3


class TestHub:
    def test_the_commit_comes_from_the_local_cache_without_a_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = tmp_path / "hub"
        repository = hub / "models--org--name"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        for branch in ("main", "step1000"):
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / branch).write_text(COMMIT)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
        found = fingerprint("org/name")
        assert (found["kind"], found["id"], found["commit"]) == ("hub", "org/name", COMMIT)
        assert fingerprint("org/name", "step1000") == found == fingerprint("org/name", COMMIT)
        said = r"^org/name at step2000 is no folder and not in the local cache, .*`hf download .* --revision step2000`$"
        with pytest.raises(ValueError, match=said):
            fingerprint("org/name", "step2000")

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            (
                GatedRepoError,
                "^org/name is gated: accept its terms at https://huggingface.co/org/name, then set HF_TOKEN",
            ),
            (RepositoryNotFoundError, "^there is no folder org/name, and the Hub has no such repository"),
            (RevisionNotFoundError, "^org/name has no revision abc: see "),
        ],
    )
    def test_what_the_hub_refuses_is_one_line_with_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, said: str
    ) -> None:
        def refused(*_: Any, **__: Any) -> None:
            error = kind.__new__(kind)  # without the response, of which nothing is used
            error.args = ("403\n\nlong",)
            raise error

        monkeypatch.setattr(fingerprints, "hf_hub_download", refused)
        with pytest.raises(ValueError, match=said) as error:
            fingerprint("org/name", "abc")
        assert "\n" not in str(error.value)

    def test_what_can_be_no_hub_id_is_a_missing_folder(self) -> None:
        with pytest.raises(ValueError, match=r"^there is no folder runs/a/b, and a Hub id has the form org/name$"):
            fingerprint("runs/a/b")
