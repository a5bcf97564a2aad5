"""Small tokenizers, texts and files of token ids that the tests of training data share."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from zaya_hf.training.config import SourceConfig
from zaya_hf.training.data.bpe import train_bpe
from zaya_hf.training.data.documents import MappedArray, TokenDocuments

TEXTS = [
    "one\r\ntwo",
    "é and ü <eos> <pad> " * 9,
    "def f(x):\n    return 2024\n",
    "\u2028 and \x85",
    "z" * 700,
    " ",
    *(f"text {number} is {'very ' * number}short" for number in range(40)),
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """320 entries; pad is 0, eos and bos are 1."""
    return train_bpe([Path(__file__).read_text(encoding="utf-8")], 320)


def ids_of(text: str) -> list[int]:
    """A text as it is stored, made byte by byte of the vocabulary: EOS at the end, special strings as text."""
    ids = tokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer().decode(ids) == text
    return [*ids, 1]


def all_ids(documents: TokenDocuments) -> list[list[int]]:
    return [documents.tokens(number).tolist() for number in range(len(documents))]


def source(path: Path | str, **fields: Any) -> SourceConfig:
    return SourceConfig(path=str(path), **fields)


def written(
    folder: Path, ids: Sequence[Sequence[int]], sizes: Sequence[int] | None, name: str = "docs", **changes: Any
) -> TokenDocuments:
    """Documents of these ids in a file of `folder`; `sizes` are the bytes of their texts."""
    file = folder / f"{name}.bin"
    np.array([token for document in ids for token in document], "<u2").tofile(file)
    lengths = np.array([len(document) for document in ids], np.int64)
    return TokenDocuments(
        name=name,
        shards=[MappedArray(file, "<u2", int(lengths.sum()))],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        fingerprint=name,
        bytes=None if sizes is None else np.array(sizes, np.int64),
        **changes,
    )


def write_megatron(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    documents: Sequence[int] | None = None,
    *,
    code: int = 8,
    dtype: str = "<u2",
) -> None:
    """The two files, written field by field after the description of the format."""
    ids = [np.array(sequence, dtype) for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in ids))
    places = np.cumsum([0, *(part.nbytes for part in ids)])[:-1]
    borders = list(range(len(sequences) + 1)) if documents is None else list(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(borders))
    index += struct.pack(f"<{len(ids)}i", *map(len, ids)) + struct.pack(f"<{len(ids)}q", *places)
    prefix.with_suffix(".idx").write_bytes(index + struct.pack(f"<{len(borders)}q", *borders))
