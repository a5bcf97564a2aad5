"""Models on the tasks of one evaluation, compared item by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import comparison_words as words
from .comparison_rows import Row, described, table_rows
from .discordant import alternated, most_discordant
from .discordant import described as described_item
from .finished_runs import FinishedRun, read_manifest, read_runs
from .pairing import Pairing, pair
from .row_statistics import RowStatistics, Settings
from .statistics import holm
from .suite_means import suite_mean

FORMAT = 1
MOST_DISCORDANT = 5
_SUMS = ("requests", "tokens_given", "tokens_computed", "tokens_generated")
# Counts that say that a score is not what it seems -> in words.
_LOUD = {
    "truncated_prompts": "prompts were cut because they did not fit into max_length",
    "truncated_answers": "answers were cut at the budget of tokens",
    "thoughts_without_end": "thoughts did not end within the budget and count as no answer",
    "unwatched_answers": "answers came from lm-eval's own code, so how many were cut is not known",
}
_QUIET = {"empty_answers": "answers are empty"}


def compare(folder: str | Path, *, baseline: str | None = None) -> dict[str, Any]:
    """Compare the finished runs in an evaluation's folder; nothing is written.

    Every model is compared with one, the baseline, on every task and group of tasks that both have finished on the same
    items. Runs of other items, answers or prompts are refused, not aligned.

    Args:
        folder: what `zaya eval --out` named.
        baseline: name of a model in it; by default the first of ZAYA's family that has a finished run, else the first
            that has one.

    Returns: what goes into JSON, `null` where something is not known:
        models, tasks, and scores {model: {task: ...}} with value, 95 % interval, counts of what was cut, and time;
        pairs with difference, standard error, intervals, tests, p adjusted over all pairs (Holm), the smallest
        detectable difference and a verdict; refused, the pairs that cannot be; means over tasks of an ability and of
        all; discordant, the items that differ most; reported, figures of others; warnings and notes.

    Raises:
        ValueError: the folder is none of an evaluation, has no finished run, or holds broken files; or there is no such
            baseline.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    runs, unfinished = read_runs(folder, manifest)
    settings = Settings()
    chosen = _baseline(folder, manifest["models"], runs, baseline)
    comparison = _Comparison(manifest, runs, chosen, settings)
    comparison.run()
    suite = manifest.get("suite") or {}
    return {
        "format": FORMAT,
        "folder": str(folder),
        "created": manifest.get("created"),
        "updated": manifest.get("updated"),
        "suite": {key: suite.get(key) for key in ("name", "title", "description")},
        "limit": manifest.get("limit"),
        "code_execution": manifest.get("code_execution"),
        "baseline": chosen,
        "settings": {key: getattr(settings, key) for key in ("confidence", "draws", "seed", "alpha", "power")},
        "models": [_model(name, facts, runs[name], name == chosen) for name, facts in manifest["models"].items()],
        "tasks": [described(row) for row in comparison.rows],
        "scores": comparison.scores,
        "reported": _reported(manifest["models"], comparison.rows),
        "pairs": comparison.pairs,
        "refused": comparison.refused,
        "means": comparison.means,
        "discordant": comparison.discordant,
        "warnings": _unfinished_warnings(unfinished) + comparison.warnings,
        "notes": list(words.NOTES),
    }


