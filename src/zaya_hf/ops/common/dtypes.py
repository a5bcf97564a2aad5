"""What kernels compute in, and what tables call it. float64 has no kernels."""

from __future__ import annotations

import torch

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
