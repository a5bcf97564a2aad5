"""Sources of a run to documents: text is tokenised into folders of tokens, ids that exist are opened where they are.

`prepare` does the work and is for one process; what it returns is small, can be sent to the others, and opens the
documents in each of them.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .digests import FileHashes, of_values
from .documents import TokenDocuments
from .encoding import Encoder, encoded
from .flat_files import index_flat, open_flat
from .megatron import open_megatron
from .source_files import RAW_KINDS, Located, locate, source_name
from .text_sources import TextSource
from .token_files import VERSION, TokenFolderWriter, open_token_folder, read_meta
from .tokenizers import adds_bos, tokenizer_digest, vocabulary_digest, vocabulary_size

if TYPE_CHECKING:
    from zaya_hf.training.config import ChatConfig, SourceConfig

__all__ = ["Built", "Prepared", "build_folder", "prepare"]

_LOOKED_AT = 256  # documents of a Megatron file whose ids are compared with the vocabulary


@dataclass(frozen=True)
class Built:
    """What became of sources that were tokenised.

    Attributes:
        folder: where the tokens are.
        new: False: they were there already.
        documents, tokens: how many.
        bytes: UTF-8 bytes of the texts; None for conversations.
        dropped: reason -> number of documents that were left out.
        seconds: it took; 0 where nothing was done.
    """

    folder: Path
    new: bool
    documents: int
    tokens: int
    bytes: int | None
    dropped: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Prepared:
    """A source that every process can open.

    Attributes:
        name: of the source, in logs and messages.
        kind: tokenised, tokens, megatron or flat.
        files: name -> path; of kinds tokenised and tokens one folder, of megatron the files of ids without their index.
        eos_id: what ends documents.
        vocab_size: of the tokenizer; no id of a flat file is beyond it.
        dtype: of the ids of a flat file.
        cache_folder: where the places of documents in flat files are kept.
        built: of kind tokenised.
    """

    name: str
    kind: str
    files: tuple[tuple[str, Path], ...]
    eos_id: int
    vocab_size: int
    dtype: str | None = None
    cache_folder: Path = field(default_factory=Path)
    built: Built | None = None

    def open(self) -> TokenDocuments:
        """Map the files into memory.

        Raises:
            ValueError: a file is damaged or was changed; it is named.
        """
        if self.kind in ("tokens", "tokenised"):
            return open_token_folder(self.files[0][1], self.name, of_sources=self.kind == "tokenised")
        if self.kind == "megatron":
            return open_megatron(self.files, self.name, self.eos_id)
        return open_flat(self.files, self.name, self.dtype, self.eos_id, self.vocab_size, self.cache_folder)


def prepare(
    sources: Sequence[SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path,
    *,
    chat: ChatConfig | None = None,
    max_length: int | None = None,
    processes: int = 1,
) -> list[Prepared]:
    """Tokenise what is text, unless it was done before; check what is ids.

    Text is tokenised again if a file's content (SHA-256), the tokenizer or an option is another.

    Args:
        sources: of the run's config, in the order of the result.
        tokenizer: with an EOS id.
        cache_folder: for tokenised text and for the places of documents in flat files.
        chat: the records are conversations.
        max_length: tokens of a conversation at most.
        processes: that tokenise.

    Raises:
        ValueError: a source is missing, damaged, without documents, or was made with another tokenizer.
    """
    digest, size = tokenizer_digest(tokenizer), vocabulary_size(tokenizer)
    hashes = FileHashes(cache_folder)
    found = []
    for source in sources:
        located, name, built = locate(source), source_name(source), None
        kind, files = located.kind, located.files
        if kind in RAW_KINDS:
            text = TextSource(source, chat is not None, located)
            key = _key([text], hashes, digest, chat, max_length)
            folder = cache_folder / f"{name}-{key[0][:16]}"
            built = _from_cache(folder, key[0]) or build_folder(
                [text],
                tokenizer,
                folder,
                key=key,
                hashes=hashes,
                chat=chat,
                max_length=max_length,
                processes=processes,
            )
            kind, files = "tokenised", ((name, folder),)
        else:
            _check_ids(source, located, tokenizer, cache_folder, chat)
        eos_id = tokenizer.eos_token_id
        assert isinstance(eos_id, int)
        found.append(Prepared(name, kind, files, eos_id, size, source.dtype, cache_folder, built))
    return found


def _key(
    sources: Sequence[TextSource],
    hashes: FileHashes,
    tokenizer: str,
    chat: ChatConfig | None,
    max_length: int | None,
) -> tuple[str, list[dict[str, Any]]]:
    """Digest of all that decides the tokens, and path, size and sha256 of the files."""
    files = [source.digests(hashes) for source in sources]
    options = None if chat is None else [chat.model_dump(), max_length]
    key = of_values(VERSION, files, [source.key() for source in sources], tokenizer, options)
    return key, [file for of_source in files for file in of_source]


def _from_cache(folder: Path, key: str) -> Built | None:
    """What an earlier run built; None: nothing, or it is damaged and was removed."""
    if not folder.exists():
        return None
    try:
        meta = read_meta(folder)
        open_token_folder(folder, folder.name)
    except ValueError:
        shutil.rmtree(folder)
        return None
    if meta["key"] != key:
        raise ValueError(f"{folder} holds the tokens of something else: name another folder")
    return Built(folder, False, meta["documents"], meta["tokens"], meta["bytes"], meta["dropped"], 0.0)


def build_folder(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    key: tuple[str, list[dict[str, Any]]] | None = None,
    hashes: FileHashes | None = None,
    chat: ChatConfig | None = None,
    max_length: int | None = None,
    processes: int = 1,
    with_tokenizer: bool = False,
) -> Built:
    """Tokenise `sources`, one behind the other, into a folder of tokens. Its bytes do not depend on `processes`.

    Args:
        out: does not exist, or is empty, or holds the same tokens, which are then left as they are.
        key: of `_key`; None: computed.
        hashes: tells at the end whether a file is still that of the key; None: by reading each again.
        chat: the records are conversations.
        max_length: tokens of a conversation at most.
        with_tokenizer: save the tokenizer in the folder.

    Raises:
        ValueError: a source is damaged or was changed meanwhile, there is no document, or something else is at `out`.
    """
    if key is None:
        key = _key(sources, FileHashes(None), tokenizer_digest(tokenizer), chat, max_length)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            return _already_there(out, key[0])
    begun, begin = time.perf_counter(), _times(sources)
    size = vocabulary_size(tokenizer)
    encoder = Encoder(tokenizer, chat, max_length)
    left_out = 0
    with TokenFolderWriter(out, size, with_bytes=chat is None, with_targets=chat is not None) as writer:
        with tqdm(unit=" tokens", unit_scale=True, desc=out.name, disable=not sys.stderr.isatty(), leave=False) as bar:
            records = (record for source in sources for record in source.records())
            for batch in encoded(records, encoder, processes):
                writer.append(batch.ids, batch.lengths, batch.sizes, batch.targets)
                left_out += batch.left_out
                bar.update(len(batch.ids))
        dropped = sum((source.dropped for source in sources), Counter())
        if left_out:
            dropped["without a target, or too long"] = left_out
        if not writer.documents:
            why = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items())) or "nothing in it"
            raise ValueError(f"{', '.join(source.source.path for source in sources)}: no document ({why})")
        description = {
            "key": key[0],
            "sources": key[1],
            "eos_id": tokenizer.eos_token_id,
            "adds_bos": adds_bos(tokenizer),
            "tokenizer": tokenizer_digest(tokenizer),
            "vocabulary": vocabulary_digest(tokenizer, size),
            "chat": None if chat is None else chat.model_dump() | {"max_length": max_length},
            "dropped": dict(sorted(dropped.items())),
        }
        _check_unchanged(sources, key[1], begin, hashes or FileHashes(None))
        new = True
        try:
            writer.finish(description, tokenizer if with_tokenizer else None)
        except OSError:
            if not (out.is_dir() and _from_cache(out, key[0])):  # another run was faster
                raise
            new = False
    seconds = time.perf_counter() - begun
    total = writer.bytes if chat is None else None
    return Built(out, new, writer.documents, writer.tokens, total, description["dropped"], seconds)


def _times(sources: Sequence[TextSource]) -> list[int]:
    """When each file was last changed, in nanoseconds. Raises ValueError where one is gone."""
    try:
        return [path.stat().st_mtime_ns for source in sources for _, path in source.files]
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from error


def _check_unchanged(
    sources: Sequence[TextSource], files: Sequence[dict[str, Any]], times: Sequence[int], hashes: FileHashes
) -> None:
    """Refuse tokens of files that are no longer those of the key: they would be taken for those of the old content.

    Args:
        files, times: of the key, and from before the first file was read.
    """
    now = [file for source in sources for file in source.digests(hashes)]
    for before, after, begin, end in zip(files, now, times, _times(sources), strict=True):
        if before != after or begin != end:
            raise ValueError(f"{before['path']} was changed while it was read: start again when it is whole")


def _already_there(out: Path, key: str) -> Built:
    with suppress(ValueError):
        meta = read_meta(out)
        if meta["key"] == key:
            open_token_folder(out, out.name)
            return Built(out, False, meta["documents"], meta["tokens"], meta["bytes"], meta["dropped"], 0.0)
    raise ValueError(f"{out} exists and holds something else: name another folder, or remove it")


def _check_ids(
    source: SourceConfig,
    located: Located,
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path,
    chat: ChatConfig | None,
) -> None:
    """Refuse ids that do not suit the tokenizer, and find the documents of flat files."""
    size, eos_id = vocabulary_size(tokenizer), tokenizer.eos_token_id
    assert isinstance(eos_id, int)
    if located.kind == "tokens":
        folder = located.files[0][1]
        meta = read_meta(folder)
        if meta["vocab_size"] > size or vocabulary_digest(tokenizer, meta["vocab_size"]) != meta.get("vocabulary"):
            raise ValueError(
                f"{source.path} was tokenised with another tokenizer ({meta['vocab_size']} entries; the run's has "
                f"{size}): build it again, or name its tokenizer by tokenizer.path"
            )
        if chat is not None and "targets.bin" not in meta["files"]:
            raise ValueError(f"{source.path} holds no conversations: it was built without --chat")
        return
    if chat is not None:
        raise ValueError(f"{source.path} holds token ids (kind {located.kind}), which no conversation can be told from")
    if located.kind == "flat":
        index_flat(located.files, source.dtype, eos_id, size, cache_folder)
        return
    documents = open_megatron(located.files, source.path, eos_id)
    if not len(documents):
        raise ValueError(f"{source.path}: no document has a token in it")
    for document in np.linspace(0, len(documents) - 1, _LOOKED_AT).astype(int):  # all would take hours
        ids = documents.tokens(int(document))
        if ids.min() < 0 or ids.max() >= size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(f"{source.path}: id {wrong} is not in the tokenizer's vocabulary of {size} entries")
