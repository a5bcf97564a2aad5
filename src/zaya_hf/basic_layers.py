"""The layers that hold weights and little else: norm, residual scaling, linear layer, convolution of CCA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops


class ZayaRMSNorm(nn.Module):
    """RMSNorm in fp32 or wider; the result has the weight's dtype."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ZayaResidualScaling(nn.Module):
    """``(output + b) s + (residual + b') s'`` on a stream that is not rounded."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_states_scale = nn.Parameter(torch.ones(hidden_size))
        self.hidden_states_bias = nn.Parameter(torch.zeros(hidden_size))
        self.residual_scale = nn.Parameter(torch.ones(hidden_size))
        self.residual_bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, output: Tensor, residual: Tensor) -> Tensor:
        return ops.residual_merge(output, residual, *self.vectors())

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """s, b, s', b', each ``[hidden_size]``."""
        return self.hidden_states_scale, self.hidden_states_bias, self.residual_scale, self.residual_bias


class ZayaLinear(nn.Linear):
    """A linear layer whose product is chosen by `ops.linear`."""

    packed_weight: ops.PackedWeight | None = None  # see `fuse_for_inference`
    reads_packed = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, self.packed_weight)


class ZayaCCAConv(nn.Conv1d):
    """Weights of one of CCA's convolutions. Calling it gives them, so that hooks which load or gather them run."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """``[C, C / groups, width]`` and ``[C]``."""
        assert self.bias is not None
        return self.weight, self.bias
