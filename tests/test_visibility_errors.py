"""Arguments about documents and padding that fit nothing: one clear line each; and what is no error."""

from __future__ import annotations

import pytest
import torch

from described import config_for, describe
from zaya_hf import ZayaModel, arguments
from zaya_hf.history import RowHistory
from zaya_hf.testing import random_ids, redraw, tiny_config


def history_of(length: int) -> RowHistory:
    return RowHistory(length=length)


ERRORS = {
    "1-D mask": (
        {"attention_mask": torch.ones(5)},
        r"attention_mask has shape \(5,\); expected \[2, 5\] or \[2 or 1, 4 or 1, 5, 5\]",
    ),
    "3-D mask": ({"attention_mask": torch.ones(2, 5, 5)}, r"attention_mask has shape \(2, 5, 5\); expected \[2, 5\]"),
    "short mask": ({"attention_mask": torch.ones(2, 4)}, r"attention_mask has shape \(2, 4\); expected \[2, 5\]\.$"),
    "mask of one row": (
        {"attention_mask": torch.ones(1, 5)},
        r"attention_mask has shape \(1, 5\); expected \[2, 5\]\.$",
    ),
    "long mask": ({"attention_mask": torch.ones(2, 6)}, r"attention_mask has shape \(2, 6\); expected \[2, 5\]\.$"),
    "mask that does not grow": (
        {"attention_mask": torch.ones(2, 7), "history": history_of(3)},
        r"attention_mask has shape \(2, 7\); expected \[2, 5\] or \[2, 8\] \(with the 3 cached tokens\)",
    ),
    "negative 2-D mask": ({"attention_mask": torch.zeros(2, 5) - 1}, "1 for real tokens and 0 for padding"),
    "4-D mask with other keys": (
        {"attention_mask": torch.ones(2, 1, 5, 6)},
        r"attention_mask has shape \(2, 1, 5, 6\); expected .*\[2 or 1, 4 or 1, 5, 5\]",
    ),
    "4-D mask without cached keys": (
        {"attention_mask": torch.ones(2, 1, 5, 5), "history": history_of(3)},
        r"\(2, 1, 5, 5\); expected .*\[2 or 1, 4 or 1, 5, 8\]",
    ),
    "4-D mask with other rows": ({"attention_mask": torch.ones(3, 1, 5, 5)}, r"\(3, 1, 5, 5\); expected"),
    "4-D mask with other heads": ({"attention_mask": torch.ones(2, 2, 5, 5)}, r"\(2, 2, 5, 5\); expected"),
    "dict of masks": (
        {"attention_mask": {"hybrid": None}},
        "attention_mask has type dict; expected a 2-D or a 4-D tensor",
    ),
    "list": ({"attention_mask": [[1] * 5] * 2}, "attention_mask has type list"),
    "3-D positions": (
        {"position_ids": torch.zeros(3, 2, 5)},
        r"position_ids have shape \(3, 2, 5\); expected \[2, 5\] or \[1, 5\]",
    ),
    "short positions": (
        {"position_ids": torch.arange(4)},
        r"position_ids have shape \(4,\); expected \[2, 5\] or \[1, 5\]",
    ),
    "positions of other rows": ({"position_ids": torch.zeros(3, 5)}, r"position_ids have shape \(3, 5\); expected"),
    "short document numbers": (
        {"seq_idx": torch.zeros(2, 4)},
        r"seq_idx have shape \(2, 4\); expected \[2, 5\] or \[1, 5\]",
    ),
    "document numbers with a cache": (
        {"seq_idx": torch.zeros(2, 5), "history": history_of(3)},
        "seq_idx describe rows without a cache, but 3 tokens are cached; use position_ids",
    ),
    "lengths of two rows": (
        {"cu_seq_lens": torch.tensor([0, 5])},
        "describe one row without a cache, but the call has 2 rows",
    ),
}
ERRORS_OF_ONE_ROW = {
    "lengths that fall": (
        {"cu_seq_lens": torch.tensor([0, 4, 2, 5])},
        r"cu_seq_lens \[0, 4, 2, 5\] do not rise from 0 to the 5",
    ),
    "lengths that stop early": (
        {"cu_seq_lens": torch.tensor([0, 2, 4])},
        r"\[0, 2, 4\] do not rise from 0 to the 5 tokens",
    ),
    "lengths that go on": ({"cu_seq_lens": torch.tensor([0, 2, 6])}, r"\[0, 2, 6\] do not rise from 0 to the 5 tokens"),
    "lengths that start late": (
        {"cu_seq_lens": torch.tensor([1, 2, 5])},
        r"\[1, 2, 5\] do not rise from 0 to the 5 tokens",
    ),
    "lengths of 2-D shape": (
        {"cu_seq_lens": torch.tensor([[0, 5]])},
        r"cu_seq_lens have shape \(1, 2\); expected \[documents \+ 1\]",
    ),
    "no lengths": ({"cu_seq_lens": torch.tensor([], dtype=torch.int32)}, r"cu_seq_lens have shape \(0,\)"),
    "lengths with a cache": (
        {"cu_seq_lens": torch.tensor([0, 2, 5]), "history": history_of(3)},
        "describe one row without a cache, but the call has a cache of 3 tokens; use position_ids",
    ),
}


