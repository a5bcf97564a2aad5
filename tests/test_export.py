"""Programs that run without this package (`torch.export`, ONNX, TorchScript) route anew, in any batch and length."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import DynamicCache, GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from zaya_hf import ZayaForCausalLM
from zaya_hf.exporting import ExportableDecoder
from zaya_hf.ops import selection
from zaya_hf.testing import random_ids, redraw, tiny_config
from zaya_hf.visibility import _latest

IMPLEMENTATIONS = ["zaya", "eager", "grouped_mm", "batched_mm"]
BOTH = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
BOTH_KINDS = ("hybrid", "hybrid_sliding")
#: rows and tokens of calls, all others than what is traced
SHAPES = [(3, 9), (1, 1), (1, 30), (4, 2)]


def build(implementation: str = "zaya", **changes: Any) -> ZayaForCausalLM:
    built = redraw(ZayaForCausalLM(tiny_config(**{"num_hidden_layers": 1, **changes})))
    built.set_experts_implementation(implementation)
    return built


class Logits(nn.Module):
    """What to export: tensors in, one tensor out, and no class that the reader of the file would need."""

    def __init__(self, model: ZayaForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def padded(rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, and a mask that hides a left part of the first row and a right part of the last one."""
    ids = random_ids(rows, tokens, seed=seed)
    mask = torch.ones_like(ids)
    if tokens > 4:
        mask[0, :3] = 0
        mask[-1, -1] = 0
    return ids, mask


def check(program: Any, model: ZayaForCausalLM, shapes: list[tuple[int, int]] = SHAPES) -> None:
    for seed, shape in enumerate(shapes):
        ids, mask = padded(*shape, seed=seed + 1)
        with torch.no_grad():
            want = model(ids, attention_mask=mask, use_cache=False).logits
            got = program(ids, mask)
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-5, rtol=0)


