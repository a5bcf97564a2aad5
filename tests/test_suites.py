"""Suites: their files, the traps of lm-eval that they keep clear of, and the tasks made from them."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks._yaml_loader import load_yaml

from local_tasks import entry, items, write_suite, write_tasks
from zaya_hf.evaluation.data import DATASETS
from zaya_hf.evaluation.suite_files import read_suite
from zaya_hf.evaluation.suites import definitions, load_suite, load_tasks, suite_names

NAMES = ("code", "math", "offline", "paper", "quick", "reasoning")
GENERATED = {"output_type": "generate_until"}


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """Loads a suite over own tasks: the tasks' definitions, then the entries."""

    def load(tasks: Mapping[str, Mapping[str, Any]], *entries: Mapping[str, Any], splits: Any = None) -> Any:
        write_tasks(tmp_path / "tasks", tasks, splits=splits)
        return load_suite(write_suite(tmp_path / "own.yaml", *entries))

    return load


# --- the suites that come with the package ---------------------------------------------------------------------------


def test_the_six_suites_are_there_and_agree_on_what_they_share():
    assert suite_names() == list(NAMES)
    settings: dict[str, Any] = {}
    for name in NAMES:
        suite = load_suite(name)
        assert suite.name == name
        for one in suite.entries:
            asked = (one.num_fewshot, one.metric, one.also, dict(one.gen_kwargs), one.items, one.private_items)
            assert settings.setdefault(one.task, asked) == asked, f"{one.task} in {name}"


@pytest.mark.parametrize(
    ("task", "shots", "metric", "items_", "budget", "members"),
    [
        ("mmlu", 5, "acc,none", 14042, None, 57),
        ("mmlu_pro", 5, "exact_match,custom-extract", 12032, 2048, 14),
        ("arc_challenge", 25, "acc_norm,none", 1172, None, 1),
        ("arc_easy", 25, "acc_norm,none", 2376, None, 1),
        ("hellaswag", 10, "acc_norm,none", 10042, None, 1),
        ("winogrande", 5, "acc,none", 1267, None, 1),
        ("piqa", 0, "acc_norm,none", 1838, None, 1),
        ("bbh", 3, "exact_match,get-answer", 6511, 1024, 27),
        ("zaya_gpqa_main", 5, "acc_norm,none", 448, None, 1),
        ("zaya_gpqa_diamond_cot", 0, "exact_match,flexible-extract", 198, 2048, 1),
        ("gsm8k", 5, "exact_match,flexible-extract", 1319, 512, 1),
        ("minerva_math", 4, "math_verify,none", 5000, 1024, 7),
        ("zaya_humaneval", None, "pass@1,run_tests", 164, None, 1),
        ("zaya_mbpp", None, "pass@1,run_tests", 500, None, 1),
    ],
)
def test_the_paper_suite_asks_as_base_models_are_asked(task, shots, metric, items_, budget, members):
    suite = _paper()
    [one] = [one for one in suite.entries if one.task == task]
    assert (one.num_fewshot, one.metric, one.items) == (shots, metric, items_)
    assert one.gen_kwargs.get("max_gen_toks") == budget
    assert len(definitions(suite)[task]) == members
    assert one.group == (task if members > 1 else None)
    assert one.private_items == ("gpqa" in task)
    assert one.unsafe_code == (one.ability == "code")


@cache
def _paper() -> Any:
    return load_suite("paper")


def test_gsm8k_reports_both_filters_and_the_lenient_one_counts():
    [gsm8k] = [one for one in _paper().entries if one.task == "gsm8k"]
    assert gsm8k.also == ("exact_match,strict-match",)


def test_every_ability_is_in_the_paper_suite():
    assert {one.ability for one in _paper().entries} == {"reasoning", "knowledge", "math", "code"}


