"""What a comparison says in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTES = (
    "Item noise is not seed noise: intervals and p values say how far a score could move with other items of the same "
    "kind. They do not say how far it would move had the model been trained again with another seed, or its answers "
    "been sampled again.",
    "Differences are paired: the same items, redrawn together for both models. For scores of right and wrong, p is "
    "that of McNemar's exact test, else that of flipping the signs of the items' differences.",
    "p after Holm is adjusted for all tasks and pairs of this table at once; the verdict is by it, at 5 %.",
    "The smallest detectable difference is the true difference that these items would find in four of five cases, "
    "tested once at 5 %. A smaller one may exist where two models cannot be told apart.",
    "Means over tasks give every task the same weight and redraw the items of each on their own. Their verdict is by "
    "their 95 % interval, without adjustment.",
    "A group's value is that of all its items together, its macro mean that of its tasks. Its first interval is for "
    "other items of the same subjects, the one with subjects redrawn for other subjects.",
    "Reported figures are those of papers and model cards. They were made with other prompts and code, and are in no "
    "interval, test or mean.",
)


def verdict(pair: Mapping[str, Any], higher_is_better: bool, alpha: float) -> str:
    """Better, worse or neither, by the adjusted p."""
    if pair["no_item_differs"]:
        return "no item differs"
    if pair["p_holm"] >= alpha or not pair["difference"]:
        return "cannot be told apart"
    return "better" if (pair["difference"] > 0) == higher_is_better else "worse"


def sentence(pair: Mapping[str, Any], title: str, model: str, baseline: str, kind: str) -> str:
    """The result of one pair on one task in a sentence.

    Args:
        pair: as the comparison has it, with its verdict.
        title: of the task.
        model, baseline: their titles.
        kind: of the metric.
    """
    if pair["verdict"] == "no item differs":
        return f"{title}: {model} and {baseline} have the same score on each of the {pair['n']} items."
    interval = ""
    if pair["interval"]:
        low, high = (_amount(end, kind, signed=True) for end in pair["interval"])
        interval = f"95 % interval {low} to {high}, "
    p = f"p {_p(pair['p_holm'])} after Holm"
    if pair["verdict"] == "cannot be told apart":
        text = f"{title}: {model} and {baseline} cannot be told apart with {pair['n']} items (difference "
        text += f"{_amount(pair['difference'], kind, signed=True)} {_unit(kind)}, {interval}{p})"
        if pair["smallest_detectable"]:
            least = _amount(pair["smallest_detectable"], kind)
            text += f"; a true difference of {least} would be found in four of five cases"
        return f"{text}."
    amount = _amount(abs(pair["difference"]), kind)
    return f"{title}: {model} is {amount} {_unit(kind)} {pair['verdict']} than {baseline} ({interval}{p})."


def _amount(value: float, kind: str, signed: bool = False) -> str:
    text = f"{value * 100:+.1f}" if kind in ("binary", "mean") else f"{value:+.3f}"
    text = text.replace("-", "\N{MINUS SIGN}")
    return text if signed else text.removeprefix("+")


def _unit(kind: str) -> str:
    return {"bits_per_byte": "bits per byte", "perplexity": "of perplexity"}.get(kind, "points")


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"
