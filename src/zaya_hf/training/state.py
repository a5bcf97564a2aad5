"""What a run is made of, in files: from them it goes on bit for bit.

    model/         the weights as `save_pretrained` writes them, balancing biases included; with LoRA the adapter
    ema/           the averaged weights, likewise, if there are any
    optimizer/     torch.distributed.checkpoint: one entry per parameter and part of its state, by name
    balancing.pt   what the balancing of the routers remembers
    rng-RANK.pt    the random generators of each process

Names tie a state to its parameter, not positions, and any number of processes can read all of it. With another number
of processes a run goes on to rounding, except that random numbers differ.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from . import rng
from .checkpoint import MODEL, Checkpoint, CheckpointStore, stand_whole
from .console import transformers_bars
from .parts import Progress, Run
from .ranks import on_main, rank, together, world_size
from .sharding import full_state, load_full_state

__all__ = ["RunCheckpoints", "export_model", "restore", "write"]

EMA, OPTIMIZER, BALANCING = "ema", "optimizer", "balancing.pt"
SHARD_SIZE = "4GB"  # of the model's files: several are hashed side by side


class RunCheckpoints:
    """The checkpoints of a run, as `loop.train` wants them.

    Args:
        store: where they are.
        seed: of the run: for the random numbers of processes that a checkpoint knows nothing of.
        facts: further JSON values for the description, asked for at each save.
        accepts: says by a description whether the run may go on from it; it may raise instead. None: it may.
        restored: is given the description that a run has gone back to.
        say: see `CheckpointStore.newest`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        seed: int = 0,
        facts: Callable[[], dict[str, Any]] = dict,
        accepts: Callable[[dict[str, Any]], bool] | None = None,
        restored: Callable[[dict[str, Any]], None] | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self.store, self.seed = store, seed
        self._facts, self._accepts, self._restored, self._say = facts, accepts, restored, say

    def save(self, run: Run) -> None:
        """Write a checkpoint of `run` as it is now.

        Raises:
            OSError: see `CheckpointStore.save`.
        """
        streak = run.guard.streak
        self.store.save(
            run.progress.step,
            lambda folder: write(run, folder),
            describe(run) | self._facts(),
            spare=streak[0][0] if streak else None,  # a roll-back from these bad steps goes to before the first
        )

    def restore(self, run: Run, at_most: int | None = None) -> bool:
        """Put `run` back to the newest whole checkpoint.

        Args:
            at_most: pass over checkpoints of more steps, and delete them.

        Returns:
            whether there is one. If not, nothing has changed.

        Raises:
            ValueError, OSError: it does not fit, or something in it is missing; names it.
        """
        found = self.store.newest(self._say, self._accepts, at_most)
        if found is None:
            return False
        restore(run, found, self.seed)
        if at_most is not None:
            self.store.forget_after(at_most)
        if self._restored is not None:
            self._restored(found.description)
        return True


