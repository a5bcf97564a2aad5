"""Loading every published layout and saving one: the methods that `ZayaPreTrainedModel` adds to transformers'.

The combined layout goes through transformers' own loader. The original layout is handed to the same loader as a lazy
state dict in combined names, so that `dtype`, `device_map` and the rest work alike and nothing is registered globally.
In both cases the names and shapes in the files are compared with the model's before anything is read.
"""

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

from .checkpoints.layouts import detect_layout
from .configuration_zaya import ZayaConfig
from .json_checks import read_json_object
from .loading_checks import Matched, match_tensors
from .saving import check_target, save_aside, save_elsewhere
from .stock import stock_differences
from .weight_files import WeightFiles, check_exists, find_weight_files

_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Methods whose saved weights transformers restores for any model; the others change names or layouts.
_LOADABLE_QUANTISATION = ("bitsandbytes", "torchao")
_UNQUANTISED = "load the unquantised checkpoint (and quantise it while loading, with quantization_config=...)"


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
        that names it; head tensors that the class has no use for are dropped. Weights are read as safetensors only.
        Folders of the original layout with `model_type` "zaya" also load through the Auto classes; those with "smoe"
        through this method only, because the Auto classes look the type up before anything of ours is asked.

        Raises: ValueError or OSError (FileNotFoundError), one line, naming what is missing, unknown, of a wrong type or
        shape or contradictory: tensors, shards, a tie flag, a config field, a JSON file, a format that is not
        supported. TypeError for a `config` that is neither a config nor a place.
        """
        stock: Any = super()
        if kwargs.get("gguf_file") is not None:
            raise ValueError("gguf_file: GGUF files are not supported; load the safetensors checkpoint instead")
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: pickled weights are not supported; save them as safetensors first")
        state_dict = kwargs.pop("state_dict", None)
        if pretrained_model_name_or_path is None:
            if state_dict is None or not isinstance(config, PreTrainedConfig):
                raise ValueError("from_pretrained: give a folder or Hub id, or state_dict together with config")
            config = ZayaConfig.from_native(copy.deepcopy(config))
            return _load_tensors(cls, stock, state_dict, "state_dict", config, model_args, kwargs)
        if state_dict is not None:
            raise ValueError("from_pretrained: give a folder or Hub id, or state_dict, not both")

        source = str(pretrained_model_name_or_path)
        check_exists(source)
        kwargs |= _one_commit(source, kwargs)
        download = _download_arguments(kwargs)
        base = _base_of_adapter(source, download, kwargs)
        if base is not None:
            # The revision is the adapter's.
            source, download = base, {name: value for name, value in download.items() if name != "revision"}
        config, kwargs = _read_config(source, config, download, kwargs)
        prequantised = _is_restorable(source, config)
        files = find_weight_files(source, download, kwargs.get("variant"))
        if cls.can_generate() and kwargs.get("generation_config") is None:  # type: ignore[attr-defined]
            _check_generation_config(source, download)
        reason = None if prequantised else files.quantised()
        if reason is not None:
            raise ValueError(f"{source} is quantised ({reason}); {_UNQUANTISED}")
        if config.dtype is None:
            config.dtype = files.float_dtype()

        if detect_layout(files.tensors) == "original":
            if base is not None or kwargs.get("adapter_kwargs"):
                raise ValueError(f"{source}, the base of an adapter, is in the original layout; {_convert(source)}")
            with files.open() as slices:
                return _load_tensors(cls, stock, slices, source, config, model_args, kwargs, files)
        matched = None
        # Names in other quantised files and under a key mapping are not the model's.
        if not prequantised and kwargs.get("key_mapping") is None:
            matched = _match(cls, files.tensors, source, config, model_args, kwargs)
            if matched.tied_head is not None:
                with files.open() as slices:
                    matched.check_tied_head(slices)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = stock.from_pretrained(
            pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
        )
        if matched is not None and base is None:
            matched.confirm(info)
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save in the combined layout, whatever layout the model was loaded from.

        Takes what `PreTrainedModel.save_pretrained` takes. The files are written aside and then moved into place, and
        weight files that an earlier save left in the folder are removed, so that the next load reads these. Warns once
        per model with `stock_differences()` when transformers' own class would compute something else from the folder.

        Call it in all processes or in the main one alone: the others (`is_main_process=False`) do not touch the folder.
        A save that is killed leaves the old model, the new one, or a folder that fails to load with the name of what is
        missing, never a mix; `zaya_hf.saving` says how. That holds for whole models, not for adapter files.

        Raises: ValueError if the config has become invalid, NotADirectoryError if `save_directory` is a file or a
        dangling link or lies inside one; the folder is as it was then.
        """
        folder, stock, model = Path(save_directory), super(), self
        arguments = {"is_main_process": is_main_process, "state_dict": state_dict, "max_shard_size": max_shard_size}
        arguments |= {"variant": variant, **kwargs, "save_original_format": False}
        _save(stock, model, folder, arguments)
        if push_to_hub and is_main_process:
            names = ("commit_message", "create_pr", "private", "revision", "token")
            given = {name: kwargs[name] for name in names if name in kwargs}
            model.push_to_hub(  # type: ignore[attr-defined]
                kwargs.get("repo_id", folder.name), max_shard_size=max_shard_size, **given
            )

    def stock_differences(self) -> list[tuple[str, str]]:
        """Pairs (switch, why) for what transformers' own `zaya` class computes differently; empty if nothing."""
        return stock_differences(self)


