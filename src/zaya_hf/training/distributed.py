"""The processes of a run: joining them, and what they sum up."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["make_accelerator", "total"]

PATIENCE = timedelta(hours=2)
PRECISIONS = {"float32": "no", "bfloat16": "bf16"}


class _OwnBuffers(DistributedDataParallelKwargs):
    """Each process keeps its buffers: all compute the same balancing biases, from counts that are summed over all."""

    def to_kwargs(self) -> dict[str, Any]:
        known = inspect.signature(DistributedDataParallel).parameters
        # The older name warns where there is the newer one.
        own = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return {own: False, "gradient_as_bucket_view": True}  # gradients are not held twice


def make_accelerator(precision: str = "float32") -> Accelerator:
    """An `Accelerator` for this process and those that were started with it; on GPUs if there are some, else on CPUs.

    What the environment says of precision and accumulation is left alone.

    Args:
        precision: of matrix products. "float32", or "bfloat16" by autocast: the residual stream, the loss and the
            weights keep their dtype.

    Raises:
        ValueError: for another precision; where a launcher started several processes which did not find each other.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}.")
    accelerator = Accelerator(
        # Without a GPU, accelerate would look for other devices, with numbers of their own; and leave processes that
        # were started together unconnected.
        cpu=not torch.cuda.is_available(),
        mixed_precision=PRECISIONS[precision],
        # The loop accumulates; a number may be in the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # The others wait while one tokenises, writes a checkpoint or runs lm-eval; the default is ten minutes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    accelerator.ddp_handler = _OwnBuffers()
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started together (WORLD_SIZE), but this one is connected to "
            f"{accelerator.num_processes - 1} others: start them by `accelerate launch` or `torchrun`, which also set "
            "RANK, LOCAL_RANK and MASTER_ADDR."
        )
    return accelerator


def total(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The sum of `values` over all processes of `accelerator`, the same to the bit in each.

    Collective; the host does not wait for the device.
    """
    summed: Tensor = accelerator.reduce(values, "sum")
    return summed
