"""Rotary tables. Frequencies follow from the config alone, so they are no buffer: nothing to cast, load or lose."""

from __future__ import annotations

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .configuration_zaya import ZayaConfig
from .ops.numerics import wide_dtype

#: positions that are computed together for decoding
BLOCK = 64

Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]


class RotaryTables:
    """cos and sin for each layer type; frequencies are computed once, in fp32 on CPU, and kept per device."""

    def __init__(self, config: ZayaConfig) -> None:
        assert config.layer_types is not None
        self.layer_types = list(dict.fromkeys(config.layer_types))
        # Plain numbers: a model may be built on the meta device or under another default device.
        self._numbers = {layer_type: _frequencies(config, layer_type) for layer_type in self.layer_types}
        self._per_device: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._block: tuple[tuple[int, torch.dtype], list[Tables]] | None = None

    def frequencies(self, layer_type: str, device: torch.device) -> torch.Tensor:
        """``[rotary_dim / 2]`` fp32."""
        key = (layer_type, device)
        if not is_tracing() and key in self._per_device:  # in this order: a trace would be guarded by what it reads
            return self._per_device[key]
        frequencies = torch.tensor(self._numbers[layer_type][0], dtype=torch.float32, device=device)
        if not is_tracing(frequencies):  # a traced tensor must not outlive its trace
            self._per_device[key] = frequencies
        return frequencies

    def __call__(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Tables:
        """cos and sin by layer type, ``[B or 1, S, rotary_dim]`` each, in fp32 or wider whatever the model's dtype.

        Args:
            position_ids: ``[B or 1, S]``.
        """
        wide = wide_dtype(dtype)
        # A table made in inference mode could not be saved for a gradient.
        is_step = position_ids.numel() == 1 and position_ids.device.type == "cpu" and not torch.is_grad_enabled()
        if is_step and not is_tracing(position_ids):
            return self._of_one(int(position_ids), wide)
        return self._computed(position_ids, wide)

    def _of_one(self, position: int, wide: torch.dtype) -> Tables:
        """From the tables of a block of positions, which serve many decoding steps."""
        place = position % BLOCK
        key = (position - place, wide)
        block = self._block
        if block is None or block[0] != key:
            with torch.inference_mode(False):  # it outlives the mode that it is made in
                tables = self._computed(torch.arange(key[0], key[0] + BLOCK, device="cpu")[None], wide)
            columns = {layer_type: [t.split(1, dim=1) for t in pair] for layer_type, pair in tables.items()}
            of_places = [{name: (cos[i], sin[i]) for name, (cos, sin) in columns.items()} for i in range(BLOCK)]
            self._block = block = (key, of_places)
        return dict(block[1][place])

    def _computed(self, position_ids: torch.Tensor, wide: torch.dtype) -> Tables:
        tables = {}
        for layer_type in self.layer_types:
            angles = position_ids[..., None].to(wide) * self.frequencies(layer_type, position_ids.device).to(wide)
            angles = torch.cat([angles, angles], dim=-1)
            factor = self._numbers[layer_type][1]
            tables[layer_type] = (angles.cos() * factor, angles.sin() * factor)
        return tables

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__getstate__())
        return copied

    def __getstate__(self):
        return {"layer_types": self.layer_types, "_numbers": self._numbers, "_per_device": {}, "_block": None}


def _frequencies(config: ZayaConfig, layer_type: str) -> tuple[list[float], float]:
    """Frequencies as plain numbers, and the factor on cos and sin (1 unless the RoPE type scales attention)."""
    assert config.rope_parameters is not None
    parameters = config.rope_parameters[layer_type]
    rope_type = parameters.get("rope_type", "default")
    with torch.device("cpu"), torch.no_grad():
        if rope_type != "default":
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), layer_type=layer_type)
        else:
            width = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
            frequencies, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    return frequencies.tolist(), float(factor)
