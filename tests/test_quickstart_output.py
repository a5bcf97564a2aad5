"""The quickstart's output folder: whose it is, one run at a time, results replaced whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from zaya_hf.quickstart import output


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with output.owned(out):
        assert out.is_dir()
    with output.owned(out):  # ours, though it holds no results yet
        pass


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    with output.owned(tmp_path):
        pass


@pytest.mark.parametrize("content", ["thesis.tex", "results.json"])
def test_a_foreign_folder_is_refused_and_not_touched(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text('{"made_by": "someone"}')
    said = "is not the output of an earlier quickstart: give another --out"
    with pytest.raises(ValueError, match=said), output.owned(tmp_path):
        pytest.fail("entered")
    assert [path.name for path in tmp_path.iterdir()] == [content]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("text")
    with pytest.raises(ValueError, match="is not the output"), output.owned(tmp_path / "out"):
        pytest.fail("entered")


def test_what_an_earlier_version_wrote_is_ours_and_goes(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"made_by": "zaya quickstart"}))
    (tmp_path / "model").mkdir()
    with output.owned(tmp_path):
        output.replace_hub(tmp_path)
    assert not (tmp_path / "model").exists()


@pytest.mark.skipif(os.name != "posix", reason="there is no such lock")
def test_two_quickstarts_do_not_write_to_one_folder(tmp_path: Path) -> None:
    # The lock belongs to an open file, so a second one in this process meets it as another process would.
    first, second = output.owned(tmp_path), output.owned(tmp_path)
    with first, pytest.raises(ValueError, match=f"another quickstart is writing to {tmp_path}"):
        second.__enter__()
    with output.owned(tmp_path):
        pass


@pytest.mark.skipif(os.name != "posix", reason="there is no such lock")
def test_a_file_system_without_locks_is_no_other_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with output.owned(tmp_path):
        pass


def test_what_is_in_preparation_goes_at_the_end_however_it_ends(tmp_path: Path) -> None:
    def interrupted() -> None:
        with output.owned(tmp_path):
            (tmp_path / output.PREPARED).mkdir()
            (tmp_path / output.NEW_HUB / "zaya").mkdir(parents=True)
            (tmp_path / output.HUB).mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path.name for path in tmp_path.iterdir()} == {output.HUB, output._MARK}


def test_the_hub_folder_is_replaced_whole(tmp_path: Path) -> None:
    for name, content in ((output.HUB, "old"), (output.NEW_HUB, "new")):
        (tmp_path / name / content).mkdir(parents=True)
    for name in ("results.json", "report.html"):  # of the old one: they must not stand beside the new one
        (tmp_path / name).touch()
    output.replace_hub(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [output.HUB]
    assert [path.name for path in (tmp_path / output.HUB).iterdir()] == ["new"]


def test_without_a_new_hub_folder_the_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / output.HUB / "zaya").mkdir(parents=True)
    (tmp_path / "results.json").touch()
    output.replace_hub(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [output.HUB]
    assert (tmp_path / output.HUB / "zaya").is_dir()
