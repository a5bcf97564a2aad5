"""Megatron-LM's indexed datasets: token ids in a .bin file, lengths and places in an .idx file beside it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import digests
from .documents import MappedArray, TokenDocuments

__all__ = ["open_megatron"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, code of the dtype, sequences, entries of the index of documents
# The codes that stand for integers; 6 and 7 are floats, which ids never are.
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


_FARTHEST = 2**62  # bytes; sums of places and lengths stay within int64


@dataclass(frozen=True)
class _Index:
    dtype: str
    lengths: np.ndarray  # int32 [sequences], tokens
    places: np.ndarray  # int64 [sequences], bytes
    documents: np.ndarray  # int64 [documents + 1], number of each document's first sequence


def open_megatron(files: Sequence[tuple[str, Path]], name: str, eos_id: int | None) -> TokenDocuments:
    """The documents of .bin files with their .idx files, in order. A document without tokens is left out.

    A document is all sequences between two entries of the document index: several where the corpus was split into
    sentences.

    Args:
        files: (name, path) of the .bin files.
        name: of the source.
        eos_id: what the tokenizer ends documents with; nothing is added.

    Raises:
        ValueError: a file is damaged, of another format, or holds more than one modality; it is named.
    """
    shards, starts, lengths, shard_of, digest = [], [], [], [], {}
    for number, (file, path) in enumerate(files):
        index_file = path.with_suffix(".idx")
        index = _read_index(index_file)
        size = np.dtype(index.dtype).itemsize
        begin, length = _documents(index_file, index, size)
        kept = length > 0
        shards.append(MappedArray(path, index.dtype, _checked_size(path, index, size) // size))
        starts.append(begin[kept])
        lengths.append(length[kept])
        shard_of.append(np.full(int(kept.sum()), number, np.int32))
        digest[file] = digests.sampled(path)
        digest[str(Path(file).with_suffix(".idx").as_posix())] = digests.sampled(index_file)
    return TokenDocuments(
        name=name,
        shards=tuple(shards),
        starts=np.concatenate(starts),
        lengths=np.concatenate(lengths),
        fingerprint=digests.of_values("megatron", digest),
        files=digest,
        eos_id=eos_id,
        shard_of=np.concatenate(shard_of) if len(shards) > 1 else None,
    )


def _read_index(path: Path) -> _Index:
    with path.open("rb") as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
    if head[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is no index of Megatron-LM: it does not begin with MMIDIDX")
    if len(head) < len(_MAGIC) + _HEADER.size:
        raise ValueError(f"{path} is damaged: it ends within its header")
    version, code, sequences, entries = _HEADER.unpack(head[len(_MAGIC) :])
    if version != 1:
        raise ValueError(f"{path} has version {version}; version 1 can be read")
    if code not in _DTYPES:
        raise ValueError(f"{path} has dtype code {code}, which stands for no integers")
    expected = len(head) + 12 * sequences + 8 * entries
    size = path.stat().st_size
    if size == expected + sequences and sequences:
        raise ValueError(f"{path} is of a multimodal dataset (it has modes of sequences), which cannot be trained on")
    if size != expected:
        raise ValueError(f"{path} is damaged: {size:,} bytes; {sequences:,} sequences take {expected:,}")
    offset, arrays = len(head), []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", entries)):
        arrays.append(MappedArray(path, dtype, count, offset).array)
        offset += np.dtype(dtype).itemsize * count
    return _Index(_DTYPES[code], *arrays)


def _documents(path: Path, index: _Index, size: int) -> tuple[np.ndarray, np.ndarray]:
    """First token and number of tokens of each document, int64 [documents]."""
    lengths, places, documents = index.lengths.astype(np.int64), index.places, index.documents
    if (lengths < 0).any() or (places < 0).any() or (places % size).any() or (places > _FARTHEST).any():
        raise ValueError(f"{path} is damaged: it has lengths or places that cannot be")
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise ValueError(f"{path} is damaged: its index of documents does not ascend from 0 to {len(lengths)}")
    follows = np.append(places[1:] == places[:-1] + lengths[:-1] * size, True)  # whether the next one is right behind
    last = documents[1:][np.diff(documents) > 0] - 1
    follows[last] = True  # what comes after a document may be anywhere
    if not follows.all():
        raise ValueError(f"{path}: sequence {int(np.argmin(follows)) + 1} is not behind the one before it")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    total = ends[documents[1:]] - ends[documents[:-1]]
    begin = np.zeros(len(total), np.int64)
    some = np.diff(documents) > 0
    begin[some] = places[documents[:-1][some]] // size
    return begin, total


def _checked_size(path: Path, index: _Index, size: int) -> int:
    """Bytes of the .bin file, which end where the last sequence does."""
    ends = index.places + index.lengths.astype(np.int64) * size
    wanted, there = int(ends.max()) if len(ends) else 0, path.stat().st_size
    if there != wanted:
        raise ValueError(f"{path} is damaged: {there:,} bytes; its index tells of {wanted:,}")
    return there
