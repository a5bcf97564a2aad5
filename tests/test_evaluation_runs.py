"""`zaya eval`'s runs: what they write, what is done again and what is not, and what a killed one leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation_runs import ENTRIES, Bench, bench, read, write_model, write_suite
from zaya_hf import owned_folders
from zaya_hf.evaluation.run_results import jsonable

__all__ = ["bench"]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path / "suite")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "one")


def manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    return found


def contents(out: Path) -> dict[str, Any]:
    """What the runs of a folder found, without what differs from one time to the next."""
    found: dict[str, Any] = {}
    for file in sorted((out / "runs").rglob("*.json*")):
        name = file.relative_to(out).as_posix()
        if file.name == "result.json":
            result = json.loads(file.read_text(encoding="utf-8"))
            for key in ("finished", "resumed", "seconds", "counts"):
                del result[key]
            found[name] = result
        else:
            found[name] = file.read_text(encoding="utf-8")
    return found


class TestResults:
    def test_a_folder_has_a_manifest_and_a_run_for_each_task(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        assert bench.evaluate(suite, [f"a={model}"], out, token_budget=64) == []
        told = manifest(out)
        assert (told["made_by"], told["format"], told["limit"], told["baseline"]) == ("zaya eval", 1, None, None)
        assert told["suite"]["name"] == "fakes"
        assert [entry["task"] for entry in told["suite"]["entries"]] == list(ENTRIES)
        assert told["models"]["a"]["family"] == "llama"
        assert told["versions"]["lm-eval"]
        assert told["code_execution"]["allowed"] is False
        assert told["command"][:3] == ["zaya", "eval", "--suite"]
        assert told["command"][-2:] == ["--token-budget", "64"]
        assert set(told["runs"]["a"]) == set(ENTRIES)
        for task, name in told["runs"]["a"].items():
            assert name.startswith(f"a--{task}--")
            assert {path.name for path in (out / "runs" / name).iterdir()} == {
                "key.json",
                "result.json",
                "samples.jsonl",
            }
        assert bench.said[0] == "3 runs: 0 are there, 3 to do"
        assert "a: 1 of 3: fake_choice: acc_norm" in bench.said[2]

    def test_choices(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        result, samples = read(tmp_path / "out", "a", "fake_choice")
        assert (result["model"], result["title"], result["ability"], result["group"]) == (
            "a",
            "Choices",
            "reasoning",
            None,
        )
        assert (result["num_fewshot"], result["items"], result["warnings"]) == (2, 6, [])
        assert result["counts"]["requests"] == 12
        by_name = {metric["metric"]: metric for metric in result["metrics"]}
        assert [by_name[name]["primary"] for name in ("acc", "acc_norm")] == [False, True]
        assert {(metric["kind"], metric["chance"]) for metric in result["metrics"]} == {("binary", 0.5)}
        assert [sample["doc_id"] for sample in samples] == list(range(6))
        assert [sample["cluster"] for sample in samples] == ["a", "b"] * 3
        for sample in samples:
            assert sample["choices"] == [" yes", " no way"]
            assert sample["target"] == sample["choices"][sample["doc_id"] % 2]
            assert sample["prompt"].count("Example") == 2
            assert f"SECRET {sample['doc_id']}?" in sample["prompt"]
            first, second = sample["loglikelihoods"]
            # By the length of the choices without the space before them: 3 and 6.
            assert sample["answer"] == sample["choices"][int(second / 6 > first / 3)]
            assert sample["scores"] == {
                "acc,none": float((second > first) == (sample["doc_id"] % 2 == 1)),
                "acc_norm,none": float(sample["answer"] == sample["target"]),
            }
            assert sample["truncated"] is False
        scores = [sample["scores"]["acc,none"] for sample in samples]
        share = sum(scores) / 6
        assert by_name["acc"]["value"] == pytest.approx(share)
        assert by_name["acc"]["stderr"] == pytest.approx((share * (1 - share) / 5) ** 0.5)

    def test_answers_with_two_filters(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        result, samples = read(tmp_path / "out", "a", "fake_sums")
        assert [(m["filter"], m["primary"], m["kind"], m["chance"]) for m in result["metrics"]] == [
            ("strict", False, "binary", None),
            ("loose", True, "binary", None),
        ]
        assert result["settings"]["gen_kwargs"] == {"until": ["\n"], "max_gen_toks": 8}
        assert len(samples) == 5
        strict = 0
        for sample in samples:
            right = str(sample["doc_id"] + 1)
            assert sample["answer"] in (right, f" is {right}")
            assert (sample["target"], sample["choices"], sample["loglikelihoods"]) == (right, None, None)
            strict += sample["answer"] == right
            assert sample["scores"] == {
                "exact_match,strict": float(sample["answer"] == right),
                "exact_match,loose": 1.0,
            }
        assert 0 < strict < 5
        assert [metric["value"] for metric in result["metrics"]] == pytest.approx([strict / 5, 1])

    def test_texts(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        result, samples = read(tmp_path / "out", "a", "fake_prose")
        bits, words = (
            next(m for m in result["metrics"] if m["metric"] == name) for name in ("bits_per_byte", "word_perplexity")
        )
        assert (bits["kind"], bits["higher_is_better"], bits["stderr"]) == ("bits_per_byte", False, None)
        assert words["kind"] == "perplexity"
        pairs = [sample["scores"]["bits_per_byte,none"] for sample in samples]
        assert [size for _, size in pairs] == [len("word ") * (n + 2) for n in range(3)]
        nats = sum(nat for nat, _ in pairs)
        assert nats > 0
        assert bits["value"] == pytest.approx(nats / sum(size for _, size in pairs) / 0.6931471805599453)
        assert samples[0]["scores"]["word_perplexity,none"][0] == pairs[0][0]

    def test_what_is_no_number_is_null_and_said(
        self, bench: Bench, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        loud = bench.evaluate(suite, [f"a={write_model(tmp_path / 'm', 'nan')}"], tmp_path / "out")
        result, samples = read(tmp_path / "out", "a", "fake_prose")
        assert [metric["value"] for metric in result["metrics"]] == [None, None]
        assert samples[0]["scores"]["bits_per_byte,none"] == [None, 10]
        assert "a, fake_prose: bits_per_byte,none is no finite number for 3 items" in loud
        choice, lines = read(tmp_path / "out", "a", "fake_choice")
        assert lines[0]["loglikelihoods"] == [None, None]
        assert lines[0]["answer"] is None
        assert choice["items"] == 6

    def test_answers_that_were_cut_are_loud(self, bench: Bench, suite: Path, tmp_path: Path) -> None:
        loud = bench.evaluate(suite, [f"a={write_model(tmp_path / 'm', 'long')}"], tmp_path / "out")
        assert loud == ["a, fake_sums: 5 of 5 answers were cut at their budget (max_gen_toks in the suite)"]
        _, samples = read(tmp_path / "out", "a", "fake_sums")
        assert all(sample["truncated"] for sample in samples)
        # Also when nothing is left to do.
        assert bench.evaluate(suite, [f"a={tmp_path / 'm'}"], tmp_path / "out") == loud

    def test_a_budget_that_leaves_prompts_no_room_is_halved_for_that_model(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        bench.max_lengths = {"small": 8, "other": 9}
        loud = bench.evaluate(suite, [f"small={model}", f"other={model}"], tmp_path / "out")
        assert loud == ["small, fake_sums: answers end after 4 tokens, not 8: max_length is 8"]
        budgets = {
            name: read(tmp_path / "out", name, "fake_sums")[0]["settings"]["gen_kwargs"]["max_gen_toks"]
            for name in ("small", "other")
        }
        assert budgets == {"small": 4, "other": 8}
        assert bench.budgets == [4] * 5 + [8] * 5

    def test_texts_of_private_items_are_nowhere(self, bench: Bench, model: Path, tmp_path: Path) -> None:
        entries = {"fake_choice": ENTRIES["fake_choice"] | {"private_items": True}}
        out = tmp_path / "out"
        bench.evaluate(write_suite(tmp_path / "suite", entries), [f"a={model}"], out)
        _, samples = read(out, "a", "fake_choice")
        assert all(sample[name] is None for sample in samples for name in ("prompt", "target", "answer", "choices"))
        assert len({sample["doc_hash"] for sample in samples}) == 6
        assert not any("SECRET" in file.read_text(encoding="utf-8") for file in out.rglob("*") if file.is_file())

    def test_a_limit(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out", limit=2)
        result, samples = read(tmp_path / "out", "a", "fake_choice")
        assert (result["items"], len(samples), manifest(tmp_path / "out")["limit"]) == (2, 2, 2)


class TestAgain:
    def test_nothing_is_done_twice(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}"], out)
        before, created = contents(out), manifest(out)["created"]
        bench.evaluate(suite, [f"a={model}"], out)
        assert (bench.loaded, bench.requests) == ([], [])
        assert bench.said == ["3 runs: 3 are there, 0 to do"]
        assert contents(out) == before
        assert manifest(out)["created"] == created
        assert manifest(out)["models"]["a"]["family"] == "llama"

    @pytest.mark.parametrize("requests", [0, 5, 12, 14, 19])
    def test_a_stopped_evaluation_is_finished_and_equals_one_that_was_not(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path, requests: int
    ) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "whole")
        bench.stop_after = requests
        with pytest.raises(KeyboardInterrupt):
            bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        done = len(list((tmp_path / "out" / "runs").rglob("result.json")))
        assert done == (requests >= 12) + (requests >= 17)
        assert len(manifest(tmp_path / "out")["runs"].get("a", {})) == done
        bench.stop_after = None
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        assert bench.said[0] == f"3 runs: {done} are there, {3 - done} to do"
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        assert not list((tmp_path / "out").rglob("journal"))

    def test_two_models_share_no_answer(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        other = write_model(tmp_path / "two", "2")
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}", f"b={other}", f"same={model}"], out)
        assert bench.loaded == ["a", "b", "same"]
        assert len(bench.requests) == 3 * 20
        found = {name: read(out, name, "fake_choice")[1] for name in ("a", "b", "same")}
        likelihoods = {name: [line["loglikelihoods"] for line in lines] for name, lines in found.items()}
        assert likelihoods["a"] == likelihoods["same"] != likelihoods["b"]
        # The same examples in the prompts, although they are drawn.
        prompts = [[line["prompt_hash"] for line in lines] for lines in found.values()]
        assert prompts[0] == prompts[1] == prompts[2]
        assert len(list((out / "runs").iterdir())) == 9
        assert list(manifest(out)["models"]) == ["a", "b", "same"]

    def test_changed_weights_are_another_model(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}"], out)
        old = manifest(out)["runs"]["a"]
        write_model(model, "2")
        small = write_suite(tmp_path / "suite", {"fake_prose": ENTRIES["fake_prose"]}, "small")
        bench.evaluate(small, [f"a={model}"], out)
        assert bench.said[0].startswith("3 earlier results are of other settings, weights or versions")
        new = manifest(out)["runs"]["a"]
        assert list(new) == ["fake_prose"]  # the others are of weights that are no more
        assert new["fake_prose"] != old["fake_prose"]
        assert all((out / "runs" / name / "result.json").is_file() for name in [*old.values(), *new.values()])
        write_model(model, "1")
        bench.evaluate(suite, [f"a={model}"], out)
        assert bench.requests == []
        assert manifest(out)["runs"]["a"] == old

    def test_the_name_of_a_folder_is_no_part_of_it(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        moved = model.rename(tmp_path / "moved")
        bench.evaluate(suite, [f"a={moved}"], tmp_path / "out", token_budget=17)
        assert bench.requests == []

    @pytest.mark.parametrize("change", [{"limit": 2}, {"seed": 3}, {"max_length": 99}, {"dtype": "bfloat16"}])
    def test_what_moves_a_number_is_another_run(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        bench.evaluate(suite, [f"a={model}"], tmp_path / "out", **change)
        assert bench.said[1] == "3 runs: 0 are there, 3 to do"
        assert len(list((tmp_path / "out" / "runs").iterdir())) == 6

    def test_a_seed_draws_other_examples(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        prompts = []
        for seed in (None, 3):
            bench.evaluate(suite, [f"a={model}"], tmp_path / "out", seed=seed)
            prompts.append([line["prompt_hash"] for line in read(tmp_path / "out", "a", "fake_choice")[1]])
        assert prompts[0] != prompts[1]

    def test_results_under_other_settings_are_not_shown_beside(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        """Model a with 2 examples in the prompt, then model b with 1: a's result is not one to compare b's with."""
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}"], out)
        fewer = {"fake_choice": ENTRIES["fake_choice"] | {"num_fewshot": 1}}
        bench.evaluate(write_suite(tmp_path / "suite", fewer), [f"b={write_model(tmp_path / 'two', '2')}"], out)
        assert {name: list(runs) for name, runs in manifest(out)["runs"].items()} == {
            "a": ["fake_sums", "fake_prose"],
            "b": ["fake_choice"],
        }

    def test_a_second_suite_and_model_join(self, bench: Bench, model: Path, tmp_path: Path) -> None:
        out, folder = tmp_path / "out", tmp_path / "suite"
        names = list(ENTRIES)
        first = write_suite(folder, {name: ENTRIES[name] for name in names[:2]}, "first")
        second = write_suite(folder, {name: ENTRIES[name] for name in names[1:]}, "second")
        bench.evaluate(first, [f"a={model}"], out)
        bench.evaluate(second, [f"b={write_model(tmp_path / 'two', '2')}", f"a={model}"], out)
        told = manifest(out)
        assert told["suite"]["name"] == "second + first"
        assert [entry["task"] for entry in told["suite"]["entries"]] == ["fake_sums", "fake_prose", "fake_choice"]
        assert {name: set(runs) for name, runs in told["runs"].items()} == {"a": set(names), "b": set(names[1:])}
        assert list(told["models"]) == ["b", "a"]

    def test_a_new_title_or_metric_needs_no_new_run(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}"], out)
        changed = {"fake_choice": ENTRIES["fake_choice"] | {"title": "New", "metric": "acc,none"}}
        bench.evaluate(write_suite(tmp_path / "suite", changed), [f"a={model}"], out)
        assert bench.requests == []
        result, _ = read(out, "a", "fake_choice")
        assert result["title"] == "New"
        assert [metric["primary"] for metric in result["metrics"]] == [True, False]

    def test_beginning_again(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        bench.evaluate(suite, [f"a={model}"], out)
        bench.stop_after = 13
        with pytest.raises(KeyboardInterrupt):
            bench.evaluate(suite, [f"a={model}"], out, resume=False)
        assert set(manifest(out)["runs"]["a"]) == {"fake_choice"}
        bench.stop_after = None
        bench.evaluate(suite, [f"a={model}"], out)
        aside = [path for path in (out / "runs").iterdir() if path.name.endswith("--earlier-1")]
        assert len(aside) == 3
        assert set(manifest(out)["runs"]["a"]) == set(ENTRIES)


class TestRefused:
    def test_a_foreign_folder(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
        with pytest.raises(ValueError, match="is not the folder of an earlier evaluation: choose another --out"):
            bench.evaluate(suite, [f"a={model}"], tmp_path)
        assert bench.loaded == []

    @pytest.mark.parametrize(
        ("text", "said"),
        [("{", "cannot be read"), ("[]", "no JSON object"), ('{"made_by": "x"}', "not of this version of zaya eval")],
    )
    def test_a_broken_manifest(
        self, bench: Bench, suite: Path, model: Path, tmp_path: Path, text: str, said: str
    ) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            bench.evaluate(suite, [f"a={model}"], tmp_path / "out")
        assert bench.loaded == []

    def test_two_processes_in_one_folder(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        hold = (
            f"import runpy, sys\nowned = runpy.run_path({owned_folders.__file__!r})['owned']\n"
            f"from pathlib import Path\nwith owned(Path({str(out)!r}), '.zaya-eval', foreign='', busy=''):\n"
            "    print('held', flush=True)\n    sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="another process evaluates in"):
                bench.evaluate(suite, [f"a={model}"], out)
            holder.communicate("")
        bench.evaluate(suite, [f"a={model}"], out)

    def test_a_baseline_that_is_no_model(self, bench: Bench, suite: Path, model: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="--baseline b: it is none of the models: a"):
            bench.evaluate(suite, [f"a={model}"], tmp_path / "out", baseline="b")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("manifest.json", '{"made_by": "zaya eval", "format": 1, "models": [1]}', "delete it, and the same command"),
        ("runs/*/result.json", "{}", "has no model, .*metrics, .*; delete the folder"),
        ("runs/*/result.json", '{"cut', "cannot be read.*; delete the folder"),
        ("runs/*/key.json", "[]", "holds no JSON object; delete the folder"),
    ],
)
def test_of_a_file_that_is_broken_it_is_said_what_to_do(
    file: str, content: str, message: str, bench: Bench, suite: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    bench.evaluate(suite, [f"a={model}"], out)
    before = contents(out)
    broken = sorted(out.glob(file))[0]
    broken.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        bench.evaluate(suite, [f"a={model}"], out)
    broken.unlink() if file == "manifest.json" else shutil.rmtree(broken.parent)
    bench.evaluate(suite, [f"a={model}"], out)
    assert contents(out) == before


def test_values_of_other_libraries_become_plain() -> None:
    import numpy as np
    import torch

    value = {
        1: np.float32(0.5),
        "bf16": torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
        "nan": float("nan"),
        "flag": np.bool_(True),
        "set": {"b", "a"},
        "path": Path("x"),
    }
    plain = {"1": 0.5, "bf16": [1.5, None], "nan": None, "flag": True, "set": ["a", "b"], "path": "x"}
    assert jsonable(value) == plain
    json.dumps(jsonable(value), allow_nan=False)