def test_the_offline_suite_knows_how_many_items_there_are():
    """Of what is fetched by the table of what can be, of what is made here by making it."""
    suite = load_suite("offline")
    found = definitions(suite)
    made = []
    for one in suite.entries:
        [leaf] = found[one.task]
        name = (leaf.config.get("dataset_kwargs") or {}).get("name")
        if name is None:
            made.append(one)
        else:
            assert DATASETS[name].items == one.items, one.task
    assert {one.task for one in made} == {"zaya_math_generated", "zaya_logic_generated"}
    for loaded in load_tasks(replace(suite, entries=tuple(made))):
        assert loaded.items == loaded.entry.items, loaded.leaf_name


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_fewshots": 5}, "entry 1 (sums): unknown key num_fewshots; did you mean num_fewshot?"),
        ({"gen_kwargs": {"max_new_tokens": 5}}, "gen_kwargs: unknown key max_new_tokens"),
        ({"gen_kwargs": {"max_gen_toks": "many"}}, "gen_kwargs.max_gen_toks is 'many'; expected a whole number"),
        ({"gen_kwargs": {"until": "\n"}}, "gen_kwargs.until is '\\n'; expected a list of texts"),
        ({"ability": "maths"}, "ability is 'maths'; expected one of"),
        ({"metric": "acc"}, "metric is 'acc'; expected \"NAME,FILTER\""),
        ({"items": 0}, "items is 0; expected a whole number of at least 1"),
        ({"num_fewshot": True}, "num_fewshot is True; expected a whole number"),
        ({"num_fewshot": -1}, "num_fewshot is -1; expected a whole number of at least 0"),
        ({"chance": 1}, "chance is 1; expected a number"),
        ({"private_items": "no"}, "private_items is 'no'; expected true or false"),
        ({"title": None}, "title is missing"),
        ({"prompt_tokens": None}, "prompt_tokens is missing"),
        ({"group": "x"}, "unknown key group"),
    ],
)
def test_a_wrong_entry_is_one_line_that_says_what_would_be_right(tmp_path, changes, message):
    file = write_suite(tmp_path / "own.yaml", entry("sums", **changes))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_suite(file)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "line 2: name is there twice"),
        ("entries: [", "no YAML"),
        ("- a\n", "expected keys and values"),
        ("name: a\ntitle: b\ndescription: c\nentries: []\n", "expected a list of tasks"),
        ("name: a b\ntitle: b\ndescription: c\nentries: []\n", "name is 'a b'"),
        ("name: a\ntitle: b\ndescription: c\nentry: []\n", "unknown key entry; did you mean entries?"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_suite(file)
    assert "\n" not in str(raised.value)


def test_an_unknown_name_and_a_missing_file_and_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no suite 'papers'; there are code, .*; did you mean paper\?"):
        load_suite("papers")
    with pytest.raises(ValueError, match=r"no suite file nowhere/x\.yaml"):
        load_suite("nowhere/x.yaml")
    file = write_suite(tmp_path / "own.yaml", entry("sums"), task_folders=["gone"])
    with pytest.raises(ValueError, match=r"task_folders: there is no folder .*gone"):
        load_suite(file)


def test_a_task_that_comes_twice_or_does_not_exist(own):
    with pytest.raises(ValueError, match="sums is there twice"):
        own({"sums": {}}, entry("sums"), entry("sums"))
    with pytest.raises(ValueError, match=r"suite own: there is no task summs.*; did you mean sums\?"):
        own({"sums": {}}, entry("summs"))


# --- traps of lm-eval -------------------------------------------------------------------------------------------------


def test_overlapping_groups_are_named(own, tmp_path):
    with pytest.raises(ValueError, match="sums is part of both both and sums"):
        own({"sums": {}, "both": {"task": ["sums"]}}, entry("both"), entry("sums"))
    file = write_suite(tmp_path / "own.yaml", entry("mmlu"), entry("mmlu_anatomy"))
    with pytest.raises(ValueError, match="mmlu_anatomy is part of both mmlu and mmlu_anatomy"):
        load_suite(file)


@pytest.mark.parametrize("task", ["gsm8k", "minerva_math500"])
def test_an_answer_budget_that_nobody_gave_is_an_error(tmp_path, task):
    metric = "exact_match,flexible-extract" if task == "gsm8k" else "exact_match,none"
    without = write_suite(tmp_path / "own.yaml", entry(task, metric=metric))
    with pytest.raises(ValueError, match=f"{task}: no max_gen_toks.* at 256 tokens"):
        load_suite(without)
    load_suite(write_suite(tmp_path / "own.yaml", entry(task, metric=metric, gen_kwargs={"max_gen_toks": 1024})))


def test_settings_of_generation_on_a_task_that_generates_nothing(own):
    with pytest.raises(ValueError, match="sums: gen_kwargs are for generated answers"):
        own({"sums": {}}, entry("sums", gen_kwargs={"max_gen_toks": 5}))


FIXED = {"sampler": "first_n", "samples": items(2, first=20)}


@pytest.mark.parametrize(
    ("task", "shots", "message"),
    [
        ({"num_fewshot": 0}, 5, "num_fewshot is 5, but the task's file says 0"),
        ({"fewshot_split": "-", "fewshot_config": FIXED, "num_fewshot": 2}, 1, "num_fewshot is 1, .* 2 fixed examples"),
        ({"fewshot_split": "-", "fewshot_config": FIXED}, 3, "num_fewshot is 3, but the task's file has 2 examples"),
        ({"fewshot_split": "-"}, 1, r"from the split that is evaluated \(test\), the item that is asked among them"),
    ],
)
def test_examples_that_a_task_does_not_take_are_refused(own, task, shots, message):
    with pytest.raises(ValueError, match=message):
        own({"sums": task}, entry("sums", num_fewshot=shots))


@pytest.mark.parametrize(
    ("task", "asked", "shots"),
    [
        ({}, None, 0),  # neither says anything
        ({"num_fewshot": 2}, None, 2),
        ({"num_fewshot": 2}, 1, 1),
        ({"num_fewshot": 2}, 0, 0),
        ({"num_fewshot": 0}, 0, 0),
        ({}, 3, 3),
        ({"fewshot_split": "-", "fewshot_config": FIXED, "num_fewshot": 2}, 2, 2),
        ({"fewshot_split": "-", "fewshot_config": FIXED}, 1, 1),
        ({"fewshot_split": "test"}, 2, 2),  # lm-eval leaves out the item that is asked
    ],
)
def test_the_number_of_examples_in_real_prompts(own, task, asked, shots):
    [loaded] = load_tasks(own({"sums": task}, entry("sums", num_fewshot=asked)))
    assert loaded.task_object.config.num_fewshot == shots
    for document in loaded.task_object.task_docs:
        prompt = loaded.task_object.fewshot_context(document, loaded.task_object.config.num_fewshot)
        assert prompt.count("=") == shots + 1
        assert prompt.count(document["question"]) == 1, "an item is among its own examples"


def test_settings_of_generation_are_laid_over_those_of_the_task(own):
    suite = own(
        {"sums": GENERATED}, entry("sums", metric="exact_match,none", gen_kwargs={"max_gen_toks": 99, "top_p": 0.5})
    )
    [loaded] = load_tasks(suite)
    assert loaded.task_object.config.generation_kwargs == {"until": ["\n"], "max_gen_toks": 99, "top_p": 0.5}


def test_a_metric_that_the_task_lacks(own):
    filters = [{"name": "strict-match", "filter": [{"function": "take_first"}]}]
    with pytest.raises(ValueError, match="sums has no metric acc_norm,none; it has acc,none"):
        own({"sums": {}}, entry("sums", metric="acc_norm,none"))
    with pytest.raises(ValueError, match="no metric exact_match,none; it has exact_match,strict-match"):
        own({"sums": {**GENERATED, "filter_list": filters}}, entry("sums", metric="exact_match,none"))


class _Says(LM):
    """Answers every request with one text."""

    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def generate_until(self, requests: Any) -> list[str]:
        return [self._text for _ in requests]

    def loglikelihood(self, requests: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize(("text", "strict", "flexible"), [("#### 2", 1.0, 1.0), ("1 and 1, so 2", 0.0, 1.0)])
def test_two_filters_are_two_scores(own, text, strict, flexible):
    """The second answer was cut off before its conclusion: its last number counts for one filter only."""
    last = {"function": "take_first"}
    marked, any_number = {"regex_pattern": r"#### (\d+)"}, {"regex_pattern": r"(\d+)", "group_select": -1}
    filters = [
        {"name": "strict-match", "filter": [{"function": "regex", **marked}, last]},
        {"name": "flexible-extract", "filter": [{"function": "regex", **any_number}, last]},
    ]
    keys = ("exact_match,strict-match", "exact_match,flexible-extract")
    suite = own({"sums": {**GENERATED, "filter_list": filters}}, entry("sums", metric=keys[1], also=[keys[0]]))
    [loaded] = load_tasks(suite, limit=2)
    found = evaluate(_Says(text), {"tasks": {"sums": loaded.task_object}}, limit=2, bootstrap_iters=0)
    # Of the items 0 + 0 and 1 + 1 the answer 2 is right for one.
    assert [found["results"]["sums"][key] for key in keys] == [strict / 2, flexible / 2]


def test_lm_evals_own_gpqa_is_refused_with_the_name_of_ours(tmp_path):
    file = write_suite(tmp_path / "own.yaml", entry("gpqa_main_n_shot"))
    with pytest.raises(ValueError, match=r"shuffles its choices anew.*zaya_gpqa_main"):
        load_suite(file)


# --- GPQA -------------------------------------------------------------------------------------------------------------


def _gpqa(count: int = 12) -> list[dict[str, Any]]:
    wrong = {f"Incorrect Answer {k}": f" wrong  {k} [title] " for k in (1, 2, 3)}
    return [{"Question": f"Question {n}?", "Correct Answer": f"right {n}", **wrong} for n in range(count)]


@pytest.fixture
def process() -> Any:
    [leaf] = definitions(_paper())["zaya_gpqa_diamond_cot"]
    return load_yaml(leaf.file)["process_docs"]


def test_gpqa_choices_are_in_the_same_order_whatever_was_drawn_before(process):
    random.seed(1)
    first = process(Dataset.from_list(_gpqa()))
    random.seed(2)
    random.random()
    # Fewer documents in another order: it is the question that decides.
    second = process(Dataset.from_list(_gpqa()[::-2]))
    by_question = {item["question"]: item for item in first}
    assert all(by_question[item["question"]] == item for item in second)
    assert len({item["answer"] for item in first}) > 1, "the right answer must not always be in one place"


def test_gpqa_answers_are_right_and_texts_cleaned(process):
    same = {**_gpqa(1)[0], "Question": "Twice the same?", "Incorrect Answer 1": "right 0"}
    for item in process(Dataset.from_list([*_gpqa(), same])):
        assert item["choices"] == [item[f"choice{k}"] for k in (1, 2, 3, 4)]
        assert item["choices"]["ABCD".index(item["answer"][1])].startswith("right")
        assert {"wrong 2.", "wrong 3."} <= {text.strip() for text in item["choices"]}


def test_gpqa_orders_are_pinned(process):
    """A change of these would be another benchmark, so the right values are written down."""
    assert [item["answer"] for item in process(Dataset.from_list(_gpqa(8)))] == PINNED


PINNED = [f"({letter})" for letter in "ACCDDDDD"]


def test_gpqa_never_shows_an_item_among_its_own_examples(monkeypatch, tmp_path):
    splits = {"train": Dataset.from_list(_gpqa())}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    file = write_suite(tmp_path / "own.yaml", entry("zaya_gpqa_main", metric="acc_norm,none", num_fewshot=5))
    state = random.getstate()
    [loaded] = load_tasks(load_suite(file))
    assert random.getstate() == state
    task = loaded.task_object
    for document in task.task_docs:
        prompt = task.fewshot_context(document, 5)
        assert prompt.count("Question: Question ") == 6
        assert prompt.count(f"Question: {document['question']}\n") == 1


# --- loading ----------------------------------------------------------------------------------------------------------


def test_groups_load_as_their_members_in_the_order_of_the_suite(own):
    tasks = {"one": {}, "two": {}, "alone": {}, "pair": {"task": ["two", "one"]}}
    loaded = load_tasks(own(tasks, entry("pair", items=8), entry("alone", limit=3)), limit=None)
    assert [(one.leaf_name, one.group, one.limit, one.items) for one in loaded] == [
        ("two", "pair", None, 4),
        ("one", "pair", None, 4),
        ("alone", None, 3, 3),
    ]
    assert [one.entry.group for one in loaded] == ["pair", "pair", None]


@pytest.mark.parametrize(
    ("asked", "of_entry", "items_"), [(2, None, 2), (None, 3, 3), (2, 3, 2), (3, 2, 2), (9, None, 4)]
)
def test_the_smaller_limit_counts(own, asked, of_entry, items_):
    [loaded] = load_tasks(own({"sums": {}}, entry("sums", limit=of_entry)), limit=asked)
    assert loaded.items == items_
    with pytest.raises(ValueError, match="limit is 0, but it must be at least 1"):
        load_tasks(read_suite("offline"), limit=0)


@pytest.fixture
def hashes(tmp_path: Path) -> Any:
    """Both hashes of one task in a folder of its own, whose functions may be changed."""
    count = 0

    def load(
        task: Mapping[str, Any], *, splits: Any = None, limit: Any = None, functions: Any = None, **own: Any
    ) -> Any:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        tasks = write_tasks(folder / "tasks", {"sums": task}, splits=splits)
        if functions:
            file = tasks / "functions.py"
            file.write_text(file.read_text().replace(*functions))
        [loaded] = load_tasks(load_suite(write_suite(folder / "own.yaml", entry("sums", **own))), limit=limit)
        shutil.rmtree(folder)
        return loaded.task_hash, loaded.data_hash

    return load


def test_the_definition_hash_changes_with_what_moves_a_number_and_not_with_the_place(hashes):
    usual = hashes({"doc_to_text": "shout"})
    assert hashes({"doc_to_text": "shout"}) == usual  # another folder
    others = [
        hashes({}),
        hashes({"doc_to_text": "shout"}, functions=("upper", "title")),
        hashes({"doc_to_text": "shout"}, num_fewshot=1),
        hashes({"doc_to_text": "shout", "description": "Add."}),
        hashes({"doc_to_text": "shout", "fewshot_config": {"sampler": "first_n"}}),
        hashes({**GENERATED}, metric="exact_match,none"),
        hashes({**GENERATED}, metric="exact_match,none", gen_kwargs={"max_gen_toks": 9}),
    ]
    assert len({task for task, _ in [usual, *others]}) == len(others) + 1


def test_the_data_hash_covers_the_documents_used_and_no_others(hashes):
    def splits(test: Any, train: Any) -> dict[str, Any]:
        return {"test": test, "train": train}

    usual = hashes({}, splits=splits(items(4), items(3, first=10)))[1]
    assert hashes({}, splits=splits(items(4)[::-1], items(3, first=10)))[1] != usual
    # Without examples their pool does not count; with them it does, in its order.
    assert hashes({}, splits=splits(items(4), items(3, first=20)))[1] == usual
    shots = [hashes({}, num_fewshot=1, splits=splits(items(4), pool))[1] for pool in (items(3), items(3)[::-1])]
    assert len({usual, *shots}) == 3
    # Documents beyond the limit are not used.
    cut = [hashes({}, limit=2, splits=splits(test, items(3)))[1] for test in (items(4), items(2))]
    assert cut[0] == cut[1] != usual


def test_items_that_cannot_be_loaded_are_one_line_with_the_task(own):
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "/nowhere.json"}}}
    suite = own({"sums": files}, entry("sums"))
    with pytest.raises(ValueError, match=r"sums: its items cannot be loaded: .*nowhere") as raised:
        load_tasks(suite)
    assert "\n" not in str(raised.value)
