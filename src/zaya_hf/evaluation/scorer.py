"""The scorer: a model of lm-eval's that computes what requests share once, and only the logits that they ask for.

Its numbers are those of lm-eval's own `hf` model, whose tokenisation it inherits; what differs is named in
`Scorer.generate_until`. A model that does not read forests of texts (see `forests`) is left to lm-eval's code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils as lm_eval_utils
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
from tqdm import tqdm

import zaya_hf  # noqa: F401, registers ZAYA with transformers

from .forests import CannotRead, ForestReader
from .generating import Asked, TextGenerator, Thinking
from .journal import Journal, process
from .likelihoods import Continuation, LikelihoodScorer, continuation

# Of the trial that every model goes through: ordinary words, which no tokenizer lacks.
_SAMPLE = (
    "The ship left the harbour early in the morning, and 12 people stood on the shore to see it go; none of them knew "
    "when, or whether, it would come back."
)
_TEXTS_AT_A_TIME = 512  # for the tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerFacts:
    """How a generated answer came about.

    Attributes:
        tokens: generated ones.
        finish: "eos", "stop" (a stop string) or "length".
        prompt_truncated: whether the beginning of the prompt was cut off.
        thought_without_end: whether it is empty because a thought did not end.
    """

    tokens: int
    finish: str
    prompt_truncated: bool
    thought_without_end: bool = False


@register_model("zaya")
class Scorer(HFLM):
    """lm-eval's `hf` model, with other ways to the same numbers.

    Args:
        pretrained: a model, a folder, or a name on the Hub.
        token_budget: tokens that go through the model at a time, at most; a longer text goes alone.
        rows: texts that are generated side by side, at most.
        thinking: ``{"start": "<think>", "end": "</think>"}`` of a model that thinks before it answers: the answer is
            what follows the thought, and nothing if the thought does not end.
        seed: of sampled texts.
        kwargs: of lm-eval's `HFLM`. `think_end_token` is read as the end of `thinking`.

    Raises:
        ValueError: for sizes that are not positive.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        token_budget: int = 4096,
        rows: int = 64,
        thinking: dict[str, str] | None = None,
        seed: int = 0,
        device: str | None = None,
        **kwargs: Any,
    ):
        token_budget, rows, seed = int(token_budget), int(rows), int(seed)  # lm-eval's command line gives strings
        if token_budget < 1 or rows < 1:
            raise ValueError(f"token_budget is {token_budget} and rows {rows}: both must be at least 1")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        end = kwargs.get("think_end_token")
        super().__init__(pretrained, device=device, **kwargs)
        # Every process asks for everything and gets everything; who computes what is ours to say.
        self._rank, self._world_size = 0, 1
        if thinking is None and end is not None:
            text = self.tokenizer.decode([int(end)]) if str(end).isdigit() else str(end)
            thinking = {"start": "<think>", "end": text}
        self._thinking = None if thinking is None else Thinking(thinking["start"], thinking["end"])
        if self._thinking is not None and end is None:  # for lm-eval's own code
            ids = self.tokenizer(self._thinking.end, add_special_tokens=False)["input_ids"]
            self.think_end_token = ids[0] if len(ids) == 1 else self._thinking.end
        self._token_budget, self._rows, self._seed = token_budget, rows, seed
        self._reader: ForestReader | None = None
        self._journal = Journal(None)
        #: why requests are left to lm-eval's own code; None: they are not
        self.why_not: str | None = None
        try:
            self._reader = ForestReader(self.model, self.tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])
        except CannotRead as reason:
            self.why_not = str(reason)
            logger.warning("%s; lm-eval's own code scores it.", reason)
        self.start(None)

    def start(self, journal: Path | None) -> None:
        """Begin a task: counts from 0; answers are kept in the folder `journal`, and a killed run's read from it."""
        self._journal.close()
        self._journal = Journal(journal)
        #: of the task so far. `tokens_given` counts every request's tokens, `tokens_computed` what went through the
        #: model in this process; `unwatched_answers` are of lm-eval's own code, which does not say how they ended
        self.counts: dict[str, Any] = {
            "requests": 0,
            "tokens_given": 0,
            "tokens_computed": 0,
            "tokens_generated": 0,
            "truncated_prompts": 0,
            "truncated_answers": 0,
            "empty_answers": 0,
            "thoughts_without_end": 0,
            "unwatched_answers": 0,
            "seconds": 0.0,
        }
        #: by prompt and how many of that prompt came before: with repeats there are several
        self.answer_facts: dict[tuple[str, int], AnswerFacts] = {}

    # ------------------------------------------------------------------------------------------------- likelihoods
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation) the log-likelihood in nats, and whether greedy decoding would give it."""
        started = time.perf_counter()
        pairs = [request.args for request in requests]
        tokens = self._encode_pairs(pairs)
        found = self._loglikelihood_tokens(
            [(pair, *ids) for pair, ids in zip(pairs, tokens, strict=True)], disable_tqdm=disable_tqdm
        )
        self.counts["seconds"] += time.perf_counter() - started
        return found

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        asked, cut = [], 0
        for _, context, targets in requests:
            request, was_cut = continuation(context, targets, self.max_length)
            asked.append(request)
            cut += was_cut
        self._count(asked, cut)
        if self._reader is None:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        found = self._score(asked, disable_tqdm)
        for (pair, _, _), answer in zip(requests, found, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        return found

    def _score(self, asked: Sequence[Continuation], disable_tqdm: bool) -> list[tuple[float, bool]]:
        assert self._reader is not None
        scorer = LikelihoodScorer(self._reader, self._token_budget)
        with self._bar(len(asked), "log-likelihoods", disable_tqdm) as bar:
            found = scorer.score(asked, self._journal, lambda done: bar.update(done) and None)
        self.counts["tokens_computed"] += scorer.tokens_computed
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """For each text its log-likelihood in nats, read in windows of `max_length` tokens of which one is context, as
        `HFLM` does."""
        started = time.perf_counter()
        texts = [request.args[0] for request in requests]
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, ids in enumerate(self._encode(texts)):
            rolling = lm_eval_utils.get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, targets in map(lm_eval_utils.make_disjoint_window, rolling):
                windows.append((None, context, targets))
                owners.append(owner)
        sums = [0.0] * len(texts)
        if windows:
            for owner, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
                sums[owner] += likelihood
        for text, likelihood in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), likelihood)
        self.counts["seconds"] += time.perf_counter() - started
        return sums

    # -------------------------------------------------------------------------------------------------- generation
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, without its stop string and what follows.

        Otherwise than in `HFLM` a row ends at a stop string that is one special token (there, in a batch, rows ran on
        until all had stopped, and the text behind such a token was kept), sampled texts depend on the seed, the prompt
        and its number among equal ones alone, and an unfinished thought is no answer.

        Raises:
            ValueError: the answer's budget leaves no room for a prompt.
        """
        started = time.perf_counter()
        answers: list[str | None] = [None] * len(requests)
        for settings, indices in self._by_settings(requests):
            found = self._generate([requests[i] for i in indices], settings, disable_tqdm)
            for index, answer in zip(indices, found, strict=True):
                answers[index] = answer
                self.cache_hook.add_partial("generate_until", requests[index].args, answer)
        self.counts["seconds"] += time.perf_counter() - started
        return [answer for answer in answers if answer is not None]

    @staticmethod
    def _by_settings(requests: list[Any]) -> list[tuple[dict[str, Any], list[int]]]:
        groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for index, request in enumerate(requests):
            settings = request.args[1]
            groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(index)
        return list(groups.values())

    def _generate(self, requests: list[Any], settings: dict[str, Any], disable_tqdm: bool) -> list[str]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tok_decode(self.eot_token_id, False))
        limit = kwargs.pop("max_gen_toks")
        room = self.max_length - limit
        if room < 1:
            raise ValueError(
                f"max_gen_toks {limit} leaves no room for a prompt in max_length {self.max_length}: lower the first or "
                "raise the second"
            )
        prompts = [request.args[0] for request in requests]
        encoded = self._encode(prompts)
        cut = [len(ids) > room for ids in encoded]
        unknown = TextGenerator.unknown(kwargs, self.model)
        if self._reader is None or unknown:
            if unknown:
                logger.warning("generation with %s is left to lm-eval's own code.", ", ".join(unknown))
            self.counts["requests"] += len(requests)
            self.counts["truncated_prompts"] += sum(cut)
            texts = list(super().generate_until(requests, disable_tqdm=disable_tqdm))
            self.counts["unwatched_answers"] += len(texts)
            self.counts["empty_answers"] += sum(not text.strip() for text in texts)
            return texts
        ordinals: dict[str, int] = {}
        asked = []
        for prompt, ids in zip(prompts, encoded, strict=True):
            ordinal = ordinals.get(prompt, 0)
            ordinals[prompt] = ordinal + 1
            asked.append(Asked(tuple(ids[-room:]) or (self.prefix_token_id,), prompt, ordinal))
        generator = TextGenerator(
            self._reader,
            self.tokenizer,
            until=until,
            limit=limit,
            sampling=kwargs,
            rows=self._rows,
            token_budget=self._token_budget,
            thinking=self._thinking,
            seed=self._seed,
        )
        with self._bar(len(asked), "answers", disable_tqdm) as bar:
            found = generator.generate(asked, self._journal, lambda done: bar.update(done) and None)
        self.counts["tokens_computed"] += generator.tokens_computed
        self.counts["requests"] += len(asked)
        for request, answer, was_cut in zip(asked, found, cut, strict=True):
            facts = AnswerFacts(answer.tokens, answer.finish, was_cut, answer.thought_without_end)
            self.answer_facts[request.prompt, request.ordinal] = facts
            self.counts["tokens_given"] += len(request.ids)
            self.counts["tokens_generated"] += answer.tokens
            self.counts["truncated_prompts"] += was_cut
            self.counts["truncated_answers"] += answer.finish == "length"
            self.counts["empty_answers"] += not answer.text.strip()
            self.counts["thoughts_without_end"] += answer.thought_without_end
        return [answer.text for answer in found]

    # ------------------------------------------------------------------------------------------------ tokenisation
    def _encode(self, texts: Sequence[str], special: bool | None = None) -> list[list[int]]:
        """`tok_encode` of every text; equal ones once, and many at a time."""
        begins = self.tokenizer.decode(self.prefix_token_id)
        kinds: dict[bool, list[str]] = {True: [], False: []}
        for text in dict.fromkeys(texts):
            kinds[special is None and has_bos_prefix(text, begins)].append(text)
        found: dict[str, list[int]] = {}
        for has_it, of_kind in kinds.items():
            add = False if has_it else special if special is not None else self.add_bos_token
            told = {} if add is None else {"add_special_tokens": add}
            for first in range(0, len(of_kind), _TEXTS_AT_A_TIME):
                some = of_kind[first : first + _TEXTS_AT_A_TIME]
                found.update(zip(some, self.tokenizer(some, **told)["input_ids"], strict=True))
        return [found[text] for text in texts]

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """What `HFLM` makes of (context, continuation): spaces at the end of a context belong to the continuation, and
        the boundary is where the context's own tokens end."""
        split: list[tuple[str | None, str]] = []
        for context, text in pairs:
            kept = context.rstrip()
            split.append((kept, context[len(kept) :] + text) if context else (None, text))
        with_context = [(context, text) for context, text in split if context is not None]
        contexts = iter(self._encode([context for context, _ in with_context]))
        wholes = iter(self._encode([context + text for context, text in with_context]))
        alone = iter(self._encode([text for context, text in split if context is None], special=False))
        tokens = []
        for kept_context, _ in split:
            ids = next(alone) if kept_context is None else next(contexts)
            if kept_context is not None:
                # A context of nothing but spaces, and no BOS: as without a context.
                tokens.append((ids or [self.prefix_token_id], next(wholes)[len(ids) :]))
                continue
            if not ids:
                raise ValueError("a continuation without a context has no token; it is empty")
            begins_itself = ids[0] == self.prefix_token_id
            tokens.append((ids[:1], ids[1:]) if begins_itself else ([self.prefix_token_id], ids))
        return tokens

    # ------------------------------------------------------------------------------------------------------ counts
    def _count(self, asked: Sequence[Continuation], cut: int) -> None:
        self.counts["requests"] += len(asked)
        self.counts["tokens_given"] += sum(len(request.given) for request in asked)
        self.counts["truncated_prompts"] += cut

    @staticmethod
    def _bar(total: int, what: str, disabled: bool) -> Any:
        rank, _ = process()
        return tqdm(total=total, desc=what, disable=True if disabled or rank else None, leave=False)
