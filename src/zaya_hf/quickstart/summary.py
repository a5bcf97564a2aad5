"""What a quickstart says when it is done: the comparison as a table, samples, and where everything is."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from zaya_hf.quickstart.output import REPORT
from zaya_hf.quickstart.progress import say
from zaya_hf.quickstart.publish import LOADERS
from zaya_hf.reporting.formats import score, visible
from zaya_hf.reporting.results import FILE, score_value, scores, spread


def conclude(out: Path, found: dict[str, Any]) -> None:
    """Say what came of a quickstart, `found`, and where it is: in `out`."""
    published = found["published"]
    for which, name in LOADERS.items() if published else ():
        check = published["loaded"][which]
        equal = f"logits equal within {check['max_logit_difference']:.1e} (limit {check['limit']:.1e})"
        say("loaded", f"by {name} in a fresh process: {equal}")
    print()
    print("\n".join(table(found)))
    print()
    seeds = found["settings"]["seeds"]
    if len(seeds) == 1:
        say("note", "one seed: differences between models include seed noise, which --seeds 3 measures")
    else:
        say("note", f"means over {len(seeds)} seeds; the report shows their spread")
    if published:
        for sample in published["samples"]:
            say("sample", f"continues the prompt {sample['prompt']!r}; little sense is expected of a model this small:")
            print(f"\n{visible(sample['text'].strip())}\n")
    say("report", f"{out / REPORT}, all figures in {out / FILE}")
    if published:
        folder = out / published["folder"]
        say("model", f"{folder}, loads in transformers with or without zaya_hf")
        say("next", f'{zaya_command()} generate {shlex.quote(str(folder))} --prompt "def "')


def table(results: dict[str, Any]) -> list[str]:
    """The comparison as aligned text: a row for each model, the mean over its seeds; a column for each task."""
    tasks = results["tasks"]
    titles = [_two_lines(task) for task in tasks]
    rows = [["", *(title[0] for title in titles), "active", "training"]]
    rows += [["", *(title[1] for title in titles), "parameters", "tokens/s"]]
    for model in results["models"]:
        means = [spread([score_value(found) for found in scores(model, task)]).mean for task in tasks]
        speed = spread([run["tokens_per_second"] for run in model["runs"]]).mean
        numbers = [score(mean, task["kind"]) for mean, task in zip(means, tasks, strict=True)]
        rows.append([model["title"], *numbers, f"{model['active_parameters'] / 1e6:.2f} M", f"{speed:,.0f}"])
    unigram = results["unigram_bits_per_byte"]
    references = [score(unigram if task["kind"] == "bits_per_byte" else task["chance"], task["kind"]) for task in tasks]
    rows.append(["frequencies, chance", *references, "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def _two_lines(task: dict[str, Any]) -> tuple[str, str]:
    """A task's title as the two lines of a narrow column."""
    if task["kind"] == "bits_per_byte":
        return task["title"], "bits per byte"
    first, _, second = task["title"].partition(": ")
    return first, second


def zaya_command() -> str:
    """How a shell in this folder calls the `zaya` of this Python."""
    python = Path(sys.executable)
    script = next((path for path in (python.with_name("zaya"), python.with_name("zaya.exe")) if path.is_file()), None)
    shown = python if script is None else script
    if shown.is_relative_to(Path.cwd()):
        shown = shown.relative_to(Path.cwd())
    return shlex.quote(str(shown)) + (" -m zaya_hf" if script is None else "")
