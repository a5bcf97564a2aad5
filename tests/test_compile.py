"""`torch.compile` of calls without a cache: one graph, the same numbers, and one program for many shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from saved_models import differing
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

IMPLEMENTATIONS = ["zaya", "eager", "grouped_mm", "batched_mm"]
PADS = torch.tensor([[0] * 5 + [1] * 7, [1] * 10 + [0] * 2])
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
BIASES = torch.zeros(1, 1, 12, 12).masked_fill(~CAUSAL, -1e9)
LENGTHS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
#: what is passed with two rows of 12 tokens (one row, where lengths are given)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": PADS},
    "positions": {"position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]},
    "lengths": {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS},
    "numbers": {"seq_idx": torch.tensor([[0] * 5 + [1] * 7])},
    "4-D": {"attention_mask": CAUSAL},
    "4-D additive": {"attention_mask": BIASES},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Every test compiles models of its own; the compiler counts them as recompilations of one."""
    torch.compiler.reset()
    counters.clear()


def build(implementation: str = "zaya", **changes: Any) -> ZayaForCausalLM:
    built = redraw(ZayaForCausalLM(tiny_config(**{"num_hidden_layers": 1, **changes})))
    built.set_experts_implementation(implementation)
    return built


def sliding(**changes: Any) -> dict[str, Any]:
    return {"layer_types": ["hybrid_sliding"], "sliding_window": 4, **changes}


def fullgraph(model: Any, backend: Any = "aot_eager") -> Any:
    """A graph break is an error."""
    return torch.compile(model, fullgraph=True, backend=backend)


