"""The model that a run trains: a fresh one, or the weights of a checkpoint, perhaps with LoRA's adapters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_zaya import ZayaConfig
from ..hints import near_hint
from ..json_checks import read_json_object
from ..loading_source import base_of_adapter, read_config
from ..modeling_zaya import ZayaForCausalLM
from ..weight_files import check_exists
from .checkpoint import newest_model
from .config import LoraConfig, ModelConfig, TrainingConfig
from .console import is_terminal, transformers_bars
from .data.digests import of_values, sampled
from .lora import lora_targets
from .run_folder import CHECKPOINTS

__all__ = ["base_digest", "build", "config_of"]

# What a config holds beside its fields: how a part is computed.
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def build(
    config: TrainingConfig,
    *,
    start: Path | None = None,
    vocab_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """The model that `config` describes, on the CPU, in eval mode, with trainable parameters in `config.model.dtype`.

    A fresh model's values depend on `config.seed` and its shapes alone, not on the number of processes; torch's own
    generator is left where it was. With `activation_checkpointing` every layer is recomputed in the backward pass
    (non-reentrant).

    Args:
        config: of the run; `model`, `seed` and `activation_checkpointing` are used.
        start: `model/` of one of the run's own checkpoints, to go on from; with LoRA, of the adapter alone.
        vocab_size: of a fresh model whose config leaves it out, if there is no tokenizer.
        tokenizer: of the run's data; its ids have to fit, and a fresh model takes from it what its config leaves out:
            `vocab_size` and the ids of padding, beginning and end.

    Returns:
        a `ZayaForCausalLM`, or with LoRA a `peft.PeftModel` around one (whose adapters are fp32).

    Raises:
        ValueError, OSError: one line: what in `config.model` is unknown, out of range or does not fit the checkpoint;
            a tokenizer with more ids than the model, rows longer than its context; what
            `ZayaForCausalLM.from_pretrained` refuses.
        ModuleNotFoundError: LoRA without PEFT.
    """
    settings = config.model
    if start is not None and settings.lora is None:
        model = _load(str(start), None, None, {}, settings.dtype)
    elif settings.checkpoint is not None:
        source = _source(settings.checkpoint)
        base = base_of_adapter(source, _download(settings.revision), {})
        if base is not None and settings.lora is not None:
            raise ValueError(f"model.checkpoint {source} is an adapter itself: merge it into its base model first.")
        model = _load(source, base, settings.revision, settings.overrides, settings.dtype)
    else:
        resolved = config_of(settings, vocab_size=vocab_size, tokenizer=tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = ZayaForCausalLM(resolved).to(getattr(torch, settings.dtype))
    _check_tokenizer(tokenizer, model.config, str(start or settings.checkpoint or "model.config"))
    length, context = config.data.sequence_length, model.config.max_position_embeddings
    if length > context:
        where = "overrides" if settings.config is None else "config"
        raise ValueError(
            f"data.sequence_length is {length}, but the model has a context of {context}: set "
            f"model.{where}.max_position_embeddings."
        )
    if config.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if settings.lora is not None:
        model = _with_adapters(model, settings.lora, start, config.seed)
    _align(model)
    return model.eval()


def _align(model: torch.nn.Module) -> None:
    """Move every tensor to memory of torch's own, which begins at a round address; a file's tensors begin anywhere.

    The last bits of a matrix product on a CPU depend on it, and with it whether a run that was killed goes on bit for
    bit: only the one that goes on has its weights from files.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def config_of(
    settings: ModelConfig, *, vocab_size: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> ZayaConfig:
    """The config of the model that `build` makes, without making it.

    Args:
        settings: the section `model` of a run's config.
        vocab_size, tokenizer: as of `build`.

    Raises:
        ValueError, OSError: as `build` does for what is in `settings`.
    """
    if settings.checkpoint is not None:
        source = _source(settings.checkpoint)
        base = base_of_adapter(source, _download(settings.revision), {})
        return _overridden(base or source, None if base else settings.revision, settings.overrides)
    given = settings.config
    if isinstance(given, Mapping):
        values, where = dict(given), "model.config"
        _check_names(values, where)
    else:
        assert given is not None  # one of the two is there, see `ModelConfig`
        path = Path(given, "config.json") if Path(given).is_dir() else Path(given)
        if not path.is_file():
            raise FileNotFoundError(f"model.config: there is no file {path}.")
        values, where = read_json_object(path, "a model config"), str(path)
    values.pop("dtype", None)  # of the weights that a file was made for
    if values.get("vocab_size") is None:
        size = vocab_size if tokenizer is None else _ids(tokenizer)
        if size is None:
            raise ValueError(f"{where} has no vocab_size, and there is no tokenizer to take it from.")
        values["vocab_size"] = size
    if tokenizer is not None:
        values = {name: getattr(tokenizer, name) for name in _IDS} | values
    return _from_dict(values, where)


def base_digest(config: TrainingConfig) -> str | None:
    """Of the weights that adapters are for, so that they do not get others on the way; None without LoRA.

    Large files are sampled, see `data.digests`. What comes from the Hub stands for itself by its name and revision.

    Args:
        config: of the run; `model` is used.

    Raises:
        ValueError: the base is a checkpoint of a run that has not ended, which goes as the run goes on.
    """
    settings = config.model
    if settings.lora is None or settings.checkpoint is None or not Path(settings.checkpoint).is_dir():
        return None
    folder = Path(_source(settings.checkpoint)).absolute()
    if folder.parent.parent.name == CHECKPOINTS:
        raise ValueError(
            f"model.checkpoint {settings.checkpoint}: adapters need their base model to stay, and {folder} goes when "
            "that run goes on. Let the run end, or copy that folder."
        )
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    return of_values([(path.name, sampled(path)) for path in files])


# --- configs ----------------------------------------------------------------------------------------------------------
def _source(checkpoint: str) -> str:
    """Where the weights are: `checkpoint` itself, or of the folder of a run or of its checkpoint the model in it."""
    check_exists(checkpoint)
    folder = Path(checkpoint)
    of_a_run = any((folder / name).exists() for name in ("checkpoints", "model", "manifest.json"))
    return str(newest_model(folder)) if of_a_run and not (folder / "config.json").exists() else checkpoint


def _download(revision: str | None) -> dict[str, Any]:
    return {} if revision is None else {"revision": revision}


def _check_names(values: Mapping[str, Any], where: str) -> None:
    known = {field.name for field in fields(ZayaConfig)} | {*_IMPLEMENTATIONS, "model_type"}
    for name in values:
        if name == "dtype":
            raise ValueError(f"{where}.dtype: give model.dtype instead.")
        if name not in known:
            raise ValueError(f"{where}.{name}: a ZAYA config has no such field{near_hint(name, known)}")


def _from_dict(values: dict[str, Any], where: str) -> ZayaConfig:
    try:
        built: ZayaConfig = ZayaConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return built


def _overridden(source: str, revision: str | None, overrides: Mapping[str, Any]) -> ZayaConfig:
    """The config of `source` with fields changed, none of which may change the shape of a weight.

    `rope_theta` is that of the layers with full attention; `rope_parameters` is merged into what is there.
    """
    config, _ = read_config(source, None, _download(revision), {})
    if not overrides:
        return config
    where, changes = "model.overrides", dict(overrides)
    theta = changes.pop("rope_theta", None)
    _check_names(changes, where)
    rope = changes.pop("rope_parameters", None) or {}
    if not (isinstance(rope, Mapping) and all(isinstance(value, Mapping) for value in rope.values())):
        raise ValueError(f'{where}.rope_parameters: give one dict per layer type, such as {{"hybrid": {{...}}}}.')
    if theta is not None:
        if "hybrid" not in (config.layer_types or []):
            raise ValueError(f"{where}.rope_theta: no layer of {source} has full attention; give rope_parameters.")
        rope = {**rope, "hybrid": {**rope.get("hybrid", {}), "rope_theta": theta}}
    before = config.rope_parameters or {}
    merged = {**before, **{kind: {**before.get(kind, {}), **own} for kind, own in rope.items()}}
    changed = _from_dict({**config.to_dict(), **changes, "rope_parameters": merged}, where)
    old, new = _shapes(config), _shapes(changed)
    different = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if different:
        first = different[0]
        raise ValueError(
            f"{where} ({', '.join(changes)}) changes shapes, and the weights of {source} would not fit: "
            f"{first} is {old.get(first, 'not there')}, and would be {new.get(first, 'not there')}."
        )
    return changed


def _shapes(config: ZayaConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = ZayaForCausalLM(ZayaConfig.from_dict(config.to_dict()))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id: there may be gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, config: Any, where: str) -> None:
    if tokenizer is not None and _ids(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {_ids(tokenizer) - 1}, but the model of {where} knows {config.vocab_size} "
            "(vocab_size): it is the tokenizer of another model."
        )


# --- weights ----------------------------------------------------------------------------------------------------------
def _load(source: str, base: str | None, revision: str | None, overrides: Mapping[str, Any], dtype: str) -> Any:
    """The model of `source`; where that is an adapter, of its base model with the adapter merged into it."""
    weights, own_revision = (source, revision) if base is None else (base, None)
    config = _overridden(weights, own_revision, overrides)
    options = {"config": config, "dtype": getattr(torch, dtype), **_download(own_revision)}
    with transformers_bars(is_terminal(sys.stderr)):
        model = ZayaForCausalLM.from_pretrained(weights, **options)
    for name in _IDS:
        if name in overrides:  # a checkpoint has them twice
            setattr(model.generation_config, name, overrides[name])
    if base is None:
        return model
    peft_model = _peft().PeftModel.from_pretrained(model, source, **_download(revision))
    return peft_model.merge_and_unload().requires_grad_(True)  # PEFT froze the base


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ModuleNotFoundError("adapters (model.lora) need PEFT: pip install peft") from None
    return peft


def _with_adapters(model: Any, lora: LoraConfig, start: Path | None, seed: int) -> Any:
    """`model` frozen, with LoRA on the parts that `lora_targets` names; fresh, or those in the folder `start`."""
    peft = _peft()
    targets = lora_targets(model, attention=lora.attention, experts=lora.experts, layers=lora.layers)
    if start is not None:
        return peft.PeftModel.from_pretrained(model, start, is_trainable=True)
    base = Path(model.name_or_path)
    if base.is_dir():  # PEFT writes it into the adapter's folder, which is used from other working directories, too
        model.name_or_path = str(base.absolute())
    options = peft.LoraConfig(**targets, r=lora.r, lora_alpha=lora.alpha, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, options)
