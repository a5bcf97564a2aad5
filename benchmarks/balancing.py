"""Controllers of balancing biases on drifting random routers: a toy, not evidence about a real model.

    python benchmarks/balancing.py [--table] [--output FILE] [--page FILE]

A router is a random linear map of random tokens into 16 experts and a skip slot, whose bias stays at -1 as in the
released model. Its weights drift from step to step, and at half of the steps the tokens get another mean: data of
another kind. Of softmax probabilities plus biases the largest wins, as in the model; every seed is a router, and all
controllers see the same routers and tokens. MaxVio is the largest load in units of a fair one, minus 1; the noise floor
is what fair random choices give. "Again" counts the steps after the change until MaxVio stays below 0.2 for 5 steps.

One JSON object goes to standard output, or a table with --table; --page writes charts of MaxVio and load entropy as
one HTML file. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from compare_upstream import OneLineParser, _from
from markupsafe import Markup
from torch import Tensor, nn

from zaya_hf.atomic import write_json, write_text
from zaya_hf.reporting.charts import Line, line_chart
from zaya_hf.reporting.page import render
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.config import BalancingConfig

EXPERTS = 16
WIDTH = 16  # of a token
MEAN = 0.8  # norm of the tokens' mean, beside deviations of 1: without biases the busiest expert gets 3 fair loads
SCALE = 2.0  # deviation of the logits
DRIFT = 0.01  # of the weights: after t steps a share of (1 - DRIFT ** 2) ** (t / 2) of them is left
SETTLED, STEADY = 0.2, 5  # "again"
WINDOW = 50  # steps before the change and before the end that the table averages
BIN = 10  # steps that a point of the charts averages


@dataclass(frozen=True)
class Trial:
    """A controller with its gains; `later` takes its place at five sixths of the steps."""

    name: str
    config: BalancingConfig
    later: BalancingConfig | None = None
    slot: int | None = None  # in the charts, which have room for seven


def trials() -> list[Trial]:
    def adamw(lr: float) -> BalancingConfig:
        return BalancingConfig(controller="adamw", lr=lr)

    def sign(lr: float) -> BalancingConfig:
        return BalancingConfig(controller="sign", lr=lr)

    def pid(kp: float, ki: float, kd: float = 0.0) -> BalancingConfig:
        return BalancingConfig(controller="pid", kp=kp, ki=ki, kd=kd)

    return [
        Trial("frozen", BalancingConfig(controller="frozen"), slot=6),
        Trial("sign 1e-3", sign(1e-3), slot=2),
        Trial("sign 5e-3", sign(5e-3), slot=3),
        Trial("sign 1e-2", sign(1e-2)),
        Trial("sign 5e-3, then 5e-4", sign(5e-3), sign(5e-4)),
        Trial("pid ki 0.05", pid(0.0, 0.05)),
        Trial("pid ki 0.1", pid(0.0, 0.1)),
        Trial("pid ki 0.2", pid(0.0, 0.2), slot=1),
        Trial("pid ki 0.4", pid(0.0, 0.4)),
        Trial("pid kp 0.05 ki 0.05", pid(0.05, 0.05)),
        Trial("pid kp 0.2 ki 0.2", pid(0.2, 0.2)),
        Trial("pid 0.5 0.1 0.2", pid(0.5, 0.1, 0.2), slot=5),
        Trial("adamw 1e-3", adamw(1e-3), slot=4),
        Trial("adamw 5e-3", adamw(5e-3), slot=0),
        Trial("adamw 1e-2", adamw(1e-2)),
    ]


class Router(nn.Module):
    """Holds the biases of one seed's router."""

    def __init__(self) -> None:
        super().__init__()
        self.balancing_biases = nn.Buffer(torch.tensor([0.0] * EXPERTS + [-1.0]))


