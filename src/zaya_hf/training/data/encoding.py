"""Texts and conversations to token ids, in one process or several, in an order that does not depend on how many."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from .text_sources import Record
from .tokenizers import adds_bos

if TYPE_CHECKING:
    from zaya_hf.training.config import ChatConfig

__all__ = ["Encoded", "Encoder", "encoded"]

# Of a batch: enough that sending it costs little, little enough that many are under way at once.
_BATCH_BYTES = 1 << 18
_BATCH_RECORDS = 256
_AHEAD = 4  # batches per process that are read before the first is done


@dataclass(frozen=True)
class Encoded:
    """The documents of a batch.

    Attributes:
        ids: uint32 [tokens] of all behind each other.
        lengths: int64 [documents].
        sizes: int64 [documents], bytes of UTF-8; of texts.
        targets: bool [tokens]; of conversations.
        left_out: conversations without a target, or that do not fit.
    """

    ids: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray | None
    targets: np.ndarray | None
    left_out: int = 0


class Encoder:
    """Makes documents of records.

    A text gets EOS behind it, and BOS before it if the tokenizer adds one. What looks like a special token in a text is
    text. A conversation gets what its chat template writes.

    Args:
        chat: None: the records are texts.
        max_length: tokens of a conversation at most; None: any number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig | None, max_length: int | None) -> None:
        self._tokenizer, self._chat, self._max_length = tokenizer, chat, max_length
        self._before = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
        self._after = [tokenizer.eos_token_id]

    def __call__(self, records: list[Record]) -> Encoded:
        """Raises ValueError for a conversation that the chat template refuses, with its origin."""
        return self._texts(records) if self._chat is None else self._conversations(records)

    def _texts(self, records: list[Record]) -> Encoded:
        texts = [record.text for record in records]
        found = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        documents = [[*self._before, *ids, *self._after] for ids in found]
        return Encoded(
            ids=_joined(documents, np.uint32),
            lengths=np.array([len(ids) for ids in documents], np.int64),
            sizes=np.array([record.size for record in records], np.int64),
            targets=None,
        )

    def _conversations(self, records: list[Record]) -> Encoded:
        from .chat import encode_conversation

        assert self._chat is not None
        documents, masks = [], []
        for record in records:
            assert record.messages is not None
            try:
                found = encode_conversation(self._tokenizer, record.messages, self._chat, self._max_length)
            except ValueError as error:
                raise ValueError(f"{record.origin}: {error}") from error
            if found is not None:
                documents.append(found[0])
                masks.append(found[1])
        return Encoded(
            ids=_joined(documents, np.uint32),
            lengths=np.array([len(ids) for ids in documents], np.int64),
            sizes=None,
            targets=_joined(masks, np.bool_),
            left_out=len(records) - len(documents),
        )


def _joined(parts: Sequence[Sequence[int]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.empty(0, dtype)


def encoded(records: Iterable[Record], encoder: Encoder, processes: int) -> Iterator[Encoded]:
    """The documents of `records`, in batches, in their order.

    Args:
        processes: that tokenise; with 1, this one does.

    Raises:
        ValueError: as the records and the encoder do; a process was killed.
    """
    batches = _batches(records)
    if processes == 1:
        yield from map(encoder, batches)
        return
    pool = ProcessPoolExecutor(processes, _context(), _begin, (encoder,))
    try:
        under_way: deque[Future[Encoded]] = deque()
        for batch in batches:
            under_way.append(pool.submit(_work, batch))
            if len(under_way) > _AHEAD * processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a process that tokenises was killed, perhaps for want of memory; take fewer") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _context() -> BaseContext:
    """How processes start. They are no forks of this one: it has threads, of torch at least, and a lock that one of
    them holds stays locked in a fork. A server that has nothing but the imports done forks them, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_encoder: Encoder | None = None  # of a process that tokenises


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the main process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A main process that is killed ends nobody; the others would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(batch: list[Record]) -> Encoded:
    assert _encoder is not None
    return _encoder(batch)
