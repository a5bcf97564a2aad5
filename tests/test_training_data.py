"""Batches of packed rows: what they hold, what the model makes of them, and that nothing else decides their order."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from memory_documents import documents_of, numbered
from zaya_hf import ZayaForCausalLM
from zaya_hf.attention_masks import worthwhile_pieces
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.training.data.documents import TokenDocuments
from zaya_hf.training.data.packing import Piece
from zaya_hf.training.data.rows import NO_TARGET, HeldOutRows, TrainingData, check_same

MODES = ["contiguous", "best_fit"]
each_mode = pytest.mark.parametrize("packing", MODES)
Batch = dict[str, Tensor]
PAD = 127


def data_of(
    *sources: TokenDocuments, length: int = 8, packing: Any = "contiguous", seed: int = 0, **options: Any
) -> TrainingData:
    weights = options.pop("weights", [1.0] * len(sources))
    return TrainingData(sources, weights, length=length, packing=packing, seed=seed, pad_id=PAD, **options)


def place_of(data: TrainingData, sample: int) -> tuple[int, int]:
    """Source and row of a sample."""
    source, _, row = data.order.locate(sample)
    return int(source[0]), int(row[0])


def epoch_of(data: TrainingData, micro_rows: int = 1, **options: Any) -> list[Batch]:
    """Each row of the first source once."""
    return data.micro_batches(0, len(data.packed[0]), micro_rows=micro_rows, **options)


def joined(batches: list[Batch], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


# ----------------------------------------------------------------------------------------------------- what rows hold
@each_mode
@hypothesis.given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    masked=st.booleans(),
)
def test_each_pair_of_neighbours_is_a_target_once(
    packing: str, lengths: list[int], length: int, seed: int, masked: bool
) -> None:
    documents = numbered(lengths)
    ids = [documents.tokens(document).tolist() for document in range(len(lengths))]
    asked = [[not masked or (document + place) % 3 > 0 for place in range(n)] for document, n in enumerate(lengths)]
    if masked:
        documents = documents_of(ids, asked)
    batches = epoch_of(data_of(documents, length=length, packing=packing, seed=seed), micro_rows=3)
    inputs, labels = joined(batches, "input_ids"), joined(batches, "labels")
    target = labels != NO_TARGET
    pairs = Counter(zip(inputs[target].tolist(), labels[target].tolist(), strict=True))
    assert pairs == Counter(
        (before, after)
        for document, flags in zip(ids, asked, strict=True)
        for before, after, flag in zip(document, document[1:], flags[1:], strict=False)
        if flag
    )


@each_mode
def test_positions_restart_with_every_piece(packing: str) -> None:
    data = data_of(numbered([3, 11, 1, 1, 6, 8, 2]), packing=packing)
    batches = epoch_of(data, micro_rows=2)
    rows, seen = joined(batches, "position_ids"), 0
    for row, ids, sample in zip(rows, joined(batches, "input_ids"), range(len(rows)), strict=False):
        if sample >= len(data.packed[0]):
            break
        source, number = place_of(data, sample)
        sizes = [stop - start for _, start, stop in data.packed[source].pieces(number)]
        pieces = [*sizes, 8 - sum(sizes)]
        assert row.tolist() == [place for size in pieces for place in range(size)]
        assert (ids[sum(sizes) :] == PAD).all()
        seen += sum(sizes)
    assert seen == 32


def test_a_micro_batch_in_full() -> None:
    documents = documents_of([[8, 9, 10], [3, 4, 5, 6, 7]], [[True] * 3, [False, False, True, True, False]])
    data = data_of(documents, length=6, packing="contiguous", seed=0)
    assert [data.packed[0].pieces(row) for row in (0, 1)] == [[(0, 0, 3), (1, 0, 3)], [(1, 3, 5)]]
    batches = data.micro_batches(0, 2, micro_rows=2)
    first = batches[0]["input_ids"][:, 0].tolist().index(8)
    in_order = [first, 1 - first]
    batch = {name: values[in_order].tolist() for name, values in batches[0].items()}
    assert batch == {
        "input_ids": [[8, 9, 10, 3, 4, 5], [6, 7, PAD, PAD, PAD, PAD]],
        "position_ids": [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]],
        "attention_mask": [[1] * 6, [1, 1, 0, 0, 0, 0]],
        "labels": [[9, 10, -100, -100, 5, 6], [-100] * 6],
        "shift_labels": [[9, 10, -100, -100, 5, 6], [-100] * 6],
    }
    assert batches[0]["labels"] is batches[0]["shift_labels"]
    assert {values.dtype for values in batches[0].values()} == {torch.int64}


@each_mode
def test_there_is_a_mask_only_where_there_is_padding(packing: str) -> None:
    data = data_of(numbered([8, 8, 5]), packing=packing)
    masks = [batch.get("attention_mask") for batch in epoch_of(data)]
    assert sorted("none" if mask is None else int(mask.sum()) for mask in masks if mask is not None) == [5]
    assert masks.count(None) == 2
    without = epoch_of(data_of(numbered([8, 8, 5]), packing=packing, mask_padding=False))
    assert all("attention_mask" not in batch for batch in without)


# ---------------------------------------------------------------------------------- processes, micro-batches, resuming
@pytest.mark.parametrize(("world_size", "micro_rows"), [(1, 2), (1, 5), (2, 1), (2, 3), (3, 2), (7, 1), (4, 4)])
def test_processes_and_micro_batches_do_not_decide_the_order(world_size: int, micro_rows: int) -> None:
    data = data_of(numbered([5] * 30, name="a"), numbered([9] * 30, name="b"), weights=[2, 1])
    samples, first = 11, 17
    want = [batch["input_ids"][0].tolist() for batch in data.micro_batches(first, samples)]
    ranks = [data.micro_batches(first, samples, rank, world_size, micro_rows) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    got: dict[int, list[int]] = {}
    for rank, batches in enumerate(ranks):
        assert all(batch["input_ids"].shape == (micro_rows, 8) for batch in batches)
        rows, labels = joined(batches, "input_ids"), joined(batches, "labels")
        for number, row in enumerate(rows.tolist()):
            sample = number * world_size + rank
            if sample < samples:
                got[sample] = row
            else:
                assert row == [PAD] * 8
                assert (labels[number] == NO_TARGET).all()
                mask = batches[number // micro_rows]["attention_mask"]
                assert not mask[number % micro_rows].any()
    assert [got[sample] for sample in range(samples)] == want


_STEPS = """
import json
from test_training_data import MODES, first_ids
print(json.dumps([[first_ids(packing, step) for step in range(9, 12)] for packing in MODES]))
"""


def first_ids(packing: str, step: int) -> list[int]:
    """Of 24 rows, the first ids of the 4 of a step."""
    data = data_of(numbered([4] * 24), length=4, packing=packing, seed=9)
    return [int(batch["input_ids"][0, 0]) for batch in data.micro_batches(step * 4, 4)]


def test_resumed_in_a_new_process_within_an_epoch() -> None:
    """accelerate issue 2823: 24 samples, batches of 4, two epochs, on from step 9."""
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    resumed = subprocess.run(
        [sys.executable, "-c", _STEPS], env=environment, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    for packing, rest in zip(MODES, json.loads(resumed.stdout), strict=True):
        steps = [first_ids(packing, step) for step in range(12)]
        assert rest == steps[9:]
        for epoch in (steps[:6], steps[6:]):
            assert sorted(np.ravel(epoch)) == list(range(3, 3 + 96, 4))
        assert steps[:6] != steps[6:]


def test_sources_by_weight() -> None:
    data = data_of(numbered([8] * 10, name="a"), numbered([8] * 99, name="b"), weights=[3, 1])
    places = [place_of(data, sample) for sample in range(80)]
    assert abs(sum(source == 0 for source, _ in places) - 60) <= 2
    first = [row for source, row in places if source == 0]
    for epoch in range(5):
        assert sorted(first[10 * epoch : 10 * epoch + 10]) == list(range(10))
    ids = [batch["input_ids"][0, 0].item() for batch in data.micro_batches(0, 80)]
    for (source, row), found in zip(places, ids, strict=True):
        piece = data.packed[source].pieces(row)[0]
        assert found == data.documents[source].tokens(piece.document)[piece.start]


# ----------------------------------------------------------------------------------------------- packed = one by one
def random_documents(lengths: list[int], masked: bool, seed: int = 0) -> TokenDocuments:
    draw = np.random.default_rng(seed)
    ids = [draw.integers(3, PAD, size=length).tolist() for length in lengths]
    asked = [(draw.random(length) < 0.6).tolist() for length in lengths] if masked else None
    return documents_of(ids, asked)


def alone(documents: TokenDocuments, piece: Piece) -> tuple[Tensor, Tensor]:
    """Ids and targets of a piece, `[1, S]`, made without anything of `rows`."""
    ids = documents.tokens(piece.document).tolist()
    asked = documents.targets(piece.document)
    wanted = [True] * len(ids) if asked is None else asked.tolist()
    after = [ids[i + 1] if i + 1 < len(ids) and wanted[i + 1] else NO_TARGET for i in range(piece.start, piece.stop)]
    return torch.tensor([ids[piece.start : piece.stop]]), torch.tensor([after])


def summed(model: Any, batches: list[Batch], targets: int) -> tuple[float, dict[str, Tensor], Tensor | None]:
    """Loss, gradients, and tokens per slot of all batches together."""
    model.zero_grad()
    loss, counts = 0.0, None
    options = {"output_router_logits": True} if isinstance(model, ZayaForCausalLM) else {}
    for batch in batches:
        output = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(targets), **options)
        output.loss.backward()
        loss += output.loss.item()
        if options:
            counts = output.tokens_per_slot if counts is None else counts + output.tokens_per_slot
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, counts


def check_packed(model: Any, data: TrainingData, micro_rows: int) -> None:
    documents, rows = data.documents[0], data.packed[0]
    batches = epoch_of(data, micro_rows)
    pieces = [piece for row in range(len(rows)) for piece in rows.pieces(row)]
    separate = [alone(documents, piece) for piece in pieces]
    targets = sum(int((labels != NO_TARGET).sum()) for _, labels in separate)
    assert targets == sum(int((batch["shift_labels"] != NO_TARGET).sum()) for batch in batches) > 0
    loss, gradients, counts = summed(model, batches, targets)
    want_loss, want, want_counts = summed(
        model, [{"input_ids": ids, "labels": labels, "shift_labels": labels} for ids, labels in separate], targets
    )
    assert loss == pytest.approx(want_loss, abs=1e-5)
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, want[name], atol=1e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    if counts is not None and want_counts is not None:
        assert torch.equal(counts, want_counts)
        assert (counts.sum(1) == rows.tokens).all()


@pytest.mark.parametrize("masked", [False, True], ids=["all", "chat"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@each_mode
def test_packed_rows_are_as_good_as_documents_alone(packing: str, attention: str, masked: bool) -> None:
    """Loss, gradients and tokens per slot; with documents of one token, cuts, padding, and a missing row."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()
    model.set_attn_implementation(attention)
    data = data_of(random_documents([1, 5, 30, 2, 1, 12, 7, 16, 1, 3, 9], masked), length=12, packing=packing)
    assert any(start > 0 for row in range(len(data.packed[0])) for _, start, _ in data.packed[0].pieces(row))
    check_packed(model, data, micro_rows=3)


