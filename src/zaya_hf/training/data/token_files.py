"""Folders of token ids, which `zaya data build` writes and training maps into memory.

ids.bin       token ids of all documents behind each other, little-endian uint16 or uint32
offsets.bin   int64 [documents + 1]: where each document begins in ids.bin, in tokens; the last is the end
bytes.bin     int64 [documents]: UTF-8 bytes of each text; not of conversations
targets.bin   uint8 [tokens]: 1 where a token is to be predicted; of conversations only
tokenizer/    the tokenizer, in folders that are to be read elsewhere
meta.json     what is in the folder, what it was made of, size and digests of each file; written last
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers
import transformers

from zaya_hf import atomic
from zaya_hf.temporary_folders import make_temporary, remove_temporary

from . import digests
from .documents import MappedArray, TokenDocuments

__all__ = ["FORMAT", "TokenFolderWriter", "is_token_folder", "open_token_folder", "read_meta", "smallest_dtype"]

FORMAT = "zaya tokens"
VERSION = 1
META = "meta.json"
TOKENIZER = "tokenizer"
_REQUIRED = ("ids.bin", "offsets.bin")
_FIELDS = {"dtype": str, "vocab_size": int, "documents": int, "tokens": int, "files": dict, "sources": list, "key": str}


def smallest_dtype(vocab_size: int) -> str:
    """The dtype, in numpy's words, that holds ids below `vocab_size`."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class TokenFolderWriter:
    """Writes a folder of token ids beside its place and moves it there when it is whole; memory does not grow.

    To be used with ``with``: leaving it without `finish`, by an error too, leaves nothing behind. What a killed process
    leaves is removed by the next one that writes to the same parent folder.

    Args:
        out: the folder to be; its parent is made if need be.
        vocab_size: decides the dtype of the ids.
        with_bytes: whether documents come with the size of their text.
        with_targets: whether documents come with a mask of targets.
    """

    def __init__(self, out: Path, vocab_size: int, *, with_bytes: bool, with_targets: bool) -> None:
        self._out, self._vocab_size = out, vocab_size
        self._dtype = np.dtype(smallest_dtype(vocab_size))
        self._with = {"bytes.bin": with_bytes, "targets.bin": with_targets}
        self.documents = self.tokens = self.bytes = self.targets = 0

    def __enter__(self) -> TokenFolderWriter:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._place = make_temporary(self._out.parent, ".tokens")  # of its owner alone, unlike the folder in it
        self._folder = self._place / "folder"
        self._folder.mkdir()
        self._files = {name: _HashedFile(self._folder / name) for name in _REQUIRED}
        self._files |= {name: _HashedFile(self._folder / name) for name, wanted in self._with.items() if wanted}
        self._files["offsets.bin"].write(np.zeros(1, "<i8"))
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        remove_temporary(self._place)

    def append(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        sizes: np.ndarray | None = None,
        targets: np.ndarray | None = None,
    ) -> None:
        """Add documents.

        Args:
            ids: [tokens] of all of them behind each other, any integer dtype.
            lengths: [documents] in tokens.
            sizes: [documents] in bytes of UTF-8, if the folder has them.
            targets: bool [tokens], if the folder has them.

        Raises:
            ValueError: an id that is not in the vocabulary.
        """
        assert int(lengths.sum()) == len(ids)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self._vocab_size} entries")
        self._files["ids.bin"].write(ids.astype(self._dtype))
        self._files["offsets.bin"].write((self.tokens + np.cumsum(lengths, dtype=np.int64)).astype("<i8"))
        self.documents += len(lengths)
        self.tokens += len(ids)
        if self._with["bytes.bin"]:
            assert sizes is not None
            self._files["bytes.bin"].write(sizes.astype("<i8"))
            self.bytes += int(sizes.sum())
        if self._with["targets.bin"]:
            assert targets is not None
            self._files["targets.bin"].write(targets.astype(np.uint8))
            self.targets += int(targets.sum())

    def finish(
        self, description: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerBase | None = None
    ) -> None:
        """Write ``meta.json`` with `description` in it (`key`, `sources`, `tokenizer`, ...) and move the folder to its
        place.

        Args:
            tokenizer: saved with it; None: not.

        Raises:
            OSError: the place is taken, or the disk is full.
        """
        if tokenizer is not None:
            tokenizer.save_pretrained(self._folder / TOKENIZER)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": "uint16" if self._dtype.itemsize == 2 else "uint32",
            "vocab_size": self._vocab_size,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes if self._with["bytes.bin"] else None,
            "targets": self.targets if self._with["targets.bin"] else None,
            **description,
            "files": {name: file.finish() for name, file in sorted(self._files.items())},
            "versions": {
                "zaya_hf": metadata.version("zaya_hf"),
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        }
        atomic.write_json(self._folder / META, meta)
        if self._out.is_dir() and not any(self._out.iterdir()):
            self._out.rmdir()
        _sync_folder(self._folder)
        self._folder.rename(self._out)
        _sync_folder(self._out.parent)


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self) -> dict[str, Any]:
        """What meta.json says of the file, which is on the disk from here on."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"size": self._size, "sha256": self._digest.hexdigest(), "sampled": digests.sampled(self._path)}

    def close(self) -> None:
        with suppress(OSError):  # of a full disk, which was said when it happened; the file is removed
            self._file.close()


def is_token_folder(path: Path) -> bool:
    """Whether there is a folder of ours, whole or damaged."""
    return path.is_dir() and any((path / name).exists() for name in (META, "ids.bin"))


def read_meta(folder: Path) -> dict[str, Any]:
    """``meta.json`` of a folder of ours.

    Raises:
        ValueError: there is none, or it is damaged or of a later version.
    """
    file = folder / META
    if not folder.is_dir():
        raise ValueError(f"no such folder of tokens: {folder}")
    if not file.is_file():
        raise ValueError(f"{folder} is no folder of tokens: there is no {META}; `zaya data build` writes one")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{file} does not say that the folder holds tokens ('format': '{FORMAT}')")
    if meta.get("version") != VERSION:
        raise ValueError(f"{file} has version {meta.get('version')}; this zaya_hf reads version {VERSION}")
    for name, kind in _FIELDS.items():
        if not isinstance(meta.get(name), kind):
            raise ValueError(f"{file} is damaged: {name!r} is missing or of another type")
    if meta["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"{file} is damaged: dtype {meta['dtype']!r}")
    return meta


def open_token_folder(folder: Path, name: str, *, of_sources: bool = False) -> TokenDocuments:
    """The documents of a folder. Sizes and sampled digests of its files are checked.

    Args:
        of_sources: `files` names what the folder was made of, not its own files.

    Raises:
        ValueError: the folder is damaged; the file is named.
    """
    meta = read_meta(folder)
    for file in _REQUIRED:
        if file not in meta["files"]:
            raise ValueError(f"{folder / META} is damaged: it does not list {file}")
    for file, facts in meta["files"].items():
        _check_file(folder / file, facts)
    counts = meta["documents"], meta["tokens"]
    dtype = "<u2" if meta["dtype"] == "uint16" else "<u4"
    expected = {
        "ids.bin": counts[1] * np.dtype(dtype).itemsize,
        "offsets.bin": 8 * (counts[0] + 1),
        "bytes.bin": 8 * counts[0],
        "targets.bin": counts[1],
    }
    for file, facts in meta["files"].items():
        if expected.get(file) != facts["size"]:
            raise ValueError(f"{folder / META} is damaged: {file} does not have the size of {counts[0]} documents")
    ids = MappedArray(folder / "ids.bin", dtype, counts[1])
    offsets = MappedArray(folder / "offsets.bin", "<i8", counts[0] + 1).array
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != counts[1] or (lengths < 0).any():
        raise ValueError(f"{folder / 'offsets.bin'} is damaged: its places do not ascend from 0 to {counts[1]}")
    has_bytes, has_targets = (file in meta["files"] for file in ("bytes.bin", "targets.bin"))
    own_files = {f"{name}/{file}": facts["sha256"] for file, facts in meta["files"].items()}
    return TokenDocuments(
        name=name,
        shards=(ids,),
        starts=offsets[:-1],
        lengths=lengths,
        fingerprint=digests.of_values(meta["dtype"], {file: f["sha256"] for file, f in meta["files"].items()}),
        files={source["path"]: source["sha256"] for source in meta["sources"]} if of_sources else own_files,
        eos_id=meta.get("eos_id"),
        bytes=MappedArray(folder / "bytes.bin", "<i8", counts[0]).array if has_bytes else None,
        target_shards=(MappedArray(folder / "targets.bin", "|u1", counts[1]),) if has_targets else None,
    )


def _check_file(path: Path, facts: Any) -> None:
    """Refuse a file that is not what meta.json says."""
    if not isinstance(facts, dict) or not {"size", "sha256", "sampled"} <= facts.keys():
        raise ValueError(f"{path.parent / META} is damaged: it does not describe {path.name}")
    if not path.is_file():
        raise ValueError(f"the folder of tokens {path.parent} is damaged: {path.name} is missing")
    size = path.stat().st_size
    if size != facts["size"]:
        raise ValueError(f"{path} is damaged: it has {size:,} bytes of {facts['size']:,}; build the folder again")
    if digests.sampled(path) != facts["sampled"]:
        raise ValueError(f"{path} is damaged or was changed: its content is not what was written; build it again")


def _sync_folder(folder: Path) -> None:
    """Make what was done to the names in a folder last, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows opens no folders
    try:
        os.fsync(handle)
    except OSError:
        pass  # nor do some network file systems sync them
    finally:
        os.close(handle)
