"""Fixtures for tests of ZAYA models, here and elsewhere.

The default initialisation hides faults: scales of 1 and biases of 0 make half of the arithmetic invisible. `redraw`
draws every parameter and buffer, so that a change of any of them changes the logits.

Two runs that ought to agree may also differ because a router was undecided: rounding then picks another expert, and
everything from that token on is different. `assert_equal_logits` tells that case from a fault:

    got = record_run(model, packed, position_ids=positions)[:, 5:]
    want = record_run(model, second_document)
    assert_equal_logits(got, want)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configuration_zaya import ZayaConfig
from .ops.numerics import promote, wide_dtype

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "router_hidden_size": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def tiny_config(**changes: Any) -> ZayaConfig:
    """A config of 179,000 parameters (4 layers, width 64), with `changes` applied."""
    return ZayaConfig(**{**TINY, **changes})


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw every parameter and persistent buffer anew, in place, reproducibly, and switch to eval mode.

    Matrices: normal x 0.3; vectors: normal x 0.2; norms and scales: 1 + 0.2 normal; temperatures: uniform in
    [0.7, 1.1]; balancing biases: 0.05 normal, the skip slot included. Names decide, so the same seed gives the same
    model in our class and in transformers' own.

    Args:
        model: any ZAYA model, on any device, in any floating dtype.
        seed: of the generator.

    Returns:
        `model`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point() or (name == "lm_head.weight" and _is_tied(model)):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(".temp"):
            value = 0.7 + 0.4 * torch.rand(tensor.shape, generator=generator)
        elif name.endswith("balancing_biases"):
            value = 0.05 * noise
        elif "norm.weight" in name or name.endswith("_scale"):
            value = 1 + 0.2 * noise
        else:
            value = noise * (0.2 if tensor.ndim == 1 else 0.3)
        tensor.copy_(value)
    return model.eval()


def _is_tied(model: torch.nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def random_ids(*shape: int, seed: int = 0, low: int = 3, high: int = 128) -> Tensor:
    """Random token ids in [low, high), int64, of the given `shape`; the same for the same `seed`."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------- comparing two runs
