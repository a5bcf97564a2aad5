"""Estimates: the arithmetic against sums done by hand, and the table of a dry run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from local_tasks import entry, write_suite, write_tasks
from zaya_hf.evaluation import estimates, machine_speed
from zaya_hf.evaluation.estimates import Work, cost, dry_run, work_of
from zaya_hf.evaluation.loading import shape
from zaya_hf.evaluation.machine_speed import Speed
from zaya_hf.evaluation.models import ModelSpec, Shape, registry, resolve
from zaya_hf.evaluation.suite_files import Entry
from zaya_hf.evaluation.suites import load_suite
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.testing import tiny_config

# Of 1,000 parameters 400 are the embedding, which is the head as well, of 40 words.
DENSE = Shape(
    parameters=1000,
    parameters_active=1000,
    parameters_without_embedding=600,
    layers=2,
    hidden_size=10,
    vocab_size=40,
    kv_heads=1,
    head_dim=5,
)
FAST = Speed("fast", operations=1e6, bandwidth=1e30, memory=None, source="")
CHOICES = Entry(
    task="t", title="t", ability="math", metric="acc,none", items=3, prompt_tokens=20, answer_tokens=2, answers=4
)
TEXTS = replace(CHOICES, answers=1, answer_tokens=5)


def scored() -> Work:
    return Work(CHOICES, items=3, prompt_tokens=60, answer_tokens=24, most_tokens=0, budget=0)


def generated() -> Work:
    return Work(TEXTS, items=3, prompt_tokens=60, answer_tokens=15, most_tokens=30, budget=10)


def test_operations_of_scored_choices():
    """84 tokens are read: a prompt once for its four choices; logits are made for the 24 tokens of choices alone."""
    attention = 2 * 2 * 10 * 22  # half of 4 for each layer, value and token of a text of 22
    right = 84 * (2 * 600 + attention) + 24 * 2 * 400
    found = cost([scored()], DENSE, FAST, bytes_per_value=2)
    assert found.operations == pytest.approx(right)
    assert found.seconds == pytest.approx(right / 1e6)


def test_operations_of_generated_texts():
    attention = 2 * 2 * 10 * 25
    reading = 60 * (2 * 600 + attention) + 3 * 2 * 400
    right = reading + 15 * (2 * 1000 + 2 * attention)
    assert cost([generated()], DENSE, FAST, bytes_per_value=2).operations == pytest.approx(right)


def test_generation_is_bound_by_memory_where_that_is_slow():
    """15 tokens in 3 rows are 5 steps, each of which reads all weights and keys and values of 3 rows of 25 tokens."""
    slow = Speed("slow", operations=1e30, bandwidth=100, memory=None, source="")
    step = 1000 * 2 + 3 * 25 * (2 * 2 * 1 * 5 * 2)
    assert cost([generated()], DENSE, slow, bytes_per_value=2).seconds == pytest.approx(5 * step / 100)


def test_a_model_that_thinks_uses_its_budget():
    work = [generated()]
    usual, thinks = (cost(work, DENSE, FAST, bytes_per_value=2, thinks=one).operations for one in (False, True))
    attention = 2 * 2 * 10 * 30
    assert thinks == pytest.approx(60 * (1200 + attention) + 2400 + 30 * (2000 + 2 * attention))
    assert usual < thinks


def test_experts_that_a_token_does_not_use_take_memory_and_no_time():
    sparse = replace(DENSE, parameters=9000, parameters_active=1000, parameters_without_embedding=8600)
    dense, moe = (cost([scored()], one, FAST, bytes_per_value=2) for one in (DENSE, sparse))
    assert moe.operations == dense.operations
    assert moe.memory - dense.memory == 2 * 8000


def test_memory_grows_with_the_budget_of_answers():
    long = replace(generated(), budget=100_000)
    difference = [cost([one], DENSE, FAST, bytes_per_value=2).memory for one in (long, generated())]
    assert difference[0] - difference[1] == 3 * 100_020 * 40 - 4096 * 40


def test_limits_count_for_each_member_of_a_group(tmp_path):
    write_tasks(tmp_path / "tasks", {"one": {}, "two": {}, "pair": {"task": ["one", "two"]}, "alone": {}})
    suite = load_suite(
        write_suite(tmp_path / "own.yaml", entry("pair", items=8, answers=4), entry("alone", items=4, limit=3))
    )
    assert [one.items for one in work_of(suite)] == [8, 3]
    assert [one.items for one in work_of(suite, limit=2)] == [4, 2]
    assert [one.items for one in work_of(suite, limit=9)] == [8, 3]
    assert [(one.prompt_tokens, one.answer_tokens, one.budget) for one in work_of(suite)] == [(80, 64, 0), (30, 6, 0)]
    with pytest.raises(ValueError, match="limit is 0, but it must be at least 1"):
        work_of(suite, limit=0)


def test_budgets_are_those_of_the_suite_or_of_the_tasks_file():
    budgets = {one.entry.task: one.budget for one in work_of(load_suite("paper"))}
    assert {task: budgets[task] for task in ("bbh", "gsm8k", "minerva_math", "mmlu", "mmlu_pro")} == {
        "bbh": 1024,
        "gsm8k": 512,
        "minerva_math": 1024,
        "mmlu": 0,
        "mmlu_pro": 2048,
    }
    assert budgets["zaya_humaneval"] >= 512


def test_a_dry_run_of_the_paper_for_all_known_models_needs_no_network(monkeypatch):
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("reached out")

    monkeypatch.setattr("socket.socket.connect", no_network)
    text = dry_run(load_suite("paper"), resolve(list(registry())), device="cpu")
    for name in registry():
        assert re.search(rf"^{name} +bfloat16 +[\d.]+G +[\d.]+G ", text, re.MULTILINE), name
    assert re.search(r"^mmlu +knowledge +14042 +10\.5M +56\.2k$", text, re.MULTILINE)
    assert "measured now" in text
    assert "35% of 989 Tflop/s" in text
    assert "typical lengths from the suite's file" in text
    assert "zaya1-8b thinks before it answers" in text
    assert "accept the Gemma terms" in text


def test_a_folder_is_measured_by_its_config_alone(tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    model = ZayaForCausalLM(config)
    spec = ModelSpec(name="tiny", title="tiny", path=str(tmp_path), dtype="float32", max_length=64)
    parameters = sum(one.numel() for one in model.parameters())
    assert shape(spec).parameters == pytest.approx(parameters, rel=0.01)
    text = dry_run(load_suite("paper"), [spec], limit=1, device="cpu")
    assert re.search(r"^tiny +float32 ", text, re.MULTILINE)
    assert "tiny: gsm8k takes about 1292 tokens, but max_length is 64; prompts would be cut" in text


def test_what_is_not_known_is_a_question_mark(tmp_path):
    spec = ModelSpec(name="far", title="far", path="someone/far")
    text = dry_run(load_suite("math"), [spec], device="cpu")
    assert re.search(r"^far +auto( +\?){7}$", text, re.MULTILINE)
    assert "Note: far: its size is not known before its files are here." in text


def test_a_known_gpu_is_taken_from_its_data_sheet(monkeypatch):
    machine_speed.here.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "AMD Instinct MI300X OAM")
    found = machine_speed.here("cuda:0", torch.bfloat16)
    machine_speed.here.cache_clear()
    assert (found.name, found.memory) == ("MI300X", 192e9)
    assert found.operations == pytest.approx(0.35 * 1307e12)
    assert "assumed" in found.source


def test_this_machine_is_measured():
    found = machine_speed.here("cpu", torch.float32)
    assert 1e8 < found.operations < 1e15
    assert 1e7 < found.bandwidth < 1e13
    assert "measured now" in found.source


def test_a_model_that_does_not_fit_is_said_so(monkeypatch):
    small = Speed("a small GPU", operations=1e12, bandwidth=1e11, memory=8e9, source="a small GPU, assumed")
    monkeypatch.setattr(estimates, "here", lambda *_: small)
    text = dry_run(load_suite("math"), resolve(["zaya1-base"]), device="cuda")
    assert "zaya1-base: does not fit on a small GPU, which has 8 GB" in text
