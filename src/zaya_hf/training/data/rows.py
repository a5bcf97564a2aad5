"""Batches of packed documents by number: what a step trains on, and what held-out losses are computed on.

What a row says to the model:

- Positions start at 0 with every piece of a document, so no token sees another piece. Nothing else names documents:
  `position_ids` alone are what ZAYA, and stock models of transformers, read them from.
- A token's target is the next token of its document, also where that lies in another row; the last token of a document
  has none. So each token with a predecessor in its document is a target exactly once in an epoch, whatever the packing,
  and none is predicted from another document. Documents may exclude tokens of theirs, such as a chat's prompt.
- Padding is only at the end of a row, is a piece of its own with positions from 0, and has no targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .order import SampleOrder
from .packing import PackedRows, pack

if TYPE_CHECKING:
    from .documents import TokenDocuments

__all__ = ["NO_TARGET", "HeldOutRows", "TrainingData", "check_same", "to_tensors"]

NO_TARGET = -100
#: Changes with the order or the packing of the same data, so that a run is not resumed into another order.
ORDER_VERSION = 1

Packing = Literal["contiguous", "best_fit"]
Arrays = dict[str, NDArray[np.int64]]
Batch = dict[str, Tensor]
#: Where a row is: its documents, their packing, and its number there.
Place = tuple["TokenDocuments", PackedRows, int]


def to_tensors(arrays: Arrays) -> Batch:
    """`arrays` as the tensors that a model's forward takes, on the CPU, sharing memory with them; the labels come under
    both of their names, see `TrainingData.micro_batches`."""
    batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
    batch["shift_labels"] = batch["labels"]
    return batch


class TrainingData:
    """Sources, mixed and packed, as samples that are counted from 0 over the whole run.

    A sample is a row. Which one is decided by the seed, the sources' documents and weights, the row length and the
    packing, and by nothing else; see `order.SampleOrder`.

    Attributes:
        order: of the samples.
        packed: rows of each source.
    """

    def __init__(
        self,
        documents: Sequence[TokenDocuments],
        weights: Sequence[float],
        *,
        length: int,
        packing: Packing,
        seed: int,
        pad_id: int = 0,
        mask_padding: bool = True,
    ) -> None:
        """
        Args:
            documents: one for each source; names differ.
            weights: shares of the samples, in any unit.
            length: tokens per row.
            pad_id: what stands in padding. Decides no number.
            mask_padding: name padding in an `attention_mask` where there is some. ZAYA takes that beside positions, and
                its routers would count padding without it. False: never; for stock models of transformers, which find
                documents in positions only where there is no mask. Padding then is one more document.

        Raises:
            ValueError: for sources of one name, one without tokens, and what `SampleOrder` and `pack` refuse.
        """
        names = [source.name for source in documents]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ValueError(f"two sources are called {name!r}; give one of them another name.")
        self.documents, self.weights = list(documents), [float(weight) for weight in weights]
        self.length, self.packing, self.seed = length, packing, seed
        self.pad_id, self.mask_padding = pad_id, mask_padding
        self.packed = [pack(source, length, packing, seed) for source in documents]
        for name, rows in zip(names, self.packed, strict=True):
            if not len(rows):
                raise ValueError(f"source {name!r} has no tokens.")
        self.order = SampleOrder([len(rows) for rows in self.packed], self.weights, seed)

    def micro_batches(
        self, first_sample: int, count: int, rank: int = 0, world_size: int = 1, micro_rows: int = 1
    ) -> list[Batch]:
        """One rank's share of samples `first_sample` ... ``first_sample + count - 1``, in micro-batches.

        Sample j of them goes to rank ``j % world_size``, there to row ``j // world_size``, and rows to micro-batches in
        turn. All ranks get as many micro-batches of `micro_rows` rows; rows that are missing are padding, which adds
        nothing to the loss and to the routers' counts.

        Returns:
            Micro-batches, each a dict of int64 ``[micro_rows, length]``:

            - `input_ids`, `position_ids`: see the top of this file.
            - `attention_mask`: 0 for padding; only in a micro-batch that has some, see `mask_padding`.
            - `labels` and `shift_labels`: one tensor, the target of each place, not to be shifted again; -100: none.
              ``(shift_labels != -100).sum()`` is the number of targets. (The model reads `shift_labels`; without
              `labels`, stock models compute no loss.)

        Raises:
            What reading a document raises, with the sample in front.
        """
        return [to_tensors(arrays) for arrays in self.micro_arrays(first_sample, count, rank, world_size, micro_rows)]

    def micro_arrays(self, first_sample: int, count: int, rank: int, world_size: int, micro_rows: int) -> list[Arrays]:
        """`micro_batches` as numpy arrays, and without `shift_labels`: what workers send."""
        samples = first_sample + np.arange(rank, count, world_size)
        sources, _, rows = (found.tolist() for found in self.order.locate(samples))
        places = [(self.documents[source], self.packed[source], row) for source, row in zip(sources, rows, strict=True)]
        said = [
            f"sample {sample}, row {row} of {place[0].name!r}"
            for sample, row, place in zip(samples, rows, places, strict=True)
        ]
        return [
            _arrays(places[own], said[own], micro_rows, self.length, self.pad_id, self.mask_padding)
            for own in _micro_batches(-(-count // world_size), micro_rows, len(places))
        ]

    def identity(self) -> dict[str, Any]:
        """All that decides the order, as JSON: for a checkpoint, and `check_same` when it is resumed."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "length": self.length,
            "packing": self.packing,
            "sources": [
                {
                    "name": source.name,
                    "weight": weight,
                    "documents": len(source.lengths),
                    "tokens": rows.tokens,
                    "rows": len(rows),
                    "fingerprint": source.fingerprint,
                    "files": dict(source.files),
                }
                for source, weight, rows in zip(self.documents, self.weights, self.packed, strict=True)
            ],
        }