class Follower:
    """The biases of one trial, for all seeds, and what they did at every step."""

    def __init__(self, trial: Trial, seeds: int):
        self.trial = trial
        self.routers = [Router() for _ in range(seeds)]
        self.balancer = BiasBalancer(self.routers, trial.config)
        self.violations: list[list[float]] = []  # [steps][seeds]; the same of the others
        self.entropies: list[list[float]] = []
        self.changes: list[list[float]] = []

    def biases(self) -> Tensor:
        """``[seeds, E + 1]``."""
        return torch.stack([router.balancing_biases for router in self.routers])

    def step(self, probabilities: Tensor) -> None:
        """Route tokens of ``[seeds, E + 1, tokens]`` and move the biases."""
        before = self.biases()
        slots = (probabilities + before[:, :, None]).argmax(dim=1)
        self.balancer.observe(torch.stack([torch.bincount(chosen, minlength=EXPERTS + 1) for chosen in slots]))
        self.balancer.step()
        panel = self.balancer.panel()
        assert panel is not None
        self.violations.append(panel["max_violation"])
        self.entropies.append(panel["load_entropy"])
        self.changes.append((self.biases() - before)[:, :EXPERTS].abs().mean(dim=1).tolist())

    def switch(self) -> None:
        if self.trial.later is not None:
            self.balancer = BiasBalancer(self.routers, self.trial.later)


