"""The model card: its metadata and its table have the numbers of results.json, and the lint sees what is wrong."""

from __future__ import annotations

import copy
import math
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from quickstart_results import make_results
from zaya_hf.hub.card import build_card, check_card, write_card

TEMPLATE = Path(__file__).resolve().parent.parent / "model_cards" / "quickstart.md.jinja"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a card opens no connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return make_results(steps=40, seeds=(0, 1, 2))


@pytest.fixture(scope="module")
def card(results: dict[str, Any]) -> str:
    return build_card(results, TEMPLATE)


def metadata(card: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return loaded


def table(card: str) -> dict[str, list[str]]:
    section = card[card.index("## Results") : card.index("Accuracy: higher")]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return {row[0]: row[1:] for row in cells}


def test_metadata_is_what_the_hub_wants(card: str) -> None:
    found = metadata(card)
    assert {key: found[key] for key in ("license", "library_name", "pipeline_tag", "language")} == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": "en",
    }
    assert "zaya" in found["tags"]
    (entry,) = found["model-index"]
    assert entry["name"] == "ZAYA1 quickstart"
    for result in entry["results"]:
        for value in (result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]):
            assert isinstance(value, str)


def test_numbers_are_those_of_the_published_run(card: str, results: dict[str, Any]) -> None:
    scores = results["models"][0]["runs"][0]["evaluation"]["tasks"]
    found = {r["dataset"]["type"]: r["metrics"] for r in metadata(card)["model-index"][0]["results"]}
    assert set(found) == set(scores)
    shown = table(card)
    for task in results["tasks"]:
        score, (metric,) = scores[task["name"]], found[task["name"]]
        row = shown[task["title"]]
        low, high = score["interval_95"]
        if task["kind"] == "choice":
            assert (metric["type"], metric["value"]) == ("accuracy", score["accuracy"])
            verdict = "yes" if score["above_chance"] else "no"
            assert row[1:] == [
                f"{score['accuracy']:.3f}",
                f"{low:.3f}\u2013{high:.3f}",
                "0.250",
                verdict,
                str(task["items"]),
            ]
        else:
            assert (metric["type"], metric["value"]) == ("bits_per_byte", score["bits_per_byte"])
            assert row[1:] == [f"{score['bits_per_byte']:.2f}", f"{low:.2f}\u2013{high:.2f}", "3.55", "-", "120"]


def test_another_published_seed_has_its_own_numbers(results: dict[str, Any]) -> None:
    other = copy.deepcopy(results)
    other["published"]["seed"] = 2
    bits = results["models"][0]["runs"][2]["evaluation"]["tasks"]["zaya_quickstart_bits"]["bits_per_byte"]
    assert metadata(build_card(other, TEMPLATE))["model-index"][0]["results"][0]["metrics"][0]["value"] == bits


def test_huggingface_hub_reads_the_same_results_back(card: str, results: dict[str, Any]) -> None:
    read = ModelCard(card).data
    assert read.model_name == "ZAYA1 quickstart"
    assert [entry.dataset_name for entry in read.eval_results] == [task["title"] for task in results["tasks"]]
    assert all(math.isfinite(entry.metric_value) for entry in read.eval_results)


def test_several_seeds_have_their_spread_and_one_has_a_warning(card: str, results: dict[str, Any]) -> None:
    values = [run["evaluation"]["tasks"]["zaya_quickstart_prose"]["accuracy"] for run in results["models"][0]["runs"]]
    mean, low, high = sum(values) / 3, min(values), max(values)
    assert f"Prose: words in order {mean:.3f} ({low:.3f}\u2013{high:.3f})" in card
    one = build_card(make_results(("zaya",), steps=5), TEMPLATE)
    assert "0.375, 0.45 and 0.75 over three seeds" in one
    assert "none is called resolved" in one


def test_says_what_it_is_and_how_it_was_made(card: str, results: dict[str, Any]) -> None:
    for words in (
        "It is a demonstration and of no other use",
        "AutoModelForCausalLM.from_pretrained(folder)",
        "import zaya_hf",
        results["command"],
        results["corpus"]["sha256"],
        "2.4e-6 with transformers alone",
        "| torch | 2.13.0 |",
        "2,034,696",
    ):
        assert words in card


def test_evaluation_command_is_shown_if_there_is_one(results: dict[str, Any]) -> None:
    given = results | {"evaluation_command": "lm_eval --tasks ```zaya``` --model hf"}
    assert "````sh\nlm_eval --tasks ```zaya``` --model hf\n````" in build_card(given, TEMPLATE)


