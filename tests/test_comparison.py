"""Comparisons of made-up evaluations: known values, what must not be compared, and folders that are broken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evaluation_folders as folders
from zaya_hf.evaluation.comparison import compare
from zaya_hf.evaluation.statistics import wilson_interval

ZAYA, QWEN = "ZAYA1-base", "Qwen3-4B-Base"
BITS = {"metric": "bits_per_byte,none", "kind": "bits_per_byte"}


def two(tmp_path: Path, first: Sequence[Any], second: Sequence[Any], **changes: Any) -> Path:
    """ZAYA and Qwen3 on one task, with these items or scores."""
    runs = []
    for model, scores in ((ZAYA, first), (QWEN, second)):
        items = [one if isinstance(one, dict) else folders.item(doc, float(one)) for doc, one in enumerate(scores)]
        runs.append(folders.run(model, "hellaswag", items, **changes))
    return folders.write(tmp_path / "evaluation", runs)


def only_pair(folder: Path) -> dict[str, Any]:
    (found,) = compare(folder)["pairs"]
    return found


class TestWorkedExample:
    """HellaSwag-100 of a small model, 27 right, and the same without noise in its weights, 40: 20 against 7 items."""

    @pytest.fixture
    def found(self, tmp_path: Path) -> dict[str, Any]:
        noisy, clean = np.repeat([[1, 1], [0, 1], [1, 0], [0, 0]], [20, 20, 7, 53], axis=0).T
        return compare(two(tmp_path, noisy, clean))

    def test_scores(self, found: dict[str, Any]) -> None:
        score = found["scores"][QWEN]["hellaswag"]
        assert (score["value"], score["items"], score["correct"]) == (0.4, 100, 40)
        assert score["interval"] == pytest.approx(wilson_interval(40, 100))
        assert score["interval_method"] == "Wilson"
        assert score["stderr"] == pytest.approx(math.sqrt(0.4 * 0.6 / 99))
        assert score["above_chance"]
        assert not found["scores"][ZAYA]["hellaswag"]["above_chance"]

    def test_pair(self, found: dict[str, Any]) -> None:
        (pair,) = found["pairs"]
        assert (pair["model"], pair["baseline"], pair["task"], pair["n"]) == (QWEN, ZAYA, "hellaswag", 100)
        assert pair["difference"] == pytest.approx(0.13)
        assert pair["stderr"] == pytest.approx(math.sqrt((0.27 - 0.13**2) / 99))
        assert pair["stderr"] == pytest.approx(0.051, abs=5e-4)
        assert (pair["n10"], pair["n01"]) == (20, 7)
        assert pair["p"] == pair["p_mcnemar"] == pair["p_holm"] == pytest.approx(0.019, abs=5e-4)
        assert pair["p_permutation"] == pytest.approx(0.019, abs=0.006)
        assert pair["interval_percentile"] == pytest.approx([0.03, 0.23], abs=0.011)
        assert pair["interval"] == pytest.approx([0.03, 0.23], abs=0.011)
        assert pair["correlation"] == pytest.approx(0.42, abs=0.005)
        # 2.8 standard errors are 0.141; the exact test finds less.
        assert pair["smallest_detectable"] == pytest.approx(0.150, abs=0.001)
        assert pair["verdict"] == "better"
        assert "Qwen3 4B base is 13.0 points better than ZAYA1 base" in pair["sentence"]

    def test_it_is_json_and_the_same_again(self, found: dict[str, Any]) -> None:
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert compare(found["folder"]) == found

    def test_it_says_what_noise_it_is_about(self, found: dict[str, Any]) -> None:
        assert any("not seed noise" in note for note in found["notes"])


class TestDegenerate:
    def test_no_item_differs(self, tmp_path: Path) -> None:
        pair = only_pair(two(tmp_path, [1, 0, 1, 1], [1, 0, 1, 1]))
        assert (pair["difference"], pair["stderr"], pair["p"], pair["p_permutation"]) == (0, 0, 1, 1)
        assert pair["interval"] is pair["smallest_detectable"] is None
        assert pair["verdict"] == "no item differs"
        assert "same score on each of the 4 items" in pair["sentence"]

    @pytest.mark.parametrize("second", [0, 1])
    def test_one_item(self, tmp_path: Path, second: int) -> None:
        found = compare(two(tmp_path, [1], [second]))
        (pair,) = found["pairs"]
        assert pair["difference"] == second - 1
        assert pair["p"] == 1
        assert pair["interval"] is pair["smallest_detectable"] is pair["correlation"] is None
        assert found["scores"][ZAYA]["hellaswag"]["interval"] == pytest.approx(wilson_interval(1, 1))
        json.dumps(found, allow_nan=False)

    def test_all_right_against_all_wrong(self, tmp_path: Path) -> None:
        pair = only_pair(two(tmp_path, [0] * 9, [1] * 9))
        assert (pair["n10"], pair["n01"], pair["p"]) == (9, 0, pytest.approx(2 / 512))
        assert pair["interval"] is None
        assert pair["verdict"] == "better"

    def test_one_model(self, tmp_path: Path) -> None:
        found = compare(folders.write(tmp_path, [folders.run(QWEN, "hellaswag", [folders.item(0, 1.0)])]))
        assert found["baseline"] == QWEN
        assert found["pairs"] == found["refused"] == found["discordant"] == []
        assert found["means"][0]["scores"][QWEN]["value"] == 1


class TestPairing:
    def test_items_are_paired_by_number_not_by_line(self, tmp_path: Path) -> None:
        first = [folders.item(doc, float(doc % 3 == 0)) for doc in range(30)]
        pair = only_pair(two(tmp_path, first, first[::-1]))
        assert pair["verdict"] == "no item differs"

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"doc_hash": "x"}, "the data of item 1 is not the same"),
            ({"target_hash": "x"}, "the right answer of item 1 is not the same"),
            ({"prompt_hash": "x"}, "the prompt of item 1 is not the same .* same template"),
            ({"doc_id": 7}, "3 items and .* 3, 2 of them in both"),
            ({"scores": {"acc,none": None}}, "1 items of Qwen3-4B-Base have no finite score"),
        ],
    )
    def test_what_is_not_the_same_is_refused(self, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
        second = [folders.item(doc, 1.0, **(changed if doc == 1 else {})) for doc in range(3)]
        found = compare(two(tmp_path, [1, 0, 1], second))
        assert found["pairs"] == []
        (refused,) = found["refused"]
        assert (refused["model"], refused["task"]) == (QWEN, "hellaswag")
        assert re.search(message, refused["reason"])
        assert "\n" not in refused["reason"]
        if found["means"]:  # none without a score
            assert "on hellaswag" in found["means"][0]["pairs"][QWEN]["refused"]

    def test_fewer_items(self, tmp_path: Path) -> None:
        found = compare(two(tmp_path, [1, 0, 1, 1], [1, 0]))
        said = "Qwen3-4B-Base has 2 items and ZAYA1-base 4, 2 of them in both; evaluate both with the same limit"
        assert found["refused"][0]["reason"] == f"hellaswag: {said}"

    def test_other_shots_or_metric(self, tmp_path: Path) -> None:
        items = [folders.item(doc, 1.0, scores={"acc,none": 1.0, "acc_norm,none": 0.0}) for doc in range(3)]
        first = folders.run(ZAYA, "hellaswag", items)
        for name, other, message in (
            ("shots", folders.run(QWEN, "hellaswag", items, num_fewshot=10), "examples in the prompt .* 10 and 0"),
            (
                "metric",
                folders.run(QWEN, "hellaswag", items, metric="acc_norm,none"),
                "metric .* acc_norm,none and acc",
            ),
        ):
            (refused,) = compare(folders.write(tmp_path / name, [first, other]))["refused"]
            assert re.search(message, refused["reason"])

    def test_templates_may_differ_but_it_is_said(self, tmp_path: Path) -> None:
        items = [folders.item(doc, 1.0) for doc in range(3)]
        templated = [folders.item(doc, 0.0, prompt_hash=f"chat {doc}") for doc in range(3)]
        settings = {"chat_template": {"used": True, "sha256": "abc"}, "system": None, "dtype": "bfloat16"}
        runs = [folders.run(ZAYA, "hellaswag", items), folders.run(QWEN, "hellaswag", templated, settings=settings)]
        pair = only_pair(folders.write(tmp_path, runs))
        assert pair["prompts_differ"]
        assert any("chat templates or system prompts" in note for note in pair["notes"])
        assert any(note.startswith("dtype is bfloat16 for Qwen3-4B-Base") for note in pair["notes"])

    def test_other_sizes(self, tmp_path: Path) -> None:
        runs = [
            folders.run(model, "text", [folders.text_item(0, 9.0, size)], **BITS)
            for model, size in ((ZAYA, 10), (QWEN, 11))
        ]
        (refused,) = compare(folders.write(tmp_path, runs))["refused"]
        assert "the size of item 0" in refused["reason"]


class TestOtherMetrics:
    def test_bits_per_byte(self, tmp_path: Path) -> None:
        """Ratio of sums, not mean of ratios: (80 + 1 + 1) / (100 + 10 + 10) bits; lower is better."""
        nats = [[80, 1, 1], [70, 2, 1]]
        runs = [
            folders.run(
                model,
                "text",
                [folders.text_item(d, bits * math.log(2), 100 if d == 0 else 10) for d, bits in enumerate(texts)],
                **BITS,
            )
            for model, texts in zip((ZAYA, QWEN), nats, strict=True)
        ]
        found = compare(folders.write(tmp_path, runs))
        assert found["scores"][ZAYA]["text"]["value"] == pytest.approx(82 / 120)
        assert found["scores"][ZAYA]["text"]["correct"] is None
        (pair,) = found["pairs"]
        assert pair["difference"] == pytest.approx(-9 / 120)
        assert pair["test"] == "sign flips"
        assert found["means"] == []
        assert not found["tasks"][0]["in_suite_mean"]

    def test_less_is_better(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        texts = rng.normal(60, 5, 40)
        runs = [
            folders.run(
                model,
                "text",
                [folders.text_item(d, nats * factor, 100) for d, nats in enumerate(texts)],
                **BITS,
            )
            for model, factor in ((ZAYA, 1.0), (QWEN, 0.97))
        ]
        pair = only_pair(folders.write(tmp_path, runs))
        assert pair["verdict"] == "better"
        ours, theirs = texts.sum() * 0.97 / 4000 / math.log(2), texts.sum() / 4000 / math.log(2)
        assert pair["difference"] == pytest.approx(ours - theirs)
        assert pair["interval"][0] < pair["difference"] < pair["interval"][1] < 0
        expected = 0.03 * texts.std(ddof=1) / math.sqrt(40) / 100 / math.log(2)
        assert pair["stderr"] == pytest.approx(expected)
        assert "bits per byte better" in pair["sentence"]

    def test_perplexity(self, tmp_path: Path) -> None:
        """exp of nats per word; its standard error is that of the nats times the perplexity (delta method)."""
        nats = np.random.default_rng(0).gamma(4, 0.5, 200)
        runs = [
            folders.run(
                model,
                "lambada",
                [folders.text_item(d, value * factor, 1, "perplexity") for d, value in enumerate(nats)],
                metric="perplexity,none",
                kind="perplexity",
            )
            for model, factor in ((ZAYA, 1.0), (QWEN, 1.1))
        ]
        found = compare(folders.write(tmp_path, runs))
        score = found["scores"][ZAYA]["lambada"]
        assert score["value"] == pytest.approx(math.exp(nats.mean()))
        assert score["stderr"] == pytest.approx(math.exp(nats.mean()) * nats.std(ddof=1) / math.sqrt(200))
        assert score["interval"][0] < score["value"] < score["interval"][1]
        assert found["pairs"][0]["verdict"] == "worse"

    def test_parts_of_items(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        first, second = rng.random(80), rng.random(80)
        found = compare(two(tmp_path, first, second))
        assert found["tasks"][0]["metric_kind"] == "mean"
        score = found["scores"][ZAYA]["hellaswag"]
        assert score["interval_method"] == "BCa bootstrap"
        half = 1.96 * first.std(ddof=1) / math.sqrt(80)
        assert score["interval"] == pytest.approx([first.mean() - half, first.mean() + half], abs=0.15 * half)
        (pair,) = found["pairs"]
        differences = second - first
        assert pair["stderr"] == pytest.approx(differences.std(ddof=1) / math.sqrt(80))
        assert pair["n10"] is pair["p_mcnemar"] is None
        assert pair["p"] == pair["p_permutation"]

    def test_several_answers_are_one_score(self, tmp_path: Path) -> None:
        """Ten answers to each of four items are four items, not forty."""
        first = [folders.item(doc, [1.0] * doc + [0.0] * (10 - doc)) for doc in range(4)]
        found = compare(two(tmp_path, first, first))
        score = found["scores"][ZAYA]["hellaswag"]
        assert score["items"] == 4
        assert score["value"] == pytest.approx((0 + 0.1 + 0.2 + 0.3) / 4)

    def test_pass_at_k(self, tmp_path: Path) -> None:
        """Of five answers two right, pass@2 is 1 - C(3, 2) / C(5, 2)."""
        item = folders.item(0, [], scores={"pass@2,run": [1.0, 0.0, 1.0, 0.0, 0.0]})
        found = compare(folders.write(tmp_path, [folders.run(ZAYA, "code", [item], metric="pass@2,run")]))
        assert found["scores"][ZAYA]["code"]["value"] == pytest.approx(0.7)


class TestGroups:
    @pytest.fixture
    def runs(self) -> list[dict[str, Any]]:
        """A subject of 10 items and one of 90; ZAYA has 5 and 81 right, Qwen3 8 and 72."""
        found = []
        for model, counts in ((ZAYA, (5, 81)), (QWEN, (8, 72))):
            for task, size, right in zip(("mmlu_a", "mmlu_b"), (10, 90), counts, strict=True):
                items = [folders.item(doc, float(doc < right), cluster=task) for doc in range(size)]
                found.append(folders.run(model, task, items, group="mmlu", ability="knowledge"))
        return found

    def test_both_means(self, tmp_path: Path, runs: list[dict[str, Any]]) -> None:
        found = compare(folders.write(tmp_path, runs))
        assert [(row["id"], row["kind"], row["parent"]) for row in found["tasks"]] == [
            ("mmlu", "group", None),
            ("mmlu_a", "leaf", "mmlu"),
            ("mmlu_b", "leaf", "mmlu"),
        ]
        score = found["scores"][ZAYA]["mmlu"]
        assert score["value"] == pytest.approx(0.86)
        assert score["macro"] == pytest.approx(0.7)
        assert score["interval_method"] == "stratified bootstrap"
        assert score["clusters"] == 2
        # Stratified by hand: sqrt(sum of w**2 p (1 - p) / (n - 1)).
        expected = math.sqrt(0.1**2 * 0.25 / 9 + 0.9**2 * 0.09 / 89)
        assert score["stderr"] == pytest.approx(expected)
        low, high = score["interval"]
        assert high - low == pytest.approx(2 * 1.96 * expected, rel=0.1)

    def test_only_the_group_is_in_the_family(self, tmp_path: Path, runs: list[dict[str, Any]]) -> None:
        pair = only_pair(folders.write(tmp_path, runs))
        assert pair["task"] == "mmlu"
        assert pair["difference"] == pytest.approx(-0.06)
        assert pair["difference_macro"] == pytest.approx(0.1)
        assert (pair["n10"], pair["n01"]) == (3, 9)
        assert pair["p_holm"] == pair["p"]

    def test_a_missing_subject(self, tmp_path: Path, runs: list[dict[str, Any]]) -> None:
        found = compare(folders.write(tmp_path, runs[:3], unfinished=[(QWEN, "mmlu_b")]))
        score = found["scores"][QWEN]["mmlu"]
        assert (score["value"], score["missing"]) == (None, ["mmlu_b"])
        assert found["pairs"] == []
        assert found["means"] == []
        loud = [warning["text"] for warning in found["warnings"] if warning["level"] == "loud"]
        assert "Qwen3-4B-Base: no finished run of mmlu_b" in loud
        assert "Qwen3-4B-Base has no finished run of 1 of 2 tasks of MMLU" in loud

    def test_fewer_items_than_the_suite_says(self, tmp_path: Path, runs: list[dict[str, Any]]) -> None:
        suite = {"name": "s", "entries": [{"task": "mmlu", "title": "MMLU", "items": 14_042}]}
        for name, limit, said in (("all", None, True), ("limited", 90, False)):
            found = compare(folders.write(tmp_path / name, runs, suite=suite, limit=limit))
            assert said == any("has 100 items, but the suite says 14042" in one["text"] for one in found["warnings"])

    def test_a_refusal_is_of_the_whole_group(self, tmp_path: Path, runs: list[dict[str, Any]]) -> None:
        runs[3]["samples"][5]["doc_hash"] = "x"
        (refused,) = compare(folders.write(tmp_path, runs))["refused"]
        assert refused["task"] == "mmlu"
        assert refused["reason"].startswith("mmlu_b: the data of item 5")

    def test_passages(self, tmp_path: Path) -> None:
        """Items of one passage that go together: as many independent observations as passages."""
        passages = [doc // 10 for doc in range(200)]
        scores = [[float(passage % 2) for passage in passages], [float(passage % 3 > 0) for passage in passages]]
        items = [[folders.item(d, s, cluster=str(passages[d])) for d, s in enumerate(of)] for of in scores]
        found = compare(two(tmp_path, *items))
        score, (pair,) = found["scores"][ZAYA]["hellaswag"], found["pairs"]
        assert score["interval_method"] == pair["interval_method"] == "cluster bootstrap"
        assert score["stderr"] == pytest.approx(math.sqrt(0.25 / 19))  # not / 199
        assert score["above_chance"] is (score["interval"][0] > 0.25)  # the interval knows of the passages
        assert pair["test"] == "sign flips"
        assert pair["p"] > 0.3 > pair["p_mcnemar"]
        assert pair["verdict"] == "cannot be told apart"


class TestFamilyAndMeans:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Tasks of 20 and 500 items; Qwen3 is better by 0.3 on the small one, and by 0.02 worse on the large one."""
        runs = []
        for model, small, large in ((ZAYA, 10, 300), (QWEN, 16, 290)):
            runs += [
                folders.run(model, "small", [folders.item(d, float(d < small)) for d in range(20)]),
                folders.run(model, "large", [folders.item(d, float(d < large)) for d in range(500)], ability="math"),
            ]
        return folders.write(tmp_path, runs)

    def test_holm(self, folder: Path) -> None:
        small, large = compare(folder)["pairs"]
        assert small["p"] == pytest.approx(2 / 2**6)
        assert large["p"] == pytest.approx(2 / 2**10)
        assert large["p_holm"] == pytest.approx(2 * large["p"])
        assert small["p_holm"] == pytest.approx(small["p"])
        assert (small["verdict"], large["verdict"]) == ("better", "worse")

    def test_tasks_weigh_the_same(self, folder: Path) -> None:
        found = compare(folder)
        means = {mean["id"]: mean for mean in found["means"]}
        assert list(means) == ["overall", "reasoning", "math"]
        overall = means["overall"]
        assert overall["tasks"] == ["small", "large"]
        assert overall["scores"][ZAYA]["value"] == pytest.approx((0.5 + 0.6) / 2)
        pair = overall["pairs"][QWEN]
        assert pair["difference"] == pytest.approx((0.3 - 0.02) / 2)
        small, large = found["pairs"]
        # Items are drawn apart: variances add.
        expected = math.hypot(small["stderr"], large["stderr"]) / 2
        assert pair["stderr"] == pytest.approx(expected, rel=0.04)
        assert pair["interval"] == pytest.approx([0.14 - 1.96 * expected, 0.14 + 1.96 * expected], abs=0.2 * expected)
        assert pair["verdict"] == "better"

    def test_what_not_all_have_is_left_out(self, tmp_path: Path, folder: Path) -> None:
        items = [folders.item(doc, 1.0) for doc in range(5)]
        runs = [folders.run(ZAYA, "a", items), folders.run(ZAYA, "b", items), folders.run(QWEN, "a", items)]
        (overall, _) = compare(folders.write(tmp_path / "part", runs))["means"]
        assert overall["tasks"] == ["a"]
        assert overall["left_out"] == [{"task": "b", "reason": "no score of Qwen3-4B-Base"}]

    def test_equal_tasks_are_not_drawn_alike(self, tmp_path: Path) -> None:
        """With the same draws for each task, the interval of a mean of four would be as wide as that of one."""
        items = [folders.item(doc, float(doc % 2)) for doc in range(100)]
        found = compare(folders.write(tmp_path, [folders.run(ZAYA, task, items) for task in "abcd"]))
        low, high = found["means"][0]["scores"][ZAYA]["interval"]
        assert high - low == pytest.approx(2 * 1.96 * 0.05 / 2, rel=0.1)


