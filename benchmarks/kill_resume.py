"""Kill a training run by SIGKILL at random moments, start it again, and compare with a run that was left alone.

    python benchmarks/kill_resume.py [--kills N] [--seed N] [--output FOLDER]

The run is a small one with everything on whose state has to go on: HybridMuon, balancing biases, averaged weights,
dropout, accumulation, text tokenised and packed by the run itself, evaluations, checkpoints every few steps. It is
started by the command that users have. Every process is killed, at a moment of the phase whose turn it is, until the
run is through; then the next run begins. A run is right if its losses, gradient norms and held-out losses are those of
the undisturbed run, all digits, and its final weights and averaged weights are the same bytes.

The table says for every phase how often a process was killed in it; what the folder holds afterwards tells the phase.
With --output it is written as kill_resume.json and kill_resume.md. Needs no GPU; a kill takes about as long as torch
and transformers take to import.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from zaya_hf.atomic import write_json, write_text

STEPS, CHECKPOINT_EVERY, EVALUATE_EVERY, KEEP = 20, 3, 4, 2
PHASES = {
    "start-up": "before the first step: imports, tokenising, restoring",
    "step": "forward, backward, update",
    "evaluation": "held-out loss",
    "save: writing": "files of a checkpoint are being written and hashed",
    "save: written": "a checkpoint is complete under its temporary name",
    "save: removing": "an older checkpoint is being removed",
    "end": "all steps are done: the final model is being written",
}
#: what a kill aims at, in turn: the moment is drawn within it. Where it lands is told by the folder.
AIMS = ("start-up", "training", "writing", "training", "written", "training", "removing", "end")
LONGEST = 7  # steps that are done before a kill that aims at any moment of the training
DEADLINE = 600.0  # seconds for any process to do its part


def settings(folder: Path) -> dict[str, Any]:
    """Of the run, but for `out`; the text that it trains on is written into `folder`."""
    text = folder / "text"
    text.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(200)]
    for number in range(24):
        (text / f"{number}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(40, 120))), encoding="utf-8")
    return {
        "seed": 3,
        "steps": STEPS,
        "model": {
            "config": {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_experts": 4,
                "moe_intermediate_size": 32,
                "router_hidden_size": 16,
                "max_position_embeddings": 128,
                "attention_dropout": 0.1,
            }
        },
        "tokenizer": {"train_vocab_size": 300},
        "data": {
            "sources": [{"path": str(text), "kind": "text"}],
            "held_out_fraction": 0.2,
            "sequence_length": 32,
        },
        "batch": {"rows": 4, "micro_rows": 2},
        "optimizer": {"lr": 3e-3, "ns_dtype": "float32"},
        "balancing": {"lr": 0.02},
        "schedule": {"warmup_steps": 4},
        "checkpoint": {"every": CHECKPOINT_EVERY, "keep": KEEP},
        "evaluation": {"every": EVALUATE_EVERY},
        "logging": {"router_panel_every": 5},
        "ema_decay": 0.9,
    }


@dataclass
class TrainingProcess:
    """One process of the run in `out`, started by the command that users have.

    Attributes:
        overrides: of settings.
    """

    config: Path
    out: Path
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.starts = starts(self.out)
        self.output = self.out.with_name(f"{self.out.name}.log").open("a", encoding="utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "zaya_hf.training", str(self.config), f"out={self.out}", *self.overrides]
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Whether it came before the process ended. Looks some thousand times a second."""
        deadline = time.monotonic() + DEADLINE
        while self.running:
            if happened():
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{self.out}: nothing happened for {DEADLINE} s; see {self.output.name}")
            time.sleep(0.0005)
        return False

    def has_begun(self) -> bool:
        """Whether this process has come to its first step."""
        return starts(self.out) > self.starts

    def finish(self) -> None:
        """Wait until it ends by itself.

        Raises:
            RuntimeError: with an error.
        """
        self.process.wait(DEADLINE)
        self.output.close()
        if self.process.returncode != 0:
            raise RuntimeError(f"{self.out} ended with {self.process.returncode}; see {self.output.name}")

    def kill(self) -> bool:
        """SIGKILL to the process; whether it was still running. Workers that it started find out by themselves."""
        was_running = self.running
        if was_running:
            self.process.kill()
        self.process.wait()
        self.output.close()
        if not was_running and self.process.returncode != 0:
            raise RuntimeError(f"{self.out} ended with {self.process.returncode}; see {self.output.name}")
        return was_running


