"""The scorer on a small pretrained model and real items, against lm-eval's own `hf` model. Needs what `zaya eval data
smollm2 hellaswag_100 gsm8k_100` fetches; skipped without it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from zaya_hf.evaluation import data
from zaya_hf.evaluation.scorer import Scorer
from zaya_hf.resources import resource

ITEMS = 20
LENGTH = 2048

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sides() -> tuple[Scorer, HFLM]:
    missing = [name for name in ("smollm2", "hellaswag_100", "gsm8k_100") if not data.is_fetched(name)]
    if missing:
        pytest.skip(f"zaya eval data {' '.join(missing)}")
    folder = str(data.items_path("smollm2"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    assert scorer.why_not is None
    return scorer, HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=LENGTH)


def requests(name: str) -> list[Any]:
    folder = str(resource("eval", "tasks", "offline"))
    (task,) = TaskManager(include_path=folder, include_defaults=False).load([name])["tasks"].values()
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=ITEMS)
    return list(task.instances)


@pytest.mark.parametrize("name", ["zaya_hellaswag_100", "zaya_last_word", "zaya_mmlu_282"])
def test_likelihoods(name: str, sides: tuple[Scorer, HFLM]) -> None:
    scorer, theirs = sides
    asked = requests(name)
    scorer.start(None)
    found, expected = scorer.loglikelihood(asked, True), theirs.loglikelihood(asked, True)
    for (value, flag), (other, wanted) in zip(found, expected, strict=True):
        assert abs(value - other) <= max(1e-4, 2e-6 * abs(other))
        assert flag == wanted
    assert scorer.counts["tokens_computed"] < scorer.counts["tokens_given"]


def test_texts_and_answers(sides: tuple[Scorer, HFLM]) -> None:
    scorer, theirs = sides
    asked = requests("zaya_gsm8k_100")[:8]
    for request in asked:
        request.arguments = (request.args[0], {**request.args[1], "max_gen_toks": 48})
    scorer.start(None)
    assert scorer.generate_until(asked, True) == theirs.generate_until(asked, True)
    for request in asked:
        request.arguments = (request.args[0],)
    found, expected = scorer.loglikelihood_rolling(asked, True), theirs.loglikelihood_rolling(asked, True)
    assert found == pytest.approx(expected, rel=2e-6)
