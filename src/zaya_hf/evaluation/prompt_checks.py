"""Whether the ids that a model is given are what it was trained on: BOS, ends, the vocabulary, the marks of a thought.

A Gemma-style model without BOS scores near chance, and a chat template that writes a BOS of its own easily gives two.
Nothing fails then; only the numbers are wrong. So the ids themselves are looked at before anything is scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

__all__ = ["check_bos", "check_vocabulary", "encode", "fill_pad", "template_facts", "thinking_facts"]

_CONTEXT, _CONTINUATION = "Question: What is 2 + 3?\nAnswer:", " It is 5."
_TALK = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "What is 3 + 4?"},
]
_SHOWN = 8  # ids of each prompt that are kept with the results


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a prompt, by the rule of lm-eval's `hf` backend: as the tokenizer does it, but without special tokens
    where the text begins with the BOS already."""
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begun = prefix is not None and text.startswith(str(tokenizer.decode(prefix)))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False) if begun else tokenizer.encode(text)
    return ids


def check_bos(
    tokenizer: PreTrainedTokenizerBase, setting: str, *, chat_template: bool, name: str, bos: int | None = None
) -> dict[str, Any]:
    """Make the tokenizer begin prompts as `setting` says, and look at real ids.

    Args:
        setting: "required", "none" or "tokenizer", see `ModelSpec.bos`.
        chat_template: whether prompts go through the chat template; those are looked at then, too.
        name: of the model, for messages.
        bos: the id in the model's config.

    Returns:
        {"setting", "id", "checked_ids": {"prompt", "chat", "few_shot_chat", "continuation"}}: the first ids of each;
        None where there is no chat template.

    Raises:
        ValueError: a prompt does not begin with exactly one BOS where one is required, with more than one, with one
            where none may be; a continuation holds one; or the tokenizer ends every text with EOS.
    """
    own = tokenizer.bos_token_id
    if setting == "required":
        if own is None:
            raise ValueError(
                f"{name}: bos is required, but the tokenizer has no bos_token: set it, or choose bos: none"
            )
        if bos is not None and bos != own:
            raise ValueError(f"{name}: the model's bos_token_id is {bos}, the tokenizer's is {own}: make them one")
    wanted = {"required": True, "none": False}.get(setting)
    adds = own is not None and encode(tokenizer, _CONTEXT)[:1] == [own]
    if wanted is not None and adds != wanted and hasattr(tokenizer, "add_bos_token"):
        tokenizer.add_bos_token = wanted
    prompts = {"prompt": encode(tokenizer, _CONTEXT), "chat": None, "few_shot_chat": None}
    if chat_template:
        prompts |= {
            kind: encode(tokenizer, _templated(tokenizer, talk, name))
            for kind, talk in (("chat", _TALK[:1]), ("few_shot_chat", _TALK))
        }
    for kind, ids in prompts.items():
        if ids is not None:
            _check_beginning(ids, own, wanted, tokenizer.eos_token_id, f"{name}: a {kind.replace('_', '-')}")
    whole = encode(tokenizer, _CONTEXT + _CONTINUATION)
    eos = tokenizer.eos_token_id
    if eos is not None and whole[-1:] == [eos]:
        raise ValueError(
            f"{name}: the tokenizer ends every text with EOS ({eos}), prompts too: set add_eos_token false"
        )
    continuation = whole[len(prompts["prompt"] or []) :]
    alone = tokenizer.encode(_CONTINUATION, add_special_tokens=False)
    if own is not None and (own in continuation or own in alone):
        raise ValueError(f"{name}: the tokenizer puts BOS ({own}) into continuations, with special tokens off, too")
    shown = {kind: None if ids is None else ids[:_SHOWN] for kind, ids in prompts.items()}
    return {"setting": setting, "id": own, "checked_ids": shown | {"continuation": continuation[:_SHOWN]}}


def _check_beginning(ids: list[int], bos: int | None, wanted: bool | None, eos: int | None, what: str) -> None:
    if bos is None:
        return
    # Further on it may mark turns: where it is EOS, too, or where a tokenizer puts none in front of texts (SmolLM2).
    marks_turns = bos == eos or not wanted
    found = len(ids) - len(_without_leading(ids, bos)) if marks_turns else ids.count(bos)
    if found > 1:
        raise ValueError(
            f"{what} prompt has {found} BOS ({bos}), not one: {ids[:_SHOWN]}; is one in the chat template?"
        )
    if found == 1 and ids[0] != bos:
        raise ValueError(f"{what} prompt has its BOS ({bos}) not at the beginning: {ids[:_SHOWN]}")
    if wanted and found == 0:
        raise ValueError(f"{what} prompt does not begin with BOS ({bos}), which is required: {ids[:_SHOWN]}")
    if wanted is False and found:
        raise ValueError(f"{what} prompt begins with BOS ({bos}), though the setting is bos: none: {ids[:_SHOWN]}")


def _without_leading(ids: list[int], value: int) -> list[int]:
    start = next((place for place, one in enumerate(ids) if one != value), len(ids))
    return ids[start:]


def _templated(tokenizer: PreTrainedTokenizerBase, talk: list[dict[str, str]], name: str) -> str:
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the chat template fails on a conversation of user and assistant: {reason}") from None


def template_facts(tokenizer: PreTrainedTokenizerBase, used: bool, name: str) -> dict[str, Any]:
    """Whether prompts go through the chat template, and which one it is: {"used", "sha256"}.

    Raises:
        ValueError: it shall be used and there is none, or no single one.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if used and not template:
        raise ValueError(f"{name}: the tokenizer has no chat template: evaluate it without one")
    digest = hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None
    return {"used": used, "sha256": digest}


def thinking_facts(
    tokenizer: PreTrainedTokenizerBase, rule: Mapping[str, str] | None, name: str
) -> dict[str, Any] | None:
    """The rule with the ids of its marks: {"start", "end", "start_ids", "end_ids"}.

    Raises:
        ValueError: the tokenizer cannot write a mark, so that no answer would ever be found behind it.
    """
    if rule is None:
        return None
    found: dict[str, Any] = dict(rule)
    for which in ("start", "end"):
        mark = rule.get(which)
        if not isinstance(mark, str) or not mark:
            raise ValueError(f"{name}: thinking.{which} is {mark!r}; expected text that is not empty")
        ids = tokenizer.encode(mark, add_special_tokens=False)
        if str(tokenizer.decode(ids)).strip() != mark.strip():
            raise ValueError(f"{name}: thinking.{which} is {mark!r}, which the tokenizer cannot write")
        found[f"{which}_ids"] = ids
    return found


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> None:
    """Check that every id of the tokenizer has a row in the embedding of `rows` rows.

    Raises:
        ValueError: some have none.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise ValueError(
            f"{name}: the tokenizer has ids up to {largest}, but the embedding has {rows} rows: the tokenizer is of "
            "another model, or tokens were added without resizing"
        )


def fill_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a pad token one. Which one moves no number: pads are never seen or never counted."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
