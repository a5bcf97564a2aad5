"""Log-likelihoods of continuations: requests read as forests of texts, and only the logits that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zaya_hf.token_tree import grow, packs

from .forests import ForestReader
from .journal import Journal, name_of, work_through


@dataclass(frozen=True)
class Continuation:
    """What is asked for.

    Attributes:
        given: the tokens that the model reads: context and continuation but its last token, cut from the left to what
            the model takes.
        targets: the continuation's tokens; `given` ends with all but the last of them.
    """

    given: tuple[int, ...]
    targets: tuple[int, ...]


def continuation(context: Sequence[int], targets: Sequence[int], max_length: int) -> tuple[Continuation, bool]:
    """The request for `targets` after `context`, and whether it was cut.

    Args:
        max_length: tokens that the model reads at most. One more fits, the last one, which is only predicted.

    Raises:
        ValueError: the context or the continuation has no token, or the continuation alone does not fit.
    """
    if not context or not targets:
        raise ValueError(
            f"a {'context' if not context else 'continuation'} has no token of its own; lm-eval's tasks put a space or "
            "a line end between the two"
        )
    if len(targets) > max_length:
        raise ValueError(f"a continuation has {len(targets)} tokens, but max_length is {max_length}")
    whole = (*context, *targets)
    return Continuation(whole[-(max_length + 1) :][:-1], tuple(targets)), len(whole) > max_length + 1


class LikelihoodScorer:
    """Scores continuations.

    Args:
        reader: the model.
        token_budget: tokens of a forest at most.
    """

    def __init__(self, reader: ForestReader, token_budget: int):
        self._reader, self._budget = reader, token_budget
        #: tokens that went through the model, since the start
        self.tokens_computed = 0

    def score(
        self, requests: Sequence[Continuation], journal: Journal, on_done: Callable[[int], None]
    ) -> list[tuple[float, bool]]:
        """For each request the sum of its targets' log-probabilities, in nats, and whether each target is the
        likeliest token at its place.

        Args:
            on_done: is called with numbers of requests that are done.
        """
        asked: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            asked.setdefault(request.given, []).append(index)
        texts = sorted(asked)
        units = packs(texts, self._budget)
        members = [[index for text in texts[unit.start : unit.stop] for index in asked[text]] for unit in units]
        names = [
            name_of("likelihoods", [(requests[i].given, requests[i].targets) for i in indices]) for indices in members
        ]

        def compute(number: int) -> list[tuple[float, bool]]:
            unit = units[number]
            return self._score_forest(texts[unit.start : unit.stop], members[number], requests)

        found = work_through(journal, names, compute, lambda number: on_done(len(members[number])))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for indices, values in zip(members, found, strict=True):
            for index, (likelihood, greedy) in zip(indices, values, strict=True):
                results[index] = (likelihood, greedy)
        return results

    def _score_forest(
        self, texts: Sequence[tuple[int, ...]], members: Sequence[int], requests: Sequence[Continuation]
    ) -> list[tuple[float, bool]]:
        tree = grow(texts)
        self.tokens_computed += len(tree)
        leaves = dict(zip(texts, tree.leaves, strict=True))
        longest: dict[tuple[int, ...], int] = {}
        for index in members:
            request = requests[index]
            longest[request.given] = max(longest.get(request.given, 0), len(request.targets))
        paths = {given: tree.path(leaves[given], tokens) for given, tokens in longest.items()}
        # Every target: where its logits come from, which token it is, and whose it is.
        places = np.concatenate([paths[requests[i].given][-len(requests[i].targets) :] for i in members])
        targets = np.concatenate([np.asarray(requests[i].targets) for i in members])
        owners = np.repeat(np.arange(len(members)), [len(requests[i].targets) for i in members])
        rows, which = np.unique(places, return_inverse=True)
        order = np.argsort(which, kind="stable")
        which, targets, owners = which[order], targets[order], owners[order]

        hidden = self._reader.hidden(tree)
        hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        sums, likeliest = np.zeros(len(members)), np.ones(len(members), dtype=bool)
        for first, scores in self._reader.log_probabilities(hidden):
            here = slice(*np.searchsorted(which, [first, first + len(scores)]))
            row = torch.from_numpy(which[here] - first).to(scores.device)
            target = torch.from_numpy(targets[here]).to(scores.device)
            highest, chosen = scores.amax(dim=-1), scores[row, target]
            # The likeliest token is the first of the highest; which one that is need be asked only where it may be it.
            likely = chosen == highest[row]
            likely[likely.clone()] = scores[row[likely]].argmax(-1) == target[likely]
            np.add.at(sums, owners[here], chosen.double().cpu().numpy())
            np.logical_and.at(likeliest, owners[here], likely.cpu().numpy())
        return [(float(value), bool(flag)) for value, flag in zip(sums, likeliest, strict=True)]
