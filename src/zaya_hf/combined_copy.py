"""A checkpoint of another form written as plain files of the combined layout, one shard in memory at a time.

For what transformers' loader can do from files only: leaving weights on disk, and quantising while loading.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from .weight_files import FLOAT_DTYPES, LazyProduct, LazyStack

_SHARD_BYTES = 2 * 2**30


def write_combined(
    folder: Path, tensors: Mapping[str, Any], dtype: torch.dtype, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write tensors or lazy slices, by their combined names, as safetensors shards and an index into `folder`.

    Args:
        folder: exists and is empty.
        dtype: of weights that are multiplied out when they are read; the others keep theirs.
        shard_bytes: a shard is closed once it has as many; a single larger tensor still is one shard.

    Raises: OSError where the disk is full, before anything is written if that can be told, and from the disk.
    """
    needed, free = sum(_bytes_of(lazy, dtype) for lazy in tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{folder.parent}: a copy in the combined layout takes {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are "
            "free; give a folder on a larger disk (offload_folder, or TMPDIR where the model is quantised)"
        )
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size, number = 0, 1
    for name, lazy in tensors.items():
        value = lazy[...].contiguous()
        if _is_multiplied_out(lazy):
            value = value.to(dtype)
        shard[name] = value
        size += math.prod(value.shape) * value.element_size()
        if size >= shard_bytes:
            weight_map |= _write(folder, number, shard)
            shard, size, number = {}, 0, number + 1
    if shard:
        weight_map |= _write(folder, number, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def _bytes_of(lazy: Any, dtype: torch.dtype) -> int:
    """What a tensor takes in the copy."""
    if isinstance(lazy, torch.Tensor):
        return lazy.numel() * lazy.element_size()
    if not _is_multiplied_out(lazy):
        name = lazy.get_dtype()
        dtype = FLOAT_DTYPES.get(name) or getattr(torch, name.removeprefix("torch."))
    return math.prod(lazy.get_shape()) * dtype.itemsize


def _is_multiplied_out(lazy: Any) -> bool:
    parts = lazy.parts if isinstance(lazy, LazyStack) else [lazy]
    return any(isinstance(part, LazyProduct) for part in parts)


def _write(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> dict[str, str]:
    file = f"model-{number:05d}.safetensors"
    try:
        save_file(shard, folder / file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder / file} cannot be written: {error}") from None
    return dict.fromkeys(shard, file)


__all__ = ["write_combined"]
