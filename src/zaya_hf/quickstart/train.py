"""The quickstart's training loop and its measure: held-out bits per byte."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

REPORT_EVERY = 100  # steps; some ten seconds


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers, beside the corpus, the versions and the thread count."""

    steps: int = 600
    seed: int = 0
    vocab_size: int = 1024
    hidden_size: int = 96
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 24
    moe_intermediate_size: int = 192
    num_experts: int = 8
    router_hidden_size: int = 32
    sequence_length: int = 128
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 40
    gradient_clip: float = 1.0
    held_out_windows: int = 320

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True)
class TrainingResult:
    losses: list[float]  # nats per token, one per step
    seconds: float
    tokens_per_second: float


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up over at most a tenth of the steps, flat until half of them, then linear to zero."""
    warmup = min(warmup, max(1, steps // 10))
    half = steps // 2
    rising = min(1.0, (step + 1) / warmup)
    falling = 1.0 if step < half else (steps - step) / (steps - half)
    return min(rising, falling)


def train(
    model: PreTrainedModel,
    stream: torch.Tensor,
    settings: Settings,
    show_progress: bool,
    report: Callable[[int, float], None] | None = None,
) -> TrainingResult:
    """Train `model` in place on random windows of `stream` (int64 [tokens]) for `settings.steps` steps.

    Args:
        show_progress: draw a bar on standard error.
        report: is given the steps done and their mean loss since its last call, every `REPORT_EVERY` steps.

    Raises:
        RuntimeError: the loss is not finite.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    length, batch = settings.sequence_length, settings.batch_size
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]  # norms, scales, biases, temperatures
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, settings.steps, settings.warmup_steps)
    )
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    with tqdm(total=settings.steps, desc="training", unit="step", disable=not show_progress, leave=False) as progress:
        for _ in range(settings.steps):
            starts = torch.randint(0, len(stream) - length, (batch, 1), generator=generator)
            ids = stream[starts + torch.arange(length)]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"the loss is {losses[-1]} at step {len(losses)}: training diverged")
            if report is not None and len(losses) % REPORT_EVERY == 0:
                report(len(losses), sum(losses[-REPORT_EVERY:]) / REPORT_EVERY)
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
    seconds = time.perf_counter() - started
    model.eval()
    return TrainingResult(losses, seconds, settings.steps * batch * length / seconds)


def held_out_windows(stream: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Up to `count` windows int64 [windows, length], spread evenly over `stream` and without overlap."""
    windows = stream[: len(stream) // length * length].view(-1, length)
    if len(windows) > count:
        windows = windows[torch.arange(count) * len(windows) // count]
    return windows


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, windows: torch.Tensor, entry_bytes: torch.Tensor) -> float:
    """Bits that the model needs for each byte of held-out text.

    Every window starts without context, so its first token is given and only the others are counted.

    Args:
        windows: int64 [windows, length].
        entry_bytes: int64 [vocab], the bytes of text each id stands for. End-of-document tokens have none; their bits
            are counted all the same, since a reader of the text has to know where it ends.
    """
    model.eval()
    nats = 0.0
    for ids in windows.split(32):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        nats += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / int(entry_bytes[windows[:, 1:]].sum())


def unigram_bits_per_byte(stream: torch.Tensor, windows: torch.Tensor, entry_bytes: torch.Tensor) -> float:
    """The same measure for the model that only knows how frequent each token of the training stream is."""
    counts = torch.bincount(stream, minlength=len(entry_bytes)).double() + 1  # +1: no token is impossible
    nats = -(counts / counts.sum()).log()[windows[:, 1:]].sum().item()
    return nats / math.log(2) / int(entry_bytes[windows[:, 1:]].sum())