@each_mode
def test_long_documents_and_sliding_layers(packing: str) -> None:
    """Rows in which attention goes piece by piece, and a window that is shorter than they are."""
    layers = {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 5, "num_hidden_layers": 2}
    model = redraw(ZayaForCausalLM(tiny_config(**layers))).train()
    model.set_attn_implementation("sdpa")
    data = data_of(random_documents([280, 210, 120, 300, 9], False), length=300, packing=packing)
    with torch.no_grad():
        segments = [
            model.model(batch["input_ids"], batch.get("attention_mask"), batch["position_ids"]).segments
            for batch in epoch_of(data, 2)
        ]
    assert any(worthwhile_pieces(each) for each in segments)
    check_packed(model, data, 2)


def test_the_pad_id_and_padding_rows_change_nothing() -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()
    runs = []
    for pad_id, rows in ((PAD, 1), (3, 1), (3, 5)):
        data = TrainingData([random_documents([13], False)], [1], length=6, packing="contiguous", seed=0, pad_id=pad_id)
        runs.append(summed(model, data.micro_batches(0, 3, micro_rows=rows), 12))
    for loss, gradients, counts in runs[1:]:
        assert loss == pytest.approx(runs[0][0], abs=1e-6)
        assert counts is not None
        assert torch.equal(counts, runs[0][2])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, runs[0][1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_micro_batch_of_padding_adds_exactly_nothing(attention: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()
    model.set_attn_implementation(attention)
    data = data_of(numbered([8, 8, 8]))
    (batch,) = data.micro_batches(0, 1, rank=1, world_size=2, micro_rows=2)
    loss, gradients, counts = summed(model, [batch], 7)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())
    assert counts is not None
    assert not counts.any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@each_mode
def test_stock_models_find_the_documents_in_rows_without_a_mask(packing: str, attention: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).train()
    model.set_attn_implementation(attention)
    documents = random_documents([1, 5, 30, 2, 1, 12, 7, 16, 1, 3, 9], True)
    data = data_of(documents, length=12, packing=packing, mask_padding=False)
    check_packed(model, data, micro_rows=3)


# ------------------------------------------------------------------------------------------------------ the same data
def two_sources(**changes: Any) -> TrainingData:
    chosen = {"a": [3, 4, 5], "b": [6, 2], "file": "b.jsonl", "names": ("web", "code"), "weights": [1, 2], **changes}
    sources = [
        numbered(chosen["a"], name=chosen["names"][0], file="a.jsonl"),
        numbered(chosen["b"], name=chosen["names"][1], file=chosen["file"]),
    ]
    options = {name: chosen[name] for name in ("length", "packing", "seed") if name in chosen}
    return data_of(*sources, weights=chosen["weights"], **options)


def test_the_same_data_is_the_same_after_json() -> None:
    identity = json.loads(json.dumps(two_sources().identity()))
    check_same(identity, two_sources().identity())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "the seed was 0 and is 1 now"),
        ({"length": 9}, "the row length was 8 and is 9 now"),
        ({"packing": "best_fit"}, "the packing was 'contiguous' and is 'best_fit' now"),
        ({"weights": [1, 2.5]}, "the weight of source 'code' was 2.0 and is 2.5 now"),
        ({"names": ("web", "prose")}, "source 'code' is gone"),
        ({"names": ("code", "web")}, "the order of the sources was"),
        ({"b": [6, 3]}, "file b.jsonl of source 'code' has changed"),
        ({"b": [2, 6], "file": "c.jsonl"}, "file b.jsonl of source 'code' is gone"),
    ],
)
def test_what_changed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"the data is not what the run was started with: {message}"):
        check_same(two_sources().identity(), two_sources(**changes).identity())


