"""The page of `zaya report` on an evaluation: scores, paired differences to the baseline, costs, items to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zaya_hf.reporting.evaluation_charts import costs, forests, over_sizes
from zaya_hf.reporting.evaluation_tables import (
    NONE,
    Comparison,
    abilities,
    difference_text,
    flaws,
    headline,
    interval_text,
    means_of_several,
    missing_runs,
    others,
    pair_rows,
    reporting_models,
    rows_of_their_own,
    score_row,
    tasks_by_id,
    titles,
    unit,
    value_text,
    verdict,
)
from zaya_hf.reporting.formats import count, date, duration, joined, number_word, plain, short_count
from zaya_hf.reporting.page import render

_MOST_WARNINGS = 12  # that are shown at once
# Facts of a model that have a place of their own.
_SHOWN = ("name", "title", "cost", "baseline", "reported", "parameters", "parameters_active", "dtype", "warnings")


def page(comparison: Comparison, manifest: Mapping[str, Any]) -> str:
    """The HTML page, one self-contained file.

    Args:
        comparison: of `zaya_hf.evaluation.comparison.compare`.
        manifest: of the evaluation's folder.
    """
    names, apart = titles(comparison), others(comparison)
    loud = [warning for warning in comparison["warnings"] if warning["level"] == "loud"]
    means = comparison["means"]
    sizes = [(mean, over_sizes(comparison, mean)) for mean in means]
    return render(
        "evaluation.html.jinja",
        headline=headline(comparison),
        summary=_summary(comparison),
        facts=_facts(comparison),
        created=date(comparison["updated"] or comparison["created"] or ""),
        warnings=[_warning(warning, names, comparison) for warning in loud],
        most_warnings=_MOST_WARNINGS,
        remarks=[
            _warning(warning, names, comparison) for warning in comparison["warnings"] if warning["level"] != "loud"
        ],
        missing=[(names[model], joined(tasks)) for model, tasks in missing_runs(comparison)],
        names=[names[model["name"]] for model in comparison["models"]],
        baseline=names[comparison["baseline"]],
        own=[model["name"] == comparison["baseline"] for model in comparison["models"]],
        others=[names[model] for model in apart],
        verdicts=[verdict(comparison, model) for model in apart],
        abilities=[
            (ability.capitalize(), [score_row(comparison, task) for task in tasks])
            for ability, tasks in abilities(comparison)
        ],
        means=_means(comparison),
        groups=_groups(comparison),
        percent=any(unit(task) == "percent" for task in comparison["tasks"]),
        reporting=[names[model] for model in reporting_models(comparison)],
        sources=_sources(comparison, names),
        further=_further(comparison),
        forests=forests(comparison),
        sizes=[charts for _, charts in sizes if charts][:1],
        size_abilities=[(mean["title"], charts) for mean, charts in sizes[1:] if charts],
        pairs=[
            (names[model], rows, [pair["sentence"] for pair in comparison["pairs"] if pair["model"] == model])
            for model in apart
            if (rows := pair_rows(comparison, model))
        ],
        refused=[
            f"{names[entry['model']]} on {_task_title(comparison, entry['task'])}: {entry['reason']}"
            for entry in comparison["refused"]
        ],
        discordant=_discordant(comparison, names),
        costs=costs(comparison),
        cost_rows=[(names[model["name"]], _cost_cells(model["cost"])) for model in comparison["models"]],
        flawed=_flawed(comparison, names),
        notes=comparison["notes"],
        command=_command(manifest),
        suite=comparison["suite"],
        settings=comparison["settings"],
        limit=comparison["limit"],
        code=comparison["code_execution"],
        versions=list((manifest.get("versions") or {}).items()),
        hardware=list((manifest.get("hardware") or {}).items()),
        models=[_model(model, names) for model in comparison["models"]],
    )


def _summary(comparison: Comparison) -> str:
    names, apart, tasks = titles(comparison), others(comparison), rows_of_their_own(comparison)
    suite = comparison["suite"]
    several = f"{number_word(len(tasks))} task{'s' if len(tasks) > 1 else ''}"
    text = f"The suite {suite.get('title') or suite.get('name')}: {several}."
    pairs = comparison["pairs"]
    if not apart:
        return f"{text} There is one model, and so nothing to compare."
    if not pairs:
        return f"{text} Nothing can be compared yet."
    told = sum(pair["verdict"] in ("better", "worse") for pair in pairs)
    compared = f"{count(len(pairs))} comparison{'s' if len(pairs) > 1 else ''} with {names[comparison['baseline']]}"
    if not told:
        return f"{text} Of {compared}, none shows a difference that these items can tell from chance."
    return (
        f"{text} Of {compared}, {count(told)} show{'s' if told == 1 else ''} a difference that is more than chance "
        "after the correction for how many there are."
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    models, tasks = comparison["models"], rows_of_their_own(comparison)
    items = [task["items"] for task in tasks]
    found = [("Models", count(len(models))), ("Tasks", count(len(tasks)))]
    if None not in items:
        found.append(("Items per model", count(sum(items))))
    if comparison["limit"] is not None:
        found.append(("Limit", f"{count(comparison['limit'])} per task"))
    found.append(("Time, summed", duration(sum(model["cost"]["seconds"] or 0.0 for model in models))))
    return found


def _warning(warning: Mapping[str, Any], names: Mapping[str, str], comparison: Comparison) -> tuple[str, str]:
    """Where it belongs and what it says."""
    parts = [names.get(warning["model"], warning["model"]), _task_title(comparison, warning["task"])]
    return ", ".join(part for part in parts if part), warning["text"]


def _task_title(comparison: Comparison, task: str | None) -> str:
    known = tasks_by_id(comparison).get(task or "")
    return (known["title"] if known else "") or task or ""


def _means(comparison: Comparison) -> list[tuple[str, str, list[dict[str, str]]]]:
    """Means over tasks: title, about, and for each model its mean and the difference to the baseline's."""
    found = []
    for mean in means_of_several(comparison):
        about = f"{count(len(mean['tasks']))} task{'s' if len(mean['tasks']) > 1 else ''}, equal weights"
        if mean["left_out"]:
            left = [_task_title(comparison, entry["task"]) for entry in mean["left_out"]]
            about += f"; without {joined(left)}"
        cells = [_mean_cell(mean, model["name"]) for model in comparison["models"]]
        found.append((mean["title"], about, cells))
    return found


