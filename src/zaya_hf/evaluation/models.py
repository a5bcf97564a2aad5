"""Which models an evaluation is about, and how each has to be asked: `eval/models.yaml`, folders and Hub ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from zaya_hf.hints import near_hint
from zaya_hf.json_checks import read_json_object
from zaya_hf.other_formats import other_format
from zaya_hf.reporting.results import FILE, MADE_BY
from zaya_hf.resources import resource
from zaya_hf.weight_files import check_exists

__all__ = [
    "BOS_RULES",
    "DEFAULT_MAX_LENGTH",
    "DTYPES",
    "ModelSpec",
    "Shape",
    "bos_rule",
    "positions",
    "registry",
    "resolve",
]

DTYPES = ("auto", "float32", "bfloat16", "float16")
BOS_RULES = ("required", "none", "tokenizer")
# Tokens. The same for all, because a longer context is another test; what a config allows (ZAYA1: 131,072) is no limit
# that memory can be planned by.
DEFAULT_MAX_LENGTH = 4096

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Trained with a BOS in front of every text: without it their scores are near chance.
_NEEDS_BOS = ("gemma", "gemma2", "gemma3", "gemma3_text", "zaya", "smoe")
# Folder names that say nothing of the model in them.
_GENERIC = ("model", "final", "hub", "checkpoint")
# Keys under which configs hold the largest number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# What a quickstart's output folder holds: every model of its results is saved in runs/NAME-seedN/model.
_QUICKSTART_MARK, _QUICKSTART_RUNS, _QUICKSTART_MODEL = ".zaya-quickstart", "runs", "model"


@dataclass(frozen=True)
class Shape:
    """What is known of a model without its weights, for estimates of time and memory.

    Attributes:
        parameters: of the part that reads and writes text, each tensor once, embedding included.
        parameters_active: those that one token uses, embedding included; None where the number of experts is unknown.
        parameters_without_embedding: without the embedding and the language-model head.
        kv_heads: heads of keys and values in a layer, each `head_dim` wide.
    """

    parameters: int
    parameters_active: int | None
    parameters_without_embedding: int
    layers: int
    hidden_size: int
    vocab_size: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """One model and everything about asking it that can move a score.

    Attributes:
        name: unique in an evaluation; used in the names of folders.
        title: for people.
        path: a folder or the id of a repository on the Hub.
        family: `model_type` of the config (of its text part), or None while that is unknown.
        revision: branch, tag or commit on the Hub; None is its main branch, whose commit is found at the first run.
        dtype: one of `DTYPES`; "auto" is the one of the files.
        bos: "required": every prompt starts with one; "none": no prompt does; "tokenizer": as the tokenizer does it.
            Where the family is unknown, "tokenizer" gives way to `bos_rule` of the config when the model is loaded.
        max_length: tokens of a prompt with its answer.
        max_length_asked: whether someone chose `max_length`. A default gives way to a model that has fewer positions,
            a chosen one is an error there.
        chat_template: whether prompts are put into the tokenizer's chat template.
        thinking: {"start", "end"}: the strings around a thought, which is no part of the answer; None: it has none.
        gate: what to do to get at the files, if it takes more than fetching them.
        reported: figures from the model's own papers, {task: {"metric", "value", "source"}}; values of 0 to 1.
    """

    name: str
    title: str
    path: str
    family: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    bos: str = "tokenizer"
    max_length: int = DEFAULT_MAX_LENGTH
    max_length_asked: bool = False
    chat_template: bool = False
    thinking: Mapping[str, str] | None = None
    gate: str | None = None
    licence: str | None = None
    reported: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shape: Shape | None = None

    @property
    def is_folder(self) -> bool:
        return Path(self.path).is_dir()

    def settings(self) -> dict[str, Any]:
        """What of this moves a score, beside the files: for the key of a run."""
        thinking = None if self.thinking is None else dict(self.thinking)
        names = ("dtype", "bos", "max_length", "chat_template")
        return {name: getattr(self, name) for name in names} | {"thinking": thinking}


def resolve(
    names: Sequence[str],
    *,
    dtype: str | None = None,
    max_length: int | None = None,
    chat_template: bool | None = None,
) -> list[ModelSpec]:
    """The models that `names` mean, in that order. Nothing is downloaded or loaded.

    Args:
        names: each a name of `eval/models.yaml`, a folder with a saved model, the output folder of `zaya quickstart`
            (all its models), or the id of a repository on the Hub, a name or an id perhaps with `@` and a revision.
            `NAME=` before any of them but a quickstart's gives it another name.
        dtype, max_length, chat_template: for all of them, instead of their own.

    Raises:
        ValueError: one is not known, is no model, or two have one name; one line.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}{near_hint(str(dtype), DTYPES)}")
    if max_length is not None and not (_whole(max_length) and max_length > 1):
        raise ValueError(f"max_length is {max_length!r}; expected a whole number of tokens above 1")
    if not names:
        raise ValueError(f"no model is given; there are {', '.join(registry())}, folders, and Hub ids such as org/name")
    found: dict[str, ModelSpec] = {}
    for text in names:
        for spec in _specs(text):
            if spec.name in found:
                both = f"{found[spec.name].path} and {spec.path}"
                raise ValueError(f"two models have the name {spec.name} ({both}): name one anew, as NAME={text}")
            found[spec.name] = _with_overrides(spec, dtype, max_length, chat_template)
    return list(found.values())