def run(steps: int, tokens: int, seeds: int, seed: int) -> dict[str, Any]:
    """What `main` prints."""
    generator = torch.Generator().manual_seed(seed)

    def weights() -> Tensor:
        return torch.randn(seeds, EXPERTS + 1, WIDTH, generator=generator) * SCALE / math.sqrt(WIDTH)

    def mean() -> Tensor:
        return nn.functional.normalize(torch.randn(seeds, WIDTH, generator=generator), dim=-1)[:, :, None] * MEAN

    followers = [Follower(trial, seeds) for trial in trials()]
    router, middle = weights(), mean()
    for step in range(steps):
        if step == steps // 2:
            middle = mean()
        if step == steps * 5 // 6:
            for follower in followers:
                follower.switch()
        router = math.sqrt(1 - DRIFT**2) * router + DRIFT * weights()
        probabilities = torch.softmax(router @ (torch.randn(seeds, WIDTH, tokens, generator=generator) + middle), dim=1)
        for follower in followers:
            follower.step(probabilities)
    return {
        "made_by": "benchmarks/balancing.py",
        "note": "a toy, not evidence about a real model",
        "versions": {"torch": torch.__version__},
        "setting": {
            "experts": EXPERTS,
            "steps": steps,
            "change_at": steps // 2,
            "tokens_per_step": tokens,
            "seeds": seeds,
            "seed": seed,
            "width": WIDTH,
            "mean": MEAN,
            "scale": SCALE,
            "drift": DRIFT,
            "window": min(WINDOW, steps // 2),
        },
        "noise_floor": _noise_floor(tokens, generator),
        "trials": [_summary(follower, steps) for follower in followers],
    }


def _noise_floor(tokens: int, generator: torch.Generator) -> float:
    """Mean MaxVio of tokens that choose among the experts at random."""
    loads = [torch.randint(EXPERTS, (tokens,), generator=generator).bincount(minlength=EXPERTS) for _ in range(200)]
    return round(fmean(load.max().item() * EXPERTS / tokens - 1 for load in loads), 4)


def _summary(follower: Follower, steps: int) -> dict[str, Any]:
    trial, change = follower.trial, steps // 2
    window = min(WINDOW, change)
    of_seed = list(zip(*follower.violations, strict=True))
    again = [_again(violations[change:]) for violations in of_seed]
    config = trial.config.model_dump(mode="json")
    fields = {"frozen": (), "sign": ("lr",), "adamw": ("lr", "betas"), "pid": ("kp", "ki", "kd", "clamp")}
    points = range(0, steps - BIN + 1, BIN)

    def binned(values: list[list[float]]) -> list[float]:
        """The mean of all seeds over each `BIN` steps."""
        return [round(fmean(fmean(step) for step in values[at : at + BIN]), 4) for at in points]

    return {
        "name": trial.name,
        "controller": config["controller"],
        "gains": {name: config[name] for name in fields[config["controller"]]},
        "gains_later": None if trial.later is None else {"lr": trial.later.lr},
        "max_violation_before": [round(fmean(v[change - window : change]), 4) for v in of_seed],
        "max_violation_after": [round(fmean(v[steps - window :]), 4) for v in of_seed],
        "settled_first_after": [_again(violations[:change]) for violations in of_seed],
        "settled_again_after": again,
        "bias_change_per_step": float(f"{fmean(fmean(step) for step in follower.changes[steps - window :]):.3g}"),
        "bias_range": round(float((follower.biases()[:, :-1].amax(1) - follower.biases()[:, :-1].amin(1)).mean()), 3),
        "curve": {
            "step": [at + BIN // 2 for at in points],
            "max_violation": binned(follower.violations),
            "load_entropy": binned(follower.entropies),
        },
        "in_chart": trial.slot,
    }


def _again(violations: Sequence[float]) -> int | None:
    """Steps before the first `STEADY` ones below `SETTLED`."""
    for step in range(len(violations) - STEADY + 1):
        if max(violations[step : step + STEADY]) < SETTLED:
            return step
    return None


def steps_text(found: list[int | None]) -> str:
    """How many seeds settled, and in how many steps: 5 (33-54)."""
    known = sorted(step for step in found if step is not None)
    ends = "" if not known else f" ({known[0]})" if known[0] == known[-1] else f" ({known[0]}-{known[-1]})"
    return f"{len(known)}{ends}"


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table, a row for each trial."""
    return [
        (
            trial["name"],
            f"{fmean(trial['max_violation_before']):.2f}",
            f"{fmean(trial['max_violation_after']):.2f}",
            steps_text(trial["settled_first_after"]),
            steps_text(trial["settled_again_after"]),
            f"{trial['bias_change_per_step']:.0e}" if trial["bias_change_per_step"] else "0",
        )
        for trial in result["trials"]
    ]


def heads(result: dict[str, Any]) -> tuple[str, ...]:
    at, window, end = (result["setting"][name] for name in ("change_at", "window", "steps"))
    of = result["setting"]["seeds"]
    return (
        "controller",
        f"MaxVio {at - window}-{at}",
        f"MaxVio {end - window}-{end}",
        f"settled at first (of {of}), steps",
        f"settled again (of {of}), steps",
        "change of a bias per step",
    )


def table(result: dict[str, Any]) -> str:
    """The trials as a table in Markdown, with the noise floor below."""
    lines = [heads(result), tuple("---" for _ in heads(result)), *rows(result)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\nNoise floor {result['noise_floor']:.2f}; {result['note']}."


def page(result: dict[str, Any]) -> str:
    """The charts and the table as one HTML page."""
    drawn = [trial for trial in result["trials"] if trial["in_chart"] is not None]
    lowest = min(min(trial["curve"]["max_violation"]) for trial in drawn)
    lines: dict[str, list[Line]] = {"max_violation": [], "load_entropy": []}
    for trial in drawn:
        curve = trial["curve"]
        for name, found in lines.items():
            found.append(Line(trial["name"], curve["step"], curve[name], trial["in_chart"]))
    charts = [
        line_chart(
            "max-violation",
            lines["max_violation"],
            x_label="step",
            y_label="MaxVio, logarithmic",
            description="MaxVio over the steps: " + "; ".join(f"{row[0]} ends at {row[2]}" for row in rows(result)),
            y_limits=(min(lowest, 0.05), 5.0),
            logarithmic="y",
            size=(400, 320),
        ),
        line_chart(
            "load-entropy",
            [line for line in lines["load_entropy"] if line.slot != 6],
            x_label="step",
            y_label="load entropy / ln 16",
            description="Load entropy over the steps, without the frozen router",
            y_limits=(0.9, 1.001),
            size=(400, 320),
        ),
    ]
    return render(
        "balancing.html.jinja",
        charts=[Markup(chart) for chart in charts],
        heads=heads(result),
        rows=rows(result),
        setting=result["setting"],
        noise_floor=result["noise_floor"],
        note=result["note"],
        versions=sorted(result["versions"].items()),
    )


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="balancing.py", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=_from(int, 2 * BIN), default=600, metavar="N", help="(default: 600)")
    parser.add_argument("--tokens", type=_from(int, 1), default=8192, metavar="N", help="in a step (default: 8192)")
    parser.add_argument("--seeds", type=_from(int, 1), default=5, metavar="N", help="routers (default: 5)")
    parser.add_argument("--seed", type=_from(int, 0), default=0, help="of all numbers (default: 0)")
    parser.add_argument("--table", action="store_true", help="print the table to standard output in place of the JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there as well")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of charts there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    arguments = build_parser().parse_args(argv)
    result = run(arguments.steps, arguments.tokens, arguments.seeds, arguments.seed)
    if arguments.output is not None:
        write_json(arguments.output, result)
    if arguments.page is not None:
        write_text(arguments.page, page(result))
    print(table(result) if arguments.table else json.dumps(result, indent=2, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