class HeldOutRows:
    """Documents that are not trained on, in rows whose order never changes.

    Attributes:
        documents: as given.
        packed: the rows.
    """

    def __init__(
        self, documents: TokenDocuments, length: int, packing: Packing = "contiguous", *, pad_id: int = 0
    ) -> None:
        """
        Args:
            documents, length, packing, pad_id: as for `TrainingData`.

        Raises:
            ValueError: for what `pack` refuses, and documents without tokens.
        """
        self.documents, self.packed, self._pad_id = documents, pack(documents, length, packing), pad_id
        if not len(self.packed):
            raise ValueError(f"held-out source {documents.name!r} has no tokens.")

    def __len__(self) -> int:
        return len(self.packed)

    def batches(self, rank: int = 0, world_size: int = 1, micro_rows: int = 1) -> Iterator[Batch]:
        """One rank's batches of all rows, dealt out and filled up as in `TrainingData.micro_batches`."""
        own = range(rank, len(self), world_size)
        for part in _micro_batches(-(-len(self) // world_size), micro_rows, len(own)):
            places = [(self.documents, self.packed, row) for row in own[part]]
            said = [f"row {row} of {self.documents.name!r}" for row in own[part]]
            yield to_tensors(_arrays(places, said, micro_rows, self.packed.length, self._pad_id))


def _micro_batches(rows: int, micro_rows: int, own: int) -> Iterator[slice]:
    """Slices of a rank's `own` rows, as many on each rank: the last may hold fewer than `micro_rows`, or none."""
    return (slice(min(first, own), min(first + micro_rows, own)) for first in range(0, rows, micro_rows))


def _arrays(
    places: Sequence[Place], said: Sequence[str], micro_rows: int, length: int, pad_id: int, mask_padding: bool = True
) -> Arrays:
    """A micro-batch; `said` names each place for an error."""
    shape = micro_rows, length
    columns = np.arange(length)
    ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, NO_TARGET, dtype=np.int64)
    positions = np.tile(columns, (micro_rows, 1))
    filled = np.zeros(micro_rows, dtype=np.int64)
    for number, (documents, packed, row) in enumerate(places):
        try:
            filled[number] = _fill(documents, packed, row, ids[number], labels[number], positions[number])
        except Exception as error:
            raise _said_where(error, said[number]) from error
    arrays = {"input_ids": ids, "position_ids": positions, "labels": labels}
    if mask_padding and (filled < length).any():
        arrays["attention_mask"] = (columns < filled[:, None]).astype(np.int64)
    return arrays


def _fill(
    documents: TokenDocuments,
    packed: PackedRows,
    row: int,
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> int:
    """Write a row into three views ``[length]``, the positions of its padding too, and count its tokens."""
    place = 0
    for document, start, stop in packed.pieces(row):
        size = stop - start
        known = min(stop + 1, int(documents.lengths[document]))  # one further, for the last target
        tokens = documents.tokens(document, start, known)
        if len(tokens) != known - start:
            raise ValueError(
                f"document {document} has {len(tokens)} tokens between {start} and {known}; its files were cut short."
            )
        own, targets = slice(place, place + size), slice(place, place + known - start - 1)
        ids[own] = tokens[:size]
        labels[targets] = tokens[1:]
        asked = documents.targets(document, start + 1, known) if known > start + 1 else None
        if asked is not None:
            labels[targets][~np.asarray(asked, dtype=bool)] = NO_TARGET
        positions[own] = np.arange(size)
        place += size
    positions[place:] = np.arange(len(positions) - place)
    return place


def _said_where(error: Exception, place: str) -> Exception:
    """An error of the same class that says at which place; a RuntimeError where the class wants more than a text."""
    text = f"{place}: {error}"
    try:
        return type(error)(text)
    except Exception:
        return RuntimeError(f"{place}: {type(error).__name__}: {error}")


# ------------------------------------------------------------------------------------------------------ the same data
def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse data in which the number of a sample no longer means the same row: compares two `TrainingData.identity`.

    Args:
        saved: of the run that is resumed, as its checkpoint has it.
        now: of the data as it is.

    Raises:
        ValueError: naming what differs first, and of a source the file.
    """
    for key, what in (("seed", "seed"), ("length", "row length"), ("packing", "packing")):
        _compare(f"the {what}", saved[key], now[key])
    _compare("the version of the data order", saved["order_version"], now["order_version"])
    names = [[source["name"] for source in identity["sources"]] for identity in (saved, now)]
    for name in names[0]:
        if name not in names[1]:
            raise ValueError(f"the data is not what the run was started with: source {name!r} is gone.")
    for name in names[1]:
        if name not in names[0]:
            raise ValueError(f"the data is not what the run was started with: source {name!r} is new.")
    _compare("the order of the sources", *names)
    for old, new in zip(saved["sources"], now["sources"], strict=True):
        _compare_sources(old, new)


def _compare_sources(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    source = f"source {new['name']!r}"
    _compare(f"the weight of {source}", old["weight"], new["weight"])
    if old["fingerprint"] == new["fingerprint"]:
        return
    for file in sorted({*old["files"], *new["files"]}):
        digests = old["files"].get(file), new["files"].get(file)
        if digests[0] != digests[1]:
            change = "is new" if digests[0] is None else "is gone" if digests[1] is None else "has changed"
            raise ValueError(f"the data is not what the run was started with: file {file} of {source} {change}.")
    for key in ("documents", "tokens", "rows"):
        _compare(f"the number of {key} in {source}", old[key], new[key])
    raise ValueError(
        f"the data is not what the run was started with: the files of {source} are the same, but they were read, "
        "tokenised or divided in another way."
    )


def _compare(what: str, old: Any, new: Any) -> None:
    if old != new:
        raise ValueError(f"the data is not what the run was started with: {what} was {old!r} and is {new!r} now.")