def test_passes_its_own_lint(card: str, results: dict[str, Any]) -> None:
    assert check_card(card) == []
    assert check_card(card, results) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "problem"),
    [
        (r"\A---\n", "", "no metadata"),
        (r"license: apache-2.0\n", "", "metadata without license"),
        (r"license: apache-2.0\n", "license: mit\n", "licence 'mit' instead of apache-2.0"),
        (r"pipeline_tag: .*\n", "", "metadata without pipeline_tag"),
        (r"tags:\n(- .*\n)+", "", "metadata without tags"),
        (r"language: en", "language: [en", "the metadata is not YAML"),
        (r"(?s)language: en.*?\n---", "- x\n---", "the metadata is not a mapping"),
        (r"value: 2\.\d+", "value: .nan", "the value of Held-out text is not a finite number"),
        (r"value: 2\.\d+", "value: '2.9'", "the value of Held-out text is not a finite number"),
        (r"value: 2\.\d+", "value: 1.25", "Held-out text: the table says"),
        (r"\| bits per byte \| 2\.\d\d \|", "| bits per byte | 1.25 |", "Held-out text: the table says 1.25"),
        (r"\| Held-out text \|.*\n", "", "no row for Held-out text"),
        (r"## Limits", "## Limits\n\n[More Information Needed]", r"placeholder in the text: [more information needed]"),
        (r"## Limits", "## Limits\n\n{{ limits }}", "placeholder in the text: {{"),
        (r"    - type: bits_per_byte\n      value", "    - value", "model-index is incomplete"),
    ],
)
def test_lint_sees(card: str, pattern: str, replacement: str, problem: str) -> None:
    wrong, count = re.subn(pattern, replacement, card, count=1)
    assert count == 1
    assert any(found.startswith(problem) for found in check_card(wrong)), check_card(wrong)


def test_lint_compares_with_the_results(card: str, results: dict[str, Any]) -> None:
    other = copy.deepcopy(results)
    other["models"][0]["runs"][0]["evaluation"]["tasks"]["zaya_quickstart_prose"]["accuracy"] += 1e-6
    assert check_card(card, other) == [
        found for found in check_card(card, other) if found.startswith("Prose: words in order: the card says")
    ]
    assert len(check_card(card, other)) == 1
    assert check_card(card, other | {"published": None}) == ["results without a published model"]


def test_lint_lets_code_blocks_hold_anything(card: str) -> None:
    assert check_card(card.replace("```sh\nzaya generate", "```sh\necho '{{ x }}'\nzaya generate")) == []


def test_untrusted_text_is_no_markup() -> None:
    results = make_results(("zaya",), steps=3)
    nasty = "a|b`c<script>\n---\n# d\x00\ud800"
    results["models"][0]["title"] = "ZAYA\n---\nlicense: mit"
    for task in results["tasks"][1:3]:
        task["title"] += nasty
    results["versions"]["torch"] = nasty
    results["hardware"]["cpu"] = nasty
    results["corpus"]["origin"] = nasty
    results["command"] = f"zaya quickstart\n```\n# not a title\n{nasty}"
    card = build_card(results, TEMPLATE)
    card.encode("utf-8")
    assert check_card(card, results) == []
    assert metadata(card)["license"] == "apache-2.0"
    assert metadata(card)["model-index"][0]["name"] == "ZAYA --- license: mit quickstart"
    outside = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", card.split("---\n", 2)[2], flags=re.DOTALL | re.MULTILINE)
    assert "# not a title" not in outside
    assert "<script>" not in outside.replace("\\<script\\>", "")
    for line in outside.splitlines():
        if line.startswith("| torch"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 3


def test_wrong_results_make_no_card() -> None:
    with pytest.raises(ValueError, match="no model of these results was published"):
        build_card(make_results(("zaya",), steps=2, published=False), TEMPLATE)
    with pytest.raises(ValueError, match="not the results of zaya quickstart"):
        build_card({"made_by": "x"}, TEMPLATE)


def test_a_template_that_leaves_something_open_makes_no_card(tmp_path: Path, results: dict[str, Any]) -> None:
    template = tmp_path / "card.jinja"
    template.write_text(TEMPLATE.read_text() + "\n[More Information Needed]\n")
    with pytest.raises(ValueError, match="the model card is not right: placeholder"):
        build_card(results, template)


def test_is_written_once(tmp_path: Path, results: dict[str, Any]) -> None:
    path = write_card(results, tmp_path, TEMPLATE)
    assert path == tmp_path / "README.md"
    written = path.read_text(encoding="utf-8")
    assert check_card(written, results) == []
    with pytest.raises(ValueError, match="is there already and is not overwritten"):
        write_card(results, tmp_path, TEMPLATE)
    assert path.read_text(encoding="utf-8") == written


def test_default_template_is_found(tmp_path: Path, results: dict[str, Any], card: str) -> None:
    assert write_card(results, tmp_path).read_text(encoding="utf-8") == card
