"""A model and its tokenizer, ready to be scored: every default of a folder that would move a number is taken away.

What was found, what was taken away and what was checked is in `LoadedModel.facts`, for the manifest.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.evaluation import prompt_checks
from zaya_hf.evaluation.fingerprints import hub_config, hub_error
from zaya_hf.evaluation.models import ModelSpec, Shape, bos_rule, positions
from zaya_hf.evaluation.parameter_counts import count_parameters, shape_of_config
from zaya_hf.json_checks import read_json_object
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.other_formats import other_format
from zaya_hf.weight_files import check_exists

__all__ = ["LoadedModel", "load", "neutralise", "shape"]

_ZAYA = ("zaya", "smoe")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
_HARMLESS = ("transformers_version", "use_cache")  # of a generation config
_OTHER_HEADS = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "ForMultipleChoice", "ForPreTraining")
_NO_LIMIT = 1e9  # tokens; tokenizers without a limit say 1e30
_MESSAGE = 400  # characters of another library's message
_NAMED = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode without gradients, its tokenizer, and what is known of them (JSON) for the manifest."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: dict[str, Any]


def load(spec: ModelSpec, *, device: str | torch.device | None = None) -> LoadedModel:
    """Load a model to be evaluated. What can be wrong with its config and tokenizer is said before weights are read.

    Args:
        device: by default the first GPU, without one the CPU.

    Returns:
        The model with `use_cache` off and a generation config that holds nothing but ids, the tokenizer that begins
        prompts as `spec.bos` says, and facts: `name`, `title`, `path`, `revision` (as asked), `commit` (of the Hub, or
        None), `dtype`, `family`, `architecture`, `parameters`, `parameters_active`, `parameters_without_embedding`,
        `parameters_active_without_embedding`, `parameters_outside_text`, `tied_embeddings`, `shape`, `bos`,
        `max_length`, `chat_template` ({"used", "sha256"}), `thinking`, `vocab_size` (rows of the embedding),
        `generation_config` (as found), `generation_config_dropped`, `gate`, `licence`, `reported`.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it cannot be evaluated as the spec says; one line.
    """
    config, commit = _read_config(spec)
    revision = {} if commit is None else {"revision": commit}
    max_length = _max_length(spec, config)
    tokenizer = _read_tokenizer(spec, config, revision)
    if positions(config.to_dict()) is None and tokenizer.model_max_length < _NO_LIMIT and not spec.max_length_asked:
        max_length = min(max_length, int(tokenizer.model_max_length))
    prompt_checks.fill_pad(tokenizer)
    template = prompt_checks.template_facts(tokenizer, spec.chat_template, spec.name)
    text: Any = config.get_text_config()
    # Of a Hub id that is no model of ours nothing was known before; the same commit has the same rule.
    setting = bos_rule(config.to_dict()) if spec.family is None and spec.bos == "tokenizer" else spec.bos
    bos = prompt_checks.check_bos(
        tokenizer, setting, chat_template=spec.chat_template, name=spec.name, bos=text.bos_token_id
    )
    thinking = prompt_checks.thinking_facts(tokenizer, spec.thinking, spec.name)
    prompt_checks.check_vocabulary(tokenizer, text.vocab_size, spec.name)

    model = _read_model(spec, config, revision, _device(device))
    found, dropped = neutralise(model, tokenizer)
    counts = count_parameters(model)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    facts = {
        "name": spec.name,
        "title": spec.title,
        "path": spec.path,
        "revision": spec.revision,
        "commit": commit,
        "dtype": str(model.dtype).removeprefix("torch."),
        "family": text.model_type,
        "architecture": type(model).__name__,
        "parameters": counts.total,
        "parameters_active": counts.active,
        "parameters_without_embedding": counts.without_embedding,
        "parameters_active_without_embedding": counts.active_without_embedding,
        "parameters_outside_text": counts.outside,
        "tied_embeddings": head is not None and head.weight is embedding.weight,
        "shape": asdict(shape_of_config(config)),
        "bos": bos,
        "max_length": max_length,
        "chat_template": template,
        "thinking": thinking,
        "vocab_size": embedding.weight.shape[0],
        "generation_config": found,
        "generation_config_dropped": dropped,
        "gate": spec.gate,
        "licence": spec.licence,
        "reported": {task: dict(figure) for task, figure in spec.reported.items()},
    }
    return LoadedModel(model, tokenizer, facts)


def shape(spec: ModelSpec) -> Shape | None:
    """What is known of a model without its weights: from `eval/models.yaml`, or from the config of a folder; None for
    another repository of the Hub, of which nothing is fetched.

    Raises:
        ValueError: the folder's config cannot be read; one line.
    """
    if spec.shape is not None:
        return spec.shape
    return shape_of_config(_read_config(spec)[0]) if spec.is_folder else None


def neutralise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], list[str]]:
    """Take away every default of a saved model that would move a score or cost memory.

    A `max_new_tokens` in generation_config.json cuts answers short, and a penalty changes them: of that file the ids of
    BOS, EOS and pad are kept. No forward pass builds a cache that nobody asked for, and there are no gradients.

    Returns:
        What the generation config said, and which keys of it count no more.
    """
    before = model.generation_config or GenerationConfig()
    found = {
        key: value
        for key, value in before.to_diff_dict().items()
        if not key.startswith("_") and key not in _HARMLESS and value is not None and value is not False
    }
    ids = {key: getattr(before, key, None) for key in _KEPT}
    for key in _KEPT:
        if ids[key] is None:
            ids[key] = getattr(model.config.get_text_config(), key, None)
        if ids[key] is None:
            ids[key] = getattr(tokenizer, key, None)
    model.generation_config = GenerationConfig(**ids)
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        config.use_cache = False
    model.eval().requires_grad_(False)
    return found, sorted(set(found) - set(_KEPT))


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_config(spec: ModelSpec) -> tuple[PreTrainedConfig, str | None]:
    """The config of a model and the commit of its repository, None for a folder."""
    commit = None
    if spec.is_folder:
        file = Path(spec.path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{spec.path} {other_format(Path(spec.path)) or 'holds no config.json: it is no model'}")
    else:
        if spec.path.endswith(".gguf") or Path(spec.path).is_file():
            check_exists(spec.path)
        file, commit = hub_config(spec.path, spec.revision)
    kind = read_json_object(file, "a model config").get("model_type")
    revision: dict[str, Any] = {} if commit is None else {"revision": commit}
    with _one_line(spec):
        if kind in _ZAYA:
            return ZayaConfig.from_pretrained(spec.path, **revision), commit
        config: PreTrainedConfig = AutoConfig.from_pretrained(spec.path, trust_remote_code=False, **revision)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{spec.path} is of the type {kind}, which is no causal language model")
    # Of such a type there are models that read in both directions, and heads that do not predict the next token.
    other = next((name for name in config.architectures or () if name.endswith(_OTHER_HEADS)), None)
    if other is not None:
        raise ValueError(f"{spec.path} holds a {other}, which is no causal language model")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{spec.path} is quantised: evaluate the checkpoint that it was made from")
    return config, commit


def _max_length(spec: ModelSpec, config: PreTrainedConfig) -> int:
    limit = positions(config.to_dict())
    if limit is None or spec.max_length <= limit:
        return spec.max_length
    if spec.max_length_asked:
        raise ValueError(f"{spec.name}: max_length is {spec.max_length}, but the model has {limit} positions")
    return limit


def _read_tokenizer(spec: ModelSpec, config: PreTrainedConfig, revision: dict[str, str]) -> PreTrainedTokenizerBase:
    if spec.is_folder and not any((Path(spec.path) / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"no tokenizer in {spec.path}: put the model's tokenizer.json and tokenizer_config.json there")
    with _one_line(spec):
        # With the config: the tokenizer must not look for one through classes that cannot read an original ZAYA folder.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            spec.path, config=config, trust_remote_code=False, **revision
        )
    return tokenizer


def _read_model(
    spec: ModelSpec, config: PreTrainedConfig, revision: dict[str, str], device: torch.device
) -> PreTrainedModel:
    """The model on its device; there is never a second copy of its weights."""
    arguments: dict[str, Any] = {"dtype": spec.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype)}
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        arguments["device_map"] = {"": device}  # from the files to the device, past this machine's memory
    with _one_line(spec), _quiet():
        if isinstance(config, ZayaConfig):
            model: Any = ZayaForCausalLM.from_pretrained(spec.path, **arguments, **revision)
        else:
            both: Any = AutoModelForCausalLM.from_pretrained(
                spec.path, config=config, trust_remote_code=False, output_loading_info=True, **arguments, **revision
            )
            model, info = both
            missing = sorted(info["missing_keys"])
            if missing:
                more = ", ..." if len(missing) > _NAMED else ""
                names = ", ".join(missing[:_NAMED])
                raise ValueError(f"it has no weights for {names}{more}, which would be random: it is not complete")
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {str(error).splitlines()[0]}") from None


@contextmanager
def _one_line(spec: ModelSpec) -> Iterator[None]:
    """What a library says about files that it cannot read, as one line with the model in it."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if not spec.is_folder and isinstance(error, OSError):
            raise hub_error(spec.path, spec.revision, error) from None
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _MESSAGE else f"{reason[:_MESSAGE]}..."
        raise ValueError(reason if spec.path in reason else f"{spec.path}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars where nobody watches them."""
    shown = transformers_logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