class TestBaseline:
    def test_first_of_zayas_family_or_first(self, tmp_path: Path) -> None:
        runs = [folders.run(model, "a", [folders.item(0, 1.0)]) for model in (QWEN, ZAYA)]
        folder = folders.write(tmp_path / "zaya", runs)
        assert compare(folder)["baseline"] == ZAYA
        found = compare(folder, baseline=QWEN)
        assert (found["baseline"], found["pairs"][0]["model"]) == (QWEN, ZAYA)
        assert [model["baseline"] for model in found["models"]] == [True, False]
        with pytest.raises(ValueError, match=r"baseline 'x' is none of its models .* Qwen3-4B-Base, ZAYA1-base"):
            compare(folder, baseline="x")

    def test_it_must_have_a_run(self, tmp_path: Path) -> None:
        models = {name: folders.facts(name) for name in (ZAYA, QWEN)}
        run = folders.run(QWEN, "a", [folders.item(0, 1.0)])
        folder = folders.write(tmp_path, [run], models=models, unfinished=[(ZAYA, "a")])
        assert compare(folder)["baseline"] == QWEN
        with pytest.raises(ValueError, match="has no finished run"):
            compare(folder, baseline=ZAYA)


class TestWarnings:
    def test_cut_prompts_are_loud(self, tmp_path: Path) -> None:
        run = folders.run(ZAYA, "a", [folders.item(0, 1.0)])
        run["counts"] |= {"truncated_prompts": 3, "empty_answers": 2}
        found = compare(folders.write(tmp_path, [run | {"warnings": ["something"]}]))
        assert [(warning["level"], warning["text"]) for warning in found["warnings"]] == [
            ("loud", "ZAYA1-base, A: 3 prompts were cut because they did not fit into max_length (1 items)"),
            ("note", "ZAYA1-base, A: 2 answers are empty (1 items)"),
            ("note", "ZAYA1-base, A: something"),
        ]
        assert found["models"][0]["cost"]["truncated_prompts"] == 3

    def test_a_value_that_the_samples_do_not_give(self, tmp_path: Path) -> None:
        run = folders.run(ZAYA, "a", [folders.item(0, 1.0), folders.item(1, 0.0)])
        run["metrics"][0]["value"] = 0.6
        (warning,) = compare(folders.write(tmp_path, [run]))["warnings"]
        assert warning["level"] == "loud"
        assert "the samples give 0.5, but the run says 0.6" in warning["text"]

    def test_reported_figures_are_in_nothing_else(self, tmp_path: Path) -> None:
        runs = [folders.run(ZAYA, "a", [folders.item(0, 1.0)])]
        reported = {"a": {"value": 0.123, "metric": "acc", "source": "paper"}, "z": {"value": 0.9}}
        with_them = folders.write(tmp_path / "x", runs, models={ZAYA: folders.facts(ZAYA, reported=reported)})
        found, without = compare(with_them), compare(folders.write(tmp_path / "y", runs))
        assert found["reported"] == {ZAYA: {"a": reported["a"]}}
        found.pop("reported")
        assert "0.123" not in json.dumps(found)
        assert found["means"] == without["means"]

    def test_cost(self, tmp_path: Path) -> None:
        runs = [folders.run(ZAYA, task, [folders.item(doc, 1.0) for doc in range(10)]) for task in "ab"]
        cost = compare(folders.write(tmp_path, runs))["models"][0]["cost"]
        assert (cost["runs"], cost["items"], cost["tokens_given"], cost["seconds"]) == (2, 20, 4000, 4.0)
        assert cost["tokens_per_second"] == pytest.approx(1600 / 4)