@pytest.mark.parametrize("case", [*ERRORS, *ERRORS_OF_ONE_ROW])
def test_bad_shapes_are_one_clear_line(case: str) -> None:
    given, message = {**ERRORS, **ERRORS_OF_ONE_ROW}[case]
    with pytest.raises(ValueError, match=message) as caught:
        describe(2 if case in ERRORS else 1, 5, **given)
    assert "\n" not in str(caught.value)


def test_a_mask_cannot_take_back_what_a_state_holds() -> None:
    """Rows fed without their mask took their state from a pad: a mask that comes later is too late."""
    history = RowHistory(length=4)
    late = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]])
    with pytest.raises(ValueError, match="attention_mask hides cached token 3 of row 1, which was fed as a real one"):
        describe(2, 1, history=history, attention_mask=late)
    # hiding older tokens is fine, and so is a row that gets nothing but padding
    older = describe(2, 1, history=history, attention_mask=torch.tensor([[1] * 5, [0, 0, 1, 1, 1]]))
    assert (older.masks["hybrid"][1, 0, 0] == 0).tolist() == [False, False, True, True, True]
    describe(2, 1, history=history, attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))


def test_padding_stays_padding() -> None:
    """A mask of ones over everything does not make cached padding real."""
    history = RowHistory()
    history.extend(describe(1, 4, attention_mask=torch.tensor([[0, 0, 1, 1]])))
    later = describe(1, 1, history=history, attention_mask=torch.ones(1, 5))
    assert (later.masks["hybrid"][0, 0, 0] == 0).tolist() == [False, False, True, True, True]
    assert later.position_ids.tolist() == [[2]]


@torch.no_grad()
def test_errors_of_the_model_name_the_argument() -> None:
    model = redraw(ZayaModel(tiny_config()))
    ids = random_ids(1, 5)
    for given, message in [
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 3, 5])}, "different documents"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 5])}, "different documents"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(ids, **given)
    for name, right in arguments.OTHER_NAMES.items():
        with pytest.raises(TypeError, match=rf"{name}.*; pass it as {right.split()[0]}"):
            model(ids, **{name: torch.ones(1, 5)})
    lengths = torch.tensor([0, 2, 5])
    want = model(ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths.clone()).last_hidden_state
    for given in (
        {"cu_seq_lens_q": lengths},
        {"cu_seq_lens_k": lengths},
        {"seq_idx": torch.tensor([0, 0, 1, 1, 1])},
    ):
        torch.testing.assert_close(model(ids, **given).last_hidden_state, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("batch_size", "length"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("past", [0, 3])
def test_nothing_to_describe(batch_size: int, length: int, attention: str, past: int) -> None:
    for given in (
        {},
        {"attention_mask": torch.zeros(batch_size, past + length)},
        {"position_ids": torch.zeros(batch_size, length)},
        {"attention_mask": torch.zeros(batch_size, 1, length, past + length).bool()},
    ):
        history = RowHistory()
        history.extend(describe(batch_size, past, attention_mask=torch.zeros(batch_size, past)))
        visible = describe(batch_size, length, config_for(attention), history=history, **given)
        assert visible.segment is None or visible.segment.shape == (batch_size, length)
        assert visible.reach is None or visible.reach.shape == (batch_size, length)
        history.extend(visible)
        assert history.length == past + length
