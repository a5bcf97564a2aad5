"""What becomes of the logits of some rows: their losses, and in their place their gradients. In plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

#: elements whose softmax is taken at once: on a CPU what stays in its caches
BLOCK_ELEMENTS = {"cpu": 2**20}
ELSEWHERE = 2**26  # where a call costs more than memory


def differentiate(
    logits: Tensor,
    targets: Tensor,
    counted: Tensor | None,
    losses: Tensor,
    scale: Tensor | float | None,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> None:
    """Write the losses of some rows, and put `scale` times their gradients in the place of the logits.

    Args:
        logits: ``[T, V]``.
        targets: ``[T]``, valid words also where `counted` ``[T]`` says that a row has none; None: all have one.
        losses: ``[T]``, fp32 or wider.
        scale: None: the gradients are not wanted; the logits are lost.
        z_loss, softcap: as in `op.linear_cross_entropy`.
    """
    rows = max(1, BLOCK_ELEMENTS.get(logits.device.type, ELSEWHERE) // max(1, logits.shape[1]))
    if logits.device.type == "cpu":
        rows = max(rows, torch.get_num_threads())  # a softmax takes one thread per row
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        block, target = logits[part], targets[part, None]
        values, slopes = block.to(losses.dtype), None
        if softcap is not None:
            bent = (values / softcap).tanh_()
            values = bent * softcap
            slopes = bent.square_().neg_().add_(1) if scale is not None else None
        shares = torch.softmax(values, 1)
        largest = values.amax(1, keepdim=True)
        # The largest share is 1 / sum(exp(values - largest)), so no share that may be 0 has its logarithm taken.
        rest = shares.amax(1, keepdim=True).log().neg_()
        loss = largest - values.gather(1, target) + rest
        total = largest + rest if z_loss else None  # the logarithm of sum(exp(values))
        if total is not None:
            loss += z_loss * total.square()
        losses[part] = (loss if counted is None else loss.where(counted[part, None], 0))[:, 0]
        if scale is None:
            continue
        if total is not None:
            shares.mul_(1 + 2 * z_loss * total)
        factor = scale if counted is None else scale * counted[part, None]
        of_target = (shares.gather(1, target) - 1) * factor
        shares.mul_(factor).scatter_(1, target, of_target)
        block.copy_(shares if slopes is None else shares.mul_(slopes))
