"""Comparing the tensors of a checkpoint with those of a model, in either layout, before anything is read."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoints.layouts import combined_key_to_original, detect_layout, plan_from_original
from .weight_files import LazyStack

LM_HEAD = "lm_head.weight"
# Modules that task classes put on top of the backbone: a class without one drops its tensors.
_HEADS = ("lm_head", "score", "classifier", "qa_outputs", "v_head", "value_head", "reward_head")
_SHOWN = 4
# The embedding of the largest published model is 2 GB: compare it in pieces.
_ROWS = 16384


@dataclass
class Matched:
    """How the tensors of a checkpoint fit a model.

    `sources[name of the model]` lists the names in the file: one, or one per expert. The other lists hold what does
    not fit, in the names of the file. `tied_head` is the file's LM head if the model ties its own to the embedding.
    """

    source: str
    sources: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    new_heads: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    tied_head: str | None = None
    untied_without_head: bool = False
    embedding: str | None = None
    tied: set[str] = field(default_factory=set)

    def check(self, ignore_mismatched_sizes: bool) -> None:
        """Raise ValueError (one line) if the checkpoint does not fit; warn about task heads that it lacks."""
        if self.untied_without_head:
            raise ValueError(
                f"{self.source}: the config says tie_word_embeddings=false, but there is no {LM_HEAD}; "
                "set tie_word_embeddings=true or use files that have the head"
            )
        wrong = [
            _listed("missing", self.missing),
            _listed("unexpected", self.unexpected),
            "" if ignore_mismatched_sizes else _listed("of a wrong shape", self.mismatched),
        ]
        if any(wrong):
            raise ValueError(f"{self.source}: tensors do not fit the config: {'; '.join(filter(None, wrong))}")
        if self.new_heads:
            warnings.warn(
                f"{self.source} has no weights for {', '.join(self.new_heads)}: newly initialised, train before use",
                stacklevel=5,
            )

    def confirm(self, info: Mapping[str, Any]) -> None:
        """Check the loader's own account: nothing left uninitialised that was not announced. Raises RuntimeError."""
        missing = sorted(set(info["missing_keys"]) - set(self.new_heads) - self.tied)
        if missing:
            raise RuntimeError(f"{self.source}: not loaded, though present: {_listed('tensors', missing)}")

    def check_tied_head(self, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError if the file's LM head differs from its embedding while the config ties them."""
        if self.tied_head is None or self.embedding is None:
            return
        head, embedding = tensors[self.tied_head], tensors[self.embedding]
        rows = len(head) if isinstance(head, torch.Tensor) else head.get_shape()[0]
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            if not torch.equal(head[start:stop], embedding[start:stop]):
                raise ValueError(
                    f"{self.source}: the config says tie_word_embeddings=true, but {LM_HEAD} is not the embedding; "
                    "set tie_word_embeddings=false to use it"
                )

    def lazy(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict in the names of the model over tensors or lazy slices in the names of the file."""
        return {
            name: tensors[files[0]] if len(files) == 1 and not _is_expert(files[0]) else _stack(tensors, files)
            for name, files in self.sources.items()
        }


def _is_expert(name: str) -> bool:
    return ".local_experts." in name


def _stack(tensors: Mapping[str, Any], files: list[str]) -> Any:
    return LazyStack([tensors[name] for name in files])


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}"


def match_tensors(model: Any, tensors: Mapping[str, Any], source: str) -> Matched:
    """Match the tensors of a checkpoint (headers, slices or tensors, either layout) with those of a model.

    `model` may be on the meta device. Returns what fits and what does not; raises nothing.
    """
    config, matched = model.config, Matched(source)
    moe_block = None
    if detect_layout(tensors) == "original":
        moe_block = "smoe_block" if any(".smoe_block." in name for name in tensors) else "zaya_block"
        plan = plan_from_original(tensors, config.num_hidden_layers, config.num_experts)
        sources, unknown, matched.missing = plan.sources, plan.unknown, plan.missing_experts
    else:
        sources, unknown = {name: [name] for name in tensors}, []

    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."
    for combined, files in sources.items():
        name = _name_in(expected, combined, prefix)
        if name is None or name in matched.sources:
            unknown += files
        else:
            matched.sources[name] = files
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for name in sorted(unknown):
        if name.split(".")[0] in _HEADS:
            matched.dropped.append(name)
        elif not any(pattern.search(name) for pattern in ignored):
            matched.unexpected.append(name)

    _match_head(matched, model, expected, tensors)
    _collect_missing(matched, model, expected, moe_block)
    _compare_shapes(matched, expected, tensors)
    return matched


def _name_in(expected: Mapping[str, Any], name: str, prefix: str) -> str | None:
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in expected:
            return candidate
    return None


def _match_head(matched: Matched, model: Any, expected: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    if LM_HEAD not in expected:
        return
    matched.tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    embedding = matched.sources.get("model.embed_tokens.weight")
    matched.embedding = embedding[0] if embedding else None
    if model.config.tie_word_embeddings:
        # A head equal to the embedding is dropped, so that the two stay one tensor.
        if LM_HEAD in matched.sources:
            matched.tied_head = matched.sources.pop(LM_HEAD)[0]
            matched.dropped.append(matched.tied_head)
    elif LM_HEAD not in matched.sources:
        # Files of the bare backbone have no head by nature: then it is a new one, like any task head.
        backbone_only = not any(name.startswith(f"{model.base_model_prefix}.") for name in tensors)
        matched.untied_without_head = not backbone_only


def _collect_missing(matched: Matched, model: Any, expected: Mapping[str, Any], moe_block: str | None) -> None:
    prefix = f"{model.base_model_prefix}."
    is_base = not any(name.startswith(prefix) for name in expected)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    # Stacks of experts of which the files have some, but not all: their missing members are named already.
    incomplete = {name.rpartition(".local_experts.")[0] for name in matched.missing}
    for name in expected:
        if name in matched.sources or name in matched.tied or any(pattern.search(name) for pattern in ignored):
            continue
        if not is_base and not name.startswith(prefix) and name != "lm_head.bias":
            matched.new_heads.append(name)
        elif moe_block is None:
            matched.missing.append(name)
        else:
            combined = name if name.startswith(prefix) else prefix + name
            sizes = model.config.num_hidden_layers, model.config.num_experts
            names = combined_key_to_original(combined, *sizes, moe_block) or [name]
            if names[0].rpartition(".local_experts.")[0] not in incomplete:
                matched.missing += names


def _compare_shapes(matched: Matched, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    for name, files in matched.sources.items():
        want = expected[name]
        for file_name in files:
            tensor = tensors[file_name]
            shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
            right = want[1:] if _is_expert(file_name) else want
            if shape != right:
                matched.mismatched.append(f"{file_name} {list(shape)} where {list(right)} is expected")


__all__ = ["Matched", "match_tensors"]
