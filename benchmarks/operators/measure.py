"""Checking an operator against float64, timing it beside its counterparts, and the floor of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from upstream.checks import Failed
from upstream.timing import Times, Work, alternate

from zaya_hf.ops import selection

from .cases import Case, Function

#: error in relative norm that a result or a gradient may have against float64; more only where stock has it too
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
_AS_STOCK = 1.5
_FLUSHED_BYTES = 512 << 20  # more than the last-level cache of any GPU


class Switch:
    """Which implementation of the operators runs from now on; entering and leaving `selection.use` is not timed."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def to(self, how: str) -> None:
        self._stack.close()
        self._stack.enter_context(selection.use(how))

    def close(self) -> None:
        self._stack.close()


# ------------------------------------------------------------------------------------------------------------- checks
def check(case: Case) -> str:
    """What was seen; raises `Failed` where ours is farther from float64 than its dtype explains."""
    inputs = case.inputs(case.checked)
    dtype = _dtype(inputs)
    # autocast, TF32 and the like would be the user's doing: none is on here
    exact = _results(case.exact, _wide(inputs), case.backward, None, "reference")
    cotangents = exact[0]
    found = {
        side: _results(function, inputs, case.backward, cotangents, how)
        for side, function, how in (("ours", case.ours, "auto"), ("eager", case.eager, "reference"))
    }
    worst, where = 0.0, ""
    for name, right in exact[1].items():
        error, stock = (_error(found[side][1][name], right) for side in ("ours", "eager"))
        allowed = max(TOLERANCES[dtype], _AS_STOCK * stock)
        if not error <= allowed:
            raise Failed(f"{name} is {error:.1e} off float64, allowed {allowed:.1e} (the stock side {stock:.1e})")
        if error >= worst:
            worst, where = error, name
    parts = "results and gradients" if case.backward else "results"
    return f"ok: {parts} at most {worst:.1e} off float64 in relative norm ({where}), {case.checked:,} tokens"


def _results(
    function: Function, inputs: dict[str, Any], backward: bool, cotangents: list[Tensor] | None, how: str
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Cotangents that were used, drawn unless given, and results and gradients by name."""
    with selection.use(how), torch.set_grad_enabled(backward):
        results = _tensors(function(**inputs))
    if cotangents is None:
        cotangents = [torch.randn_like(result) for result in results]
    found = {f"result {index}": result.detach() for index, result in enumerate(results)}
    if backward:
        with selection.use(how):
            gradients = _gradients(results, _leaves(inputs), cotangents)
        found |= {f"gradient of {name}": value for name, value in gradients.items()}
    return cotangents, found


def _gradients(results: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
    pairs = [(r, c.to(r.dtype)) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [c for _, c in pairs])
    return dict(zip(leaves, found, strict=True))


def _error(found: Tensor, right: Tensor) -> float:
    difference, size = (found.double() - right.double()).norm().item(), right.double().norm().item()
    return difference / size if size else difference


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    def wide(t: Any) -> Any:
        floats = isinstance(t, Tensor) and t.is_floating_point()
        return t.detach().double().requires_grad_(t.requires_grad) if floats else t

    return {name: wide(value) for name, value in inputs.items()}


def _dtype(inputs: dict[str, Any]) -> torch.dtype:
    """The narrowest of the inputs: that of the weights."""
    floats = [t.dtype for t in inputs.values() if isinstance(t, Tensor) and t.is_floating_point()]
    return min(floats, key=lambda dtype: dtype.itemsize)


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [r for r in results if r is not None]


def _leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}


# -------------------------------------------------------------------------------------------------------------- times
def passes(case: Case) -> tuple[str, ...]:
    """Names of what is timed."""
    return ("forward", "forward and backward") if case.backward else ("forward",)


def measure(
    case: Case, which: str, compiled: bool, seconds: float, rates: dict[str, float], device: torch.device
) -> dict[str, Any]:
    """Times of ours, eager, compiled and others in turn, and the floor.

    Args:
        which: one of `passes`.
        rates: "bytes" per second and "flops" of the dtype's products.
    """
    inputs = case.inputs(case.tokens)
    backward = which != "forward"
    size, cotangents = _traffic(case, inputs, backward)
    sides: dict[str, tuple[Function, str]] = {"ours": (case.ours, "auto"), "eager": (case.eager, "reference")}
    sides |= {name: (function, "reference") for name, function in case.others.items()}
    if compiled:
        torch.compiler.reset()
        sides["compiled"] = (torch.compile(case.eager, dynamic=False), "reference")
    switch, works, errors = Switch(), {}, {}
    try:
        for name, (function, how) in sides.items():
            work = Work(_run(function, inputs, backward, cotangents), lambda how=how: switch.to(how))  # type: ignore[misc]
            try:  # a side that cannot run is said so, and the others go on
                for _ in range(3):
                    work.ready()
                    work.run()
                works[name] = work
            except Exception as error:
                if name == "ours":
                    raise
                errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        times = alternate(works, seconds, _on_gpu(device) if device.type == "cuda" else None)
    finally:
        switch.close()
    flops = case.flops * (3 if backward else 1)
    return _entry(times, errors, size, flops, rates)


def _run(function: Function, inputs: dict[str, Any], backward: bool, cotangents: list[Tensor]) -> Callable[[], Any]:
    leaves = _leaves(inputs)

    def forward() -> Any:
        with torch.no_grad():
            return function(**inputs)

    def both() -> Any:
        return _gradients(_tensors(function(**inputs)), leaves, cotangents)

    return both if backward else forward


def _traffic(case: Case, inputs: dict[str, Any], backward: bool) -> tuple[float, list[Tensor]]:
    """Bytes that have to be read and written at least once, and cotangents. Forward: arguments and results. Backward:
    arguments again, cotangents, gradients."""
    with selection.use("auto"), torch.no_grad():
        results = _tensors(case.ours(**inputs))
    given = sum(t.nbytes for t in inputs.values() if isinstance(t, Tensor))
    size = given + sum(r.nbytes for r in results)
    cotangents = [torch.randn_like(r) for r in results]
    if backward:
        size += given + sum(c.nbytes for c in cotangents) + sum(t.nbytes for t in _leaves(inputs).values())
    return float(size), cotangents


def _on_gpu(device: torch.device) -> Callable[[Work], float]:
    """Samples by the GPU's own clock, after its caches were overwritten."""
    large = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def take(work: Work) -> float:
        work.ready()
        large.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work.run()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3

    return take


def _entry(
    times: dict[str, Times], errors: dict[str, str], size: float, flops: float, rates: dict[str, float]
) -> dict[str, Any]:
    memory, products = size / rates["bytes"], flops / rates["flops"]
    ours, floor = times["ours"].median, max(memory, products)
    entry: dict[str, Any] = {f"{name}_us": _digits(found.median * 1e6) for name, found in times.items()}
    entry |= {f"ratio_to_{name}": _digits(t.median / ours) for name, t in times.items() if name != "ours"}
    entry |= {f"{name}_error": error for name, error in errors.items()}
    entry |= {
        "floor_us": _digits(floor * 1e6),
        "bound_by": "memory" if memory >= products else "products",
        "share_of_floor": _digits(floor / ours),
        "bytes": int(size),
        "flops": int(flops),
        "gb_per_s": _digits(size / ours / 1e9),
        "tflop_per_s": _digits(flops / ours / 1e12),
        "samples": len(times["ours"].samples),
    }
    return entry


def _digits(number: float) -> float:
    return float(f"{number:.4g}")
