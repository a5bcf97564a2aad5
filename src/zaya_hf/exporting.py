"""A model with its cache as one module, for `torch.export` and what builds on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache

from .cache import adopt, layer_of
from .cache_layers import QK, VALUE
from .history import StaticRowHistory


class ExportableDecoder(nn.Module):
    """Prompt and decoding steps in one module, whose cache is buffers that a call writes.

    transformers' own modules for this (`TorchExportableModuleWithStaticCache`) know keys and values only; here the
    convolution states, and which slots hold padding, are buffers too. Exported once with a dynamic number of tokens,
    the program takes prompts of any length and single tokens. Every layer has a slot for every token, sliding ones too.

    Args:
        model: a causal ZAYA model in eval mode.
        batch_size: rows of every call.
        max_cache_len: tokens of a row, padding included. A program cannot check it: more is an index error of torch.
        logits_to_keep: return the logits of the last n tokens of a call; 0: of all.

    Raises:
        ValueError: for a model in training mode, or sizes below 1.
    """

    #: segment and position of every slot, ``[2, B, max_cache_len]`` int64; a buffer like all else that is written
    rows: Tensor

    def __init__(self, model: Any, batch_size: int, max_cache_len: int, logits_to_keep: int = 0):
        super().__init__()
        if model.training:
            raise ValueError("ExportableDecoder is for inference: call eval() first.")
        if batch_size < 1 or max_cache_len < 1:
            raise ValueError(
                f"batch_size is {batch_size} and max_cache_len {max_cache_len}; both have to be 1 or more."
            )
        self.model, self.logits_to_keep = model, logits_to_keep
        self.cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
        history = adopt(self.cache, model.config)
        assert isinstance(history, StaticRowHistory)
        self.history = history
        history.has_had_holes = True  # so that padding may lie anywhere, and no layer uses its slots in turn
        padding = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():  # claims all memory
            model(input_ids=padding, attention_mask=padding, cache=self.cache, logits_to_keep=1)
        for name, tensor in self._memory():
            self.register_buffer(name, tensor.clone(), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, cached: Tensor) -> Tensor:
        """Feed tokens behind those that are cached.

        Args:
            input_ids: ``[B, S]`` int64.
            attention_mask: ``[B, S]`` int64, 0 for padding among these tokens.
            cached: ``[]`` int64, tokens fed before, padding included: 0 begins anew, otherwise as many as all calls
                since then have fed.

        Returns:
            logits ``[B, S or logits_to_keep, vocab_size]``.
        """
        self._attach(cached)
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=self.cache,
            logits_to_keep=self.logits_to_keep,
        ).logits

    def _memory(self) -> list[tuple[str, Tensor]]:
        """Names and tensors of all that a call writes."""
        assert self.history._rows is not None
        memory = [("rows", self.history._rows)]
        for index in range(len(self.cache.layers)):
            layer = layer_of(self.cache, index)
            states = layer.conv_states
            memory += [(f"keys_{index}", layer.keys), (f"values_{index}", layer.values)]
            memory += [(f"convolution_{index}", states[QK]), (f"delayed_value_{index}", states[VALUE])]
        return memory

    def _attach(self, cached: Tensor) -> None:
        """Let the cache write into the buffers, and count from `cached`."""
        self.history._rows, self.history.filled, self.history._length = self.rows, cached.clone(), None
        for index in range(len(self.cache.layers)):
            layer: Any = layer_of(self.cache, index)
            layer.keys, layer.values = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
            layer.conv_states[QK] = getattr(self, f"convolution_{index}")
            layer.conv_states[VALUE] = getattr(self, f"delayed_value_{index}")
            layer.seen = None
