"""The model card of a quickstart, made of its results.json, and a lint for cards that needs no network.

The metadata follows the Hub's model card specification through huggingface_hub's own classes. `ModelCard.validate`
is not used: it asks the Hub, and it lets placeholders pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from zaya_hf.reporting.formats import FILTERS, interval, score, visible
from zaya_hf.reporting.results import TRIAL, check_results, published_run, score_value, spread
from zaya_hf.resources import resource

FILE = "README.md"
LICENSE = "apache-2.0"
_METRICS = {"choice": ("accuracy", "accuracy"), "bits_per_byte": ("bits_per_byte", "bits per byte")}
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_PLACEHOLDERS = ("[more information needed]", "{{", "{%", "todo:", "<your", "[optional]", " object at 0x")
_REQUIRED = ("license", "library_name", "pipeline_tag", "language", "tags", "model-index")


def build_card(results: dict[str, Any], template: Path) -> str:
    """The card of the published model: metadata between two lines of three dashes, then Markdown.

    Args:
        results: what results.json holds; `published` says which model and seed.
        template: the Jinja file of the text.

    Raises:
        ValueError: the results are not those of a quickstart or name no published model, or the card that came of them
            does not pass `check_card`.
    """
    check_results(results)
    found = published_run(results)
    if found is None:
        raise ValueError("no model of these results was published, so there is nothing to write a card for")
    model, run = found
    name = f"{model['title']} quickstart"
    body = _environment().from_string(template.read_text(encoding="utf-8"))
    text = body.render(
        results=results,
        model=model,
        run=run,
        title=_line(f"{name}: a tiny model for demonstration"),
        rows=_rows(results, run),
        reference="chance or reference",
        seeds=_seed_words(results, model),
    )
    card = f"---\n{_metadata(results, model, run, name).to_yaml()}\n---\n\n{_squeeze(text)}"
    problems = check_card(card, results)
    if problems:
        raise ValueError(f"the model card is not right: {'; '.join(problems)}")
    return card


def write_card(results: dict[str, Any], folder: Path, template: Path | None = None) -> Path:
    """Write the card into a folder that has none yet, and return its path.

    Args:
        results: what results.json of a quickstart holds.
        folder: that of the model.
        template: by default the quickstart's.

    Raises:
        ValueError: as of `build_card`, or the folder has a card already.
        OSError: the file cannot be written.
    """
    path = folder / FILE
    card = build_card(results, template or resource("model_cards", "quickstart.md.jinja"))
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(card)
    except FileExistsError:
        raise ValueError(f"{path} is there already and is not overwritten") from None
    return path


def check_card(text: str, results: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with a card, whose whole text is `text`, one line each; nothing if it is right.

    Checked are the metadata (it parses; licence, library, pipeline, language, tags, name and results are there; every
    result is a finite number), placeholders that nobody filled in, and the numbers of the table of results: those of
    the metadata and, if `results` are given, theirs.
    """
    problems = []
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return ["no metadata between two lines of --- at the beginning"]
    body = text[matter.end() :]
    # A sample or a command may hold anything.
    prose = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    for placeholder in _PLACEHOLDERS:
        if placeholder in prose.lower():
            problems.append(f"placeholder in the text: {placeholder}")
    try:
        metadata = yaml.safe_load(matter[1])
    except yaml.YAMLError as error:
        return [*problems, f"the metadata is not YAML: {' '.join(str(error).split())}"]
    if not isinstance(metadata, dict):
        return [*problems, "the metadata is not a mapping"]
    problems += [f"metadata without {key}" for key in _REQUIRED if not metadata.get(key)]
    license_ = metadata.get("license")
    if license_ and license_ != LICENSE:
        problems.append(f"licence {license_!r} instead of {LICENSE}")
    try:
        values = dict(_indexed(metadata))
        problems += ["model-index without a name" for entry in metadata.get("model-index") or [] if not entry["name"]]
    except (KeyError, TypeError, AttributeError) as error:
        return [*problems, f"model-index is incomplete: {type(error).__name__} {error}"]
    finite = {}
    for task, (metric, value) in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            problems.append(f"the value of {task} is not a finite number: {value!r}")
        else:
            finite[task] = (metric, float(value))
    problems += _compare_tables(body, finite)
    if results is not None:
        problems += _compare_results(finite, results)
    return problems


