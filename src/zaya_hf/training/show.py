"""`zaya train CONFIG --show`: the settings in full, and what they come to, before anything is loaded or trained."""

from __future__ import annotations

from ..reporting.formats import short_count
from . import settings_files
from .config import TrainingConfig
from .flops import FlopCount, ParameterCount, count_parameters, flops_per_token, peak_tflops
from .memory import MemoryItem, estimate_memory, peak_bytes
from .models import config_of

__all__ = ["describe"]

Row = tuple[str, str, str]


def describe(config: TrainingConfig, processes: int = 1) -> str:
    """Settings as YAML and tables behind it, as comments: the whole is a settings file again.

    Args:
        processes: devices that the run would have.

    Raises:
        ValueError, OSError: for a fresh model whose config is wrong. A checkpoint that is not there yet is said.
    """
    lines = [f"# {line}".rstrip() for line in _tables(config, processes)]
    return "\n".join([settings_files.dump(config).rstrip(), "", *lines])


def _tables(config: TrainingConfig, processes: int) -> list[str]:
    lines = ["length", *_aligned(_length(config, processes))]
    try:
        model = config_of(config.model, vocab_size=config.tokenizer.train_vocab_size)
    except (OSError, ValueError) as error:
        if config.model.checkpoint is None:
            raise
        # The phase before may not have been trained yet.
        return [*lines, "", f"parameters, FLOPs and memory: not known, {' '.join(str(error).split())}"]
    flops = flops_per_token(model, config.data.sequence_length)
    items = estimate_memory(config, model)
    memory = [(item.name, _gib(item.bytes), _note(item)) for item in items]
    memory.append(("most at a time", _gib(peak_bytes(items)), "what always is, and the larger half of a step"))
    return [
        *lines,
        *("", "parameters", *_aligned(_parameters(count_parameters(model)))),
        *("", "FLOPs of one token, forward and backward", *_aligned(_flops(flops))),
        *("", "FLOPs of the run", *_aligned(_run_flops(flops, config))),
        *("", "memory of each device", *_aligned(memory)),
    ]


def _length(config: TrainingConfig, processes: int) -> list[Row]:
    rows, micro = config.batch.rows, config.batch.micro_rows
    per_step, steps = config.tokens_per_step, config.total_steps
    passes = -(-rows // (processes * micro))
    table = [
        ("tokens of a step", f"{per_step:,}", f"{rows:,} rows x {config.data.sequence_length:,}"),
        ("steps", f"{steps:,}", ""),
        ("tokens", f"{per_step * steps:,}", short_count(per_step * steps)),
        (
            "accumulation",
            f"{passes:,}",
            f"micro-batches of {micro} row{'s' * (micro > 1)} on each of {processes} processes",
        ),
    ]
    empty = passes * processes * micro - rows
    if empty:
        table.append(("empty rows", f"{empty:,}", "in every step: rows are no multiple of processes x micro_rows"))
    return table


def _parameters(count: ParameterCount) -> list[Row]:
    tables = "embedding, which is the head too" if not count.head else "embedding and head"
    outside = f"without {count.embedding + count.head:,} of {tables}"
    return [
        ("total", f"{count.total:,}", short_count(count.total)),
        ("", f"{count.total_without_embedding:,}", outside),
        ("active", f"{count.active:,}", "of a token: one expert in every layer"),
        ("", f"{count.active_without_embedding:,}", outside),
    ]


def _flops(flops: FlopCount) -> list[Row]:
    return [
        ("counted", f"{flops.total:.4g}", flops.formula),
        ("causal", f"{flops.causal:.4g}", "with what the mask leaves of attention"),
        ("done", f"{flops.recomputed:.4g}", "under activation checkpointing: the layers' forward pass twice"),
        ("skipped", f"{flops.experts:.4g}", "less for a token that skips the experts"),
    ]


def _run_flops(flops: FlopCount, config: TrainingConfig) -> list[Row]:
    total = flops.total * config.tokens_per_step * config.total_steps
    table = [("all tokens", f"{total:.4g}", "")]
    for device in ("AMD Instinct MI300X", "NVIDIA H100"):
        peak = peak_tflops(device, config.precision)
        days = 0.0 if peak is None else total / (peak * 1e12) / 86400
        if days >= 0.01:
            table.append(("", f"{days:.4g}", f"days of one {device} at its peak, {peak} TFLOP/s in {config.precision}"))
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def _note(item: MemoryItem) -> str:
    when = "" if item.when == "always" else f"; in {item.when}"
    return f"{item.formula}{when}{', estimate' if item.estimate else ''}"


def _aligned(table: list[Row]) -> list[str]:
    """Rows of name, number and words; numbers to the right."""
    names, numbers = (max(len(row[column]) for row in table) for column in (0, 1))
    return [f"  {name:<{names}}  {number:>{numbers}}  {words}".rstrip() for name, number, words in table]
