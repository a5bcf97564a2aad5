"""`zaya data build` and `zaya data show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zaya_cli
from chat_folders import chat_tokenizer
from token_folders import TEXTS, ids_of, tokenizer
from zaya_hf.training.data.token_files import open_token_folder, read_meta


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts and tokenizers, in which commands run."""
    monkeypatch.chdir(tmp_path)
    tokenizer().save_pretrained("tok")
    chat_tokenizer().save_pretrained("talker")
    records = [{"text": text, "body": text[:5]} for text in [*TEXTS, ""]]
    Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    Path("b.txt").write_text("last", encoding="utf-8")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good"}]
    Path("talks.jsonl").write_text(json.dumps({"messages": talk}), encoding="utf-8")
    return tmp_path


def zaya(*arguments: str) -> int:
    return zaya_cli.main(["data", *arguments])


def test_build_and_show(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = ("build", "a.jsonl", "b.txt", "--out", "new/out", "--tokenizer", "tok", "--processes", "1")
    assert zaya(*build) == 0
    said = capsys.readouterr().out.splitlines()
    tokens = sum(len(ids_of(text)) for text in [*TEXTS, "last"])
    size = sum(len(text.encode()) for text in [*TEXTS, "last"])
    assert said[0] == f"47 documents, {tokens:,} tokens, {size:,} bytes ({size / tokens:.2f} per token)"
    assert said[1] == "left out: 1 empty"
    assert said[2].endswith("tokens/s")
    assert said[3] == "new/out"
    assert open_token_folder(place / "new" / "out", "a").tokens(46).tolist() == ids_of("last")

    assert zaya(*build) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "new/out holds them already; nothing was done"

    assert zaya("show", "new/out") == 0
    shown = capsys.readouterr().out
    assert f"tokens      {tokens:,} as uint16, vocabulary of 320" in shown
    assert "made of     2 files: a.jsonl, b.txt" in shown
    assert f"document 0, {len(ids_of(TEXTS[0]))} tokens, 8 bytes\n{TEXTS[0] + '<eos>'!r}\n" in shown
    lengths = [len(ids_of(text)) for text in [*TEXTS, "last"]]
    histogram = [
        line.split() for line in shown.replace(",", "").split("tokens per document\n")[1].split("\n\n")[0].splitlines()
    ]
    for least, _, most, count, *_ in histogram:
        assert int(count) == sum(int(least) <= length <= int(most) for length in lengths)
    assert sum(int(line[3]) for line in histogram) == 47


def test_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert zaya("build", "a.jsonl", "--out", "o", "--tokenizer", "tok", "--field", "body", "--processes", "1") == 0
    assert open_token_folder(place / "o", "a").tokens(0).tolist() == ids_of(TEXTS[0][:5])
    talk = ("build", "talks.jsonl", "--out", "t", "--tokenizer", "talker", "--chat", "--train-on", "all")
    assert zaya(*talk, "--max-length", "99", "--no-trim-thinking", "--processes", "1") == 0
    chat = read_meta(place / "t")["chat"]
    assert (chat["train_on"], chat["trim_thinking"], chat["max_length"]) == ("all", False, 99)
    capsys.readouterr()
    assert zaya("show", "t") == 0
    assert "of the tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "none.txt", "--out", "o", "--tokenizer", "tok"), "no such file or folder: none.txt"),
        (("build", "b.txt", "--out", "o", "--tokenizer", "."), ". has no tokenizer (tokenizer.json) in it"),
        (("build", "b.txt", "--out", "tok", "--tokenizer", "tok"), "tok exists and holds something else"),
        (("build", "a.jsonl", "--out", "o", "--tokenizer", "tok", "--field", "x"), "a.jsonl, line 1: no field 'x'"),
        (("build", "b.txt", "--out", "o", "--tokenizer", "tok", "--chat"), "b.txt holds plain text"),
        (("show", "none"), "no such folder of tokens: none"),
        (("show", "tok"), "tok is no folder of tokens"),
    ],
)
def test_mistakes_are_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    extra = ("--processes", "1") if arguments[0] == "build" else ()
    assert zaya(*arguments, *extra) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (place / "o").exists()