class TestDiscordant:
    def test_both_ways_the_surest_first(self, tmp_path: Path) -> None:
        second = [folders.item(doc, float(doc < 8), loglikelihoods=[0.0, -1.0 - doc]) for doc in range(10)]
        first = [folders.item(doc, float(doc >= 8), loglikelihoods=[0.0, -1.0]) for doc in range(10)]
        found = compare(two(tmp_path, first, second))["discordant"]
        task, overall = found
        assert (task["task"], overall["task"]) == ("hellaswag", None)
        assert [item["doc_id"] for item in task["items"]] == [7, 9, 6, 8, 5]
        assert [item["difference"] for item in task["items"]] == [1, -1, 1, -1, 1]
        assert overall["items"] == task["items"]
        item = task["items"][0]
        assert (item["target"], item["model_answer"], item["baseline_answer"]) == ("four", "four", "six")
        assert item["prompt"].startswith("Question 7:")
        assert not item["hidden"]

    def test_across_tasks_each_has_its_turn(self, tmp_path: Path) -> None:
        runs = [
            folders.run(model, task, [folders.item(doc, score) for doc in range(9)])
            for model, score in ((ZAYA, 0.0), (QWEN, 1.0))
            for task in "abc"
        ]
        overall = compare(folders.write(tmp_path, runs))["discordant"][-1]
        assert [item["task"] for item in overall["items"]] == ["a", "b", "c", "a", "b"]

    def test_long_and_foreign_texts(self, tmp_path: Path) -> None:
        prompt = "начало " + "ü" * 5000 + " the question"
        first = [folders.item(doc, 0.0, prompt=prompt, answer="é" * 3000) for doc in range(2)]
        item = compare(two(tmp_path, first, [1, 1]))["discordant"][0]["items"][1]
        assert item["prompt_cut"]
        assert item["prompt"].endswith(" the question")
        assert (len(item["prompt"]), len(item["baseline_answer"])) == (2000, 2000)

    def test_private_items_have_no_texts(self, tmp_path: Path) -> None:
        hidden = dict.fromkeys(("prompt", "target", "answer", "choices"))
        items = [[folders.item(0, score, **hidden)] for score in (1.0, 0.0)]
        (item,) = compare(two(tmp_path, *items))["discordant"][0]["items"]
        assert item["hidden"]
        assert (
            item["prompt"]
            is item["target"]
            is item["choices"]
            is item["model_answer"]
            is item["baseline_answer"]
            is None
        )
        assert item["difference"] == -1


class TestBrokenFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return two(tmp_path, [1, 0], [0, 1])

    @pytest.mark.parametrize(
        ("file", "text", "message"),
        [
            ("manifest.json", None, "no manifest.json"),
            ("manifest.json", "{", "no whole JSON"),
            ("manifest.json", '{"made_by": "zaya eval", "format": 2}', "in format 1"),
            ("manifest.json", '{"made_by": "zaya eval", "format": 1, "models": []}', "`models` and `runs`"),
            ("samples.jsonl", None, "samples.jsonl is missing"),
            ("samples.jsonl", "", "has no items"),
            ("samples.jsonl", '{"doc_id": 0}\n', "line 1 is no scored item: it has no 'scores'"),
            ("samples.jsonl", '{"doc_id": 0, "sco', "line 1 is no scored item"),
            ("result.json", "[]", "must hold a JSON object"),
            ("result.json", '{"model": "other"}', "is of model 'other'"),
        ],
    )
    def test_one_line(self, folder: Path, file: str, text: str | None, message: str) -> None:
        (path,) = list(folder.glob(f"**/ZAYA*/{file}")) or [folder / file]
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            compare(folder)
        assert "\n" not in str(error.value)

    def test_an_item_twice_or_one_lost(self, folder: Path) -> None:
        (path,) = folder.glob("runs/ZAYA*/samples.jsonl")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(lines[0] * 2)
        with pytest.raises(ValueError, match="an item twice"):
            compare(folder)
        path.write_text(lines[0])
        with pytest.raises(ValueError, match="1 samples, but 2 items"):
            compare(folder)

    def test_no_primary_metric_or_an_unknown_kind(self, folder: Path) -> None:
        (path,) = folder.glob("runs/ZAYA*/result.json")
        result = json.loads(path.read_text())
        for change, message in (({"primary": False}, "one primary metric, but has 0"), ({"kind": "f1"}, "is 'f1'")):
            changed = result | {"metrics": [result["metrics"][0] | change]}
            path.write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=message):
                compare(folder)

    def test_a_run_outside(self, folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["runs"][ZAYA]["hellaswag"] = "../../elsewhere"
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match="has no plain name"):
            compare(folder)

    def test_nothing_finished(self, tmp_path: Path) -> None:
        models = {ZAYA: folders.facts(ZAYA)}
        with pytest.raises(ValueError, match="no finished run yet"):
            compare(folders.write(tmp_path, [], models=models, unfinished=[(ZAYA, "a")]))


def test_realistic(tmp_path: Path) -> None:
    """Four models: every row has its scores, pairs and items, and no model is worse than itself."""
    found = compare(folders.realistic(tmp_path))
    top = [row["id"] for row in found["tasks"] if row["parent"] is None]
    assert top == ["hellaswag", "mmlu", "gsm8k", "wikitext"]
    assert len(found["pairs"]) == 3 * len(top)
    assert all(set(scores) == {row["id"] for row in found["tasks"]} for scores in found["scores"].values())
    for pair in found["pairs"]:
        assert pair["p"] <= pair["p_holm"] <= 1
        assert pair["interval"][0] <= pair["difference"] <= pair["interval"][1]
        assert pair["difference"] == pytest.approx(pair["value"] - pair["baseline_value"])
    assert {mean["id"] for mean in found["means"]} == {"overall", "reasoning", "knowledge", "math"}
    json.dumps(found, allow_nan=False)