# --- what a folder tells ----------------------------------------------------------------------------------------------
def lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file of JSON lines; the last one may be torn."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def starts(out: Path) -> int:
    """How often a process has begun to train in `out`."""
    return sum(record["event"] in ("start", "resume") for record in lines(out / "events.jsonl"))


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints that stand."""
    return [int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdecimal()]


def steps_done(out: Path) -> int:
    """Of the last record of a step."""
    return max((record["step"] for record in lines(out / "metrics.jsonl")), default=0)


def unfinished(out: Path) -> set[Path]:
    """Folders with a temporary name among the checkpoints."""
    return set((out / "checkpoints").glob("step-*.tmp"))


def removals(out: Path) -> set[Path]:
    """Folders of older checkpoints on their way out."""
    newest = max(steps_in(out / "checkpoints"), default=0)
    return {path for path in unfinished(out) if int(path.name[5:-4]) < newest}


def written(out: Path) -> set[Path]:
    """Folders of checkpoints that are complete but for their name."""
    return {path for path in unfinished(out) - removals(out) if (path / "manifest.json").exists()}


#: what to wait for before a kill within a save
LOOKS: dict[str, Callable[[Path], set[Path]]] = {"writing": unfinished, "written": written, "removing": removals}


def phase(out: Path, begun: bool) -> str:
    """Where a process was that has been killed.

    Args:
        begun: it had come to its first step.
    """
    if not begun:
        return "start-up"
    newest, done = max(steps_in(out / "checkpoints"), default=0), steps_done(out)
    for look, name in ((removals, "removing"), (written, "written"), (unfinished, "writing")):
        if look(out):
            return f"save: {name}"
    if done == STEPS and newest == STEPS:
        return "end"
    evaluated = max((record["step"] for record in lines(out / "evaluations.jsonl")), default=0)
    due = done > 0 and (done % EVALUATE_EVERY == 0 or done == STEPS)
    return "evaluation" if due and evaluated < done else "step"


def seconds_of(out: Path) -> tuple[float, float]:
    """Of a step and of a save."""
    steps = [record["seconds"] for record in lines(out / "metrics.jsonl")]
    saves = [record["seconds"] for record in lines(out / "events.jsonl") if record["event"] == "checkpoint"]
    return median(steps), median(saves)


CLOCKS = {"time", "seconds", "data_seconds", "tokens_per_second", "tflops", "mfu", "memory_bytes"}


def result(out: Path) -> dict[str, Any]:
    """All that must not depend on kills: records without clocks, and the bytes of the weights."""

    def timeless(name: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k not in CLOCKS} for record in lines(out / name)]

    weights = sorted(path for folder in ("model", "model-ema") for path in (out / folder).glob("*.safetensors"))
    return {
        "metrics": timeless("metrics.jsonl"),
        "evaluations": timeless("evaluations.jsonl"),
        "weights": {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in weights},
    }


def difference(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first difference of two results in words; None if there is none."""
    for part in ("metrics", "evaluations"):
        if [record["step"] for record in got[part]] != [record["step"] for record in expected[part]]:
            return f"{part} have the steps {[record['step'] for record in got[part]]}"
        for one, other in zip(got[part], expected[part], strict=True):
            for key in one.keys() | other.keys():
                if repr(one.get(key)) != repr(other.get(key)):  # all digits
                    return f"{part}, step {one['step']}: {key} is {one.get(key)!r}, expected {other.get(key)!r}"
    if got["weights"] != expected["weights"] or not got["weights"]:
        return "the weights differ"
    return None


# --- killing ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Clock:
    """Seconds that parts of an undisturbed run took on this machine: start-up until the first step, a step, a save."""

    start_up: float
    step: float
    save: float


def strike(process: TrainingProcess, aim: str, clock: Clock, draw: random.Random) -> None:
    """Wait until a random moment within what is aimed at, or the end of the process."""
    if aim == "start-up":
        wait = draw.uniform(0.0, clock.start_up)
    elif not process.wait_for(process.has_begun):
        return
    elif aim in LOOKS:
        before = LOOKS[aim](process.out)
        process.wait_for(lambda: bool(LOOKS[aim](process.out) - before))
        wait = draw.uniform(0.0, clock.save) if aim == "writing" else 0.0
    elif aim == "end":
        process.wait_for(lambda: any(process.out.glob("model*.tmp")))
        wait = draw.uniform(0.0, clock.save / 4)
    else:
        steps = steps_done(process.out) + draw.randint(0, LONGEST)
        process.wait_for(lambda: steps_done(process.out) >= steps)
        wait = draw.uniform(0.0, clock.step)
    moment = time.monotonic() + wait
    process.wait_for(lambda: time.monotonic() > moment)


