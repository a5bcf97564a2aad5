"""The table of what every token may see: whatever the caller gives, against the definition in naive_visibility."""

from __future__ import annotations

import random

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import naive_visibility as naive
from described import LOWEST, WIDTHS, WINDOW, config_for, describe, spelled_out
from zaya_hf import visibility
from zaya_hf.history import RowHistory

# ------------------------------------------------------------------------------------------- the table, written out
# what is given for one row of 6 tokens (or two rows); segment and reach at look-back 2
TABLE = {
    "nothing": ({}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
    "a mask of ones": ({"attention_mask": [[1] * 6]}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
    "left pads": ({"attention_mask": [[0, 0, 1, 1, 1, 1]]}, [[-1, -1, 0, 0, 0, 0]], [[0, 0, 0, 1, 2, 2]]),
    "right pads": ({"attention_mask": [[1, 1, 1, 1, 0, 0]]}, [[0, 0, 0, 0, -1, -1]], [[0, 1, 2, 2, 0, 0]]),
    "pads on both sides": ({"attention_mask": [[0, 1, 1, 1, 0, 0]]}, [[-1, 0, 0, 0, -1, -1]], [[0, 0, 1, 2, 0, 0]]),
    "a hole": ({"attention_mask": [[1, 1, 0, 1, 1, 1]]}, [[0, 0, -1, 0, 0, 0]], [[0, 1, 0, 0, 1, 2]]),
    "only pads": ({"attention_mask": [[0] * 6]}, [[-1] * 6], [[0] * 6]),
    "two rows": (
        {"attention_mask": [[1] * 6, [0, 0, 0, 1, 1, 1]]},
        [[0] * 6, [-1, -1, -1, 0, 0, 0]],
        [[0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 1, 2]],
    ),
    "positions of one document": ({"position_ids": [[0, 1, 2, 3, 4, 5]]}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
    "positions without rows": ({"position_ids": [0, 1, 0, 1, 2, 3]}, [[0, 0, 1, 1, 1, 1]], [[0, 1, 0, 1, 2, 2]]),
    "positions that do not start at 0": ({"position_ids": [[7, 8, 9, 10, 11, 12]]}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
    "documents that do not start at 0": (
        {"position_ids": [[5, 6, 7, 40, 41, 3]]},
        [[0, 0, 0, 1, 1, 2]],
        [[0, 1, 2, 0, 1, 0]],
    ),
    "documents of one token": ({"position_ids": [[0, 0, 0, 0, 1, 0]]}, [[0, 1, 2, 3, 3, 4]], [[0, 0, 0, 0, 1, 0]]),
    "one row of positions for all": (
        {"position_ids": [[0, 1, 0, 1, 2, 3]], "attention_mask": [[1] * 6, [0, 1, 1, 1, 1, 1]]},
        [[0, 0, 1, 1, 1, 1], [-1, 0, 1, 1, 1, 1]],
        [[0, 1, 0, 1, 2, 2], [0, 0, 0, 1, 2, 2]],
    ),
    "positions that restart at every left pad": (
        {"position_ids": [[0, 0, 0, 1, 2, 3]], "attention_mask": [[0, 0, 1, 1, 1, 1]]},
        [[-1, -1, 0, 0, 0, 0]],
        [[0, 0, 0, 1, 2, 2]],
    ),
    "a restart inside padding": (
        {"position_ids": [[0, 1, 0, 0, 2, 3]], "attention_mask": [[1, 1, 0, 0, 1, 1]]},
        [[0, 0, -1, -1, 0, 0]],
        [[0, 1, 0, 0, 0, 1]],
    ),
    "positions that count padding": (
        {"position_ids": [[0, 1, 2, 3, 4, 5]], "attention_mask": [[1, 1, 0, 0, 1, 1]]},
        [[0, 0, -1, -1, 0, 0]],
        [[0, 1, 0, 0, 0, 1]],
    ),
    "padding between documents": (
        {"position_ids": [[0, 1, 1, 1, 0, 1]], "attention_mask": [[1, 1, 0, 0, 1, 1]]},
        [[0, 0, -1, -1, 1, 1]],
        [[0, 1, 0, 0, 0, 1]],
    ),
    "padding at -1 between documents": (
        {"position_ids": [[0, 1, -1, -1, 0, 1]], "attention_mask": [[1, 1, 0, 0, 1, 1]]},
        [[0, 0, -1, -1, 1, 1]],
        [[0, 1, 0, 0, 0, 1]],
    ),
    "cumulative lengths": ({"cu_seq_lens": [0, 2, 6]}, [[0, 0, 1, 1, 1, 1]], [[0, 1, 0, 1, 2, 2]]),
    "cumulative lengths of one document": ({"cu_seq_lens": [0, 6]}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
    "empty documents": ({"cu_seq_lens": [0, 0, 2, 2, 2, 6, 6]}, [[0, 0, 1, 1, 1, 1]], [[0, 1, 0, 1, 2, 2]]),
    "cumulative lengths and their positions": (
        {"cu_seq_lens": [0, 2, 6], "position_ids": [[0, 1, 0, 1, 2, 3]]},
        [[0, 0, 1, 1, 1, 1]],
        [[0, 1, 0, 1, 2, 2]],
    ),
    "cumulative lengths and positions of the row": (
        {"cu_seq_lens": [0, 2, 6], "position_ids": [[0, 1, 2, 3, 4, 5]]},
        [[0, 0, 1, 1, 1, 1]],
        [[0, 1, 0, 1, 2, 2]],
    ),
    "cumulative lengths with a masked start of a document": (
        {"cu_seq_lens": [0, 2, 6], "attention_mask": [[1, 1, 0, 1, 1, 1]]},
        [[0, 0, -1, 1, 1, 1]],
        [[0, 1, 0, 0, 1, 2]],
    ),
    "document numbers": ({"seq_idx": [[4, 4, 1, 1, 1, 4]]}, [[0, 0, 1, 1, 1, 2]], [[0, 1, 0, 1, 2, 0]]),
    "document numbers and positions of the row": (
        {"seq_idx": [[0, 0, 1, 1, 1, 1]], "position_ids": [[0, 1, 2, 3, 4, 5]]},
        [[0, 0, 1, 1, 1, 1]],
        [[0, 1, 0, 1, 2, 2]],
    ),
    "one document number": ({"seq_idx": [[3] * 6]}, [[0] * 6], [[0, 1, 2, 2, 2, 2]]),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    given, segment, reach = TABLE[row]
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    visible = describe(len(segment), 6, **tensors)
    got = spelled_out(visible, 2)
    assert got.segment.tolist() == segment
    assert got.reach.tolist() == reach
    full, sliding = visible.masks["hybrid"], visible.masks["hybrid_sliding"]
    for index, of_row in enumerate(segment):
        slots = [naive.Slot(number >= 0, 0, number) for number in of_row]
        for mask, window in ((full, None), (sliding, WINDOW)):
            want = [[naive.may_attend(slots, q, k, window) for k in range(6)] for q in range(6)]
            assert (mask[index, 0] == 0).tolist() == want, window
            assert ((mask[index, 0] == 0) | (mask[index, 0] == LOWEST)).all()


# mask and positions of 4 cached columns, then of 2 new ones (None: not given); segments and reach of the new ones, and
# whether the row continues its document
TWO_CALLS = {
    "no positions": ([1, 1, 1, 1], None, None, None, [0, 0], [0, 1], True),
    "counted on": ([1, 1, 1, 1], [0, 1, 2, 3], None, [4, 5], [0, 0], [0, 1], True),
    "counted on from 7": ([1, 1, 1, 1], [7, 8, 9, 10], None, [11, 12], [0, 0], [0, 1], True),
    "counted on by default from 7": ([1, 1, 1, 1], [7, 8, 9, 10], None, None, [0, 0], [0, 1], True),
    "a document with the call": ([1, 1, 1, 1], None, None, [0, 1], [1, 1], [0, 1], False),
    "a document inside the call": ([1, 1, 1, 1], None, None, [4, 0], [0, 1], [0, 0], True),
    "the last of two documents": ([1, 1, 1, 1], [0, 1, 0, 1], None, [2, 0], [1, 2], [0, 0], True),
    "left pads before": ([0, 0, 1, 1], None, None, None, [0, 0], [0, 1], True),
    "right pads before, no positions": ([1, 1, 0, 0], None, None, None, [0, 0], [0, 1], True),
    "right pads before, positions of the document": ([1, 1, 0, 0], [0, 1, 0, 0], None, [2, 3], [0, 0], [0, 1], True),
    "right pads before, positions of the row": ([1, 1, 0, 0], [0, 1, 2, 3], None, [4, 5], [0, 0], [0, 1], True),
    "right pads before, a document": ([1, 1, 0, 0], [0, 1, 2, 3], None, [0, 1], [1, 1], [0, 1], False),
    "right pads before, a jump": ([1, 1, 0, 0], [0, 1, 2, 3], None, [7, 8], [1, 1], [0, 1], False),
    "right pads at -1 before, a document": ([1, 1, 0, 0], [0, 1, -1, -1], None, [0, 1], [1, 1], [0, 1], False),
    "left pads in the call": ([1, 1, 1, 1], None, [0, 1], None, [-1, 0], [0, 0], True),
    "left pads in the call, with their position": ([1, 1, 1, 1], None, [0, 1], [0, 4], [-1, 0], [0, 0], True),
    "left pads in the call that count": ([1, 1, 1, 1], None, [0, 1], [4, 5], [-1, 0], [0, 0], True),
    "right pads, then left pads": ([1, 1, 0, 0], None, [0, 1], None, [-1, 0], [0, 0], True),
    "only pads before": ([0, 0, 0, 0], None, None, None, [0, 0], [0, 1], False),
    "only pads before, with positions": ([0, 0, 0, 0], [0, 0, 0, 0], None, [5, 6], [0, 0], [0, 1], False),
    "only pads in the call": ([1, 1, 1, 1], None, [0, 0], None, [-1, -1], [0, 0], False),
}


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls(name: str) -> None:
    old_mask, old_positions, mask, positions, segments, reach, continues = TWO_CALLS[name]
    history = RowHistory()
    old = {"attention_mask": [old_mask], "position_ids": old_positions}
    new = {"attention_mask": None if mask is None else [mask], "position_ids": positions}
    first, second = ({k: torch.tensor(v) for k, v in given.items() if v is not None} for given in (old, new))
    history.extend(describe(1, 4, **first))
    visible = describe(1, 2, history=history, **second)
    got = spelled_out(visible, 2)
    assert got.segment[0].tolist() == segments
    assert got.reach[0].tolist() == reach
    assert (visible.is_plain if visible.continues is None else bool(visible.continues[0])) is continues
    row = [naive.Slot(bool(real), 0, 0 if real else -1) for real in old_mask]
    if name == "the last of two documents":
        row[2].segment = row[3].segment = 1
    row += [naive.Slot(segment >= 0, 0, segment) for segment in segments]
    want = [[naive.may_attend(row, 4 + q, k) for k in range(6)] for q in range(2)]
    assert (visible.masks["hybrid"][0, 0] == 0).tolist() == want


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 6)}, True),
        ({"position_ids": torch.arange(6)}, True),
        ({"attention_mask": torch.tensor([[1] * 6, [0] + [1] * 5])}, False),
        ({"position_ids": torch.arange(1, 7)}, False),
    ],
)
def test_rows_that_are_one_document_cost_nothing(given: dict, plain: bool) -> None:
    visible = describe(2, 6, config_for("sdpa"), **given)
    assert visible.is_plain is plain
    assert (visible.reach is None) is plain
    assert (visible.real is None) is plain
    assert (visible.masks["hybrid"] is None) is plain


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_dtypes(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    visible = describe(2, 4, attention_mask=mask.to(dtype))
    assert visible.segment.tolist() == [[-1, -1, 0, 0], [0, 0, 0, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_additive_masks_have_the_dtype_of_the_activations(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1]])
    of_2d = describe(1, 3, attention_mask=mask, dtype=dtype).masks["hybrid"]
    of_4d = describe(1, 3, attention_mask=torch.full((1, 1, 3, 3), LOWEST).triu(1), dtype=dtype).masks["hybrid"]
    for given in (of_2d, of_4d):
        assert given.dtype == dtype
        assert given.isfinite().all()
        assert given[0, 0, 1, 2] == torch.finfo(dtype).min


# ---------------------------------------------------------------------------------------- against the definition
def random_call(rng: random.Random, past_rows: list[list[naive.Slot]], length: int, form: str) -> dict:
    """Arguments of one call of `length` tokens: ``real[B][S]``, and positions or document numbers."""
    rows = []
    for row in past_rows:
        pads = rng.choice(["none", "left", "right", "both", "holes", "all"])
        left = rng.randrange(length + 1) if pads in ("left", "both") else 0
        right = rng.randrange(length + 1 - left) if pads in ("right", "both") else 0
        real = [left <= t < length - right for t in range(length)]
        if pads in ("holes", "all"):
            real = [pads == "holes" and rng.random() < 0.6 for _ in range(length)]
        style = rng.choice(["count real", "count all", "restart", "zero", "minus one", "noise"])
        before = naive.last_real(row)
        position = -1 if before is None else before.position
        if row and rng.random() < 0.4:  # count on from the last column, whatever it was
            style, position = "count all", row[-1].position
        positions = []
        for t in range(length):
            if real[t] and rng.random() < 0.25:  # a document starts, not always at 0
                position = rng.choice([-1, -1, position + 3, 11])
            if real[t] or style == "count all":
                position += 1
            of_pad = {"restart": t % 2, "zero": 0, "minus one": -1, "noise": rng.randrange(20)}.get(style, position)
            positions.append(position if real[t] else of_pad)
        documents, number = [], 0
        for _ in range(length):
            number += rng.random() < 0.3
            documents.append(number % 3)
        rows.append((real, positions, documents))
    return {
        "real": [real for real, _, _ in rows],
        "positions": [positions for _, positions, _ in rows] if form in ("positions", "both") else None,
        "documents": [documents for _, _, documents in rows] if form in ("documents", "both") else None,
    }


def check_call(rows: list[list[naive.Slot]], call: dict, history: RowHistory | None, widths, grown: bool) -> None:
    """Describe one call and compare all of it with the definition; `rows` and `history` grow by the call."""
    look_back = WIDTHS[widths]
    real = torch.tensor(call["real"])
    batch_size, length = real.shape
    past = len(rows[0])
    mask = real
    if grown and past:
        mask = torch.cat([torch.tensor([[slot.real for slot in row] for row in rows]), real], dim=1)
    given = {"attention_mask": mask}
    if call["positions"] is not None:
        given["position_ids"] = torch.tensor(call["positions"])
    if call["documents"] is not None:
        given["seq_idx"] = torch.tensor(call["documents"])
    visible = describe(batch_size, length, config_for(widths=widths), history=history, **given)
    got = spelled_out(visible, look_back)
    masks = {None: visible.masks["hybrid"], WINDOW: visible.masks["hybrid_sliding"]}
    for index, row in enumerate(rows):
        of_row = {name: None if call[name] is None else call[name][index] for name in ("positions", "documents")}
        had_real = naive.last_real(row) is not None
        reach, continues = naive.feed(row, call["real"][index], look_back, **of_row)
        new = row[past:]
        assert got.segment[index].tolist() == [slot.segment for slot in new]
        assert got.reach[index].tolist() == reach
        for t, slot in enumerate(new):
            assert not slot.real or got.positions[index, t] == slot.position
        columns = [t for t, slot in enumerate(new) if slot.real]
        if visible.has_real is not None:
            assert visible.has_real[index] == bool(columns)
        if columns:
            assert got.last[index] == columns[-1]
        if visible.continues is not None:
            assert visible.continues[index] == continues
        elif had_real:
            assert continues
        if visible.entry_index is not None:
            steps = zip(visible.entry_index[index].tolist(), visible.entry_valid[index].tolist(), strict=True)
            entered = [place for place, valid in steps if valid]
            run = [t for t in range(length) if columns and t - columns[0] == reach[t] < look_back and new[t].real]
            assert entered == [index * length + t for t in run if t >= columns[0]]
        for window, allowed in masks.items():
            want = [[naive.may_attend(row, past + q, k, window) for k in range(len(row))] for q in range(length)]
            assert (allowed[index, 0] == 0).tolist() == want, window
    if history is not None:
        history.extend(visible)


@hypothesis.given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    widths=st.sampled_from(sorted(WIDTHS)),
    grown=st.booleans(),
    form=st.sampled_from(["mask", "positions"]),
)
def test_any_padding_documents_and_chunks(seed, batch_size, lengths, widths, grown, form) -> None:
    rng = random.Random(seed)
    rows: list[list[naive.Slot]] = [[] for _ in range(batch_size)]
    history = RowHistory()
    for length in lengths:
        check_call(rows, random_call(rng, rows, length, form), history, widths, grown)


def test_three_hundred_histories(test_seed: int, fuzzing: bool) -> None:
    rng = random.Random(test_seed)
    for _ in range(3000 if fuzzing else 300):
        rows: list[list[naive.Slot]] = [[] for _ in range(rng.randint(1, 2))]
        history = RowHistory()
        for _ in range(rng.randint(1, 3)):
            call = random_call(rng, rows, rng.randint(1, 6), rng.choice(["mask", "positions"]))
            check_call(rows, call, history, rng.choice(sorted(WIDTHS)), rng.random() < 0.5)


def test_three_hundred_rows_with_document_numbers(test_seed: int, fuzzing: bool) -> None:
    rng = random.Random(test_seed)
    for _ in range(3000 if fuzzing else 300):
        rows: list[list[naive.Slot]] = [[] for _ in range(rng.randint(1, 2))]
        call = random_call(rng, rows, rng.randint(1, 9), rng.choice(["documents", "both"]))
        check_call(rows, call, rng.choice([None, RowHistory()]), rng.choice(sorted(WIDTHS)), False)


@hypothesis.given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), widths=st.sampled_from(sorted(WIDTHS)))
def test_cumulative_lengths_are_document_numbers(lengths: list[int], widths: tuple[int, int]) -> None:
    total = sum(lengths)
    cumulative = torch.tensor([0, *lengths]).cumsum(0).int()
    numbers = [index for index, length in enumerate(lengths) for _ in range(length)]
    visible = describe(1, total, config_for(widths=widths), cu_seq_lens=cumulative)
    row: list[naive.Slot] = []
    reach, _ = naive.feed(row, [True] * total, WIDTHS[widths], documents=numbers)
    got = spelled_out(visible, WIDTHS[widths])
    assert got.segment[0].tolist() == [slot.segment for slot in row]
    assert got.reach[0].tolist() == reach
    assert got.positions[0].tolist() == [t for length in lengths for t in range(length)]


