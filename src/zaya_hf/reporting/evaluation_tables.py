"""What an evaluation's page and its Markdown say alike: the rows of their tables, each number as text.

All of it is made of the dict of `zaya_hf.evaluation.comparison.compare`; nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zaya_hf.reporting.formats import count, joined, number_word, tick

Comparison = Mapping[str, Any]
NONE = "\u2013"
MINUS = "\u2212"
#: counts of a run that should be 0, with the words for one and for several
FLAWS = {
    "truncated_prompts": ("prompt cut", "prompts cut"),
    "truncated_answers": ("answer cut", "answers cut"),
    "thoughts_without_end": ("thought without end", "thoughts without end"),
    "empty_answers": ("empty answer", "empty answers"),
}
UNITS = {"percent": "points", "bits_per_byte": "bits per byte", "perplexity": "perplexity", "": ""}


@dataclass(frozen=True)
class Cell:
    """A score: its value, and what stands below it. `flaws` are what went wrong in the run, such as "3 answers cut"."""

    value: str
    below: str = ""
    flaws: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class ScoreRow:
    """A task: its name, what is known about it, a cell per model, and a figure per model that papers report on."""

    title: str
    about: str
    cells: Sequence[Cell]
    reported: Sequence[Cell]


@dataclass(frozen=True)
class PairRow:
    """A task on which a model is compared with the baseline; every entry as text."""

    task: str
    items: str
    difference: str
    interval: str
    unit: str
    n10: str
    n01: str
    p: str
    p_holm: str
    test: str
    detectable: str
    verdict: str
    notes: Sequence[str]


def unit(task: Mapping[str, Any]) -> str:
    """How the numbers of a task are shown, a key of `UNITS`: fractions of 1 as percent, others as they are."""
    if task["in_suite_mean"] or task["metric_kind"] == "binary":
        return "percent"
    return str(task["metric_kind"]) if task["metric_kind"] in UNITS else ""


def scaled(value: float, kind: str) -> float:
    """The number as it is shown: percent, or itself."""
    return 100 * value if kind == "percent" else value


def value_text(value: float | None, kind: str) -> str:
    """A score: 61.2 of 0.612, 0.874 bits per byte, 12.34 of perplexity."""
    if value is None or not math.isfinite(value):
        return NONE
    if kind == "percent":
        return f"{100 * value:.1f}".replace("-", MINUS)
    digits = 2 if kind == "perplexity" else 3
    return f"{value:,.{digits}f}".replace("-", MINUS)


def difference_text(value: float | None, kind: str) -> str:
    """A difference with its sign, a true minus; what rounds to zero has none."""
    text = value_text(value, kind)
    if value is None or text == NONE or not text.strip("0.,\u2212"):
        return text.removeprefix(MINUS)
    return text if text.startswith(MINUS) else f"+{text}"


def interval_text(ends: Sequence[float] | None, kind: str, signed: bool = False) -> str:
    """Both ends of an interval, of scores with an en dash and of differences with "to"; "" without one."""
    if not ends:
        return ""
    if signed:
        return f"{difference_text(ends[0], kind)} to {difference_text(ends[1], kind)}"
    return f"{value_text(ends[0], kind)}\u2013{value_text(ends[1], kind)}"


def p_text(p: float | None) -> str:
    """A probability with three decimals; "< 0.001" below."""
    if p is None:
        return NONE
    return "<\u00a00.001" if p < 0.0005 else f"{p:.3f}"


def flaws(counts: Mapping[str, Any]) -> tuple[str, ...]:
    """What a run's counts have that should be 0, in words."""
    found = []
    for key, (one, several) in FLAWS.items():
        number = counts.get(key) or 0
        if number:
            found.append(f"{count(number)} {one if number == 1 else several}")
    return tuple(found)


