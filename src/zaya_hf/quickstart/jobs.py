"""One job of the quickstart: train one model with one seed and measure it.

Each stage leaves its result in the job's folder, so a repeated job does what is missing and no more.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from zaya_hf import registration
from zaya_hf.atomic import write_json
from zaya_hf.evaluation import harness
from zaya_hf.quickstart import data
from zaya_hf.quickstart.models import build_model, parameter_counts
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.resources import resource
from zaya_hf.training.checkpoint import CheckpointStore
from zaya_hf.training.simple import LoopSettings, TrainingLog, train

TASK_FOLDER = resource("eval", "tasks", "quickstart")
TASKS = (
    "zaya_quickstart_bits",
    "zaya_quickstart_prose",
    "zaya_quickstart_code",
    "zaya_quickstart_arithmetic_far",
    "zaya_quickstart_arithmetic_near",
)
# What a job leaves in its folder: the model, logits of the trained model before it was saved, and `run.json`, which is
# written last and means that the job is done. In between, checkpoints, and `trained.json` after the training.
MODEL, LOGITS, DONE = "model", "logits.safetensors", "run.json"
CHECKPOINT, TRAINED = "checkpoint", "trained.json"
_LOGIT_ROWS = 4


@dataclass(frozen=True)
class Job:
    """What one worker process does in one go.

    Attributes:
        name: a key of `models.FAMILIES`.
        rate: factor of both learning rates of the recipe.
        folder: of this job alone.
        fingerprint: of everything that moves a number; results with another one are not taken over.
        evaluate: keep the model and run lm-eval; without it only the validation loss is measured.
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
    """The result of an earlier run of the same job whose files are still those that it wrote, or None."""
    return _stage(job, DONE)


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
    result = _stage(job, TRAINED)
    if result is None:
        on_stage("training")
        result = _train(job, prepared, on_step)
    if job.evaluate:
        on_stage("evaluating")
        result["evaluation"] = harness.evaluate(
            _load(job.folder / MODEL),
            prepared.tokenizer,
            TASKS,
            task_folder=TASK_FOLDER,
            items=job.items,
            max_length=job.recipe.sequence_length,
        )
    _write_stage(job, DONE, result)
    (job.folder / TRAINED).unlink(missing_ok=True)
    CheckpointStore(job.folder / CHECKPOINT).remove()
    return result


def _train(job: Job, prepared: data.Data, on_step: Callable[[int, float], None]) -> dict[str, Any]:
    recipe = job.recipe
    model = build_model(job.name, recipe, prepared.tokenizer, job.seed)
    total, active = parameter_counts(model)
    log = train(
        model,
        data.Batches(prepared, recipe, job.seed),
        loop_settings(recipe, job.rate),
        checkpoint=job.folder / CHECKPOINT,
        fingerprint=job.fingerprint,
        on_step=on_step,
    )
    result = _training_facts(job, model, log) | {"parameters": total, "active_parameters": active}
    if not job.evaluate:
        return result | {"validation_loss": data.validation_loss(model, prepared, recipe)}
    for file in (DONE, TRAINED):  # of a run with other settings: what it says is not of the files that come now
        (job.folder / file).unlink(missing_ok=True)
    _save(model, prepared.tokenizer, job.folder / MODEL)
    length = recipe.sequence_length
    rows = min(_LOGIT_ROWS, max(1, len(prepared.validation) // length))
    ids = prepared.validation[: rows * length].view(rows, -1)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(input_ids=ids, use_cache=False).logits}, job.folder / LOGITS)
    result["files_sha256"] = _files_digest(job)
    _write_stage(job, TRAINED, result)
    return result


def _write_stage(job: Job, file: str, result: dict[str, Any]) -> None:
    write_json(job.folder / file, result | {"sha256": _content_digest(result)})


def _stage(job: Job, file: str) -> dict[str, Any] | None:
    """What an earlier run of the same job wrote to `file`, if it is whole and so are the files that it is about."""
    try:
        found: dict[str, Any] = json.loads((job.folder / file).read_text(encoding="utf-8"))
        whole = found.pop("sha256") == _content_digest(found)
        same = found["fingerprint"] == job.fingerprint and found["files_sha256"] == _files_digest(job)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, cut short, or of another version
    return found if whole and same else None


def _content_digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def _files_digest(job: Job) -> str:
    """Of the model's files and the logits."""
    return data.digest([*sorted((job.folder / MODEL).iterdir()), job.folder / LOGITS])


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
    shutil.rmtree(folder, ignore_errors=True)
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
