"""Finding the safetensors files of a checkpoint, in a local folder or on the Hub, and reading them lazily.

Everything that can be wrong with the files themselves is reported here, before any tensor is read: a missing shard, an
index that does not fit its shards, a format that zaya_hf does not load.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .json_checks import json_kind, read_json_object
from .other_formats import other_format

# safetensors names of the floating dtypes that a plain checkpoint is stored in
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# endings of the scales that quantised files carry beside their weights
_QUANTISED_NAMES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale", "_blocks", "_scales")


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; `dtype` is safetensors' name for it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of one checkpoint. `source` is the folder or Hub id as the caller gave it."""

    source: str
    files: tuple[str, ...]
    tensors: dict[str, TensorHeader]
    #: weights in FP8 -> their scales, see `multiplied_out`
    scales: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        """Yield a lazy slice per tensor name (indexing it with `[...]` reads it)."""
        with ExitStack() as stack:
            slices: dict[str, Any] = {}
            for file in self.files:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                    slices[name] = handle.get_slice(name)
            products = {name: LazyProduct(slices[name], slices[scale]) for name, scale in self.scales.items()}
            used = set(self.scales.values())
            yield {name: products.get(name, part) for name, part in slices.items() if name not in used}

    def float_dtype(self) -> torch.dtype | None:
        """The floating dtype that most values are stored in; None if there is none.

        Not that of the first tensor: a bf16 file may keep its balancing biases in fp32, and those come first in it.
        Nor that of weights in FP8, which come out in fp32.
        """
        counts: Counter[str] = Counter()
        for name, header in self.tensors.items():
            if header.dtype in FLOAT_DTYPES and name not in self.scales:
                counts[header.dtype] += math.prod(header.shape)
        return FLOAT_DTYPES[counts.most_common(1)[0][0]] if counts else None

    def quantised(self) -> str | None:
        """Why these are quantised weights, in words; None if they are plain."""
        for name, header in self.tensors.items():
            if header.dtype not in FLOAT_DTYPES:  # a ZAYA model has no whole numbers
                return f"tensor {name} is stored as {header.dtype}"
            if name.endswith(_QUANTISED_NAMES):
                return f"tensor {name} is the scale of a quantised one"
        return None

    def multiplied_out(self) -> "WeightFiles | None":
        """The same checkpoint with weights that are read as FP8 values times their scales, in fp32.

        None unless that is all that is quantised: every such weight ``X`` is F8_E4M3 and has a float tensor ``X_scale``
        with one scale per output row or one in all.
        """
        scales = {}
        for name, header in self.tensors.items():
            if header.dtype != "F8_E4M3":
                continue
            scale = self.tensors.get(f"{name}_scale")
            rows = header.shape[:-1]
            if scale is None or scale.dtype not in FLOAT_DTYPES or scale.shape not in ((*rows, 1), rows, (1,), ()):
                return None
            scales[name] = f"{name}_scale"
        used = set(scales.values())
        tensors = {
            name: replace(header, dtype="F32") if name in scales else header
            for name, header in self.tensors.items()
            if name not in used
        }
        plain = replace(self, tensors=tensors, scales=scales)
        return plain if scales and plain.quantised() is None else None


