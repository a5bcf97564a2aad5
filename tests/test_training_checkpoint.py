"""Checkpoints: whole or not at all, whenever the process dies and whatever happens to the files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed.checkpoint import CheckpointException

from zaya_hf.training import checkpoint
from zaya_hf.training.checkpoint import Checkpoint, CheckpointStore, newest_model, stand_whole

FILES = {"model/config.json": b"{}", "model/model.safetensors": bytes(range(256)) * 8, "rng-0.pt": b"abc"}


def fill(step: int) -> Callable[[Path], None]:
    """A `write` whose files tell the step."""

    def write(folder: Path) -> None:
        for name, content in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content + str(step).encode())

    return write


def content_of(found: Checkpoint | None) -> int:
    """The step that every file of a checkpoint is of."""
    assert found is not None
    steps = {int((found.path / name).read_bytes().removeprefix(content)) for name, content in FILES.items()}
    assert steps == {found.description["told"]}
    return steps.pop()


def save(store: CheckpointStore, step: int, told: int | None = None) -> None:
    told = step if told is None else told
    store.save(step, fill(told), {"told": told})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """The process has died: no `except` of the package catches it."""


# ------------------------------------------------------------------------------------------------------ saving, finding
def test_what_is_saved_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.newest() is None
    for step in (5, 10, 15):
        save(store, step)
    found = store.newest()
    assert found is not None
    assert (found.path, found.step, content_of(found)) == (tmp_path / "c" / "step-15", 15, 15)
    assert found.model == found.path / "model"
    assert names(tmp_path / "c") == ["step-10", "step-15"]
    manifest = json.loads((found.path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["files"].keys() == {*FILES, "trainer.json"}
    assert manifest["step"] == 15


def test_a_number_is_newer_than_a_shorter_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (9, 10, 100):
        save(store, step)
    assert content_of(store.newest()) == 100
    assert content_of(store.newest(at_most=99)) == 10


def test_those_that_are_not_accepted_do_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    assert content_of(store.newest(accepts=lambda description: description["told"] == 1)) == 1
    assert store.newest(accepts=lambda description: False) is None


def test_other_things_in_the_folder_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in ("step-x", "step-07", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-3.tmp").mkdir()
    save(store, 1)
    assert names(tmp_path) == ["notes", "step-07", "step-1", "step-x"]
    store.remove()
    assert names(tmp_path) == ["notes", "step-07", "step-x"]


def test_all_can_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    save(store, 1)
    store.remove()
    assert not (tmp_path / "c").exists()
    store.remove()


class TestGoingBack:
    def test_a_step_is_saved_again(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path)
        save(store, 4, told=1)
        save(store, 4, told=2)
        assert content_of(store.newest()) == 2
        assert names(tmp_path) == ["step-4"]

    def test_later_ones_go_with_the_next_save(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        for step in (4, 6, 3):
            save(store, step)
        assert names(tmp_path) == ["step-3"]

    def test_later_ones_are_forgotten(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=3)
        for step in (2, 4, 6):
            save(store, step)
        store.forget_after(4)
        assert names(tmp_path) == ["step-2", "step-4"]

    def test_damaged_ones_make_room_for_good_ones(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path, keep=2)
        for step in (2, 4):
            save(store, step)
        (tmp_path / "step-4" / "rng-0.pt").unlink()
        assert content_of(store.newest()) == 2
        save(store, 6)
        assert names(tmp_path) == ["step-2", "step-6"]


# --------------------------------------------------------------------------------------------------------------- damage
def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGES = {"flip": flip, "cut": cut, "missing": Path.unlink, "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*FILES, "trainer.json", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(damage: str, name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    DAMAGES[damage](tmp_path / "step-2" / name)
    said: list[str] = []
    assert content_of(CheckpointStore(tmp_path).newest(said.append)) == 1
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {tmp_path / 'step-2'} is passed over: ")
    assert "\n" not in said[0]
    if name != "manifest.json":  # what is wrong with a manifest may look like anything
        what = {"flip": "SHA-256", "cut": "bytes", "missing": "is missing", "empty": "has 0 bytes"}[damage]
        assert name in said[0]
        assert what in said[0]


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    """Changed anywhere, it is found out or says the same as before."""
    store = CheckpointStore(tmp_path)
    save(store, 2)
    path = tmp_path / "step-2" / "manifest.json"
    whole = path.read_bytes()
    silent = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if store.newest() is not None:
            silent.append(place)
    assert {whole[place : place + 1] for place in silent} <= {b" ", b"\n"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "step": 2, "files": []}', '{"format": 0}', "{" * 5000])
def test_what_is_no_manifest(text: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    (tmp_path / "step-2" / "manifest.json").write_text(text, encoding="utf-8")
    said: list[str] = []
    assert store.newest(said.append) is None
    assert "manifest" in said[0] or "format" in said[0]


def test_a_manifest_of_another_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    (tmp_path / "step-2").rename(tmp_path / "step-3")
    said: list[str] = []
    assert store.newest(said.append) is None
    assert "manifest.json is of step 2" in said[0]


# --------------------------------------------------------------------------------------------------------- being killed
OPERATIONS = ("replace", "fsync", "unlink", "rmdir", "mkdir", "open")


class Counted:
    """Operations on files, of which the n-th and all later ones kill the process: before or after they are done."""

    def __init__(self, patch: pytest.MonkeyPatch, die_at: int | None, after: bool = False):
        self.count = 0
        for name in OPERATIONS:
            patch.setattr(os, name, self._wrap(getattr(os, name), die_at, after))

    def _wrap(self, real: Callable[..., Any], die_at: int | None, after: bool) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            dies = die_at is not None and self.count >= die_at
            if dies and (not after or self.count > die_at):
                raise Killed
            result = real(*args, **kwargs)
            if dies:
                raise Killed
            return result

        return operation


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [4, 6], ids=["same step", "next step"])
@pytest.mark.parametrize("keep", [1, 2])
def test_killed_at_any_operation_there_is_a_good_one(keep: int, step: int, after: bool, tmp_path: Path) -> None:
    def prepared(folder: Path) -> CheckpointStore:
        store = CheckpointStore(folder, keep=keep)
        save(store, 2)
        save(store, 4)
        return store

    store = prepared(tmp_path / "counted")
    with pytest.MonkeyPatch.context() as patch:
        operations = Counted(patch, None)
        save(store, step, told=99)
    assert operations.count > 20
    seen = set()
    for number in range(1, operations.count + 1):
        folder = tmp_path / str(number)
        store = prepared(folder)
        with pytest.MonkeyPatch.context() as patch:
            Counted(patch, number, after)
            with pytest.raises(Killed):
                save(store, step, told=99)
        resumed, said = CheckpointStore(folder, keep=keep), []
        told = content_of(resumed.newest(said.append))
        assert told in (4, 99), number
        assert said == [], number
        seen.add(told)
        save(resumed, step, told=100)  # and the run goes on from there
        assert content_of(CheckpointStore(folder).newest()) == 100
        assert len(names(folder)) <= keep
        assert not any(".tmp" in name or "replaced" in name for name in names(folder))
    assert seen == {4, 99}


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_a_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    synced: set[int] = set()
    events: list[str] = []
    real_sync, real_replace, real_unlink = os.fsync, os.replace, os.unlink

    def fsync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        if os.fstat(handle).st_ino == tmp_path.stat().st_ino:
            events.append("parent synced")
        real_sync(handle)

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == "step-2":
            paths = [Path(source), *Path(source).rglob("*")]
            assert len(paths) == 1 + 1 + len(FILES) + 2
            assert [path for path in paths if path.stat().st_ino not in synced] == []
            events.append("renamed")
        real_replace(source, target)

    def unlink(path: Any, **options: Any) -> None:
        events.append("removed")
        real_unlink(path, **options)

    for name, function in (("fsync", fsync), ("replace", replace), ("unlink", unlink)):
        monkeypatch.setattr(os, name, function)
    save(store, 2)
    first = events.index("renamed")
    later = events[first:]
    assert later[1] == "parent synced"
    assert "removed" in later
    assert names(tmp_path) == ["step-2"]


# ----------------------------------------------------------------------------------------------- what cannot be written
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed\nmore")]
)
def test_a_full_disk_leaves_the_one_before(error: Exception, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def write(folder: Path) -> None:
        fill(2)(folder)
        raise error

    with pytest.raises(OSError, match="step-2 could not be written") as caught:
        store.save(2, write, {})
    text = str(caught.value)
    assert "\n" not in text
    assert str(error).splitlines()[0] in text
    assert "step-1 stays as it is" in text
    assert names(tmp_path) == ["step-1"]
    assert content_of(store.newest()) == 1


def test_a_full_disk_at_the_first_save(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="there is no earlier one"):
        CheckpointStore(tmp_path).save(2, write, {})


def test_mistakes_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        CheckpointStore(tmp_path).save(2, lambda folder: print(1 // 0), {})


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        CheckpointStore(tmp_path / "file" / "c")


def test_none_to_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


# ------------------------------------------------------------------------------------------------ a model to start from
class TestNewestModel:
    def test_of_a_finished_run(self, tmp_path: Path) -> None:
        save(CheckpointStore(tmp_path / "checkpoints"), 2)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").touch()
        assert newest_model(tmp_path) == tmp_path / "model"

    def test_of_a_run_that_goes_on(self, tmp_path: Path) -> None:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        save(store, 2)
        save(store, 4)
        cut(tmp_path / "checkpoints" / "step-4" / "model" / "config.json")
        said: list[str] = []
        assert newest_model(tmp_path, said.append) == tmp_path / "checkpoints" / "step-2" / "model"
        assert "step-4 is passed over: model/config.json" in said[0]

    def test_of_a_checkpoint(self, tmp_path: Path) -> None:
        save(CheckpointStore(tmp_path), 2)
        assert newest_model(tmp_path / "step-2") == tmp_path / "step-2" / "model"
        cut(tmp_path / "step-2" / "rng-0.pt")
        with pytest.raises(ValueError, match=r"step-2 is damaged: rng-0\.pt has"):
            newest_model(tmp_path / "step-2")

    def test_of_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="has no model to start from"):
            newest_model(tmp_path)
        assert names(tmp_path) == []


# ----------------------------------------------------------------------------------------------------- a folder for use
def test_a_folder_stands_whole(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "model"
    for number in (1, 2):
        stand_whole(folder, fill(number))
        assert (folder / "rng-0.pt").read_bytes() == b"abc" + str(number).encode()
        assert names(tmp_path / "a") == ["model"]

    def full(aside: Path) -> None:
        fill(3)(aside)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"model could not be written \(\[Errno 28\] No space left on device\)"):
        stand_whole(folder, full)
    assert (folder / "rng-0.pt").read_bytes() == b"abc2"
    assert names(tmp_path / "a") == ["model"]


def denied(path: Any) -> NoReturn:
    raise PermissionError(13, "Permission denied", str(path))


def test_one_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk that is away for a moment would start the run anew, and have its checkpoints removed."""
    store = CheckpointStore(tmp_path)
    save(store, 2)

    monkeypatch.setattr(checkpoint, "_sha256", denied)
    with pytest.raises(OSError, match=r"step-2 cannot be read .*Permission denied"):
        store.newest()
    monkeypatch.undo()
    assert store.newest() is not None


