"""Jobs in worker processes: results, resuming, failures, interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zaya_hf.quickstart import data, jobs, pool
from zaya_hf.quickstart.corpus import Corpus, Document, load_corpus
from zaya_hf.quickstart.jobs import Job
from zaya_hf.quickstart.recipe import Recipe

# One worker of the test run starts the processes of all tests here.
pytestmark = pytest.mark.xdist_group("quickstart jobs")
RECIPE = Recipe(
    steps=6,
    vocab_size=320,
    sequence_length=128,
    batch_size=2,
    hidden_size=32,
    num_hidden_layers=1,
    head_dim=8,
    warmup_steps=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of a few files, prepared as for a quickstart."""
    folder = tmp_path_factory.mktemp("prepared")
    whole = load_corpus()
    some = Corpus(whole.train[:12], whole.validation[:4], whole.held_out, whole.origin, whole.sha256)
    data.prepare(some, RECIPE, folder / "data", folder / "items")
    for file in (folder / "items").glob("*.jsonl"):  # a handful of items is enough here
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:4]), encoding="utf-8")
    return folder


@pytest.fixture
def job(prepared: Path, tmp_path: Path) -> Job:
    return Job(
        name="zaya",
        seed=3,
        rate=1.0,
        recipe=RECIPE,
        folder=tmp_path / "zaya-seed3",
        data=prepared / "data",
        items=prepared / "items",
        fingerprint="settings of this test",
        evaluate=False,
    )


@dataclass
class Watch:
    """Remembers what a pool tells, and can interrupt it."""

    stop_at: int = 0
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def stage(self, job: int, name: str) -> None:
        self.seen.append(("stage", job, name))

    def step(self, job: int, steps: int, loss: float) -> None:
        self.seen.append(("step", job, steps))
        if steps == self.stop_at:
            raise KeyboardInterrupt

    def done(self, job: int, result: dict[str, Any]) -> None:
        self.seen.append(("done", job))


