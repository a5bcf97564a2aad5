"""Training: optimizer, learning-rate schedule, balancing of the routers, and one loop for every model family."""

from .lora import lora_targets

__all__ = ["lora_targets"]
