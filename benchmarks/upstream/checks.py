"""Whether both sides computed the same, looked at before they are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zaya_hf.testing import RecordedRun, assert_equal_logits

# fp32: products over 2048 numbers in another order differ by some 1e-6 of the largest logit; four times the tolerance
# of the tests, whose models are narrow.
_FP32_TOLERANCE = 4e-5
_UNDECIDED = 1e-5  # gap of two biased probabilities that such differences may close
_TIED = 2.5e-7  # two steps of fp32 at 1
_MOVED_TOKENS = 0.01  # share of the tokens that may choose another expert for that reason
# bf16: how much farther from fp32 than the stock class. The median over tokens, since a token that attends to one which
# chose another expert is off by far more than rounding, on either side; and, looser, the root mean square.
_BF16_MEDIAN = 1.1
_BF16_RMS = 2.0


class Failed(Exception):
    """The two sides differ by more than rounding explains."""


def compare_fp32(ours: RecordedRun, stock: RecordedRun, where: Tensor) -> str:
    """Logits of both sides, fp32, at the tokens `where` ``[B, S]``; what was seen. Raises Failed."""
    scale = max(1.0, stock.logits[where].abs().max().item())
    # Of two slots that tie, the record names the first; which one a side took, it cannot tell.
    tied = torch.minimum(ours.gaps, stock.gaps).amin(-1) < _TIED
    moved = ((ours.slots != stock.slots).any(-1) | tied) & where
    tokens, where = int(where.sum()), where & ~tied
    if moved.sum() > _MOVED_TOKENS * tokens:
        raise Failed(f"{int(moved.sum())} of {tokens} tokens chose other experts")
    try:
        assert_equal_logits(ours, stock, atol=_FP32_TOLERANCE * scale, where=where, undecided=_UNDECIDED)
    except AssertionError as error:
        raise Failed(str(error)) from None
    error = (ours.logits - stock.logits)[where & ~moved].abs().max().item()
    return f"ok: largest error {error / scale:.1e} of the largest logit; {int(moved.sum())} of {tokens} tokens moved"


def compare_bf16(ours: RecordedRun, stock: RecordedRun, wide: RecordedRun, where: Tensor) -> str:
    """Distances of both sides from `wide`, the same weights in fp32; what was seen. Raises Failed."""
    moved = {name: (run.slots != wide.slots).any(-1) & where for name, run in (("ours", ours), ("stock", stock))}
    same = where & ~moved["ours"] & ~moved["stock"]
    same = same if same.any() else where
    errors = {name: (run.logits.float() - wide.logits)[same].norm(dim=-1) for name, run in _pairs(ours, stock)}
    median = _ratio(errors["ours"].median(), errors["stock"].median())
    rms = _ratio(errors["ours"].norm(), errors["stock"].norm())
    counts = {name: int(tokens.sum()) for name, tokens in moved.items()}
    seen = (
        f"distance from fp32 {median:.2f} of stock's (median of the tokens; root mean square {rms:.2f}); tokens that "
        f"chose other experts than in fp32: ours {counts['ours']}, stock {counts['stock']} of {int(where.sum())}"
    )
    # Each token that moves is a coin toss, so allow three standard deviations of such a count on top.
    many = counts["ours"] > _BF16_MEDIAN * counts["stock"] + 3 * max(counts["stock"], 1) ** 0.5
    if not (median <= _BF16_MEDIAN and rms <= _BF16_RMS) or many:
        raise Failed(seen)
    return "ok: " + seen


def compare_training(ours: dict[str, float], stock: dict[str, float], dtype: str) -> str:
    """ "loss", the norm of "all" gradients, and norms of single ones by name; what was seen. Raises Failed."""
    # fp32: sums of many products in another order. bf16: 8 bits on the whole way there and back, and tokens that choose
    # another expert: of either side, the norm of all gradients is up to 8 % off that in fp32, that of one matrix up to
    # 14 % (quickstart's widths, ten draws).
    largest = {"loss": 1e-5, "all": 1e-4} if dtype == "fp32" else {"loss": 1e-2, "all": 0.15}
    one = 1e-3 if dtype == "fp32" else 0.5
    off = {name: abs(ours[name] - stock[name]) / max(abs(stock[name]), 1e-12) for name in stock}
    name, worst = max(off.items(), key=lambda item: item[1])
    seen = (
        f"loss {ours['loss']:.6g} and {stock['loss']:.6g}, norm of all gradients {ours['all']:.6g} and "
        f"{stock['all']:.6g}; largest relative difference {worst:.1e} ({name})"
    )
    for name, difference in off.items():
        if not difference <= largest.get(name, one):
            raise Failed(f"{seen}; {name} differs by {difference:.1e}, more than {largest.get(name, one):.0e}")
    return "ok: " + seen


def verdict(check: Callable[[], str]) -> str:
    """What the check saw, or "failed: ..." with the reason, also where a side raised an error."""
    try:
        return check()
    except Failed as error:
        return f"failed: {error}"
    except Exception as error:  # a side that cannot run is a result of this row, and the others go on
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip()


def _ratio(ours: Tensor, stock: Tensor) -> float:
    return (ours / stock.clamp_min(1e-30)).item()


def _pairs(ours: Any, stock: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return (("ours", ours), ("stock", stock))


def everywhere(run: RecordedRun) -> Tensor:
    """``[B, S]`` true."""
    return torch.ones(run.logits.shape[:2], dtype=torch.bool)