def _mean_cell(mean: Mapping[str, Any], model: str) -> dict[str, str]:
    score = mean["scores"].get(model) or {"value": None, "interval": None}
    cell = {
        "value": value_text(score["value"], "percent"),
        "interval": interval_text(score["interval"], "percent"),
        "difference": NONE,
        **dict.fromkeys(("range", "verdict"), ""),
    }
    pair = mean["pairs"].get(model)
    if pair and "refused" in pair:
        cell["verdict"] = "not compared"
    elif pair:
        cell["difference"] = difference_text(pair["difference"], "percent")
        cell["range"] = interval_text(pair["interval"], "percent", signed=True)
        cell["verdict"] = pair["verdict"]
    return cell


def _groups(comparison: Comparison) -> list[tuple[str, list[Any]]]:
    """Titles of groups of tasks with the rows of their leaves."""
    by_id = tasks_by_id(comparison)
    return [
        (task["title"] or task["id"], [score_row(comparison, by_id[leaf]) for leaf in task["leaves"] if leaf in by_id])
        for task in rows_of_their_own(comparison)
        if task["kind"] == "group"
    ]


def _sources(comparison: Comparison, names: Mapping[str, str]) -> list[str]:
    found: dict[str, None] = {}
    for model in reporting_models(comparison):
        for figure in comparison["reported"][model].values():
            if figure.get("source"):
                found.setdefault(f"{names[model]}: {figure['source']}")
    return list(found)


