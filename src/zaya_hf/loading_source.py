"""What a load finds out before it reads weights: where they are, the config, an adapter, quantisation, places."""

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, is_peft_available
from transformers.utils.hub import cached_file, resolve_revision
from transformers.utils.peft_utils import find_adapter_config_file

from .configuration_zaya import ZayaConfig
from .json_checks import read_json_object
from .other_formats import other_format
from .weight_files import FLOAT_DTYPES, WeightFiles, check_exists, why_no_file

_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Methods whose saved weights transformers restores for any model; the others change names or layouts.
_LOADABLE_QUANTISATION = ("bitsandbytes", "torchao")
# Methods of files that may be read without them, as values times scales (`WeightFiles.multiplied_out` decides).
FP8 = ("compressed-tensors", "fp8")
UNQUANTISED = "load the unquantised checkpoint, e.g. Zyphra/ZAYA1-8B"


def download_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for what the loader would stumble over later, in words of its own."""
    for name in ("dtype", "torch_dtype"):
        given = kwargs.get(name)
        found = getattr(torch, given, None) if isinstance(given, str) else given
        if given is not None and given != "auto" and not isinstance(given, dict) and found not in FLOAT_DTYPES.values():
            floats = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES.values())
            raise ValueError(f'{name}={given!r}: it must be "auto" or one of {floats}')
    device_map = kwargs.get("device_map")
    if not isinstance(device_map, str | int | dict | torch.device | None):
        raise TypeError(
            f"device_map={device_map!r}: it must be a device, a dict of devices by module name, or a strategy"
        )
    if isinstance(device_map, dict):
        right = 'it must give devices by module name, such as {"": "cpu"}'
        if not device_map:
            raise ValueError(f"device_map is empty: {right}")
        for name, device in device_map.items():
            if not isinstance(name, str) or not isinstance(device, str | int | torch.device):
                raise TypeError(f"device_map has {name!r}: {device!r}: {right}")
    memory = kwargs.get("max_memory")
    if not isinstance(memory, dict | None):
        raise TypeError(f'max_memory={memory!r}: it must be a dict by device, such as {{"cpu": "20GB"}}')
    quantisation = kwargs.get("quantization_config")
    if not (quantisation is None or isinstance(quantisation, dict) or hasattr(quantisation, "quant_method")):
        right = "a config such as transformers.TorchAoConfig, or the same as a dict"
        raise TypeError(f"quantization_config={quantisation!r}: it must be {right}")


def wanted_dtype(config: ZayaConfig, kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a model is loaded in; `config` has the one that its files name or are stored in."""
    given = kwargs.get("dtype") or kwargs.get("torch_dtype")
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        found = config.dtype
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()


