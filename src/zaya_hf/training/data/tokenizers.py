"""The tokenizer of a run: one that exists, or a byte-level BPE trained on the run's own text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zaya_hf import atomic
from zaya_hf.temporary_folders import make_temporary, remove_temporary

from ..checkpoint import complete_saves, sync_tree
from ..run_folder import CHECKPOINTS
from .bpe import train_bpe
from .digests import FileHashes, of_values
from .source_files import RAW_KINDS, locate
from .text_sources import TextSource
from .token_files import TOKENIZER

if TYPE_CHECKING:
    from zaya_hf.training.config import SourceConfig, TrainingConfig

__all__ = ["adds_bos", "load", "of_run", "tokenizer_digest", "vocabulary_digest", "vocabulary_size"]

_ORIGIN = "origin.json"
_LARGEST_PART = 75_000  # characters of one document: a book must not outweigh all else
_SAMPLE_PER_ENTRY = 1_000  # characters of the sample for each entry of the vocabulary
_SAMPLE = (1_500_000, 100_000_000)  # characters, at least and at most
_PARTS = 16  # of a source's share of the sample, which come from as many files if there are


def of_run(config: TrainingConfig, run_folder: Path, *, build: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, from ``run_folder/tokenizer``, where the main process puts it first.

    It comes from `config.tokenizer.path`; or is trained on the sources of `config.data`; or is that of the model that
    the run starts from; or that of the folders of tokens, if all sources are such. A run that has a checkpoint keeps
    the one that it has: a model cannot learn other ids halfway.

    Args:
        build: True in the main process; the others wait for it, then pass False.

    Raises:
        ValueError: there is none, the name is none of the hub, the sources have too little text, or the files in
            ``run_folder/tokenizer`` are damaged.
    """
    place = run_folder / TOKENIZER
    has_begun = place.is_dir() and bool(complete_saves(run_folder / CHECKPOINTS))
    if build and not has_begun:
        origin, make = _origin(config, run_folder)
        known = place / _ORIGIN
        if not (known.is_file() and known.read_text(encoding="utf-8") == _as_text(origin)):
            _save(make(), place, origin)
    try:
        return load(str(place))
    except ValueError as error:
        raise ValueError(f"{error}; delete that folder, and the same command makes it again") from error


def load(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or hub id.

    Raises:
        ValueError: there is none, or it has no EOS, which every document ends with.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"{path} has no tokenizer (tokenizer.json) in it: name another by tokenizer.path")
    try:
        found = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path, revision=revision)
    except Exception as error:  # OSError of a missing one, but the parsers of damaged files raise all kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"there is no tokenizer at {path}: {first}") from error
    if found.eos_token_id is None:
        raise ValueError(f"the tokenizer at {path} has no EOS token, which documents are ended with")
    return found


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id: the least `vocab_size` that a model needs for it."""
    return 1 + max(tokenizer.get_vocab().values())


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts BOS before a text, by whatever setting or rule of its own."""
    if tokenizer.bos_token_id is None:
        return False
    with_it, without = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
    return list(with_it[:1]) == [tokenizer.bos_token_id] and list(with_it) != list(without)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that decides the ids of a text, and of the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None), rules.pop("truncation", None)  # of the last call
    else:
        rules = [type(tokenizer).__name__, repr(tokenizer)]
    special = [tokenizer.eos_token_id, tokenizer.bos_token_id, adds_bos(tokenizer)]
    return of_values(rules, sorted(tokenizer.get_vocab().items()), special, tokenizer.chat_template)


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase, below: int) -> str:
    """SHA-256 of what the ids below `below` stand for, and of EOS: tokenizers that agree in it read the same ids alike,
    even if one of them has more entries."""
    entries = sorted((number, entry) for entry, number in tokenizer.get_vocab().items() if number < below)
    return of_values(entries, tokenizer.eos_token_id)


