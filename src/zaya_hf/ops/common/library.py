"""Operators of torch (`torch.ops.zaya_hf`), so that compiled graphs can hold what torch's compiler cannot look into.

An operator costs some ten microseconds per call, so only what needs one is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("zaya_hf", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Make an operator.

    Args:
        schema: "name(Tensor x, ...) -> Tensor".
        run: what it does, on any device.
        fake: what its results look like, without values.
        backward, setup_context: as in `torch.library.register_autograd`; None: it has no gradient.

    Returns:
        the operator, to be called.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zaya_hf::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"zaya_hf::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    return getattr(torch.ops.zaya_hf, name).default