def here(job: Job) -> dict[str, Any]:
    """The job's result, computed in this process with the workers' number of threads."""
    threads = torch.get_num_threads()
    try:
        return jobs.run(job, lambda steps, loss: None, lambda stage: None)
    finally:
        torch.set_num_threads(threads)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on when and where a job ran."""
    return {key: value for key, value in result.items() if key not in ("seconds", "tokens_per_second")}


class TestJob:
    def test_a_job_trains_evaluates_and_keeps_its_model(self, job: Job) -> None:
        stages: list[str] = []
        steps: list[int] = []
        job = replace(job, evaluate=True)
        result = jobs.run(job, lambda step, loss: steps.append(step), stages.append)
        assert stages == ["training", "evaluating"]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert len(result["losses"]) == 6
        assert result["tokens"] == 6 * 2 * 128
        assert set(result["evaluation"]["tasks"]) == set(jobs.TASKS)
        assert {path.name for path in job.folder.iterdir()} == {"model", "run.json"}
        assert json.loads((job.folder / "run.json").read_text(encoding="utf-8")) == result
        assert jobs.finished(job) == result

    def test_other_settings_and_damage_make_a_job_unfinished(self, job: Job) -> None:
        job = replace(job, evaluate=True)
        here(job)
        assert jobs.finished(replace(job, fingerprint="others")) is None
        text = (job.folder / "run.json").read_text(encoding="utf-8")
        (job.folder / "run.json").write_text(text[:-20], encoding="utf-8")
        assert jobs.finished(job) is None
        (job.folder / "run.json").write_text(text, encoding="utf-8")
        assert jobs.finished(job) is not None
        shutil.rmtree(job.folder / "model")
        assert jobs.finished(job) is None

    def test_a_trained_model_is_not_trained_again(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("no evaluation today")

        job = replace(job, evaluate=True)
        monkeypatch.setattr(jobs.harness, "evaluate", fails)
        with pytest.raises(RuntimeError, match="today"):
            here(job)
        monkeypatch.undo()
        stages: list[str] = []
        result = jobs.run(job, lambda step, loss: pytest.fail("trained again"), stages.append)
        assert stages == ["evaluating"]
        alone = here(replace(job, folder=job.folder.with_name("alone")))
        scores, expected = (numbers(r) for r in (result, alone))
        for found in (scores, expected):
            del found["evaluation"]["seconds"]
        assert scores == expected

    def test_every_family_runs(self, job: Job) -> None:
        for name in ("qwen3", "gemma3", "llama", "olmoe"):
            result = here(replace(job, name=name, folder=job.folder.with_name(name)))
            assert result["losses"][-1] < result["losses"][0]
            assert result["class"].startswith(f"transformers.models.{name}.")

    def test_the_model_of_any_family_loads_and_has_its_generation_config(self, job: Job) -> None:
        job = replace(job, name="olmoe", evaluate=True)
        here(job)
        model = AutoModelForCausalLM.from_pretrained(job.folder / "model")
        assert model.generation_config.eos_token_id == model.config.eos_token_id
        assert model.generation_config.do_sample

    def test_the_rate_multiplies_both_learning_rates(self, job: Job) -> None:
        settings = jobs.loop_settings(RECIPE, 0.5)
        assert (settings.muon_lr, settings.adamw_lr) == (RECIPE.muon_lr / 2, RECIPE.adamw_lr / 2)
        result = here(replace(job, rate=0.5))
        assert (result["learning_rate"], result["adamw_learning_rate"]) == (0.01, 2.5e-3)

    def test_nan_is_never_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="JSON"):
            jobs.write_json(tmp_path / "x.json", {"loss": float("nan")})
        assert list(tmp_path.iterdir()) == []


class TestPool:
    def test_an_interrupted_pool_goes_on_and_gives_the_numbers_of_one_process(self, job: Job, tmp_path: Path) -> None:
        todo = [replace(job, seed=seed, folder=tmp_path / f"seed{seed}") for seed in (3, 4, 5)]
        with pytest.raises(KeyboardInterrupt):
            pool.run_jobs(todo, 2, Watch(stop_at=3))
        assert multiprocessing.active_children() == []
        assert any((other.folder / "checkpoint").is_dir() for other in todo)
        assert not any((other.folder / "run.json").exists() for other in todo)

        watch = Watch()
        results = pool.run_jobs(todo, 2, watch)
        assert [result["seed"] for result in results] == [3, 4, 5]
        firsts = []
        for index in range(3):
            told = [event for event in watch.seen if event[1] == index]
            assert (told[0], told[-1]) == (("stage", index, "training"), ("done", index))
            steps = [event[2] for event in told[1:-1]]
            assert steps == list(range(steps[0], 7))
            firsts.append(steps[0])
        assert max(firsts[:2]) > 3  # from the step at which the worker learned of it, not from the beginning
        assert firsts[2] == 1  # was waiting
        assert not any((other.folder / "checkpoint").exists() for other in todo)
        for seed, result in zip((3, 4, 5), results, strict=True):
            assert numbers(result) == numbers(here(replace(job, seed=seed, folder=tmp_path / f"here{seed}")))
        assert results[0]["losses"] != results[1]["losses"]

    def test_a_failing_job_says_which_and_why(self, job: Job, tmp_path: Path) -> None:
        lost = replace(job, data=tmp_path / "nowhere")
        with pytest.raises(RuntimeError, match=r"^zaya-seed3: .*nowhere") as caught:
            pool.run_jobs([lost], 1, Watch())
        assert "Traceback" in str(caught.value.__cause__)  # for --debug

    def test_a_killed_worker_is_named(self, job: Job) -> None:
        class Killer(Watch):
            def step(self, job: int, steps: int, loss: float) -> None:
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)

        with pytest.raises(
            RuntimeError, match=r"the process of zaya-seed3 died \(signal 9, perhaps for lack of memory\)"
        ):
            pool.run_jobs([job], 1, Killer())

    def test_nothing_to_do_starts_nothing(self) -> None:
        assert pool.run_jobs([], 2, Watch()) == []


def test_documents_have_kinds(prepared: Path) -> None:
    loaded = data.load(prepared / "data")
    assert loaded.validation.shape[1] == RECIPE.sequence_length
    assert Document.__dataclass_fields__.keys() >= {"kind", "name", "text"}
