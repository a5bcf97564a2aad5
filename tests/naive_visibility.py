"""What every token may see, written down token by token: the definition that zaya_hf.visibility is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PADDING = -1


@dataclass
class Slot:
    """One token of a row, cached or new."""

    real: bool
    position: int
    segment: int = PADDING


def feed(
    row: list[Slot],
    real: Sequence[bool],
    look_back: int,
    positions: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> tuple[list[int], bool]:
    """Append the tokens of one call to `row`.

    Args:
        row: what earlier calls left.
        real: False for padding.
        positions: where one does not follow the one before, a document starts; None: real tokens are counted on.
        documents: a number per token; where it changes inside the call, a document starts.

    Returns:
        the reach of every new token, and whether the first real one continues a cached document.
    """
    reach, continues, first = [], False, True
    before = last_real(row)
    before_document = None
    past = len(row)
    for t, is_real in enumerate(real):
        given = positions is not None
        position = positions[t] if given else (-1 if before is None else before.position) + int(is_real)
        slot = Slot(is_real, position if given else max(position, 0))
        if is_real:
            starts = False
            if before is not None and given:
                counts_on = bool(row) and position == row[-1].position + 1 and position > before.position
                starts = position != before.position + 1 and not counts_on
            if documents is not None and before_document is not None and documents[t] != before_document:
                starts = True
            slot.segment = 0 if before is None else before.segment + starts
            if first and before is not None:
                continues = not starts
            first, before = False, slot
            before_document = None if documents is None else documents[t]
        row.append(slot)
        reach.append(run_before(row, past, look_back))
    return reach, continues


def last_real(row: Sequence[Slot]) -> Slot | None:
    for slot in reversed(row):
        if slot.real:
            return slot
    return None


def run_before(row: Sequence[Slot], past: int, limit: int) -> int:
    """How many slots directly before the last one, from `past` on, are real and of its document; at most `limit`."""
    token, count = row[-1], 0
    if not token.real:
        return 0
    for slot in reversed(row[past:-1]):
        if not slot.real or slot.segment != token.segment or count == limit:
            break
        count += 1
    return count


def may_attend(row: Sequence[Slot], query: int, key: int, window: int | None = None) -> bool:
    """A token sees itself and the real tokens of its document before it; a window of n holds it and n - 1 real ones."""
    if query == key:
        return True
    if key > query or not row[query].real or row[query].segment != row[key].segment:
        return False
    return window is None or sum(slot.real for slot in row[key + 1 : query + 1]) < window


def from_pairs(allowed: Sequence[Sequence[bool]], past: int, before: Sequence[Slot], look_back: int):
    """The same for a 4-D mask, one row of it: ``allowed[S][L + S]``.

    Returns:
        segments and reach of the new tokens, and whether the first real one continues a cached document.
    """
    segments, reach, continues, first = [], [], False, True
    last_slot, last_segment = None, 0
    for index, slot in enumerate(before):
        if slot.real:
            last_slot, last_segment = index, slot.segment
    for t in range(len(allowed)):
        if not allowed[t][past + t]:
            segments.append(PADDING)
            reach.append(0)
            continue
        same = last_slot is None or allowed[t][last_slot]
        if first and last_slot is not None:
            continues = same
        last_slot, last_segment, first = past + t, last_segment + (not same), False
        segments.append(last_segment)
        follows = t > 0 and allowed[t - 1][past + t - 1] and allowed[t][past + t - 1]
        reach.append(min(reach[-1] + 1, look_back) if follows else 0)
    return segments, reach, continues