def test_a_new_source_and_another_reading_are_named() -> None:
    saved = two_sources().identity()
    more = copy.deepcopy(saved)
    more["sources"].append({**more["sources"][0], "name": "books"})
    with pytest.raises(ValueError, match="source 'books' is new"):
        check_same(saved, more)
    with pytest.raises(ValueError, match="source 'books' is gone"):
        check_same(more, saved)
    for key, value, message in (
        (
            "fingerprint",
            "0",
            "the files of source 'web' are the same, but they were read, tokenised or divided in another way",
        ),
        ("documents", 2, "the number of documents in source 'web' was 3 and is 2 now"),
    ):
        other = copy.deepcopy(saved)
        other["sources"][0] |= {"fingerprint": "0", key: value}
        with pytest.raises(ValueError, match=message):
            check_same(saved, other)
    with pytest.raises(ValueError, match="the version of the data order was 1 and is 2 now"):
        check_same(saved, {**saved, "order_version": 2})


def test_moved_files_are_the_same_data() -> None:
    """What decides is what is in them."""
    saved, now = two_sources().identity(), two_sources().identity()
    now["sources"][0]["files"] = {"elsewhere.jsonl": "digest"}
    check_same(saved, now)


# ------------------------------------------------------------------------------------------------------------ errors
def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match="two sources are called 'a'; give one of them another name"):
        data_of(numbered([3], name="a"), numbered([3], name="a"))
    with pytest.raises(ValueError, match="source 'b' has no tokens"):
        data_of(numbered([3], name="a"), numbered([0], name="b"))
    with pytest.raises(ValueError, match="held-out source 'c' has no tokens"):
        HeldOutRows(numbered([], name="c"), 8)


