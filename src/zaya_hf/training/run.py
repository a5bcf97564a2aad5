"""One run, from its settings to the trained model: everything is put together here and nowhere else."""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from transformers import PreTrainedTokenizerBase

from ..atomic import write_text
from ..configuration_zaya import ZayaConfig
from . import environment, models, rng, run_folder, sharding, state
from .balancing import BiasBalancer
from .checkpoint import Checkpoint, CheckpointStore, complete_saves
from .config import SourceConfig, TrainingConfig
from .data import build, tokenizers
from .data.documents import TokenDocuments, held_out_split
from .data.loader import Prefetcher
from .data.rows import TrainingData
from .distributed import make_accelerator
from .ema import ExponentialMovingAverage
from .flops import count_parameters
from .guard import Guard
from .held_out import Evaluator
from .lm_eval_suite import Suite
from .loop import Outcome, train
from .optim import optimizer_for
from .parts import Run, StepSettings
from .ranks import on_main
from .recorder import Recorder
from .same_run import RunIdentity
from .schedule import factor
from .settings_files import dump
from .stopping import Stopper
from .throughput import Throughput

__all__ = ["main"]

SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def main(config: TrainingConfig) -> int:
    """Train as `config` says, in this process and those that were started with it; go on where an earlier call ended.

    The folder `config.out` is then complete in itself: settings, metrics, checkpoints, tokenizer, tokenised text, and
    at the end the model (and its averaged weights), as `from_pretrained` reads it.

    Returns:
        the exit code: 0 when the run is complete, or was stopped in a way that plans to go on; see `stopping`.

    Raises:
        ValueError, OSError: settings, data or checkpoints do not fit; in one line.
        Diverged: see `loop.train`.
    """
    out = Path(config.out)
    if config.model.checkpoint is not None and not complete_saves(out / run_folder.CHECKPOINTS):
        models.config_of(config.model)  # what is not there is said before a folder is made and text is read
    with ExitStack() as stack:
        stopper = Stopper(config.guard.wall_clock_minutes)  # the budget runs from here
        accelerator = make_accelerator(config.precision)
        if accelerator.distributed_type in SHARDING:
            raise ValueError(
                f"accelerate is set up for {accelerator.distributed_type.value}: zaya train has all of the model in "
                "each process (DDP). Start it with another accelerate config, or by `zaya train --processes N`."
            )
        on_main(lambda: stack.enter_context(run_folder.owned(out)))
        recorder = Recorder.of_run(config, accelerator, out)
        stack.callback(recorder.close)
        text = _Text.of_run(config, out, recorder)
        _check_targets(text.documents)
        data = TrainingData(
            text.documents,
            [source.weight for source in config.data.sources],
            length=config.data.sequence_length,
            packing=config.data.packing,
            seed=config.seed,
            pad_id=text.tokenizer.pad_token_id or 0,
        )
        others = {"tokenizer": tokenizers.tokenizer_digest(text.tokenizer), "base model": models.base_digest(config)}
        known = {what: digest for what, digest in others.items() if digest is not None}
        identity = RunIdentity(config, data.identity(), recorder.say, known)
        store = CheckpointStore(out / run_folder.CHECKPOINTS, config.checkpoint.keep)
        found = store.newest(recorder.say, identity.accepts)
        if found is None and (names := store.names()):
            raise ValueError(
                f"{store.folder} has no whole checkpoint to go on from ({', '.join(names)}): move what is in it away "
                "to start anew."
            )
        if found is not None and found.step > config.total_steps:
            raise ValueError(f"steps is {config.total_steps}, but the run in {out} has done {found.step} already.")
        if found is not None and found.step == config.total_steps and _has_models(config):
            recorder.say(_complete(config))
            return 0
        loader = stack.enter_context(Prefetcher(data, config.data.workers))
        run = _assemble(config, accelerator, text, found, loader)
        run.stopper, run.recorder = stopper, recorder
        run.checkpoints = state.RunCheckpoints(
            store, seed=config.seed, facts=identity.facts, accepts=identity.accepts, say=recorder.say
        )
        _begin(config, run, recorder, found)
        if run.progress.step < config.total_steps:
            on_main(lambda: _remove_models(out))
        outcome = train(run)
        if outcome.stopped is None and not _has_models(config):
            _finish(config, run, recorder, text.tokenizer)
        recorder.say(_last_words(config, outcome))
        return outcome.exit_code


@dataclass
class _Text:
    """What is read in a run.

    Attributes:
        documents: of each source, for training.
        held_out: of each source that has some, for evaluations.
    """

    tokenizer: PreTrainedTokenizerBase
    documents: list[TokenDocuments]
    held_out: list[TokenDocuments]

    @classmethod
    def of_run(cls, config: TrainingConfig, out: Path, recorder: Recorder) -> _Text:
        """The main process trains a tokenizer and tokenises, where that is asked for; then all read it from files."""
        on_main(lambda: _none(tokenizers.of_run(config, out)))
        tokenizer = tokenizers.of_run(config, out, build=False)
        cache = out / run_folder.DATA if config.data.cache is None else Path(config.data.cache)

        def opened(sources: list[SourceConfig]) -> list[TokenDocuments]:
            settings = config.data
            prepared = on_main(
                lambda: build.prepare(
                    sources,
                    tokenizer,
                    cache,
                    chat=settings.chat,
                    max_length=settings.sequence_length,
                    processes=settings.build_processes,
                )
            )
            for source in prepared:
                if source.built is not None and source.built.dropped:
                    recorder.say(f"{source.name}: left out {_listed(source.built.dropped)}")
            return [source.open() for source in prepared]

        documents, held_out = opened(config.data.sources), opened(config.data.held_out)
        if config.data.held_out_fraction:
            splits = [held_out_split(source, config.data.held_out_fraction) for source in documents]
            documents, held_out = [trained for trained, _ in splits], [held for _, held in splits] + held_out
        return cls(tokenizer, documents, held_out)


