"""Flat files of token ids, raw or .npy, in which an EOS id ends every document."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import digests
from .documents import MappedArray, TokenDocuments

__all__ = ["index_flat", "open_flat"]

_CHUNK = 1 << 24  # ids looked at at once
_DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4"}


def index_flat(
    files: Sequence[tuple[str, Path]], dtype: str | None, eos_id: int, vocab_size: int, cache_folder: Path
) -> None:
    """Find where the documents of each file end, once per content, and keep it in `cache_folder`.

    Args:
        files: (name, path).
        dtype: uint16, uint32 or int32, little-endian; of raw files.
        eos_id: what ends documents.
        vocab_size: ids are below it.

    Raises:
        ValueError: a file does not hold such ids, or has no EOS; it is named.
    """
    for name, path in files:
        place = _index_place(path, dtype, eos_id, vocab_size, cache_folder)
        if not place.is_file():
            ends = _ends(name, _mapped(name, path, dtype).array, eos_id, vocab_size)
            cache_folder.mkdir(parents=True, exist_ok=True)
            unfinished = place.with_name(f".{place.name}.{os.getpid()}.tmp")
            try:
                with unfinished.open("wb") as file:
                    np.save(file, ends)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(place)
            finally:
                unfinished.unlink(missing_ok=True)


def open_flat(
    files: Sequence[tuple[str, Path]], name: str, dtype: str | None, eos_id: int, vocab_size: int, cache_folder: Path
) -> TokenDocuments:
    """The documents of files for which `index_flat` was called with the same arguments. What follows the last EOS of a
    file is a document too.

    Raises:
        ValueError: a file was changed since; it is named.
    """
    shards, starts, lengths, shard_of, digest = [], [], [], [], {}
    for number, (file, path) in enumerate(files):
        place = _index_place(path, dtype, eos_id, vocab_size, cache_folder)
        if not place.is_file():
            raise ValueError(f"{path} was changed while the run started")
        ends = np.load(place, mmap_mode="r")
        begin = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        shards.append(_mapped(file, path, dtype))
        starts.append(begin)
        lengths.append(np.asarray(ends) - begin)
        shard_of.append(np.full(len(ends), number, np.int32))
        digest[file] = digests.sampled(path)
    return TokenDocuments(
        name=name,
        shards=tuple(shards),
        starts=np.concatenate(starts),
        lengths=np.concatenate(lengths),
        fingerprint=digests.of_values("flat", dtype, eos_id, digest),
        files=digest,
        eos_id=eos_id,
        shard_of=np.concatenate(shard_of) if len(shards) > 1 else None,
    )


def _index_place(path: Path, dtype: str | None, eos_id: int, vocab_size: int, cache_folder: Path) -> Path:
    key = digests.of_values("ends", digests.sampled(path), dtype, eos_id, vocab_size)
    return cache_folder / f"ends-{key[:24]}.npy"


def _mapped(name: str, path: Path, dtype: str | None) -> MappedArray:
    size = path.stat().st_size
    if path.suffix.lower() == ".npy":
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is no .npy file that can be mapped: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {array.dtype} {list(array.shape)}; integers with one dimension are needed")
        offset = int(array.offset) if isinstance(array, np.memmap) else size - array.nbytes
        if offset + array.nbytes != size:
            behind = size - offset - array.nbytes
            raise ValueError(f"{path} has {behind:,} bytes behind its array of {len(array):,} ids: it is damaged")
        return MappedArray(path, array.dtype.str, len(array), offset)
    if dtype is None:
        raise ValueError(f"{name} has raw ids: say of which dtype (uint16, uint32, int32)")
    itemsize = np.dtype(_DTYPES[dtype]).itemsize
    if size % itemsize:
        raise ValueError(f"{path} has {size:,} bytes, which are no whole number of ids in {dtype}")
    return MappedArray(path, _DTYPES[dtype], size // itemsize)


def _ends(name: str, ids: np.ndarray, eos_id: int, vocab_size: int) -> np.ndarray:
    """int64 [documents]: the place behind the last token of each document."""
    found = []
    for first in range(0, len(ids), _CHUNK):
        chunk = np.asarray(ids[first : first + _CHUNK])
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name}: id {low if low < 0 else high} is not in the vocabulary of {vocab_size} entries; is the dtype "
                "or the tokenizer another?"
            )
        found.append(first + 1 + np.flatnonzero(chunk == eos_id))
    ends = np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)
    if not len(ends):
        raise ValueError(f"{name}: the eos id {eos_id} is nowhere in it; is the dtype or the tokenizer another?")
    return ends if ends[-1] == len(ids) else np.append(ends, len(ids))
