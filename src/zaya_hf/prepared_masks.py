"""A `Visibility` as the dict of masks that transformers passes around.

Where masks are made ahead of the forward pass (`create_masks_for_generate`), the model is called with a dict in the
place of `attention_mask` and has no 2-D mask any more. So the dict carries, beside the mask of every layer type, what
the convolutions and the cache need to know of documents and padding.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.utils.import_utils import is_tracing

from .attention import Plan
from .attention_masks import is_free_to_read, key_ranges
from .history import RowHistory, StaticRowHistory
from .visibility import Visibility, is_one_of

#: what the dict carries beside masks: all of a Visibility but its shape, its masks, and what the cache says anyway
CARRIED = tuple(
    field.name
    for field in fields(Visibility)
    if field.name not in ("batch_size", "sequence_length", "masks", "key_lengths")
)


def to_dict(visible: Visibility) -> dict[str, Any]:
    """Masks by layer type (None where the attention implementation needs none), and everything in `CARRIED` that is not
    trivial."""
    carried = {name: getattr(visible, name) for name in CARRIED}
    return {**(visible.masks or {}), **{name: value for name, value in carried.items() if value is not None}}


def from_dict(
    config, masks: dict[str, Any], *, batch_size: int, sequence_length: int, history: RowHistory | None, cache
) -> Visibility:
    """The `Visibility` that `to_dict` wrote, for a call of ``[batch_size, sequence_length]`` tokens.

    Raises:
        ValueError: for a dict that `create_masks_for_generate` did not make, or made for another call.
    """
    layer_types = dict.fromkeys(config.layer_types)
    wanted = {*layer_types, "position_ids"}
    wrong = sorted(wanted - set(masks)) + sorted(set(masks) - wanted - set(CARRIED))
    if wrong:
        raise ValueError(
            f"attention_mask is a dict in which {wrong[0]!r} is missing or unknown; a dict must come from this model's "
            "create_masks_for_generate."
        )
    positions, segment, slots = masks["position_ids"], masks.get("segment"), masks.get("slots")
    if isinstance(history, StaticRowHistory) != (slots is not None):
        raise ValueError("attention_mask is a dict made for another kind of cache, or for none.")
    starts = slots[None] if slots is not None else positions if segment is None else None
    starts_elsewhere = False
    past: Any = None
    if not is_tracing():
        past = 0 if history is None else history.length
        if starts is not None and is_free_to_read(starts):
            starts_elsewhere = bool((starts[:, :1] != past).any())
    fits = (
        positions.shape[1] == sequence_length and is_one_of(positions.shape[0], 1, batch_size) and not starts_elsewhere
    )
    if not fits or (segment is not None and segment.shape != (batch_size, sequence_length)):
        raise ValueError(
            f"attention_mask is a dict made for {list(positions.shape if segment is None else segment.shape)} tokens "
            f"after another cache; this call has [{batch_size}, {sequence_length}] after {past} cached ones."
        )
    carried: dict[str, Any] = {name: masks.get(name) for name in CARRIED}
    visible = Visibility(batch_size, sequence_length, **carried)
    visible.masks = {layer_type: masks[layer_type] for layer_type in layer_types}
    covered = {
        layer_type: mask.keys if isinstance(mask, Plan) else None if mask is None else mask.shape[-1]
        for layer_type, mask in visible.masks.items()
    }
    if is_tracing() and slots is not None:  # without a mask: a prompt for an empty cache
        visible.key_lengths = {name: sequence_length if keys is None else keys for name, keys in covered.items()}
        return visible
    past = 0 if history is None else history.length
    ranges = key_ranges(config, sequence_length, past, cache)
    fixed = ranges if slots is None else key_ranges(config, sequence_length, past, cache, fixed=True)
    for layer_type, keys in covered.items():
        expected = ranges[layer_type][0]
        if keys is not None and not is_one_of(keys, expected, fixed[layer_type][0]):
            raise ValueError(
                f"attention_mask is a dict whose {layer_type!r} mask covers {keys} keys; "
                f"with this cache there are {expected}."
            )
        visible.key_lengths[layer_type] = expected if keys is None else keys
    return visible
