"""Attention on convolved and rotated heads: the implementation that the config names, and what it needs no mask for.

transformers' functions take a mask over all pairs of queries and keys. On CPU, where looking at the rows costs nothing,
`attention_masks` puts a `Plan` in the place of such a mask: attention document by document, or over cached keys and new
ones apart. A plan can always be turned into the mask that it stands for, and is wherever its own way is not open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .ops.numerics import wide_dtype

if TYPE_CHECKING:
    from .visibility import Visibility

#: one more call of the kernel costs about as much as so many pairs of a query and a key
PAIRS_OF_A_CALL = 4096

#: torch's kernel for CPUs, which also says how much of a row's softmax it has seen; None in a torch without it
_FLASH_ON_CPU = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

#: arguments that only the library's function understands
_LIBRARYS_OWN = frozenset(("position_bias", "softcap", "output_attentions"))


@dataclass(eq=False)
class Plan(ABC):
    """Stands in for a mask over all pairs."""

    #: keys that the mask covers
    keys: int
    #: makes the mask, ``[B or 1, 1, S, keys]`` bool
    make_mask: Callable[[], Tensor]
    _mask: Tensor | None = None

    def mask(self, device: torch.device) -> Tensor:
        """What this plan stands for, made when first asked for."""
        if self._mask is None or self._mask.device != device:
            self._mask = self.make_mask().to(device)
        return self._mask

    @abstractmethod
    def takes(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        """Whether this call can go without the mask."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float) -> Tensor:
        """``[B, H, S, D]`` queries, ``[B, G, keys, D]`` keys and values to ``[B, S, H, D]``."""


@dataclass(eq=False)
class Documents(Plan):
    """Rows of documents without a past: one causal call for each run of documents of one length."""

    #: documents, tokens in each, and whether they are real (padding gets zeros), in the order of the flattened rows
    pieces: tuple[tuple[int, int, bool], ...] = ()
    #: of sliding layers
    window: int | None = None
    _bands: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    def takes(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        return query.shape[2] == key.shape[2] == self.keys

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float) -> Tensor:
        batch_size, heads, length, width = query.shape
        key, value = _for_every_query_head(heads, key, value)
        sizes = [count * tokens for count, tokens, _ in self.pieces]
        # `split` rather than slices: its gradient is one concatenation
        flat = [t.transpose(1, 2).flatten(0, 1).split(sizes) for t in (query, key, value)]
        outputs = []
        for (count, tokens, real), *piece in zip(self.pieces, *flat, strict=True):
            if not real:
                outputs.append(torch.zeros_like(piece[0]))
                continue
            band = self._band(tokens, query.device) if self.window is not None and tokens > self.window else None
            rows = [t.unflatten(0, (count, tokens)).transpose(1, 2) for t in piece]
            output = scaled_dot_product_attention(
                rows[0],
                rows[1],
                rows[2],
                attn_mask=band,
                dropout_p=dropout,
                is_causal=band is None and tokens > 1,
                scale=scaling,
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).view(batch_size, length, heads, width)

    def _band(self, tokens: int, device: torch.device) -> Tensor:
        """``[tokens, tokens]`` bool: the query and the `window` - 1 tokens before it."""
        assert self.window is not None
        if (tokens, device) not in self._bands:
            band = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_().triu_(1 - self.window)
            self._bands[tokens, device] = band
        return self._bands[tokens, device]


