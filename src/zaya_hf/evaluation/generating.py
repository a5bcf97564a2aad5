"""Answers to prompts: prompts are read as forests, answers grow side by side, and a row that has ended makes room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from zaya_hf.inference.sampling import RowSampler, seed_of
from zaya_hf.token_tree import grow, packs
from zaya_hf.tree_attention import Taken

from .forests import ForestReader
from .journal import Journal, name_of, work_through
from .row_cache import RowCache

#: prompts whose answers are kept in the journal together; they share rows
UNIT = 128
#: rows are put together anew when this share of them has ended
_ENDED = 4

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
# What a model's own generation config may say that changes answers, with the values that change nothing.
_CHANGING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "guidance_scale": (1.0,),
    "stop_strings": ([],),
}


@dataclass(frozen=True)
class Thinking:
    """The marks of a thought before the answer."""

    start: str
    end: str


@dataclass(frozen=True)
class Asked:
    """A prompt.

    Attributes:
        ids: its tokens, at least one.
        prompt: its text.
        ordinal: how many equal prompts came before; with the seed it decides what is drawn.
    """

    ids: tuple[int, ...]
    prompt: str
    ordinal: int


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: without the thought, the stop string and what follows it.
        tokens: generated ones, that which ended it included.
        finish: "eos", "stop" or "length".
        thought_without_end: whether it is empty because a thought did not end.
    """

    text: str
    tokens: int
    finish: str
    thought_without_end: bool


@dataclass
class _Row:
    number: int
    asked: Asked
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