def describe(run: Run) -> dict[str, Any]:
    """What a checkpoint says of `run`, as JSON."""
    return {
        "step": run.progress.step,
        "next_sample": run.progress.window * run.settings.rows,
        "progress": asdict(run.progress),
        "guard": run.guard.state_dict(),
        "world_size": world_size(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what may move a number."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }


def write(run: Run, folder: Path) -> None:
    """Write the state of `run` into `folder`. Collective.

    Raises:
        OSError, RuntimeError, SafetensorError, CheckpointException: it cannot be written.
    """
    model = run.accelerator.unwrap_model(run.model)
    weights = full_state(model)  # takes all processes, so before one of them is at work alone
    on_main(lambda: _write_whole(run, model, weights, folder))
    together(lambda: torch.save(rng.capture(), folder / _rng_file(rank())))
    with _no_warning_of_one_process():
        writer = dcp.FileSystemWriter(folder / OPTIMIZER)
        dcp.save(dict(_optimizer_tensors(run)), storage_writer=writer, no_dist=world_size() == 1)


def _write_whole(run: Run, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    _save_model(model, weights, folder / MODEL)
    if run.ema is not None:
        _save_model(model, run.ema.state_dict(), folder / EMA)
    if run.balancer is not None:
        torch.save(run.balancer.state_dict(), folder / BALANCING)


def restore(run: Run, checkpoint: Checkpoint, seed: int = 0) -> None:
    """Put `run` back to `checkpoint`, in place. Collective.

    Args:
        seed: see `RunCheckpoints`.

    Raises:
        ValueError: it is of another model or optimizer, or something is missing; names the first such thing.
        OSError: it cannot be read.
    """
    folder = checkpoint.path
    model = run.accelerator.unwrap_model(run.model)
    together(lambda: _check_parts(run, folder))
    _load_model(model, folder / MODEL)
    if run.ema is not None:
        run.ema.load_state_dict(_tensors(folder / EMA))
    _load_optimizer(run, folder / OPTIMIZER)
    if run.balancer is not None:
        run.balancer.load_state_dict(torch.load(folder / BALANCING, map_location="cpu", weights_only=True))
    run.progress = Progress(**checkpoint.description["progress"])
    run.guard.load_state_dict(checkpoint.description["guard"])
    random_numbers = folder / _rng_file(rank())
    if random_numbers.is_file():
        rng.restore(torch.load(random_numbers, map_location="cpu", weights_only=True))
    else:  # more processes than it was written by
        rng.seed_all(seed, run.progress.step, rank())


def _check_parts(run: Run, folder: Path) -> None:
    parts = {EMA: run.ema, BALANCING: run.balancer, MODEL: run.model, OPTIMIZER: run.optimizer}
    for name, part in parts.items():
        if part is not None and not (folder / name).exists():
            raise ValueError(f"checkpoint {folder} has no {name}, which this run needs to go on.")


def export_model(run: Run, folder: Path, tokenizer: Any = None, *, averaged: bool = False) -> None:
    """Write the model of `run` as a folder that `from_pretrained` loads, in the place of an older one. Collective.

    Args:
        tokenizer: with a `save_pretrained`; goes into the folder too.
        averaged: the averaged weights instead of the last ones.

    Raises:
        OSError: it cannot be written; an older folder stays as it is.
        ValueError: `averaged` in a run that keeps none.
    """
    if averaged and run.ema is None:
        raise ValueError("averaged weights are wanted, but the run keeps none (ema_decay is null).")
    model = run.accelerator.unwrap_model(run.model)
    weights = run.ema.state_dict() if averaged and run.ema is not None else full_state(model)

    def export(aside: Path) -> None:
        _save_model(model, weights, aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)

    on_main(lambda: stand_whole(folder, export))


# --- the model --------------------------------------------------------------------------------------------------------
def _save_model(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    options: dict[str, Any] = {"state_dict": weights}
    if _is_adapted(model):
        options["save_embedding_layers"] = False  # else PEFT asks the Hub whether the base model's vocabulary is this
    else:
        options |= {"max_shard_size": SHARD_SIZE, "save_original_format": False}
    with transformers_bars(False):
        model.save_pretrained(folder, **options)  # type: ignore[operator]


def _load_model(model: nn.Module, folder: Path) -> None:
    if not _is_adapted(model):
        load_full_state(model, lambda: _tensors(folder))
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved, wanted = _tensors(folder), get_peft_model_state_dict(model, save_embedding_layers=False)
    different = sorted(saved.keys() ^ wanted.keys())
    if different:
        raise ValueError(f"the adapter in {folder} is another one: {different[0]} is not in both.")
    set_peft_model_state_dict(model, saved)


def _is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


# --- the optimizer ----------------------------------------------------------------------------------------------------
def _optimizer_tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's own state tensors by ``PARAMETER.PART``.

    Its options are not among them: they follow from the settings, and the learning rates from the step.
    """
    optimizer = getattr(run.optimizer, "optimizer", run.optimizer)  # accelerate wraps it
    states: dict[str, dict[str, Tensor]] = get_optimizer_state_dict(run.model, optimizer)["state"]  # type: ignore[assignment]
    for name, parts in states.items():
        for part, tensor in parts.items():
            yield f"{name}.{part}", tensor


def _load_optimizer(run: Run, folder: Path) -> None:
    reader = dcp.FileSystemReader(folder)
    tensors = dict(_optimizer_tensors(run))
    saved = reader.read_metadata().state_dict_metadata
    for name in sorted(tensors.keys() | saved.keys()):
        if name not in saved:
            raise ValueError(f"{folder} has no {name}, which the optimizer has.")
        if name not in tensors:
            raise ValueError(f"{folder} has {name}, which the optimizer does not have.")
        if saved[name].size != tensors[name].size():  # type: ignore[union-attr]
            raise ValueError(f"{folder}: {name} has another shape than in the optimizer.")
    with _no_warning_of_one_process():
        dcp.load(tensors, storage_reader=reader, no_dist=world_size() == 1)


# --- small things -----------------------------------------------------------------------------------------------------
def _rng_file(number: int) -> str:
    return f"rng-{number}.pt"


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """torch warns that without process group it takes one process for all; that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
