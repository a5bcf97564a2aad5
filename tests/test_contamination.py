"""Planted copies in a corpus, and near misses; files of all kinds; what overlap means for scores."""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import evaluation_folders
from zaya_hf.evaluation import contamination, corpus_texts, suites
from zaya_hf.evaluation.contamination import Item, Size, overlap, probe, run, task_items, words
from zaya_hf.evaluation.contamination_report import markdown, split_scores
from zaya_hf.evaluation.suites import LoadedTask, load_suite, load_tasks
from zaya_hf.resources import resource


def sentence(start: int, count: int = 20) -> str:
    """`count` words that no sentence with another start shares in order."""
    return " ".join(f"w{start}x{number}" for number in range(count))


ITEMS = [Item("task", number, sentence(number), f"hash{number}") for number in range(4)]


def found(tmp_path: Path, text: str, items: list[Item] = ITEMS, size: Size | None = None) -> dict[str, Any]:
    file = tmp_path / "corpus.txt"
    file.write_text(text, encoding="utf-8")
    return overlap([file], items, size=size)["tasks"][0]


def test_planted_passage(tmp_path: Path) -> None:
    passage = " ".join(sentence(2).split()[3:17])  # 14 words: two n-grams
    task = found(tmp_path, f"before {passage} after\n{sentence(9)}")
    assert (task["items"], task["tested"], task["overlapping"], task["share"]) == (4, 4, 1, 0.25)
    assert task["overlaps"] == {"0": 0.0, "1": 0.0, "2": 0.7, "3": 0.0}
    assert task["mean_overlap"] == pytest.approx(0.175)
    assert task["mean_found"] == pytest.approx(2 / 8 / 4)  # 20 words are 8 n-grams
    assert task["interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    assert task["worst"] == [
        {
            "doc_id": 2,
            "overlap": 0.7,
            "passage": passage,
            "length": 14,
            "file": str(tmp_path / "corpus.txt"),
            "document": 1,
        }
    ]


def test_twelve_words_are_no_match_and_thirteen_are(tmp_path: Path) -> None:
    some = sentence(1).split()
    assert found(tmp_path, " ".join([*some[:12], "x", *some[12:]]))["overlapping"] == 0
    assert found(tmp_path, " ".join(some[:13]))["overlaps"]["1"] == pytest.approx(13 / 20)
    assert found(tmp_path, " ".join(reversed(some)))["overlapping"] == 0
    assert found(tmp_path, " ".join(some[:8]), size=Size(8))["overlapping"] == 1


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("The CAFÉ, in “Straße” no. 5: isn't it open?", "the café in strasse no 5 isn t it open"),
        (
            "the café in strasse no 5 isn't it open",
            "The cafe\u0301\u200b -- IN STRASSE;\n\n(no_5) ISN'T\tit \u00ad open!",
        ),
        ("\uff26\uff55\uff4c\uff4c \uff57\uff49\uff44\uff54\uff48 and ﬁne ligatures", "full width and fine ligatures"),
        ("soft hyphens and joiners", "so\u00adft hy\u200bphens a\u2060nd join\ufeffers"),
        ("Ὀδυσσεύς εἶπε ΤΟΙΣ", "ὀδυσσεύσ ΕἾΠΕ τοις"),
    ],
)
def test_case_punctuation_and_spelling_of_unicode(tmp_path: Path, item: str, text: str) -> None:
    task = found(tmp_path, f"x {text} y", [Item("task", 0, item)], Size(len(words(item))))
    assert task["overlaps"] == {"0": 1.0}