def _origin(config: TrainingConfig, run_folder: Path) -> tuple[dict[str, Any], Any]:
    """What the tokenizer is made of, as JSON, and a function that makes it."""
    asked, model = config.tokenizer, config.model
    if asked.path is not None and asked.train_vocab_size is not None:
        raise ValueError("tokenizer: give either path or train_vocab_size, not both")
    if asked.path is not None:
        path = asked.path
        return {"path": path}, lambda: load(path)
    if asked.train_vocab_size is not None:
        size = asked.train_vocab_size
        sources = [TextSource(s, config.data.chat is not None) for s in config.data.sources if _is_raw(s)]
        if not sources:
            raise ValueError("tokenizer.train_vocab_size: no source has text to train a tokenizer on")
        cache = Path(config.data.cache) if config.data.cache is not None else run_folder / "data"
        hashes = FileHashes(cache)
        of_sources = [[s.digests(hashes), s.key(), s.source.weight] for s in sources]
        return {"train_vocab_size": size, "sources": of_values(of_sources)}, lambda: _trained(sources, size)
    if model.checkpoint is not None:
        checkpoint, revision = model.checkpoint, model.revision
        own = Path(checkpoint).expanduser() / TOKENIZER  # of a run's folder
        path = str(own) if own.is_dir() else checkpoint
        return {"path": path, "revision": revision}, lambda: load(path, None if own.is_dir() else revision)
    folders = _folders_of_tokens(config.data.sources)
    if folders:
        return {"path": str(folders[0])}, lambda: load(str(folders[0]))
    raise ValueError("there is no tokenizer: name one by tokenizer.path, or train one by tokenizer.train_vocab_size")


def _is_raw(source: SourceConfig) -> bool:
    return locate(source).kind in RAW_KINDS


def _folders_of_tokens(sources: Sequence[SourceConfig]) -> list[Path]:
    """Where tokenizers lie, if every source is a folder of tokens with one in it."""
    found = []
    for source in sources:
        located = locate(source)
        folder = located.files[0][1] / TOKENIZER if located.kind == "tokens" else None
        if folder is None or not folder.is_dir():
            return []
        found.append(folder)
    return found


def _trained(sources: Sequence[TextSource], vocab_size: int) -> PreTrainedTokenizerBase:
    """A BPE of texts of all sources by their weights."""
    least, most = _SAMPLE
    size = min(max(vocab_size * _SAMPLE_PER_ENTRY, least), most)
    whole = sum(source.source.weight for source in sources)
    sample = [text for s in sources for text in _sampled(s, int(size * s.source.weight / whole))]
    tokenizer = train_bpe(sample, vocab_size)
    if len(tokenizer) < vocab_size:
        raise ValueError(
            f"tokenizer.train_vocab_size: the sources have text for {len(tokenizer)} entries, not for {vocab_size}"
        )
    return tokenizer


def _sampled(source: TextSource, size: int) -> Iterator[str]:
    """Texts of a source, some `size` characters together: of its files in the order of their names' hashes, which mixes
    subjects, and not all of one file where there are many."""
    files = sorted(source.files, key=lambda file: of_values(file[0]))
    left = size
    if source.located.kind == "hub":
        groups: list[tuple[tuple[str, Path], ...] | None] = [None]
    else:
        groups = [(file,) for file in files]
    share = max(size // min(len(groups), _PARTS), 1)
    for group in groups:
        here = min(share, left)
        for record in source.records(group):
            if here <= 0:
                break
            text = record.text if record.text is not None else "\n".join(m["content"] for m in record.messages or [])
            part = text[: min(_LARGEST_PART, here)]
            here, left = here - len(part), left - len(part)
            yield part
        if left <= 0:
            return


def _as_text(origin: dict[str, Any]) -> str:
    return json.dumps(origin, indent=2, sort_keys=True) + "\n"


def _save(tokenizer: PreTrainedTokenizerBase, place: Path, origin: dict[str, Any]) -> None:
    """Put a tokenizer in the place of an older one, whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = make_temporary(place.parent, ".tokenizer")
    try:
        tokenizer.save_pretrained(staging / TOKENIZER)
        atomic.write_text(staging / TOKENIZER / _ORIGIN, _as_text(origin))
        sync_tree(staging)
        if place.exists():
            shutil.rmtree(place)
        (staging / TOKENIZER).rename(place)
    finally:
        remove_temporary(staging)