def _convert(source: str) -> str:
    return f"convert it once with `zaya convert {source} OUT` and load OUT"


# --- before reading --------------------------------------------------------------------------------------------------


def _download_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}


def _one_commit(source: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`revision` as a commit, so that the config and all files agree even if the repository changes meanwhile."""
    if Path(source).is_dir():
        return {}
    wanted = {name: kwargs[name] for name in ("token", "local_files_only", "cache_dir") if kwargs.get(name) is not None}
    revision = resolve_revision(source, kwargs.get("revision"), **wanted)
    return {} if revision is None else {"revision": revision}


def _read_config(
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
        raise FileNotFoundError(f"{folder} has no {CONFIG_NAME}{_interrupted(folder)}")
    # `dtype` is the loader's argument; as a config override it would also decide what "auto" means.
    held = {
        name: rest.pop(name) for name in ("dtype", "torch_dtype", "output_loading_info", *_DOWNLOAD) if name in rest
    }
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


def _interrupted(folder: Path) -> str:
    """What to add to "there is no config.json" where a save was killed while the files changed over."""
    if not folder.is_dir() or not (left := sorted(path.name for path in folder.glob(".saving-*"))):
        return ""
    return f"; a save into it did not finish (its files are in {left[0]}), so save the model again"


def _check_generation_config(source: str, download: Mapping[str, Any]) -> None:
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


def _is_restorable(source: str, config: ZayaConfig) -> bool:
    """Whether the files are quantised in a way that transformers restores by itself. Raises ValueError for others."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return False
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in _LOADABLE_QUANTISATION:
        raise ValueError(f"{source} is quantised (quantization_config: {method}); {_UNQUANTISED}")
    return True


def _base_of_adapter(source: str, download: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str | None:
    """The base model of a folder or repository that holds nothing but a PEFT adapter; None for any other."""
    if not is_peft_available() or kwargs.get("adapter_kwargs") or (Path(source) / CONFIG_NAME).exists():
        return None
    found = find_adapter_config_file(source, **download)
    if found is None:
        return None
    base = read_json_object(found, "a PEFT adapter config").get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(f"{found}: base_model_name_or_path={base!r}: it must be the folder or Hub id of a model")
    return base


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


# --- loading through a state dict ------------------------------------------------------------------------------------


def _load_tensors(
    cls: Any,
    stock: Any,
    tensors: Mapping[str, Any],
    source: str,
    config: ZayaConfig,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
    files: WeightFiles | None = None,
) -> Any:
    """Load tensors or lazy slices of either layout; what a path would have provided is set here."""
    if kwargs.get("quantization_config") is not None:
        raise ValueError(f"quantization_config: {source} cannot be quantised while loading; {_convert(source)}")
    no_disk = ValueError(f"{source}: disk offload needs the combined layout; {_convert(source)}")
    device_map = kwargs.get("device_map")
    if isinstance(device_map, dict) and "disk" in map(str, device_map.values()):
        raise no_disk
    matched = _match(cls, files.tensors if files is not None else tensors, source, config, model_args, kwargs)
    matched.check_tied_head(tensors)
    wants_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = stock.from_pretrained(
            None, *model_args, config=config, state_dict=matched.lazy(tensors), output_loading_info=True, **kwargs
        )
    except ValueError as error:
        # An automatic device_map ran out of memory, and there is no file that the loader could leave tensors in.
        if "offload_folder" in str(error):
            raise no_disk from None
        raise
    if "disk" in map(str, (getattr(model, "hf_device_map", None) or {}).values()):
        raise no_disk
    matched.confirm(info)
    info["unexpected_keys"] = {*info["unexpected_keys"], *matched.dropped}
    if files is not None:
        model.config.name_or_path = model.name_or_path = source
        _read_generation_config(model, source, kwargs)
    return (model, info) if wants_info else model


def _read_generation_config(model: Any, source: str, kwargs: Mapping[str, Any]) -> None:
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **_download_arguments(kwargs))
    except OSError:
        # None in the checkpoint: the one made from the model's config stays.
        return


# --- saving ----------------------------------------------------------------------------------------------------------


def _save(stock: Any, model: Any, folder: Path, arguments: dict[str, Any]) -> None:
    model.config.validate()
    check_target(folder)
    if getattr(model, "_hf_peft_config_loaded", False) or arguments.get("distributed_checkpoint"):
        # Adapter files only, or files that all processes write together: nothing here to be replaced.
        stock.save_pretrained(folder, **arguments)
    elif not model.should_save_on_this_rank(arguments["is_main_process"]):
        save_elsewhere(lambda private: stock.save_pretrained(private, **arguments))
    else:
        save_aside(folder, arguments["variant"], lambda aside: stock.save_pretrained(aside, **arguments))
    differences = stock_differences(model)
    # Once, not at every checkpoint of a training run.
    if differences and differences != getattr(model, "_warned_stock_differences", None):
        model._warned_stock_differences = differences
        listed = "; ".join(f"{switch}: {why}" for switch, why in differences)
        warnings.warn(f"{folder}: transformers' own zaya class computes other results: {listed}", stacklevel=3)


__all__ = ["ZayaLoadingMixin"]