def test_short_items_are_looked_for_whole(tmp_path: Path) -> None:
    short, shorter, full = sentence(0, 12), "Four words, not more", sentence(1, 13)
    items = [Item("task", 7, short), Item("task", 8, " ... "), Item("task", 9, full), Item("task", 10, shorter)]
    task = found(tmp_path, f"x {short}\nfour words not; more! {full}", items)
    assert (task["items"], task["untested"], task["tested"]) == (4, [8], 3)
    assert (task["short"], task["short_overlapping"], task["overlapping"]) == ([7, 10], 2, 3)
    assert task["overlaps"] == {"7": 1.0, "9": 1.0, "10": 1.0}
    assert task["interval"] == pytest.approx([0.4385, 1.0], abs=1e-4)
    lengths = {worst["doc_id"]: (worst["passage"], worst["length"]) for worst in task["worst"]}
    assert lengths == {7: (short, 12), 9: (full, 13), 10: ("four words not more", 4)}
    some = short.split()
    task = found(tmp_path, f"{' '.join(some[:11])} {some[0]} four words not", items)  # a word is missing
    assert (task["overlapping"], task["share"], task["short_overlapping"]) == (0, 0.0, 0)
    none = found(tmp_path, "x", items[1:2])
    assert (none["tested"], none["share"], none["interval"], none["mean_overlap"]) == (0, None, None, None)
    assert "| task | 1 | 0 | 0 | 0 | 0 |  |  |  |" in markdown(overlap([tmp_path], items[1:2]))


def test_frame_of_prompts_does_not_count(tmp_path: Path) -> None:
    frame = sentence(99, 15)
    items = [Item("framed", number, f"{frame} {sentence(number)}") for number in range(8)]
    task = found(tmp_path, f"{frame}\n{sentence(3)}", items)
    assert {number for number, overlap in task["overlaps"].items() if overlap} == {"3"}
    few = found(tmp_path, frame, items[:3])  # too few to tell
    assert few["overlapping"] == 3


def test_characters(tmp_path: Path) -> None:
    item = Item("task", 0, "天地玄黃宇宙洪荒日月盈昃辰宿列張")
    assert found(tmp_path, "千字文「天地玄黃。宇宙洪荒」", [item], Size(9, "characters"))["overlapping"] == 0
    assert found(tmp_path, "千字文「玄黃宇宙洪荒日月盈」", [item], Size(9, "characters"))["overlaps"]["0"] == 9 / 16
    text = "The quick brown fox jumps over the lazy dog, again and again."
    task = found(tmp_path, text.upper()[5:58], [Item("task", 0, text)], Size.read("50c"))
    assert task["worst"][0]["passage"] == "uick brown fox jumps over the lazy dog again and aga"


def test_private_items_are_not_quoted(tmp_path: Path) -> None:
    items = [Item("task", 0, sentence(0), private=True)]
    file = tmp_path / "corpus.txt"
    file.write_text(sentence(0))
    report = overlap([file], items)
    assert report["tasks"][0]["worst"][0]["passage"] is None
    assert report["tasks"][0]["worst"][0]["length"] == 20
    for text in (json.dumps(report), markdown(report)):
        assert "w0x1" not in text


def test_items_and_tasks_that_share_a_passage(tmp_path: Path) -> None:
    items = [Item("a", 0, sentence(1)), Item("b", 0, f"more {sentence(1)}"), Item("b", 1, sentence(2))]
    (tmp_path / "corpus.txt").write_text(sentence(1))
    report = overlap([tmp_path], items)
    assert [(task["task"], task["overlapping"]) for task in report["tasks"]] == [("a", 1), ("b", 1)]