class Broken:
    """Documents of which some cannot be read."""

    def __init__(self, error: Exception | None = None, cut: int = 0) -> None:
        self._inner, self._error, self._cut = numbered([8] * 6), error, cut
        self.name, self.lengths = "broken", self._inner.lengths

    def targets(self, document: int, start: int, stop: int) -> None:
        return None

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        if document == 4 and self._error is not None:
            raise self._error
        return self._inner.tokens(document, start, stop - self._cut if document == 4 else stop)


class Particular(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(5, "Input/output error"), OSError, r"\[Errno 5\] Input/output error"),
        (ValueError("no such id"), ValueError, "no such id"),
        (Particular("one", "other"), RuntimeError, "Particular: one"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(error: Exception, kind: type[Exception], text: str) -> None:
    data = data_of(Broken(error))  # type: ignore[arg-type]
    (sample,) = (k for k in range(6) if data.packed[0].pieces(place_of(data, k)[1])[0].document == 4)
    with pytest.raises(kind, match=f"^sample {sample}, row {place_of(data, sample)[1]} of 'broken': {text}$") as raised:
        data.micro_batches(0, 6)
    assert raised.value.__cause__ is error


def test_files_that_were_cut_short_are_noticed() -> None:
    with pytest.raises(ValueError, match="document 4 has 7 tokens between 0 and 8; its files were cut short"):
        data_of(Broken(cut=1)).micro_batches(0, 6)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- held out
@pytest.mark.parametrize(("world_size", "micro_rows"), [(1, 1), (1, 4), (2, 2), (3, 1)])
@each_mode
def test_held_out_rows_come_once_each_and_in_one_order(packing: str, world_size: int, micro_rows: int) -> None:
    lengths = [3, 11, 1, 6, 8, 2, 9]
    held_out = HeldOutRows(numbered(lengths), 8, packing, pad_id=0)
    assert len(held_out) == len(held_out.packed)
    ranks = [list(held_out.batches(rank, world_size, micro_rows)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    again = list(HeldOutRows(numbered(lengths), 8, packing, pad_id=0).batches(0, world_size, micro_rows))
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(ranks[0], again, strict=True))
    ids = torch.cat([joined(batches, "input_ids") for batches in ranks])
    assert sorted(ids[ids > 0].tolist()) == list(range(3, 3 + sum(lengths)))
    labels = torch.cat([joined(batches, "labels") for batches in ranks])
    assert int((labels != NO_TARGET).sum()) == sum(length - 1 for length in lengths)


def test_a_held_out_row_that_cannot_be_read_is_named() -> None:
    held_out = HeldOutRows(Broken(ValueError("no such id")), 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^row [0-5] of 'broken': no such id$"):
        list(held_out.batches())