def _metadata(results: Mapping[str, Any], model: Mapping[str, Any], run: Mapping[str, Any], name: str) -> ModelCardData:
    evaluated = []
    for task in results["tasks"]:
        metric, metric_name = _METRICS[task["kind"]]
        evaluated.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=str(task["name"]),
                dataset_name=_line(task["title"]),
                dataset_args={"items": int(task["items"]), "version": str(task["version"])},
                metric_type=metric,
                metric_name=metric_name,
                metric_value=score_value(run["evaluation"]["tasks"][task["name"]]),
            )
        )
    return ModelCardData(
        license=LICENSE,
        library_name="transformers",
        pipeline_tag="text-generation",
        language="en",
        tags=["zaya", "mixture-of-experts", "demonstration"],
        model_name=_line(name),
        eval_results=evaluated,
    )


def _rows(results: Mapping[str, Any], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task in results["tasks"]:
        kind, found = task["kind"], run["evaluation"]["tasks"][task["name"]]
        choice = kind == "choice"
        rows.append(
            {
                "title": task["title"],
                "metric": _METRICS[kind][1],
                "value": score(score_value(found), kind),
                "interval": interval(found["interval_95"], kind),
                "reference": score(task["chance"] if choice else results["unigram_bits_per_byte"], kind),
                "verdict": ("yes" if found["above_chance"] else "no") if choice else "-",
                "items": task["items"],
            }
        )
    return rows


def _seed_words(results: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """What one seed, or several, say about the numbers of the table."""
    if len(model["runs"]) == 1:
        return (
            f"These are the numbers of one seed, and another seed gives others. {TRIAL}. Differences from other models "
            "include this noise, and none is called resolved. `zaya quickstart --seeds 3` measures it."
        )
    ranges = []
    for task in results["tasks"]:
        found = spread([score_value(run["evaluation"]["tasks"][task["name"]]) for run in model["runs"]])
        kind = task["kind"]
        ranges.append(f"{_text(task['title'])} {score(found.mean, kind)} ({interval((found.low, found.high), kind)})")
    return (
        f"The table is about the published weights. Over all {len(model['runs'])} seeds, mean, least and greatest "
        f"were: {'; '.join(ranges)}. No difference from another model within such a spread means anything."
    )


def _indexed(metadata: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Task title -> metric type and value, of all results of the metadata."""
    for entry in metadata.get("model-index") or []:
        for result in entry["results"]:
            for metric in result["metrics"]:
                yield result["dataset"]["name"], (metric["type"], metric["value"])


def _compare_tables(body: str, values: Mapping[str, tuple[str, float]]) -> list[str]:
    rows = {}
    for line in body.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[cells[0]] = cells
    problems = []
    for task, (metric, value) in values.items():
        cells = rows.get(_cell(task), [])
        shown = cells[2] if len(cells) > 2 else None
        kind = "choice" if metric == "accuracy" else metric
        if shown is None:
            problems.append(f"no row for {task} in the table of results")
        elif shown != score(value, kind):
            problems.append(f"{task}: the table says {shown}, the metadata {score(value, kind)}")
    return problems


def _compare_results(values: Mapping[str, tuple[str, float]], results: Mapping[str, Any]) -> list[str]:
    found = published_run(results)
    if found is None:
        return ["results without a published model"]
    problems = []
    for task in results["tasks"]:
        right = score_value(found[1]["evaluation"]["tasks"][task["name"]])
        _, value = values.get(_line(task["title"]), ("", None))
        if value is None:
            problems.append(f"no value for {task['title']}")
        elif value != right:
            problems.append(f"{task['title']}: the card says {value}, the results {right}")
    return problems


def _line(text: Any) -> str:
    return " ".join(visible(str(text)).split())


def _text(text: Any) -> str:
    """Untrusted text inside a paragraph: one line, and nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|{}#])", r"\\\1", _line(text))


def _cell(text: Any) -> str:
    """Untrusted text inside a table or a code span: one line without what would end either."""
    return _line(text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _fenced(text: Any, language: str = "") -> str:
    """Untrusted text as a code block, with a fence that is longer than any row of backticks in it."""
    shown = visible(str(text))
    longest = max((len(row) for row in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown.rstrip()}\n{fence}"


def _squeeze(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment() -> Environment:
    # Markdown, not HTML: the filters below escape what comes from outside.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS | {"cell": _cell, "text": _text, "fenced": _fenced}
    return environment