# --------------------------------------------------------------------------------------------------------- tracing
NAMES = ("segment", "reach", "continues", "entry_index", "entry_valid", "last", "has_real", "position_ids")


def as_tensors(visible: visibility.Visibility) -> tuple[Tensor | None, ...]:
    values = [getattr(visible, name) for name in NAMES[:-1]]
    positions = visible.position_ids.expand(visible.batch_size, -1)
    return (*values, positions, visible.masks["hybrid"], visible.masks["hybrid_sliding"])


def with_history(config, length: int, segments: Tensor, positions: Tensor, **given) -> tuple[Tensor | None, ...]:
    past = segments.shape[1]
    history = RowHistory(length=past, segments=segments, positions=positions) if past else None
    return as_tensors(describe(segments.shape[0], length, config, history=history, **given))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("past", [0, 5])
def test_a_traced_description_holds_for_other_values(attention: str, past: int) -> None:
    """One graph without a break; what it was traced with leaves no mark in it."""
    config = config_for(attention)

    def traced(segments, positions, mask, position_ids):
        return with_history(config, 6, segments, positions, attention_mask=mask, position_ids=position_ids)

    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=False)
    rng = random.Random(past)
    cases = []
    for trial in range(8):
        rows: list[list[naive.Slot]] = [[], []]
        history = RowHistory()
        if past:
            call = random_call(rng, rows, past, "positions")
            check_call(rows, call, history, (2, 2), False)
        call = random_call(rng, rows, 6, "positions")
        if trial == 0:  # traced with what an eager call would take a short cut for
            call = {"real": [[True] * 6] * 2, "positions": [list(range(past, past + 6))] * 2, "documents": None}
        segments, positions = history.materialise(2, torch.device("cpu"))
        cases.append(
            (segments.contiguous(), positions.contiguous(), torch.tensor(call["real"]), torch.tensor(call["positions"]))
        )
    for case in cases:
        got, want = compiled(*case), traced(*case)
        for name, a, b in zip((*NAMES, "full", "sliding"), got, want, strict=True):
            if b is not None:  # short cuts that eager calls take
                assert torch.equal(a, b), name
        segment = got[0]
        assert segment is not None
        assert torch.equal(segment == -1, ~case[2])


