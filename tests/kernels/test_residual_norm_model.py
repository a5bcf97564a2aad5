"""The model on the kernels of `residual_norm`: which norms are merged, and that nobody can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zaya_hf import ZayaForCausalLM
from zaya_hf.modeling_zaya import ZayaRMSNorm
from zaya_hf.ops import selection
from zaya_hf.ops.residual_norm import operators
from zaya_hf.testing import random_ids, redraw, tiny_config

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

LAYERS = 2


def build(**config: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=LAYERS, **config))).to(DEVICE).eval()


def ids(*shape: int) -> Tensor:
    return random_ids(*shape).to(DEVICE)


def reference() -> Any:
    return selection.use("reference")


def triton() -> Any:
    return selection.use("reference", residual_norm="triton")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each operator was called."""
    counted: Counter[str] = Counter()

    def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            counted[name] += 1
            return run(*arguments)

        return called

    for name in ("merge_norm", "merge", "norm"):
        monkeypatch.setattr(operators, name, counting(name, getattr(operators, name)))
    return counted


#: with every norm merged: before the first layer, and two in each; the router's norm stands alone
ALL = {"merge_norm": 1 + 2 * LAYERS, "norm": LAYERS}
#: with the two of a layer merged only
INSIDE = {"merge_norm": LAYERS, "norm": LAYERS + 1 + LAYERS, "merge": 1 + LAYERS}