def exported(model: nn.Module, strict: bool = False) -> torch.export.ExportedProgram:
    shapes = {"input_ids": BOTH, "attention_mask": BOTH}
    with torch.no_grad():
        return torch.export.export(model, padded(2, 12), dynamic_shapes=shapes, strict=strict)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    return {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")}


def written_buffers(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the buffers that a program writes in place."""
    buffers, written = program.graph_signature.inputs_to_buffers, set()
    for node in program.graph.nodes:
        if node.target in (torch.ops.aten.copy_.default, torch.ops.aten.index_copy_.default):
            held = node.args[0]
            while held.target is torch.ops.aten.to.dtype:  # to its own dtype: itself
                held = held.args[0]
            written.add(buffers.get(held.name))
    return written


def with_weights_of(program: torch.export.ExportedProgram, model: ZayaForCausalLM) -> nn.Module:
    """The program, with the model's weights of now."""
    module = program.module()
    module.load_state_dict(Logits(model).state_dict(), strict=False)
    return module


def hide_expert(model: ZayaForCausalLM, expert: int, by: float = 9.0) -> None:
    """No token chooses `expert` in any layer."""
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[expert] -= by


# ------------------------------------------------------------------------------------------------------ torch.export
@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    """Both kinds of attention, and a second router, which reads the first one's state."""
    return build(num_hidden_layers=2, attention_bias=True, layer_types=list(BOTH_KINDS), sliding_window=4)


@pytest.fixture(scope="module")
def program(model: ZayaForCausalLM) -> torch.export.ExportedProgram:
    """Exported while one expert of each layer, which `check` uses in all of them, had no token."""
    with torch.no_grad():
        ids, mask = padded(*SHAPES[0], seed=1)
        counts = model(ids, attention_mask=mask, use_cache=False, output_router_logits=True).tokens_per_slot
        hidden = int(counts[:, :-1].amin(0).argmax())
        assert counts[:, hidden].all()
        hide_expert(model, hidden)
        ids, mask = padded(2, 12)
        counts = model(ids, attention_mask=mask, use_cache=False, output_router_logits=True).tokens_per_slot
        assert not counts[:, hidden].any()
        made = exported(Logits(model))
        hide_expert(model, hidden, by=-9.0)
    return made


def test_an_exported_program_routes_anew(model: ZayaForCausalLM, program: torch.export.ExportedProgram) -> None:
    """An expert that no token chose while tracing is used afterwards, in batches and lengths that were not traced."""
    check(with_weights_of(program, model), model)


@pytest.mark.slow
def test_a_saved_program_needs_torch_only(program: torch.export.ExportedProgram, tmp_path: Path) -> None:
    assert operators(program) <= {"aten", "_operator"}
    path, ids_and_logits = tmp_path / "model.pt2", tmp_path / "logits.pt"
    torch.export.save(program, path)
    want_module = program.module()
    code = f"""
import sys, torch
program = torch.export.load({str(path)!r}).module()
ids, mask = torch.load({str(ids_and_logits)!r})
torch.save(program(ids, mask), {str(ids_and_logits)!r})
assert not {{"zaya_hf", "transformers"}} & set(sys.modules)
"""
    ids, mask = padded(3, 9, seed=5)
    torch.save((ids, mask), ids_and_logits)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    torch.testing.assert_close(torch.load(ids_and_logits), want_module(ids, mask), atol=1e-5, rtol=0)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_the_model_itself_with_packed_rows(strict: bool) -> None:
    """Positions are an input, so other documents are packed later than were traced."""
    model = build("batched_mm")
    model.set_attn_implementation("eager")
    ids = random_ids(2, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].repeat(2, 1)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    shapes = {"input_ids": BOTH, "position_ids": BOTH, "use_cache": None}
    with torch.no_grad():
        module = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict).module()
        others = random_ids(3, 9, seed=4)
        positions = torch.cat([torch.arange(2), torch.arange(3), torch.arange(4)])[None].repeat(3, 1)
        got = module(input_ids=others, position_ids=positions, use_cache=False).logits
        want = model(others, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_combination(implementation: str, widths: tuple[int, int], attention: str, strict: bool) -> None:
    model = build(implementation, cca_time0=widths[0], cca_time1=widths[1], skip_expert="identity")
    model.set_attn_implementation(attention)
    made = exported(Logits(model), strict)
    check(made.module(), model)
    check(made.run_decompositions().module(), model)


@pytest.mark.slow
def test_ahead_of_time_inductor(model: ZayaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            exported(Logits(model)), package_path=str(tmp_path / "m.pt2")
        )
        check(torch._inductor.aoti_load_package(package), model)


# ------------------------------------------------------------------------------------------------- with a static cache
def pieces_of(run: Any, ids: Tensor, mask: Tensor, pieces: list[int]) -> Tensor:
    """Logits of a text fed in pieces."""
    outputs, at = [], 0
    for tokens in pieces:
        outputs.append(run(ids[:, at : at + tokens], mask[:, at : at + tokens], torch.tensor(at)))
        at += tokens
    return torch.cat(outputs, dim=1)


def new_decoder(widths: tuple[int, int] = (2, 2), layer_types: Sequence[str] = BOTH_KINDS) -> ExportableDecoder:
    kinds = {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types), "sliding_window": 5}
    model = build(attention_bias=True, cca_time0=widths[0], cca_time1=widths[1], **kinds)
    return ExportableDecoder(model, batch_size=2, max_cache_len=20)


def check_decoder(run: Any, model: ZayaForCausalLM) -> None:
    """Prompts of several lengths, one after the other on the same memory, with padding on either side."""
    for seed, pieces in enumerate(([7] + [1] * 13, [1] * 12, [20], [5, 2, 1, 1, 3, 8])):
        ids = random_ids(2, sum(pieces), seed=seed)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        mask[1, max(pieces[0] - 2, 1) : pieces[0]] = 0  # on the right of the prompt
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            want = pieces_of(lambda i, m, _, c=cache: model(i, attention_mask=m, cache=c).logits, ids, mask, pieces)
            got = pieces_of(run, ids, mask, pieces)
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (3, 4)])
def test_a_decoder_takes_prompts_and_steps(widths: tuple[int, int]) -> None:
    decoder = new_decoder(widths)
    check_decoder(decoder, decoder.model)


