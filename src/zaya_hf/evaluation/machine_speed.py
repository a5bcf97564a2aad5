"""How fast a machine multiplies matrices and reads memory: measured here, or for GPUs assumed from data sheets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["KNOWN", "Speed", "here", "known"]

# Data sheets: dense bf16 operations a second, bytes a second, bytes of memory.
KNOWN = {
    "MI300X": (1307e12, 5.3e12, 192e9),
    "MI325X": (1307e12, 6.0e12, 256e9),
    "MI355X": (2516e12, 8.0e12, 288e9),
    "A100": (312e12, 2.0e12, 80e9),
    "H100": (989e12, 3.35e12, 80e9),
    "H200": (989e12, 4.8e12, 141e9),
}
# What real models reach of that, and of a measured product of large matrices: the rest goes to small products, norms,
# attention, and waiting.
_OPERATIONS_SHARE, _BANDWIDTH_SHARE, _MEASURED_SHARE = 0.35, 0.5, 0.6
_SIZE = {"cpu": 1024, "cuda": 4096}  # of the matrices that are multiplied
_BYTES = {"cpu": 2**27, "cuda": 2**30}  # that are copied
_TRIALS = 3


@dataclass(frozen=True)
class Speed:
    """What a model is expected to reach on one device.

    Attributes:
        name: of the device.
        operations: floating-point operations a second.
        bandwidth: bytes a second.
        memory: bytes that it has; None if unknown.
        source: where the figures come from, for people.
    """

    name: str
    operations: float
    bandwidth: float
    memory: float | None
    source: str


def known(name: str) -> Speed:
    """The speed of one GPU of `KNOWN`, in bf16."""
    operations, bandwidth, memory = KNOWN[name]
    source = (
        f"{name}: {_OPERATIONS_SHARE:.0%} of {operations / 1e12:.0f} Tflop/s (bf16) and {_BANDWIDTH_SHARE:.0%} of "
        f"{bandwidth / 1e12:.2f} TB/s of the data sheet, assumed"
    )
    return Speed(name, _OPERATIONS_SHARE * operations, _BANDWIDTH_SHARE * bandwidth, memory, source)


@cache
def here(device: str, dtype: torch.dtype) -> Speed:
    """The speed of a device of this machine: of a GPU in `KNOWN` in 16 bits by its data sheet, else measured.

    Args:
        device: such as "cpu" or "cuda:0".
    """
    chosen = torch.device(device)
    if chosen.type == "cuda":
        name = torch.cuda.get_device_name(chosen)
        listed = next((one for one in KNOWN if one.lower() in name.lower().replace(" ", "")), None)
        if listed is not None and dtype.itemsize == 2:
            return known(listed)
        memory: float | None = float(torch.cuda.get_device_properties(chosen).total_memory)
    else:
        name, memory = f"this CPU, {torch.get_num_threads()} threads", None
    operations, bandwidth = _operations(chosen, dtype), _bandwidth(chosen)
    source = (
        f"{name}: {_MEASURED_SHARE:.0%} of {operations / 1e12:.3g} Tflop/s of a {str(dtype).removeprefix('torch.')} "
        f"matrix product and of {bandwidth / 1e9:.3g} GB/s of a copy, measured now"
    )
    return Speed(name, _MEASURED_SHARE * operations, _MEASURED_SHARE * bandwidth, memory, source)


def _operations(device: torch.device, dtype: torch.dtype) -> float:
    size = _SIZE.get(device.type, _SIZE["cpu"])
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right, device)


def _bandwidth(device: torch.device) -> float:
    given = torch.zeros(_BYTES.get(device.type, _BYTES["cpu"]), dtype=torch.uint8, device=device)
    taken = torch.empty_like(given)
    return 2 * given.numel() / _seconds(lambda: taken.copy_(given), device)  # read and written


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the fastest of some trials after one to warm up."""
    work()
    found = []
    for _ in range(_TRIALS):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - started)
    return max(min(found), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
