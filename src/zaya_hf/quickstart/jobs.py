"""One job of the quickstart: train one model with one seed and measure it.

Each stage leaves its result in the job's folder, so a repeated job does what is missing and no more.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from zaya_hf import registration
from zaya_hf.evaluation import harness
from zaya_hf.quickstart import bpe, data
from zaya_hf.quickstart.models import build_model, parameter_counts
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.resources import resource
from zaya_hf.training.loop import LoopSettings, TrainingLog, remove_checkpoint, train

TASKS = (
    "zaya_quickstart_bits",
    "zaya_quickstart_prose",
    "zaya_quickstart_code",
    "zaya_quickstart_arithmetic_far",
    "zaya_quickstart_arithmetic_near",
)
# Folder and files of a job; `run.json` is written last and means that the job is done.
MODEL, CHECKPOINT, TRAINED, DONE = "model", "checkpoint", "trained.json", "run.json"


@dataclass(frozen=True)
class Job:
    """What one worker process does in one go.

    Attributes:
        name: a key of `models.FAMILIES`.
        rate: factor of both learning rates of the recipe.
        folder: of this job alone.
        fingerprint: of everything that moves a number; results with another one are not taken over.
        evaluate: run lm-eval and keep the model; without it only the validation text is measured.
    """

    name: str
    seed: int
    rate: float
    recipe: Recipe
    folder: Path
    data: Path
    items: Path
    fingerprint: str
    evaluate: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}-seed{self.seed}"


def finished(job: Job) -> dict[str, Any] | None:
    """The result of an earlier run of the same job, or None."""
    if not (job.folder / MODEL / "config.json").is_file():
        return None
    return _read(job.folder / DONE, job.fingerprint)


def run(job: Job, on_step: Callable[[int, float], None], on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Carry out `job`; the content of its `run.json`.

    Args:
        on_step: is given the number of steps done and the last loss; a KeyboardInterrupt that it raises stops the
            training after a checkpoint.
        on_stage: is given "training" or "evaluating" when that begins.
    """
    torch.set_num_threads(job.recipe.threads)
    transformers_logging.disable_progress_bar()
    prepared = data.load(job.data)
    trained = _read(job.folder / TRAINED, job.fingerprint)
    if trained is not None:
        model = _load(job.folder / MODEL)
    else:
        on_stage("training")
        model, trained = _train(job, prepared, on_step)
    result = trained
    if job.evaluate:
        on_stage("evaluating")
        result = trained | {
            "evaluation": harness.evaluate(
                model,
                prepared.tokenizer,
                TASKS,
                task_folder=resource("eval", "tasks", "quickstart"),
                items=job.items,
                max_length=job.recipe.sequence_length,
            )
        }
    write_json(job.folder / DONE, result)
    (job.folder / TRAINED).unlink(missing_ok=True)
    return result


def _train(
    job: Job, prepared: data.Data, on_step: Callable[[int, float], None]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    recipe = job.recipe
    model = build_model(job.name, recipe, prepared.tokenizer, job.seed)
    total, active = parameter_counts(model)
    checkpoint = job.folder / CHECKPOINT
    job.folder.mkdir(parents=True, exist_ok=True)
    log = train(
        model,
        data.Batches(prepared, recipe, job.seed),
        loop_settings(recipe, job.rate),
        checkpoint=checkpoint,
        fingerprint=job.fingerprint,
        on_step=on_step,
    )
    result = _training_facts(job, model, log) | {
        "parameters": total,
        "active_parameters": active,
        "validation_bits_per_byte": data.bits_per_byte(
            model, prepared.validation, bpe.bytes_per_entry(prepared.tokenizer)
        ),
    }
    if job.evaluate:
        _save(model, prepared.tokenizer, job.folder / MODEL)
        write_json(job.folder / TRAINED, result)
    remove_checkpoint(checkpoint)
    return model, result


def loop_settings(recipe: Recipe, rate: float) -> LoopSettings:
    """The trainer's settings; `rate` multiplies both learning rates."""
    return LoopSettings(
        steps=recipe.steps,
        warmup_steps=recipe.warmup_steps,
        muon_lr=recipe.muon_lr * rate,
        adamw_lr=recipe.adamw_lr * rate,
        weight_decay=recipe.weight_decay,
        gradient_clip=recipe.gradient_clip,
        balancing_lr=recipe.balancing_lr,
        checkpoint_every=recipe.checkpoint_every,
    )


def _training_facts(job: Job, model: PreTrainedModel, log: TrainingLog) -> dict[str, Any]:
    return {
        "fingerprint": job.fingerprint,
        "name": job.name,
        "seed": job.seed,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "learning_rate": job.recipe.muon_lr * job.rate,
        "adamw_learning_rate": job.recipe.adamw_lr * job.rate,
        "losses": [round(loss, 5) for loss in log.losses],
        "tokens": job.recipe.tokens,
        "seconds": log.seconds,
        "tokens_per_second": job.recipe.tokens / log.seconds,
        "router_load": log.load,
    }


def _load(folder: Path) -> PreTrainedModel:
    registration.register()  # importing zaya_hf does it, except where the environment forbids it
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a run with other settings
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=40,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read(file: Path, fingerprint: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found if found["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, cut short, or of another version


def write_json(file: Path, value: Any) -> None:
    """Write `value` so that no reader ever sees half of it. NaN and infinities are refused (ValueError)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
