"""`zaya data`: tokenise texts into a folder that training maps into memory, and show what is in one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zaya_hf.installed import require

if TYPE_CHECKING:
    from zaya_hf.training.data.documents import TokenDocuments

_SHOWN = 3  # documents
_SHOWN_TOKENS = 60  # of each
_BAR = 40  # characters


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya data build` or `zaya data show`. Returns the exit code.

    `args` has action; of build: sources, out, tokenizer, kind, field, split, subset, revision, processes, chat,
    train_on, no_trim_thinking, max_length; of show: path.

    Raises:
        ValueError: a source, a tokenizer or a folder is missing, damaged or of another kind; a package is missing.
    """
    require("zaya data", "pydantic", "pyarrow")
    return _build(args) if args.action == "build" else _show(args.path)


def _build(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from zaya_hf.training.config import ChatConfig, SourceConfig
    from zaya_hf.training.data.build import build_folder
    from zaya_hf.training.data.text_sources import TextSource
    from zaya_hf.training.data.tokenizers import load

    field = args.field or ("messages" if args.chat else "text")
    dataset = {"split": args.split, "subset": args.subset, "revision": args.revision}
    try:
        sources = [SourceConfig(path=path, kind=args.kind, field=field, **dataset) for path in args.sources]
    except ValidationError as error:
        raise ValueError(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error
    texts = [TextSource(source, args.chat) for source in sources]
    built = build_folder(
        texts,
        load(args.tokenizer),
        args.out,
        chat=ChatConfig(train_on=args.train_on, trim_thinking=not args.no_trim_thinking) if args.chat else None,
        max_length=args.max_length,
        processes=args.processes,
        with_tokenizer=True,
    )
    size = "" if built.bytes is None else f", {built.bytes:,} bytes ({built.bytes / built.tokens:.2f} per token)"
    print(f"{built.documents:,} documents, {built.tokens:,} tokens{size}")
    for reason, number in built.dropped.items():
        print(f"left out: {number:,} {reason}")
    if built.new:
        print(f"{built.seconds:.1f} s, {built.tokens / built.seconds:,.0f} tokens/s")
        print(args.out)
    else:
        print(f"{args.out} holds them already; nothing was done")
    return 0


def _show(path: Path) -> int:
    from zaya_hf.training.data.token_files import TOKENIZER, open_token_folder, read_meta
    from zaya_hf.training.data.tokenizers import load

    meta = read_meta(path)
    documents = open_token_folder(path, path.name)
    print(f"documents   {meta['documents']:,}")
    print(f"tokens      {meta['tokens']:,} as {meta['dtype']}, vocabulary of {meta['vocab_size']:,}")
    if meta["bytes"] is not None:
        print(f"bytes       {meta['bytes']:,} of text, {meta['bytes'] / max(meta['tokens'], 1):.2f} per token")
    if meta["targets"] is not None:
        print(f"targets     {meta['targets']:,}, {meta['targets'] / max(meta['tokens'], 1):.1%} of the tokens")
    for reason, number in meta.get("dropped", {}).items():
        print(f"left out    {number:,} {reason}")
    names = [source["path"] for source in meta["sources"]]
    print(f"made of     {len(names):,} files: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
    print(f"fingerprint {documents.fingerprint}")
    print("\ntokens per document")
    print("\n".join(_histogram(documents.lengths)))
    tokenizer = load(str(path / TOKENIZER)) if (path / TOKENIZER).is_dir() else None
    for number in range(min(_SHOWN, len(documents))):
        ids = documents.tokens(number, 0, min(_SHOWN_TOKENS, int(documents.lengths[number]))).tolist()
        shown = repr(tokenizer.decode(ids)) if tokenizer is not None else " ".join(map(str, ids))
        more = " ..." if documents.lengths[number] > _SHOWN_TOKENS else ""
        print(f"\ndocument {number}, {documents.lengths[number]:,} tokens{_of_size(documents, number)}\n{shown}{more}")
    return 0


def _of_size(documents: TokenDocuments, number: int) -> str:
    return "" if documents.bytes is None else f", {documents.bytes[number]:,} bytes"


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """A line for each power of two between the shortest and the longest document."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    wide, of_count = len(f"{2 ** len(counts) - 1:,}"), len(f"{max(counts, default=0):,}")
    for power in range(int(min(powers, default=0)), len(counts)):
        bar = "#" * int(np.ceil(_BAR * counts[power] / counts.max()))
        least, most = f"{2**power:,}", f"{2 ** (power + 1) - 1:,}"
        yield f"{least:>{wide}} to {most:>{wide}}  {counts[power]:>{of_count},}  {bar}"
