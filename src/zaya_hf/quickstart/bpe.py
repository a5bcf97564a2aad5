"""The quickstart's tokenizer: byte-level BPE trained on its corpus, each digit a token of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast

from zaya_hf.training.data.bpe import EOS, PAD, train_bpe

__all__ = ["EOS", "PAD", "encode_documents", "train_tokenizer"]

_SAMPLE = 1_500_000  # characters; more changes the merges little and takes longer
_LARGEST_PART = 75_000  # characters of one text in the sample: the language reference must not outweigh all else


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` entries from the beginning of `texts`, which should mix all that will be encoded.

    Id 0 is pad; id 1 stands between documents, so it is eos and bos.

    Every byte has an entry, so any text is encoded without an unknown token and decoded to itself.
    """
    sample, size = [], 0
    for text in texts:
        if size >= _SAMPLE:
            break
        sample.append(text[:_LARGEST_PART])
        size += len(sample[-1])
    return train_bpe(sample, vocab_size)


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """One stream of ids, int64 [tokens], with an eos after every document."""
    eos = tokenizer.eos_token_id
    stream: list[int] = []
    for ids in tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]:
        stream.extend(ids)
        stream.append(eos)
    return torch.tensor(stream, dtype=torch.int64)
