"""Loss on held-out documents while a run trains.

Bits per byte are the cost of writing the documents down with the model: nats of all their tokens, divided by ln 2 and
by the UTF-8 bytes of their text. A document's first token is predicted from nothing. Where it is an id that begins
documents (bos, or an eos that stands for it) it is no text and costs nothing; where it is text, it is charged what a
uniform guess costs, ln(vocabulary size) nats. An eos at the end costs what the model says: that the text ends is a part
of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..reporting.formats import distinct
from . import rng
from .config import TrainingConfig
from .data.documents import TokenDocuments, hashes
from .data.rows import NO_TARGET, HeldOutRows
from .distributed import total
from .ema import ExponentialMovingAverage

__all__ = ["Evaluator", "some_documents"]


@dataclass(frozen=True)
class _Source:
    """One source and what its bits per byte need: bytes (None: not known), and nats of tokens that nothing predicts."""

    rows: HeldOutRows
    bytes: int | None
    unpredicted_nats: float


class Evaluator:
    """Evaluates a model on held-out sources, all processes together, each on its share of the rows.

    Nothing is left behind: weights, mode of every module, random generators and the balancing's counts are as before.

    Args:
        accelerator: of the run; its autocast is used as in training.
        sources: held-out rows, one of each source.
        vocab_size: of the model.
        start_ids: ids that begin documents and are no text.
        micro_rows: rows in one forward pass.
        ema: averaged weights, which are evaluated as well.

    Raises:
        ValueError: there are no sources.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        sources: Sequence[HeldOutRows],
        *,
        vocab_size: int,
        start_ids: Collection[int] = (),
        micro_rows: int = 1,
        ema: ExponentialMovingAverage | None = None,
    ) -> None:
        if not sources:
            raise ValueError("an evaluator needs at least one held-out source, found none")
        self._accelerator = accelerator
        self._micro_rows = micro_rows
        self._ema = ema
        self._sources = []
        for rows in sources:
            size = _bytes(rows.documents)
            nats = 0.0 if size is None else _texts_first(rows.documents, start_ids) * math.log(vocab_size)
            self._sources.append(_Source(rows, size, nats))

    @classmethod
    def of_run(
        cls,
        config: TrainingConfig,
        accelerator: Accelerator,
        documents: Sequence[TokenDocuments],
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        ema: ExponentialMovingAverage | None = None,
    ) -> Evaluator:
        """The evaluator that a run's config asks for: `documents` of each held-out source, at most about
        `evaluation.rows` rows of them all together, packed whole where they fit.

        Raises:
            ValueError: a source has no tokens.
        """
        length, pad_id = config.data.sequence_length, tokenizer.pad_token_id or 0
        asked, tokens = config.evaluation.rows, sum(int(source.lengths.sum()) for source in documents)
        rows = []
        for source in documents:
            share = None if asked is None else max(1, round(asked * int(source.lengths.sum()) / max(1, tokens)))
            rows.append(HeldOutRows(some_documents(source, share, length), length, "best_fit", pad_id=pad_id))
        starts = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
        return cls(
            accelerator,
            rows,
            vocab_size=vocab_size,
            start_ids=starts,
            micro_rows=config.batch.micro_rows,
            ema=ema,
        )

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate `model` after `step` steps; collective, with the same result in all processes.

        Args:
            model: as it is trained, wrapped or not; its output has `loss`.

        Returns:
            `kind` "held_out", `step`, `seconds`; over all sources `loss` (nats per target), `perplexity`,
            `bits_per_byte` (None if the bytes of a source are not known, or not all its tokens are targets), `targets`,
            `bytes`; the same under `sources` for each (of equal names all but the first have a number behind them), and
            under `ema` for averaged weights.
        """
        started = time.perf_counter()
        result = {"kind": "held_out", "step": step, **self._evaluate(model)}
        if self._ema is not None:
            with self._ema.swap():
                result["ema"] = self._evaluate(model)
        return {**result, "seconds": time.perf_counter() - started}

    def _evaluate(self, model: nn.Module) -> dict[str, Any]:
        with undisturbed(model), torch.no_grad(), self._accelerator.autocast():
            sums = torch.stack([self._sums(model, source.rows) for source in self._sources])
        measured = [(float(nats), int(targets)) for nats, targets in total(self._accelerator, sums).tolist()]
        sources = [
            _numbers(nats, targets, source.bytes, source.unpredicted_nats)
            for source, (nats, targets) in zip(self._sources, measured, strict=True)
        ]
        known = [source.bytes for source in self._sources if source.bytes is not None]
        whole = _numbers(
            math.fsum(nats for nats, _ in measured),
            sum(targets for _, targets in measured),
            sum(known) if len(known) == len(self._sources) else None,
            math.fsum(source.unpredicted_nats for source in self._sources),
        )
        names = distinct([source.rows.documents.name for source in self._sources])
        return {**whole, "sources": dict(zip(names, sources, strict=True))}

    def _sums(self, model: nn.Module, rows: HeldOutRows) -> torch.Tensor:
        """``[2]`` float64: nats and targets of this process's share."""
        accelerator = self._accelerator
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        rank, world_size = accelerator.process_index, accelerator.num_processes
        for batch in rows.batches(rank, world_size, self._micro_rows):
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            loss = model(**batch, use_cache=False, num_items_in_batch=1).loss  # divided by one: the sum
            targets = (batch["shift_labels"] != NO_TARGET).sum()
            sums += torch.stack([loss.double() * (targets > 0), targets.double()])
        return sums


def some_documents(documents: TokenDocuments, rows: int | None, length: int) -> TokenDocuments:
    """Some of `documents`, in the order of their hashes, that fit into `rows` rows of `length` tokens; None: all.

    Whole ones, so that their bytes are known; they fill half of the rows at least, where there are enough that fit. If
    not one fits, the beginning of the first, whose bytes are not known.
    """
    lengths = np.asarray(documents.lengths)
    if rows is None or int(lengths.sum()) <= rows * length:
        return documents
    chosen, room = [], rows * length
    order = np.argsort(hashes(documents), kind="stable").tolist()
    for document in order:
        if 0 < lengths[document] <= room:
            chosen.append(document)
            room -= int(lengths[document])
        elif 2 * room <= rows * length:
            break  # to go on would be to choose the short ones
    if chosen:
        return documents.subset(sorted(chosen))
    first = documents.subset([document for document in order if lengths[document] > 0][:1])
    return replace(first, lengths=np.minimum(first.lengths, rows * length), bytes=None)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode; afterwards its modules' modes and the random generators are as before."""
    modes = {module: module.training for module in model.modules()}
    state = rng.capture()
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        rng.restore(state)


def _bytes(documents: TokenDocuments) -> int | None:
    """UTF-8 bytes of all documents; None if they are not known, or some of the text is no target."""
    if documents.bytes is None or documents.target_shards is not None:
        return None
    return int(documents.bytes.sum()) or None


def _texts_first(documents: TokenDocuments, start_ids: Collection[int]) -> int:
    """How many documents begin with a token of their text."""
    with_tokens = [number for number in range(len(documents)) if documents.lengths[number] > 0]
    return sum(int(documents.tokens(number, 0, 1)[0]) not in start_ids for number in with_tokens)


def _numbers(nats: float, targets: int, size: int | None, unpredicted_nats: float) -> dict[str, Any]:
    loss = nats / targets if targets else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan,
        "bits_per_byte": None if size is None else (nats + unpredicted_nats) / math.log(2) / size,
        "targets": targets,
        "bytes": size,
    }