@pytest.mark.parametrize(
    "widths", [(2, 2), pytest.param((1, 1), marks=pytest.mark.slow), pytest.param((3, 4), marks=pytest.mark.slow)]
)
def test_an_exported_decoder_takes_prompts_and_steps(widths: tuple[int, int], tmp_path: Path) -> None:
    """One program for both, saved and loaded. Exported with an expert without tokens."""
    decoder = new_decoder(widths, BOTH_KINDS[1:])
    ids = random_ids(2, 6)
    shapes = {"input_ids": {1: Dim.DYNAMIC}, "attention_mask": {1: Dim.DYNAMIC}, "cached": None}
    with torch.no_grad():
        hide_expert(decoder.model, 2)
        made = torch.export.export(decoder, (ids, torch.ones_like(ids), torch.tensor(0)), dynamic_shapes=shapes)
        hide_expert(decoder.model, 2, by=-9.0)
    assert operators(made) <= {"aten", "_operator"}
    assert written_buffers(made) == {name for name, _ in decoder.named_buffers(recurse=False)}
    torch.export.save(made, tmp_path / "decoder.pt2")
    module = torch.export.load(tmp_path / "decoder.pt2").module()
    module.load_state_dict(decoder.state_dict(), strict=False)
    check_decoder(module, decoder.model)
    with torch.no_grad():  # the trace has left nothing behind
        decoder(ids, torch.ones_like(ids), torch.tensor(0))


def test_a_decoder_greedily_continues_as_generate_does() -> None:
    decoder, ids = new_decoder(), random_ids(2, 5, seed=3)
    want = decoder.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    tokens, cached, text = ids, 0, ids
    with torch.no_grad():
        for _ in range(12):
            logits = decoder(tokens, torch.ones_like(tokens), torch.tensor(cached))
            cached += tokens.shape[1]
            tokens = logits[:, -1:].argmax(-1)
            text = torch.cat([text, tokens], dim=1)
    assert torch.equal(text, want)


def test_an_empty_static_cache_is_not_exported() -> None:
    """As transformers' module for ExecuTorch would, which knows no convolution states."""
    model = build()
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
    exportable = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=8)
    inputs = {"input_ids": random_ids(1, 1), "cache_position": torch.tensor([0])}
    with torch.no_grad(), pytest.raises(ValueError, match=r"an empty static cache cannot be exported"):
        torch.export.export(exportable, (), inputs, strict=False)


def test_a_decoder_is_refused_with_one_line() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"batch_size is 0 and max_cache_len 4; both have to be 1 or more"):
        ExportableDecoder(model, 0, 4)
    with pytest.raises(ValueError, match=r"call eval\(\) first"):
        ExportableDecoder(model.train(), 1, 4)


# ----------------------------------------------------------------------------------------------- ONNX and TorchScript
@pytest.mark.slow
def test_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = build(sliding_window=4, layer_types=["hybrid_sliding"], num_experts=2)
    names = {0: "batch", 1: "tokens"}
    with torch.no_grad():
        hide_expert(model, 1)
        made = torch.onnx.export(
            Logits(model),
            padded(2, 12),
            dynamo=True,
            dynamic_shapes={"input_ids": names, "attention_mask": names},
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            verbose=False,
        )
    made.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        return torch.from_numpy(logits)

    check(run, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamo", "onnx"])
def test_exporters_of_transformers(kind: str) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        from transformers.exporters.exporter_onnx import OnnxConfig as Config
        from transformers.exporters.exporter_onnx import OnnxExporter as Exporter
    else:
        from transformers.exporters.exporter_dynamo import DynamoConfig as Config
        from transformers.exporters.exporter_dynamo import DynamoExporter as Exporter
    model, (ids, mask) = build(), padded(2, 12)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    made = Exporter().export(model, inputs, config=Config(dynamic=True))
    check(lambda i, m: made(input_ids=i, attention_mask=m).logits, model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_trace_of_torchscript_routes_anew(implementation: str) -> None:
    model = build(implementation)
    with torch.no_grad():
        hide_expert(model, 1)
        traced = torch.jit.trace(Logits(model), padded(2, 12), check_trace=False)
        hide_expert(model, 1, by=-9.0)
        traced.model.model.layers._modules["0"].mlp.gate.balancing_biases.copy_(
            model.model.layers[0].mlp.gate.balancing_biases
        )
    check(traced, model, [(3, 9), (2, 14)])


# --------------------------------------------------------------------------------------------------------- the pieces
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 40)])
def test_the_running_maximum_of_an_export(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.arange(shape[1])
    for flags in (torch.rand(shape) < 0.4, torch.zeros(shape).bool(), torch.ones(shape).bool()):
        want = _latest(flags, columns)
        monkeypatch.setattr(selection, "is_exporting", lambda: True)
        assert torch.equal(_latest(flags, columns), want)
        monkeypatch.undo()