def titles(comparison: Comparison) -> dict[str, str]:
    """What each model is called on the page: its title, with the name where two share one."""
    found = [model.get("title") or model["name"] for model in comparison["models"]]
    return {
        model["name"]: title if found.count(title) == 1 or title == model["name"] else f"{title} ({model['name']})"
        for model, title in zip(comparison["models"], found, strict=True)
    }


def tasks_by_id(comparison: Comparison) -> dict[str, Mapping[str, Any]]:
    """Rows of the comparison by their id."""
    return {task["id"]: task for task in comparison["tasks"]}


def rows_of_their_own(comparison: Comparison) -> list[Mapping[str, Any]]:
    """The tasks that are compared: leaves of groups are not among them."""
    return [task for task in comparison["tasks"] if not task["parent"]]


def abilities(comparison: Comparison) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The tasks that are compared by what they ask for, in the suite's order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for task in rows_of_their_own(comparison):
        found.setdefault(task["ability"] or "other", []).append(task)
    return list(found.items())


def reporting_models(comparison: Comparison) -> list[str]:
    """Names of the models for which papers report a figure on a task of this evaluation."""
    shown = {task["id"] for task in comparison["tasks"]}
    reported = comparison["reported"]
    return [model["name"] for model in comparison["models"] if shown & set(reported.get(model["name"], {}))]


def score_row(comparison: Comparison, task: Mapping[str, Any]) -> ScoreRow:
    """A task's row of the table of scores."""
    kind = unit(task)
    reported = [
        _reported_cell(comparison["reported"].get(model, {}).get(task["id"]), kind)
        for model in reporting_models(comparison)
    ]
    cells = [_cell(comparison["scores"].get(model["name"], {}).get(task["id"]), kind) for model in comparison["models"]]
    return ScoreRow(task["title"] or task["id"], about_task(task), cells, reported)


def about_task(task: Mapping[str, Any]) -> str:
    """Metric, shots, items and chance of a task on one line."""
    parts = [task["metric"] + (f" ({task['filter']})" if task["filter"] not in (None, "none") else "")]
    if not task["higher_is_better"]:
        parts[0] += ", lower is better"
    if task["shots"] is not None:
        parts.append(f"{task['shots']}-shot")
    if task["items"] is not None:
        parts.append(f"n\u00a0=\u00a0{count(task['items'])}")
    if task["kind"] == "group":
        parts.append(f"{count(len(task['leaves']))} tasks")
    if task["chance"] is not None:
        parts.append(f"chance\u00a0{value_text(task['chance'], unit(task))}")
    return " · ".join(parts)


def _cell(score: Mapping[str, Any] | None, kind: str) -> Cell:
    if score is None:
        return Cell(NONE, remark="no finished run")
    if score["value"] is None:
        missing, unscored = len(score.get("missing") or []), score.get("unscored") or 0
        said = f"{count(missing)} missing" if missing else f"{count(unscored)} items without a score"
        return Cell(NONE, remark=said)
    remark = "not above chance" if score.get("above_chance") is False else ""
    below = interval_text(score["interval"], kind)
    return Cell(value_text(score["value"], kind), below, flaws(score.get("counts") or {}), remark)


def _reported_cell(figure: Mapping[str, Any] | None, kind: str) -> Cell:
    if figure is None or figure.get("value") is None:
        return Cell(NONE)
    fraction = kind == "percent" and 0 <= figure["value"] <= 1
    return Cell(value_text(figure["value"], kind) if fraction else tick(figure["value"]), figure.get("metric") or "")


