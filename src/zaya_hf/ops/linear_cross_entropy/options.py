"""What the loss is made of beside the cross-entropy."""

from __future__ import annotations

import math


def check(z_loss: float, softcap: float | None) -> None:
    """
    Raises:
        ValueError: for a `z_loss` that is no finite number of at least 0, and a `softcap` that is neither None nor a
            finite number above 0.
    """
    if isinstance(z_loss, bool) or not isinstance(z_loss, int | float) or not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is {z_loss!r}; expected a finite number of at least 0.")
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0 < softcap < math.inf:
        raise ValueError(f"The softcap of the logits is {softcap!r}; expected None or a finite number above 0.")
