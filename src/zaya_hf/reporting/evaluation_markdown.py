"""An evaluation's tables as Markdown: warnings, scores, paired differences and costs, as on its page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from zaya_hf.reporting.evaluation_tables import (
    Cell,
    Comparison,
    abilities,
    headline,
    missing_runs,
    others,
    pair_rows,
    reporting_models,
    score_row,
    titles,
    verdict,
)
from zaya_hf.reporting.formats import count, duration, joined, short_count, visible


def markdown(comparison: Comparison) -> str:
    """The tables as Markdown of GitHub's dialect; text of others is escaped.

    Args:
        comparison: of `zaya_hf.evaluation.comparison.compare`.
    """
    names = titles(comparison)
    blocks = [f"# {escape(headline(comparison))}"]
    suite = comparison["suite"]
    blocks.append(escape(f"Suite {suite.get('title') or suite.get('name')}. {suite.get('description') or ''}".strip()))
    warnings = _warnings(comparison, names)
    if warnings:
        blocks += ["## Warnings", _list(warnings)]
    apart = others(comparison)
    if apart:
        blocks += ["## Verdicts", _list(verdict(comparison, model) for model in apart)]
    blocks += ["## Scores", _scores(comparison, names)]
    for model in apart:
        rows = pair_rows(comparison, model)
        if rows:
            blocks.append(f"## {escape(names[model])} minus {escape(names[comparison['baseline']])}")
            blocks.append(
                _table(
                    [
                        "Task",
                        "n",
                        "Difference",
                        "95 % interval",
                        "Unit",
                        "n10",
                        "n01",
                        "p",
                        "p (Holm)",
                        "Smallest",
                        "Verdict",
                    ],
                    [
                        [
                            *(row.task, row.items, row.difference, row.interval, row.unit, row.n10, row.n01),
                            *(row.p, row.p_holm, row.detectable, "; ".join([row.verdict, *row.notes])),
                        ]
                        for row in rows
                    ],
                    left=(0, 10),
                )
            )
    if comparison["refused"]:
        blocks += [
            "## Not compared",
            _list(f"{names[entry['model']]}, {entry['task']}: {entry['reason']}" for entry in comparison["refused"]),
        ]
    blocks += ["## Cost", _cost(comparison, names), "## How to read it", _list(comparison["notes"])]
    return "\n\n".join(block for block in blocks if block) + "\n"


def escape(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    text = re.sub(r"[\t\n]+", " ", visible(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)


def _warnings(comparison: Comparison, names: dict[str, str]) -> list[str]:
    found = []
    for warning in comparison["warnings"]:
        if warning["level"] == "loud":
            where = [names.get(warning["model"], warning["model"]), warning["task"]]
            found.append(": ".join([", ".join(part for part in where if part) or "All", warning["text"]]))
    found += [f"{names[model]} has no finished run of {joined(tasks)}" for model, tasks in missing_runs(comparison)]
    return list(dict.fromkeys(found))


def _scores(comparison: Comparison, names: dict[str, str]) -> str:
    reporting = reporting_models(comparison)
    header = ["Task", "Measured as", *(names[model["name"]] for model in comparison["models"])]
    header += [f"{names[model]}, as reported" for model in reporting]
    rows = []
    for ability, tasks in abilities(comparison):
        for task in tasks:
            row = score_row(comparison, task)
            cells = [_cell(cell) for cell in (*row.cells, *row.reported)]
            rows.append([f"{ability.capitalize()}: {row.title}", row.about, *cells])
    return _table(header, rows, left=(0, 1))


def _cell(cell: Cell) -> str:
    parts = [cell.value, f"({cell.below})" if cell.below else "", *cell.flaws, cell.remark]
    return " ".join(part for part in parts if part)


def _cost(comparison: Comparison, names: dict[str, str]) -> str:
    rows = []
    for model in comparison["models"]:
        cost = model["cost"]
        speed = cost["tokens_per_second"]
        tokens = [count(cost[key] or 0) for key in ("tokens_given", "tokens_computed", "tokens_generated")]
        rows.append(
            [
                names[model["name"]],
                *tokens,
                duration(cost["seconds"] or 0.0),
                "\u2013" if speed is None else short_count(speed),
            ]
        )
    header = ["Model", "Tokens given", "Tokens computed", "Tokens generated", "Time", "Tokens per second"]
    return _table(header, rows, left=(0,))


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    rule = [":---" if place in left else "---:" for place in range(len(header))]
    lines = [[escape(cell) for cell in header], rule, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