def run(model: ZayaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter that has one."""
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name].double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
        assert error <= 1e-5 or not expected.any(), (name, error)


def assert_same(model: ZayaForCausalLM, tokens: Tensor) -> None:
    with reference():
        want = run(model, tokens)
    with triton():
        got = run(model, tokens)
    assert_equal(got, want)


# ------------------------------------------------------------------------------------------------------ numbers
@pytest.mark.parametrize("in_fp32", [True, False], ids=["fp32-stream", "narrow-stream"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_logits_and_gradients(in_fp32: bool, training: bool, calls: Counter[str]) -> None:
    model = build(residual_in_fp32=in_fp32).train(training)
    assert_same(model, ids(2, 6))
    assert calls == ALL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("in_fp32", [True, False], ids=["fp32-stream", "narrow-stream"])
def test_narrow_models_keep_their_stream(dtype: torch.dtype, in_fp32: bool, calls: Counter[str]) -> None:
    """A rounded stream is what the norms see; the difference to the definition is of the dtype."""
    model = build(residual_in_fp32=in_fp32, num_experts=1).to(dtype)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases.copy_(torch.tensor([5.0, 0.0]))  # routing cannot flip
    with torch.no_grad():
        with reference():
            want = model(ids(2, 6), output_hidden_states=True)
        with triton():
            got = model(ids(2, 6), output_hidden_states=True)
    assert calls == ALL
    for one, other in zip(got.hidden_states, want.hidden_states, strict=True):
        assert one.dtype == other.dtype
        # each rounds on its way
        assert (one.double() - other.double()).norm() <= 3e-2 * other.double().norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_merges_inside_layers_only(reentrant: bool, calls: Counter[str]) -> None:
    model = build().train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.model.embed_tokens.weight.requires_grad_()
    assert_same(model, ids(2, 6))
    once = {"merge_norm": LAYERS, "norm": LAYERS + LAYERS, "merge": LAYERS}
    assert calls == {name: 2 * count for name, count in once.items()} | {
        "norm": 2 * once["norm"] + 1,  # the final norm and the embedding's merge are not run again
        "merge": 2 * once["merge"] + 1,
    }


def test_generated_tokens() -> None:
    model = build()
    options = {"max_new_tokens": 5, "do_sample": False}
    with reference():
        want = model.generate(ids(2, 4), **options)
    with triton():
        assert torch.equal(model.generate(ids(2, 4), **options), want)


def test_autocast() -> None:
    model = build(num_experts=1)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases.copy_(torch.tensor([5.0, 0.0]))
    found = []
    for way in (reference(), triton()):
        with way, torch.autocast(DEVICE, torch.bfloat16):
            found.append(run(model, ids(2, 6)))
    for name, expected in found[0].items():
        assert found[1][name].dtype == expected.dtype
        assert (found[1][name] - expected).double().norm() <= 0.03 * expected.double().norm() + 1e-8, name


# ------------------------------------------------------------------------------------------- who may be watching
def part(model: ZayaForCausalLM, name: str) -> nn.Module:
    return model.model.get_submodule(name)


PARTS = [
    "layers.0.input_layernorm",
    "layers.1.input_layernorm",
    "layers.1.post_attention_residual_scale",
    "layers.1.post_attention_layernorm",
    "layers.1.post_mlp_residual_scale",
    "norm",
]


@pytest.mark.parametrize(("name", "kind"), list(zip(PARTS, ["forward", "pre", "backward"] * 2, strict=True)))
def test_hooked_modules_are_called(name: str, kind: str) -> None:
    model, seen = build(), []
    hooked = part(model, name)
    if kind == "forward":
        hooked.register_forward_hook(lambda *given: seen.append(len(given)))
    elif kind == "pre":
        hooked.register_forward_pre_hook(lambda *given: seen.append(len(given)))
    else:
        hooked.register_full_backward_hook(lambda *given: seen.append(len(given)))
    assert_same(model, ids(1, 5))
    assert len(seen) == 2


@pytest.mark.parametrize("how", ["subclass", "instance", "hook"])
@pytest.mark.parametrize("name", ["layers.1.input_layernorm", "layers.1.post_attention_layernorm", "norm"])
def test_replaced_norms_count(name: str, how: str) -> None:
    """Each changes what the norm gives, and so the logits."""

    class Louder(ZayaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 1.5 * super().forward(x)

    model = build()
    with reference():
        before = model(ids(1, 5)).logits
    norm = part(model, name)
    if how == "subclass":
        norm.__class__ = Louder
    elif how == "instance":
        plain = norm.forward
        norm.forward = lambda x: 1.5 * plain(x)
    else:
        norm.register_forward_hook(lambda module, given, result: 1.5 * result)
    assert_same(model, ids(1, 5))
    with triton():
        assert not torch.allclose(model(ids(1, 5)).logits, before, rtol=1e-3)


@pytest.mark.parametrize("index", range(LAYERS))
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_streams_changed_between_layers_are_what_is_normed(index: int, kind: str) -> None:
    model = build()
    with reference():
        before = model(ids(1, 5)).logits
    if kind == "forward":
        model.model.layers[index].register_forward_hook(lambda module, given, results: (results[0] + 1, *results[1:]))
    else:
        model.model.layers[index].register_forward_pre_hook(lambda module, given: (given[0] + 1, *given[1:]))
    assert_same(model, ids(1, 5))
    with triton():
        assert not torch.allclose(model(ids(1, 5)).logits, before, rtol=1e-3)


def test_layers_in_the_place_of_ours(calls: Counter[str]) -> None:
    """A wrapper that knows nothing of lent norms gets the arguments that it always got."""

    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module):
            super().__init__()
            self.layer = layer

        def forward(
            self, x: Tensor, state: Any, tables: Any, visible: Any, cache: Any = None, replayed: Any = None
        ) -> tuple[Tensor, ...]:
            return self.layer(x, state, tables, visible, cache=cache, replayed=replayed)

    model = build()
    model.model.layers[1] = Wrapped(model.model.layers[1])
    assert_same(model, ids(1, 5))
    assert calls == {"merge_norm": ALL["merge_norm"] - 2, "norm": LAYERS + 2, "merge": 2}


def test_hidden_states_are_the_streams(calls: Counter[str]) -> None:
    model = build()
    with reference():
        want = model(ids(2, 5), output_hidden_states=True).hidden_states
    with triton():
        got = model(ids(2, 5), output_hidden_states=True).hidden_states
        assert calls == ALL
        model(ids(2, 5))  # the hooks that record stay behind and change nothing
    assert calls == {name: 2 * count for name, count in ALL.items()}
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_offloaded_models() -> None:
    """Weights are on the meta device except while their own module runs."""
    accelerate = pytest.importorskip("accelerate")
    model = build()
    with torch.no_grad():
        with reference():
            want = model(ids(1, 5)).logits
        accelerate.cpu_offload(model, torch.device(DEVICE))
        with triton():
            got = model(ids(1, 5)).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="the process group is of CPUs")
@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_layers_keep_their_norms(reshard: bool, tmp_path: Path, calls: Counter[str]) -> None:
    """FSDP2 gathers a layer's weights when it is called, and reduces their gradients when it is done with."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with reference():
        want = run(build(), ids(1, 5))
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), build()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        with triton():
            with torch.no_grad():
                model(ids(1, 5))
            got = run(model, ids(1, 5))
        assert calls == {name: 2 * count for name, count in INSIDE.items()}
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}
        assert_equal(whole, want)
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- compiled
def test_the_whole_model_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    model, tokens = build(), ids(2, 5)
    with reference():
        want = run(model, tokens)
    graphs: list[torch.fx.GraphModule] = []
    with triton():
        compiled = torch.compile(lambda t: model(t, use_cache=False).logits, fullgraph=True, backend=_keeping(graphs))
        model.zero_grad()
        logits = compiled(tokens)
        logits.square().mean().backward()
    torch.testing.assert_close(logits, want["logits"], rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if name in want:
            assert parameter.grad is not None
            assert_equal({name: parameter.grad}, {name: want[name]})
    assert len(graphs) == 1
    used = Counter(str(node.target) for node in graphs[0].graph.nodes if "zaya_hf" in str(node.target))
    assert used == {
        "zaya_hf.residual_merge_norm.default": ALL["merge_norm"],
        "zaya_hf.rms_norm.default": ALL["norm"],
    }


def test_layers_compiled_one_by_one_share_their_graph() -> None:
    """The first has no router state to go on from; all others are the same."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=4))).to(DEVICE).eval()
    tokens, backend = ids(1, 5), _keeping(graphs)
    with torch.no_grad():
        with reference():
            want = model(tokens).logits
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
        with triton():
            got = model(tokens, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2
    assert all("zaya_hf.residual_merge_norm" in graph.code for graph in graphs)


def _keeping(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs, **options)

    return backend
