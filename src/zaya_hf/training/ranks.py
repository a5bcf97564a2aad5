"""Errors and answers that the processes of a run share, so that none waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["is_main", "on_main", "rank", "together", "world_size"]

Result = TypeVar("Result")


def world_size() -> int:
    """Processes that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    return rank() == 0


def together(action: Callable[[], Result]) -> Result:
    """What `action` returns in this process, once it is done in all.

    Raises:
        OSError: it failed in another process; names the process and the error.
        BaseException: what `action` raised, in the process that it was raised in.
    """
    if world_size() == 1:
        return action()
    result: Any = None
    problem: BaseException | None = None
    try:
        result = action()
    except BaseException as error:  # the others are told of an interruption too
        problem = error
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for number, text in enumerate(problems):
        if text is not None:
            raise OSError(f"process {number} of {world_size()}: {text}")
    return result


def on_main(action: Callable[[], Result]) -> Result:
    """What `action` returns in the main process, where alone it is called; the same in all.

    Args:
        action: what it returns can be pickled.

    Raises:
        OSError: in the other processes, where it failed in the main one.
    """
    result = together(lambda: action() if is_main() else None)
    if world_size() > 1:
        box: list[Any] = [result]
        dist.broadcast_object_list(box, src=0)
        result = box[0]
    return result  # type: ignore[return-value]
