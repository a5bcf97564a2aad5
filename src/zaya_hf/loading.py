"""Loading every published layout and saving one: the methods that `ZayaPreTrainedModel` adds to transformers'.

The combined layout goes through transformers' own loader. The original layout is handed to the same loader as a lazy
state dict in combined names, so that `dtype`, `device_map` and the rest work alike and nothing is registered globally.
In both cases the names and shapes in the files are compared with the model's before anything is read.
"""

import copy
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, is_peft_available
from transformers.utils.hub import resolve_revision
from transformers.utils.peft_utils import find_adapter_config_file

from zaya_hf.checkpoints.layouts import detect_layout
from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.loading_checks import Matched, match_tensors
from zaya_hf.stock import stock_differences
from zaya_hf.weight_files import WeightFiles, find_weight_files

_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Methods whose saved weights transformers restores for any model; the others change names or layouts.
_LOADABLE_QUANTISATION = ("bitsandbytes", "torchao")
_CONVERT_FIRST = "convert it once with `zaya convert {} OUT` and load OUT"


class ZayaLoadingMixin:
    """`from_pretrained`, `save_pretrained` and `stock_differences` of a ZAYA model; precedes `PreTrainedModel`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: PreTrainedConfig | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint in the combined or the original layout, from a folder or the Hub, whole or sharded.

        Takes what `PreTrainedModel.from_pretrained` takes and returns the same: the model in eval mode, or (model,
        info) with `output_loading_info=True`. A task head that the files do not have is initialised, with a warning
        that names it; head tensors that the class has no use for are dropped. Files are read as safetensors only.

        Raises: ValueError or FileNotFoundError, one line, naming what is missing, unknown, of a wrong shape or
        contradictory: tensors, shards, a tie flag, a config field, a format that is not supported.
        """
        loader: Any = super()
        if kwargs.get("gguf_file") is not None:
            raise ValueError("gguf_file: GGUF files are not supported; load the safetensors checkpoint instead")
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: pickled weights are not supported; save them as safetensors first")
        state_dict = kwargs.pop("state_dict", None)
        if pretrained_model_name_or_path is None:
            if state_dict is None or not isinstance(config, PreTrainedConfig):
                raise ValueError("from_pretrained: give a folder or Hub id, or state_dict together with config")
            config = ZayaConfig.from_native(copy.deepcopy(config))
            return _load_tensors(cls, loader, state_dict, "state_dict", config, model_args, kwargs)
        if state_dict is not None:
            raise ValueError("from_pretrained: give a folder or Hub id, or state_dict, not both")

        source = str(pretrained_model_name_or_path)
        download = {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}
        if not os.path.isdir(source):
            # One commit for the config and for every file, also when the repository changes meanwhile.
            wanted = {name: value for name, value in download.items() if name in ("token", "local_files_only", "cache_dir")}
            revision = resolve_revision(source, download.get("revision"), **wanted)
            if revision is not None:
                download["revision"] = kwargs["revision"] = revision
        base = _base_of_adapter(source, download, kwargs)
        if base is not None:
            source, download = base, {name: value for name, value in download.items() if name != "revision"}
        config, kwargs = _read_config(source, config, download, kwargs)
        prequantised = _check_quantisation(source, config)
        files = find_weight_files(source, download, kwargs.get("variant"))
        reason = None if prequantised else files.quantised()
        if reason is not None:
            raise ValueError(f"{source} is quantised ({reason}); {_QUANTISED_WAY_OUT}")
        if config.dtype is None:
            config.dtype = files.float_dtype()

        original = detect_layout(files.tensors) == "original"
        if original:
            if base is not None or kwargs.get("adapter_kwargs"):
                raise ValueError(f"{source} is in the original layout, under an adapter; {_CONVERT_FIRST.format(source)}")
            with files.open() as slices:
                return _load_tensors(cls, loader, slices, source, config, model_args, kwargs, files)
        checked = not prequantised and kwargs.get("key_mapping") is None
        matched = _match(cls, files.tensors, source, config, model_args, kwargs) if checked else None
        if matched is not None:
            _check_tied(matched, files, source)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = loader.from_pretrained(
            pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
        )
        if matched is not None and base is None:
            matched.confirm(info)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save in the combined layout, whatever layout the model was loaded from.

        Takes what `PreTrainedModel.save_pretrained` takes. Weight files that an earlier save left in the folder are
        removed, so that the next load reads these. Warns with `stock_differences()` when transformers' own class
        would compute something else from the folder.

        Raises: ValueError if the config has become invalid (nothing is written then), NotADirectoryError if
        `save_directory` is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"{folder} is a file; give a folder to save into")
        model: Any = self
        model.config.validate()
        kwargs["save_original_format"] = False
        before = _weight_files_in(folder, kwargs.get("variant"))
        loader: Any = super()
        loader.save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True) and not getattr(self, "_hf_peft_config_loaded", False):
            _remove_stale(folder, kwargs.get("variant"), before)
        differences = stock_differences(model)
        if differences:
            listed = "; ".join(f"{switch}: {why}" for switch, why in differences)
            warnings.warn(f"{folder}: transformers' own zaya class computes other results: {listed}", stacklevel=2)

    def stock_differences(self) -> list[tuple[str, str]]:
        """Pairs (switch, why) for what transformers' own `zaya` class computes differently; empty if nothing."""
        model: Any = self
        return stock_differences(model)


_QUANTISED_WAY_OUT = "load the unquantised checkpoint (and quantise it while loading, with quantization_config=...)"


# --- before reading --------------------------------------------------------------------------------------------------


