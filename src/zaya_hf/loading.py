"""Loading every published layout and saving one: the methods that `ZayaPreTrainedModel` adds to transformers'.

The combined layout goes through transformers' own loader. The original layout is handed to the same loader as a lazy
state dict in combined names, so that `dtype`, `device_map` and the rest work alike and nothing is registered globally.
In both cases the names and shapes in the files are compared with the model's before anything is read.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from .checkpoints.layouts import detect_layout
from .combined_copy import write_combined
from .configuration_zaya import ZayaConfig
from .loading_checks import Matched, match_tensors
from .loading_source import (
    FP8,
    UNQUANTISED,
    adapter_path,
    at_one_commit,
    base_of_adapter,
    check_arguments,
    check_generation_config,
    check_places,
    download_arguments,
    is_on_disk,
    quantisation_method,
    read_config,
    wanted_dtype,
    without_fp8,
)
from .quantised_loading import check_quantiser, make_linears_plain, settle_quantised
from .remote_code import refuse_own_code
from .saving import check_target, save_aside, save_elsewhere
from .stock import stock_differences
from .temporary_folders import keep_while_alive, make_temporary, remove_temporary
from .weight_files import WeightFiles, check_exists, find_weight_files


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

        Experts in FP8 with one scale per row are multiplied out, with a warning. Where weights of the original layout
        shall stay on disk (`device_map`), they are written to `offload_folder` in the combined layout first, and
        removed with the model; where they shall be quantised, to the system's temporary folder while they load. After
        quantising (`quantization_config`) a warning says what share of the weights was left as it was.

        Raises: ValueError or OSError (FileNotFoundError), one line, naming what is missing, unknown, of a wrong type or
        shape or contradictory: tensors, shards, a tie flag, a config field, a JSON file, a format that is not
        supported. TypeError for a `config` that is neither a config nor a place, and for other arguments of no use.
        """
        stock: Any = super()
        if kwargs.get("gguf_file") is not None:
            raise ValueError("gguf_file: GGUF files are not supported; load the safetensors checkpoint instead")
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False: pickled weights are not supported; save them as safetensors first")
        check_arguments(kwargs)
        state_dict = kwargs.pop("state_dict", None)
        if pretrained_model_name_or_path is None:
            if state_dict is None or not isinstance(config, PreTrainedConfig):
                raise ValueError("from_pretrained: give a folder or Hub id, or state_dict together with config")
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"state_dict is a {type(state_dict).__name__}: it must be a dict of tensors by name")
            config = ZayaConfig.from_native(copy.deepcopy(config))
            return _load_tensors(cls, stock, state_dict, "state_dict", config, model_args, kwargs)
        if state_dict is not None:
            raise ValueError("from_pretrained: give a folder or Hub id, or state_dict, not both")

        source = str(pretrained_model_name_or_path)
        check_exists(source)
        kwargs |= at_one_commit(source, kwargs)
        download = download_arguments(kwargs)
        base = base_of_adapter(source, download, kwargs)
        if base is not None:
            # The revision is the adapter's.
            source, download = base, {name: value for name, value in download.items() if name != "revision"}
        config, kwargs = read_config(source, config, download, kwargs)
        check_places(cls, config, kwargs.get("device_map"))
        method = quantisation_method(source, config)
        files = find_weight_files(source, download, kwargs.get("variant"))
        if method is None or method in FP8:
            files = without_fp8(source, config, method, files)
        prequantised = getattr(config, "quantization_config", None) is not None
        if cls.can_generate() and kwargs.get("generation_config") is None:  # type: ignore[attr-defined]
            check_generation_config(source, download)
        reason = None if prequantised else files.quantised()
        if reason is not None:
            raise ValueError(f"{source} is quantised ({reason}); {UNQUANTISED}")
        if config.dtype is None:
            config.dtype = files.float_dtype()

        if detect_layout(files.tensors) == "original" or files.scales:
            if prequantised:
                raise ValueError(f"{source}, in the original layout, is quantised ({method}); {UNQUANTISED}")
            with files.open() as slices:
                loaded = _load_tensors(cls, stock, slices, source, config, model_args, kwargs, files)
            adapter = adapter_path(kwargs) if base is None else str(pretrained_model_name_or_path)
            if adapter is not None:
                _add_adapter(loaded[0] if isinstance(loaded, tuple) else loaded, adapter, kwargs)
            return loaded
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
        settle_quantised(model, cls, model_args, source)
        if matched is not None and base is None and kwargs.get("quantization_config") is None:
            matched.confirm(info)  # a quantiser has its own names
        return (model, info) if wants_info else model

    def post_init(self) -> None:
        """A step of building a model: one that will be quantised gets torch's own linear layers."""
        super().post_init()  # type: ignore[misc]
        if getattr(self.config, "quantization_config", None):  # type: ignore[attr-defined]
            make_linears_plain(self)  # type: ignore[arg-type]

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

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Of use to subclasses defined elsewhere. Raises ValueError for those here: their folders need no code."""
        refuse_own_code(cls)
        super().register_for_auto_class(auto_class)  # type: ignore[misc]

    def stock_differences(self) -> list[tuple[str, str]]:
        """Pairs (switch, why) for what transformers' own `zaya` class computes differently; empty if nothing."""
        return stock_differences(self)


