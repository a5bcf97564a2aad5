"""Answers that a killed run had already found, so that it goes on where it was and ends as if it had not been killed.

Work is cut into units before any of it is done, from the requests alone. A unit is all or nothing: its numbers are
those of one fixed batch, whether it is computed now or read here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Journal:
    """Results of units, in files of JSON Lines: one for every process, read by all.

    Args:
        folder: made if need be; None: nothing is kept.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._known: dict[str, Any] = {}
        self._file: Any = None
        if folder is not None:
            for path in sorted(folder.glob("*.jsonl")):
                self._read(path)

    def _read(self, path: Path) -> None:
        for line in path.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
                self._known[entry["unit"]] = entry["results"]
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the process ended

    def __contains__(self, unit: str) -> bool:
        return unit in self._known

    def __getitem__(self, unit: str) -> Any:
        return self._known[unit]

    def add(self, unit: str, results: Any) -> None:
        """Keep the results of a unit, if there is a folder: anything that JSON gives back as it is, floats included."""
        if self._folder is None:
            return
        self._known[unit] = results
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            rank, _ = process()
            self._file = (self._folder / f"process-{rank}.jsonl").open("ab")
            self._file.write(b"\n")  # closes a line that was cut off
        self._file.write(json.dumps({"unit": unit, "results": results}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more is written; what is known stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def name_of(*parts: Any) -> str:
    """A unit's name: what is in it, hashed."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def process() -> tuple[int, int]:
    """This process's rank among those of the run, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def work_through(
    journal: Journal, units: Sequence[str], compute: Callable[[int], Any], on_done: Callable[[int], None]
) -> list[Any]:
    """Results of all units, in order, in every process; each is computed by one of them.

    Args:
        units: names; the same in every process.
        compute: gives the results of the unit at an index.
        on_done: is called with the index of every unit that needs no more work here.

    Raises:
        RuntimeError: in all processes, if one of them failed.
    """
    rank, processes = process()
    results = {index: journal[unit] for index, unit in enumerate(units) if unit in journal}
    if processes > 1:  # not every process need see the same files
        _share(results, None)
    for index in results:
        on_done(index)
    missing = [index for index in range(len(units)) if index not in results]
    failure: Exception | None = None
    for index in missing[rank::processes]:
        try:
            results[index] = compute(index)
            journal.add(units[index], results[index])
        except Exception as error:
            if processes == 1:
                raise
            failure = error
            break
        on_done(index)
    if processes > 1:
        _share(results, failure)
    return [results[index] for index in range(len(units))]


def _share(results: dict[int, Any], failure: Exception | None) -> None:
    """Give every process what any has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (results, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    failed = [f"process {rank}: {text}" for rank, (_, text) in enumerate(found) if text is not None]
    if failed:
        raise RuntimeError(f"another process failed; {failed[0]}")
    for others, _ in found:
        results.update(others)