class _Comparison:
    """What `compare` returns of the runs, filled by `run`."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        runs: dict[str, dict[str, FinishedRun]],
        baseline: str,
        settings: Settings,
    ) -> None:
        self.facts, self.runs, self.baseline, self.settings = manifest["models"], runs, baseline, settings
        self.limited = manifest.get("limit") is not None
        self.present = [model for model in self.facts if runs[model]]
        self.rows = table_rows(runs, manifest.get("suite") or {})
        self.scores: dict[str, dict[str, Any]] = {model: {} for model in self.facts}
        self.pairs: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.means: list[dict[str, Any]] = []
        self.discordant: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []
        self._statistics: dict[str, dict[str, RowStatistics]] = {}  # row without parent -> model -> statistics

    def run(self) -> None:
        for row in self.rows:
            if row.parent is None:
                self._warn_of_missing(row)
                self._compare(row)
            for model in self.present:
                self._score(row, model)
        self._adjust()
        self._average()

    def _warn_of_missing(self, row: Row) -> None:
        for model in self.present:
            missing = [leaf for leaf in row.leaves if leaf not in self.runs[model]]
            if missing:
                part = f"{len(missing)} of {len(row.leaves)} tasks of " if row.is_group else ""
                self.warnings.append(
                    _warning("loud", model, row.id, f"{model} has no finished run of {part}{row.title}")
                )
        if not self.limited and row.expected and row.about["items"] < row.expected:
            text = f"{row.title} has {row.about['items']} items, but the suite says {row.expected}"
            self.warnings.append(_warning("loud", None, row.id, text))

    def _compare(self, row: Row) -> None:
        """Pair the models that can be with the baseline, and give every model its statistics."""
        complete = {model: found for model in self.present if (found := row.runs_of(model, self.runs)) is not None}
        paired: dict[str, Sequence[FinishedRun]] = {}
        pairings = {}
        if self.baseline in complete:
            paired[self.baseline] = complete[self.baseline]
            for model, found in complete.items():
                if model == self.baseline:
                    continue
                pairings[model] = _pairing(found, complete[self.baseline])
                reason = pairings[model].refused
                if reason is None:
                    paired[model] = found
                else:
                    self.refused.append({"model": model, "baseline": self.baseline, "task": row.id, "reason": reason})
        statistics: dict[str, RowStatistics] = {}
        if len(paired) > 1:
            together = RowStatistics(row.id, row.kind, paired, self.settings)
            statistics = dict.fromkeys(paired, together)
        for model, found in complete.items():
            if model not in statistics and not any(run.unscored for run in found):
                statistics[model] = RowStatistics(row.id, row.kind, {model: found}, self.settings)
        self._statistics[row.id] = statistics
        for model in paired:
            if model != self.baseline:
                self._add_pair(row, model, complete, pairings[model])

    def _add_pair(self, row: Row, model: str, complete: Mapping[str, Sequence[FinishedRun]], pairing: Pairing) -> None:
        together = self._statistics[row.id][model]
        found = together.pair(model, self.baseline)
        self.pairs.append(
            {"model": model, "baseline": self.baseline, "task": row.id}
            | found
            | {"prompts_differ": pairing.prompts_differ, "notes": pairing.notes}
        )
        values, theirs = together.item_values(model), together.item_values(self.baseline)
        ours, others = complete[model], complete[self.baseline]
        starts = [sum(len(run.items.doc_ids) for run in ours[:index]) for index in range(len(ours))]
        items = []
        for leaf, item in most_discordant(values - theirs, ours, others, MOST_DISCORDANT):
            scores = float(values[starts[leaf] + item]), float(theirs[starts[leaf] + item])
            items.append(described_item(ours[leaf], others[leaf], item, scores))
        self.discordant.append({"model": model, "baseline": self.baseline, "task": row.id, "items": items})

    def _score(self, row: Row, model: str) -> None:
        runs = [self.runs[model][leaf] for leaf in row.leaves if leaf in self.runs[model]]
        if not runs:
            return
        missing = [leaf for leaf in row.leaves if leaf not in self.runs[model]]
        counts = {key: sum(_count(run, key) for run in runs) for key in (*_SUMS, *_LOUD, *_QUIET)}
        score: dict[str, Any] = {"value": None, "interval": None, "interval_method": None, "items": 0, "correct": None}
        score |= {"above_chance": None, "stderr": None, "macro": None, "interval_macro": None}
        score |= {"interval_clusters": None, "clusters": None}
        unscored = sum(run.unscored for run in runs)
        if not missing and not unscored:
            statistics = self._statistics.get(row.id, {}).get(model)
            if statistics is None:  # a task of a group
                statistics = RowStatistics(row.id, row.kind, {model: runs}, self.settings)
            score |= statistics.score(model, row.about["chance"])
        score |= {
            "stated": None if row.is_group else runs[0].primary.get("value"),
            "further": [] if row.is_group else _further(runs[0]),
            "counts": counts,
            "seconds": float(sum(run.result.get("seconds") or 0 for run in runs)),
            "run": None if row.is_group else runs[0].folder.name,
            "missing": missing,
            "unscored": unscored,
            "warnings": [] if row.is_group else [str(text) for text in runs[0].result.get("warnings") or []],
        }
        self.scores[model][row.id] = score
        self._warn(row, model, score)

    def _warn(self, row: Row, model: str, score: Mapping[str, Any]) -> None:
        if row.parent is None:  # a group counts those of its tasks
            items = sum(len(self.runs[model][leaf].items.doc_ids) for leaf in row.leaves if leaf in self.runs[model])
            for key, what in (_LOUD | _QUIET).items():
                if score["counts"][key]:
                    text = f"{model}, {row.title}: {score['counts'][key]} {what} ({items} items)"
                    self.warnings.append(_warning("loud" if key in _LOUD else "note", model, row.id, text))
        if row.parent is None and score["unscored"]:
            text = f"{model}, {row.title}: {score['unscored']} items have no finite score, so there is no mean"
            self.warnings.append(_warning("loud", model, row.id, text))
        stated, value = score["stated"], score["value"]
        if stated is not None and value is not None and abs(stated - value) > 1e-6 * max(1.0, abs(value)):
            text = f"{model}, {row.title}: the samples give {value:.6g}, but the run says {stated:.6g}"
            self.warnings.append(_warning("loud", model, row.id, text))
        self.warnings += [
            _warning("note", model, row.id, f"{model}, {row.title}: {text}") for text in score["warnings"]
        ]

    def _adjust(self) -> None:
        """Holm over all pairs and tasks, and what follows from it."""
        rows = {row.id: row for row in self.rows}
        for found, p in zip(self.pairs, holm([found["p"] for found in self.pairs]), strict=True):
            row = rows[found["task"]]
            found["p_holm"] = p
            found["verdict"] = words.verdict(found, row.about["higher_is_better"], self.settings.alpha)
            model, baseline = (_title(name, self.facts[name]) for name in (found["model"], self.baseline))
            found["sentence"] = words.sentence(found, row.title, model, baseline, row.kind)
            del found["no_item_differs"]

    def _average(self) -> None:
        top = [row for row in self.rows if row.parent is None]
        abilities = list(dict.fromkeys(row.ability for row in top if row.ability))
        for name in ("overall", *abilities):
            used, left_out = {}, []
            for row in top:
                lacking = [model for model in self.present if model not in self._statistics[row.id]]
                if name not in ("overall", row.ability):
                    continue
                if not row.about["in_suite_mean"]:
                    left_out.append({"task": row.id, "reason": "it is not a share of right answers"})
                elif lacking:
                    left_out.append({"task": row.id, "reason": f"no score of {', '.join(lacking)}"})
                else:
                    used[row.id] = self._statistics[row.id]
            if not used:
                continue
            refused: dict[str, list[str]] = {}
            for one in self.refused:
                refused.setdefault(one["model"], []).append(one["task"])
            scores, pairs = suite_mean(used, refused, self.present, self.baseline, self.settings)
            title = "All tasks" if name == "overall" else name.capitalize()
            mean = {"id": name, "title": title, "tasks": list(used), "left_out": left_out}
            self.means.append(mean | {"scores": scores, "pairs": pairs})
            if name == "overall":
                self._discordant_overall(used)

    def _discordant_overall(self, used: Mapping[str, Any]) -> None:
        """Five items across the tasks, the most discordant of every task first."""
        for model in self.present:
            lists = [one["items"] for one in self.discordant if one["model"] == model and one["task"] in used]
            if lists:
                items = alternated(lists, MOST_DISCORDANT)
                self.discordant.append({"model": model, "baseline": self.baseline, "task": None, "items": items})


def _pairing(found: Sequence[FinishedRun], others: Sequence[FinishedRun]) -> Pairing:
    """Of all the tasks of a row."""
    all_leaves = Pairing()
    for run, other in zip(found, others, strict=True):
        one = pair(run, other)
        if one.refused:
            return one
        all_leaves.prompts_differ |= one.prompts_differ
        all_leaves.notes += [note for note in one.notes if note not in all_leaves.notes]
    return all_leaves


def _baseline(folder: Path, facts: Mapping[str, Any], runs: Mapping[str, Any], asked: str | None) -> str:
    finished = [model for model in facts if runs[model]]
    if not finished:
        raise ValueError(f"{folder} has no finished run yet; run the same `zaya eval` again to finish it")
    if asked is None:
        return next((model for model in finished if facts[model].get("family") == "zaya"), finished[0])
    if asked not in finished:
        problem = "has no finished run" if asked in facts else "is none of its models"
        raise ValueError(f"the baseline {asked!r} {problem} in {folder}; those that have: {', '.join(finished)}")
    return asked


def _model(name: str, facts: Mapping[str, Any], runs: Mapping[str, FinishedRun], is_baseline: bool) -> dict[str, Any]:
    seconds = float(sum(run.result.get("seconds") or 0 for run in runs.values()))
    cost: dict[str, Any] = {"runs": len(runs), "items": sum(len(run.items.doc_ids) for run in runs.values())}
    cost |= {key: sum(_count(run, key) for run in runs.values()) for key in (*_SUMS, *_LOUD, *_QUIET)}
    # What was generated went through the model, too, and is among the tokens computed.
    cost |= {"seconds": seconds, "tokens_per_second": cost["tokens_computed"] / seconds if seconds > 0 else None}
    own = {"name": name, "title": _title(name, facts), "family": facts.get("family"), "baseline": is_baseline}
    known = {"parameters": None, "parameters_active": None}
    return known | {key: value for key, value in facts.items() if key != "reported"} | own | {"cost": cost}


def _title(name: str, facts: Mapping[str, Any]) -> str:
    return str(facts.get("title") or name)


def _count(run: FinishedRun, key: str) -> int:
    return int((run.result.get("counts") or {}).get(key) or 0)


def _further(run: FinishedRun) -> list[dict[str, Any]]:
    keys = ("metric", "filter", "value", "stderr", "higher_is_better")
    return [{key: one.get(key) for key in keys} for one in run.result["metrics"] if not one.get("primary")]


def _reported(facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    known = {row.id for row in rows}
    keys = ("value", "metric", "source")
    return {
        model: {
            task: {key: figure.get(key) for key in keys}
            for task, figure in (about.get("reported") or {}).items()
            if task in known
        }
        for model, about in facts.items()
    }


def _unfinished_warnings(unfinished: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    by_model: dict[str, list[str]] = {}
    for model, task in unfinished:
        by_model.setdefault(model, []).append(task)
    found = []
    for model, tasks in by_model.items():
        some = ", ".join(tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
        found.append(_warning("loud", model, None, f"{model}: no finished run of {some}"))
    return found


def _warning(level: str, model: str | None, task: str | None, text: str) -> dict[str, Any]:
    return {"level": level, "model": model, "task": task, "text": text}
