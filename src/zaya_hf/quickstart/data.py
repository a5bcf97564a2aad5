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
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from zaya_hf.quickstart import arithmetic, bpe, items
from zaya_hf.quickstart.corpus import Corpus, Document
from zaya_hf.quickstart.recipe import Recipe

_VALIDATION_BATCHES = 50
_VALIDATION_SEED = 0  # of the batches; the same for every model


@dataclass(frozen=True)
class Data:
    """The prepared text, as a worker reads it.

    Attributes:
        stream: int64 [tokens], the training documents with an eos after each.
        validation: int64 [tokens], the same of files that neither train nor are held out.
    """

    tokenizer: PreTrainedTokenizerFast
    stream: torch.Tensor
    validation: torch.Tensor


def prepare(corpus: Corpus, recipe: Recipe, folder: Path, item_folder: Path) -> dict[str, Any]:
    """Write tokenizer and streams of `corpus` to `folder` and the evaluation's items to `item_folder`.

    Returns:
        What `results.json` says about them: `corpus`, `arithmetic`, `tokenizer`, `unigram_bits_per_byte`; and
        `items_sha256`.

    Raises:
        RuntimeError: there is too little text for the evaluation.
    """
    tokenizer = bpe.train_tokenizer([document.text for document in corpus.train], recipe.vocab_size)
    stream = bpe.encode_documents(tokenizer, [document.text for document in corpus.train])
    validation = bpe.encode_documents(tokenizer, [document.text for document in corpus.validation])
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"stream": stream, "validation": validation}, folder / "tokens.safetensors")
    tokenizer.save_pretrained(folder)
    items.write_items(item_folder, corpus)
    return {
        "corpus": _corpus_facts(corpus),
        "arithmetic": {"train": len(arithmetic.TRAINING), "held_out": len(arithmetic.HELD_OUT)},
        "tokenizer": {"entries": len(tokenizer), "bytes_per_token": _bytes(corpus.train) / len(stream)},
        "unigram_bits_per_byte": _unigram_bits_per_byte(tokenizer, stream, item_folder / "bits.jsonl"),
        "items_sha256": digest(sorted(item_folder.glob("*.jsonl"))),
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


@torch.no_grad()
def validation_loss(model: PreTrainedModel, prepared: Data, recipe: Recipe) -> float:
    """Nats per token on batches like those of the training, with validation text in the place of the training's.

    It chooses learning rates. The sums in it are the training's: held-out ones are for the evaluation alone.
    """
    model.eval()
    unseen = Data(prepared.tokenizer, prepared.validation, prepared.validation)
    batches = Batches(unseen, recipe, _VALIDATION_SEED)
    losses = [model(**batches(step), use_cache=False).loss.item() for step in range(_VALIDATION_BATCHES)]
    return sum(losses) / len(losses)


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


def digest(files: Sequence[Path]) -> str:
    """SHA-256 of the names and contents of `files`, in order."""
    found = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        found.update(f"{file.name}:{len(data)}\n".encode() + data)
    return found.hexdigest()
