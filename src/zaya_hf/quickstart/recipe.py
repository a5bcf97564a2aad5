"""What a quickstart trains, and how: all that decides its numbers, beside the text, the versions and the seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """The same for every model: tokens, batches, widths, schedule. What is a model's own is in `models.py`."""

    steps: int = 800
    vocab_size: int = 1024
    sequence_length: int = 128  # in training and in the evaluation
    batch_size: int = 8  # rows of a batch
    arithmetic_share: float = 0.4  # of the rows
    hidden_size: int = 96
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 24
    rope_theta: float = 10_000.0
    muon_lr: float = 0.02  # both rates are multiplied by the factor that the search chose for a model
    adamw_lr: float = 5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 40
    gradient_clip: float = 1.0
    balancing_lr: float = 5e-3
    checkpoint_every: int = 50  # steps; moves no number
    # One thread per model, several models side by side: at this size a second thread makes a step 1.4 times faster on
    # an idle machine and many times slower on a busy one, where each small operation waits for the later of the two.
    # And so the numbers do not depend on the number of cores.
    threads: int = 1

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
