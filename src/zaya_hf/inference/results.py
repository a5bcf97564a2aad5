"""The results of `zaya generate` as JSON Lines: in a file that stands whole or not at all, or on standard output.

While texts are made, they are collected in ``FILE.part``, one JSON object a line after a first line that says which
command it belongs to. A run that was stopped goes on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from zaya_hf import atomic

Record = dict[str, Any]


def fingerprint(*what: Any) -> str:
    """A digest of everything that decides what the texts will be."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


# JSON may have them plain, but many readers take them for ends of lines.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def to_line(record: Record) -> str:
    """One line of JSON."""
    return json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n"


def holds_all(path: Path, prompts: Sequence[tuple[str | None, Any]], samples: int) -> bool:
    """Whether a file has a result for each of the prompts (text, messages) and samples, and no other."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        found = [(r["index"], r["sample"], r.get("prompt"), r.get("messages")) for r in records]
    except (ValueError, KeyError, TypeError):
        return False
    wanted = [
        (index, sample, text if messages is None else None, None if messages is None else list(messages))
        for index, (text, messages) in enumerate(prompts)
        for sample in range(samples)
    ]
    return found == wanted


class ResultFile:
    """Results by ("index", "sample"), written to a file in that order when all are there.

    Args:
        replace: replace an older file, and forget what an interrupted run has left.
        resume: go on from what an interrupted run has left.

    Raises:
        ValueError: before anything is written: the file exists already, or there is an interrupted run and it was not
            said what to do with it, or it was of another command.
    """

    def __init__(self, path: Path, replace: bool = False, resume: bool = False):
        self.path, self.part = path, path.with_name(path.name + ".part")
        self._resume = resume
        self._records: dict[tuple[int, int], Record] = {}
        self._file: TextIO | None = None
        if path.is_dir():
            raise ValueError(f"--output {path} is a folder; name a file in it")
        if path.exists() and not replace:
            raise ValueError(f"{path} exists already: name another file, or --force replaces it")
        if resume and not self.part.exists():
            raise ValueError(f"there is no {self.part} of an interrupted run: leave out --resume")
        if self.part.exists() and not (replace or resume):
            raise ValueError(f"{self.part} is of an interrupted run: --resume goes on with it, --force starts again")

    def open(self, digest: str, seed: int | None) -> int | None:
        """Begin, or go on. Returns the seed to use: that of the interrupted run, where none was given.

        Raises:
            ValueError: the interrupted run was of another command.
        """
        if not self._resume:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.part.open("w", encoding="utf-8", newline="\n")
            self._write({"command": digest, "seed": seed})
            return seed
        lines = self.part.read_bytes().split(b"\n")
        whole, torn = lines[:-1], lines[-1]  # a run that was killed may have left half a line
        try:
            head, *records = (json.loads(line) for line in whole)
            earlier, earlier_seed = head["command"], head["seed"]
            found = {(record["index"], record["sample"]): record for record in records}
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.part} is not what an interrupted run leaves: --force without --resume starts again"
            ) from None
        if earlier != digest or seed not in (None, earlier_seed):
            raise ValueError(
                f"{self.part} is of a run with other prompts, options or files of the model: --force without --resume "
                "starts again"
            )
        self._records = found
        if torn:
            with self.part.open("r+b") as file:
                file.truncate(self.part.stat().st_size - len(torn))
        self._file = self.part.open("a", encoding="utf-8", newline="\n")
        return int(earlier_seed)

    def has(self, index: int, sample: int) -> bool:
        return (index, sample) in self._records

    def add(self, record: Record) -> None:
        self._records[record["index"], record["sample"]] = record
        self._write(record)

    def finish(self) -> None:
        """Write the file, and remove what was collected."""
        self.close()
        atomic.write_text(self.path, "".join(to_line(self._records[key]) for key in sorted(self._records)))
        self.part.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: Record) -> None:
        assert self._file is not None
        self._file.write(to_line(record))
        self._file.flush()


class OrderedOutput:
    """Passes results on in the order of the prompts, each as soon as all before it are there."""

    def __init__(self, emit: Any, keys: list[tuple[int, int]]):
        self._emit, self._keys = emit, list(reversed(keys))
        self._waiting: dict[tuple[int, int], Record] = {}

    def add(self, record: Record) -> None:
        self._waiting[record["index"], record["sample"]] = record
        while self._keys and self._keys[-1] in self._waiting:
            self._emit(self._waiting.pop(self._keys.pop()))
