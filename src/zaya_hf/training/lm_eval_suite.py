"""lm-eval tasks while a run trains, scored by the main process while the others wait."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..resources import resource
from .config import LmEvalConfig, TrainingConfig
from .data.documents import TokenDocuments
from .held_out import undisturbed
from .held_out_items import write_items
from .ranks import on_main

__all__ = ["Suite", "task_folder"]

OWN_TASKS = "zaya_held_out"  # what the names of the tasks in eval/tasks/training begin with
_KEPT = ("kind", "items", "correct", "accuracy", "chance", "above_chance", "bytes", "bits_per_byte", "interval_95")


class Suite:
    """Scores a run's model on lm-eval tasks.

    A task is looked for in the config's folder first (by default `eval/tasks/training`, whose items the run writes: see
    `held_out_items`), then among lm-eval's own, which fetch their data where they are not cached.

    Args:
        accelerator: of the run; its autocast is used as in training.
        tokenizer: of the model.
        config: which tasks.
        items: folder of the run's own items.
        max_length: tokens that the model sees at most.

    Raises:
        ValueError: a package or a task is missing, or a task has a metric that is not scored here.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        config: LmEvalConfig,
        *,
        items: Path,
        max_length: int,
    ) -> None:
        missing = [name for name in ("lm-eval", "datasets") if not importlib.util.find_spec(name.replace("-", "_"))]
        if missing:
            raise ValueError(f"evaluation.lm_eval needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._config = config
        self._max_length = max_length
        self._places: dict[str, Any] = {"task_folder": task_folder(config), "items": items, "lm_eval_tasks": True}
        on_main(self._describe)  # a task that is not there is told now, not after hours

    @classmethod
    def of_run(
        cls,
        config: TrainingConfig,
        accelerator: Accelerator,
        documents: Sequence[TokenDocuments],
        tokenizer: PreTrainedTokenizerBase,
        items: Path,
    ) -> Suite | None:
        """The suite that a run's config asks for, None if it asks for none; collective.

        Args:
            documents: of each held-out source; the run's own items are made of them and written to `items`.

        Raises:
            ValueError: as of the class and of `write_items`.
        """
        asked, length = config.evaluation.lm_eval, config.data.sequence_length
        if asked is None:
            return None
        if any(name.startswith(OWN_TASKS) for name in asked.tasks):
            on_main(lambda: write_items(items, documents, tokenizer, length))
        return cls(accelerator, tokenizer, asked, items=items, max_length=length)

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Score `model` after `step` steps; collective, with the same result in all processes.

        Returns:
            `kind` "lm_eval", `step`, `seconds`, and `tasks`: by name the scores of `evaluation.harness.evaluate`,
            without those of single items.
        """
        found = on_main(lambda: self._score(self._accelerator.unwrap_model(model)))
        tasks = {
            name: {key: value for key, value in score.items() if key in _KEPT} for name, score in found["tasks"].items()
        }
        return {"kind": "lm_eval", "step": step, "tasks": tasks, "seconds": found["seconds"]}

    def _describe(self) -> None:
        # Here, not above: lm-eval takes seconds to import, on one process out of many.
        from ..evaluation import harness

        harness.describe(self._config.tasks, **self._places)

    def _score(self, model: Any) -> dict[str, Any]:
        from ..evaluation import harness

        with undisturbed(model), self._accelerator.autocast():
            return harness.evaluate(
                model,
                self._tokenizer,
                self._config.tasks,
                **self._places,
                max_length=self._max_length,
                batch_size=self._config.batch_size,
                limit=self._config.limit,
            )


def task_folder(config: LmEvalConfig) -> Path:
    """Where the tasks of a run are defined.

    Raises:
        ValueError: it is no folder.
    """
    folder = resource("eval", "tasks", "training") if config.task_folder is None else Path(config.task_folder)
    if not folder.is_dir():
        raise ValueError(f"evaluation.lm_eval.task_folder is {folder}, which is no folder")
    return folder