def positions(config: Mapping[str, Any]) -> int | None:
    """The number of tokens that the text part of a config.json has positions for; None where it does not say."""
    for part in (config.get("text_config"), config):
        for key in _POSITIONS:
            value = part.get(key) if isinstance(part, Mapping) else None
            if _whole(value) and value > 0:
                return value
    return None


def bos_rule(config: Mapping[str, Any]) -> str:
    """One of `BOS_RULES` for a model of which only the config.json is known: "required" for families that were trained
    with a BOS of its own before every text, otherwise "tokenizer"."""
    text = _text_part(config)
    family = text.get("model_type") or config.get("model_type")
    return "required" if family in _NEEDS_BOS and _has_own_bos(text) else "tokenizer"


@cache
def registry() -> dict[str, ModelSpec]:
    """The models of `eval/models.yaml` by name.

    Raises:
        ValueError: the file is not right; one line.
    """
    import yaml  # with the extra `eval`

    file = resource("eval", "models.yaml")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a section for each model")
    return {name: read_entry(name, entry, str(file)) for name, entry in content.items()}


# --- the file ---------------------------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "title": (str, "text"),
    "path": (str, "text"),
    "family": ((str, type(None)), "text"),
    "revision": ((str, type(None)), "text in quotes, or null"),
    "dtype": (str, "text"),
    "bos": (str, "text"),
    "max_length": (int, "a whole number"),
    "chat_template": (bool, "true or false"),
    "thinking": ((dict, type(None)), "a section with start and end, or null"),
    "gate": ((str, type(None)), "text"),
    "licence": ((str, type(None)), "text"),
    "reported": (dict, "a section of tasks"),
    "shape": ((dict, type(None)), "a section"),
}
_CHOICES = {"dtype": DTYPES, "bos": BOS_RULES}


def read_entry(name: str, entry: Any, where: str) -> ModelSpec:
    """The model that a section of `eval/models.yaml` describes.

    Raises:
        ValueError: a key is unknown, missing or of a wrong kind; one line.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: {name!r} cannot be the name of a model; letters, digits, '.', '_' and '-' can")
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {name} is {entry!r}; expected a section of keys and values")
    for key, value in entry.items():
        if key not in _KINDS:
            raise ValueError(f"{where}: {name} has an unknown key {key}{near_hint(str(key), _KINDS)}")
        kind, wanted = _KINDS[key]
        wrong = not isinstance(value, kind) or (kind is int and not (_whole(value) and value > 1))
        if wrong or (key in _CHOICES and value not in _CHOICES[key]):
            wanted = f"one of {', '.join(_CHOICES[key])}" if key in _CHOICES else wanted
            raise ValueError(f"{where}: {name}.{key} is {value!r}; expected {wanted}")
    for key in ("title", "path"):
        if key not in entry:
            raise ValueError(f"{where}: {name}.{key} is missing")
    values = dict(entry)
    if values.get("thinking") is not None:
        _check_thinking(name, values, where)
    for task, figure in values.get("reported", {}).items():
        _check_figure(f"{where}: {name}.reported.{task}", figure)
    if values.get("shape") is not None:
        values["shape"] = _read_shape(f"{where}: {name}.shape", values["shape"])
    return ModelSpec(name=name, max_length_asked="max_length" in values, **values)


def _check_thinking(name: str, values: Mapping[str, Any], where: str) -> None:
    rule = values["thinking"]
    if set(rule) != {"start", "end"} or not all(isinstance(mark, str) and mark for mark in rule.values()):
        raise ValueError(f"{where}: {name}.thinking is {rule!r}; expected start and end, both text that is not empty")
    if not values.get("chat_template", False):
        raise ValueError(f"{where}: {name} has thinking, but chat_template is false: only the template makes it think")


def _check_figure(where: str, figure: Any) -> None:
    right = isinstance(figure, dict) and set(figure) == {"metric", "value", "source"}
    if not right or not all(isinstance(figure[key], str) and figure[key] for key in ("metric", "source")):
        raise ValueError(f"{where} is {figure!r}; expected metric, value and source")
    if not isinstance(figure["value"], float) or not 0 <= figure["value"] <= 1:
        raise ValueError(f"{where}.value is {figure['value']!r}; expected a share of 0.0 to 1.0")


def _read_shape(where: str, values: Mapping[str, Any]) -> Shape:
    known = {item.name for item in fields(Shape)}
    if set(values) != known or not all(_whole(value) and value > 0 for value in values.values()):
        raise ValueError(f"{where}: expected {', '.join(sorted(known))}, each a whole number above 0")
    return Shape(**values)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# --- names ------------------------------------------------------------------------------------------------------------


def _specs(text: str) -> list[ModelSpec]:
    """The models that one of the names given means."""
    given, equals, rest = text.partition("=")
    if equals and not Path(text).exists():
        if not _NAME.fullmatch(given):
            raise ValueError(f"{text}: {given!r} cannot be a model's name; letters, digits, '.', '_' and '-' can")
        found = _specs(rest)
        if len(found) > 1:
            raise ValueError(
                f"{text}: {rest} holds {len(found)} models, which cannot share one name: leave {given}= out"
            )
        return [replace(found[0], name=given, title=given)]
    if text in registry():
        return [registry()[text]]
    path = Path(text).expanduser()
    if path.is_dir():
        return _quickstart(path) if _is_quickstart(path) else [_folder(path)]
    base, _, revision = text.partition("@")
    if revision and (base in registry() or _HUB_ID.fullmatch(base)):
        (spec,) = _specs(base)
        return [
            replace(spec, name=f"{spec.name}-{_name(revision)}", title=f"{spec.title} {revision}", revision=revision)
        ]
    for spec in registry().values():
        if spec.path.lower() == text.lower():
            return [spec]
    _check_no_folder(text, path)
    return [ModelSpec(name=_name(text.rpartition("/")[2]), title=text, path=text)]


def _check_no_folder(text: str, path: Path) -> None:
    """Refuse what is neither a folder nor can be the id of a repository."""
    if text.endswith(".gguf") or path.is_file():
        check_exists(str(path))
    if _HUB_ID.fullmatch(text) and not path.parent.is_dir():
        return
    if len(path.parts) > 1:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        raise ValueError(f"there is no folder {text}{near_hint(path.name, beside)}")
    known = f"; known are {', '.join(registry())}; a folder or a Hub id org/name will do, too"
    raise ValueError(f"unknown model {text!r}{near_hint(text, registry()) or known}")


def _name(text: str) -> str:
    """`text` as the name of a model."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