class TextGenerator:
    """Generates with one set of settings.

    Args:
        reader: the model.
        until: strings that end an answer.
        limit: tokens of an answer at most.
        sampling: `do_sample`, `temperature` and so on; without them the likeliest token is taken.
        rows: side by side at most.
        token_budget: of a forest of prompts.
        thinking: how a thought is marked; None: there are none.
        seed: of sampled answers.
    """

    def __init__(
        self,
        reader: ForestReader,
        tokenizer: PreTrainedTokenizerBase,
        *,
        until: Sequence[str],
        limit: int,
        sampling: dict[str, Any],
        rows: int,
        token_budget: int,
        thinking: Thinking | None,
        seed: int,
    ):
        self._reader, self._tokenizer, self._limit = reader, tokenizer, limit
        self._until = [text for text in until if text]
        self._rows, self._budget, self._thinking, self._seed = rows, token_budget, thinking, seed
        self._sampling = sampling if sampling.get("do_sample") else None
        self._ends = _end_tokens(reader.model, tokenizer)
        self._stops = self._ends | {i for i in map(self._special, self._until) if i is not None}
        # Text is searched from a little before the new token on: a stop string has no more tokens than bytes.
        self._window = max((len(text.encode()) for text in self._until), default=0) + 2
        self.tokens_computed = 0

    @staticmethod
    def unknown(settings: dict[str, Any], model: Any) -> list[str]:
        """Settings of `generate`, and of the model's own generation config, that this class does not know and that
        would change something."""
        told = {name for name, value in settings.items() if name not in _SAMPLING and value is not None}
        own = getattr(model, "generation_config", None)
        told |= {name for name, same in _CHANGING.items() if getattr(own, name, None) not in (None, *same)}
        if settings.get("do_sample") and own is not None:
            told |= set(own.to_diff_dict()).intersection(_SAMPLING) - {"do_sample", *settings}
        return sorted(told)

    def _special(self, text: str) -> int | None:
        """The id of a special token that reads `text`: decoded texts do not show it."""
        added = self._tokenizer.added_tokens_decoder.items()
        return next((number for number, token in added if token.special and token.content == text), None)

    # ------------------------------------------------------------------------------------------------------- units
    def generate(self, asked: Sequence[Asked], journal: Journal, on_done: Callable[[int], None]) -> list[Answer]:
        """The answers, in the order of `asked`. `on_done` is called with numbers of answers that are there."""
        order = sorted(range(len(asked)), key=lambda i: (-len(asked[i].ids), asked[i].ids, asked[i].ordinal))
        units = [order[first : first + UNIT] for first in range(0, len(order), UNIT)]
        sampling = None if self._sampling is None else (sorted(self._sampling.items()), self._seed)
        settings = (self._until, self._limit, sampling, self._rows, self._budget, self._thinking)
        names = [name_of("answers", settings, [(asked[i].ids, asked[i].ordinal) for i in unit]) for unit in units]
        counted = 0

        def count(answers: int) -> None:
            nonlocal counted
            counted += answers
            on_done(answers)

        def compute(number: int) -> list[Any]:
            found = self._generate_unit([asked[i] for i in units[number]], count)
            return [(answer.tokens, answer.finish) for answer in found]

        def done(number: int) -> None:
            nonlocal counted
            on_done(max(0, len(units[number]) - counted))
            counted = 0

        found = work_through(journal, names, compute, done)
        answers: list[Any] = [None] * len(asked)
        for unit, results in zip(units, found, strict=True):
            for index, (tokens, finish) in zip(unit, results, strict=True):
                answers[index] = self._answer(asked[index], list(tokens), finish)
        return answers

    def _generate_unit(self, asked: Sequence[Asked], on_done: Callable[[int], None]) -> list[_Row]:
        rows = [_Row(i, one, self._random(one)) for i, one in enumerate(asked)]
        waiting, active = deque(rows), list[_Row]()
        held: RowCache | None = None
        room = max(1, min(self._rows, 16 * self._budget // (len(asked[0].ids) + self._limit)))
        while waiting or active:
            new = [waiting.popleft() for _ in range(min(room - len(active), len(waiting)))]
            if new:
                for some, joining in self._read(new):
                    held = joining if held is None else held.join(joining)
                    active += some
                held, active = self._without_ended(held, active, on_done)
            if not active:
                held = None
                continue
            assert held is not None
            held = self._step_until_some_ended(held, active, bool(waiting))
            held, active = self._without_ended(held, active, on_done)
        return rows

    def _without_ended(
        self, held: RowCache | None, active: list[_Row], on_done: Callable[[int], None]
    ) -> tuple[RowCache | None, list[_Row]]:
        going_on = [place for place, row in enumerate(active) if row.finish is None]
        if len(going_on) == len(active):
            return held, active
        on_done(len(active) - len(going_on))
        if not going_on or held is None:
            return None, []
        return held.select(going_on), [active[place] for place in going_on]

    def _random(self, asked: Asked) -> torch.Generator | None:
        if self._sampling is None:
            return None
        place = int(name_of(asked.ids), 16) % 2**62
        return torch.Generator(self._reader.device).manual_seed(seed_of(self._seed, place, asked.ordinal))

    # ------------------------------------------------------------------------------------------------------ tokens
    def _read(self, rows: Sequence[_Row]) -> list[tuple[list[_Row], RowCache]]:
        """Read the prompts of new rows and take the first token of each."""
        by_text: dict[tuple[int, ...], list[_Row]] = {}
        for row in rows:
            by_text.setdefault(row.asked.ids, []).append(row)
        texts = sorted(by_text)
        found = []
        for pack in packs(texts, self._budget):
            tree, taken = grow(texts[pack.start : pack.stop]), Taken()
            hidden = self._reader.hidden(tree, taken)
            self.tokens_computed += len(tree)
            leaf_of = dict(zip(texts[pack.start : pack.stop], tree.leaves, strict=True))
            some = [row for text in texts[pack.start : pack.stop] for row in by_text[text]]
            leaves = [leaf_of[row.asked.ids] for row in some]
            config = self._reader.model.config
            held = RowCache.from_forest(tree, leaves, taken, config, self._reader.is_zaya)
            ends = torch.tensor([int(tree.ends[leaf]) - 1 for leaf in leaves], device=hidden.device)
            logits = torch.cat([logits for _, logits in self._reader.logits(hidden[ends])])
            self._take(some, logits)
            found.append((some, held))
        return found

    def _step_until_some_ended(self, held: RowCache, rows: Sequence[_Row], others_wait: bool) -> RowCache:
        """Decoding steps until rows have ended that are worth being put together anew."""
        reader = self._reader
        cache = held.to_cache(reader.model, reader.is_zaya)
        lengths, mask = held.lengths.clone(), held.mask().to(reader.device)
        while True:
            tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=reader.device)
            logits = self._step(tokens, cache, lengths, mask)
            lengths += 1
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            self.tokens_computed += sum(row.finish is None for row in rows)
            self._take(rows, logits)
            ended = sum(row.finish is not None for row in rows)
            if ended == len(rows) or ended * _ENDED >= len(rows) * (1 if others_wait else 2):
                return RowCache.from_cache(cache, lengths, reader.is_zaya)

    @torch.no_grad()
    def _step(self, tokens: Tensor, cache: Any, lengths: Tensor, mask: Tensor) -> Tensor:
        """Logits ``[B, V]`` behind one token ``[B, 1]`` per row."""
        reader = self._reader
        told = {}
        if not reader.is_zaya:  # whose cache knows what padding is
            told["attention_mask"] = torch.nn.functional.pad(mask, (0, 1), value=1)
            told["position_ids"] = lengths[:, None].to(reader.device)
        logits = reader.step(tokens, cache, **told)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _take(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """The next token of each row; rows that have ended stay as they are."""
        if self._sampling is not None:
            config = GenerationConfig(**self._sampling)
            logits = RowSampler(config, [row.generator for row in rows])(None, logits)  # type: ignore[misc]
        new = logits.argmax(-1).tolist()
        checked = []
        for row, token in zip(rows, new, strict=True):
            if row.finish is not None:
                continue
            row.tokens.append(token)
            if token in self._stops:
                row.finish = "eos" if token in self._ends else "stop"
            elif self._until:
                checked.append(row)
        if checked:
            texts = self._tokenizer.batch_decode([row.tokens[-self._window :] for row in checked])
            for row, text in zip(checked, texts, strict=True):
                if any(stop in text for stop in self._until) and not self._is_thinking(row):
                    row.finish = "stop"
        for row in rows:
            if row.finish is None and len(row.tokens) >= self._limit:
                row.finish = "length"

    # ------------------------------------------------------------------------------------------------------- texts
    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def _opens_thought(self, prompt: str, text: str) -> bool:
        assert self._thinking is not None
        return prompt.rstrip().endswith(self._thinking.start) or text.lstrip().startswith(self._thinking.start)

    def _is_thinking(self, row: _Row) -> bool:
        """Whether a row is within a thought, where stop strings do not count."""
        if self._thinking is None:
            return False
        text = self._decode(row.tokens)
        if self._thinking.end in text:
            answer = text.rpartition(self._thinking.end)[2]
            return not any(stop in answer for stop in self._until)
        return self._opens_thought(row.asked.prompt, text)

    def _answer(self, asked: Asked, tokens: list[int], finish: str) -> Answer:
        shown = tokens[:-1] if finish != "length" and tokens and tokens[-1] in self._stops else tokens
        count = len(tokens)
        if self._thinking is not None:
            raw = self._decode(shown)
            if self._thinking.end in raw:
                while shown and self._thinking.end in self._decode(shown[1:]):
                    shown = shown[1:]
                text = self._decode(shown).rpartition(self._thinking.end)[2]
                special = self._tokenizer.all_special_tokens
                for mark in special:
                    text = text.replace(mark, "")
                return Answer(self._before_stop(text.lstrip()), count, finish, False)
            if self._opens_thought(asked.prompt, raw):
                return Answer("", count, finish, True)
        text = self._before_stop(self._decode(shown, skip_special_tokens=True))
        raw = self._decode(shown)
        if finish == "stop" and any(stop in raw for stop in self._until):
            # A stop string of which a special token is part is gone from `text`: end where it begins.
            while shown and any(stop in self._decode(shown) for stop in self._until):
                last, shown = shown[-1], shown[:-1]
            cut = self._before_stop(self._decode([*shown, last], skip_special_tokens=True))
            text = min(text, cut, key=len)
        return Answer(text, count, finish, False)

    def _before_stop(self, text: str) -> str:
        for stop in self._until:
            text = text.split(stop)[0]
        return text


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    own = tokenizer.eos_token_id
    return frozenset([*ids, *([] if own is None else [own])])
