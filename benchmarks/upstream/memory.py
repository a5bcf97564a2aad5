"""Peak memory with the full vocabulary, in a process of its own per side, and the time of loading."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from . import checks
from .pair import FULL_VOCABULARY, SIDES, Pair, build, make_config, random_ids
from .timing import Times, Work, alternate

_SEED = 0
KINDS = ("train", "prefill")


def peak_of_child(side: str, size: str, kind: str, tokens: int) -> dict[str, Any]:
    """What a child process does: one training step, or one prefill, of a model of one layer in fp32."""
    config = make_config(size, layers=1, vocab_size=FULL_VOCABULARY)
    model: Any = build(side, config, _SEED)
    ids = random_ids(config, 1, tokens, seed=_SEED)
    before = _memory("VmRSS")
    if kind == "train":
        model.train()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms = [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]
        seen = {"loss": loss.item(), "all": sum(norm**2 for norm in norms) ** 0.5}
    else:
        with torch.no_grad():
            logits = model(ids, use_cache=True, logits_to_keep=1).logits
        seen = {"logsumexp": logits.logsumexp(-1).item(), "norm": logits.norm().item()}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {"peak_bytes": _memory("VmHWM"), "before_bytes": before, "weight_bytes": weights, "seen": seen}


def _memory(field: str) -> int:
    """Bytes of this process. Not `ru_maxrss` where there is /proc: a child inherits that of its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Peak:
    """A row of peak memory; the ratio is stock's peak over ours."""

    def __init__(self, kind: str, tokens: int) -> None:
        self.kind, self.tokens = kind, tokens
        self.name = f"peak-{kind}-1x{tokens}"
        doing = "one training step" if kind == "train" else "one prefill, logits of the last token"
        self.what = (
            f"peak resident memory of {doing}, 1 x {tokens} tokens, 1 layer, vocabulary {FULL_VOCABULARY}, in a "
            "process of its own; weights and what torch itself takes are the same on both sides"
        )

    def measure(self, script: Path, size: str, threads: int) -> dict[str, Any]:
        """The fields of the row.

        Raises:
            checks.Failed: a side ended with an error, or they computed different things.
        """
        got = {side: self._child(script, side, size, threads) for side in SIDES}
        ours, stock = got["ours"], got["stock"]
        check = checks.verdict(lambda: _compare(ours["seen"], stock["seen"]))
        return {
            "ours_mib": round(ours["peak_bytes"] / 2**20),
            "stock_mib": round(stock["peak_bytes"] / 2**20),
            "before_mib": {side: round(got[side]["before_bytes"] / 2**20) for side in SIDES},
            "weights_mib": round(ours["weight_bytes"] / 2**20),
            "ratio": round(stock["peak_bytes"] / ours["peak_bytes"], 3),
            "check": check,
        }

    def _child(self, script: Path, side: str, size: str, threads: int) -> dict[str, Any]:
        arguments = ["--peak-child", side, "--peak-kind", self.kind, "--peak-tokens", str(self.tokens)]
        ended = subprocess.run(
            [sys.executable, str(script), *arguments, "--size", size, "--threads", str(threads)],
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            raise checks.Failed(f"the process of {side} ended with status {ended.returncode}: {last}")
        result: dict[str, Any] = json.loads(ended.stdout)
        return result


def _compare(ours: dict[str, float], stock: dict[str, float]) -> str:
    if "loss" in ours:
        return checks.compare_training(ours, stock, "fp32")
    worst = max(abs(ours[name] - stock[name]) / abs(stock[name]) for name in stock)
    seen = f"logits' logsumexp and norm differ by {worst:.1e} at most"
    if not worst <= 1e-4:
        raise checks.Failed(seen)
    return "ok: " + seen


class Load:
    """`from_pretrained` from a folder that was written and read just before, so the disk plays no part."""

    name = "load"
    what = "from_pretrained of a folder that save_pretrained wrote, files in the page cache"

    def measure(self, pair: Pair, seconds: float) -> tuple[str, dict[str, Times]]:
        """The check and the times."""
        pair.for_inference("loaded")
        with tempfile.TemporaryDirectory() as folder:
            pair.ours.save_pretrained(folder)
            classes = {side: type(pair.side(side)) for side in SIDES}

            def check() -> str:
                expected = pair.ours.state_dict()
                for side, cls in classes.items():
                    state = cls.from_pretrained(folder).state_dict()
                    if state.keys() != expected.keys():
                        raise checks.Failed(f"{side} loaded other tensors than were saved")
                    for name, tensor in expected.items():
                        if not torch.equal(state[name].to(tensor.dtype), tensor):
                            raise checks.Failed(f"{side} loaded {name} changed")
                return f"ok: all {len(expected)} tensors as saved on both sides"

            verdict = checks.verdict(check)
            if verdict.startswith("failed"):
                return verdict, {}
            works = {side: Work(lambda cls=cls: cls.from_pretrained(folder)) for side, cls in classes.items()}
            return verdict, alternate(works, seconds)