def _none(_: object) -> None:
    """What processes tell each other has to be small."""


def _listed(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def _assemble(
    config: TrainingConfig, accelerator: Accelerator, text: _Text, found: Checkpoint | None, loader: Prefetcher
) -> Run:
    """The run, at its first step or where `found` has it."""
    model = models.build(config, start=None if found is None else found.model, tokenizer=text.tokenizer)
    model.to(accelerator.device)  # before the optimizer, which looks at the device
    optimizer = optimizer_for(model, config.optimizer)
    balancer = BiasBalancer.for_model(model, config.balancing)
    inner, (model, optimizer) = model, sharding.prepare(accelerator, model, optimizer)
    ema = None if config.ema_decay is None else ExponentialMovingAverage(inner, config.ema_decay)
    evaluations: list[tuple[int, Any]] = []
    if text.held_out:
        size = inner.config.vocab_size
        held = Evaluator.of_run(config, accelerator, text.held_out, text.tokenizer, vocab_size=size, ema=ema)
        evaluations.append((config.evaluation.every, held))
    items = Path(config.out) / run_folder.DATA / run_folder.ITEMS
    suite = Suite.of_run(config, accelerator, text.held_out, text.tokenizer, items)
    if suite is not None and config.evaluation.lm_eval is not None:
        evaluations.append((config.evaluation.lm_eval.every, suite))
    steps = config.total_steps
    run = Run(
        accelerator,
        model,
        optimizer,
        lambda step: factor(step, steps, config.schedule),
        loader,
        StepSettings(
            steps=steps,
            rows=config.batch.rows,
            micro_rows=config.batch.micro_rows,
            gradient_clip=math.inf if config.gradient_clip is None else config.gradient_clip,
            z_loss=config.z_loss,
            checkpoint_every=config.checkpoint.every,
            router_panel_every=config.logging.router_panel_every,
        ),
        guard=Guard(config.guard),
        balancer=balancer,
        ema=ema,
        evaluations=evaluations,
    )
    rng.seed_all(config.seed, accelerator.process_index)
    if found is not None:
        state.restore(run, found, config.seed)
    return run


def _begin(config: TrainingConfig, run: Run, recorder: Recorder, found: Checkpoint | None) -> None:
    """What the folder says before the first step of this call."""
    accelerator, model_config = run.accelerator, run.inner.config
    assert isinstance(model_config, ZayaConfig)
    recorder.throughput = Throughput.of_run(
        model_config,
        config.data.sequence_length,
        devices=accelerator.num_processes,
        device_name=environment.device_name(accelerator.device),
        precision=config.precision,
        peak_tflops=config.logging.peak_tflops,
    )
    counts = count_parameters(model_config)
    recorder.environment(environment.describe(accelerator, run.model, {"active_parameters": counts.active}))
    on_main(lambda: write_text(Path(config.out) / run_folder.CONFIG, dump(config)))
    recorder.rewind(run.progress.step, run.progress.evaluated)
    recorder.event("start" if found is None else "resume", run.progress.step)


def _finish(config: TrainingConfig, run: Run, recorder: Recorder, tokenizer: PreTrainedTokenizerBase) -> None:
    """The trained model as folders of their own."""
    out = Path(config.out)
    state.export_model(run, out / run_folder.MODEL, tokenizer)
    if run.ema is not None:
        state.export_model(run, out / run_folder.EMA_MODEL, tokenizer, averaged=True)
    recorder.event("finish", run.progress.step)


def _has_models(config: TrainingConfig) -> bool:
    """Whether the folders are there that a run ends with."""
    names = [run_folder.MODEL] if config.ema_decay is None else [run_folder.MODEL, run_folder.EMA_MODEL]
    return all(Path(config.out, name).is_dir() for name in names)


def _remove_models(out: Path) -> None:
    """Of a run that had ended and goes on: they would be taken for those of its end."""
    for name in (run_folder.MODEL, run_folder.EMA_MODEL):
        if (out / name).exists():
            # First out of the way as a whole: what is half removed must not be taken for a model.
            aside = out / f"{name}.replaced"
            shutil.rmtree(aside, ignore_errors=True)
            (out / name).replace(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _check_targets(sources: list[TokenDocuments]) -> None:
    """Each has to have a token to predict, else its steps teach nothing. Looks no further than the first one."""
    for source in sources:
        for document, length in enumerate(source.lengths):
            if length > 1 and ((targets := source.targets(document, 1)) is None or targets.any()):
                break
        else:
            raise ValueError(
                f"data source {source.name!r} has no token to predict: no document has two tokens of which the second "
                "is a target (see data.chat for the turns that are)."
            )


def _last_words(config: TrainingConfig, outcome: Outcome) -> str:
    if outcome.stopped is None:
        return _complete(config)
    left = config.total_steps - outcome.steps
    return f"stopped ({outcome.stopped}) after step {outcome.steps}, saved; the same command does the other {left}"


def _complete(config: TrainingConfig) -> str:
    return f"all {config.total_steps} steps are done: the model is in {Path(config.out) / run_folder.MODEL}"
