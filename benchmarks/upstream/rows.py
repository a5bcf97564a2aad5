"""The rows that run one pair of models: prefill, ragged batches, decoding, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache

from zaya_hf.compiled_decoding import CompiledDecoding
from zaya_hf.ops import selection
from zaya_hf.testing import RecordedRun, record_run

from . import checks
from .floors import Call, make_call
from .pair import WAYS, Pair, Shapes
from .timing import Work

_CHECKED_STEPS = 16
_CHECKED_ROWS = 8
_CHECKED_CONTEXT = 32
_MEASURED_STEPS = 32  # then the cache starts again from the context
# Names that stand for every kind of weight; their gradients' norms are compared. Not the temperatures in bf16: of two
# numbers whose gradients are sums over all tokens with both signs, rounding leaves little.
_LOOKED_AT = (
    "embed_tokens.weight",
    "layers.0.self_attn.qkv_proj.q_proj.weight",
    "layers.0.self_attn.qkv_proj.conv_qk_grouped.weight",
    "layers.0.mlp.experts.gate_up_proj",
    "layers.0.mlp.experts.down_proj",
    "layers.1.mlp.gate.router_states_scale",
    "layers.1.self_attn.qk_norm.temp",
    "layers.1.post_mlp_residual_scale.residual_scale",
    "model.norm.weight",
)


class Row:
    """One line of the result.

    Attributes:
        name, what: for the reader.
        way: how ours is prepared, one of `pair.WAYS`; None: a row of training.
        checkpointing: for rows of training.
        reads: how often the weights are read: in training once more on the way back, and again for checkpointing.
        products: how often the products of a forward pass are done: training has two more for each.
        head_products: the same for the LM head, which checkpointing does not repeat.
    """

    way: str | None = "fused"
    checkpointing = False
    reads = products = head_products = 1

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what

    def work(self, pair: Pair, side: str) -> Work:
        """What is timed."""
        raise NotImplementedError

    def check(self, pair: Pair) -> str:
        """What was seen. Raises `checks.Failed`."""
        raise NotImplementedError

    def calls(self, pair: Pair) -> list[list[Call]]:
        """The forward calls of a sample, and of the samples after it if they differ."""
        raise NotImplementedError


class Prefill(Row):
    """One row of tokens, whole or in chunks, into a cache, with the logits of the last token."""

    def __init__(self, length: int, chunk: int | None = None, way: str = "fused") -> None:
        self.length, self.chunk, self.way = length, chunk or length, way
        parts = f" in chunks of {chunk}" if chunk else ""
        super().__init__(
            f"prefill-1x{length}{f'-chunks-of-{chunk}' if chunk else ''}{WAYS[way][0]}",
            f"1 x {length} tokens into a new cache{parts}, logits of the last token{WAYS[way][1]}",
        )

    def work(self, pair: Pair, side: str) -> Work:
        model, parts = pair.side(side), self._parts(pair)

        def run() -> None:
            cache = DynamicCache(config=model.config)
            for part in parts:
                model(part, cache=cache, use_cache=True, logits_to_keep=1)

        return Work(run)

    def _parts(self, pair: Pair) -> tuple[Tensor, ...]:
        return pair.ids(1, self.length, more=1).split(self.chunk, dim=1)

    def _recorded(self, pair: Pair, model: Any) -> RecordedRun:
        cache = DynamicCache(config=model.config)
        return RecordedRun.join(
            [record_run(model, part, cache=cache, use_cache=True) for part in self._parts(pair)], dim=1
        )

    def check(self, pair: Pair) -> str:
        return _compare(pair, lambda model: self._recorded(pair, model))

    def calls(self, pair: Pair) -> list[list[Call]]:
        slots = self._recorded(pair, pair.ours).slots[0]
        parts = enumerate(slots.split(self.chunk))
        return [
            [make_call(part, [(i * self.chunk, len(part))], 1, pair.config.num_experts) for i, part in parts],
        ]


class Ragged(Row):
    """Documents of different lengths; logits of the last token of each. Not generation: no cache."""

    def __init__(self, lengths: list[int], packed: bool) -> None:
        self.lengths, self.packed = lengths, packed
        stock = "; the stock class cannot pack, its time is that of the padded batch" if packed else ""
        super().__init__(
            f"ragged-{'packed' if packed else 'padded'}",
            f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, "
            f"{'packed into one row' if packed else 'padded on the right'}, logits of their last tokens{stock}",
        )

    def work(self, pair: Pair, side: str) -> Work:
        model = pair.side(side)
        arguments = _packed(pair, self.lengths) if self.packed and side == "ours" else _padded(pair, self.lengths)
        if "position_ids" in arguments:
            ends = torch.tensor(self.lengths).cumsum(0) - 1
        else:  # the columns where a document ends; the same for every row, so some logits more than needed
            ends = torch.tensor(sorted({length - 1 for length in self.lengths}))
        return Work(lambda: model(**arguments, use_cache=False, logits_to_keep=ends))

    def _recorded(self, pair: Pair, model: Any) -> RecordedRun:
        if not (self.packed and model is pair.ours):
            return record_run(model, **_padded(pair, self.lengths), use_cache=False)
        run = record_run(model, **_packed(pair, self.lengths), use_cache=False)
        return RecordedRun(*(_unpacked(tensor[0], self.lengths) for tensor in (run.logits, run.biased)))

    def check(self, pair: Pair) -> str:
        return _compare(pair, lambda model: self._recorded(pair, model), _real(self.lengths))

    def calls(self, pair: Pair) -> list[list[Call]]:
        slots = self._recorded(pair, pair.ours).slots[_real(self.lengths)]
        spans = [(0, length) for length in self.lengths]
        return [[make_call(slots, spans, len(self.lengths), pair.config.num_experts)]]


class Decode(Row):
    """One step: one token for every row, after a context that is cached."""

    def __init__(self, batch: int, context: int, way: str = "fused") -> None:
        self.batch, self.context, self.way = batch, context, way
        super().__init__(
            f"decode-{batch}{WAYS[way][0]}",
            f"one token for each of {batch} rows after {context} to {context + _MEASURED_STEPS} cached ones"
            + WAYS[way][1],
        )

    def work(self, pair: Pair, side: str) -> Work:
        model, tokens = pair.side(side), self._tokens(pair).split(1, dim=1)
        filled = DynamicCache(config=model.config)
        model(self._prompt(pair), cache=filled, use_cache=True, logits_to_keep=1)
        cache, left = filled, iter(())

        def ready() -> None:
            nonlocal cache, left, token
            token = next(left, None)
            if token is None:
                cache, left = copy.deepcopy(filled), iter(tokens)
                token = next(left)

        token: Tensor | None = None
        return Work(lambda: model(token, cache=cache, use_cache=True, logits_to_keep=1), ready)

    def _prompt(self, pair: Pair) -> Tensor:
        return pair.ids(self.batch, self.context, more=2)

    def _tokens(self, pair: Pair) -> Tensor:
        return pair.ids(self.batch, _MEASURED_STEPS, more=3)

    def _recorded(self, pair: Pair, model: Any) -> RecordedRun:
        """Prompts, since they may hold the reason for a difference, and some steps after each.

        A token of the prompt that chooses another expert in bf16 is seen by all steps after it; so the prompts are
        short, and for small batches several, one after the other.
        """
        runs = []
        for number in range(self._checked_prompts()):
            ids = pair.ids(self.batch, self._checked_context() + _CHECKED_STEPS, more=20 + number)
            cache = DynamicCache(config=model.config)
            parts = [ids[:, : self._checked_context()], *ids[:, self._checked_context() :].split(1, dim=1)]
            steps = [record_run(model, part, cache=cache, use_cache=True) for part in parts]
            runs.append(RecordedRun.join(steps, dim=1))
        return RecordedRun.join(runs, dim=0)

    def _checked_prompts(self) -> int:
        return max(1, _CHECKED_ROWS // self.batch)

    def _checked_context(self) -> int:
        return min(self.context, _CHECKED_CONTEXT)

    def check(self, pair: Pair) -> str:
        rows = self._checked_prompts() * self.batch
        where = torch.zeros(rows, self._checked_context() + _CHECKED_STEPS, dtype=torch.bool)
        where[:, self._checked_context() :] = True  # the prompts' logits come from prefill, another row
        if self.way == "compiled":  # what is recorded below runs uncompiled
            self._check_compiled(pair)
        return _compare(pair, lambda model: self._recorded(pair, model), where)

    def _check_compiled(self, pair: Pair) -> None:
        """The compiled step ran, for every token, and gives the logits of the definitions.

        Raises:
            checks.Failed: it did not.
        """
        ids = pair.ids(self.batch, self._checked_context() + _CHECKED_STEPS, more=40)
        found, entered = [], 0
        step = CompiledDecoding.__call__

        def counted(*args: Any) -> Any:
            nonlocal entered
            entered += 1
            return step(*args)

        for chosen in ("auto", "reference"):
            cache = DynamicCache(config=pair.config)
            parts = [ids[:, : self._checked_context()], *ids[:, self._checked_context() :].split(1, dim=1)]
            with selection.use(chosen), mock.patch.object(CompiledDecoding, "__call__", counted):
                logits = [pair.ours(part, cache=cache, use_cache=True, logits_to_keep=1).logits for part in parts]
            found.append(torch.cat(logits[1:], dim=1).float())
        if entered != _CHECKED_STEPS:
            raise checks.Failed(f"the compiled step ran for {entered} of {_CHECKED_STEPS} tokens")
        distance = ((found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)).median().item()
        if not distance <= (1e-4 if pair.dtype == "fp32" else 0.05):
            raise checks.Failed(f"the compiled step's logits are off by {distance:.1e} of their norm")

    def calls(self, pair: Pair) -> list[list[Call]]:
        cache = DynamicCache(config=pair.config)
        pair.ours(self._prompt(pair), cache=cache, use_cache=True, logits_to_keep=1)
        steps = [
            record_run(pair.ours, token, cache=cache, use_cache=True).slots[:, 0]
            for token in self._tokens(pair).split(1, dim=1)
        ]
        return [
            [make_call(slots, [(self.context + i, 1)] * self.batch, self.batch, pair.config.num_experts)]
            for i, slots in enumerate(steps)
        ]


class Generate(Row):
    """`generate`, greedy, with all that the library does around the steps."""

    def __init__(self, context: int, new_tokens: int) -> None:
        self.context, self.new_tokens = context, new_tokens
        super().__init__(
            f"generate-{new_tokens}", f"generate, 1 row, {new_tokens} new tokens after a prompt of {context}, greedy"
        )

    def work(self, pair: Pair, side: str) -> Work:
        return Work(lambda: self._generated(pair, pair.side(side)))

    def _generated(self, pair: Pair, model: Any) -> Tensor:
        prompt = pair.ids(1, self.context, more=4)
        exactly = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "eos_token_id": None}
        mask = torch.ones_like(prompt)
        result: Tensor = model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **exactly)
        return result

    def check(self, pair: Pair) -> str:
        ours, stock = (self._generated(pair, model)[0, self.context :] for model in (pair.ours, pair.stock))
        if len(ours) != len(stock):
            raise checks.Failed(f"{len(ours)} tokens and {len(stock)}")
        equal = int((ours == stock).long().cumprod(0).sum())
        if pair.dtype == "fp32" and equal < self.new_tokens:
            raise checks.Failed(f"of {self.new_tokens} tokens only the first {equal} are equal")
        return f"ok: {len(ours)} tokens each, the first {equal} equal" + (
            "" if equal == len(ours) else " (bf16: the decode rows compare logits)"
        )

    def calls(self, pair: Pair) -> list[list[Call]]:
        every = self._generated(pair, pair.ours)[:, :-1]  # the last token is not fed
        slots = record_run(pair.ours, every, use_cache=False).slots[0]
        experts = pair.config.num_experts
        steps = [make_call(slots[i : i + 1], [(i, 1)], 1, experts) for i in range(self.context, len(slots))]
        return [[make_call(slots[: self.context], [(0, self.context)], 1, experts), *steps]]


class Train(Row):
    """Forward and backward of one step, gradients from nothing; no optimizer, which is the same on both sides."""

    way = None

    def __init__(self, lengths: list[int], packed: bool, checkpointing: bool) -> None:
        self.lengths, self.packed, self.checkpointing = lengths, packed, checkpointing
        self.products, self.head_products = (4, 3) if checkpointing else (3, 3)
        self.reads = 3 if checkpointing else 2
        if packed:
            name = "train-ragged-packed"
            what = (
                f"training step, {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} "
                "in all: ours packed into one row, the stock class, which cannot pack, padded"
            )
        else:
            name = f"train-{len(lengths)}x{lengths[0]}"
            what = f"training step, {len(lengths)} x {lengths[0]} tokens"
        super().__init__(
            name + ("-checkpointed" if checkpointing else ""),
            what + (", gradient checkpointing" if checkpointing else ""),
        )

    def work(self, pair: Pair, side: str) -> Work:
        arguments = self._arguments(pair, side)
        model = pair.side(side)
        return Work(lambda: model(**arguments, use_cache=False).loss.backward(), pair.drop_gradients)

    def _arguments(self, pair: Pair, side: str) -> dict[str, Tensor]:
        if self.packed and side == "ours":
            packed = _packed(pair, self.lengths)
            return packed | {"labels": packed["input_ids"]}
        padded = _padded(pair, self.lengths)
        labels = padded["input_ids"].masked_fill(~_real(self.lengths), -100)
        return (padded if self.packed else {"input_ids": padded["input_ids"]}) | {"labels": labels}

    def check(self, pair: Pair) -> str:
        with torch.enable_grad():
            return checks.compare_training(self._seen(pair, "ours"), self._seen(pair, "stock"), pair.dtype)

    def _seen(self, pair: Pair, side: str) -> dict[str, float]:
        """What `checks.compare_training` wants."""
        pair.drop_gradients()
        model = pair.side(side)
        loss = model(**self._arguments(pair, side), use_cache=False).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        norms = {name: 0.0 if gradient is None else gradient.norm().item() for name, gradient in gradients.items()}
        seen = {"loss": loss.item(), "all": sum(norm**2 for norm in norms.values()) ** 0.5}
        looked_at = _LOOKED_AT if pair.dtype == "fp32" else tuple(name for name in _LOOKED_AT if "temp" not in name)
        seen |= {name: norm for name, norm in norms.items() if name.endswith(looked_at)}
        pair.drop_gradients()
        return seen

    def calls(self, pair: Pair) -> list[list[Call]]:
        model, real = pair.ours, _real(self.lengths)
        model.eval()
        slots = record_run(model, **_padded(pair, self.lengths), use_cache=False).slots[real]
        model.train()
        spans = [(0, length) for length in self.lengths]
        targets = len(slots) - len(self.lengths)
        return [[make_call(slots, spans, targets, pair.config.num_experts)]]


def rows(shapes: Shapes, lengths: list[int]) -> list[Row]:
    """All rows of this module, in the order of the result."""
    return [
        Prefill(shapes.short),
        *(Prefill(shapes.short, way=way) for way in ("loaded", "packed")),
        Prefill(shapes.long),
        Prefill(shapes.long, shapes.chunk),
        Ragged(lengths, packed=False),
        Ragged(lengths, packed=True),
        *(Decode(batch, shapes.context, way) for batch in shapes.batches for way in WAYS),
        Generate(shapes.context, shapes.new_tokens),
        Train([shapes.short], packed=False, checkpointing=False),
        Train([shapes.short], packed=False, checkpointing=True),
        Train(lengths, packed=True, checkpointing=False),
    ]


def _compare(pair: Pair, recorded: Callable[[Any], RecordedRun], where: Tensor | None = None) -> str:
    ours, stock = recorded(pair.ours), recorded(pair.stock)
    where = checks.everywhere(ours) if where is None else where
    if pair.dtype == "fp32":
        return checks.compare_fp32(ours, stock, where)
    return checks.compare_bf16(ours, stock, recorded(pair.wide), where)


def _documents(pair: Pair, lengths: list[int]) -> list[Tensor]:
    return [pair.ids(length, more=10 + i) for i, length in enumerate(lengths)]


def _real(lengths: list[int]) -> Tensor:
    """``[B, longest]`` bool."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def _padded(pair: Pair, lengths: list[int]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(_documents(pair, lengths), batch_first=True)
    return {"input_ids": ids, "attention_mask": _real(lengths).long()}


def _packed(pair: Pair, lengths: list[int]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.cat(_documents(pair, lengths))[None], "position_ids": positions}


def _unpacked(tensor: Tensor, lengths: list[int]) -> Tensor:
    """``[tokens, ...]`` to ``[B, longest, ...]``."""
    return torch.nn.utils.rnn.pad_sequence(list(tensor.split(lengths)), batch_first=True)
