"""Heads for labels instead of next words: of a row, of every token, and of an answer's first and last token.

Tensors are named as in transformers' generic heads (`score`, `qa_outputs`) on the backbone `model`, so a base
checkpoint in either layout loads with a new head and a warning that names it. transformers itself has none of these for
`zaya`.

What is a token and what is padding is what the backbone went by. transformers' generic sequence head instead looks for
`pad_token_id` among the ids: wrong where that id is also a word, and blind to padding among `inputs_embeds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput, can_return_tuple

from .cache import one_cache
from .configuration_zaya import ZayaConfig
from .history import PADDING
from .modeling_zaya import ZayaModel, ZayaPreTrainedModel
from .outputs import ZayaModelOutput, _OldCacheName
from .task_losses import answer_loss, row_loss, token_loss
from .visibility import is_free_to_read


@dataclass
class ZayaSequenceClassifierOutput(ModelOutput, _OldCacheName):
    """Output of `ZayaForSequenceClassification`.

    Attributes:
        loss: scalar, fp32 or wider, when labels were given.
        logits: ``[B, num_labels]``.
        cache, hidden_states, attentions, router_logits, router_slots, tokens_per_slot: as in `ZayaModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    router_slots: tuple[Tensor, ...] | None = None
    tokens_per_slot: Tensor | None = None


@dataclass
class ZayaTokenClassifierOutput(ModelOutput):
    """Output of `ZayaForTokenClassification`.

    Attributes:
        loss: scalar, fp32 or wider, when labels were given.
        logits: ``[B, S, num_labels]``.
        hidden_states, attentions, router_logits, router_slots, tokens_per_slot: as in `ZayaModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    router_slots: tuple[Tensor, ...] | None = None
    tokens_per_slot: Tensor | None = None


@dataclass
class ZayaQuestionAnsweringOutput(ModelOutput):
    """Output of `ZayaForQuestionAnswering`.

    Attributes:
        loss: scalar, fp32 or wider, when both positions were given.
        start_logits, end_logits: ``[B, S]``.
        hidden_states, attentions, router_logits, router_slots, tokens_per_slot: as in `ZayaModelOutput`.
    """

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    router_slots: tuple[Tensor, ...] | None = None
    tokens_per_slot: Tensor | None = None


class ZayaTaskModel(ZayaPreTrainedModel):
    """What the classes with a task head share: the backbone `model`, and how it is run."""

    #: read by `stock_differences`
    stock_has_class: ClassVar[bool] = False

    def __init__(self, config: ZayaConfig):
        config = ZayaConfig.from_native(config)
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.model = ZayaModel(config)

    def _run(self, input_ids: Tensor | None, arguments: dict[str, Any]) -> ZayaModelOutput:
        """The backbone's output; `num_items_in_batch` is the loss's and stays here."""
        rest = {name: value for name, value in arguments.items() if name != "num_items_in_batch"}
        output: ZayaModelOutput = self.model(input_ids, return_dict=True, **rest)
        return output


def _records(output: ZayaModelOutput) -> dict[str, Any]:
    names = ("hidden_states", "attentions", "router_logits", "router_slots", "tokens_per_slot")
    return {name: getattr(output, name) for name in names}


class ZayaForSequenceClassification(ZayaTaskModel):
    """`ZayaModel` with one linear layer on the last token of every row: labels, scores or rewards of whole texts.

    Args:
        config: a `ZayaConfig`, or transformers' own, which is converted. `num_labels` (or `id2label`) is the width of
            the head; `problem_type` says which loss belongs to it.
    """

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        self.score = nn.Linear(self.config.hidden_size, self.num_labels, bias=False)
        self.loss_function = row_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = False,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ZayaSequenceClassifierOutput:
        """Logits of every row, read off its last token, and the loss when labels are given.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, output_router_logits, past_key_values: as in
                `ZayaModel.forward`. Without a mask, ids equal to the config's `pad_token_id` at either end of a row are
                padding; embeddings are all tokens.
            labels: ``[B]`` int64 for one label of several (-100: none); ``[B, num_labels]`` floats from 0 to 1 or
                bools for several labels at once; ``[B]`` or ``[B, num_labels]`` numbers for regression, which is what
                `num_labels=1` means. `config.problem_type` decides where it is set.
            use_cache: whether to fill and return a cache.
            num_items_in_batch: what to divide the loss by; the labels of this call if it is not given.

        Returns:
            a `ZayaSequenceClassifierOutput`. The logits of a row of nothing but padding mean nothing.

        Raises:
            ValueError: for rows that hold several documents, for a batch of ids where nothing says what is padding, for
                labels of a wrong shape, kind or range, and as `ZayaModel.forward`; TypeError as there.
        """
        if attention_mask is None and input_ids is not None and input_ids.ndim == 2:
            attention_mask = _mask_of_ids(input_ids, self.config.pad_token_id)
        arguments: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments |= {"inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs}
        output = self._run(input_ids, arguments | {"cache": one_cache(cache, past_key_values)})
        assert output.last_hidden_state is not None
        logits = self.score(_last_tokens(output.last_hidden_state, output.segments))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                pooled_logits=logits,
                config=self.config,
                num_items_in_batch=kwargs.get("num_items_in_batch"),
            )
        return ZayaSequenceClassifierOutput(loss=loss, logits=logits, cache=output.cache, **_records(output))


