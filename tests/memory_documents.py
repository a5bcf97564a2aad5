"""Token documents that lie in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zaya_hf.training.data.documents import TokenDocuments


@dataclass
class MemoryArray:
    """What `TokenDocuments` wants of a shard."""

    array: np.ndarray


def documents_of(
    documents: Sequence[Sequence[int]],
    targets: Sequence[Sequence[bool]] | None = None,
    *,
    name: str = "memory",
    file: str = "memory.jsonl",
) -> TokenDocuments:
    """One source of one file.

    Args:
        documents: ids of each document.
        targets: for each id, whether it is to be predicted; None: all are.
    """
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    ids = np.array([number for document in documents for number in document], dtype=np.uint16)
    digest = hashlib.sha256(repr([list(document) for document in documents]).encode()).hexdigest()
    asked = None
    if targets is not None:
        asked = [MemoryArray(np.array([flag for document in targets for flag in document], dtype=np.uint8))]
    return TokenDocuments(
        name=name,
        shards=[MemoryArray(ids)],  # type: ignore[list-item]
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=hashlib.sha256(f"{digest} {targets}".encode()).hexdigest(),
        files={file: digest},
        bytes=3 * lengths,
        target_shards=asked,  # type: ignore[arg-type]
    )


def numbered(lengths: Sequence[int], *, name: str = "memory", file: str = "memory.jsonl") -> TokenDocuments:
    """Documents of these lengths whose ids are 3, 4, 5, ... over all of them: every id occurs once."""
    ids = iter(range(3, 3 + sum(lengths)))
    return documents_of([[next(ids) for _ in range(length)] for length in lengths], name=name, file=file)