def test_traced_4d_masks_and_cumulative_lengths() -> None:
    config = config_for()

    def of_pairs(pairs):
        return as_tensors(describe(2, 5, config, attention_mask=pairs))

    def of_lengths(lengths):
        return as_tensors(describe(1, 8, config, cu_seq_lens=lengths))

    generator = torch.Generator().manual_seed(0)
    causal = torch.ones(5, 5).tril().bool()
    pairs = [(torch.rand(2, 1, 5, 5, generator=generator) < p) & causal for p in (1.0, 0.5, 0.8, 0.0)]
    lengths = [torch.tensor(values) for values in ([0, 8, 8, 8], [0, 3, 3, 8], [0, 0, 1, 8], [0, 2, 5, 8])]
    for function, cases in ((of_pairs, pairs), (of_lengths, lengths)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
        for case in cases:
            for name, a, b in zip((*NAMES, "full", "sliding"), compiled(case), function(case), strict=True):
                if b is not None:
                    assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "seq_idx"])
def test_sizes_of_one_argument_that_a_compiler_knows_as_symbols(name: str) -> None:
    """As when a compiled model that has met rows of several lengths is given its first mask."""

    config = config_for()

    def segment(x: Tensor, given: Tensor) -> Tensor | None:
        return describe(*x.shape, config, **{name: given}).segment

    x, given = torch.zeros(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    torch._dynamo.maybe_mark_dynamic(x, (0, 1))
    compiled = torch.compile(segment, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, given), segment(x, given))
    torch._dynamo.reset()
