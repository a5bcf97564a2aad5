"""Speed of a step: tokens per second, model FLOP/s per device, and their share of what the device can do (MFU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..configuration_zaya import ZayaConfig
from . import flops


class Throughput:
    """What a number of tokens in a number of seconds come to.

    Args:
        flops_per_token: of a training step, given the share of tokens that skip the experts; recomputation is not
            counted.
        devices: that share the work.
        peak_tflops: of one device in the precision of the run; None: unknown, and so is MFU.
    """

    def __init__(self, flops_per_token: Callable[[float], float], devices: int, peak_tflops: float | None) -> None:
        self._flops_per_token = flops_per_token
        self._devices = devices
        self._peak_tflops = peak_tflops

    @classmethod
    def of_run(
        cls,
        config: ZayaConfig,
        sequence_length: int,
        *,
        devices: int,
        device_name: str,
        precision: str,
        peak_tflops: float | None = None,
    ) -> Throughput:
        """For a ZAYA of that config; `peak_tflops` None: by the device's name, where that is known."""
        peak = peak_tflops if peak_tflops is not None else flops.peak_tflops(device_name, precision)
        return cls(flops.flops_per_token(config, sequence_length).at, devices, peak)

    def of(self, tokens: int, seconds: float, skip_rate: float) -> dict[str, Any]:
        """``tokens_per_second`` over all devices; ``tflops`` per device; ``mfu`` (0 to 1) or None.

        Args:
            tokens: of the step, over all processes, without padding.
            seconds: of the step.
            skip_rate: share of tokens that skip the experts, mean over layers.
        """
        rate = tokens / seconds if seconds > 0 else 0.0
        tflops = rate * self._flops_per_token(skip_rate) / self._devices / 1e12
        mfu = None if self._peak_tflops is None else tflops / self._peak_tflops
        return {"tokens_per_second": rate, "tflops": tflops, "mfu": mfu}