@dataclass(eq=False)
class Continued(Plan):
    """Several new tokens of plain rows behind `past` cached ones: all of the past, and causally among themselves. The
    two softmaxes are put together by how much of the whole each has seen."""

    past: int = 0

    def takes(self, query: Tensor, key: Tensor, dropout: float) -> bool:
        wanted = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        fits = query.shape[2] + self.past == key.shape[2] == self.keys
        same = query.dtype == key.dtype  # else autocast would have to make them so
        return fits and same and not dropout and not wanted and query.device.type == "cpu"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float) -> Tensor:
        assert _FLASH_ON_CPU is not None
        batch_size, heads, length, width = query.shape
        (old_key, new_key), (old_value, new_value) = (t.split((self.past, length), dim=2) for t in (key, value))
        # All queries of one key head see all of the past, so they are rows of one product.
        rows = query.reshape(batch_size, key.shape[1], -1, width)
        old, old_seen = _FLASH_ON_CPU(rows, old_key, old_value, 0.0, False, scale=scaling)
        new_key, new_value = _for_every_query_head(heads, new_key, new_value)
        new, new_seen = _FLASH_ON_CPU(query, new_key, new_value, 0.0, True, scale=scaling)
        share = torch.sigmoid(old_seen.reshape(batch_size, heads, length) - new_seen)[..., None]
        output = old.reshape(query.shape) * share + new * (1 - share)  # the shares are fp32 or wider
        return output.to(query.dtype).transpose(1, 2)


def plans_are_possible() -> bool:
    """Whether "sdpa" is the library's function, which the plans stand in for, and not somebody's own of that name."""
    return _named("sdpa") is sdpa_attention_forward


def can_continue(device: torch.device) -> bool:
    """Whether `Continued` has its kernel and nobody may want a gradient."""
    on_cpu = _FLASH_ON_CPU is not None and device.type == "cpu"
    return on_cpu and not torch.is_grad_enabled() and plans_are_possible()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, visible: Visibility, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer.

    Args:
        module: the `ZayaAttention`.
        query, key, value: ``[B, H, S, D]``, and ``[B, G, keys, D]`` with the cached tokens.
        kwargs: for the attention implementation.

    Returns:
        ``[B, S, H, D]``, and the weights ``[B, H, S, keys]`` where the implementation gives them.
    """
    function = _named(module.config._attn_implementation)
    mask = (visible.masks or {}).get(module.layer_type)
    dropout = module.attention_dropout if module.training else 0.0
    if query.numel() == 0:  # no row or no token: not every backend takes empty tensors
        function, mask = eager_attention, None
    if function is sdpa_attention_forward and all(kwargs.get(name) in (None, False) for name in _LIBRARYS_OWN):
        if isinstance(mask, Plan) and not is_tracing(query) and mask.takes(query, key, dropout):
            return mask.attend(query, key, value, dropout, module.scaling), None
        if not isinstance(mask, Plan) and query.shape[2] == 1 and query.device.type in ("cpu", "cuda"):
            if mask is not None and mask.dtype == torch.bool:  # else every layer would do it again
                mask = _added(mask, query.dtype)
                visible.masks = {**(visible.masks or {}), module.layer_type: mask}
            return _one_query(query, key, value, mask, dropout, module.scaling), None
    if isinstance(mask, Plan):
        mask = mask.mask(query.device)
    return function(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=module.scaling,
        sliding_window=module.sliding_window,
        **{**kwargs, **(visible.attention_kwargs or {})},
    )


def eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scaling + mask) v, softmax in fp32 or wider: ``[B, S, H, D]`` and weights ``[B, H, S, keys]``."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=wide_dtype(query.dtype)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _named(implementation: str) -> Callable[..., Any]:
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float
) -> Tensor:
    """A decoding step, ``[B, 1, H, D]``: the query heads of one key head are the rows of a product, so that keys and
    values are read once and never copied."""
    batch_size, heads, _, width = query.shape
    rows = (batch_size, key.shape[1], heads // key.shape[1])
    if mask is not None and mask.shape[1] == heads != 1:
        mask = mask[:, :, 0].unflatten(1, rows[1:])
    output = scaled_dot_product_attention(
        query.reshape(*rows, width), key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch_size, 1, heads, width)


def _for_every_query_head(heads: int, *tensors: Tensor) -> list[Tensor]:
    """``[B, G, keys, D]`` to ``[B, H, keys, D]``. For many queries the copy costs less than a kernel without it."""
    return [t.repeat_interleave(heads // t.shape[1], dim=1) if heads != t.shape[1] else t for t in tensors]