def _further(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Other metrics of the same runs: what they are, and a value for each model."""
    found = []
    for task in comparison["tasks"]:
        scores = [comparison["scores"].get(model["name"], {}).get(task["id"]) for model in comparison["models"]]
        kinds = dict.fromkeys(
            (entry["metric"], entry["filter"]) for score in scores if score for entry in score.get("further") or []
        )
        for metric, filtered in kinds:
            values = []
            for score in scores:
                entries = (score or {}).get("further") or []
                value = next((e["value"] for e in entries if (e["metric"], e["filter"]) == (metric, filtered)), None)
                values.append(NONE if value is None else f"{value:.3f}")
            name = metric if filtered in (None, "none") else f"{metric} ({filtered})"
            found.append((f"{task['title'] or task['id']}: {name}", values))
    return found


def _cost_cells(cost: Mapping[str, Any]) -> list[str]:
    numbers = [cost[key] for key in ("runs", "requests", "tokens_given", "tokens_computed", "tokens_generated")]
    speed = cost["tokens_per_second"]
    return [
        *(count(number or 0) for number in numbers),
        duration(cost["seconds"] or 0.0),
        NONE if speed is None else short_count(speed),
    ]


def _flawed(comparison: Comparison, names: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Model, task and what its run has of what should be 0."""
    found = []
    for model in comparison["models"]:
        for task in comparison["tasks"]:
            score = comparison["scores"].get(model["name"], {}).get(task["id"])
            if score and task["kind"] == "leaf" and (wrong := flaws(score.get("counts") or {})):
                found.append((names[model["name"]], task["title"] or task["id"], joined(list(wrong))))
    return found


def _discordant(
    comparison: Comparison, names: Mapping[str, str]
) -> list[tuple[str, list[tuple[str, list[dict[str, Any]], bool]]]]:
    """For each model, titles of what was looked through, with the items that it and the baseline differ in most, and
    whether it can be left out on paper: those over all tasks are enough there."""
    found: dict[str, list[tuple[str, list[dict[str, Any]], bool]]] = {}
    for entry in sorted(comparison["discordant"], key=lambda entry: entry["task"] is not None):
        if not entry["items"]:
            continue
        title = "All tasks" if entry["task"] is None else _task_title(comparison, entry["task"])
        items = [
            {**item, "task_title": _task_title(comparison, item["task"])} | _right(item) for item in entry["items"]
        ]
        before = found.setdefault(names[entry["model"]], [])
        before.append((title, items, bool(before)))
    return list(found.items())


def _right(item: Mapping[str, Any]) -> dict[str, str]:
    """What the scores of both models mean, in words where they are right and wrong."""
    words = {0.0: "wrong", 1.0: "right"}
    scores = (item["model_score"], item["baseline_score"])
    known = all(score in words for score in scores)
    said = [words[score] if known else NONE if score is None else f"{score:.3f}" for score in scores]
    return {"model_said": said[0], "baseline_said": said[1]}


def _command(manifest: Mapping[str, Any]) -> str:
    command = manifest.get("command") or ""
    return command if isinstance(command, str) else " ".join(_quoted(str(part)) for part in command)


def _quoted(part: str) -> str:
    safe = part and all(letter.isalnum() or letter in "@%+=:,./-_" for letter in part)
    return part if safe else "'" + part.replace("'", "'\"'\"'") + "'"


def _model(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    active, total = model.get("parameters_active"), model.get("parameters")
    return {
        "title": names[model["name"]],
        "own": model["baseline"],
        "parameters": NONE if total is None else count(total),
        "active": NONE if active is None else count(active),
        "dtype": model.get("dtype") or NONE,
        "path": model.get("path") or NONE,
        "facts": [
            (key.replace("_", " "), _fact(value))
            for key, value in model.items()
            if key not in _SHOWN and value not in (None, {}, [])
        ],
        "warnings": model.get("warnings") or [],
    }


def _fact(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    return plain(value)