@dataclass
class Trial:
    """Kills and what became of the runs."""

    killed: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    different: list[str] = field(default_factory=list)


def trial(folder: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> Trial:
    """Kill processes of runs in `folder` until `kills` were killed, then let the last run come to its end.

    Raises:
        RuntimeError: a process ended with an error.
    """
    draw = random.Random(seed)
    config = folder / "config.json"  # JSON is YAML
    write_json(config, {"out": str(folder / "undisturbed")} | settings(folder))
    undisturbed = TrainingProcess(config, folder / "undisturbed")
    began = time.monotonic()
    undisturbed.wait_for(undisturbed.has_begun)
    start_up = time.monotonic() - began
    undisturbed.finish()
    expected, clock = result(undisturbed.out), Clock(start_up, *seconds_of(undisturbed.out))
    say(f"undisturbed: {clock}")
    outcome, aims = Trial(), turns(draw)
    while outcome.killed.total() < kills:
        outcome.runs += 1
        out = folder / f"run-{outcome.runs}"
        overrides = [f"data.workers={outcome.runs % 2}"]  # decides no number; but a worker may outlive its parent
        while True:
            process = TrainingProcess(config, out, overrides)
            if outcome.killed.total() == kills:
                process.finish()
                break
            aim = next(aims)
            strike(process, aim, clock, draw)
            if not process.kill():
                break  # it was through before
            where = phase(out, process.has_begun())
            outcome.killed[where] += 1
            say(f"kill {outcome.killed.total()} (run {outcome.runs}, aimed at {aim}): {where}")
        problem = difference(result(out), expected)
        if problem is not None:
            outcome.different.append(f"run {outcome.runs}: {problem}")
        say(f"run {outcome.runs}: {problem or 'the same, bit for bit'}")
    return outcome


def turns(draw: random.Random) -> Iterator[str]:
    """`AIMS` over and over, each time in another order."""
    while True:
        yield from draw.sample(AIMS, len(AIMS))


# --- the table --------------------------------------------------------------------------------------------------------
def as_markdown(facts: dict[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {what} | {facts['killed'].get(name, 0)} |" for name, what in PHASES.items())
    verdict = f"{facts['runs'] - len(facts['different'])} of {facts['runs']} runs ended like the undisturbed one"
    return (
        f"# Killed and started again\n\n{facts['kills']} processes of training runs were ended by SIGKILL at random "
        f"moments. {verdict}: losses, gradient norms and held-out losses in all digits, weights and averaged weights "
        f"byte for byte.\n\n| killed in | | times |\n|---|---|---|\n{rows}\n\n"
        f"{STEPS} steps per run, a checkpoint every {CHECKPOINT_EVERY}, an evaluation every {EVALUATE_EVERY}; seed "
        f"{facts['seed']}; {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}. Made by "
        "`benchmarks/kill_resume.py`.\n"
    )


@contextmanager
def working_folder(kept: str | None) -> Iterator[Path]:
    """A folder for the runs: temporary, or `kept`."""
    if kept is not None:
        Path(kept).mkdir(parents=True)
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as folder:
        yield Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="processes to kill (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--output", help="folder for kill_resume.json and kill_resume.md (default: none)")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="leave the runs in this new folder (default: they are removed)"
    )
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error("--kills: expected at least 1")
    started = time.monotonic()
    with working_folder(args.keep) as folder:
        outcome = trial(folder, args.kills, args.seed)
    import accelerate
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    facts = {
        "kills": outcome.killed.total(),
        "killed": {name: outcome.killed[name] for name in PHASES},
        "runs": outcome.runs,
        "different": outcome.different,
        "seed": args.seed,
        "seconds": round(time.monotonic() - started, 1),
        "versions": versions | {"accelerate": accelerate.__version__},
    }
    print(as_markdown(facts))
    if args.output is not None:
        write_json(Path(args.output) / "kill_resume.json", facts)
        write_text(Path(args.output) / "kill_resume.md", as_markdown(facts))
    return 1 if outcome.different else 0


if __name__ == "__main__":
    sys.exit(main())