class LazyStack:
    """Tensors of one shape, stacked on a new first dimension when they are read (one at a time, into place).

    Has what transformers' loader asks of a safetensors slice: `get_shape()`, `get_dtype()` and indexing.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def get_shape(self) -> list[int]:
        return [len(self.parts), *_shape_of(self.parts[0])]

    def get_dtype(self) -> str:
        first = self.parts[0]
        return str(first.dtype if isinstance(first, torch.Tensor) else first.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if index[0] is Ellipsis and len(index) > 1:
            return self[...][index]
        first, rest = (slice(None), (Ellipsis,)) if index[0] is Ellipsis else (index[0], index[1:] or (Ellipsis,))
        if isinstance(first, int):
            return self.parts[first][rest]
        chosen = self.parts[first]
        if not chosen:
            return torch.stack([self.parts[0][rest]])[:0]
        row = chosen[0][rest]
        out = row.new_empty((len(chosen), *row.shape))
        out[0] = row
        for place, part in enumerate(chosen[1:], start=1):
            out[place] = part[rest]
        return out


class LazyProduct:
    """A weight times its scales, ``[..., rows, 1]`` or ``[..., rows]`` or one in all, in fp32 when it is read."""

    def __init__(self, weight: Any, scale: Any) -> None:
        self.weight, self.scale = weight, scale

    def get_shape(self) -> list[int]:
        return _shape_of(self.weight)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        weight, scale = self.weight[...].to(torch.float32), self.scale[...].to(torch.float32)
        if scale.shape == weight.shape[:-1]:
            scale = scale[..., None]
        product: torch.Tensor = (weight * scale)[index]
        return product


def _shape_of(tensor: Any) -> list[int]:
    return list(tensor.shape) if isinstance(tensor, torch.Tensor) else list(tensor.get_shape())


def check_exists(source: str) -> None:
    """Raise (one line) if `source` can be no model: FileNotFoundError for a path to nothing, ValueError for a file."""
    if source.endswith(".gguf"):
        raise ValueError(f"{source}: GGUF files are not supported; load the safetensors checkpoint it was made from")
    if Path(source).is_file():
        raise ValueError(f"{source} is a file; give the folder that holds it and {CONFIG_NAME}")
    path_like = source.startswith((".", "~", os.sep)) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)
    if path_like and not (source and Path(source).exists()):
        raise FileNotFoundError(f"there is no folder {source!r} (and it is no Hub id, which has the form name/name)")


def find_weight_files(source: str, download: Mapping[str, Any], variant: str | None = None) -> WeightFiles:
    """Locate (or download) a checkpoint's safetensors files and read their headers.

    `download` holds the keyword arguments of `cached_file`: `revision`, `token`, `subfolder`, `cache_dir`, ...

    Raises: FileNotFoundError for a missing folder, a missing shard or a folder without weights; OSError from the Hub;
    ValueError for formats other than safetensors and for an index that contradicts its shards.
    """
    check_exists(source)
    folder = Path(source, download.get("subfolder") or "") if Path(source).is_dir() else None
    find = _in_folder(folder) if folder is not None else _in_repository(source, download)
    single = find(_with_variant(SAFE_WEIGHTS_NAME, variant))
    if single is not None:
        return _read_headers(source, [single], None)
    index_file = find(_with_variant(SAFE_WEIGHTS_INDEX_NAME, variant))
    if index_file is None:
        raise _no_weights(source, folder, variant)
    weight_map = _read_index(index_file)
    files: list[str] = []
    for shard in sorted(set(weight_map.values())):
        file = find(shard)
        if file is None:
            path = Path(index_file).parent / shard
            there = path.is_symlink() or path.exists()
            state = why_no_file(path) if there else "is missing"
            raise FileNotFoundError(f"{folder or source}: shard {shard} {state}; {Path(index_file).name} lists it")
        files.append(file)
    return _read_headers(source, files, weight_map)


def _with_variant(name: str, variant: str | None) -> str:
    # model.safetensors -> model.<variant>.safetensors, model.safetensors.index.json -> ...index.<variant>.json
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _in_folder(folder: Path) -> Callable[[str], str | None]:
    return lambda name: str(folder / name) if (folder / name).is_file() else None


def _in_repository(repository: str, download: Mapping[str, Any]) -> Callable[[str], str | None]:
    def find(name: str) -> str | None:
        found = cached_file(repository, name, _raise_exceptions_for_missing_entries=False, **download)
        return None if found is None else str(found)

    return find


def _no_weights(source: str, folder: Path | None, variant: str | None) -> Exception:
    names = sorted(path.name for path in folder.iterdir()) if folder is not None and folder.is_dir() else []
    where = folder or source
    single, index = (_with_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    for name in {single, index} & set(names):
        assert folder is not None
        return FileNotFoundError(f"{folder / name} {why_no_file(folder / name)}")
    if any(name.endswith(".safetensors") for name in names):
        return FileNotFoundError(f"{where} has safetensors files but neither {single} nor {index}")
    found = other_format(folder) if folder is not None else None
    if found is not None:
        return ValueError(f"{where} {found}")
    return FileNotFoundError(f"{where} has no weights: neither {single} nor {index}")


def why_no_file(path: Path) -> str:
    """In words, why something that is there is no file."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist; fetch it again"
    return f"is a {'folder' if path.is_dir() else 'device or pipe'}, not a file"


def _read_index(index_file: str) -> dict[str, str]:
    weight_map = read_json_object(index_file, "a safetensors index").get("weight_map")
    right = 'weight_map must be an object like {"model.norm.weight": "model-00001-of-00002.safetensors"}'
    if not isinstance(weight_map, dict) or not weight_map:
        given = "an empty one" if weight_map == {} else json_kind(weight_map)
        raise ValueError(f"{index_file} is not a safetensors index: {right}, not {given}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"{index_file} is not a safetensors index: {right}; {tensor} has {json_kind(shard)}")
        # A shard lies beside its index: an index must not point anywhere else on the disk.
        if Path(shard).name != shard or shard in ("", "..") or "\0" in shard:
            raise ValueError(f"{index_file} lists the shard {shard!r}, which is not a plain file name")
    return dict(weight_map)


def _read_headers(source: str, files: Sequence[str], weight_map: Mapping[str, str] | None) -> WeightFiles:
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118
                    if name in tensors:
                        first = Path(tensors[name].file).name
                        raise ValueError(f"tensor {name} is in two shards: {first} and {Path(file).name}")
                    part = handle.get_slice(name)
                    tensors[name] = TensorHeader(file, part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}); fetch it again") from None
    for name, shard in (weight_map or {}).items():
        if name not in tensors:
            raise ValueError(f"tensor {name} is not in {shard}, though the index of {source} says so")
    return WeightFiles(source, tuple(files), tensors)