@dataclass
class RecordedRun:
    """Logits of a run and what its routers saw. ``run[rows, columns]`` (slices or numbers) slices all of it alike.

    Attributes:
        logits: ``[B, S, vocab_size]``.
        biased: ``[B, S, layers, num_experts + 1]`` biased probabilities, by which the routers chose; fp32 or wider.
    """

    logits: Tensor
    biased: Tensor

    @property
    def slots(self) -> Tensor:
        """``[B, S, layers]`` int64: the slot with the largest biased probability."""
        return self.biased.argmax(-1)

    @property
    def gaps(self) -> Tensor:
        """``[B, S, layers]``: how far the second-best slot is behind the best."""
        best, second = self.biased.topk(2, dim=-1).values.unbind(-1)
        return best - second

    def __getitem__(self, index: Any) -> RecordedRun:
        """The run of some rows and columns; both dimensions stay, also for a single number."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 2:
            raise IndexError("a recorded run has two dimensions, rows and columns.")
        kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in index)
        return RecordedRun(self.logits[kept], self.biased[kept])

    @staticmethod
    def join(runs: Sequence[RecordedRun], dim: int = 1) -> RecordedRun:
        """Several runs as one: chunks of the same rows (`dim` 1) or different rows (`dim` 0)."""
        return RecordedRun(torch.cat([r.logits for r in runs], dim), torch.cat([r.biased for r in runs], dim))


def record_run(model: Any, *args: Any, **kwargs: Any) -> RecordedRun:
    """Run a causal ZAYA model, ours or transformers' own, and keep what `assert_equal_logits` needs.

    Args:
        model: with a language-model head.
        args, kwargs: of its `forward`; `logits_to_keep` and `output_router_logits` aside.
    """
    output = model(*args, output_router_logits=True, **kwargs)
    logits: Tensor = output.logits
    per_layer = []
    for layer, router_logits in zip(model.get_decoder().layers, output.router_logits, strict=True):
        wide = promote(router_logits.detach())
        per_layer.append(torch.softmax(wide, dim=-1) + layer.mlp.gate.balancing_biases)
    biased = torch.stack(per_layer, dim=1).unflatten(0, logits.shape[:2])
    return RecordedRun(logits, biased)


def assert_equal_logits(
    got: RecordedRun | Tensor,
    want: RecordedRun | Tensor,
    *,
    atol: float = 1e-5,
    rtol: float = 0.0,
    where: Tensor | None = None,
    undecided: float = 1e-6,
) -> None:
    """Check that two runs agree, except where a router could not decide between two slots.

    A difference is excused only if the routers themselves explain it. For every token whose logits differ, look at its
    row up to that token: some layer chose differently in the two runs there, and wherever the first such layer did, the
    best and the second-best biased probability were less than `undecided` apart. Later layers differ as a consequence.

    Args:
        got, want: from `record_run`, sliced or joined to the same tokens. A plain tensor of logits
            ``[B, S, vocab_size]`` on either side carries no evidence, and excuses nothing.
        where: ``[B, S]`` bool, the tokens that count (padding, say, does not); None: all.
        atol, rtol: a logit agrees if it is within ``atol + rtol * |want|``; NaN agrees with nothing.
        undecided: the largest gap that rounding may tip.

    Raises:
        AssertionError: with the largest error, where it is, and the smallest gap of either run with its place.
    """
    got_logits = got if isinstance(got, Tensor) else got.logits
    want_logits = want if isinstance(want, Tensor) else want.logits
    if got_logits.shape != want_logits.shape:
        raise AssertionError(f"logits have shape {tuple(got_logits.shape)}, expected {tuple(want_logits.shape)}")
    if got_logits.numel() == 0:
        return
    wide = wide_dtype(torch.promote_types(got_logits.dtype, want_logits.dtype))
    expected = want_logits.detach().to(wide)
    error = (got_logits.detach().to(wide) - expected).abs()
    wrong = ~(error <= atol + rtol * expected.abs())
    if where is not None:
        wrong = wrong & where[..., None]
    if not wrong.any():
        return
    worst = torch.where(wrong, error.nan_to_num(torch.inf), -1.0)
    place = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
    miss, given, right = (float(t.detach()[tuple(place)]) for t in (error, got_logits, want_logits))
    report = (
        f"{int(wrong.sum())} of {wrong.numel()} logits differ; largest error {miss:.3e} at [row, column, word] {place}"
        f": got {given:.6g}, expected {right:.6g}"
    )
    if isinstance(got, Tensor) or isinstance(want, Tensor):
        raise AssertionError(f"{report}; no record of the routers")

    counts = torch.ones_like(wrong[..., 0]) if where is None else where
    gaps = torch.minimum(got.gaps, want.gaps).masked_fill(~counts[..., None], torch.inf)
    narrowest = [int(i) for i in torch.unravel_index(gaps.argmin(), gaps.shape)]
    report += f"; smallest router gap {float(gaps.min()):.3e} at [row, column, layer] {narrowest}"
    different = (got.slots != want.slots) & counts[..., None]
    unexplained = _unexplained(wrong.any(-1), different, gaps < undecided)
    if unexplained is not None:
        raise AssertionError(f"{report}; [row, column] {list(unexplained)} is not explained by an undecided router")


def _unexplained(wrong: Tensor, chose_differently: Tensor, undecided: Tensor) -> tuple[int, int] | None:
    """The first token of ``wrong[B, S]`` that choices ``[B, S, layers]`` do not explain, as (row, column)."""
    for row, column in wrong.nonzero().tolist():
        different = chose_differently[row, : column + 1]
        layers = different.any(0).nonzero()
        if layers.numel() == 0:
            return row, column
        first = int(layers[0])
        if not bool(undecided[row, : column + 1, first][different[:, first]].all()):
            return row, column
    return None
