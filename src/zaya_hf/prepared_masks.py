"""A `Visibility` as the dict of masks that transformers passes around.

Where masks are made ahead of the forward pass (`create_masks_for_generate`), the model is called with a dict in the
place of `attention_mask` and has no 2-D mask any more. So the dict carries, beside the mask of every layer type, what
the convolutions and the cache need to know of documents and padding.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .attention import Plan
from .attention_masks import key_ranges
from .history import RowHistory
from .visibility import Visibility

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
    positions = masks["position_ids"]
    segment = masks.get("segment")
    past = 0 if history is None else history.length
    starts_elsewhere = segment is None and positions.device.type == "cpu" and bool((positions[:, :1] != past).any())
    fits = positions.shape[1] == sequence_length and positions.shape[0] in (1, batch_size) and not starts_elsewhere
    if not fits or (segment is not None and segment.shape != (batch_size, sequence_length)):
        raise ValueError(
            f"attention_mask is a dict made for {list(positions.shape if segment is None else segment.shape)} tokens "
            f"after another cache; this call has [{batch_size}, {sequence_length}] after {past} cached ones."
        )
    carried: dict[str, Any] = {name: masks.get(name) for name in CARRIED}
    visible = Visibility(batch_size, sequence_length, **carried)
    visible.masks = {layer_type: masks[layer_type] for layer_type in layer_types}
    ranges = key_ranges(config, sequence_length, past, cache)
    visible.key_lengths = {layer_type: keys for layer_type, (keys, _) in ranges.items()}
    for layer_type, mask in visible.masks.items():
        keys = mask.keys if isinstance(mask, Plan) else None if mask is None else mask.shape[-1]
        if keys is not None and keys != visible.key_lengths[layer_type]:
            raise ValueError(
                f"attention_mask is a dict whose {layer_type!r} mask covers {keys} keys; "
                f"with this cache there are {visible.key_lengths[layer_type]}."
            )
    return visible