def _read_config(
    source: str, config: Any, download: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[ZayaConfig, dict[str, Any]]:
    """The config of the load and the keyword arguments that it did not use."""
    rest = dict(kwargs)
    if isinstance(config, PreTrainedConfig):
        # A copy: loading sets dtype, name and implementations on it.
        return ZayaConfig.from_native(copy.deepcopy(config)), rest
    # `dtype` is the loader's argument; as a config override it would also decide what "auto" means.
    held = {name: rest.pop(name) for name in ("dtype", "torch_dtype", "output_loading_info") if name in rest}
    overrides = {name: value for name, value in rest.items() if name not in _DOWNLOAD}
    place = source if config is None else str(config)
    if os.path.isdir(place) and not os.path.isfile(os.path.join(place, download.get("subfolder") or "", CONFIG_NAME)):
        raise FileNotFoundError(f"{os.path.join(place, download.get('subfolder') or '')} has no {CONFIG_NAME}")
    if not os.path.exists(place) and (place.startswith((".", "~", os.sep)) or place.count("/") > 1):
        raise FileNotFoundError(f"there is no folder {place} (and it is no Hub id, which has the form name/name)")
    loaded, unused = ZayaConfig.from_pretrained(place, return_unused_kwargs=True, **overrides, **download)
    kept = {name: rest[name] for name in _DOWNLOAD if name in rest}
    return loaded, {**unused, **kept, **held}


def _check_quantisation(source: str, config: ZayaConfig) -> bool:
    """Whether the files are quantised in a way that transformers restores by itself."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return False
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in _LOADABLE_QUANTISATION:
        raise ValueError(f"{source} is quantised (quantization_config: {method}); {_QUANTISED_WAY_OUT}")
    return True


def _base_of_adapter(source: str, download: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """The base model of a folder or repository that holds nothing but a PEFT adapter; None for any other."""
    if not is_peft_available() or kwargs.get("adapter_kwargs"):
        return None
    found = find_adapter_config_file(source, **{k: v for k, v in download.items() if k != "force_download"})
    if found is None or os.path.exists(os.path.join(source, CONFIG_NAME)):
        return None
    import json

    return str(json.loads(Path(found).read_text(encoding="utf-8"))["base_model_name_or_path"])


def _match(
    cls: Any,
    tensors: Mapping[str, Any],
    source: str,
    config: ZayaConfig,
    model_args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Matched:
    """Compare names and shapes with those of the model, built without memory. Raises ValueError."""
    with torch.device("meta"):
        probe = cls(copy.deepcopy(config), *model_args)
    matched = match_tensors(probe, tensors, source)
    matched.check(ignore_mismatched_sizes=bool(kwargs.get("ignore_mismatched_sizes")))
    return matched


def _check_tied(matched: Matched, files: WeightFiles, source: str) -> None:
    if matched.tied_head is None:
        return
    with files.open() as slices:
        matched.check_tied_head(slices, source)


# --- loading through a state dict ------------------------------------------------------------------------------------


def _load_tensors(
    cls: Any,
    loader: Any,
    tensors: Mapping[str, Any],
    source: str,
    config: ZayaConfig,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    files: WeightFiles | None = None,
) -> Any:
    """Load tensors or lazy slices of either layout; what a path would have provided is set here."""
    if kwargs.get("quantization_config") is not None:
        raise ValueError(f"quantization_config: {source} cannot be quantised while loading; {_CONVERT_FIRST.format(source)}")
    disk = f"disk offload is not possible for {source}, which is in the original layout; {_CONVERT_FIRST.format(source)}"
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict) and "disk" in map(str, device_map.values()):
        raise ValueError(disk)
    matched = _match(cls, files.tensors if files is not None else tensors, source, config, model_args, kwargs)
    if matched.tied_head is not None:
        matched.check_tied_head(tensors, source)
    wants_info = kwargs.pop("output_loading_info", False)
    if files is None:
        generation_source = None
    else:
        generation_source = source
    try:
        model, info = loader.from_pretrained(
            None, *model_args, config=config, state_dict=matched.lazy(tensors), output_loading_info=True, **kwargs
        )
    except ValueError as error:
        # An automatic device_map ran out of memory, and there is no file that the loader could leave tensors in.
        if "offload_folder" in str(error):
            raise ValueError(disk) from None
        raise
    if "disk" in map(str, (getattr(model, "hf_device_map", None) or {}).values()):
        raise ValueError(disk)
    matched.confirm(info)
    info["unexpected_keys"] = type(info["unexpected_keys"])([*info["unexpected_keys"], *matched.dropped])
    if generation_source is not None:
        model.config.name_or_path = model.name_or_path = generation_source
        _read_generation_config(model, generation_source, kwargs)
    return (model, info) if wants_info else model


def _read_generation_config(model: Any, source: str, kwargs: Mapping[str, Any]) -> None:
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    download = {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **download)
    except OSError:
        # None in the checkpoint: the one made from the model's config stays.
        return


# --- saving ----------------------------------------------------------------------------------------------------------


def _weight_files_in(folder: Path, variant: str | None) -> dict[str, tuple[int, int]]:
    """Weight files of this variant in a folder, each with what tells a rewritten one from an old one."""
    stem = "model" if variant is None else rf"model\.{re.escape(variant)}"
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?|model\.safetensors\.index(\.\w+)?\.json")
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_file() and ours.fullmatch(path.name):
                stat = path.stat()
                found[path.name] = (stat.st_mtime_ns, stat.st_ino)
    return found


def _remove_stale(folder: Path, variant: str | None, before: Mapping[str, tuple[int, int]]) -> None:
    """Remove weight files that were there before the save and that the save did not write."""
    after = _weight_files_in(folder, variant)
    for name, stamp in before.items():
        if after.get(name) == stamp:
            (folder / name).unlink()


__all__ = ["ZayaLoadingMixin"]