def test_one_of_a_later_version_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    """Else the run would go on from an older one, and the next save remove it."""
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    save(store, 2)
    (tmp_path / "step-2" / "manifest.json").write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"step-2 has format 2, this version reads 1: go on with the version"):
        store.newest()
    with pytest.raises(ValueError, match="step-2 has format 2"):
        newest_model(tmp_path / "step-2")


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(OSError, match="Permission denied"):
        store.newest()
    with pytest.raises(OSError, match="Permission denied"):
        save(store, 3)


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    real = Path.stat

    def away(path: Path, **options: Any) -> Any:
        if path.name == "rng-0.pt":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", away)
    with pytest.raises(OSError, match=r"step-2 cannot be read .*Stale file handle"):
        store.newest()


def test_the_way_back_is_spared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 4)
    save(store, 8)
    store.save(10, fill(0), {}, spare=9)
    assert store.names() == ["step-10", "step-8"]
    store.save(11, fill(0), {}, spare=9)
    assert store.names() == ["step-11", "step-8"]
    save(store, 12)
    assert store.names() == ["step-12"]


def test_what_torch_could_not_write_is_told() -> None:
    failure = CheckpointException("save", {0: (OSError(28, "No space left on device"), None)})
    assert checkpoint.one_line(failure) == "[Errno 28] No space left on device"
