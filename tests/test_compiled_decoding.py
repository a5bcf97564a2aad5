"""`compile_decoding`: the same logits and texts, a cache that serves any later call, one program for all requests."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from zaya_hf import ZayaForCausalLM
from zaya_hf.cache_growth import SMALLEST_ROOM
from zaya_hf.compiled_decoding import CompiledDecoding
from zaya_hf.ops import selection
from zaya_hf.ops.linear import can_pack
from zaya_hf.testing import random_ids, redraw, tiny_config

PROMPT = 7
#: enough to outgrow the memory of the first step
STEPS = SMALLEST_ROOM + 8
#: so that the products of one token go to oneDNN
WIDE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 1280,
    "num_attention_heads": 8,
    "head_dim": 128,
    "num_experts": 2,
}


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**{"num_hidden_layers": 2, **changes})), seed=3).to(dtype)


class Compiler:
    """A backend that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the rows of every compiled step."""
    done: list[int] = []
    run = CompiledDecoding.__call__

    def spy(self: CompiledDecoding, x: Tensor, *args: Any) -> Any:
        done.append(x.shape[0])
        return run(self, x, *args)

    monkeypatch.setattr(CompiledDecoding, "__call__", spy)
    return done


def cache_of(model: ZayaForCausalLM) -> DynamicCache:
    return DynamicCache(config=model.config)


@torch.no_grad()
def fed(model: ZayaForCausalLM, cache: DynamicCache, ids: Tensor, sizes: list[int], **kwargs: Any) -> Tensor:
    """Logits of `ids`, fed in pieces of these sizes."""
    return torch.cat([model(part, cache=cache, use_cache=True, **kwargs).logits for part in ids.split(sizes, 1)], 1)


@torch.no_grad()
def whole(model: ZayaForCausalLM, ids: Tensor) -> Tensor:
    """Logits of `ids`, fed at once."""
    return model(ids, use_cache=False).logits


def close(got: Tensor, want: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


# ------------------------------------------------------------------------------------------------------ equality
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (1, {}),
        (3, {"attention_bias": True, "cca_time0": 3, "skip_expert": "identity", "clamp_temp": True}),
        (1, {"cca_time0": 1, "cca_time1": 1, "residual_in_fp32": False}),
    ],
    ids=str,
)
def test_steps_equal_a_run_without_a_cache(rows: int, changes: dict[str, Any], steps: list[int]) -> None:
    model, ids = build(**changes), random_ids(rows, PROMPT + STEPS)
    want = whole(model, ids)
    assert model.compile_decoding(backend="aot_eager") is model
    close(fed(model, cache_of(model), ids, [PROMPT] + [1] * STEPS), want)
    assert steps == [rows] * STEPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype, steps: list[int], compiler: Compiler) -> None:
    model, ids = build(dtype), random_ids(2, PROMPT + 6)
    sizes = [PROMPT] + [1] * 6
    want = fed(model, cache_of(model), ids, sizes)
    model.compile_decoding(backend=compiler)
    # Both round to bf16 at the same places, but not their sums: 2 units in the last place of logits up to 16.
    close(fed(model, cache_of(model), ids, sizes), want, atol=0.125 if dtype == torch.bfloat16 else 1e-12)
    assert len(steps) == 6


@pytest.mark.parametrize("pack", [False, True], ids=["fused", "packed"])
def test_fused_and_packed_weights(pack: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    if pack and not can_pack(torch.zeros(8, 8)):
        pytest.skip("this build of torch packs no weights")
    from zaya_hf.ops.linear import packed

    multiplied, run = [], packed.linear
    monkeypatch.setattr(packed, "linear", lambda *a: multiplied.append(1) or run(*a))
    model = build(**WIDE, num_hidden_layers=1)
    ids = random_ids(2, PROMPT + 3)
    want = whole(model, ids)
    model.fuse_for_inference(pack_weights=pack).compile_decoding(backend=compiler)
    cache = cache_of(model)
    got = [fed(model, cache, ids[:, : PROMPT + 1], [PROMPT, 1])]
    multiplied.clear()
    got.append(fed(model, cache, ids[:, PROMPT + 1 :], [1, 1]))
    assert bool(multiplied) == pack
    close(torch.cat(got, 1), want, atol=1e-4 * float(want.abs().max()))  # sums of 1024 and 1280 products
    (graph,) = compiler.graphs
    products = [node for node in graph.graph.nodes if "zaya_hf" in str(node.target)]
    assert len(products) >= 2  # the experts, and at least the fused projection

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    want = whole(copy.deepcopy(model), ids)  # neither fused nor packed
    close(fed(model, cache_of(model), ids, [PROMPT, 1, 1, 1]), want, atol=1e-4 * float(want.abs().max()))
    model.unfuse()
    close(fed(model, cache_of(model), ids, [PROMPT, 1, 1, 1]), want, atol=1e-4 * float(want.abs().max()))


# -------------------------------------------------------------------------------------------------- one program
def test_one_program_across_requests(compiler: Compiler, steps: list[int]) -> None:
    model = build().compile_decoding(backend=compiler)
    for rows, prompt, count in [(1, 5, STEPS), (1, 90, 3), (2, 9, STEPS), (3, 20, 3), (1, 9, 3), (2, 60, 3)]:
        ids = random_ids(rows, prompt + count, seed=prompt)
        close(fed(model, cache_of(model), ids, [prompt] + [1] * count), whole(model, ids))
    assert len(steps) == 2 * STEPS + 12
    assert len(compiler.graphs) == 2  # one row, and several


def test_weights_may_change(compiler: Compiler, steps: list[int]) -> None:
    model, other, ids = build(), redraw(build(), seed=9), random_ids(1, PROMPT + 3)
    sizes = [PROMPT, 1, 1, 1]
    model.compile_decoding(backend=compiler)
    fed(model, cache_of(model), ids, sizes)
    model.load_state_dict(other.state_dict())
    close(fed(model, cache_of(model), ids, sizes), whole(other, ids))
    model.train()
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    model.eval()
    close(fed(model, cache_of(model), ids, sizes), whole(model, ids))
    assert len(steps) == 9
    assert len(compiler.graphs) == 1
    model.double()
    close(fed(model, cache_of(model), ids, sizes), whole(model, ids), atol=1e-12)
    assert len(steps) == 12


def test_too_many_programs_end_it(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = build(), random_ids(1, PROMPT + 3)
    model.compile_decoding(backend=compiler)
    with torch._dynamo.config.patch(recompile_limit=1):
        fed(model, cache_of(model), ids[:, : PROMPT + 1], [PROMPT, 1])
        rows = ids.repeat(2, 1)
        close(fed(model, cache_of(model), rows, [PROMPT, 1, 1, 1]), whole(model, rows))
    assert "compile_decoding" in caplog.text


# --------------------------------------------------------------------------------------------------- the cache
@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    """Compiled once, for all tests that leave it as it is."""
    return build().compile_decoding(backend=Compiler())


def test_a_cache_serves_both_kinds_of_calls(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(2, 40)
    cache = cache_of(model)
    close(fed(model, cache, ids, [5, 1, 1, 6, 1, 1, 1, 3, 1, 20]), whole(model, ids))
    assert cache.get_seq_length() == 40
    assert len(steps) == 6


def test_memory_behind_the_tokens_may_hold_anything(model: ZayaForCausalLM) -> None:
    ids = random_ids(1, 12)
    cache = cache_of(model)
    got = [fed(model, cache, ids[:, :8], [8])]
    for layer in cache.layers:
        for whole_memory in layer.room:
            whole_memory[:, :, 8:] = torch.nan
    got.append(fed(model, cache, ids[:, 8:], [1] * 4))
    close(torch.cat(got, 1), whole(model, ids))


@pytest.mark.parametrize("fork", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))], ids=range(3))
@pytest.mark.parametrize("before", [0, 2])
def test_forks_do_not_disturb_each_other(model: ZayaForCausalLM, fork: Any, before: int) -> None:
    ids = random_ids(2, PROMPT + before + 4)
    others = torch.cat([ids[:, : PROMPT + before], random_ids(2, 4, seed=8)], 1)
    cache = cache_of(model)
    fed(model, cache, ids[:, : PROMPT + before], [PROMPT] + [1] * before)
    forked = fork(cache)
    if fork is copy.copy:  # of a layer too: what a cache of one's own is made of
        forked.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in forked.layers:
            layer.conv_states = dict(layer.conv_states)
        forked.layers[0].history = copy.deepcopy(cache.layers[0].history)
        for layer in forked.layers:
            layer.history = forked.layers[0].history
    parts = [[], []]
    for column in range(PROMPT + before, ids.shape[1]):
        for part, tokens, held in zip(parts, (ids, others), (cache, forked), strict=True):
            part.append(fed(model, held, tokens[:, column : column + 1], [1]))
    for part, tokens in zip(parts, (ids, others), strict=True):
        close(torch.cat(part, 1), whole(model, tokens)[:, PROMPT + before :])


def test_cache_operations_between_steps(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(3, PROMPT + 2)
    cache = cache_of(model)
    fed(model, cache, ids, [PROMPT, 1, 1])
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    rows = ids[order][[0, 0, 2, 2]]
    new = random_ids(4, 3, seed=4)
    close(fed(model, cache, new, [1, 1, 1]), whole(model, torch.cat([rows, new], 1))[:, -3:])
    cache.reset()
    again = random_ids(1, PROMPT + 2, seed=5)
    close(fed(model, cache, again, [PROMPT, 1, 1]), whole(model, again))
    assert steps == [3] * 2 + [4] * 3 + [1] * 2


def test_recording_caches_go_uncompiled_and_can_be_cropped(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(2, PROMPT + 4)
    cache = cache_of(model)
    fed(model, cache, ids[:, : PROMPT + 2], [PROMPT, 1, 1])
    cache.activate_past_recording()
    fed(model, cache, random_ids(2, 3, seed=2), [1, 1, 1])
    cache.crop(-3)
    close(fed(model, cache, ids[:, PROMPT + 2 :], [1, 1]), whole(model, ids)[:, -2:])
    assert len(steps) == 2


def test_inference_mode_and_no_grad_take_turns(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(1, PROMPT + 8)
    cache = cache_of(model)
    got = []
    for number, part in enumerate(ids.split([PROMPT] + [1] * 8, 1)):
        with torch.inference_mode(number % 4 < 2):
            got.append(fed(model, cache, part, [part.shape[1]]).clone())
    close(torch.cat(got, 1), whole(model, ids))
    assert len(steps) == 8


# --------------------------------------------------------------------------------------------------- generating
def test_generated_texts(model: ZayaForCausalLM, steps: list[int]) -> None:
    prompts = random_ids(2, PROMPT)
    settings: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}]

    def texts(model: ZayaForCausalLM) -> list[Tensor]:
        out = []
        for setting in settings:
            torch.manual_seed(0)
            out.append(model.generate(prompts, max_new_tokens=12, min_new_tokens=12, **setting))
        return out

    want = texts(build())
    assert not steps
    for got, expected in zip(texts(model), want, strict=True):
        assert torch.equal(got, expected)
    assert len(steps) == 33


# ------------------------------------------------------------------------------------------ what goes uncompiled
def test_calls_that_are_not_covered(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(2, PROMPT + 1)
    want = whole(model, ids)[:, -1:]
    prompt, last = ids.split([PROMPT, 1], 1)

    def step(**kwargs: Any) -> Any:
        cache = cache_of(model)
        fed(model, cache, prompt, [PROMPT])
        output = model(last, cache=cache, use_cache=True, **kwargs)
        close(output.logits, want)
        return output

    assert step().logits.requires_grad  # grad mode
    with torch.no_grad():
        assert step(output_router_logits=True).router_slots is not None
        assert len(step(output_hidden_states=True).hidden_states) == 3
        padded = torch.tensor([[0] + [1] * PROMPT, [1] * (PROMPT + 1)])
        model(last, cache=fresh_with(model, prompt), attention_mask=padded)
        with selection.use("reference"):
            step()
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
        step()
        hook.remove()
        model.train()
        step()
        model.eval()
        model.set_attn_implementation("eager")
        step()
        model.set_attn_implementation("sdpa")
        assert not steps
        step(output_hidden_states=False)
        step()  # though hidden states were recorded before
        assert len(steps) == 2
        assert len(step(output_hidden_states=True).hidden_states) == 3


@torch.no_grad()
def fresh_with(model: ZayaForCausalLM, prompt: Tensor) -> DynamicCache:
    cache = cache_of(model)
    fed(model, cache, prompt, [PROMPT])
    return cache


def test_padded_rows_go_uncompiled(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(2, PROMPT + 2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = cache_of(model)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache)
        got = [
            model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], cache=cache).logits
            for n in range(PROMPT, PROMPT + 2)
        ]
    close(torch.cat(got, 1), want[:, PROMPT:])
    assert not steps


def test_copies_are_not_compiled(model: ZayaForCausalLM, steps: list[int]) -> None:
    ids = random_ids(1, PROMPT + 1)
    want = fed(model, cache_of(model), ids, [PROMPT, 1])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.model.compiled_decoding is None
        close(fed(copied, cache_of(copied), ids, [PROMPT, 1]), want)
    assert len(steps) == 1
    compiled = model.model.compiled_decoding
    assert model.uncompile_decoding() is model
    close(fed(model, cache_of(model), ids, [PROMPT, 1]), want)
    assert len(steps) == 1
    model.model.compiled_decoding = compiled


def test_exported_programs_hold_no_operator_of_ours() -> None:
    model = build(hidden_size=1024, num_hidden_layers=1, moe_intermediate_size=1280, num_experts=2)
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(model, (random_ids(1, 4),), {"use_cache": False}, strict=strict)
        assert not any("zaya_hf" in str(node.target) for node in program.graph.nodes)


# ---------------------------------------------------------------------------------------------------- refusals
def test_refusals() -> None:
    sliding = build(layer_types=["hybrid", "hybrid_sliding"], sliding_window=4)
    with pytest.raises(ValueError, match="hybrid_sliding"):
        sliding.compile_decoding()
    with pytest.raises(ValueError, match="dynamic, fullgraph cannot be chosen"):
        build().compile_decoding(dynamic=False, fullgraph=False)
    with torch.device("meta"):
        empty = ZayaForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="meta device"):
        empty.compile_decoding()


# -------------------------------------------------------------------------------------------- the real compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_compiler(dtype: torch.dtype, steps: list[int]) -> None:
    model, plain = build(dtype, **WIDE).compile_decoding(), build(dtype, **WIDE)
    sizes = [PROMPT] + [1] * STEPS
    for rows in (1, 2, 3):
        ids = random_ids(rows, PROMPT + STEPS, seed=rows)
        got, want = (fed(m, cache_of(m), ids, sizes) for m in (model, plain))
        close(got, want, atol=float(want.abs().max()) * (0.05 if dtype == torch.bfloat16 else 1e-4))
    assert len(steps) == 3 * STEPS
