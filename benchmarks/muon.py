"""One optimizer step on a stack of experts: HybridMuon against torch.optim.Muon, one matrix at a time.

Both take the same gradients in the same process, alternately, so that a ratio of times does not depend on what else the
machine does. Prints one JSON object: milliseconds of a step (median and all), their ratio, and how far the two updates
are apart, relative to their size. torch's Muon iterates in bf16 always; HybridMuon in both.

    python benchmarks/muon.py --experts 8 --hidden 512 --intermediate 512 --layers 4
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zaya_hf.training.newton_schulz import newton_schulz_dtype
from zaya_hf.training.optim import HybridMuon

OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.95}


def stacks(args: argparse.Namespace) -> list[nn.Parameter]:
    """Per layer the two parameters of the experts, as in the model: gate and up in one, and down."""
    torch.manual_seed(0)
    experts, hidden, inner = args.experts, args.hidden, args.intermediate
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)] * args.layers
    return [nn.Parameter(0.02 * torch.randn(shape, device=args.device)) for shape in shapes]


def apart(stacked: list[Tensor]) -> list[Tensor]:
    """Single matrices, gate and up apart; views."""
    halves = [half for stack in stacked[::2] for expert in stack for half in expert.chunk(2)]
    return halves + [expert for stack in stacked[1::2] for expert in stack]


def milliseconds(step: Callable[[], Any], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("experts", 8), ("hidden", 512), ("intermediate", 512), ("layers", 4), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    start = stacks(args)
    singles = [nn.Parameter(t.clone()) for t in apart([p.detach() for p in start])]
    runs: dict[str, tuple[torch.optim.Optimizer, list[nn.Parameter]]] = {
        "torch": (torch.optim.Muon(singles, lr=0.02, **OPTIONS), singles)
    }
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        own = stacks(args)
        groups = [
            {"params": own[::2], "role": "gate_up_experts"},
            {"params": own[1::2], "role": "experts"},
        ]
        runs[name] = (HybridMuon(groups, newton_schulz_dtype=dtype, **OPTIONS), own)

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.steps + 1):
        gradients = [torch.randn_like(p) for p in start]
        for name, (optimizer, parameters) in runs.items():
            given = apart(gradients) if name == "torch" else gradients
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            times[name].append(milliseconds(optimizer.step, args.device))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first warms up

    moved = [a - b for a, b in zip(apart([p.detach() for p in start]), singles, strict=True)]
    norm = torch.stack([m.detach().norm() for m in moved]).norm()

    def distance(name: str) -> float:
        ours = apart([p.detach() for p in runs[name][1]])
        return float(torch.stack([(a - b.detach()).norm() for a, b in zip(ours, singles, strict=True)]).norm() / norm)

    result = {
        "shapes": [list(p.shape) for p in start[:2]],
        "layers": args.layers,
        "matrices": len(singles),
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "default_dtype": str(newton_schulz_dtype(args.device)).removeprefix("torch."),
        "milliseconds": {name: [round(value, 2) for value in values[1:]] for name, values in times.items()},
        "median": {name: round(value, 2) for name, value in medians.items()},
        "torch_over_ours": {name: round(medians["torch"] / medians[name], 3) for name in ("bf16", "fp32")},
        "relative_distance_of_updates": {name: distance(name) for name in ("bf16", "fp32")},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
