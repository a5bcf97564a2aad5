"""The key of a run: what is in it, what is not, and that it tells things apart."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from zaya_hf.evaluation.models import ModelSpec
from zaya_hf.evaluation.run_key import Seeds, device_kind, digest, model_part, run_key, software_part, task_part

SPEC = ModelSpec(name="one", title="One", path="/some/folder")
PRINT = {"kind": "folder", "sha256": "f" * 64, "files": []}


def task(**changes: Any) -> Any:
    """A loaded task, as far as the key reads it."""
    values = {
        "num_fewshot": 5,
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "task_hash": "definition",
        "data_hash": "data",
        "limit": None,
        "cluster_by": None,
        "private_items": False,
        "title": "Title",
    } | changes
    names = ("num_fewshot", "generation_kwargs")
    return SimpleNamespace(
        leaf_name="leaf",
        entry=SimpleNamespace(**{name: values[name] for name in ("cluster_by", "private_items", "title")}),
        task_object=SimpleNamespace(config=SimpleNamespace(**{name: values[name] for name in names})),
        **{name: values[name] for name in ("task_hash", "data_hash", "limit")},
    )


def key(
    spec: ModelSpec = SPEC,
    fingerprint: dict[str, Any] = PRINT,
    seeds: Seeds | None = None,
    software: dict[str, Any] | None = None,
    **changes: Any,
) -> str:
    part = task_part(task(**changes), seeds or Seeds())
    return run_key(model_part(spec, fingerprint), part, software or software_part("cpu")).sha256


def test_the_same_has_the_same_key() -> None:
    assert key() == key()
    assert key(generation_kwargs={"max_gen_toks": 8, "until": ["\n"]}) == key()  # the order of settings is nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": replace(SPEC, name="two")},
        {"spec": replace(SPEC, dtype="bfloat16")},
        {"spec": replace(SPEC, bos="none")},
        {"spec": replace(SPEC, max_length=99)},
        {"spec": replace(SPEC, chat_template=True)},
        {"spec": replace(SPEC, chat_template=True, thinking={"start": "<t>", "end": "</t>"})},
        {"spec": replace(SPEC, revision="main")},
        {"fingerprint": PRINT | {"sha256": "e" * 64}},
        {"fingerprint": PRINT | {"commit": "c" * 40}},
        {"seeds": Seeds.all(1)},
        {"software": software_part("cpu") | {"torch": "0"}},
        {"software": software_part("cpu") | {"lm-eval": "0"}},
        {"software": software_part("cpu") | {"device": "another"}},
        {"num_fewshot": 4},
        {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 9}},
        {"task_hash": "other"},
        {"data_hash": "other"},
        {"limit": 3},
        {"cluster_by": "task"},
        {"private_items": True},
    ],
)
def test_what_moves_a_number_changes_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


@pytest.mark.parametrize(
    "changes",
    [{"spec": replace(SPEC, path="/elsewhere")}, {"spec": replace(SPEC, title="Another")}, {"title": "Another"}],
)
def test_what_moves_none_does_not(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


def test_the_folder_names_model_and_task_and_is_a_plain_name() -> None:
    model = model_part(SPEC, PRINT) | {"name": "org/very long" + "x" * 200}
    found = run_key(model, task_part(task(), Seeds()) | {"name": "a task:1"}, software_part("cpu"))
    assert found.folder.endswith(f"--a_task_1--{found.sha256[:12]}")
    assert found.folder.startswith("org_very_longxxx")
    assert len(found.folder) < 100
    assert found.parts["model"]["name"] == model["name"]


def test_software_names_what_computes_and_the_device() -> None:
    part = software_part(None)
    assert {"zaya_hf", "torch", "transformers", "tokenizers", "lm-eval", "datasets", "device"} == set(part)
    assert device_kind("cpu") == "cpu"


def test_seeds_are_those_of_lm_eval_unless_one_is_given() -> None:
    assert Seeds.all(None) == Seeds(0, 1234, 1234, 1234)
    assert Seeds.all(7) == Seeds(7, 7, 7, 7)


def test_a_digest_is_of_json_alone() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    with pytest.raises(ValueError):
        digest({"a": float("nan")})
    with pytest.raises(TypeError):
        digest({"a": {1}})
