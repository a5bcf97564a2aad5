"""The helpers in zaya_hf.testing: what `redraw` draws, and which differences `assert_equal_logits` excuses."""

from __future__ import annotations

import pytest
import torch
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, RecordedRun, assert_equal_logits, random_ids, record_run, redraw, tiny_config


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config()))


def probabilities(*rows: list[float]) -> torch.Tensor:
    """``[1, S, 1, slots]`` biased probabilities of a one-layer model, one row per token."""
    return torch.tensor(rows)[None, :, None]


# ------------------------------------------------------------------------------------------------------------- redraw
def test_redraw_is_reproducible_and_leaves_nothing_at_its_default(model: ZayaForCausalLM) -> None:
    again = redraw(ZayaForCausalLM(tiny_config()))
    other = redraw(ZayaForCausalLM(tiny_config()), seed=1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert not torch.equal(tensor, other.state_dict()[name]), name
        assert tensor.numel() == 1 or tensor.unique().numel() > 1, name
    assert not model.training


def test_redraw_gives_stock_the_same_weights(model: ZayaForCausalLM) -> None:
    stock = redraw(StockForCausalLM(StockConfig(**TINY)))
    assert model.state_dict().keys() == stock.state_dict().keys()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@torch.no_grad()
def test_redrawn_models_show_every_parameter_and_the_biases() -> None:
    """Zeroing any tensor changes the logits: a comparison of two such models sees every part."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 12, seed=5)
    before = model(ids).logits
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.zero_()
        assert (model(ids).logits - before).abs().max() > 1e-3, name
        parameter.copy_(kept)
    # A bias only moves choices that were near, so these take more tokens and all layers at once.
    many = random_ids(4, 60, seed=6)
    before = model(many).logits
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases.zero_()
    assert (model(many).logits - before).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ recording and slicing
def test_record_run_keeps_what_the_routers_chose_by(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 7)
    run = record_run(model, ids)
    output = model(ids, output_router_logits=True)
    assert run.logits.shape == (2, 7, 128)
    assert run.biased.shape == (2, 7, 4, 5)
    assert torch.equal(run.slots, torch.stack(output.router_slots, dim=-1))
    best = run.biased.sort(dim=-1).values
    assert torch.equal(run.gaps, best[..., -1] - best[..., -2])
    assert torch.equal(run[1, 2:5].logits, run.logits[1:2, 2:5])
    assert torch.equal(run[:, -1].biased, run.biased[:, -1:])
    joined = RecordedRun.join([run[:, :3], run[:, 3:]])
    assert torch.equal(joined.logits, run.logits)
    assert torch.equal(RecordedRun.join([run[0], run[1]], dim=0).biased, run.biased)


def test_record_run_takes_stock_models_too() -> None:
    stock = redraw(StockForCausalLM(StockConfig(**TINY)))
    ours = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 7)
    theirs, mine = record_run(stock, ids), record_run(ours, ids)
    torch.testing.assert_close(theirs.biased, mine.biased)
    assert_equal_logits(mine, theirs)


# --------------------------------------------------------------------------------------------------------- the verdict
@torch.no_grad()
def test_equal_runs_pass_and_a_real_difference_fails(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 7)
    want = record_run(model, ids)
    assert_equal_logits(record_run(model, ids), want)
    other = ids.clone()
    other[1, 3] += 1
    with pytest.raises(AssertionError, match="is not explained by an undecided router") as caught:
        assert_equal_logits(record_run(model, other), want)
    message = str(caught.value)
    wrong = (record_run(model, other).logits - want.logits).abs()
    row, column, word = (int(i) for i in torch.unravel_index(wrong.argmax(), wrong.shape))
    assert f"largest error {float(wrong.max()):.3e} at [row, column, word] [{row}, {column}, {word}]" in message
    gaps = torch.minimum(record_run(model, other).gaps, want.gaps)
    assert f"smallest router gap {float(gaps.min()):.3e}" in message
    assert "\n" not in message


def test_the_tolerance_is_the_one_given() -> None:
    want = RecordedRun(torch.full((1, 1, 2), 100.0), probabilities([0.9, 0.1]))
    near = RecordedRun(want.logits + 2e-3, want.biased)
    assert_equal_logits(near, want, atol=3e-3)
    assert_equal_logits(near, want, rtol=3e-5)
    with pytest.raises(AssertionError):
        assert_equal_logits(near, want, atol=1e-3)
    with pytest.raises(AssertionError):
        assert_equal_logits(near, want, rtol=1e-5)


def test_a_tie_that_tipped_excuses_its_token_and_later_ones() -> None:
    tie, tipped, clear = [0.5, 0.5 - 5e-7, 0.0], [0.5 - 5e-7, 0.5, 0.0], [0.7, 0.2, 0.1]
    want = RecordedRun(torch.zeros(1, 3, 4), probabilities(clear, tie, clear))
    got = RecordedRun(torch.zeros(1, 3, 4), probabilities(clear, tipped, clear))
    got.logits[0, 1:] = 1.0
    assert_equal_logits(got, want)
    # ... but no token before it, ...
    got.logits[0, 0, 2] = 1.0
    with pytest.raises(AssertionError, match=r"\[row, column\] \[0, 0\] is not explained"):
        assert_equal_logits(got, want)
    # ... and no other row.
    two = RecordedRun.join([want, want], dim=0)
    other = RecordedRun.join([RecordedRun(want.logits, got.biased), RecordedRun(want.logits + 1, want.biased)], dim=0)
    with pytest.raises(AssertionError, match=r"\[1, 0\] is not explained"):
        assert_equal_logits(other, two)


@pytest.mark.parametrize(
    ("got", "why"),
    [
        ([0.5, 0.5 - 4e-7, 0.0], "the router was undecided but chose alike"),
        ([0.4, 0.6, 0.0], "the choice was clear in this run"),
        ([0.2, 0.1, 0.7], "another choice that was not near"),
    ],
    ids=["chose-alike", "clear-here", "far"],
)
def test_a_near_tie_that_explains_nothing_does_not_excuse(got: list[float], why: str) -> None:
    want = RecordedRun(torch.zeros(1, 1, 4), probabilities([0.5, 0.5 - 5e-7, 0.0]))
    if why == "the choice was clear in this run":
        want = RecordedRun(torch.zeros(1, 1, 4), probabilities([0.6, 0.4, 0.0]))
    if why == "another choice that was not near":
        want = RecordedRun(torch.zeros(1, 1, 4), probabilities([0.7, 0.2, 0.1]))
    with pytest.raises(AssertionError, match="not explained"):
        assert_equal_logits(RecordedRun(torch.ones(1, 1, 4), probabilities(got)), want)


def test_consequences_in_later_layers_need_no_tie_of_their_own() -> None:
    tie, tipped = [0.5, 0.5 - 5e-7, 0.0], [0.5 - 5e-7, 0.5, 0.0]
    want = RecordedRun(torch.zeros(1, 1, 4), torch.tensor([[[tie, [0.8, 0.1, 0.1]]]]))
    got = RecordedRun(torch.ones(1, 1, 4), torch.tensor([[[tipped, [0.1, 0.8, 0.1]]]]))
    assert_equal_logits(got, want)
    # The other way round the tie comes too late to be the cause.
    early = RecordedRun(torch.ones(1, 1, 4), torch.tensor([[[[0.1, 0.8, 0.1], tipped]]]))
    with pytest.raises(AssertionError, match="not explained"):
        assert_equal_logits(early, RecordedRun(torch.zeros(1, 1, 4), torch.tensor([[[[0.8, 0.1, 0.1], tie]]])))


@torch.no_grad()
def test_an_artificial_tie_in_a_model_is_accepted(model: ZayaForCausalLM) -> None:
    """Make two experts of layer 1 tie for one token of a real model; the smallest nudge of a bias then tips it."""
    ids = random_ids(1, 7)
    biases = model.model.layers[1].mlp.gate.balancing_biases
    kept = biases.clone()
    token = 3
    order = record_run(model, ids).biased[0, token, 1].argsort(descending=True)
    biases[order[1]] += record_run(model, ids).gaps[0, token, 1]
    runs = []
    for nudge in (-3e-7, 3e-7):
        moved = biases.clone()
        biases[order[1]] += nudge
        runs.append(record_run(model, ids))
        biases.copy_(moved)
    biases.copy_(kept)
    assert (runs[0].slots[0, token, 1], runs[1].slots[0, token, 1]) == (order[0], order[1])
    assert (runs[0].logits[0, token] - runs[1].logits[0, token]).abs().max() > 0.1
    assert_equal_logits(runs[1], runs[0])
    with pytest.raises(AssertionError, match="not explained"):
        assert_equal_logits(runs[1], runs[0], undecided=1e-9)


def test_without_records_nothing_is_excused_and_shapes_must_fit() -> None:
    run = RecordedRun(torch.zeros(1, 2, 4), probabilities([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]))
    assert_equal_logits(run.logits, run)
    with pytest.raises(AssertionError, match="no record of the routers"):
        assert_equal_logits(run.logits + 1, run)
    with pytest.raises(AssertionError, match=r"shape \(1, 1, 4\), expected \(1, 2, 4\)"):
        assert_equal_logits(run[:, :1], run)
    assert_equal_logits(torch.zeros(0, 2, 4), torch.zeros(0, 2, 4))


def test_nan_agrees_with_nothing() -> None:
    nan = torch.full((1, 1, 2), torch.nan)
    for got, want in ((nan, torch.zeros(1, 1, 2)), (torch.zeros(1, 1, 2), nan), (nan, nan)):
        with pytest.raises(AssertionError, match="2 of 2 logits differ"):
            assert_equal_logits(got, want)


def test_only_the_tokens_that_count_are_compared_and_counted_as_causes() -> None:
    tie, tipped, clear = [0.5, 0.5 - 5e-7, 0.0], [0.5 - 5e-7, 0.5, 0.0], [0.7, 0.2, 0.1]
    want = RecordedRun(torch.zeros(1, 2, 4), probabilities(tie, clear))
    padded = RecordedRun(torch.zeros(1, 2, 4), probabilities(tipped, clear))
    padded.logits[0, 0] = torch.nan
    real = torch.tensor([[False, True]])
    assert_equal_logits(padded, want, where=real)
    padded.logits[0, 1] = 1.0  # a tie in padding is no excuse
    with pytest.raises(AssertionError, match=r"\[0, 1\] is not explained"):
        assert_equal_logits(padded, want, where=real)
    # ... and what padding chose does not spoil the excuse of a real tie.
    want = RecordedRun(torch.zeros(1, 2, 4), probabilities([0.1, 0.2, 0.7], tie))
    assert_equal_logits(RecordedRun(torch.ones(1, 2, 4), probabilities(clear, tipped)), want, where=real)
