"""Files that stand whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zaya_hf.atomic import write_json, write_text


def test_text_is_written_in_the_place_of_older_text(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    for text in ("older and longer", "é\n"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_what_fails_leaves_the_older_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    file = tmp_path / "a.txt"
    file.write_text("older")
    text = "new"
    if fails == "write":
        text = "\ud800"  # cannot be UTF-8
    else:
        monkeypatch.setattr(*{"fsync": (os, "fsync", full), "replace": (Path, "replace", full)}[fails])
    with pytest.raises((OSError, UnicodeEncodeError)):
        write_text(file, text)
    assert file.read_text() == "older"
    assert list(tmp_path.iterdir()) == [file]


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": 1.5, "text": "é"})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "loss": 1.5,\n  "text": "é"\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"loss": float("nan")})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