# --- files ----------------------------------------------------------------------------------------------------------


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_all_kinds_of_files(tmp_path: Path) -> None:
    items = [Item("task", number, sentence(number)) for number in range(8)]
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(sentence(0))
    (folder / "b.jsonl").write_bytes(lines({"text": "no"}, {"text": None}, {"text": sentence(1)}))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines({"text": sentence(2)})))
    packed = zstandard.ZstdCompressor()
    (folder / "deep" / "d.jsonl.zst").write_bytes(
        packed.compress(b"\n") + packed.compress(lines({"text": sentence(3)}))
    )
    table = pyarrow.table({"text": ["no", sentence(4)], "other": [sentence(7), ""]})
    pyarrow.parquet.write_table(table, folder / "e.parquet")
    (folder / "f.jsonl").write_bytes(lines({"text": [{"role": "user", "content": sentence(5)}]}))
    (folder / "g.md.gz").write_bytes(gzip.compress(sentence(6).encode()))
    (folder / ".hidden.txt").write_text(sentence(7))
    (folder / "h.bin").write_bytes(b"\0" + sentence(7).encode())
    report = overlap([folder], items)
    task = report["tasks"][0]
    assert {number for number, overlap in task["overlaps"].items() if overlap == 1.0} == set("0123456")
    assert report["corpus"] == {
        "paths": [str(folder)],
        "files": 7,
        "skipped": [str(folder / "h.bin")],
        "documents": 10,
        "units": 7 * 20 + 2,
    }
    places = {worst["doc_id"]: (Path(worst["file"]).name, worst["document"]) for worst in task["worst"]}
    assert places[1] == ("b.jsonl", 3)
    assert places[4] == ("e.parquet", 2)


def test_documents_are_apart(tmp_path: Path) -> None:
    some = sentence(0).split()
    (tmp_path / "a.jsonl").write_bytes(lines({"text": " ".join(some[:10])}, {"text": " ".join(some[10:])}))
    assert overlap([tmp_path], ITEMS)["tasks"][0]["overlapping"] == 0


@pytest.mark.parametrize("name", ["corpus.txt", "corpus.jsonl"])
@pytest.mark.parametrize("size", [Size(13), Size(30, "characters")])
def test_long_documents_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: Size
) -> None:
    """A passage across the border of two pieces, or of many, is found whole."""
    text = " ".join([sentence(50, 40), *(sentence(number) for number in range(4)), sentence(60, 40)])
    (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("l") else text)
    whole = overlap([tmp_path], ITEMS, size=size)
    for length in (31, 64, 100, 500):
        monkeypatch.setattr(corpus_texts, "PIECE", length)
        found = overlap([tmp_path], ITEMS, size=size)
        assert found["tasks"] == whole["tasks"], length
        assert found["corpus"]["documents"] == 1
    assert whole["tasks"][0]["mean_overlap"] == 1.0


def test_equal_hashes_are_no_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "_random_values", lambda count: contamination.np.ones(count, dtype="uint64"))
    some = sentence(0).split()
    assert found(tmp_path, " ".join(reversed(some)))["overlapping"] == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'["x"]\n', "line 1 is no JSON object"),
        ("a.jsonl", b'{"content": "x", "id": 1}\n', "line 1 has no field 'text', but content, id"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: text is int; expected text"),
        ("a.jsonl.gz", gzip.compress(mtime=0, data=b'{"text": "x"}\n' * 99)[:-9], "cannot be unpacked"),
        ("a.jsonl.gz", b"plain", "cannot be unpacked"),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "x"}\n' * 99)[:-3], "cannot be unpacked"),
        ("a.jsonl.zst", b"plain text", "cannot be unpacked"),
        ("a.parquet", b"plain", "is no Parquet file"),
        ("a.txt", b"", "the corpus has no words"),
        ("a.txt", b" ... \n", "the corpus has no words"),
        ("a.bin", b"\0", r"the corpus has no files: .*hold no text, JSON lines or Parquet: 1"),
    ],
)
def test_bad_corpus_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        overlap([tmp_path], ITEMS)
    assert "\n" not in str(caught.value)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder"):
        overlap([tmp_path / "missing"], ITEMS)
    with pytest.raises(ValueError, match="the corpus has no files"):
        overlap([tmp_path], ITEMS)
    with pytest.raises(ValueError, match="no items"):
        overlap([tmp_path], [])
    for text in ("1", "0", "c", "13w", "-5", "12345", ""):
        with pytest.raises(ValueError, match="neither words, as 13, nor characters, as 50c"):
            Size.read(text)
    assert (Size.read("8"), Size.read("50c")) == (Size(8), Size(50, "characters"))
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no column 'text', but content"):
        overlap([tmp_path], ITEMS)


# --- suites, scores, command ----------------------------------------------------------------------------------------