def _folder(path: Path) -> ModelSpec:
    """The model saved in a folder, with what its config says."""
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} {other_format(path) or 'holds no config.json: it is not the folder of a saved model'}"
        )
    config = read_json_object(path / "config.json", "a model config")
    family = _text_part(config).get("model_type") or config.get("model_type")
    resolved = path.resolve()
    named = next((part for part in (resolved, *resolved.parents) if part.name not in _GENERIC), resolved)
    name = _name(named.name)
    return ModelSpec(
        name=name,
        title=name,
        path=str(path),
        family=family,
        bos=bos_rule(config),
        max_length=min(DEFAULT_MAX_LENGTH, positions(config) or DEFAULT_MAX_LENGTH),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _has_own_bos(config: Mapping[str, Any]) -> bool:
    """Whether the BOS of a config is a token of its own: where it also ends texts, a model never saw it as a start."""
    ends = config.get("eos_token_id")
    bos = config.get("bos_token_id", 2)  # left out by configs that do not change their family's default
    return bos is not None and bos not in (ends if isinstance(ends, list) else [ends])


def _is_quickstart(path: Path) -> bool:
    if (path / _QUICKSTART_MARK).is_file():
        return True
    try:
        return bool(read_json_object(path / FILE, "results").get("made_by") == MADE_BY)
    except (OSError, ValueError):
        return False


def _quickstart(path: Path) -> list[ModelSpec]:
    """All models of a quickstart's results."""
    if not (path / FILE).is_file():
        raise ValueError(
            f"{path} is a quickstart that has not finished: run its command again, then evaluate its models"
        )
    results = read_json_object(path / FILE, "results of a quickstart")
    found = []
    try:
        for model in results["models"]:
            several = len(model["runs"]) > 1
            for run in model["runs"]:
                label = f"{model['name']}-seed{run['seed']}"
                folder = path / _QUICKSTART_RUNS / label / _QUICKSTART_MODEL
                title = f"{model['title']} (seed {run['seed']})" if several else str(model["title"])
                found.append((label if several else str(model["name"]), title, folder))
    except (KeyError, TypeError):
        raise ValueError(f"{path / FILE} is of another version of zaya quickstart: run it again") from None
    for _, _, folder in found:
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing, though {path / FILE} tells of it: run the quickstart again")
    return [replace(_folder(folder), name=name, title=title) for name, title, folder in found]


def _with_overrides(
    spec: ModelSpec, dtype: str | None, max_length: int | None, chat_template: bool | None
) -> ModelSpec:
    if dtype is not None:
        spec = replace(spec, dtype=dtype)
    if max_length is not None:
        spec = replace(spec, max_length=max_length, max_length_asked=True)
    if chat_template is not None:
        # Without the template nothing makes a model think, and a rule that waits for the end of a thought would take
        # every answer for none.
        spec = replace(spec, chat_template=chat_template, thinking=spec.thinking if chat_template else None)
    return spec