def pair_rows(comparison: Comparison, model: str) -> list[PairRow]:
    """The rows of a model's table of paired differences to the baseline."""
    tasks = tasks_by_id(comparison)
    found = []
    for pair in comparison["pairs"]:
        if pair["model"] != model:
            continue
        task = tasks[pair["task"]]
        kind = unit(task)
        notes = list(pair["notes"])
        if pair["prompts_differ"]:
            notes.insert(0, "the two were given different prompts")
        found.append(
            PairRow(
                task=task["title"] or task["id"],
                items=count(pair["n"]),
                difference=difference_text(pair["difference"], kind),
                interval=interval_text(pair["interval"], kind, signed=True),
                unit=UNITS[kind],
                n10=NONE if pair["n10"] is None else count(pair["n10"]),
                n01=NONE if pair["n01"] is None else count(pair["n01"]),
                p=p_text(pair["p"]),
                p_holm=p_text(pair["p_holm"]),
                test=pair["test"],
                detectable=value_text(pair["smallest_detectable"], kind),
                verdict=pair["verdict"],
                notes=notes,
            )
        )
    return found


def others(comparison: Comparison) -> list[str]:
    """Names of all models but the baseline."""
    return [model["name"] for model in comparison["models"] if model["name"] != comparison["baseline"]]


def missing_runs(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Each model that has no score on some tasks, with the titles of these."""
    found = []
    for model in comparison["models"]:
        scores = comparison["scores"].get(model["name"], {})
        lacking = [
            task["title"] or task["id"]
            for task in rows_of_their_own(comparison)
            if scores.get(task["id"], {}).get("value") is None
        ]
        if lacking:
            found.append((model["name"], lacking))
    return found


def headline(comparison: Comparison) -> str:
    """The title of the page."""
    names, apart = titles(comparison), others(comparison)
    baseline = names[comparison["baseline"]]
    if not apart:
        tasks = rows_of_their_own(comparison)
        return f"{baseline} on {tasks[0]['title'] if len(tasks) == 1 else f'{number_word(len(tasks))} tasks'}"
    if len(apart) <= 3:
        return f"{baseline} beside {joined([names[model] for model in apart])}"
    return f"{baseline} beside {number_word(len(apart))} other models"


def verdict(comparison: Comparison, model: str) -> str:
    """In words, on which tasks the model is better or worse than the baseline, and by how much over all."""
    tasks, names = tasks_by_id(comparison), titles(comparison)
    pairs = [pair for pair in comparison["pairs"] if pair["model"] == model]
    if not pairs:
        return f"{names[model]} has no task in common with {names[comparison['baseline']]} that is finished."
    by_verdict: dict[str, list[str]] = {}
    for pair in pairs:
        by_verdict.setdefault(pair["verdict"], []).append(tasks[pair["task"]]["title"] or pair["task"])
    parts = []
    for key, words in (
        ("better", "is better on"),
        ("worse", "is worse on"),
        ("cannot be told apart", "cannot be told apart on"),
        ("no item differs", "has the same score on every item of"),
    ):
        found = by_verdict.get(key)
        if found:
            parts.append(f"{words} {_some(found)}")
    means = [_mean_verdict(comparison, mean, model) for mean in means_of_several(comparison) if mean["id"] == "overall"]
    return f"{names[model]} {joined(parts)}.{''.join(means)}"


def _some(found: list[str], most: int = 6) -> str:
    """Titles in a sentence, the number of them where they are many."""
    if len(found) <= most:
        return joined(found)
    return f"{number_word(len(found))} tasks ({', '.join(found[: most - 2])} and {len(found) - most + 2} more)"


def means_of_several(comparison: Comparison) -> list[Mapping[str, Any]]:
    """The means that are of more than one task: of one, its own row says more."""
    return [mean for mean in comparison["means"] if len(mean["tasks"]) > 1]


def _mean_verdict(comparison: Comparison, mean: Mapping[str, Any], model: str) -> str:
    """What is known about the difference of a model's mean over tasks to the baseline's, in one sentence."""
    found = mean["pairs"].get(model)
    if found is None or "refused" in found:
        return ""
    interval = interval_text(found["interval"], "percent", signed=True)
    return (
        f" Its mean over {number_word(len(mean['tasks']))} tasks is {difference_text(found['difference'], 'percent')} "
        f"points to {titles(comparison)[comparison['baseline']]}'s{f' ({interval})' if interval else ''}: "
        f"{found['verdict']}."
    )