def _mask_of_ids(input_ids: Tensor, pad_token_id: int | None) -> Tensor | None:
    """``[B, S]`` bool, False for padding at either end of a row; None where there is none. Raises ValueError."""
    if pad_token_id is None:
        if input_ids.shape[0] < 2:
            return None
        raise ValueError(
            f"{input_ids.shape[0]} rows, and nothing says what is padding: give attention_mask or set "
            "config.pad_token_id."
        )
    word = input_ids != pad_token_id
    if is_free_to_read(word) and bool(word.all()):
        return None
    after_the_first = word.long().cumsum(1) > 0
    before_the_last = word.flip(1).long().cumsum(1).flip(1) > 0
    return after_the_first & before_the_last


def _last_tokens(hidden: Tensor, segments: Tensor | None) -> Tensor:
    """``[B, D]``: of ``hidden[B, S, D]`` the last real token of every row. Raises ValueError for packed rows."""
    if hidden.shape[1] == 0:
        raise ValueError("the rows have no tokens; there is nothing to read a label off.")
    if segments is None:
        return hidden[:, -1]
    real = segments != PADDING
    columns = torch.arange(segments.shape[1], device=segments.device)
    last = torch.where(real, columns, 0).amax(1)
    if is_free_to_read(segments):
        _check_one_document(segments, real)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last.to(hidden.device)]


def _check_one_document(segments: Tensor, real: Tensor) -> None:
    first = segments.masked_fill(~real, torch.iinfo(segments.dtype).max).amin(1)
    several = real.any(1) & (segments.amax(1) != first)
    if bool(several.any()):
        row = int(several.nonzero()[0])
        documents = int(segments[row][real[row]].unique().numel())
        raise ValueError(
            f"row {row} holds {documents} documents, but a row has one label: give every document a row of its own "
            "(the collator must not pack, and position_ids must not restart)."
        )


class ZayaForTokenClassification(ZayaTaskModel):
    """`ZayaModel` with dropout and one linear layer on every token.

    Args:
        config: a `ZayaConfig`, or transformers' own, which is converted. Extra keys as in transformers' generic class:
            `classifier_dropout` (or `hidden_dropout`; 0.1), `token_classification_bias` (True).
    """

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        config = self.config
        given = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in given if rate is not None), 0.1))
        self.score = nn.Linear(
            config.hidden_size, self.num_labels, bias=getattr(config, "token_classification_bias", True)
        )
        self.loss_function = token_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ZayaTokenClassifierOutput:
        """Logits of every token, which has seen those before it only, and the loss when labels are given.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds, output_router_logits, and for packed rows
                cu_seq_lens_q, cu_seq_lens_k, seq_idx: as in `ZayaModel.forward`.
            labels: ``[B, S]`` int64, not shifted; -100 marks tokens without a label, and padding has none.
            num_items_in_batch: what to divide the loss by; the labels of this call if it is not given.

        Returns:
            a `ZayaTokenClassifierOutput`.

        Raises:
            ValueError: for labels of a wrong shape, kind or range, and as `ZayaModel.forward`; TypeError as there.
        """
        arguments: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments |= {"inputs_embeds": inputs_embeds, "use_cache": False, **kwargs}
        output = self._run(input_ids, arguments)
        logits = self.score(self.dropout(output.last_hidden_state))
        loss = None
        if labels is not None:
            if output.segments is not None and output.segments.shape == getattr(labels, "shape", None):
                labels = labels.masked_fill((output.segments == PADDING).to(labels.device), -100)
            count = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=count)
        return ZayaTokenClassifierOutput(loss=loss, logits=logits, **_records(output))


class ZayaForQuestionAnswering(ZayaTaskModel):
    """`ZayaModel` with two scores on every token: that an answer starts there, and that it ends there.

    Args:
        config: a `ZayaConfig`, or transformers' own, which is converted.
    """

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        self.qa_outputs = nn.Linear(self.config.hidden_size, 2)
        self.loss_function = answer_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> ZayaQuestionAnsweringOutput:
        """Two scores of every token, and the loss when both positions are given.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds, output_router_logits: as in `ZayaModel.forward`.
            start_positions, end_positions: ``[B]`` int64, columns of the answer's first and last token. Columns outside
                the row (where a text was cut) count for nothing.

        Returns:
            a `ZayaQuestionAnsweringOutput`.

        Raises:
            ValueError: for positions of a wrong shape, and as `ZayaModel.forward`; TypeError as there.
        """
        arguments: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments |= {"inputs_embeds": inputs_embeds, "use_cache": False, **kwargs}
        output = self._run(input_ids, arguments)
        start_logits, end_logits = self.qa_outputs(output.last_hidden_state).unbind(-1)
        loss = None
        if (start_positions is None) != (end_positions is None):
            raise ValueError("give both start_positions and end_positions, or neither.")
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return ZayaQuestionAnsweringOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **_records(output)
        )


__all__ = [
    "ZayaForQuestionAnswering",
    "ZayaForSequenceClassification",
    "ZayaForTokenClassification",
    "ZayaQuestionAnsweringOutput",
    "ZayaSequenceClassifierOutput",
    "ZayaTaskModel",
    "ZayaTokenClassifierOutput",
]
