"""A causal language model that reads forests of texts: hidden states of all tokens, and logits only where asked for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zaya_hf import tree_attention
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.token_tree import TokenTree, grow
from zaya_hf.tree_attention import Taken

#: logits that are held at a time, 256 MiB of them in fp32: 256 rows of 262,272 words, so that a read of the head's
#: weights, which are larger than any cache, is worth it
LOGITS_AT_A_TIME = 2**26

# How far the trial may be off, as a share of the largest logit: some hundred roundings of the dtype.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION = 0.08
# The same for the head alone, behind the same hidden states: a cap on logits is small where a forest's roundings are.
_HEAD_LOW_PRECISION = 2**-7
# Rotations of positions that depend on the longest text of a batch. The trial is too short to show it.
_OF_LENGTH = {"dynamic", "longrope"}

logger = logging.getLogger(__name__)


class ForestReader:
    """Reads forests with ZAYA, and with every class of transformers whose attention can be replaced.

    That it does so rightly is tried on the model itself: a small forest against its texts one by one.

    Args:
        model: in eval mode. Its attention implementation is set to one that computes what sdpa computes.
        sample: token ids of some ordinary text, for the trial, at least eight.

    Raises:
        CannotRead: the class is of another kind, or the trial failed; it says why.
    """

    def __init__(self, model: PreTrainedModel, sample: Sequence[int]):
        self.model = model
        self.is_zaya = isinstance(model, ZayaForCausalLM)
        self.device = model.device
        self._scores: Tensor | None = None
        self._decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
        self._head: Any = model.get_output_embeddings()
        # The older name of the argument warns in transformers' classes, and is the only one in other people's.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        if self._decoder is None or self._head is None or model.config.is_encoder_decoder:
            raise CannotRead(f"{type(model).__name__} is no decoder with a head")
        changing = _rope_kinds(model.config) & _OF_LENGTH
        if changing:
            raise CannotRead(
                f"the positions of {type(model).__name__} mean other things in a longer text (rope_type "
                f"{min(changing)}), so texts cannot be read together"
            )
        before = model.config._attn_implementation
        if self.is_zaya:
            model.set_attn_implementation("sdpa")
        elif tree_attention.can_read(model):
            tree_attention.prepare(model)
        else:
            raise CannotRead(f"the attention of {type(model).__name__} cannot be replaced")
        try:
            self._try_out(list(sample))
        except CannotRead:
            model.set_attn_implementation(before)
            raise
        except Exception as error:
            model.set_attn_implementation(before)
            raise CannotRead(f"{type(model).__name__} does not read forests of texts: {error!r}") from error

    @torch.no_grad()
    def hidden(self, tree: TokenTree, taken: Taken | None = None) -> Tensor:
        """``[T, hidden_size]``, normed: what the head reads.

        Args:
            taken: is filled with keys, values and, for ZAYA, the columns that go into its states.
        """
        ids = torch.from_numpy(tree.ids)[None].to(self.device)
        if self.is_zaya:
            masks = tree_attention.zaya_masks(tree, self.model.config, taken, self.device)
            output = self._decoder(input_ids=ids, attention_mask=masks, use_cache=False)
        else:
            positions = torch.from_numpy(tree.positions)[None].to(self.device)
            with tree_attention.reading(tree, taken):
                output = self._decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return output.last_hidden_state[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits of the next token for ``[n, hidden_size]``, some rows at a time: the first row's number, and
        ``[rows, V]`` in fp32 or wider."""
        words = self._head.weight.shape[0]
        rows = max(1, LOGITS_AT_A_TIME // words)
        for first in range(0, len(hidden), rows):
            logits = self._head(hidden[first : first + rows])
            yield first, logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As `logits`, through log-softmax. What is yielded lies in memory that the next rows take over.

        On a CPU getting and giving back hundreds of MiB for every few rows costs as much as the work itself, so that
        memory is kept. The kernel is the one that lm-eval calls: over 10^5 words its rounding in fp32 is some 1e-5 per
        token, always in one direction, and more exact sums would be other numbers than lm-eval's.
        """
        for first, logits in self.logits(hidden):
            if logits.device.type != "cpu":
                yield first, torch.log_softmax(logits, dim=-1)
                continue
            if self._scores is None or self._scores.dtype != logits.dtype or self._scores.numel() < logits.numel():
                self._scores = torch.empty_like(logits)
            scores = self._scores.view(-1)[: logits.numel()].view(logits.shape)
            torch.log_softmax(logits, dim=-1, out=scores)
            yield first, scores

    @torch.no_grad()
    def step(self, ids: Tensor, cache: Any, **told: Any) -> Tensor:
        """Logits ``[B, V]`` behind one new token per row, ``[B, 1]``, with a cache of the model's class."""
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **{self._cache_name: cache}, **told).logits[:, -1]
        return logits

    @torch.no_grad()
    def _try_out(self, sample: list[int]) -> None:
        third = max(len(sample) // 3, 1)
        begin, one, other = sample[:third], sample[third : 2 * third], sample[2 * third : 3 * third]
        texts = sorted({tuple(begin + one), tuple(begin + other), tuple(begin + one + other), tuple(other + one)})
        tree = grow(texts)
        hidden = self.hidden(tree)
        for text, leaf in zip(texts, tree.leaves, strict=True):
            path = torch.from_numpy(tree.path(leaf)).to(self.device)
            found = torch.cat([logits for _, logits in self.logits(hidden[path])])
            ids = torch.tensor([text], device=self.device)
            wanted = self.model(input_ids=ids, use_cache=False).logits[0].to(found.dtype)
            if not self._apart(found, wanted) <= _TOLERANCE.get(self.model.dtype, _LOW_PRECISION):
                raise CannotRead(
                    f"{type(self.model).__name__} reads a forest of texts otherwise than the texts one by one: logits "
                    f"differ by {self._apart(found, wanted):.2g} of the largest"
                )
            if text is not texts[0]:
                continue
            plain = self._decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
            found = torch.cat([logits for _, logits in self.logits(plain)])
            if not self._apart(found, wanted) <= _TOLERANCE.get(self.model.dtype, _HEAD_LOW_PRECISION):
                raise CannotRead(f"{type(self.model).__name__} does more to its logits than its head does")

    def _apart(self, found: Tensor, wanted: Tensor) -> float:
        """How far logits ``[n, V]`` are apart, as a share of the largest."""
        by_token = (found - wanted).abs().amax(-1) / wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)
        # In low precision an undecided router may choose otherwise for a token; that is no fault of the forest.
        return float(by_token.max() if self.model.dtype in _TOLERANCE else by_token.median())


def _rope_kinds(config: Any) -> set[str]:
    told = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [one for one in told.values() if isinstance(one, dict)]
    return {str(one.get("rope_type")) for one in (told, *by_layer_type)}


class CannotRead(Exception):
    """A model that reads texts one by one only."""