class Stub(LM):
    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [(-1.0, False)] * len(requests)

    def generate_until(self, requests: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = generate_until


def test_items_of_tasks(tmp_path: Path) -> None:
    """Question and right answer, with the hash that samples have."""
    records = [{"question": f"Question {n}", "choices": ["no", f"yes {n}"], "answer": 1} for n in range(3)]
    (tmp_path / "next_line.jsonl").write_bytes(lines(*records))
    folder = str(resource("eval", "tasks") / "training")
    manager = TaskManager(include_path=folder, include_defaults=False, metadata={"items": str(tmp_path)})
    task = manager.load(["zaya_held_out_next_line"])["tasks"]["zaya_held_out_next_line"]
    items = task_items("name", task, limit=2)
    assert [(item.task, item.doc_id, item.text) for item in items] == [
        ("name", 0, "Question 0\nyes 0"),
        ("name", 1, "Question 1\nyes 1"),
    ]
    samples = evaluate(Stub(), {"tasks": {"name": task}}, limit=2, bootstrap_iters=0, log_samples=True)["samples"]
    assert [item.doc_hash for item in items] == [sample["doc_hash"] for sample in samples["name"]]


def test_scores_are_split(tmp_path: Path) -> None:
    samples = [evaluation_folders.item(number, float(number < 3)) for number in range(6)]
    texts = [evaluation_folders.text_item(number, 10.0 * (number + 1), 10) for number in range(2)]
    runs = [
        evaluation_folders.run("ZAYA1-base", "task", samples),
        evaluation_folders.run("ZAYA1-base", "texts", texts, metric="bits_per_byte,none", kind="bits_per_byte"),
    ]
    folder = evaluation_folders.write(tmp_path / "evaluation", runs)
    items = [Item("task", number, sentence(number), samples[number]["doc_hash"]) for number in range(5)]
    items += [Item("task", 5, "?", samples[5]["doc_hash"])]  # not tested
    items += [Item("texts", number, sentence(10 + number), texts[number]["doc_hash"]) for number in range(2)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(sentence(number) for number in (0, 1, 10)))
    report = overlap([corpus], items)
    first, second = split_scores(report, folder)
    assert first["overlapping"] == {"items": 2, "value": 1.0}
    assert first["clean"] == {"items": 3, "value": pytest.approx(1 / 3)}
    assert first["difference"] == pytest.approx(2 / 3)
    assert first["standard_error"] == pytest.approx(1 / 3)  # sqrt(0 / 2 + (1/3) / 3)
    assert second["overlapping"]["value"] == pytest.approx(1 / 0.6931471805599453)
    assert second["clean"]["value"] == pytest.approx(2 / 0.6931471805599453)
    assert second["difference"] is None
    text = markdown({**report, "scores": [first, second]})
    assert "| task | ZAYA1-base | acc,none | 0.3333 (n = 3) | 1 (n = 2) | +0.6667 ± 0.3333 |" in text
    unscored = evaluation_folders.run(
        "ZAYA1-base", "task", [*samples[:3], evaluation_folders.item(3, float("nan")), *samples[4:]]
    )
    broken = evaluation_folders.write(tmp_path / "broken", [unscored])
    assert split_scores(report, broken)[0]["clean"] == {"items": 2, "value": 0.5}
    report["tasks"][0]["hashes"]["1"] = "another"
    with pytest.raises(ValueError, match="item 1 of task is another than the one that was looked for"):
        split_scores(report, folder)
    with pytest.raises(ValueError, match="has no finished run of other"):
        split_scores({**report, "tasks": [{**report["tasks"][0], "task": "other"}]}, folder)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of generated items, which need no data."""
    suite = tmp_path_factory.mktemp("suite") / "suite.yaml"
    entry = "{task: zaya_logic_generated, title: Logic, ability: reasoning, metric: 'acc,none', items: 3, limit: 3, "
    counts = "prompt_tokens: 100, answer_tokens: 1, answers: 4}"
    suite.write_text(f"name: mine\ntitle: Mine\ndescription: One task.\nentries:\n  - {entry}{counts}\n")
    return suite


@pytest.fixture(scope="module")
def loaded(suite: Path) -> list[LoadedTask]:
    return load_tasks(load_suite(suite), limit=None)


def test_tasks_of_a_suite(tmp_path: Path, loaded: list[LoadedTask]) -> None:
    """An item is found as it is asked, without its examples; those of a private task are not quoted."""
    text = task_items("name", loaded[0].task_object)[1].text
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(text)
    [task] = probe([corpus], [replace(one, limit=2) for one in loaded])["tasks"]
    assert (task["task"], task["overlaps"]) == ("zaya_logic_generated", {"0": 0.0, "1": 1.0})
    assert task["worst"][0]["passage"] == " ".join(words(text))
    private = [replace(one, entry=replace(one.entry, private_items=True)) for one in loaded]
    assert probe([corpus], private)["tasks"][0]["worst"][0]["passage"] is None


def test_command(
    tmp_path: Path,
    suite: Path,
    loaded: list[LoadedTask],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(lines({"body": task_items("name", loaded[0].task_object)[2].text}))
    settings = {"suite": suite, "corpus": [corpus], "ngram": "13", "field": "body", "limit": None, "evaluation": None}
    assert run(argparse.Namespace(**settings, out=tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert "| zaya_logic_generated | 3 | 3 | 0 | 1 | 0 | 33.33 % (6.15 % to 79.23 %) | 33.33 % | 33.33 % |" in printed
    assert (tmp_path / "out" / "contamination.md").read_text().strip() == printed.strip()
    assert json.loads((tmp_path / "out" / "contamination.json").read_text())["tasks"][0]["overlapping"] == 1
    other = evaluation_folders.run("ZAYA1-base", "other", [evaluation_folders.item(0, 1.0)])
    settings["evaluation"] = evaluation_folders.write(tmp_path / "evaluation", [other])
    monkeypatch.setattr(suites, "load_tasks", lambda suite, limit: loaded)  # not a second time
    with pytest.raises(ValueError, match="has no finished run of zaya_logic_generated"):
        run(argparse.Namespace(**settings, out=None))
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"out": "corpus.txt"}, "is a file; expected a folder"),
        ({"evaluation": "."}, "has no manifest.json"),
        ({"ngram": "13w"}, "neither words"),
        ({"corpus": ["missing"]}, "there is no file or folder"),
    ],
)
def test_mistakes_are_said_before_tasks_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(sentence(0))
    paths = {name: Path(value) for name, value in wrong.items() if name in ("out", "evaluation")}
    settings: dict[str, Any] = {
        "suite": "no such suite",
        "corpus": ["corpus.txt"],
        "ngram": "13",
        "field": "text",
        "limit": None,
    }
    settings |= {"evaluation": None, "out": None, **wrong, **paths}
    settings["corpus"] = [Path(path) for path in settings["corpus"]]
    with pytest.raises(ValueError, match=message):
        run(argparse.Namespace(**settings))


def test_json_lines_named_json(tmp_path: Path) -> None:
    """Its escapes are no text: a line end inside would hide the word behind it."""
    text = sentence(0).replace(" ", "\n")
    (tmp_path / "a.json").write_bytes(b"\n" + lines({"text": text}, {"text": "x"}))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(lines({"text": sentence(1).replace(" ", "\t")})))
    (tmp_path / "info.json").write_text(json.dumps({"text": sentence(2)}, indent=2))
    (tmp_path / "list.json").write_text(json.dumps([sentence(3)]))
    report = overlap([tmp_path], ITEMS)
    assert report["tasks"][0]["overlaps"] == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 0.0}
    assert report["corpus"]["skipped"] == [str(tmp_path / "info.json"), str(tmp_path / "list.json")]
    with pytest.raises(ValueError, match=r"info\.json, line 1 is not JSON"):
        overlap([tmp_path / "info.json"], ITEMS)