def at_one_commit(source: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`revision` as a commit, so that the config and all files agree even if the repository changes meanwhile."""
    if Path(source).is_dir():
        return {}
    wanted = {name: kwargs[name] for name in ("token", "local_files_only", "cache_dir") if kwargs.get(name) is not None}
    revision = resolve_revision(source, kwargs.get("revision"), **wanted)
    return {} if revision is None else {"revision": revision}


def read_config(
    source: str, config: Any, download: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[ZayaConfig, dict[str, Any]]:
    """The config of the load and the keyword arguments that it did not use."""
    rest = dict(kwargs)
    if isinstance(config, PreTrainedConfig):
        # A copy: loading sets dtype, name and implementations on it.
        return ZayaConfig.from_native(copy.deepcopy(config)), rest
    if not isinstance(config, str | os.PathLike | None):
        raise TypeError(f"config={config!r}: give a ZayaConfig, or the folder or Hub id of one")
    place = source if config is None else str(config)
    check_exists(place)
    folder = Path(place, download.get("subfolder") or "")
    where = str(folder / CONFIG_NAME) if Path(place).is_dir() else place
    if Path(place).is_dir() and not (folder / CONFIG_NAME).is_file():
        raise _no_config(folder)
    # The loader's arguments: as overrides of the config they would decide what "auto" means, or hide how files are
    # quantised.
    loader_s = ("dtype", "torch_dtype", "quantization_config", "output_loading_info", *_DOWNLOAD)
    held = {name: rest.pop(name) for name in loader_s if name in rest}
    try:
        loaded, unused = ZayaConfig.from_pretrained(place, return_unused_kwargs=True, **rest, **download)
    except ValueError as error:
        if str(error).startswith(("ZayaConfig:", "original ZAYA config:")):
            raise ValueError(f"{where}: {error}") from None
        raise
    except OSError as error:
        if Path(place).exists():
            raise
        given = "" if config is None else "config: "
        no_hub = f"as a Hub id it gives no {CONFIG_NAME}: {' '.join(str(error).split())}"
        raise OSError(f"{given}there is no folder {place!r}, and {no_hub}") from error
    return loaded, {**unused, **held}


def _no_config(folder: Path) -> Exception:
    """What to say where there is no config.json: what else is there, or that a save was killed."""
    left = sorted(path.name for path in folder.glob(".saving-*")) if folder.is_dir() else []
    if left:
        again = f"a save into it did not finish (its files are in {left[0]}), so save the model again"
        return FileNotFoundError(f"{folder} has no {CONFIG_NAME}; {again}")
    config = folder / CONFIG_NAME
    if config.is_symlink() or config.exists():
        return FileNotFoundError(f"{config} {why_no_file(config)}")
    found = other_format(folder)
    return FileNotFoundError(f"{folder} has no {CONFIG_NAME}") if found is None else ValueError(f"{folder} {found}")


def check_generation_config(source: str, download: Mapping[str, Any]) -> None:
    """Raise ValueError if there are generation settings that cannot be read: transformers would ignore them."""
    if Path(source).is_dir():
        file: Any = Path(source, download.get("subfolder") or "", GENERATION_CONFIG_NAME)
    else:
        file = cached_file(
            source,
            GENERATION_CONFIG_NAME,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **download,
        )
    if file is not None and Path(file).is_file():
        settings = read_json_object(file, "a generation config (remove it to use the defaults)")
        try:
            GenerationConfig.from_dict(settings)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is not a generation config: {' '.join(str(error).split())}") from None


def quantisation_method(source: str, config: ZayaConfig) -> str | None:
    """The method that the config says the files are quantised by. Raises ValueError for those that cannot be read."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in (*_LOADABLE_QUANTISATION, *FP8):
        raise ValueError(f"{source} is quantised (quantization_config: {method}); {UNQUANTISED}")
    return method


def without_fp8(source: str, config: ZayaConfig, method: str | None, files: WeightFiles) -> WeightFiles:
    """`files` as plain ones, with a warning if that took multiplying; takes the method out of `config` then.

    Raises: ValueError if the config names a method and the files are not of the one kind that can be multiplied out, or
    a scale is not finite.
    """
    plain = files.multiplied_out()
    if plain is None and method is not None:
        reason = files.quantised() or "but no tensor is stored as FP8"
        raise ValueError(f"{source} is quantised (quantization_config: {method}; {reason}); {UNQUANTISED}")
    if plain is None:
        return files
    with plain.open() as slices:
        for name, scale in plain.scales.items():
            if not slices[name].scale[...].isfinite().all():
                raise ValueError(f"{source}: {scale} has a value that is not finite; fetch the files again")
    config.__dict__.pop("quantization_config", None)
    warnings.warn(
        f"{source}: {len(plain.scales)} FP8 tensors are multiplied by their scales and held in the model's dtype, "
        "which takes as much memory as the unquantised checkpoint",
        stacklevel=3,
    )
    return plain


def check_places(cls: Any, config: ZayaConfig, device_map: Any) -> None:
    """Raise ValueError if a device map has one of two tied tensors on disk: the loader would leave the other empty."""
    if not is_on_disk(device_map) or not config.tie_word_embeddings:
        return
    for tied, module in (getattr(cls, "_tied_weights_keys", None) or {}).items():
        places = {name.removesuffix(".weight"): _place(name, device_map) for name in (module, tied)}
        if len(set(places.values())) > 1 and "disk" in places.values():
            given = " and ".join(f"{name} on {place}" for name, place in places.items())
            raise ValueError(
                f"device_map has {given}, but they are one tensor (tie_word_embeddings): give them one place"
            )


def _place(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Where a device map puts a tensor: the longest entry that names it or a module around it decides."""
    around = [key for key in device_map if not key or name == key or name.startswith(f"{key}.")]
    return str(device_map[max(around, key=len)]) if around else None


def adapter_path(kwargs: Mapping[str, Any]) -> str | None:
    """Where the Auto classes found an adapter. They always pass `adapter_kwargs` when peft is installed."""
    return (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")


def base_of_adapter(source: str, download: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """The base model of a folder or repository that holds nothing but a PEFT adapter; None for any other."""
    if not is_peft_available() or adapter_path(kwargs) is not None or (Path(source) / CONFIG_NAME).exists():
        return None
    found = find_adapter_config_file(source, **download)
    if found is None:
        return None
    base = read_json_object(found, "a PEFT adapter config").get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(f"{found}: base_model_name_or_path={base!r}: it must be the folder or Hub id of a model")
    return base


def is_on_disk(device_map: Any) -> bool:
    return isinstance(device_map, dict) and "disk" in map(str, device_map.values())


__all__ = [
    "FP8",
    "UNQUANTISED",
    "adapter_path",
    "at_one_commit",
    "base_of_adapter",
    "check_arguments",
    "check_generation_config",
    "check_places",
    "download_arguments",
    "is_on_disk",
    "quantisation_method",
    "read_config",
    "wanted_dtype",
    "without_fp8",
]
