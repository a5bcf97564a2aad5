"""Documents as token ids on disk: what packing and order are made over, whatever format the ids came in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .order import STEP, mixed

__all__ = ["MappedArray", "TokenDocuments", "hashes", "held_out_split"]

_PLACES = 64  # of a document, that its hash looks at
_ROUND = 1 << 15  # documents hashed at once


@dataclass(frozen=True)
class MappedArray:
    """A stretch of a file as an array, mapped into memory when it is first read.

    Copies for other processes hold the path and map the file again; a pickled ``np.memmap`` would hold its content.

    Attributes:
        dtype: of numpy, byte order included, such as "<u2".
        offset: of the first element in the file, in bytes.
        count: elements.
    """

    path: Path
    dtype: str
    count: int
    offset: int = 0

    @cached_property
    def array(self) -> np.ndarray:
        if self.count == 0:  # nothing can be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.count,))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "array"}


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Documents of one source. They hold their BOS and EOS ids as they were stored.

    Attributes:
        name: of the source, in logs and messages.
        shards: the ids, any integer dtype, one array per file.
        starts: int64 [documents], place of the first token in its shard.
        lengths: int64 [documents], tokens.
        fingerprint: SHA-256 of everything that decides the ids and their division into documents.
        files: file name -> digest, so that a changed file can be named.
        eos_id: what ends documents; None where it is not known.
        shard_of: int [documents], number of the shard; None: there is one shard.
        bytes: int64 [documents], UTF-8 bytes of the text; None where they are not known.
        target_shards: bool as uint8, shaped as `shards`: which tokens are to be predicted; None: all.
    """

    name: str
    shards: Sequence[MappedArray]
    starts: np.ndarray
    lengths: np.ndarray
    fingerprint: str
    files: dict[str, str] = field(default_factory=dict)
    eos_id: int | None = None
    shard_of: np.ndarray | None = None
    bytes: np.ndarray | None = None
    target_shards: Sequence[MappedArray] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids [stop - start] of a document, in the dtype of the file; a view that cannot be written to."""
        return self._piece(self.shards, document, start, stop)

    def targets(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        """Bool [stop - start]: which tokens are to be predicted; None: all."""
        if self.target_shards is None:
            return None
        return self._piece(self.target_shards, document, start, stop).astype(bool)

    def subset(self, indices: Sequence[int] | np.ndarray) -> TokenDocuments:
        """The documents with these numbers, in this order."""
        chosen = np.asarray(indices, dtype=np.int64)
        digest = hashlib.sha256(self.fingerprint.encode() + chosen.astype("<i8").tobytes()).hexdigest()
        return replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            shard_of=None if self.shard_of is None else self.shard_of[chosen],
            bytes=None if self.bytes is None else self.bytes[chosen],
            fingerprint=digest,
        )

    def _piece(self, shards: Sequence[MappedArray], document: int, start: int, stop: int | None) -> np.ndarray:
        length = int(self.lengths[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.name}: document {document} has {length} tokens; asked for {start} to {stop}")
        first = int(self.starts[document])
        shard = shards[0 if self.shard_of is None else int(self.shard_of[document])]
        return np.asarray(shard.array[first + start : first + stop])


def hashes(documents: TokenDocuments) -> np.ndarray:
    """uint64 [documents]: of the length and 64 ids of each document, evenly spaced.

    Equal documents have equal hashes, wherever they are and in whatever format. Reading all ids of a large corpus only
    to divide it would take hours.
    """
    found = np.empty(len(documents), np.uint64)
    spaced = np.arange(_PLACES, dtype=np.int64)
    for first in range(0, len(documents), _ROUND):
        part = slice(first, first + _ROUND)
        lengths = np.asarray(documents.lengths[part])
        places = documents.starts[part, None] + lengths[:, None] * spaced // _PLACES
        ids = np.zeros(places.shape, np.uint64)
        shard_of = np.zeros(len(lengths), np.int64) if documents.shard_of is None else documents.shard_of[part]
        for number in np.unique(shard_of[lengths > 0]):
            here = (shard_of == number) & (lengths > 0)
            ids[here] = documents.shards[number].array[places[here]].astype(np.uint64)
        state = mixed(lengths.astype(np.uint64) + STEP)
        for column in ids.T:
            state = mixed((state ^ column) + STEP)
        found[part] = state
    return found


def held_out_split(documents: TokenDocuments, fraction: float) -> tuple[TokenDocuments, TokenDocuments]:
    """(training, held out): a document is held out if its hash says so, so that copies of it are on the same side.

    Args:
        fraction: of the documents to hold out, in (0, 1); met on average. However few there are, at least one is held
            out, and one is not.

    Raises:
        ValueError: there are no two different documents.
    """
    found = hashes(documents)
    out = found < np.uint64(int(fraction * 2**64))
    if not out.any():
        out = found == found.min(initial=np.iinfo(np.uint64).max)
    elif out.all():
        out = found != found.max()
    if out.all() or not out.any():
        there = "is one" if len(documents) == 1 else f"are {len(documents)}, all the same"
        raise ValueError(
            f"{documents.name}: data.held_out_fraction needs two different documents, one of them to train on; here "
            f"{there}. Name files in data.held_out."
        )
    return documents.subset(np.flatnonzero(~out)), documents.subset(np.flatnonzero(out))
