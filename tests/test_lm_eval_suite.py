"""lm-eval during training: the run's own items, scores that agree with the held-out loss, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from token_folders import written
from zaya_hf import ZayaForCausalLM
from zaya_hf.evaluation import harness
from zaya_hf.resources import resource
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.training import rng
from zaya_hf.training.config import LmEvalConfig
from zaya_hf.training.data.bpe import train_bpe
from zaya_hf.training.data.documents import MappedArray, TokenDocuments
from zaya_hf.training.data.rows import HeldOutRows
from zaya_hf.training.held_out import Evaluator
from zaya_hf.training.held_out_items import write_items
from zaya_hf.training.lm_eval_suite import Suite

LENGTH, ENTRIES = 96, 320
TASKS = ["zaya_held_out_bits", "zaya_held_out_next_line"]


def a_text(number: int) -> str:
    """Some lines with words of their own, é and U+2028 among them."""
    words = [f"{'aeiouy'[(number + i) % 6]}{number}{'mnprst'[i % 6]}" for i in range(6)]
    return "".join(f"{' '.join(words[i:] + words[:i])} line {i}\n" for i in range(5)) + "é\u2028end"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe([a_text(number) for number in range(40)], vocab_size=ENTRIES)


def tokenised(folder: Path, tokenizer: Any, texts: list[str], name: str = "docs", **changes: Any) -> TokenDocuments:
    """Documents that begin with the id that begins documents and end where their text does."""
    ids = [[tokenizer.bos_token_id, *tokenizer(text).input_ids] for text in texts]
    return written(folder, ids, [len(text.encode()) for text in texts], name, **changes)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> TokenDocuments:
    return tokenised(tmp_path_factory.mktemp("ids"), tokenizer, [a_text(number) for number in range(12)])


@pytest.fixture(scope="module")
def items(
    tmp_path_factory: pytest.TempPathFactory, documents: TokenDocuments, tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("items")
    write_items(folder, [documents], tokenizer, LENGTH)
    return folder


@pytest.fixture
def model() -> ZayaForCausalLM:
    config = tiny_config(num_hidden_layers=2, vocab_size=ENTRIES, bos_token_id=1, eos_token_id=1)
    return redraw(ZayaForCausalLM(config)).train()  # type: ignore[return-value]


def suite(tokenizer: Any, items: Path, tasks: list[str] = TASKS, max_length: int = LENGTH, **options: Any) -> Suite:
    config = LmEvalConfig(tasks=tasks, every=10, **options)
    return Suite(Accelerator(cpu=True), tokenizer, config, items=items, max_length=max_length)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


class TestItems:
    def test_texts_are_the_documents(self, items: Path) -> None:
        assert sorted(item["text"] for item in lines(items / "bits.jsonl")) == sorted(map(a_text, range(12)))

    def test_a_question_is_followed_by_its_answer_and_by_no_other_choice(self, items: Path) -> None:
        found, texts = lines(items / "next_line.jsonl"), [a_text(number) for number in range(12)]
        assert len(found) == 12
        assert {item["answer"] for item in found} == {0, 1, 2, 3}
        for item in found:
            right = [f"{item['question']}\n{choice}" for choice in item["choices"]]
            assert [any(text in whole for whole in texts) for text in right].index(True) == item["answer"]
            assert sum(any(text in whole for whole in texts) for text in right) == 1
            assert len(set(item["choices"])) == 4

    def test_they_fit(self, items: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        for item in lines(items / "next_line.jsonl"):
            for choice in item["choices"]:
                assert len(tokenizer(f"{item['question']}\n{choice}").input_ids) <= LENGTH

    def test_the_same_documents_give_the_same_files(
        self, items: Path, documents: TokenDocuments, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        turned = documents.subset(list(reversed(range(len(documents)))))
        parts = [turned.subset(list(range(5))), turned.subset(list(range(5, 12)))]
        write_items(tmp_path, parts, tokenizer, LENGTH)
        for name in ("bits.jsonl", "next_line.jsonl"):
            assert (tmp_path / name).read_bytes() == (items / name).read_bytes()

    def test_conversations_give_none(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        (tmp_path / "mask.bin").write_bytes(bytes(1000))
        mask = MappedArray(tmp_path / "mask.bin", "u1", 1000)
        chats = tokenised(tmp_path, tokenizer, [a_text(0)], target_shards=[mask])
        with pytest.raises(ValueError, match=r"too little held-out text .* 0 documents of text give no item for bits"):
            write_items(tmp_path, [chats], tokenizer, LENGTH)
        assert not (tmp_path / "bits.jsonl").exists()

    def test_a_few_documents_give_no_choices(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        few = tokenised(tmp_path, tokenizer, [a_text(0), a_text(1)])
        with pytest.raises(ValueError, match=r"2 documents of text give no item for next_line\.jsonl; hold out more"):
            write_items(tmp_path, [few], tokenizer, LENGTH)


class TestScores:
    def test_bits_per_byte_are_those_of_the_held_out_loss(
        self, model: ZayaForCausalLM, documents: TokenDocuments, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        """Of documents that fit into a row: of longer ones, lm-eval gives the last window more context. Sums in fp32,
        in batches of other shapes."""
        length = int(documents.lengths.max())
        rows = HeldOutRows(documents, length, "best_fit")
        ours = Evaluator(Accelerator(cpu=True), [rows], vocab_size=ENTRIES, start_ids={1}).run(model, 5)
        found = suite(tokenizer, items, max_length=length).run(model, 5)
        assert (found["kind"], found["step"]) == ("lm_eval", 5)
        score = found["tasks"]["zaya_held_out_bits"]
        assert score["bytes"] == ours["bytes"]
        assert score["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], rel=1e-5)
        choice = found["tasks"]["zaya_held_out_next_line"]
        assert (choice["items"], choice["chance"]) == (12, 0.25)
        assert "outcomes" not in choice
        json.dumps(found, allow_nan=False)

    def test_the_model_and_the_random_numbers_are_as_before(
        self, model: ZayaForCausalLM, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        def numbers() -> list[float]:
            return [random.random(), np.random.random(), float(torch.rand(()))]

        one = suite(tokenizer, items, ["zaya_held_out_next_line"], limit=2)
        rng.seed_all(3)
        expected = numbers()
        rng.seed_all(3)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        found = one.run(model, 1)
        assert numbers() == expected
        assert found["tasks"]["zaya_held_out_next_line"]["items"] == 2
        assert all(module.training for module in model.modules())
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class TestTold:
    """Before training, in one line."""

    @pytest.fixture
    def lm_eval_has_one_task(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Looking through all of its own takes it half a minute."""
        for file in resource("eval", "tasks", "training").iterdir():
            if file.name in ("bits.yaml", "local_items.py"):
                (tmp_path / file.name).write_text(file.read_text().replace("task: zaya_held_out_bits", "task: wiki"))
        ordinary = harness.TaskManager

        def manager(include_path: str, include_defaults: bool, **options: Any) -> Any:
            return ordinary(
                include_path=str(tmp_path) if include_defaults else include_path, include_defaults=False, **options
            )

        monkeypatch.setattr(harness, "TaskManager", manager)

    @pytest.mark.usefixtures("lm_eval_has_one_task")
    def test_a_task_that_is_nowhere(self, tokenizer: PreTrainedTokenizerFast, items: Path) -> None:
        with pytest.raises(ValueError, match=r"no task 'hela_swag' in .*zaya_held_out_bits, .*nor has lm-eval one"):
            suite(tokenizer, items, ["hela_swag"])

    @pytest.mark.usefixtures("lm_eval_has_one_task")
    def test_a_task_of_lm_eval_s_own(
        self, model: ZayaForCausalLM, tokenizer: PreTrainedTokenizerFast, items: Path
    ) -> None:
        assert suite(tokenizer, items, ["wiki"], limit=1).run(model, 1)["tasks"]["wiki"]["items"] == 1

    def test_items_that_are_not_there(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no items: .*bits\.jsonl is missing"):
            suite(tokenizer, tmp_path)

    def test_a_folder_that_is_none(self, tokenizer: PreTrainedTokenizerFast, items: Path) -> None:
        with pytest.raises(ValueError, match=r"task_folder is nowhere, which is no folder"):
            suite(tokenizer, items, task_folder="nowhere")

    def test_a_missing_package(
        self, tokenizer: PreTrainedTokenizerFast, items: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else object())
        with pytest.raises(ValueError, match=r"evaluation\.lm_eval needs lm-eval: pip install lm-eval"):
            suite(tokenizer, items)


def test_the_group_has_every_task() -> None:
    text = (resource("eval", "tasks", "training") / "group.yaml").read_text()
    assert [line.split("- ")[1] for line in text.splitlines() if "  - " in line] == TASKS
