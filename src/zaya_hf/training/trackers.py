"""TensorBoard and Weights & Biases through Accelerate's trackers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Trackers:
    """The trackers of one run; they start at once.

    TensorBoard's files are in `folder`/tensorboard/`project`. W&B reads its own settings (``WANDB_MODE=offline`` and
    the like); its files go to `folder`.

    Args:
        accelerator: whose main process tracks.
        names: "tensorboard", "wandb".
        folder: of the run.
        project: W&B's, and the name of TensorBoard's folder.
        settings: of the run, as W&B's config.

    Raises:
        ValueError: a package is missing, or a tracker cannot start.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        names: Sequence[str],
        folder: Path,
        *,
        project: str = "zaya",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        missing = [_PACKAGES[name] for name in names if importlib.util.find_spec(_PACKAGES[name]) is None]
        if missing:
            raise ValueError(
                f"logging.trackers asks for {', '.join(missing)}, which is not installed: pip install "
                f"{' '.join(missing)}, or leave it out"
            )
        self._accelerator = accelerator
        self._names = list(dict.fromkeys(names))
        if not self._names:
            return
        accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
        accelerator.log_with = filter_trackers(self._names, accelerator.logging_dir)
        options = {"wandb": {"config": dict(settings or {}), "dir": str(folder), "name": folder.name}}
        try:
            accelerator.init_trackers(project, init_kwargs=options)
        except Exception as error:  # of another package: no key, no network, no write access
            raise ValueError(f"{' and '.join(self._names)} cannot start: {error}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values of one step, under names such as ``train/loss``."""
        if self._names and values:
            self._accelerator.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """What was logged after `step` is void: TensorBoard hides it. W&B cannot take steps back; it leaves out values
        until the run is past where it was."""
        for tracker in self._accelerator.trackers if self._names else ():
            if tracker.name == "tensorboard":
                tracker.finish()
                tracker.init_kwargs["purge_step"] = step + 1
                tracker.start()

    def close(self) -> None:
        """Write out what is left. Accelerate's own `end_training` is not called: it ends the process group."""
        for tracker in self._accelerator.trackers if self._names else ():
            tracker.finish()
        self._names = []
