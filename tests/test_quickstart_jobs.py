"""Jobs in worker processes: results, resuming, failures, interruption."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.quickstart import data, jobs, pool
from zaya_hf.quickstart.corpus import Corpus, load_corpus
from zaya_hf.quickstart.jobs import Job
from zaya_hf.quickstart.recipe import Recipe

SRC = Path(__file__).resolve().parent.parent / "src"
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


def stops(*_: object, **__: object) -> None:
    """In the place of something that takes time: the process is stopped meanwhile."""
    raise KeyboardInterrupt


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
        assert {path.name for path in job.folder.iterdir()} == {"model", "logits.safetensors", "run.json"}
        written = json.loads((job.folder / "run.json").read_text(encoding="utf-8"))
        assert {key: value for key, value in written.items() if key != "sha256"} == result
        assert jobs.finished(job) == result

    def test_the_logits_are_those_of_the_model_before_it_was_saved(self, job: Job) -> None:
        here(replace(job, evaluate=True))
        kept = load_file(job.folder / "logits.safetensors")
        assert kept["ids"].shape == (4, RECIPE.sequence_length)
        model = ZayaForCausalLM.from_pretrained(job.folder / "model").eval()
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=kept["ids"]).logits, kept["logits"], atol=1e-5, rtol=1e-5)

    def test_other_settings_and_damage_make_a_job_unfinished(self, job: Job) -> None:
        job = replace(job, evaluate=True)
        here(job)
        assert jobs.finished(job) is not None
        assert jobs.finished(replace(job, fingerprint="others")) is None
        for file in ("run.json", "model/model.safetensors", "model/config.json", "logits.safetensors"):
            content = (job.folder / file).read_bytes()
            (job.folder / file).write_bytes(content[:-20])
            assert jobs.finished(job) is None, file
            (job.folder / file).write_bytes(content)
        assert jobs.finished(job) is not None
        text = (job.folder / "run.json").read_text(encoding="utf-8")
        for edited in (re.sub(r'"accuracy": [\d.]+', '"accuracy": 0.999', text, count=1), "[]", "{}"):
            assert edited != text
            (job.folder / "run.json").write_text(edited, encoding="utf-8")
            assert jobs.finished(job) is None
        shutil.rmtree(job.folder / "model")
        assert jobs.finished(job) is None
        here(job)  # a damaged folder is no obstacle
        assert jobs.finished(job) is not None

    def test_a_run_that_other_settings_have_touched_is_not_taken_for_finished(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """First settings finish, second ones stop in the evaluation, third ones while they save, second ones again."""
        first, second, third = (replace(job, seed=n, fingerprint=f"settings {n}", evaluate=True) for n in (1, 2, 3))
        expected = numbers(here(replace(second, folder=job.folder.with_name("alone"))))
        here(first)
        with monkeypatch.context() as patch:
            patch.setattr(jobs.harness, "evaluate", stops)
            with pytest.raises(KeyboardInterrupt):
                here(second)
        assert jobs.finished(first) is None
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "save_file", stops)
            with pytest.raises(KeyboardInterrupt):
                here(third)
        result = numbers(here(second))
        for found in (result, expected):
            del found["evaluation"]["seconds"]
        assert result == expected

    def test_a_trained_model_is_not_trained_again(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        job = replace(job, evaluate=True)
        with monkeypatch.context() as patch:
            patch.setattr(jobs.harness, "evaluate", stops)
            with pytest.raises(KeyboardInterrupt):
                here(job)
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


class TestPool:
    @pytest.mark.slow
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

    def test_a_worker_that_is_gone_before_its_job_is_named(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        real = pool._start

        def start() -> Any:
            worker = real()
            worker.process.kill()
            worker.process.join()
            return worker

        monkeypatch.setattr(pool, "_start", start)
        with pytest.raises(RuntimeError, match=r"the process of zaya-seed3 died \(signal 9"):
            pool.run_jobs([job], 1, Watch())

    @pytest.mark.slow
    def test_workers_of_a_killed_parent_do_not_go_on(self, job: Job, tmp_path: Path) -> None:
        """One that evaluates ends at once: it must not write into a folder that the next run has already."""
        script = tmp_path / "parent.py"
        script.write_text(
            f"""
import os, signal, multiprocessing
from pathlib import PosixPath, WindowsPath
from zaya_hf.quickstart import pool
from zaya_hf.quickstart.jobs import Job
from zaya_hf.quickstart.recipe import Recipe

class Watch:
    def step(self, *_): pass
    def done(self, *_): pass
    def stage(self, job, name):
        if name == "evaluating":
            print(multiprocessing.active_children()[0].pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    pool.run_jobs([{replace(job, evaluate=True)!r}], 1, Watch())
""",
            encoding="utf-8",
        )
        path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(int(done.stdout))
            psutil.wait_procs([worker], timeout=30)
            assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert not (job.folder / "run.json").exists()
        assert (job.folder / "trained.json").exists()
