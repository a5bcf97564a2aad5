"""What the workers train on, prepared once: tokenizer, token streams, and batches by number."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from zaya_hf.quickstart import arithmetic, bpe, items
from zaya_hf.quickstart.corpus import Corpus, Document
from zaya_hf.quickstart.recipe import Recipe

_VALIDATION_WINDOWS = 192


@dataclass(frozen=True)
class Data:
    """The prepared text, as a worker reads it.

    Attributes:
        stream: int64 [tokens], the training documents with an eos after each.
        validation: int64 [windows, sequence_length] from files that neither train nor are held out.
    """

    tokenizer: PreTrainedTokenizerFast
    stream: torch.Tensor
    validation: torch.Tensor


def prepare(corpus: Corpus, recipe: Recipe, folder: Path, item_folder: Path) -> dict[str, Any]:
    """Write tokenizer and streams of `corpus` to `folder` and the evaluation's items to `item_folder`.

    Returns:
        What `results.json` says about them: `corpus`, `arithmetic`, `tokenizer`, `unigram_bits_per_byte`, `items`.

    Raises:
        RuntimeError: there is too little text for the evaluation.
    """
    tokenizer = bpe.train_tokenizer([document.text for document in corpus.train], recipe.vocab_size)
    stream = bpe.encode_documents(tokenizer, [document.text for document in corpus.train])
    validation = bpe.encode_documents(tokenizer, [document.text for document in corpus.validation])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {"stream": stream, "validation": spread_windows(validation, recipe.sequence_length, _VALIDATION_WINDOWS)},
        folder / "tokens.safetensors",
    )
    tokenizer.save_pretrained(folder)
    counts = items.write_items(item_folder, corpus)
    return {
        "corpus": _corpus_facts(corpus),
        "arithmetic": {"train": len(arithmetic.TRAINING), "held_out": len(arithmetic.HELD_OUT)},
        "tokenizer": {"entries": len(tokenizer), "bytes_per_token": _bytes(corpus.train) / len(stream)},
        "unigram_bits_per_byte": _unigram_bits_per_byte(tokenizer, stream, item_folder / "bits.jsonl"),
        "items": {"counts": counts, "sha256": _digest(sorted(item_folder.glob("*.jsonl")))},
    }


def load(folder: Path) -> Data:
    """What `prepare` wrote to `folder`."""
    tensors = load_file(folder / "tokens.safetensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Data(tokenizer, tensors["stream"], tensors["validation"])


class Batches:
    """The batch of any step, decided by the seed and the step's number alone: a resumed run needs nothing else.

    Rows are either random windows of the text or sums, in the proportion that the recipe asks for over any stretch of
    steps.
    """

    def __init__(self, data: Data, recipe: Recipe, seed: int) -> None:
        self._data = data
        self._recipe = recipe
        self._seed = seed

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 [batch_size, sequence_length]."""
        recipe, stream = self._recipe, self._data.stream
        digest = hashlib.sha256(f"{self._seed}:{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        sums_a_step = recipe.batch_size * recipe.arithmetic_share
        sums = math.floor((step + 1) * sums_a_step) - math.floor(step * sums_a_step)
        length = recipe.sequence_length
        starts = torch.randint(0, len(stream) - length + 1, (recipe.batch_size - sums, 1), generator=generator)
        text = stream[starts + torch.arange(length)]
        ids = torch.cat([text, arithmetic.rows(self._data.tokenizer, sums, length, generator)])
        return {"input_ids": ids, "labels": ids}


def spread_windows(stream: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Up to `count` windows int64 [windows, length], spread evenly over `stream` and without overlap."""
    windows = stream[: len(stream) // length * length].view(-1, length)
    if len(windows) > count:
        windows = windows[torch.arange(count) * len(windows) // count]
    return windows.contiguous()


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, windows: torch.Tensor, entry_bytes: torch.Tensor) -> float:
    """Bits that `model` needs for each byte of text; chooses learning rates, the evaluation proper is lm-eval's.

    Every window starts without context, so its first token is given and only the others are counted.

    Args:
        windows: int64 [windows, length].
        entry_bytes: int64 [vocab], the bytes of text each id stands for. End-of-document tokens have none; their bits
            are counted all the same, since a reader of the text has to know where it ends.
    """
    model.eval()
    nats = 0.0
    for ids in windows.split(32):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        nats += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / int(entry_bytes[windows[:, 1:]].sum())


def _unigram_bits_per_byte(tokenizer: PreTrainedTokenizerFast, stream: torch.Tensor, pieces: Path) -> float:
    """Bits per byte, on the evaluation's texts, of the model that only knows how frequent each token of `stream` is."""
    counts = torch.bincount(stream, minlength=len(tokenizer)).double() + 1  # +1: no token is impossible
    nats_of = -(counts / counts.sum()).log()
    nats, size = 0.0, 0
    for line in pieces.read_text(encoding="utf-8").strip().split("\n"):  # not splitlines: texts may have others inside
        text = json.loads(line)["text"]
        nats += nats_of[tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]].sum().item()
        size += len(text.encode())
    return nats / math.log(2) / size


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    splits = {"train": corpus.train, "validation": corpus.validation, "held_out": corpus.held_out}
    sizes = {f"{name}_bytes": _bytes(documents) for name, documents in splits.items()}
    return {"origin": corpus.origin, "sha256": corpus.sha256} | sizes


def _bytes(documents: Sequence[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.name}:{len(data)}\n".encode() + data)
    return digest.hexdigest()