# --- reading ----------------------------------------------------------------------------------------------------------


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
    matched = _match(cls, files.tensors if files is not None else tensors, source, config, model_args, kwargs)
    matched.check_tied_head(tensors)
    wants_info = kwargs.pop("output_loading_info", False)
    lazy = matched.lazy(tensors)
    if kwargs.get("quantization_config") is not None:
        check_quantiser(kwargs["quantization_config"], kwargs.get("device_map"))
        place = make_temporary(Path(tempfile.gettempdir()), "zaya-combined")
        try:
            model, info = _load_copy(stock, place, lazy, config, model_args, kwargs)
        finally:
            remove_temporary(place)
        settle_quantised(model, cls, model_args, source)
    else:
        model, info = _load_lazy(stock, lazy, source, config, model_args, kwargs)
        matched.confirm(info)
    info["unexpected_keys"] = {*info["unexpected_keys"], *matched.dropped}
    if files is not None:
        model.config.name_or_path = model.name_or_path = source
        _read_generation_config(model, source, kwargs)
    return (model, info) if wants_info else model


def _load_lazy(
    stock: Any,
    lazy: Mapping[str, Any],
    source: str,
    config: ZayaConfig,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Load from memory, or where weights shall stay on disk from a copy in the combined layout in `offload_folder`."""
    if not is_on_disk(kwargs.get("device_map")):
        # Without the folder: the loader would write every tensor that stays on disk into it, only for the copy to
        # replace them.
        rest = {name: value for name, value in kwargs.items() if name != "offload_folder"}
        try:
            model, info = stock.from_pretrained(
                None, *model_args, config=copy.deepcopy(config), state_dict=lazy, output_loading_info=True, **rest
            )
        except ValueError as error:
            # An automatic device_map ran out of memory, and there is no file that the loader could leave tensors in.
            if "offload_folder" not in str(error):
                raise
        else:
            if not is_on_disk(getattr(model, "hf_device_map", None)):
                return model, info
            del model
    if kwargs.get("offload_folder") is None:
        raise ValueError(
            f"{source}: weights in the original layout cannot stay where they are on disk; give offload_folder=..., "
            "into which they are written in the combined layout"
        )
    folder = Path(kwargs["offload_folder"])
    check_target(folder)
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    place = make_temporary(folder, "combined")  # of this model alone: another may be in use
    try:
        model, info = _load_copy(stock, place, lazy, config, model_args, kwargs)
    except BaseException:
        remove_temporary(place)
        if not existed:
            with suppress(OSError):  # files of others are in it
                folder.rmdir()
        raise
    keep_while_alive(model, place)
    return model, info


def _add_adapter(model: Any, adapter: str, kwargs: Mapping[str, Any]) -> None:
    """What transformers' loader does after it has loaded the base of an adapter from files."""
    own = dict(kwargs.get("adapter_kwargs") or {})
    own.pop("_adapter_model_path", None)
    own = {**download_arguments(kwargs), **{name: value for name, value in own.items() if value is not None}}
    model.load_adapter(adapter, adapter_name=kwargs.get("adapter_name", "default"), adapter_kwargs=own)


def _load_copy(
    stock: Any,
    place: Path,
    lazy: Mapping[str, Any],
    config: ZayaConfig,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    write_combined(place, lazy, wanted_dtype(config, kwargs))
    config.save_pretrained(place)  # the loader falls back on it for generation settings
    names = ("adapter_kwargs", "variant", "subfolder", "revision")  # of the source, not of the copy
    rest = {name: value for name, value in kwargs.items() if name not in names}
    return stock.from_pretrained(str(place), *model_args, config=config, output_loading_info=True, **rest)


def _read_generation_config(model: Any, source: str, kwargs: Mapping[str, Any]) -> None:
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **download_arguments(kwargs))
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
        what = "computes other results" if getattr(model, "stock_has_class", True) else "is no match for this model"
        warnings.warn(f"{folder}: transformers' own zaya class {what}: {listed}", stacklevel=3)


__all__ = ["ZayaLoadingMixin"]
