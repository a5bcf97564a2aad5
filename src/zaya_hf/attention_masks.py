"""Attention masks for a `Visibility`, in the form that the chosen attention implementation wants.

Two things need more than transformers' mask functions know: documents (keys of another document are hidden), and
windows that count real tokens (padding between two tokens does not use a window up).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from . import attention
from .history import PADDING

if TYPE_CHECKING:
    from .visibility import Visibility

#: Additive masks hide a key with anything at or below this: with the smallest number of a dtype, with -inf, and with
#: the -1e4 and -1e9 that hand-made masks use. exp of it is 0 in every dtype; biases by distance stay above it nearby.
HIDDEN = -5000.0


def allowed_pairs(mask: Tensor) -> Tensor:
    """A 4-D mask as bool, True where the query may attend: bool masks as they are, integers by being non-zero, additive
    ones by being above `HIDDEN`."""
    if mask.dtype == torch.bool:
        return mask
    return mask > HIDDEN if mask.is_floating_point() else mask != 0


def is_free_to_read(tensor: Tensor) -> bool:
    """Whether looking at values waits for no device and is part of no trace."""
    return tensor.device.type == "cpu" and not is_tracing(tensor)


def key_ranges(config, length: int, past: int, cache, fixed: bool = False) -> dict[str, tuple[int, Any]]:
    """By layer type, how many keys its layers return in this call, and the absolute index of the first; for `fixed`
    see `visibility.describe`."""
    ranges = {}
    for layer_type in dict.fromkeys(config.layer_types):
        keys, first = past + length, 0
        if cache is not None:
            keys, first = cache.layers[config.layer_types.index(layer_type)].key_range(length, fixed)
        ranges[layer_type] = keys, first
    return ranges


def document_masks(
    config,
    visible: Visibility,
    all_segments: Tensor | None,
    ranges: dict[str, tuple[int, int]],
    past: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed: bool = False,
) -> dict[str, Any]:
    """Causal masks inside documents, by layer type. A padding query sees itself, so that no softmax runs over nothing.
    Where attention can go without a mask over all pairs, there is an `attention.Plan` in its place.

    Args:
        all_segments: ``[B, L + S]`` segments of cached and new tokens; None when every row is one unpadded document.
        ranges: from `key_ranges`.
        past: L.
        dtype: of additive masks.
        fixed: whether keys may lie before the first token and behind the last one, which are hidden.

    Raises:
        ValueError: for an attention implementation that would ignore padding or documents.
    """
    name, length = config._attn_implementation, visible.sequence_length
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        if all_segments is not None or fixed:
            raise ValueError(
                f"attention implementation {name!r} has no mask function, so padding and documents would be ignored; "
                "register one under the same name with transformers.AttentionMaskInterface.register."
            )
        return dict.fromkeys(ranges)
    masks: dict[str, Any] = {}
    # Not while tracing: lengths and values of the trace would be baked in.
    may_look = name == "sdpa" and not is_tracing() and not fixed
    pieces = None
    if may_look and all_segments is not None and not past and attention.plans_are_possible():
        pieces = worthwhile_pieces(all_segments)
    for layer_type, (keys, first) in ranges.items():
        window = _window(config, layer_type)
        if may_look and all_segments is None and _sdpa_needs_no_mask(past, length, window):
            masks[layer_type] = None
            continue
        make_mask = functools.partial(
            ALL_MASK_ATTENTION_FUNCTIONS[name],
            batch_size=visible.batch_size,
            q_length=length,
            kv_length=keys,
            q_offset=past,
            kv_offset=first,
            mask_function=document_mask(all_segments, window, fixed),
            attention_mask=_flash_keys(name, all_segments, length),
            local_size=window,
            allow_is_causal_skip=False,
            dtype=dtype,
            device=device,
            config=config,
            use_vmap=False,
        )
        if pieces is not None:
            masks[layer_type] = attention.Documents(keys, make_mask, pieces=pieces, window=window)
        elif may_look and all_segments is None and past and _sees_all(keys, window) and attention.can_continue(device):
            masks[layer_type] = attention.Continued(keys, make_mask, past=past)
        else:
            masks[layer_type] = make_mask()
    return masks


def worthwhile_pieces(segment: Tensor) -> tuple[tuple[int, int, bool], ...] | None:
    """What `attention.Documents` needs to know of ``segment[B, S]``: runs of neighbouring documents of one length, over
    the flattened rows. None where a mask is as good: for few tokens or many short documents of differing lengths, and
    where padding lies inside a document.
    """
    if not is_free_to_read(segment) or bool(_behind_hole(segment).any()):
        return None
    starts = _run_starts(segment)
    lengths = torch.nn.functional.pad(starts, (0, 1), value=segment.numel()).diff()
    real = segment.flatten()[starts] != PADDING
    runs = itertools.groupby(zip(lengths.tolist(), real.tolist(), strict=True))
    pieces = tuple((len(list(run)), tokens, is_real) for (tokens, is_real), run in runs)
    pairs = sum(count * tokens * (tokens + 1) // 2 for count, tokens, is_real in pieces if is_real)  # causal
    cost = pairs + attention.PAIRS_OF_A_CALL * len(pieces)
    return pieces if pairs and cost < segment.numel() * segment.shape[1] else None


def document_mask(all_segments: Tensor | None, window: int | None, any_index: bool = False) -> Callable[..., Tensor]:
    """Index-based mask function in transformers' sense: (batch, head, query, key) -> bool. Indices are absolute, cached
    tokens first; with `any_index` those of keys may be negative, which are hidden. A window of n covers the query and
    the n - 1 real tokens before it."""
    rank = None if all_segments is None or window is None else _rank(all_segments)

    def may_attend(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        exists = kv_idx >= 0
        if any_index:
            kv_idx = kv_idx.clamp_min(0)
        allowed = kv_idx <= q_idx
        if window is not None and rank is not None:
            allowed = allowed & (rank[batch_idx, kv_idx] > rank[batch_idx, q_idx] - window)
        elif window is not None:
            allowed = allowed & (kv_idx > q_idx - window)
        if all_segments is not None:
            query, key = all_segments[batch_idx, q_idx], all_segments[batch_idx, kv_idx]
            allowed = (allowed & (query == key) & (query != PADDING)) | (q_idx == kv_idx)
        return allowed & exists if any_index else allowed

    return may_attend


def given_masks(
    config,
    mask: Tensor,
    all_segments: Tensor,
    ranges: dict[str, tuple[int, int]],
    past: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """A caller's 4-D mask for every layer type; sliding layers keep their window, with and without a cache.

    Args:
        mask: ``[B or 1, heads or 1, S, L + S]``, bool, integer or additive.
        all_segments: ``[B, L + S]``.

    Raises:
        ValueError: for an attention implementation that takes no 4-D mask.
    """
    name = config._attn_implementation
    if name not in ("eager", "sdpa"):
        raise ValueError(f"a 4-D attention_mask needs attn_implementation 'eager' or 'sdpa', not {name!r}.")
    columns = torch.arange(mask.shape[3], device=mask.device)
    itself = columns == columns[past:, None]
    rank = _rank(all_segments)
    masks: dict[str, Any] = {}
    for layer_type, (keys, first) in ranges.items():
        window = _window(config, layer_type)
        allowed = allowed_pairs(mask)
        if window is not None:
            allowed = allowed & (rank[:, None, None, :] > rank[:, None, past:, None] - window)
        # a query that may attend to nothing attends to itself: its output is never read, but must stay finite
        alone = itself & ~allowed.any(-1, keepdim=True)
        kept = slice(first, first + keys)
        allowed, alone = (allowed | alone)[..., kept], alone[..., kept]
        if name == "sdpa" and not mask.is_floating_point():
            masks[layer_type] = allowed
            continue
        # the smallest number of another dtype may be -inf in this one, so hidden keys get this one's
        biases = mask[..., kept] if mask.is_floating_point() else torch.zeros((), device=mask.device)
        masks[layer_type] = torch.where(allowed, biases.to(dtype), torch.finfo(dtype).min).masked_fill(alone, 0)
    return masks


def varlen_kwargs(config, segment: Tensor, past: int) -> dict[str, Any] | None:
    """Cumulative lengths over the flattened ``segment[B, S]`` for flash attention: every run of one segment is a
    sequence, runs of padding too. None for other implementations, and with cached tokens.

    Raises:
        ValueError: when padding lies inside a document, which lengths cannot express.
    """
    name = config._attn_implementation or ""
    if "flash" not in name or past:
        return None
    if bool(_behind_hole(segment).any()):
        raise ValueError(
            f"{name} cannot attend across padding inside a document; use attn_implementation='sdpa', or move the "
            "padding to either end."
        )
    cumulative = torch.nn.functional.pad(_run_starts(segment), (0, 1), value=segment.numel()).int()
    longest = int(cumulative.diff().max()) if cumulative.numel() > 1 else 0
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}


def _behind_hole(segment: Tensor) -> Tensor:
    """``[B, S - 1]``: tokens but the first that go on with a document behind padding."""
    highest = segment.cummax(1).values if segment.numel() else segment
    return (segment[:, 1:] == highest[:, :-1]) & (segment[:, :-1] == PADDING) & (segment[:, 1:] != PADDING)


def _run_starts(segment: Tensor) -> Tensor:
    """Flat indices at which runs of one segment start; every row of ``segment[B, S]`` starts one."""
    edge = torch.ones_like(segment, dtype=torch.bool)
    edge[:, 1:] = segment[:, 1:] != segment[:, :-1]
    return edge.flatten().nonzero()[:, 0]


def _rank(all_segments: Tensor) -> Tensor:
    """``[B, L + S]``: number of real tokens up to and with each one."""
    return (all_segments != PADDING).long().cumsum(1)


def _window(config, layer_type: str) -> int | None:
    return config.sliding_window if layer_type == "hybrid_sliding" else None


def _sees_all(tokens: int, window: int | None) -> bool:
    """Whether a window hides none of `tokens` tokens."""
    return window is None or tokens <= window


def _sdpa_needs_no_mask(past: int, length: int, window: int | None) -> bool:
    """`is_causal` (empty cache) or no mask at all (one query) already say everything: a sliding layer's cache gives one
    query `window` keys at most."""
    return length == 1 or (past == 0 and _sees_all(length, window))


def _flash_keys(name: str, all_segments: Tensor | None, length: int) -> Tensor | None:
    """The ``[B, keys]`` mask that flash attention takes: for one query per row, the keys of its document. Longer calls
    without a cache go through cumulative lengths instead (`varlen_kwargs`)."""
    if "flash" not in name or all_segments is None or all_segments.shape[1] == length:
        return None
    if length > 1:
        raise ValueError(
            f"{name} cannot continue padded or packed rows of a cache with {length} tokens at once; feed one at a "
            "time, or use attn_implementation='sdpa'."
        )
    return all_segments == all_segments[:, -1:]  # a padding query sees padding, so that no softmax runs over nothing