def close(got: Any, want: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def gradients(model: ZayaForCausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_call(model: ZayaForCausalLM, name: str, backend: str = "aot_eager") -> None:
    arguments = {**CALLS[name], "use_cache": False, "output_router_logits": True}
    ids = random_ids(1 if name == "lengths" else 2, 12)
    with torch.no_grad():
        got = fullgraph(model, backend)(ids, labels=ids, **arguments)
        want = model(ids, labels=ids, **arguments)
    real = PADS.bool() if name == "padded" else torch.ones_like(ids, dtype=torch.bool)
    close(got.logits[real], want.logits[real])
    close(got.loss, want.loss)
    assert torch.equal(got.tokens_per_slot, want.tokens_per_slot)
    assert counters["stats"]["unique_graphs"] == 1


# --------------------------------------------------------------------------------------------------------- inference
@pytest.mark.parametrize(
    ("name", "implementation", "attention", "backend", "changes"),
    [
        ("plain", "zaya", "sdpa", "eager", {"num_hidden_layers": 2}),
        ("padded", "grouped_mm", "eager", "aot_eager", sliding(cca_time0=3, cca_time1=4)),
        ("positions", "batched_mm", "sdpa", "eager", sliding(cca_time0=1, cca_time1=1)),
        ("lengths", "eager", "sdpa", "eager", {"skip_expert": "identity", "attention_bias": True}),
        ("4-D additive", "zaya", "eager", "eager", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_compiled_calls_equal_eager_ones(
    name: str, implementation: str, attention: str, backend: str, changes: dict[str, Any]
) -> None:
    model = build(implementation, **changes)
    model.set_attn_implementation(attention)
    check_call(model, name, backend)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_every_combination(name: str, implementation: str, attention: str, widths: tuple[int, int]) -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 4}
    model = build(implementation, **kinds, cca_time0=widths[0], cca_time1=widths[1])
    model.set_attn_implementation(attention)
    check_call(model, name)


# ---------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize(("implementation", "checkpointing"), [("zaya", True), ("eager", False)])
def test_a_compiled_training_step_has_the_same_gradients(implementation: str, checkpointing: bool) -> None:
    """With packed rows, and without logits, as training is by default."""
    model, ids = build(implementation).train(), random_ids(2, 12)
    if checkpointing:
        model.activation_checkpointing_enable()
    arguments = {"labels": ids, "use_cache": False, **CALLS["positions"]}
    output = fullgraph(model)(ids, **arguments)
    assert output.logits is None
    got = gradients(model, output.loss)
    want = gradients(model, model(ids, **arguments).loss)
    for name, gradient in want.items():
        assert gradient is not None, name
        assert got[name] is not None, name
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)
    assert counters["stats"]["unique_graphs"] == 1


def test_autocast() -> None:
    """Parameters and their gradients stay fp32. How far both are from the fp32 gradients is the measure."""
    model, ids = build().train(), random_ids(2, 12)
    exact = gradients(model, model(ids, labels=ids, use_cache=False).loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fullgraph(model)(ids, labels=ids, use_cache=False).loss
    got = gradients(model, loss)
    assert loss.dtype == torch.float32
    for name, gradient in exact.items():
        assert got[name].dtype == torch.float32, name
        assert (got[name] - gradient).norm() < 0.1 * gradient.norm(), name


# ------------------------------------------------------------------------------------------------------------ shapes
@pytest.mark.parametrize("masked", [False, True])
def test_one_program_serves_all_batch_sizes_and_lengths(masked: bool) -> None:
    """Also when the model has run uncompiled before and in between. Without a mask by `dynamic=True`, with one by
    marking its dimensions."""
    model, backend = build("grouped_mm" if masked else "zaya"), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=None if masked else True)
    programs = None
    for rows, tokens in ((2, 12), (3, 12), (3, 17), (2, 5), (4, 40)):
        ids = random_ids(rows, tokens, seed=tokens)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        arguments = {"attention_mask": mask} if masked else {}
        if masked:
            for tensor in (ids, mask):
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
        with torch.no_grad():
            got = compiled(ids, use_cache=False, **arguments).logits
            want = model(ids, use_cache=False, **arguments).logits
        real = mask.bool() if masked else torch.ones_like(mask).bool()
        close(got[real], want[real])
        programs = programs or backend.frame_count
        assert backend.frame_count == programs, (rows, tokens)


# ----------------------------------------------------------------------------------------------- other ways to compile
def test_model_compile_leaves_names_and_files_alone(tmp_path: Path) -> None:
    model, ids = build(), random_ids(2, 12)
    base = model.model
    with torch.no_grad():
        want = base(ids, use_cache=False).last_hidden_state
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        base.compile(fullgraph=True, backend="aot_eager")
        close(base(ids, use_cache=False).last_hidden_state, want)
    assert counters["stats"]["unique_graphs"] == 1
    assert differing(before, base) == []
    model.save_pretrained(tmp_path / "in place")
    torch.compile(model, backend="aot_eager").save_pretrained(tmp_path / "wrapped")
    for folder in tmp_path.iterdir():
        assert differing(ZayaForCausalLM.from_pretrained(folder), model) == []


def test_regional_compilation_compiles_one_layer_for_all() -> None:
    """As `accelerate launch --dynamo_use_regional_compilation`. The first layer has no router state before it."""
    model, ids, backend = build(num_hidden_layers=4), random_ids(2, 12), CompileCounterWithBackend("eager")
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        regional = compile_regions(model, backend=backend, fullgraph=True)
        close(regional(ids, use_cache=False).logits, want)
        close(model(ids, use_cache=False).logits, want)
    layers = sum(any(node.name.startswith("softmax") for node in graph.graph.nodes) for graph in backend.graphs)
    assert layers <= 2


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_inductor(train: bool) -> None:
    model, ids = build().train(train), random_ids(2, 12)
    compiled = torch.compile(model, fullgraph=True)
    got, want = (run(ids, labels=ids, use_cache=False, skip_logits=False) for run in (compiled, model))
    close((got.logits, got.loss), (want.logits, want.loss), atol=2e-5)
    if train:
        mine, theirs = gradients(model, got.loss), gradients(model, want.loss)
        for name, gradient in theirs.items():
            close(mine[name], gradient, atol=2e-5)
